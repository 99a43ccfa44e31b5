"""JSON of any value that a data file can hold.

Invariant: what JSON has is written as it is, and nothing else stops the writing. Dates
and times are texts in ISO 8601, bytes are their UTF-8 text or null, numbers that are
not finite are null, and all else is the text that Python prints. Images and sounds,
which `datasets` stores as objects with bytes, are left out. Deliberately not here:
reading JSON (`file_formats.py`).
"""

from __future__ import annotations

import datetime
import json
import math


def json_text(value: object) -> str:
    """Return a value as a line of JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    """Return a value as JSON can hold it."""
    if isinstance(value, dict):
        items = value.items()
        return {str(key): _plain(part) for key, part in items if not _is_media(part)}
    if isinstance(value, list | tuple | set):
        return [_plain(part) for part in value if not _is_media(part)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return str(value)


def _is_media(value: object) -> bool:
    """Return whether a value is an image or a sound, stored or decoded."""
    if isinstance(value, dict):
        return isinstance(value.get("bytes"), bytes)
    return type(value).__module__.partition(".")[0] in ("PIL", "torchcodec")
