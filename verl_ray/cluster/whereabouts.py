"""Where all processes of this driver are: one question to each, and one table.

Invariant: a process that has not answered is not asked again, and nothing here waits
longer than it was told to. Any thread may ask, since nothing heeds signals.
Deliberately not here: how a process knows (`host.py`), and how the table looks
(`verl_ray/profiling/process_table.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.core.generated.gcs_pb2 import ActorTableData

from verl_ray.cluster.activity import amount
from verl_ray.cluster.concurrency_groups import CONTROL
from verl_ray.cluster.members import Member
from verl_ray.cluster.messages import ProcessInfo, Whereabouts
from verl_ray.cluster.roster import ROSTER
from verl_ray.profiling.process_table import ProcessRow, numbers

_Answer = Whereabouts | str
"""What a process says, or why it says nothing."""


@dataclass(frozen=True)
class Present:
    """The processes of a driver at a moment.

    Attributes:
        rows: A row for each process.
        processes: (role, rank, location) of each process that has started.
    """

    rows: list[ProcessRow]
    processes: list[tuple[str, int, ProcessInfo]]


class Census:
    """Asks every process of the roster where it is, again and again."""

    def __init__(self) -> None:
        # Questions without an answer, by the identity of the handle, and their times.
        self._pending: dict[int, tuple[Any, float]] = {}

    def take(self, timeout_s: float, starting: Sequence[Member] = ()) -> Present:
        """Ask all processes; give them so many seconds to answer.

        Args:
            timeout_s: Limit in seconds for all of them together.
            starting: Further processes, which may be in the roster already.
        """
        sets = [(group.role, group.members()) for group in ROSTER.hosts]
        listed = {id(member.actor) for _, of_set in sets for member in of_set}
        by_role: dict[str, list[Member]] = {}
        for member in starting:
            if id(member.actor) not in listed:
                by_role.setdefault(member.role, []).append(member)
        sets += by_role.items()
        members = [member for _, of_set in sets for member in of_set]
        answers = self._ask(members, timeout_s)

        rows: list[ProcessRow] = []
        processes = []
        for role, of_set in sets:
            by_rank = {member.rank: answers[id(member.actor)] for member in of_set}
            for member in of_set:
                rows.append(_row(role, member, by_rank))
                if member.process_info is not None:
                    processes.append((role, member.rank, member.process_info))
        return Present(rows, processes)

    def _ask(self, members: list[Member], timeout_s: float) -> dict[int, _Answer]:
        # Without a session Ray would start a cluster for the first request.
        if not ray.is_initialized():
            return {id(member.actor): "cannot be asked any more" for member in members}
        now = time.monotonic()
        present = {id(member.actor): member for member in members}
        self._pending = {
            key: question for key, question in self._pending.items() if key in present
        }
        for key, member in present.items():
            if key not in self._pending:
                control = member.actor.whereabouts.options(concurrency_group=CONTROL)
                self._pending[key] = control.remote(), now

        questions = [question for question, _ in self._pending.values()]
        available: set[Any] = set()
        if questions:
            ready, _ = ray.wait(
                questions, num_returns=len(questions), timeout=timeout_s
            )
            available = set(ready)
        return {
            key: self._answer(key, member, available) for key, member in present.items()
        }

    def _answer(self, key: int, member: Member, available: set[Any]) -> _Answer:
        question, requested_at = self._pending[key]
        if question not in available:
            if member.actor._get_local_state() == ActorTableData.DEAD:
                return "has ended"
            return f"no reply for {time.monotonic() - requested_at:.0f} s"
        del self._pending[key]
        try:
            answer: Whereabouts = ray.get(question)
            return answer
        except ray.exceptions.RayActorError:
            return "has ended"
        except ray.exceptions.RayError as error:
            return f"cannot say: {type(error).__name__}"


def _row(role: str, member: Member, by_rank: Mapping[int, _Answer]) -> ProcessRow:
    answer = by_rank[member.rank]
    node = member.node
    if isinstance(answer, str):
        return ProcessRow(
            role, (member.rank,), (node,), "", answer, None, waits_for="", line=""
        )

    verb, seconds = "", None
    phase = "idle"
    if answer.running is not None:
        role, verb, seconds = answer.running
        phase = amount(answer.progress)
    return ProcessRow(
        role,
        (member.rank,),
        (node,),
        verb,
        phase,
        seconds,
        _waits_for(answer, by_rank),
        answer.line,
    )


def _waits_for(answer: Whereabouts, by_rank: Mapping[int, _Answer]) -> str:
    """The cause of a wait: a collective, with the ranks that are not in it."""
    collective = answer.collective
    if collective is None:
        return "another process" if answer.progress.waits_for_others else ""

    missing = []
    unknown = []
    for rank in collective.ranks:
        other = by_rank.get(rank)
        if not isinstance(other, Whereabouts):
            unknown.append(rank)
        elif other.entered.get(collective.group, 0) < collective.sequence:
            missing.append(rank)

    operation = f"{collective.operation} {collective.sequence}"
    others = []
    if missing:
        others.append(f"not entered by {_ranks(missing)}")
    if unknown:
        others.append(f"no reply of {_ranks(unknown)}")
    return f"{operation}: {', '.join(others) or 'all ranks have entered'}"


def _ranks(ranks: list[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {numbers(ranks)}"
