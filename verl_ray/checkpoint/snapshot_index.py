"""Descriptions of snapshots: JSON, which can do nothing to a process that reads it.

Invariant: what is decoded has the types and the bits of what was encoded.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str | int, ...]
"""Keys that lead through nested dictionaries and lists to a value."""

_FLOAT = struct.Struct("<d")


@dataclass(frozen=True)
class Places:
    """Where the parts of a tensor begin in a snapshot, in bytes."""

    offsets: tuple[int, ...]


def encode(entries: dict[KeyPath, Any]) -> bytes:
    """Return the text of a description.

    Args:
        entries: The places of each tensor of a state, and each value that is none:
            None, a bool, int, float, str, bytes, or a tuple of such.
    """
    pairs = [[list(keys), _encoded(value)] for keys, value in entries.items()]
    return json.dumps(pairs, allow_nan=False).encode()


def decode(text: bytes) -> dict[KeyPath, Any]:
    """Return the entries whose text `encode` returned."""
    return {tuple(keys): _decoded(value) for keys, value in json.loads(text)}


def _encoded(value: Any) -> Any:
    # A subclass, such as an enum, would come back as another type.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        # Text would lose what NaNs tell apart.
        return {"float": _FLOAT.pack(value).hex()}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is tuple:
        return {"tuple": [_encoded(part) for part in value]}
    if kind is Places:
        return {"places": value.offsets}
    raise AssertionError(f"an engine's state holds tensors and numbers, not {value!r}")


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "float":
            return _FLOAT.unpack(bytes.fromhex(content))[0]
        case "bytes":
            return bytes.fromhex(content)
        case "tuple":
            return tuple(map(_decoded, content))
        case "places":
            return Places(tuple(content))
    raise AssertionError(f"{kind!r} is not of `encode`")
