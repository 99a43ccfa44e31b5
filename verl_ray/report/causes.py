"""Causes for which a run learns nothing, and what all findings are made of.

The live warning calls `learns_nothing` with the newest lines after each step; the
report and the end of a run call it with all of them (`findings.py`).

Invariant: a pure function of recorded lines and the configuration, so a resumed run
says the same as one that never stopped. What a run did not record leads to no finding.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.rewards.health import ScoreHealth
from verl_ray.tracking.base import GLOBAL_STEP
from verl_ray.tracking.history import Stint

Line = Mapping[str, float]
Severity = Literal["critical", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """A fault that the record shows, and the steps in which it was seen."""

    kind: str
    """Short name, by which findings of several calls are told apart."""

    severity: Severity
    """`critical` where the run is lost or learns nothing, `note` where it only costs
    time."""

    title: str
    text: str
    """What was seen, what it means and which key to change, without the steps."""

    metric: str
    """Name of the metric that shows it; that of a file where no metric does."""
    step: int
    """The first step with it."""
    value: float
    """Worst value of the metric, or of its median over steps."""
    threshold: float
    """Value from which on this is a finding."""
    setting: str
    """Dotted key of the setting to change; empty if there is none."""
    last_step: int
    num_steps: int
    """Number of steps with it, from the first to the last."""

    def __str__(self) -> str:
        """Return the text, and the steps that it is about."""
        if self.num_steps == 1:
            return f"{self.text} (step {self.step})"
        steps = f"{self.num_steps} steps, {self.step} to {self.last_step}"
        return f"{self.text} ({steps})"


# ------------------------------------------------------------------ the record of a run


Numbers = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Series:
    """The recorded values of a metric, without those that are not finite."""

    steps: Steps
    values: Numbers

    def __len__(self) -> int:
        return len(self.steps)

    def medians(self, window: int) -> Series:
        """Return the medians over `window` values, at the step in their middle.

        A series that is shorter has none.
        """
        if len(self) < window:
            return Series(self.steps[:0], self.values[:0])
        windows = np.lib.stride_tricks.sliding_window_view(self.values, window)
        middle = window // 2
        steps = self.steps[middle : middle + len(windows)]
        return Series(steps, np.median(windows, axis=1))

    def noise(self, window: int) -> float:
        """Return the spread of single values around these medians.

        It is the median absolute deviation times 1.4826, which is the standard
        deviation of normal noise, however large some of the values are.
        """
        medians = self.medians(window).values
        middle = window // 2
        apart = np.abs(self.values[middle : middle + len(medians)] - medians)
        return 1.4826 * float(np.median(apart)) if len(apart) else math.nan


@dataclass(frozen=True)
class RunLines:
    """Lines, settings and processes of a run, as the rules read them."""

    lines: Sequence[Line]
    config: Mapping[str, object]
    history: Sequence[Stint]

    def series(self, metric: str, of_steps: bool = True) -> Series:
        """Return the values of a metric.

        Args:
            metric: Its name.
            of_steps: Whether to leave out step 0, which is before the training.
        """
        points = [
            (line[GLOBAL_STEP], line[metric])
            for line in self.lines
            if metric in line and line[GLOBAL_STEP] >= of_steps
        ]
        table = np.array(points, np.float64).reshape(-1, 2)
        table = table[np.isfinite(table[:, 1])]
        return Series(table[:, 0].astype(np.int64), table[:, 1])

    def total(self, metrics: Sequence[str]) -> Series:
        """Return the sums of metrics, over the steps that have any of them."""
        parts = [self.series(metric) for metric in metrics]
        sums: dict[int, float] = {}
        for part in parts:
            for step, value in zip(part.steps.tolist(), part.values, strict=True):
                sums[step] = sums.get(step, 0.0) + value
        steps = sorted(sums)
        values = [sums[step] for step in steps]
        return Series(np.array(steps, np.int64), np.array(values, np.float64))

    def metrics(self, pattern: str) -> list[str]:
        """Return the names of the metrics that match a regular expression."""
        return [name for name in self._names if re.fullmatch(pattern, name)]

    @cached_property
    def _names(self) -> list[str]:
        """Names of all metrics, sorted."""
        return sorted({name for line in self.lines for name in line})

    def at(self, key: str) -> object:
        """Return the value of a setting; None where the configuration lacks it."""
        node: object = self.config
        for part in key.split("."):
            if not isinstance(node, Mapping):
                return None
            node = node.get(part)
        return node

    def number(self, key: str, otherwise: float) -> float:
        """Return the value of a setting that is a number."""
        value = self.at(key)
        if isinstance(value, int | float):
            return float(value)
        return otherwise

    def in_words(self, key: str) -> str:
        """Return a setting and its value, as texts name it."""
        value = self.at(key)
        if value is None:
            return key
        return f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}"


# ------------------------------------------------------------ a run that learns nothing

PATIENCE = 3
"""Steps in a row after which a run that learns nothing says so."""

ZERO_STD = "frac_reward_zero_std"
"""Share of the groups without any spread, under the name that TRL gives it."""
NUM_EXAMPLES = "training/num_examples"
"""Number of prompts, rows or pairs in the training data."""

MOSTLY_CUT = 0.9
"""Share of the responses that are cut, from which on a run says so."""
CUT = "response_length/clip_ratio"

FAILED_SCORES = "failed_scores"
"""Kind of a finding that does not mean that nothing is learned."""

_EXAMPLES_KEYS = ("data.prompts_per_step", "sft.batch_size", "preference.batch_size")
"""Number of examples per step, by task."""


def learns_nothing(
    lines: Sequence[Line], config: Mapping[str, object]
) -> list[Finding]:
    """Return why the run learns nothing, and which scores failed.

    A cause counts where it holds in three steps in a row, or in every step of a shorter
    run. What the data alone decide counts from the first step.

    Args:
        lines: Lines of metrics.jsonl, in the order of their steps.
        config: The configuration of the run as a tree of plain values.
    """
    run = RunLines(lines, config, ())
    steps = [line for line in lines if line[GLOBAL_STEP] >= 1]
    causes = [_data_finding(run, steps), _mostly_cut(run, steps)]

    # A step has the first of these causes that holds: the later ones follow from it.
    explained: set[float] = set()
    for cause in _causes(run):
        matching = [
            line
            for line in steps
            if line[GLOBAL_STEP] not in explained and cause.holds(line)
        ]
        explained |= {line[GLOBAL_STEP] for line in matching}
        causes.append(_of_lines(cause.finding, _in_a_row(run, matching)))

    causes.append(_failed_scores(run, steps))
    return [finding for finding in causes if finding is not None]


def failed_score_counts(line: Line) -> dict[str, int]:
    """Return the number of failed scores of a step by kind, without those of 0."""
    counts = {}
    for health in ScoreHealth:
        count = line.get(health.metric, 0)
        if health is not ScoreHealth.OK and count:
            counts[health.name.lower()] = int(count)
    return counts


def _draft(
    kind: str,
    severity: Severity,
    title: str,
    text: str,
    metric: str,
    value: float,
    threshold: float,
    setting: str,
) -> Finding:
    """Return a finding whose steps `_of_lines` fills in."""
    return Finding(
        kind, severity, title, text, metric, 0, value, threshold, setting, 0, 0
    )


def _of_lines(draft: Finding, lines: Sequence[Line]) -> Finding | None:
    if not lines:
        return None
    numbers = [int(line[GLOBAL_STEP]) for line in lines]
    return replace(
        draft, step=numbers[0], last_step=numbers[-1], num_steps=len(numbers)
    )


def _in_a_row(run: RunLines, lines: Sequence[Line]) -> list[Line]:
    """Return the lines of steps that stand in a row which is long enough."""
    count = min(PATIENCE, run.number("run.total_steps", PATIENCE))
    rows: list[list[Line]] = []
    for line in lines:
        if rows and line[GLOBAL_STEP] == rows[-1][-1][GLOBAL_STEP] + 1:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [line for row in rows if len(row) >= count for line in row]


def _data_finding(run: RunLines, steps: Sequence[Line]) -> Finding | None:
    """Return what is wrong with the number of examples, which no step changes."""
    sizes = {key: run.at(key) for key in _EXAMPLES_KEYS if run.at(key) is not None}
    if not sizes:
        return None

    key = next(iter(sizes))
    size = int(run.number(key, 0))
    few = [line for line in steps if line.get(NUM_EXAMPLES, math.inf) <= size]
    if not few:
        return None

    count = int(few[-1][NUM_EXAMPLES])
    kind = "few_examples"
    title = "A step takes the same examples several times"
    text = (
        f"the data hold fewer examples than a step takes: {count} of"
        f" {key} = {size}, so a step has the same ones several times."
        f" Use more data, or lower {key}"
    )
    if count == size:
        kind = "epoch_per_step"
        title = "Every step is a whole epoch"
        text = (
            f"every step is a whole epoch: the data hold {count} examples, as many as a"
            f" step takes. Lower {key} = {size}, or use more data"
        )
    draft = _draft(kind, "warning", title, text, NUM_EXAMPLES, count, size, key)
    return _of_lines(draft, few)


def _mostly_cut(run: RunLines, steps: Sequence[Line]) -> Finding | None:
    """Return that responses are too long, which other causes may follow from."""
    cut = [line for line in steps if line.get(CUT, 0) >= MOSTLY_CUT]
    lines = _in_a_row(run, cut)
    key = "rollout.max_response_tokens"
    text = (
        f"{MOSTLY_CUT:.0%} of the responses or more were cut at the length limit, and"
        f" did not end with an answer. Raise {run.in_words(key)}, or use a model that"
        " ends its responses"
    )
    worst = max((line[CUT] for line in lines), default=math.nan)
    title = "Nearly all responses are cut"
    draft = _draft("mostly_cut", "critical", title, text, CUT, worst, MOSTLY_CUT, key)
    return _of_lines(draft, lines)


@dataclass(frozen=True)
class _Cause:
    """A cause that a single line shows."""

    holds: Callable[[Line], bool]
    finding: Finding


def _causes(run: RunLines) -> list[_Cause]:
    """Return the causes of this run's task; the later ones follow from the others."""
    causes: list[_Cause] = []
    if run.at("task") == "rl":
        causes += _reward_causes(run)
    for metric in run.metrics(r"[a-z]\w*/grad_norm"):
        role = metric.partition("/")[0]
        text = (
            f"the gradient of the {role} was exactly 0, so it does not change: no token"
            " had a loss that depends on it"
        )
        kind = f"zero_gradient/{role}"
        title = f"The {role} does not change"
        draft = _draft(kind, "critical", title, text, metric, 0.0, 0.0, "")
        causes.append(_Cause(_equals(metric, 0), draft))
    return causes


def _reward_causes(run: RunLines) -> list[_Cause]:
    sources = ", ".join(_grader_keys(run))
    text = (
        "all scores are equal, so nothing sets a good response apart from a bad"
        f" one. Look at the responses and at what scores ({sources}): it may never find"
        " the answer, or always; or choose problems that are neither too hard nor"
        " too easy"
    )
    title = "All scores are equal"
    draft = _draft(
        "same_scores",
        "critical",
        title,
        text,
        "critic/score/max",
        0,
        0,
        _grader_keys(run)[0],
    )
    causes = [_Cause(_same_scores, draft)]

    if needs_group(run):
        temperature = "rollout.temperature"
        text = (
            "no group had any spread: all responses to a prompt got the same score, so"
            f" every advantage is 0. Raise {run.in_words(temperature)} or"
            f" {run.in_words('rollout.group_size')}, or choose problems that are"
            " neither too hard nor too easy"
        )
        title = "No group has any spread"
        draft = _draft(
            "no_spread", "critical", title, text, ZERO_STD, 1, 1, temperature
        )
        causes.append(_Cause(_equals(ZERO_STD, 1), draft))
    return causes


def _grader_keys(run: RunLines) -> list[str]:
    """Return the keys of the sections of all graders."""
    components = run.at("reward.components")
    if isinstance(components, Mapping):
        return [f"reward.components.{name}" for name in components]
    return ["reward"]


def needs_group(run: RunLines) -> bool:
    """Whether advantages compare the responses to a prompt."""
    advantage = ADVANTAGES.get(str(run.at("algorithm.advantage")))
    return advantage is not None and advantage.needs_group


def _equals(name: str, value: float) -> Callable[[Line], bool]:
    return lambda line: line.get(name) == value


def _same_scores(line: Line) -> bool:
    """Whether a step has several scores and all of them are equal."""
    highest = line.get("critic/score/max", math.nan)
    num_scores = line.get(ScoreHealth.OK.metric, 0)
    return num_scores > 1 and highest == line.get("critic/score/min")


def _failed_scores(run: RunLines, steps: Sequence[Line]) -> Finding | None:
    """Return how many scores failed over all steps."""
    failing = [line for line in steps if failed_score_counts(line)]
    counts: Counter[str] = Counter()
    for line in failing:
        counts.update(failed_score_counts(line))

    num_failed = counts.total()
    num_scores = num_failed + sum(line.get(ScoreHealth.OK.metric, 0) for line in steps)
    if not num_failed:
        return None

    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    limits = [f"{key}.max_failed_fraction" for key in _grader_keys(run)]
    text = (
        f"{num_failed / num_scores:.1%} of the scores failed ({kinds}), and their"
        " responses were not learned from. The run stops above"
        f" {', '.join(map(run.in_words, limits))}"
    )
    commonest = max(counts, key=lambda kind: counts[kind])
    draft = _draft(
        FAILED_SCORES,
        "warning",
        "Graders fail",
        text,
        f"reward_health/{commonest}",
        num_failed / num_scores,
        0.0,
        _grader_keys(run)[0],
    )
    return _of_lines(draft, failing)
