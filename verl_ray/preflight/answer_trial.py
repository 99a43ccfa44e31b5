"""A trial of the answers of all records with the built-in functions that grade them.

Answers that a function grades in microseconds are tried here. Those of a slow function
are tried in processes that can be killed, as many as the time allows.

Invariant: of each file the first record that cannot be graded is told, and so is how
many answers were left out. Deliberately not here: functions of the user's own, which
are tried on one record (`reward_trial.py`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from verl_ray.config.function_specs import parts_of
from verl_ray.config.reward import SingleReward
from verl_ray.errors import DataError, Problem
from verl_ray.preflight.data_files import DataFile
from verl_ray.profiling.phases import blocking
from verl_ray.rewards.built_in import built_in_of, graded_by, package_problem
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.pool import ScoringPool
from verl_ray.rewards.request import ScoreRequest
from verl_ray.rewards.signatures import Signature
from verl_ray.rewards.specs import load
from verl_ray.user_files import last_cause

LONGEST_S = 20.0
"""Seconds after which no further answers of a slow function are tried."""

PROCESSES = 4
_AT_ONCE = 64  # answers that are tried between two looks at the clock
_DATA_ERROR = f"{DataError.__module__}.{DataError.__name__}: "


@dataclass
class AnswerFindings:
    """Answers that cannot be graded, and a line about those that were not tried."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


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


def try_answers(
    section: str,
    functions: Mapping[str, str],
    files: Sequence[DataFile],
    grader: SingleReward,
) -> AnswerFindings:
    """Try the answers of all records that a built-in function grades.

    Args:
        section: The key of the functions.
        functions: Data source -> spec; nothing is wrong with the specs.
        files: Files of prompts.
        grader: The grader by these functions, which has their deadline.
    """
    findings = AnswerFindings()
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
    return findings


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


def _values(record: _Record) -> dict[str, object]:
    """Return the values of an empty response."""
    answer = {} if record.answer is None else {"answer": record.answer}
    return {"response": "", "data_source": record.data_source, **answer}


def _try_in_processes(
    of_spec: _Records, grader: SingleReward, findings: AnswerFindings
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

    assert grader.time_limit_s is not None, "functions have a deadline"
    functions = {"default": of_spec.spec}
    # A process takes a second to start.
    processes = min(PROCESSES, math.ceil(len(distinct) / _AT_ONCE))
    untried = deque(distinct.values())
    with (
        blocking(f"trying the answers with {of_spec.spec}"),
        ScoringPool(
            functions, processes, grader.time_limit_s, key=of_spec.section
        ) as pool,
    ):
        bad = _first_bad(pool, untried)

    if bad is not None:
        record, score = bad
        reason = last_cause(score.detail).removeprefix(_DATA_ERROR)
        findings.problems.append(of_spec.problem(record, reason))
    elif untried:
        findings.warnings.append(
            f"{of_spec.section} was tried on {len(distinct) - len(untried)} of"
            f" {len(distinct)} answers of {of_spec.file.path}, within {LONGEST_S:g} s"
        )


def _first_bad(
    pool: ScoringPool, untried: deque[_Record]
) -> tuple[_Record, Score] | None:
    """Return the first record that has no score, and why; None if there is none.

    Args:
        pool: Scores the records.
        untried: The records; those that time was left for are taken out.
    """
    end_s = time.monotonic() + LONGEST_S
    # Each round tries some answers; ends when there are none, at the first bad one, or
    # after the round in which the time is over.
    while untried:
        count = min(_AT_ONCE, len(untried))
        records = [untried.popleft() for _ in range(count)]
        scores = pool.score([_request(record) for record in records])
        for record, score in zip(records, scores, strict=True):
            if score.health is not ScoreHealth.OK:
                return record, score
        if time.monotonic() > end_s:
            break
    return None


def _request(record: _Record) -> ScoreRequest:
    return ScoreRequest(
        response="",
        answer=record.answer,
        prompt="",
        data_source=record.data_source,
        extra={},
    )
