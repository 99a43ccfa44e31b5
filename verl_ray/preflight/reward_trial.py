"""A trial of the reward functions on some records.

Each data source's function scores one record twice: with the record's own answer as the
response, or its prompt if it has no answer, and with an empty response. A batched
function gets both in one call. A function that fails is not tried on other sources.

Invariant: user's code runs in a process that is killed at its deadline, never in this
one. Graders that are models or services are not tried here (`tokenizer_trial.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from verl_ray.agents.tasks import environments_of
from verl_ray.config.agent import ENVIRONMENT
from verl_ray.config.reward import SingleReward
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, Problem
from verl_ray.preflight.answer_trial import try_answers
from verl_ray.preflight.data_files import DataFile
from verl_ray.preflight.timed_scores import PROCESSES, score_in_time
from verl_ray.preflight.tokenizer_trial import (
    model_grader_problems,
)
from verl_ray.preflight.trial_requests import (
    as_the_run_asks,
    pair_of,
    requests_of,
    tokenizer_for,
)
from verl_ray.preflight.trials import Trials
from verl_ray.profiling.phases import blocking
from verl_ray.rewards.built_in import built_in_of
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.request import ScoreRequest
from verl_ray.rewards.signatures import LACKS
from verl_ray.settings.function_specs import DEFAULT
from verl_ray.suggest import first_of
from verl_ray.user_files import last_cause

LONGEST_S = 30.0
"""Seconds after which no further data source is tried."""

VALIDATION_KEY = "data.validation_path"


@dataclass(frozen=True)
class Trial:
    """One function's scores of one record.

    Attributes:
        key: Setting of the function.
        function: The function.
        data_source: Data source of the record.
        has_answer: Whether the record has an answer.
        own: Score of the record's own answer; of its prompt if it has none.
        empty: Score of an empty response.
    """

    key: str
    function: str
    data_source: str
    has_answer: bool
    own: Score
    empty: Score

    @property
    def failure(self) -> tuple[str, Score] | None:
        """The response that it fails on, in words, and its score; None for none."""
        own = "a record's own answer" if self.has_answer else "a record's own prompt"
        responses = {own: self.own, "an empty response": self.empty}
        for response, score in responses.items():
            # A function may leave a response without a score on purpose.
            if score.health not in (ScoreHealth.OK, ScoreHealth.NONE):
                return response, score
        return None


@dataclass
class TrialFindings(Trials):
    """The trials of all graders that are functions."""

    trials: list[Trial] = field(default_factory=list)


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
        scored = _scored_files(config, key, files, evaluates=evaluates)
        functions = grader.named_functions
        if functions is None:
            own = list(requests_of(scored, {}).values())
            findings.problems += model_grader_problems(key, grader, own, config)
            continue

        section = f"{key}.functions"
        try_answers(section, functions, scored, grader, findings)
        requests = requests_of(scored, functions)
        requests = {
            source: as_the_run_asks(request, config)
            for source, request in requests.items()
        }
        findings.problems += _unserved(section, functions, requests)
        findings.problems += _unpayable(section, functions, scored, config)
        if not requests or findings.problems:
            continue

        try:
            with blocking(f"trying {section} on the records"):
                trials = _try(section, functions, grader, requests, config)
        except ConfigError as error:
            findings.problems += error.problems
            continue

        findings.trials += trials
        problems = list(_problems(trials))
        findings.problems += problems
        findings.warnings += _warnings(trials)
        num_untried = len(requests) - len(trials)
        if num_untried and not problems:
            findings.warnings.append(
                f"{section} was tried on {len(trials)} of {len(requests)} data sources,"
                f" within {LONGEST_S:g} s"
            )
    return findings


def _scored_files(
    config: Config, key: str, files: Sequence[DataFile], *, evaluates: bool
) -> list[DataFile]:
    """Return the files of prompts whose responses a grader scores.

    Held-out problems may have a grader of their own, which scores nothing else.
    """
    graders = config.active_graders(learns=not evaluates)
    has_own_grader = len(graders) > len(config.graders) or evaluates
    is_of_held_out = key not in config.graders or evaluates
    return [
        file
        for file in files
        if file.prompts is not None
        and (not has_own_grader or (file.key == VALIDATION_KEY) == is_of_held_out)
    ]


def _unserved(
    section: str, functions: Mapping[str, str], requests: Mapping[str, ScoreRequest]
) -> Iterator[Problem]:
    """Yield a problem if there are data sources without a function."""
    unserved = [source for source in requests if source not in functions]
    if "default" not in functions and unserved:
        rule = f"there is no function for data source {first_of(unserved)}"
        fix = f"Set {section}.{unserved[0]}, or {section}.default for all others."
        yield Problem(section, dict(functions), rule, fix)


def _unpayable(
    section: str,
    functions: Mapping[str, str],
    files: Sequence[DataFile],
    config: Config,
) -> Iterator[Problem]:
    """Yield a problem for each function that is what no environment pays."""
    if not isinstance(config, RLConfig) or config.episodes is None:
        return
    # Several sources may have one function.
    sources: dict[str, str] = {}
    for file in files:
        assert file.prompts is not None, "only files of prompts are scored"
        environments = environments_of(file.prompts, config.agent.environments)
        record_sources = zip(
            file.prompts.data_source.texts(), environments, strict=True
        )
        for source, environment in record_sources:
            name = source if source in functions else DEFAULT
            if environment is None and functions.get(name) == ENVIRONMENT:
                sources.setdefault(name, source)

    for name, source in sources.items():
        rule = f"records of {source!r} have no environment, whose score it would be"
        fix = (
            f"Set {section}.{source} to another function, such as exact_match, or"
            f" agent.environments.{source} to an environment."
        )
        yield Problem(f"{section}.{name}", ENVIRONMENT, rule, fix)


def _try(
    section: str,
    functions: Mapping[str, str],
    grader: SingleReward,
    requests: Mapping[str, ScoreRequest],
    config: Config,
) -> list[Trial]:
    """Score each request, and the same one with an empty response.

    Raises:
        ConfigError: A function cannot be imported or called.
    """
    tokenizer = tokenizer_for(functions, config)
    trials: list[Trial] = []
    failed: set[str] = set()

    def requests_for(request: ScoreRequest) -> Sequence[ScoreRequest]:
        has_failed = _name(request, functions) in failed
        return () if has_failed else pair_of(request, tokenizer)

    for request, scores in score_in_time(
        functions,
        grader,
        section,
        deque(requests.values()),
        requests_for,
        processes=min(PROCESSES, len(requests)),
        at_once=PROCESSES,
        longest_s=LONGEST_S,
    ):
        if not scores:
            continue
        name = _name(request, functions)
        own, empty = scores
        trial = Trial(
            key=f"{section}.{name}",
            function=functions[name],
            data_source=request.data_source,
            has_answer=request.answer is not None,
            own=own,
            empty=empty,
        )
        trials.append(trial)
        if trial.failure is not None:
            failed.add(name)
    return trials


def _name(request: ScoreRequest, functions: Mapping[str, str]) -> str:
    """Return the name under which a request has its function."""
    return request.data_source if request.data_source in functions else "default"


def _problems(trials: Sequence[Trial]) -> Iterator[Problem]:
    """Yield functions that fail on a record's own answer, or on an empty response."""
    seen = set()
    for trial in trials:
        if trial.failure is None or trial.function in seen:
            continue

        seen.add(trial.function)
        response, score = trial.failure
        cause = last_cause(score.detail)
        fix = (
            "Return a finite number for every response, or None to leave it without a"
            " score."
        )
        if score.health is ScoreHealth.TIMEOUT:
            section = trial.key.partition(".functions.")[0]
            fix = f"Make it faster, or raise {section}.deadline_s."
        elif score.detail.startswith(LACKS):
            cause, _, fix = score.detail.partition(". ")
        elif score.rescored:
            fix = "Let it return a number or raise; it may not end its process."
        rule = f"it fails on {response} of data source {trial.data_source!r}: {cause}"
        yield Problem(trial.key, trial.function, rule, fix, may_pass=True)


def _warnings(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield functions whose scores do not tell a right answer from an empty one."""
    sources: dict[tuple[str, str, float], list[str]] = {}
    for trial in trials:
        built_in = built_in_of(trial.function)
        # A function that judges the form need not like an answer.
        if built_in is not None and not built_in.compares:
            continue
        scored = (trial.own.health, trial.empty.health) == (ScoreHealth.OK,) * 2
        if scored and trial.has_answer and trial.own.value == trial.empty.value:
            kind = (trial.key, trial.function, trial.own.value)
            sources.setdefault(kind, []).append(trial.data_source)

    for (key, function, value), names in sources.items():
        yield (
            f"{key}={function} gives the own answer of a record of {first_of(names)}"
            f" and an empty response the same score, {value:g}"
        )
