"""Where clients outside of the run find the rollout replicas: a line for each as it starts, and run.dir/endpoints.json.

Invariant: the file names every replica that has started, at its present address, and goes when the run ends, unless it
is killed. Deliberately not here: what is answered there (`verl_ray/rollout/endpoint.py`).
"""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.drawing import DrawingConfig
from workers.rollout import RolloutWorker

FILE = "endpoints.json"


class Endpoints:
    def __init__(self, config: DrawingConfig) -> None:
        self._host, self._model = config.rollout.endpoint.host, config.run.name
        self._path = Path(config.run.dir) / FILE
        self._known: dict[int, dict[str, str]] = {}

    def tell(self, replica: WorkerGroup[RolloutWorker]) -> None:
        """Of a replica that has started, for the first time or again."""
        (member,) = replica.members()
        assert member.facts is not None, "it has started"
        port = replica.rank_zero(RolloutWorker.endpoint_port).result()
        url = f"http://{_reachable(self._host, member.facts.address)}:{port}/v1"
        print(f"rollout replica {member.rank} answers at {url} (model {self._model}, on {member.node})", flush=True)
        self._known[member.rank] = {"url": url, "model": self._model, "node": member.node}
        told = json.dumps([self._known[rank] for rank in sorted(self._known)], indent=2)
        whole = self._path.with_suffix(".tmp")
        whole.write_text(told + "\n")
        whole.replace(self._path)

    def close(self) -> None:
        """Nobody answers any more."""
        self._path.unlink(missing_ok=True)


def _reachable(host: str, node: str) -> str:
    """What a client writes for an address that is listened on; `node` for all of them."""
    address = ipaddress.ip_address(host)
    chosen = ipaddress.ip_address(node) if address.is_unspecified else address
    return f"[{chosen}]" if chosen.version == 6 else str(chosen)
