"""Worker processes as the driver knows them.

Invariant: a member never changes; a process that starts or gets a role is another
member. Deliberately not here: calls (`rank_calls.py`), and the process's own side
(`host.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_ray.cluster.heartbeat import Heartbeat
from verl_ray.cluster.messages import ProcessInfo


@dataclass(frozen=True)
class Member:
    """One worker process of a group.

    Attributes:
        role: Role under which the process is called.
        rank: Rank of the process.
        actor: Ray's handle of the process.
        process_info: Location of the process; None until the process has reported it.
        heartbeat: Progress of the process, shared by all members of the same process.
    """

    role: str
    rank: int
    actor: Any
    process_info: ProcessInfo | None
    heartbeat: Heartbeat

    @property
    def node(self) -> str:
        """Name of the process's node for messages."""
        if self.process_info is None:
            return "a node not known yet"
        return self.process_info.node
