"""The arguments that the Python calls take, and the results that they return.

Invariant: nothing that works is imported for a type, since a file that names one may
also be imported for its rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_ray.tracking.history import Ending

Metrics = dict[str, float]
"""Values of one step, by the names of docs/metrics.md."""

Data = str | Path | Iterable[Mapping[str, Any]] | Sequence[str | Path]
"""A path or id, several of them, sets with weights, or rows as dicts.

A `datasets.Dataset` and a list of dicts are rows. They are written to the folder of the
run, so that it can be resumed.
"""

RewardFunction = str | Callable[..., Any] | Mapping[str, Any]
"""A built-in name, `file.py:function`, a function or class, or a table of a name and
its arguments, as in `{"function": "rouge", "stem": True}`."""

Reward = str | Callable[..., Any] | Mapping[str, RewardFunction]
"""A name, a function or a class, or a dict of these and of tables by data source."""

Overrides = Mapping[str, Any] | Sequence[str]
"""Settings by key, nested or dotted, or texts as on the command line."""


@dataclass(frozen=True)
class RunRequest:
    """The arguments that all calls have in common, as `train` explains them."""

    config_name: str
    _: KW_ONLY
    model: str | Path | None = None
    data: Data | None = None
    validation_data: Data | None = None
    reward: Reward | None = None
    name: str | None = None
    run_dir: str | Path | None = None
    overrides: Overrides | None = None
    config_dir: str | Path | None = None


@dataclass(frozen=True, kw_only=True)
class CheckRequest(RunRequest):
    """The arguments of `check`."""

    machine: str | None = None


@dataclass(frozen=True)
class Result:
    """A run as its record shows it.

    Attributes:
        state: How it ended; `stopped` stands for an interrupt, and for a run that was
            closed before its last step.
        steps: Number of finished steps.
        folder: The run's folder, with config.yaml, metrics.jsonl and report.txt.
        checkpoint: Folder of the newest checkpoint; None where none was written.
        best_step: Evaluated step with the best held-out metric (run.best_metric); 0 is
            the model before training, None stands for no evaluation.
        evaluations: Held-out metrics of each evaluated step.
        history: Line of metrics.jsonl of each step, in order. Line 0 is the evaluation
            before the first step.
        exit_code: What the command would return: 1 for a run that did not reach the
            gain that it promised (prepare.min_gain), else 0.
    """

    state: Ending
    steps: int
    folder: Path
    checkpoint: Path | None
    best_step: int | None
    evaluations: dict[int, Metrics] = field(repr=False)
    history: list[Metrics] = field(repr=False)
    exit_code: int = 0

    @property
    def metrics(self) -> Metrics:
        """Metrics of the last step; empty where there is none."""
        return self.history[-1] if self.history else {}

    @property
    def final(self) -> Metrics:
        """Held-out metrics of the last evaluation; empty where there is none."""
        if not self.evaluations:
            return {}
        return self.evaluations[max(self.evaluations)]

    @property
    def best(self) -> Metrics:
        """Held-out metrics of the best step; empty where there is none."""
        return {} if self.best_step is None else self.evaluations[self.best_step]


@dataclass(frozen=True)
class Measurement:
    """A single evaluation.

    Attributes:
        step: Finished steps of the checkpoint; 0 for a model.
        metrics: Held-out metrics.
        folder: Folder with metrics, scores and every response.
    """

    step: int
    metrics: Metrics
    folder: Path


class Stopped(KeyboardInterrupt):
    """A run was interrupted, and its last finished step is saved.

    It is a KeyboardInterrupt, so that no `except Exception` swallows it and that "Run
    all" in a notebook goes no further.

    Attributes:
        result: The run as far as it came; None where it had not begun.
    """

    def __init__(self, message: str, result: Result | None = None) -> None:
        super().__init__(message, result)
        self.message = message
        self.result = result

    def __str__(self) -> str:
        return self.message

    def _render_traceback_(self) -> list[str]:
        """Return the line that IPython shows in place of a traceback."""
        return [f"KeyboardInterrupt: {self.message}"]
