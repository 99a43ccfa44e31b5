"""The addresses at which clients outside of the run find the rollout replicas.

Each replica is announced by a line on stdout when it starts, and by
run.dir/endpoints.json.

Invariant: the file names every replica that has started, at its present address. It is
removed when the run ends, unless the run is killed.
"""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.rollout_task import RolloutTaskConfig
from workers.rollout import RolloutWorker

FILE = "endpoints.json"


class Endpoints:
    """The endpoints of a run's replicas."""

    def __init__(self, config: RolloutTaskConfig) -> None:
        """Start without replicas; the file is written with the first of them."""
        self._host = config.rollout.endpoint.host
        self._model = config.run.name
        self._path = Path(config.run.dir) / FILE

        self._entries: dict[int, dict[str, str]] = {}
        """Entries of the file, by rank of the replica."""

    def announce(self, replica: WorkerGroup[RolloutWorker]) -> None:
        """Announce a replica that has started, for the first time or again."""
        (member,) = replica.members()
        assert member.process_info is not None, "the replica has started"

        host = _client_host(self._host, member.process_info.address)
        port = replica.rank_zero(RolloutWorker.endpoint_port).result()
        url = f"http://{host}:{port}/v1"
        print(
            f"rollout replica {member.rank} answers at {url} (model {self._model}, on"
            f" {member.node})",
            flush=True,
        )
        # A replica that starts again replaces its entry: it may have another port.
        self._entries[member.rank] = {
            "url": url,
            "model": self._model,
            "node": member.node,
        }
        self._write()

    def close(self) -> None:
        """Remove the file: no replica replies any more."""
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        """Write the file; readers see the old one or the new one, as a whole."""
        entries = [self._entries[rank] for rank in sorted(self._entries)]
        text = json.dumps(entries, indent=2) + "\n"
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(self._path)


def _client_host(host: str, node_address: str) -> str:
    """Return the host that a client writes into a URL.

    Args:
        host: The address that the endpoint listens on.
        node_address: The node's own address. It is used where the endpoint listens on
            all addresses.
    """
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        address = ipaddress.ip_address(node_address)

    # A URL has an IPv6 address in brackets.
    if address.version == 6:
        return f"[{address}]"
    return str(address)
