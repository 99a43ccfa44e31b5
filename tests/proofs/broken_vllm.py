"""vLLM in a proof, with a loader that is broken; `main` is the process of a test."""

from __future__ import annotations

import socket
from typing import Any

from verl_ray.processes import trial
from verl_ray.proofs import rollout_proof
from verl_ray.weight_sync.transport import Inbox


def keep_first(pattern: str) -> None:
    """Let the loader take the tensors with a part of their name as they came first."""
    receive = Inbox.receive
    first: dict[str, Any] = {}

    def keeping(self: Inbox, bucket: Any) -> dict[str, Any]:
        # The thread that takes fingerprints reads the dictionary that arrived.
        tensors = dict(receive(self, bucket))
        for name in tensors:
            if pattern in name:
                tensors[name] = first.setdefault(name, tensors[name].clone())
        return tensors

    Inbox.receive = keeping  # type: ignore[method-assign]


def main(connection: socket.socket) -> None:
    """Compare with vLLM as the proof does."""

    def break_it(fields: dict[str, Any], tell: trial.Tell) -> Any:
        keep_first(fields["keep_first"])
        return rollout_proof.compare(fields, tell)

    trial.run_trial(connection, break_it)
