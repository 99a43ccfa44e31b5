"""A trial of the reward functions on some records, and of the answers of all.

Each data source's function scores one record twice: with the record's own answer as the
response, or its prompt if it has no answer, and with an empty response. A batched
function gets both in one call. A function that fails is not tried on other sources.

The answers of all records are tried with the built-in functions that grade them. Those
that a function grades in microseconds are tried here, and those of a slow function in
processes that can be killed, as many as the time allows.

Invariant: user's code runs in a process that is killed at its deadline, never in this
one. Of each file the first record that cannot be graded is reported, and so is the
number of answers that were left out. Graders that are models or services are not tried
here (`tokenizer_trial.py`).
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from verl_ray.agents.contract import End
from verl_ray.agents.tasks import environments_of
from verl_ray.columns.stages import Prompts
from verl_ray.config.agent import ENVIRONMENT
from verl_ray.config.reward import SingleReward
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.encoding import encode
from verl_ray.data.fields import environment_of
from verl_ray.data.prompts import prompt_text
from verl_ray.errors import ConfigError, DataError, Problem
from verl_ray.preflight.data_files import DataFile
from verl_ray.preflight.timed_scores import score_in_time
from verl_ray.preflight.tokenizer_trial import (
    model_grader_problems,
    tried_tokenizer,
)
from verl_ray.preflight.trials import Trials
from verl_ray.profiling.phases import blocking
from verl_ray.rewards.built_in import built_in_of, graded_by, package_problem
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.request import ScoreRequest
from verl_ray.rewards.signatures import LACKS, Signature
from verl_ray.rewards.specs import load
from verl_ray.settings.function_specs import DEFAULT, parts_of
from verl_ray.user_files import last_cause

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_S = 30.0
"""Seconds after which no further data source is tried."""

PROCESSES = 4
"""Data sources that are tried at the same time."""

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
        _try_answers(section, functions, scored, grader, findings)
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
        rule = f"there is no function for data source {_listed(unserved)}"
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
        of_records = zip(file.prompts.data_source.texts(), environments, strict=True)
        for source, environment in of_records:
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
            f"{key}={function} gives the own answer of a record of {_listed(names)} and"
            f" an empty response the same score, {value:g}"
        )


def _listed(sources: Sequence[str]) -> str:
    """Return the first of some data sources, and the number of the others."""
    others = len(sources) - 1
    more = f" and {others} more" if others else ""
    return f"{sources[0]!r}{more}"


# ------------------------------------------------------------------ requests of a trial

# Responses on which the reward functions of a run are tried, made from its records.
#
# A record's own answer stands for a right response. A record without an answer is
# tried with its own prompt as the response: some text that a function has to score.
#
# Invariant: there is one request for each data source, from its first record.


def requests_of(
    files: Sequence[DataFile], functions: Mapping[str, str]
) -> dict[str, ScoreRequest]:
    """Return one request for each data source.

    The first source of each function comes before the second one of any.
    """
    requests: dict[str, ScoreRequest] = {}
    for file in files:
        assert file.prompts is not None, "only files of prompts are scored"
        for source, request in _first_requests(file.prompts).items():
            requests.setdefault(source, request)

    counts: Counter[str | None] = Counter()
    turns = {}
    for source in requests:
        function = functions.get(source, functions.get("default"))
        turns[source] = counts[function]
        counts[function] += 1
    return dict(sorted(requests.items(), key=lambda item: turns[item[0]]))


def _first_requests(prompts: Prompts) -> dict[str, ScoreRequest]:
    """Return a request for the first row of each data source."""
    rows: dict[str, int] = {}
    for row, source in enumerate(prompts.data_source.texts()):
        rows.setdefault(source, row)
    return dict(zip(rows, requests_at(prompts, list(rows.values())), strict=True))


def requests_at(prompts: Prompts, rows: Sequence[int]) -> list[ScoreRequest]:
    """Return a request for each of these rows, whose group is its number here."""
    # A column is decoded as a whole, so once for all rows.
    sources = prompts.data_source.texts()
    answers = prompts.answer.texts()
    messages = prompts.messages.texts()
    extras = prompts.extra.texts()
    requests = []
    for number, row in enumerate(rows):
        prompt = prompt_text(messages[row])
        answer = answers[row] if prompts.has_answer[row] else None
        request = ScoreRequest(
            response=prompt if answer is None else answer,
            answer=answer,
            prompt=prompt,
            data_source=sources[row],
            extra=json.loads(extras[row]),
            step=1,
            group=number,
            conversation=json.loads(messages[row]),
        )
        requests.append(request)
    return requests


def as_the_run_asks(request: ScoreRequest, config: Config) -> ScoreRequest:
    """Return a request as one about an episode, if the run makes one of its record."""
    if not isinstance(config, RLConfig):
        return request
    environments = config.agent.environments
    if environment_of(request.extra, request.data_source, environments) is None:
        return request
    return replace(
        request,
        episode_score=0.0,
        episode_end=End.COMPLETED.value,
        episode_conversations=[
            [
                {"role": "user", "content": request.prompt},
                {"role": "assistant", "content": request.response},
            ]
        ],
    )


def tokenizer_for(
    functions: Mapping[str, str], config: Config
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the policy; None where no function asks for tokens."""
    # Built-in functions ask for none.
    has_own = None in map(built_in_of, functions.values())
    return tried_tokenizer(config) if has_own else None


def pair_of(
    request: ScoreRequest, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[ScoreRequest, ScoreRequest]:
    """Return a request with the tokens of its response, and with an empty response.

    Args:
        request: The request.
        tokenizer: Tokenizer of the policy; None where no function asks for tokens.
    """
    # The last message of an episode is its response.
    conversations = [
        [*messages[:-1], {**messages[-1], "content": ""}]
        for messages in request.episode_conversations
    ]
    empty = replace(
        request, response="", num_tokens=1, episode_conversations=conversations
    )
    if tokenizer is None:
        return request, empty

    end: int = tokenizer.eos_token_id
    try:
        columns = encode(
            tokenizer,
            [request.response],
            special=False,
            where=lambda _: "a trial response",
        )
        tokens = [*columns[0].tolist(), end]
    # The policy could not write this answer; the trial is about the function.
    except DataError:
        tokens = [end]
    own = replace(request, tokens=tokens, num_tokens=len(tokens))
    return own, replace(empty, tokens=[end])


# ----------------------------------------------------------- the answers of all records

LONGEST_ANSWERS_S = 20.0
"""Seconds after which no further answers of a slow function are tried."""

_ANSWERS_AT_ONCE = 64  # answers that are tried between two looks at the clock
_DATA_ERROR = f"{DataError.__module__}.{DataError.__name__}: "


class _Record(NamedTuple):
    """A record of a file, counted from 1, and the function that grades it."""

    number: int
    data_source: str
    answer: str | None
    key: str
    """Setting of the function."""
    setting: str
    """Value of that setting."""
    spec: str
    """Spec of the function, which a data source may choose."""


@dataclass
class _Records:
    """The records of a file that one function grades."""

    file: DataFile
    section: str
    spec: str
    records: list[_Record]

    def problem(self, record: _Record, reason: str) -> Problem:
        """Return the problem that a record cannot be graded.

        Args:
            record: The record.
            reason: Why; empty for one that lacks an answer.
        """
        name, _ = parts_of(self.spec)
        if record.answer is None and not reason:
            rule = f"record {record.number} has no answer, which {name} compares with"
            fix = (
                "Set data.columns={answer: NAME} to the column of the answers, or"
                f" {self.section} to a function that needs none."
            )
        else:
            rule = (
                f"record {record.number} of data source {record.data_source!r} cannot"
                f" be graded by {self.section}: {reason}"
            )
            fix = "Correct the answer, or name another function for this source."
        return Problem(self.file.key, self.file.path, rule, fix)


def _try_answers(
    section: str,
    functions: Mapping[str, str],
    files: Sequence[DataFile],
    grader: SingleReward,
    findings: Trials,
) -> None:
    """Try the answers of all records that a built-in function grades.

    Args:
        section: The key of the functions.
        functions: Data source -> spec; nothing is wrong with the specs.
        files: Files of prompts.
        grader: The grader by these functions, which has their deadline.
        findings: Where what is wrong is added, and what was not tried.
    """
    for file in files:
        by_spec: dict[str, list[_Record]] = {}
        for record in _records(file, section, functions):
            by_spec.setdefault(record.spec, []).append(record)

        for spec, records in by_spec.items():
            built_in = built_in_of(spec)
            if built_in is None:
                continue
            first = records[0]
            missing = package_problem(spec, first.key)
            if missing is not None:
                rule = f"{missing.rule} (data source {first.data_source!r})"
                problem = Problem(first.key, first.setting, rule, missing.fix)
                # Several files may have the same data source.
                if problem not in findings.problems:
                    findings.problems.append(problem)
                continue

            of_spec = _Records(file, section, spec, records)
            if built_in.is_fast:
                findings.problems += _try_here(of_spec)
            else:
                _try_in_processes(of_spec, grader, findings)


def _records(
    file: DataFile, section: str, functions: Mapping[str, str]
) -> Iterator[_Record]:
    """Yield the records of a file that have a function."""
    assert file.prompts is not None, "only files of prompts are scored"
    sources = file.prompts.data_source.texts()
    answers = file.prompts.answer.texts()
    rows = zip(sources, answers, file.prompts.has_answer.tolist(), strict=True)
    for number, (source, answer, has_answer) in enumerate(rows, start=1):
        name = source if source in functions else "default"
        if name in functions:
            spec = graded_by(functions[name], source)
            own = answer if has_answer else None
            key = f"{section}.{name}"
            yield _Record(number, source, own, key, functions[name], spec)


def _try_here(of_spec: _Records) -> list[Problem]:
    """Return the first record that a fast function cannot grade, if there is one."""
    loaded = load(of_spec.spec, of_spec.section)
    for record in of_spec.records:
        if not _is_gradable(loaded.signature, record):
            return [of_spec.problem(record, "")]
        try:
            place, named = loaded.signature.bind(_values(record))
            loaded.function(*place, **named)
        except DataError as error:
            return [of_spec.problem(record, str(error))]
    return []


def _is_gradable(signature: Signature, record: _Record) -> bool:
    return record.answer is not None or "answer" not in signature.required


_EMPTY_TURN = [{"role": "assistant", "content": ""}]


def _values(record: _Record) -> dict[str, object]:
    """Return the values of an empty response."""
    answer = {} if record.answer is None else {"answer": record.answer}
    return {
        "response": "",
        "data_source": record.data_source,
        "episode_score": 0.0,
        "episode_end": End.COMPLETED.value,
        "episode_messages": _EMPTY_TURN,
        "episode_conversations": [_EMPTY_TURN],
        **answer,
    }


def _try_in_processes(
    of_spec: _Records, grader: SingleReward, findings: Trials
) -> None:
    """Try the distinct answers with a slow function, within a time.

    Args:
        of_spec: The records.
        grader: Has the deadline of one answer.
        findings: Where the first bad record, or a count of untried ones, is added.
    """
    distinct: dict[str | None, _Record] = {}
    for record in of_spec.records:
        distinct.setdefault(record.answer, record)
    # One without an answer is known without a trial.
    absent = distinct.pop(None, None)
    if absent is not None:
        findings.problems.append(of_spec.problem(absent, ""))
        return

    untried = deque(distinct.values())
    scored = score_in_time(
        {"default": of_spec.spec},
        grader,
        of_spec.section,
        untried,
        lambda record: [_request(record)],
        # A process takes a second to start.
        processes=min(PROCESSES, math.ceil(len(distinct) / _ANSWERS_AT_ONCE)),
        at_once=_ANSWERS_AT_ONCE,
        longest_s=LONGEST_ANSWERS_S,
    )
    with blocking(f"trying the answers with {of_spec.spec}"), closing(scored):
        for record, (score,) in scored:
            if score.health is not ScoreHealth.OK:
                reason = last_cause(score.detail).removeprefix(_DATA_ERROR)
                findings.problems.append(of_spec.problem(record, reason))
                return

    if untried:
        findings.warnings.append(
            f"{of_spec.section} was tried on {len(distinct) - len(untried)} of"
            f" {len(distinct)} answers of {of_spec.file.path}, within"
            f" {LONGEST_ANSWERS_S:g} s"
        )


def _request(record: _Record) -> ScoreRequest:
    return ScoreRequest(
        response="",
        answer=record.answer,
        prompt="",
        data_source=record.data_source,
        extra={},
    )
