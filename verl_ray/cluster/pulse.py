"""Whether a process still answers: its control lane is asked again and again, and nobody waits for the answers.

Invariant: `beat` returns at once while the process is well. Deliberately not here: what is done with one that is not.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from verl_ray.cluster import failures
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.host import CONTROL, Status
from verl_ray.errors import WorkerError

_GRACE_S = 1.0


class Pulse:
    """Of a group of one process."""

    def __init__(self, group: WorkerGroup[Any], interval_s: float, deadline_s: float, key: str) -> None:
        """`key`: the setting that `deadline_s` comes from."""
        self._group = group
        self._interval_s, self._deadline_s, self._key = interval_s, deadline_s, key
        self._asked: Any = None
        self._since = time.monotonic()

    def beat(self) -> Status | None:
        """Ask if it is time to, and the answer if there is one.

        Raises:
            WorkerDied: the process is gone.
            DeadlineExceeded: it has not answered for `deadline_s` seconds; says whether it is stopped, and its stacks.
        """
        now = time.monotonic()
        if self._asked is None:
            if now - self._since >= self._interval_s:
                (member,) = self._group.members()
                lane = member.actor.status.options(concurrency_group=CONTROL)
                self._asked, self._since = lane.remote(), now
            return None
        # Where the time is up because nobody looked, the answer may be there and not delivered yet.
        late = now - self._since > self._deadline_s
        ready, _ = ray.wait([self._asked], timeout=_GRACE_S if late else 0)
        if ready:
            asked, self._asked = self._asked, None
            try:
                status: Status = ray.get(asked)
            except ray.exceptions.RayError as error:
                raise failures.died(self._group.members()[0], "status", error) from error
            return status
        if late:
            raise self.late("the control lane", now - self._since, self._key)
        return None

    def late(self, what: str, waited_s: float, key: str) -> WorkerError:
        """The error for something of this process that takes too long."""
        return failures.late(self._group.members(), what, waited_s, key)
