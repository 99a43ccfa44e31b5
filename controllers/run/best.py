"""The best evaluation of a run, which decides what is kept and when the run may stop.

Invariant: it follows from the evaluations of finished steps alone, one after another,
and is part of every checkpoint. So a resumed run knows the same best step as a run that
was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem
from verl_ray.tracking.base import GLOBAL_STEP
from verl_ray.tracking.comparison import is_lower_better

# Prefix of the names of metrics on held-out rows.
_HELD_OUT = "val-"


class BestEvaluation:
    """Follows the held-out metric of a run and knows its best value so far."""

    def __init__(self, config: Config, saved: Mapping[str, Any] | None) -> None:
        """Begin with the best evaluation of a checkpoint.

        Args:
            config: Configuration of the run.
            saved: `state()` from the checkpoint that the run continues from; None if
                there is none. It is left aside if the metric is another one now.
        """
        run = config.run
        self._early_stop = run.early_stop
        self._is_chosen = run.best_metric is not None

        metric = run.best_metric or config.main_metric
        best_is = run.best_is
        if best_is is None:
            best_is = "lowest" if is_lower_better(metric) else "highest"
        self._identity = {"metric": metric, "best_is": best_is}

        self.step: int | None = None
        """Step of the best evaluation; 0 for the one before the first step."""

        self.value = math.nan
        """Value of the metric at that step."""

        # The metric as the evaluation names it, if it is a single one.
        self._name = metric
        self._evaluations_since = 0
        self._last_step = -1

        if saved is not None and self._identity.items() <= saved.items():
            self.step = saved["step"]
            self.value = saved["value"]
            self._name = saved["name"]
            self._evaluations_since = saved["evaluations_since"]
            self._last_step = saved["last_step"]

    def refuse_missing(self, metrics: Mapping[str, float]) -> None:
        """Check that an evaluation has the metric, if a setting needs it.

        Raises:
            ConfigError: It has no metric of this name.
        """
        is_needed = self._is_chosen or self._early_stop is not None
        if not is_needed or self._names_in(metrics):
            return

        held_out = sorted(name for name in metrics if name.startswith(_HELD_OUT))
        rule = "the evaluation has no such metric"
        fix = f"It has {', '.join(held_out) or 'none on held-out rows'}."
        raise ConfigError(
            [Problem("run.best_metric", self._identity["metric"], rule, fix)]
        )

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the evaluation of a finished step into account.

        Args:
            step: Number of the step.
            metrics: Metrics of the step, those on held-out rows included.
        """
        # A resumed run evaluates a step again if its line was not written.
        if step <= self._last_step:
            return

        self._last_step = step
        value = self.value_in(metrics)
        if self.is_worse_than(value):
            names = self._names_in(metrics)
            self.step = step
            self.value = value
            self._name = names[0] if len(names) == 1 else self._identity["metric"]
            self._evaluations_since = 0
        else:
            self._evaluations_since += 1

    def value_in(self, metrics: Mapping[str, float]) -> float:
        """Return the value of the metric in an evaluation; NaN where it has none."""
        values = [metrics[name] for name in self._names_in(metrics)]
        return sum(values) / len(values) if values else math.nan

    @property
    def name(self) -> str:
        """The metric as evaluations name it, or its pattern if there are several."""
        return self._name

    @property
    def is_exhausted(self) -> bool:
        """Whether run.early_stop evaluations in a row have brought no improvement."""
        if self._early_stop is None or self.step is None:
            return False
        return self._evaluations_since >= self._early_stop

    def state(self) -> dict[str, Any] | None:
        """Return the part of a checkpoint's state, as JSON; None without a best."""
        if self.step is None:
            return None
        return {
            **self._identity,
            "step": self.step,
            "value": self.value,
            "name": self._name,
            "evaluations_since": self._evaluations_since,
            "last_step": self._last_step,
        }

    def in_words(self) -> str | None:
        """Return the best step and its value; None if there is none."""
        if self.step is None:
            return None
        return f"step {self.step}, by {self._name} {self.value:.4g}"

    def early_stop_in_words(self) -> str | None:
        """Return why the run ended before its last step; None if it did not."""
        if not self.is_exhausted:
            return None

        noun = "evaluation" if self._evaluations_since == 1 else "evaluations"
        return (
            f"stopped early at step {self._last_step}, after"
            f" {self._evaluations_since} {noun} without improvement (run.early_stop);"
            f" best {self.in_words()}"
        )

    def is_worse_than(self, value: float) -> bool:
        """Whether a value of the metric is better than the best so far."""
        # A value that is not a number is never the best one.
        if not math.isfinite(value):
            return False
        if self.step is None:
            return True
        if self._identity["best_is"] == "lowest":
            return value < self.value
        return value > self.value

    def _names_in(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the names of the metrics that are meant, which may be none."""
        pattern = self._identity["metric"]
        # A name may hold characters that mean something in a pattern.
        if pattern in metrics:
            return [pattern]
        return [
            name
            for name in metrics
            if name.startswith(_HELD_OUT) and fnmatchcase(name, pattern)
        ]


def held_out_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those metrics that an evaluation on held-out rows has measured."""
    return {
        name: value for name, value in metrics.items() if name.startswith(_HELD_OUT)
    }


def evaluations_of(lines: Sequence[Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Return the metrics of each evaluation of a run, by its step."""
    # Only the lines of evaluated steps have such metrics.
    evaluations = {}
    for line in lines:
        evaluation = held_out_metrics(line)
        if evaluation:
            evaluations[int(line[GLOBAL_STEP])] = evaluation
    return evaluations


def best_of(
    config: Config, evaluations: Mapping[int, Mapping[str, float]]
) -> BestEvaluation:
    """Return the best of all evaluations of a run, given by their steps."""
    best = BestEvaluation(config, None)
    for step, metrics in sorted(evaluations.items()):
        best.note(step, metrics)
    return best
