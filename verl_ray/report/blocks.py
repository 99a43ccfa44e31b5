"""Blocks of data in a page: gzip and base64, which the page decodes when it needs one.

Invariant: a block is text that can stand in any element of HTML, whatever it was made
of. Numbers are float32 with five significant digits.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_LEVEL = 6
# 17 of 23 bits of the mantissa are five significant digits.
_DROPPED_BITS = 6


@dataclass
class Blocks:
    """The blocks of a page, by their numbers."""

    texts: list[str] = field(default_factory=list)

    def add_json(self, value: object) -> int:
        """Add a value as JSON, and return the number of its block.

        Infinite numbers and NaN become null.
        """
        # Lone surrogates have no bytes in UTF-8, so all but ASCII is escaped.
        try:
            text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(value), separators=(",", ":"))
        return self._add(text.encode("ascii"))

    def add_numbers(self, values: Sequence[float] | npt.NDArray[np.float64]) -> int:
        """Add numbers, [n], and return the number of their block."""
        return self._add(planes(np.asarray(values, dtype=np.float64)))

    def _add(self, content: bytes) -> int:
        packed = gzip.compress(content, _LEVEL, mtime=0)
        self.texts.append(base64.b64encode(packed).decode("ascii"))
        return len(self.texts) - 1


def planes(values: npt.NDArray[np.float64]) -> bytes:
    """Return numbers, [n], as float32: their last bytes, those before, and so on.

    Bytes of one kind are alike, so they are packed better side by side.
    """
    # Numbers beyond float32 become infinite.
    with np.errstate(over="ignore"):
        short = values.astype("<f4")
    bits = short.view("<u4")
    half = np.uint32(1 << (_DROPPED_BITS - 1))
    rounded = (bits + half) & np.uint32(~((1 << _DROPPED_BITS) - 1) & 0xFFFFFFFF)
    rounded = np.where(np.isnan(short), np.uint32(0x7FC00000), rounded)
    columns = rounded.astype("<u4").view(np.uint8).reshape(-1, 4)
    return columns.T.tobytes()


def _finite(value: object) -> object:
    """Return a value of plain types without NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
