"""JSON files that contain a checksum of themselves.

Invariant: an object that `unsealed` returns is the one that `sealed` was given, or else
TornCheckpoint is raised.

Deliberately not here: what the objects mean (`manifest.py`, `store.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ray.disk import replace_file
from verl_ray.errors import CheckpointError

CHECKSUM = "checksum"
"""Key of the checksum in an object."""


class TornCheckpoint(CheckpointError):
    """A checkpoint that cannot be used, although an older one may be usable."""


def write_json(path: Path, value: object) -> None:
    """Replace a file by JSON, which is on the disk when this returns."""
    replace_file(path, json.dumps(value, indent=1).encode())


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, without comparing its checksum.

    Raises:
        TornCheckpoint: There is no such object.
    """
    name = f"{path.parent.name}: {path.name}"
    try:
        content = path.read_bytes()
        value = json.loads(content)
    except OSError as error:
        raise TornCheckpoint(f"{name} cannot be read ({error})") from None
    except (ValueError, RecursionError):
        # A write that was cut short often leaves an empty file.
        fault = "not JSON" if content.strip() else "empty"
        raise TornCheckpoint(f"{name} is {fault}") from None

    if not isinstance(value, dict):
        kind = type(value).__name__
        raise TornCheckpoint(f"holds a {kind}", expected="a JSON object", subject=name)
    return value


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object as it will be read, with its checksum.

    JSON turns tuples into lists and keys into strings, so the checksum is that of the
    converted object.
    """
    plain = json.loads(json.dumps(value))
    return {**plain, CHECKSUM: _checksum(plain)}


def unsealed(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object that `sealed` was given.

    Args:
        path: File that the object was read from, for the error.
        value: Object with its checksum.

    Raises:
        TornCheckpoint: The object is not the one that was written.
    """
    content = {key: part for key, part in value.items() if key != CHECKSUM}
    if value.get(CHECKSUM) == _checksum(content):
        return content

    fault = "was changed: its checksum does not match"
    if CHECKSUM not in value:
        fault = "has no checksum of itself"
    raise TornCheckpoint(f"{path.parent.name}: {path.name} {fault}")


def _checksum(value: Mapping[str, Any]) -> str:
    """Return the BLAKE2b-128 of a JSON object in its canonical form.

    Keys are sorted, there is no white space, and all characters are ASCII.
    """
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
