"""The seed of each rollout, from the run's seed and what the rollout is.

Invariant: a pure function, so that a rollout that is drawn again (another replica, a replayed step) has the same
tokens. Deliberately not here: the generators that the seeds go to.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from verl_ray.data.batch import Int64


def row_seeds(run_seed: int, purpose: str, row_id: Int64) -> Int64:
    """One seed in [0, 2^63) per row; rows of different purposes ("train", "evaluate") never share a stream."""
    digest = hashlib.blake2b(f"{run_seed}:{purpose}".encode(), digest_size=8).digest()
    mixed = _mix(row_id.astype(np.uint64) + np.uint64(int.from_bytes(digest, "little")))
    return (mixed >> np.uint64(1)).astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
