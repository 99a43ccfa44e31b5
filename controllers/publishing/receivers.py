"""The replicas that receive the weights of one sync.

Deliberately not here: what they receive (`publisher.py`), and over what (`wire.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.waiting import Background
from workers.rollout import RolloutWorker

ReplicaGroups = Sequence[WorkerGroup[RolloutWorker]]

Watch = Callable[[], None]
"""A check of the replicas during a wait; it raises for one that does not reply."""


@dataclass(frozen=True)
class Receivers:
    """The replicas of a sync, and how to wait for them.

    Attributes:
        replicas: The replicas that receive the weights.
        watch: A check of the replicas that is called while they are waited for, and
            while the actor sends.
        background: Work of the driver that goes on during every wait.
    """

    replicas: ReplicaGroups
    watch: Watch
    background: Background | None = None

    def broadcast(self, verb: Callable[..., Any], *args: object) -> list[Call[Any]]:
        """Start the same call on every replica."""
        return [replica.broadcast(verb, *args) for replica in self.replicas]

    def wait(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Wait for calls and return their results in order."""
        return wait_all(calls, self.watch, self.background)

    def wait_for_sender(self, call: Call[Any]) -> list[Any]:
        """Wait for ranks of the actor that open a wire, and may still be learning."""
        (results,) = wait_all([call], None, self.background)
        return list(results)
