"""A trial of the answers of all records with the built-in functions that grade them.

Those that a function grades in microseconds are tried here, and those of a slow
function in processes that can be killed, as many as the time allows.

Invariant: of each file the first record that cannot be graded is reported, and so is
the number of answers that were left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from verl_ray.agents.contract import End
from verl_ray.config.reward import SingleReward
from verl_ray.errors import DataError, Problem
from verl_ray.preflight.data_files import DataFile
from verl_ray.preflight.timed_scores import PROCESSES, score_in_time
from verl_ray.preflight.trials import Trials
from verl_ray.profiling.phases import blocking
from verl_ray.rewards.built_in import built_in_of, graded_by, package_problem
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.request import ScoreRequest
from verl_ray.rewards.signatures import Signature
from verl_ray.rewards.specs import load
from verl_ray.settings.function_specs import parts_of
from verl_ray.user_files import last_cause

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


def try_answers(
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

            spec_records = _Records(file, section, spec, records)
            if built_in.is_fast:
                findings.problems += _try_here(spec_records)
            else:
                _try_in_processes(spec_records, grader, findings)


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


def _try_here(spec_records: _Records) -> list[Problem]:
    """Return the first record that a fast function cannot grade, if there is one."""
    loaded = load(spec_records.spec, spec_records.section)
    for record in spec_records.records:
        if not _is_gradable(loaded.signature, record):
            return [spec_records.problem(record, "")]
        try:
            place, named = loaded.signature.bind(_values(record))
            loaded.function(*place, **named)
        except DataError as error:
            return [spec_records.problem(record, str(error))]
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
        "episode_output": "",
        **answer,
    }


def _try_in_processes(
    spec_records: _Records, grader: SingleReward, findings: Trials
) -> None:
    """Try the distinct answers with a slow function, within a time.

    Args:
        spec_records: The records.
        grader: Has the deadline of one answer.
        findings: Where the first bad record, or a count of untried ones, is added.
    """
    distinct: dict[str | None, _Record] = {}
    for record in spec_records.records:
        distinct.setdefault(record.answer, record)
    # One without an answer is known without a trial.
    absent = distinct.pop(None, None)
    if absent is not None:
        findings.problems.append(spec_records.problem(absent, ""))
        return

    untried = deque(distinct.values())
    scored = score_in_time(
        {"default": spec_records.spec},
        grader,
        spec_records.section,
        untried,
        lambda record: [_request(record)],
        # A process takes a second to start.
        processes=min(PROCESSES, math.ceil(len(distinct) / _ANSWERS_AT_ONCE)),
        at_once=_ANSWERS_AT_ONCE,
        longest_s=LONGEST_ANSWERS_S,
    )
    with blocking(f"trying the answers with {spec_records.spec}"), closing(scored):
        for record, (score,) in scored:
            if score.health is not ScoreHealth.OK:
                reason = last_cause(score.detail).removeprefix(_DATA_ERROR)
                findings.problems.append(spec_records.problem(record, reason))
                return

    if untried:
        findings.warnings.append(
            f"{spec_records.section} was tried on {len(distinct) - len(untried)} of"
            f" {len(distinct)} answers of {spec_records.file.path}, within"
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
