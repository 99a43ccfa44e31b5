"""What an open weight update still lacks, and the two proofs that what an engine holds is what was sent.

Invariant: a version is accepted only if every parameter of its manifest came once, every fingerprint is the sender's,
and, where a probe was announced, the engine computes with the weights what the sender does. Deliberately not here: how
weights are received and loaded, and what an engine may do while an update is open (`base.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_ray.errors import VerlRayError, WeightSyncError
from verl_ray.rollout.requests import Float32, Tokens
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Fingerprint, Prints

STALE = 0.01
"""By how much log-probs of the trainer move, at the most, while those of an engine that has its weights do not."""


@dataclass
class WeightUpdate:
    """An open weight update: the names still to come, and whether it is committed and only the proof is missing."""

    version: int
    missing: set[str]
    committed: bool = False

    def require_awaited(self, bucket: Bucket) -> None:
        if strange := sorted(name for name in bucket.names if name not in self.missing):
            raise WeightSyncError(f"bucket {bucket.index} brings what is not awaited, or came before: {strange}")

    def require_complete(self) -> None:
        if self.missing:
            raise WeightSyncError(f"version {self.version}: not received: {sorted(self.missing)}")

    def require_equal(self, sent: Mapping[str, Fingerprint], arrived: Sequence[Prints]) -> None:
        """`arrived`: the fingerprints of what the loader was given, by rank of the engine."""
        for rank, prints in enumerate(arrived):
            names = sorted(sent.keys() | prints.by_name.keys())
            if wrong := [name for name in names if sent.get(name) != prints.by_name.get(name)]:
                where = f" on rank {rank} of the {len(arrived)} of the engine" if len(arrived) > 1 else ""
                raise WeightSyncError(f"version {self.version}: sent and received differ in {wrong}{where}")


@contextlib.contextmanager
def aborting_on_error(abort_update: Callable[[], None]) -> Iterator[None]:
    """Gives the open update up when its block fails, and turns foreign errors into `WeightSyncError`."""
    try:
        yield
    except BaseException as error:
        abort_update()
        if isinstance(error, Exception) and not isinstance(error, VerlRayError):
            raise WeightSyncError(f"the weight update failed and was aborted: {error!r}") from error
        raise


@dataclass(frozen=True, eq=False)
class Probe:
    """Fixed tokens, and what the sender's model says of them: what an engine that holds its weights says too."""

    rows: tuple[Tokens, ...]
    log_probs: tuple[Float32, ...]  # of each token but a row's first, at temperature 1
    tolerance: float  # the largest difference that two implementations of one model may have


class Proofs:
    """The probes that an engine was asked for, each judged by itself and by when log-probs last moved."""

    def __init__(self) -> None:
        self._moved: tuple[int, Probe, list[Float32]] | None = None

    def judge(self, version: int, probe: Probe, found: list[Float32]) -> float:
        """The largest difference of a log-prob.

        Raises:
            WeightSyncError: it is above the tolerance, or the engine's log-probs stand still while the sender's move.
        """
        differences = [
            np.abs(ours - theirs).max(initial=0.0) for ours, theirs in zip(found, probe.log_probs, strict=True)
        ]
        worst = int(np.argmax(differences))
        # A NaN compares as neither: only what is within the tolerance passes.
        if not differences[worst] <= probe.tolerance:
            raise WeightSyncError(
                f"version {version}: every weight arrived as it was sent, but the engine computes with others: of "
                f"fixed tokens {probe.rows[worst].tolist()} its log-probs differ from the trainer's by "
                f"{differences[worst]:.3g}, more than {probe.tolerance:.3g}"
            )
        self._require_moved(version, probe, found)
        return float(differences[worst])

    def _require_moved(self, version: int, probe: Probe, found: list[Float32]) -> None:
        """Where rounding hides small steps: log-probs that stay the same to the bit are of weights that do, too."""
        if self._moved is not None:
            since, then, before = self._moved
            same = len(found) == len(before) and all(map(np.array_equal, found, before))
            if same and all(map(np.array_equal, probe.rows, then.rows)):
                pairs = zip(probe.log_probs, then.log_probs, strict=True)
                moved = max(np.abs(now - earlier).max(initial=0.0) for now, earlier in pairs)
                if moved > STALE:
                    raise WeightSyncError(
                        f"version {version}: every weight arrived as it was sent, but the engine computes with older "
                        f"ones: its log-probs of fixed tokens are to the bit those of version {since}, since when the "
                        f"trainer's have moved by {moved:.3g}"
                    )
                return
        self._moved = version, probe, found
