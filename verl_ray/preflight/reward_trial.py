"""A trial of the reward functions on records of the run, in processes of their own.

Each data source's function scores one record twice: with the record's own answer as the
response, and with an empty response.

Invariant: user's code runs in a process that is killed at its deadline, never in this
one. Deliberately not here: graders that are models or services, which are not started,
and whether the named functions exist (`findings.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from verl_ray.config.reward import SingleReward
from verl_ray.config.schema import Config
from verl_ray.data.prompts import prompt_text
from verl_ray.data.stages import Prompts
from verl_ray.errors import ConfigError, DataError, Problem
from verl_ray.preflight.data_files import DataFile
from verl_ray.rewards.functions import REWARD_FUNCTIONS, last_cause
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.pool import ScoringPool
from verl_ray.rewards.request import ScoreRequest

START_DEADLINE_S = 60.0
"""Longest time in which the files of reward functions may be imported."""

MOST_SOURCES = 4
"""Data sources that are tried for each grader."""

VALIDATION_KEY = "data.validation_path"


@dataclass(frozen=True)
class Trial:
    """One function's scores of one record.

    Attributes:
        key: Setting of the function.
        function: The function.
        data_source: Data source of the record.
        own: Score of the record's own answer.
        empty: Score of an empty response.
    """

    key: str
    function: str
    data_source: str
    own: Score
    empty: Score


@dataclass
class TrialFindings:
    """The trials of all graders that are functions."""

    trials: list[Trial] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def try_rewards(
    config: Config, files: Sequence[DataFile], *, evaluates: bool = False
) -> TrialFindings:
    """Try the reward functions of a run on its records.

    Args:
        config: Configuration of the run, without `auto`.
        files: The data files of the run.
        evaluates: Whether the command only evaluates.
    """
    findings = TrialFindings()
    for key, grader in config.active_graders(learns=not evaluates).items():
        functions = grader.named_functions
        if functions is None:
            continue

        section = f"{key}.functions"
        requests = _requests(files, of_held_out=key not in config.graders)
        findings.problems += _answer_problems(section, functions, files)
        if not requests or findings.problems:
            continue

        try:
            trials = _try(section, functions, grader, requests)
        except ConfigError as error:
            findings.problems += error.problems
            continue

        findings.trials += trials
        findings.problems += _problems(trials)
        findings.warnings += _warnings(trials)
    return findings


def _requests(
    files: Sequence[DataFile], *, of_held_out: bool
) -> dict[str, ScoreRequest]:
    """Return one request for each data source, with the record's answer as response.

    Args:
        files: The data files of the run.
        of_held_out: Whether the grader scores held-out problems alone.
    """
    requests: dict[str, ScoreRequest] = {}
    for file in files:
        if file.prompts is None or (of_held_out and file.key != VALIDATION_KEY):
            continue
        for source, row in _first_rows(file.prompts).items():
            if source not in requests and len(requests) < MOST_SOURCES:
                requests[source] = _request(file.prompts, source, row)
    return requests


def _first_rows(prompts: Prompts) -> dict[str, int]:
    """Return the first row of each data source."""
    first: dict[str, int] = {}
    for row, source in enumerate(prompts.data_source.texts()):
        first.setdefault(source, row)
    return first


def _request(prompts: Prompts, source: str, row: int) -> ScoreRequest:
    """Return a request to score the answer of a row as its response."""
    answer = prompts.answer.texts()[row]
    return ScoreRequest(
        response=answer,
        answer=answer,
        prompt=prompt_text(prompts.messages.texts()[row]),
        data_source=source,
        extra=json.loads(prompts.extra.texts()[row]),
    )


def _answer_problems(
    section: str, functions: Mapping[str, str], files: Sequence[DataFile]
) -> Iterator[Problem]:
    """Yield the first answer of each file that a built-in function cannot grade.

    Built-in functions are fast, so all answers are tried.
    """
    for file in files:
        if file.prompts is None:
            continue
        sources = file.prompts.data_source.texts()
        answers = file.prompts.answer.texts()
        for number, (source, answer) in enumerate(
            zip(sources, answers, strict=True), start=1
        ):
            spec = functions.get(source, functions.get("default", ""))
            function = REWARD_FUNCTIONS.get(spec)
            if function is None:
                continue
            try:
                function("", answer, prompt="", data_source=source, extra={})
            except DataError as error:
                rule = f"record {number} cannot be graded by {section}: {error}"
                fix = "Correct the answer, or name another function for this source."
                yield Problem(file.key, file.path, rule, fix)
                break


def _try(
    section: str,
    functions: Mapping[str, str],
    grader: SingleReward,
    requests: Mapping[str, ScoreRequest],
) -> list[Trial]:
    """Score each request, and the same one with an empty response.

    Raises:
        ConfigError: A function cannot be imported or called.
    """
    assert grader.time_limit_s is not None, "functions have a deadline"
    pairs = [
        (
            request,
            ScoreRequest("", request.answer, request.prompt, source, request.extra),
        )
        for source, request in requests.items()
    ]
    with ScoringPool(
        functions,
        len(pairs),
        grader.time_limit_s,
        key=section,
        start_deadline_s=START_DEADLINE_S,
    ) as pool:
        scores = pool.score([request for pair in pairs for request in pair])

    trials = []
    for number, source in enumerate(requests):
        name = source if source in functions else "default"
        trials.append(
            Trial(
                key=f"{section}.{name}",
                function=functions[name],
                data_source=source,
                own=scores[2 * number],
                empty=scores[2 * number + 1],
            )
        )
    return trials


def _problems(trials: Sequence[Trial]) -> Iterator[Problem]:
    """Yield functions that fail on a record's own answer, or on an empty response."""
    for trial in trials:
        responses = {
            "a record's own answer": trial.own,
            "an empty response": trial.empty,
        }
        for response, score in responses.items():
            # A function may leave a response without a score on purpose.
            if score.health in (ScoreHealth.OK, ScoreHealth.NONE):
                continue
            rule = (
                f"it fails on {response} of data source {trial.data_source!r}:"
                f" {last_cause(score.detail)}"
            )
            fix = (
                "Return a finite number for every response, or None to leave it without"
                " a score."
            )
            if score.health is ScoreHealth.TIMEOUT:
                section = trial.key.partition(".functions.")[0]
                fix = f"Make it faster, or raise {section}.deadline_s."
            yield Problem(trial.key, trial.function, rule, fix)
            break


def _warnings(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield functions whose scores do not tell a right answer from an empty one."""
    for trial in trials:
        scored = (trial.own.health, trial.empty.health) == (ScoreHealth.OK,) * 2
        if scored and trial.own.value == trial.empty.value:
            yield (
                f"{trial.key}={trial.function} gives the own answer of a record of"
                f" {trial.data_source!r} and an empty response the same score,"
                f" {trial.own.value:g}"
            )
