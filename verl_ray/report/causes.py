"""Causes for which a run learns nothing, and the form of all rules.

The live warning calls `learns_nothing` with the newest lines after each step; the
report and the end of a run have the same rows in their table (`findings.py`).

Invariant: a pure function of recorded lines and the configuration, so a resumed run
says the same as one that never stopped. What a run did not record leads to no finding.
A rule yields evidence, which is a span of steps with its worst value; what is said of
it follows from its row of the table alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
    history: Sequence[Stint] = ()
    faults: Sequence[Mapping[str, object]] = ()
    """Lines of faults.jsonl."""

    @cached_property
    def steps(self) -> list[Line]:
        """Lines of steps, without that of step 0, which is before the training."""
        return [line for line in self.lines if line[GLOBAL_STEP] >= 1]

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
        """Return a setting and its value, as texts name it; of a section its key."""
        value = self.at(key)
        if value is None or isinstance(value, Mapping):
            return key
        return f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}"


# ------------------------------------------------------------- the form of a rule

WINDOW = 5
"""Steps over which medians are taken, so that no single step is a finding."""


@dataclass(frozen=True)
class Evidence:
    """The steps in which a rule holds, and its worst value there."""

    seen: str
    """What was seen, in words."""
    metric: str
    step: int
    last_step: int
    num_steps: int
    value: float
    threshold: float
    setting: str | None = None
    """Key of the setting to change, where it is not that of the rule."""
    role: str = ""
    """Role that it is about, where a rule tells several apart."""


@dataclass(frozen=True)
class Rule:
    """A row of the table: when something is a finding, and why."""

    kind: str
    severity: Severity
    title: str
    when: str
    """The condition, for the documents."""
    why: str
    """Why the threshold is where it is, with its source."""
    advice: str
    """What to change. A key in braces is replaced by the setting and its value, words
    in braces by the setting that the evidence names."""
    test: Callable[[RunLines], Iterator[Evidence | None]]
    unless: frozenset[str] = frozenset()
    """Kinds of the causes that say the same, and more."""

    def advice_with(self, in_words: Callable[[str], str]) -> str:
        """Return the advice, with what is in braces in these words."""
        return re.sub(r"{(.+?)}", lambda part: in_words(part[1]), self.advice)


def findings_of(run: RunLines, rule: Rule) -> list[Finding]:
    """Return what a rule says of a run."""
    return [_finding(run, rule, evidence) for evidence in rule.test(run) if evidence]


def _finding(run: RunLines, rule: Rule, evidence: Evidence) -> Finding:
    """Return what a rule says of the steps in which it holds."""
    keys = [part for part in re.findall(r"{(.+?)}", rule.advice) if " " not in part]
    setting = evidence.setting or keys[0]
    advice = rule.advice_with(
        lambda part: run.in_words(setting if " " in part else part)
    )
    return Finding(
        f"{rule.kind}/{evidence.role}" if evidence.role else rule.kind,
        rule.severity,
        rule.title,
        f"{evidence.seen}. {advice}",
        evidence.metric,
        evidence.step,
        evidence.value,
        evidence.threshold,
        setting,
        evidence.last_step,
        evidence.num_steps,
    )


def evidence_where(
    series: Series,
    holds: npt.NDArray[np.bool_],
    metric: str,
    threshold: float,
    *,
    below: bool = False,
    setting: str | None = None,
) -> Evidence | None:
    """Return the steps of medians at which a rule holds; None if there are none."""
    if not holds.any():
        return None
    steps = series.steps[holds]
    values = series.values[holds]
    worst = float(values.min() if below else values.max())
    seen = (
        f"{metric} came to {worst:.3g}, {'below' if below else 'above'} {threshold:.3g}"
    )
    first, last = int(steps[0]), int(steps[-1])
    return Evidence(seen, metric, first, last, len(steps), worst, threshold, setting)


def evidence_above(
    run: RunLines, metric: str, threshold: float, setting: str | None = None
) -> Evidence | None:
    """Return where the median over five steps is above a threshold."""
    medians = run.series(metric).medians(WINDOW)
    holds = medians.values > threshold
    return evidence_where(medians, holds, metric, threshold, setting=setting)


def evidence_of(
    lines: Sequence[Line],
    seen: str,
    metric: str,
    value: float,
    threshold: float,
    *,
    setting: str | None = None,
    role: str = "",
) -> Evidence | None:
    """Return what these lines show; None if there are none."""
    if not lines:
        return None
    steps = [int(line[GLOBAL_STEP]) for line in lines]
    first, last = steps[0], steps[-1]
    return Evidence(
        seen, metric, first, last, len(steps), value, threshold, setting, role
    )


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
_HIGHEST = "critic/score/max"
_LOWEST = "critic/score/min"


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
    run = RunLines(lines, config)
    return [finding for cause in CAUSES for finding in findings_of(run, cause)]


def failed_score_counts(line: Line) -> dict[str, int]:
    """Return the number of failed scores of a step by kind, without those of 0."""
    counts = {}
    for health in ScoreHealth:
        count = line.get(health.metric, 0)
        if health is not ScoreHealth.OK and count:
            counts[health.name.lower()] = int(count)
    return counts


def needs_group(run: RunLines) -> bool:
    """Whether advantages compare the responses to a prompt."""
    advantage = ADVANTAGES.get(str(run.at("algorithm.advantage")))
    return advantage is not None and advantage.needs_group


def _in_a_row(run: RunLines, holds: Callable[[Line], bool]) -> list[Line]:
    """Return the lines of steps in which this holds in a row that is long enough."""
    count = min(PATIENCE, run.number("run.total_steps", PATIENCE))
    rows: list[list[Line]] = []
    for line in filter(holds, run.steps):
        if rows and line[GLOBAL_STEP] == rows[-1][-1][GLOBAL_STEP] + 1:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [line for row in rows if len(row) >= count for line in row]


def _examples_per_step(run: RunLines) -> tuple[str, float]:
    """Return the setting of this number and its value; NaN where there is none."""
    for key in _EXAMPLES_KEYS:
        if run.at(key) is not None:
            return key, run.number(key, math.nan)
    return "", math.nan


def _few_examples(run: RunLines) -> Iterator[Evidence | None]:
    key, size = _examples_per_step(run)
    few = [line for line in run.steps if line.get(NUM_EXAMPLES, math.inf) < size]
    count = min((line[NUM_EXAMPLES] for line in few), default=math.nan)
    seen = (
        f"the data hold fewer examples than a step takes: {count:.0f} of {size:.0f}, so"
        " a step has the same ones several times"
    )
    yield evidence_of(few, seen, NUM_EXAMPLES, count, size, setting=key)


def _epoch_per_step(run: RunLines) -> Iterator[Evidence | None]:
    key, size = _examples_per_step(run)
    lines = [line for line in run.steps if line.get(NUM_EXAMPLES) == size]
    seen = (
        f"every step is a whole epoch: the data hold {size:.0f} examples, as many as a"
        " step takes"
    )
    yield evidence_of(lines, seen, NUM_EXAMPLES, size, size, setting=key)


def _mostly_cut(run: RunLines) -> Iterator[Evidence | None]:
    lines = _in_a_row(run, lambda line: line.get(CUT, 0) >= MOSTLY_CUT)
    seen = (
        f"{MOSTLY_CUT:.0%} of the responses or more were cut at the length limit, and"
        " did not end with an answer"
    )
    worst = max((line[CUT] for line in lines), default=math.nan)
    yield evidence_of(lines, seen, CUT, worst, MOSTLY_CUT)


def _has_same_scores(line: Line) -> bool:
    """Whether a step has several scores and all of them are equal."""
    num_scores = line.get(ScoreHealth.OK.metric, 0)
    return num_scores > 1 and line.get(_HIGHEST, math.nan) == line.get(_LOWEST)


def _has_no_spread(run: RunLines, line: Line) -> bool:
    """Whether all groups of a step have equal scores, and that decides advantages."""
    return needs_group(run) and line.get(ZERO_STD) == 1


def _same_scores(run: RunLines) -> Iterator[Evidence | None]:
    if run.at("task") != "rl":
        return
    lines = _in_a_row(run, _has_same_scores)
    score = lines[-1][_HIGHEST] if lines else math.nan
    seen = (
        "all scores are equal, so nothing sets a good response apart from a bad one;"
        f" the last ones were {score:g}"
    )
    yield evidence_of(lines, seen, _HIGHEST, score, score, setting=_graders_key(run))


def _no_spread(run: RunLines) -> Iterator[Evidence | None]:
    if run.at("task") != "rl":
        return
    # Where all scores are equal, this follows.
    lines = _in_a_row(
        run, lambda line: _has_no_spread(run, line) and not _has_same_scores(line)
    )
    seen = (
        "no group had any spread: all responses to a prompt got the same score, so"
        " every advantage is 0"
    )
    yield evidence_of(lines, seen, ZERO_STD, 1.0, 1.0)


def _has_zero_gradient(run: RunLines, metric: str, line: Line) -> bool:
    """Whether the norm of a gradient is 0, and scores do not explain it."""
    is_explained = run.at("task") == "rl" and (
        _has_same_scores(line) or _has_no_spread(run, line)
    )
    return line.get(metric) == 0 and not is_explained


def _zero_gradient(run: RunLines) -> Iterator[Evidence | None]:
    is_rl = run.at("task") == "rl"
    for metric in run.metrics(r"[a-z]\w*/grad_norm"):
        lines = _in_a_row(run, partial(_has_zero_gradient, run, metric))
        role = metric.partition("/")[0]
        seen = (
            f"the gradient of the {role} was exactly 0, so it does not change: no token"
            " had a loss that depends on it"
        )
        setting = _graders_key(run) if is_rl else "data.train_path"
        if is_rl and role == "actor":
            setting = "algorithm.correction.form"
        yield evidence_of(lines, seen, metric, 0.0, 0.0, setting=setting, role=role)


def _failed_scores(run: RunLines) -> Iterator[Evidence | None]:
    failing = [line for line in run.steps if failed_score_counts(line)]
    counts: Counter[str] = Counter()
    for line in failing:
        counts.update(failed_score_counts(line))
    if not counts:
        return

    num_failed = counts.total()
    num_scores = sum(line.get(ScoreHealth.OK.metric, 0) for line in run.steps)
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    limits = [run.in_words(f"{key}.max_failed_fraction") for key in _grader_keys(run)]
    seen = (
        f"{num_failed / (num_failed + num_scores):.1%} of the scores failed ({kinds}),"
        f" and their responses were not learned from. The run stops above"
        f" {', '.join(limits)}"
    )
    commonest = max(counts, key=lambda kind: counts[kind])
    metric = f"reward_health/{commonest}"
    worst = max(line.get(metric, 0.0) for line in failing)
    yield evidence_of(failing, seen, metric, worst, 0.0, setting=_graders_key(run))


def _graders_key(run: RunLines) -> str:
    """Return the key of the section that holds every grader."""
    has_several = isinstance(run.at("reward.components"), Mapping)
    return "reward.components" if has_several else "reward"


def _grader_keys(run: RunLines) -> list[str]:
    """Return the keys of the sections of all graders."""
    components = run.at("reward.components")
    if isinstance(components, Mapping):
        return [f"reward.components.{name}" for name in components]
    return ["reward"]


CAUSES = (
    Rule(
        "few_examples",
        "warning",
        "A step takes the same examples several times",
        "the data hold fewer examples than a step takes",
        "copies cost time, and say nothing new",
        "Use more data, or lower {the number of examples of a step}",
        _few_examples,
    ),
    Rule(
        "epoch_per_step",
        "warning",
        "Every step is a whole epoch",
        "the data hold as many examples as a step takes",
        "a model that always sees the same examples learns them by heart",
        "Lower {the number of examples of a step}, or use more data",
        _epoch_per_step,
    ),
    Rule(
        "mostly_cut",
        "critical",
        "Nearly all responses are cut",
        f"{MOSTLY_CUT:.0%} of the responses or more are cut in {PATIENCE} steps in a"
        " row",
        "a response without its answer scores as a wrong one, and few others remain",
        "Raise {rollout.max_response_tokens}, or use a model that ends its responses",
        _mostly_cut,
    ),
    Rule(
        "same_scores",
        "critical",
        "All scores are equal",
        f"all scores of a step are equal, in {PATIENCE} steps in a row",
        "nothing sets a good response apart from a bad one",
        "Look at the responses and at {what scores}: it may never find the answer, or"
        " always; or choose problems that are neither too hard nor too easy",
        _same_scores,
    ),
    Rule(
        "no_spread",
        "critical",
        "No group has any spread",
        f"in all groups all scores are equal, in {PATIENCE} steps in a row, and"
        " advantages compare the members of a group",
        "every advantage is 0",
        "Raise {rollout.temperature} or {rollout.group_size}, or choose problems that"
        " are neither too hard nor too easy",
        _no_spread,
    ),
    Rule(
        "zero_gradient",
        "critical",
        "A model does not change",
        f"the norm of a gradient is exactly 0 in {PATIENCE} steps in a row, and scores"
        " do not explain it",
        "terms that differ do not add up to 0 to the last bit",
        "Look at {what decides its loss}",
        _zero_gradient,
    ),
    Rule(
        FAILED_SCORES,
        "warning",
        "Graders fail",
        "a score failed",
        "its response is not learned from",
        "Look at the logs and at {what scores}",
        _failed_scores,
    ),
)
"""Why nothing is learned, and the failed scores. The table of all rules begins so."""
