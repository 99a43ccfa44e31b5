"""Evidence in the record of a run: the form of the rules, and what they compute with.

Invariant: a pure function of recorded lines and the configuration, so a resumed run
says the same as one that never stopped. What a run did not record is no evidence. A
rule yields evidence, which is a span of steps with its worst value; what is said of it
follows from its row of the table alone. Thresholds stand with the rules, in
`findings.py`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from verl_ray.agents.contract import End
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.report.lines import Line, MainMetric, RunLines, Series
from verl_ray.rewards.health import ScoreHealth
from verl_ray.tracking.base import GLOBAL_STEP
from verl_ray.tracking.held_out_names import ACCURACY, ScoreName
from verl_ray.tracking.history import FAULTS, HISTORY

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


# ------------------------------------------------------------------ the form of a rule

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


def medians_above(
    metric: str, threshold: float
) -> Callable[[RunLines], Iterator[Evidence | None]]:
    """Return the test of a rule: whether a median is above a threshold."""
    return lambda run: iter([evidence_above(run, metric, threshold)])


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


# ----------------------------------------------------------------- scores and examples

HIGHEST = "critic/score/max"
LOWEST = "critic/score/min"
NUM_EXAMPLES = "training/num_examples"
"""Number of prompts, rows or pairs in the training data."""
ZERO_STD = "frac_reward_zero_std"
"""Share of the groups without any spread, under the name that TRL gives it."""


def needs_group(run: RunLines) -> bool:
    """Whether advantages compare the responses to a prompt."""
    advantage = ADVANTAGES.get(str(run.at("algorithm.advantage")))
    return advantage is not None and advantage.needs_group


def number_of_scores(line: Line) -> int:
    """Return how many scores of a step did not fail."""
    return _whole(line.get(ScoreHealth.OK.metric, 0))


def failed_score_counts(line: Line) -> dict[str, int]:
    """Return the number of failed scores of a step by kind, without those of 0."""
    counts = {
        health.name.lower(): _whole(line.get(health.metric, 0))
        for health in ScoreHealth
        if health.is_failure
    }
    return {kind: count for kind, count in counts.items() if count}


def _whole(count: float) -> int:
    return int(count) if math.isfinite(count) else 0


def graders_key(run: RunLines) -> str:
    """Return the key of the section that holds every grader."""
    has_several = isinstance(run.at("reward.components"), Mapping)
    return "reward.components" if has_several else "reward"


def _grader_keys(run: RunLines) -> list[str]:
    """Return the keys of the sections of all graders."""
    components = run.at("reward.components")
    if isinstance(components, Mapping):
        return [f"reward.components.{name}" for name in components]
    return ["reward"]


def lowest_score(run: RunLines) -> float:
    """Return the score of the worst responses, the median over steps; NaN for none."""
    values = run.series(LOWEST).values
    return float(np.median(values)) if len(values) else math.nan


def has_same_scores(line: Line) -> bool:
    """Whether a step has several scores and all of them are equal."""
    is_equal = line.get(HIGHEST, math.nan) == line.get(LOWEST)
    return is_equal and number_of_scores(line) > 1


def has_no_spread(run: RunLines, line: Line) -> bool:
    """Whether all groups of a step have equal scores, and that decides advantages."""
    return needs_group(run) and line.get(ZERO_STD) == 1


def failed_scores(run: RunLines) -> Iterator[Evidence | None]:
    """Yield the steps in which scores failed."""
    failing = [line for line in run.steps if failed_score_counts(line)]
    counts: Counter[str] = Counter()
    for line in failing:
        counts.update(failed_score_counts(line))
    if not counts:
        return

    num_failed = counts.total()
    num_scores = sum(map(number_of_scores, run.steps))
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    limits = [run.in_words(f"{key}.max_failed_fraction") for key in _grader_keys(run)]
    seen = (
        f"{num_failed / (num_failed + num_scores):.1%} of the scores failed ({kinds}),"
        f" and their responses were not learned from. The run stops above"
        f" {', '.join(limits)}"
    )
    commonest = max(counts, key=lambda kind: counts[kind])
    metric = f"reward_health/{commonest}"
    worst = float(run.series(metric).values.max())
    yield evidence_of(failing, seen, metric, worst, 0.0, setting=graders_key(run))


_EXAMPLES_KEYS = ("data.prompts_per_step", "sft.batch_size", "preference.batch_size")
"""Number of examples per step, by task."""


def _examples_per_step(run: RunLines) -> tuple[str, float]:
    """Return the setting of this number and its value; NaN where there is none."""
    for key in _EXAMPLES_KEYS:
        if run.at(key) is not None:
            return key, run.number(key, math.nan)
    return "", math.nan


def few_examples(run: RunLines) -> Iterator[Evidence | None]:
    """Yield the steps for which the data hold too few examples."""
    key, size = _examples_per_step(run)
    few = [line for line in run.steps if line.get(NUM_EXAMPLES, math.inf) < size]
    count = min((line[NUM_EXAMPLES] for line in few), default=math.nan)
    seen = (
        f"the data hold fewer examples than a step takes: {count:.0f} of {size:.0f}, so"
        " a step has the same ones several times"
    )
    yield evidence_of(few, seen, NUM_EXAMPLES, count, size, setting=key)


def epoch_per_step(run: RunLines) -> Iterator[Evidence | None]:
    """Yield the steps that take every example once."""
    key, size = _examples_per_step(run)
    lines = [line for line in run.steps if line.get(NUM_EXAMPLES) == size]
    seen = (
        f"every step is a whole epoch: the data hold {size:.0f} examples, as many as a"
        " step takes"
    )
    yield evidence_of(lines, seen, NUM_EXAMPLES, size, size, setting=key)


def steps_in_a_row(
    run: RunLines, patience: int, holds: Callable[[Line], bool]
) -> list[Line]:
    """Return the lines of steps in which this holds in a row that is long enough.

    Args:
        run: The record.
        patience: Steps of such a row, or all of a run that is to make fewer.
        holds: Whether it holds in a step.
    """
    count = min(patience, run.number("run.total_steps", patience))
    rows: list[list[Line]] = []
    for line in filter(holds, run.steps):
        if rows and line[GLOBAL_STEP] == rows[-1][-1][GLOBAL_STEP] + 1:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [line for row in rows if len(row) >= count for line in row]


# ---------------------------------------------------------- held-out metrics and losses


@dataclass(frozen=True)
class Decline:
    """A held-out metric from its best evaluation on, where the last two are worse."""

    evidence: Evidence
    """The evaluations that are worse than the limit."""

    first: int
    """Step of the best evaluation."""
    last: int
    """Step of the last one."""


def decline_of(
    run: RunLines, metric: str, tolerance: Callable[[float, float], float]
) -> Decline | None:
    """Return the decline of a held-out metric; None if its last two values show none.

    Args:
        run: The record.
        metric: A held-out metric.
        tolerance: How much worse counts, from the best value and the last ones' mean.
    """
    evaluations = run.series(metric, steps_only=False)
    should_fall = MainMetric.of(run.config).should_fall(metric)
    sign = -1.0 if should_fall else 1.0
    if len(evaluations) < 3:
        return None
    best = int(np.argmax(sign * evaluations.values))
    since = Series(evaluations.steps[best:], evaluations.values[best:])
    if len(since) < 3:
        return None

    best_value = float(since.values[0])
    limit = best_value - sign * tolerance(best_value, float(since.values[-2:].mean()))
    is_worse = sign * since.values < sign * limit
    if not is_worse[-2:].all():
        return None
    evidence = evidence_where(since, is_worse, metric, limit, below=not should_fall)
    assert evidence is not None
    return Decline(evidence, int(since.steps[0]), int(since.steps[-1]))


@dataclass(frozen=True)
class HeldOutScale:
    """Bounds of what a held-out metric is the mean of, and of how many problems."""

    lowest: float
    highest: float
    num_problems: float

    def fall_by_chance(self, level: float, best: float, last: float) -> float:
        """Return how far the mean falls by chance, with the probability `level`.

        Args:
            level: The probability.
            best: Mean of one evaluation.
            last: Mean of a later one.
        """
        mean = (best + last) / 2
        # No values within bounds vary more than those that lie on them (Bhatia and
        # Davis, 2000).
        variance = max(0.0, (mean - self.lowest) * (self.highest - mean))
        error = math.sqrt(2 * variance / self.num_problems)
        return NormalDist().inv_cdf(1 - level) * error


def held_out_scales(run: RunLines) -> dict[str, HeldOutScale]:
    """Return the main held-out metrics by name, of those whose scale is known.

    Accuracies lie between 0 and 1, and a mean reward between the lowest and the highest
    score in training where the same graders score held-out problems.
    """
    main = MainMetric.of(run.config)
    scales = {}
    for name in filter(main.is_meant, run.metrics("val-.+")):
        parts = ScoreName.parse(name)
        values = run.series(name, steps_only=False).values
        if parts is None or not len(values):
            continue
        low, high = (0.0, 1.0) if parts.kind == ACCURACY else _score_bounds(run)
        num_problems = _num_problems(run, parts.source)
        # Bounds that are not known are NaN.
        if num_problems > 0 and low <= values.min() and values.max() <= high:
            scales[name] = HeldOutScale(low, high, num_problems)
    return scales


def _score_bounds(run: RunLines) -> tuple[float, float]:
    """Return between which numbers held-out scores lie; NaN where nobody knows."""
    # Graders of their own may have another scale.
    if run.at("evaluation.functions") is not None:
        return math.nan, math.nan
    lowest = run.series(LOWEST).values
    highest = run.series(HIGHEST).values
    if not len(lowest) or not len(highest):
        return math.nan, math.nan
    return float(lowest.min()), float(highest.max())


def _num_problems(run: RunLines, source: str) -> float:
    """Return the number of held-out problems of a data source; 0 if not known."""
    counts = run.series(f"val-aux/{source}/num_prompts", steps_only=False).values
    if not len(counts):
        # Records of older versions have the number of all problems alone.
        names = map(ScoreName.parse, run.metrics("val-.+"))
        if len({name.source for name in names if name is not None}) == 1:
            counts = run.series("val-aux/num_prompts", steps_only=False).values
    return float(counts[-1]) if len(counts) else 0.0


def mean_until(series: Series, step: int) -> float:
    """Return the mean over the five steps that end at a step.

    The first step is of the model before the training, which is that of step 0.
    """
    count = max(1, int(np.searchsorted(series.steps, step, side="right")))
    return float(np.mean(series.values[:count][-WINDOW:]))


def supervised_losses(run: RunLines) -> list[str]:
    """Return the metrics of losses that should fall: none in reinforcement learning."""
    if run.at("task") == "rl":
        return []
    return run.metrics(r"[a-z]\w*/loss")[:1]


# --------------------------------------------------------- episodes, time and processes

_END_SETTINGS = {
    End.MAX_TURNS: "agent.max_turns",
    End.MAX_TOKENS: "agent.max_tokens",
    End.MAX_TOOL_CALLS: "agent.max_tool_calls",
    End.CONTEXT_OVERFLOW: "rollout.max_response_tokens",
    End.MODEL_TIMEOUT: "agent.model_timeout_s",
    End.TOOL_TIMEOUT: "agent.tool_timeout_s",
    End.TURN_TIMEOUT: "agent.turn_timeout_s",
    End.EPISODE_TIMEOUT: "agent.episode_timeout_s",
    End.PARSE_ERROR: "agent.tool_parser",
    End.ENVIRONMENT_FAILED: "agent.environments",
}
"""The setting that decides how many episodes end so."""


def episode_ends(
    run: RunLines, ends: Sequence[End], threshold: float
) -> Iterator[Evidence | None]:
    """Yield where these ends together have a larger share of the episodes."""
    metrics = {end: f"episode/ends/{end}" for end in ends}
    medians = run.total(list(metrics.values())).medians(WINDOW)
    if not len(medians):
        return
    commonest = max(ends, key=lambda end: float(run.series(metrics[end]).values.sum()))
    metric = metrics[commonest]
    setting = _END_SETTINGS[commonest]
    evidence = evidence_where(
        medians, medians.values > threshold, metric, threshold, setting=setting
    )
    if evidence is not None:
        seen = (
            f"of the episodes {evidence.value:.0%} ended so in five steps, most of them"
            f" with {commonest}"
        )
        yield replace(evidence, seen=seen)


_BESIDE_STEPS = ("save_checkpoint", "testing")
"""Phases that are no part of timing_s/step."""


_RESTARTS = "rollout/restarts"


def long_phases(
    run: RunLines, phases: Mapping[str, tuple[float, str]]
) -> Iterator[Evidence | None]:
    """Yield the phases with a larger share of the time of a run than they may have.

    Args:
        run: The record.
        phases: That share, and the setting that changes it, by phase.
    """
    # Whatever waits for a replica that starts again takes as long as its start.
    run = replace(run, lines=[line for line in run.lines if not line.get(_RESTARTS)])
    step_s = run.series("timing_s/step")
    # What learns from data has one phase.
    if len(step_s) < 2 * WINDOW or run.at("task") != "rl":
        return
    times = {name: run.series(f"timing_s/{name}") for name in phases}
    seconds = {name: float(spent.values.sum()) for name, spent in times.items()}
    total_s = float(step_s.values.sum()) + sum(seconds[name] for name in _BESIDE_STEPS)
    for name, (share, setting) in phases.items():
        if seconds[name] > share * total_s:
            metric = f"timing_s/{name}"
            seen = (
                f"{metric} takes {seconds[name] / total_s:.0%} of the time, more than"
                f" {share:.0%}"
            )
            steps = times[name].steps
            count, first, last = len(steps), int(steps[0]), int(steps[-1])
            # The metric is in seconds, and so are its mean and what that may be.
            mean_s, most_s = seconds[name] / count, share * total_s / count
            yield Evidence(seen, metric, first, last, count, mean_s, most_s, setting)


_RESTORED = ("restart", "go back")
"""What a driver does about a fault without ending itself."""


def restarts(run: RunLines) -> Iterator[Evidence | None]:
    """Yield drivers that were lost, and processes that were started again."""
    lost = [
        (segment, after)
        for segment, after in zip_longest(run.history, run.history[1:])
        if segment.ending in ("failed", "killed")
    ]
    if lost:
        count = len(lost)
        seen = (
            f"the driver failed or was killed in {count} of its {len(run.history)}"
            " starts"
        )
        # Who is killed notes no step; the next driver goes on with one that it saved.
        steps = [
            segment.last_step or (after or segment).first_step
            for segment, after in lost
        ]
        yield Evidence(seen, HISTORY, min(steps), max(steps), count, count, 0)

    yield _restored(run)
    replicas = run.series(_RESTARTS)
    yield evidence_where(replicas, replicas.values > 0, _RESTARTS, 0.0)


def _restored(run: RunLines) -> Evidence | None:
    """Return how many processes were lost and came back while the driver went on."""
    roles: Counter[str] = Counter()
    steps = []
    for fault in run.faults:
        step = fault.get("step")
        if fault.get("cure") in _RESTORED and isinstance(step, int):
            roles[f"{fault.get('role')} {fault.get('kind')}"] += 1
            steps.append(step)
    if not steps:
        return None

    count = len(steps)
    parts = ", ".join(f"{what} {number}" for what, number in roles.items())
    seen = f"processes were lost and started again: {parts}"
    return Evidence(seen, FAULTS, min(steps), max(steps), count, count, 0)
