"""Causes for which a run learns nothing, from the lines of its record.

`diagnoses` is the one place that knows them. The live warning calls it with the newest
lines after each step, the summary at the end of a run with all of them.

Invariant: a pure function of recorded lines and the configuration, so a resumed run
says the same as one that never stopped.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.rewards.health import ScoreHealth
from verl_ray.tracking.base import GLOBAL_STEP, Sample, Tracker

PATIENCE = 3
"""Steps in a row after which a run that learns nothing says so."""

ZERO_STD = "frac_reward_zero_std"
"""Share of the groups without any spread, under the name that TRL gives it."""
NUM_EXAMPLES = "training/num_examples"
"""Number of prompts, rows or pairs in the training data."""

MOSTLY_CUT = 0.9
"""Share of the responses that are cut, from which on a run says so."""
_CUT = "response_length/clip_ratio"

FAILED_SCORES = "failed_scores"
"""Cause of a diagnosis that does not mean that nothing is learned."""

Line = Mapping[str, float]
Test = Callable[[Line], bool]


@dataclass(frozen=True)
class Diagnosis:
    """One cause, and the steps in which it was seen."""

    cause: str
    """Short name, by which diagnoses of several calls are told apart."""

    text: str
    """What was seen, what it means and which key to change, without the steps."""

    first_step: int
    last_step: int
    num_steps: int
    """Number of steps with this cause from the first to the last."""

    def __str__(self) -> str:
        """Return the text, and the steps that it is about."""
        if self.num_steps == 1:
            return f"{self.text} (step {self.first_step})"
        steps = f"{self.num_steps} steps, {self.first_step} to {self.last_step}"
        return f"{self.text} ({steps})"


def diagnoses(lines: Sequence[Line], config: Config) -> list[Diagnosis]:
    """Return why the run learns nothing, and which scores failed.

    A cause counts where it holds in three steps in a row, or in every step of a shorter
    run. What the data alone decide counts from the first step.

    Args:
        lines: Lines of metrics.jsonl, in the order of their steps.
        config: Configuration of the run.
    """
    steps = [line for line in lines if line[GLOBAL_STEP] >= 1]
    causes = [_data_diagnosis(steps, config), _mostly_cut(steps, config)]

    # A step has the first of these causes that holds: the later ones follow from it.
    explained: set[float] = set()
    for cause, test, text in _tests(config):
        matching = [
            line for line in steps if line[GLOBAL_STEP] not in explained and test(line)
        ]
        explained |= {line[GLOBAL_STEP] for line in matching}
        lasting = _in_a_row(matching, config)
        causes.append(_diagnosis(cause, lasting, text))

    causes.append(_failed_scores(steps, config))
    return [diagnosis for diagnosis in causes if diagnosis is not None]


def failed_score_counts(line: Line) -> dict[str, int]:
    """Return the number of failed scores of a step by kind, without those of 0."""
    counts = {}
    for health in ScoreHealth:
        count = line.get(health.metric, 0)
        if health is not ScoreHealth.OK and count:
            counts[health.name.lower()] = int(count)
    return counts


def _diagnosis(cause: str, lines: Sequence[Line], text: str) -> Diagnosis | None:
    if not lines:
        return None
    numbers = [int(line[GLOBAL_STEP]) for line in lines]
    return Diagnosis(cause, text, numbers[0], numbers[-1], len(numbers))


def _in_a_row(lines: Sequence[Line], config: Config) -> list[Line]:
    """Return the lines of steps that stand in a row which is long enough."""
    count = min(PATIENCE, config.run.steps)
    rows: list[list[Line]] = []
    for line in lines:
        if rows and line[GLOBAL_STEP] == rows[-1][-1][GLOBAL_STEP] + 1:
            rows[-1].append(line)
        else:
            rows.append([line])
    return [line for row in rows if len(row) >= count for line in row]


# ------------------------------------------------------------------------------- causes


def _data_diagnosis(steps: Sequence[Line], config: Config) -> Diagnosis | None:
    """Return what is wrong with the number of examples, which no step changes."""
    size = config.examples_per_step
    few = [line for line in steps if line.get(NUM_EXAMPLES, math.inf) <= size]
    if not few:
        return None

    count = int(few[-1][NUM_EXAMPLES])
    if count == size:
        text = (
            f"every step is a whole epoch: the data hold {count} examples, as many as a"
            f" step takes. Lower {config.examples_key} = {size}, or use more data"
        )
        return _diagnosis("epoch_per_step", few, text)

    text = (
        f"the data hold fewer examples than a step takes: {count} of"
        f" {config.examples_key} = {size}, so a step has the same ones several times."
        f" Use more data, or lower {config.examples_key}"
    )
    return _diagnosis("few_examples", few, text)


def _mostly_cut(steps: Sequence[Line], config: Config) -> Diagnosis | None:
    """Return that responses are too long, which other causes may follow from."""
    if not isinstance(config, RolloutTaskConfig):
        return None

    cut = [line for line in steps if line.get(_CUT, 0) >= MOSTLY_CUT]
    lines = _in_a_row(cut, config)
    longest = config.rollout.max_response_tokens
    text = (
        f"{MOSTLY_CUT:.0%} of the responses or more were cut at the length limit, and"
        " did not end with an answer."
        f" Raise rollout.max_response_tokens = {longest}, or use a model that ends its"
        " responses"
    )
    return _diagnosis("mostly_cut", lines, text)


def _tests(config: Config) -> list[tuple[str, Test, str]]:
    """Return the causes of this run's task: name, test of a line, and text."""
    tests: list[tuple[str, Test, str]] = []
    if isinstance(config, RLConfig):
        tests += _reward_tests(config)
    for role in config.learners:
        text = (
            f"the gradient of the {role} was exactly 0, so it does not change: no token"
            " had a loss that depends on it"
        )
        tests.append((f"zero_gradient/{role}", _equals(f"{role}/grad_norm", 0), text))
    return tests


def _reward_tests(config: RLConfig) -> list[tuple[str, Test, str]]:
    group_size = config.rollout.group_size
    sources = ", ".join(config.graders)
    tests: list[tuple[str, Test, str]] = [
        (
            "same_scores",
            _same_scores,
            "all scores are equal, so nothing sets a good response apart from a bad"
            f" one. Look at rollouts/ and at what scores ({sources}): it may never find"
            " the answer, or always; or choose problems that are neither too hard nor"
            " too easy",
        ),
    ]
    if ADVANTAGES[config.algorithm.advantage].needs_group:
        text = (
            "no group had any spread: all responses to a prompt got the same score, so"
            " every advantage is 0. Raise rollout.temperature ="
            f" {config.rollout.temperature:g} or rollout.group_size = {group_size}, or"
            " choose problems that are neither too hard nor too easy"
        )
        tests.append(("no_spread", _equals(ZERO_STD, 1), text))
    return tests


def _equals(name: str, value: float) -> Test:
    return lambda line: line.get(name) == value


def _same_scores(line: Line) -> bool:
    """Whether a step has several scores and all of them are equal."""
    highest = line.get("critic/score/max", math.nan)
    num_scores = line.get(ScoreHealth.OK.metric, 0)
    return num_scores > 1 and highest == line.get("critic/score/min")


def _failed_scores(steps: Sequence[Line], config: Config) -> Diagnosis | None:
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
    limits = ", ".join(
        f"{name}.max_failed_fraction = {grader.max_failed_fraction:g}"
        for name, grader in config.graders.items()
    )
    text = (
        f"{num_failed / num_scores:.1%} of the scores failed ({kinds}), and their"
        f" responses were not learned from. The run stops above {limits}"
    )
    return _diagnosis(FAILED_SCORES, failing, text)


# ------------------------------------------------------------------- the live warning


class LearningWatch(Tracker):
    """Prints a warning when the newest steps have a cause to learn nothing."""

    def __init__(self, config: Config, recorded: Sequence[Line]) -> None:
        """Take the configuration and the lines of the steps before.

        Args:
            config: Configuration of the run.
            recorded: Lines of metrics.jsonl that a resumed run continues.
        """
        self._config = config
        self._lines: deque[Line] = deque(recorded, maxlen=PATIENCE)
        self._printed: set[str] = set()

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the causes that the newest steps show and that were not printed."""
        self._lines.append(metrics)
        for diagnosis in diagnoses(list(self._lines), self._config):
            # Failed scores are in the line of each step, and were reported before.
            is_new = diagnosis.cause not in self._printed | {FAILED_SCORES}
            if is_new and diagnosis.last_step == step:
                self._printed.add(diagnosis.cause)
                print(f"warning: {diagnosis}", file=sys.stderr, flush=True)

    def close(self, failed: bool) -> None: ...

    def outputs(self) -> dict[str, str]:
        return {}
