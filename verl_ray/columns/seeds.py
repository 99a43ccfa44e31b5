"""Seeds of rows.

Invariant: a seed is a pure function of the run's seed and of the identity of a rollout,
so a rollout that is generated again, by another replica or in a repeated step, has the
same tokens.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from verl_ray.columns.batch import Int64


def row_seeds(run_seed: int, purpose: str, row_id: Int64) -> Int64:
    """Return a seed in [0, 2^63) for each row.

    Args:
        run_seed: The seed of the run.
        purpose: "train", "evaluate" or "generate". Rows of different purposes
            never share a random stream.
        row_id: The ids of the rows, int64 [rows].

    Returns:
        The seeds, int64 [rows].
    """
    digest = hashlib.blake2b(f"{run_seed}:{purpose}".encode(), digest_size=8).digest()
    offset = np.uint64(int.from_bytes(digest, "little"))
    mixed = _mix(row_id.astype(np.uint64) + offset)
    # Seeds are signed, so the highest bit is left out.
    return (mixed >> np.uint64(1)).astype(np.int64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread every input bit over all output bits.

    This is the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    # The multiplications are modulo 2^64.
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
