"""Whether the cluster of this process has lost a process that it cannot do without.

Invariant: from the moment at which that is known, every wait raises. Ray would wait
for a minute, or for ever, and then end this process without a word. Deliberately not
here: who finds out (`guard.py`), and what a run does about it.
"""

from __future__ import annotations

from verl_ray.errors import ClusterLost


class ClusterLoss:
    """The loss of the cluster that this process is connected to."""

    def __init__(self) -> None:
        self._reason: str | None = None

    @property
    def has_happened(self) -> bool:
        """Whether the cluster is lost."""
        return self._reason is not None

    def note(self, reason: str) -> None:
        """Note why the cluster is lost; any thread may call this.

        Args:
            reason: A process of Ray, and what has become of it.
        """
        self._reason = self._reason or reason

    def forget(self) -> None:
        """Forget the loss: this process is connected to no cluster any more."""
        self._reason = None

    def raise_if_lost(self) -> None:
        """Raise ClusterLost if the cluster is lost."""
        if self._reason is not None:
            raise ClusterLost(
                f"Ray's process {self._reason}, and the cluster is lost with it. What"
                " Ray said is in its folder of logs"
            )


CLUSTER_LOSS = ClusterLoss()
