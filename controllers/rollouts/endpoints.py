"""The addresses at which clients outside of the run find the rollout replicas.

Each replica is announced by a line on stdout when its port is open, and by
run.dir/endpoints.json.

Invariant: the file names the replicas whose ports are open, as far as is known, at
their present addresses. It is removed when the run ends, unless the run is killed.
"""

from __future__ import annotations

import ipaddress
import json
import sys
from pathlib import Path

from verl_ray.cluster.members import Member
from verl_ray.config.rollout_task import RolloutTaskConfig

FILE = "endpoints.json"


class Endpoints:
    """The endpoints of a run's replicas, each of which is a process."""

    def __init__(self, config: RolloutTaskConfig) -> None:
        """Start without replicas; the file is written with the first of them."""
        self._host = config.rollout.endpoint.host
        self._model = config.run.name
        self._path = Path(config.run.dir) / FILE

        self._entries: dict[int, dict[str, str]] = {}
        """Entries of the file, by rank of the replica."""

    def announce(self, member: Member, port: int) -> None:
        """Announce a replica whose port is open. Only the first call has an effect."""
        if member.rank in self._entries:
            return

        assert member.process_info is not None, "the replica has started"
        host = _client_host(self._host, member.process_info.address)
        url = f"http://{host}:{port}/v1"
        print(
            f"rollout replica {member.rank} answers at {url} (model {self._model}, on"
            f" {member.node})",
            flush=True,
        )
        self._entries[member.rank] = {
            "url": url,
            "model": self._model,
            "node": member.node,
        }
        self._write()

    def withdraw(self, member: Member) -> None:
        """Remove the entry of a lost replica, if it has one."""
        if self._entries.pop(member.rank, None) is not None:
            self._write()

    def warn_of_wait(self, member: Member) -> None:
        """Say that a replica has started, and that its port is not open yet."""
        assert member.process_info is not None, "the replica has started"
        print(
            f"warning: rollout replica {member.rank} on {member.node} generates, but"
            " does not answer clients before it can listen on its port; what prevents"
            f" it is in {member.process_info.log_path}",
            file=sys.stderr,
            flush=True,
        )

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
