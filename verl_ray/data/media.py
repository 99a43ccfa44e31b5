"""Images, videos and sounds in a record, which a model of texts would never see.

Invariant: whatever holds one is refused, be it a column, a field of a message or a part
of its content. What is empty loses nothing and stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from verl_ray.errors import DataError

# Names are compared in lower case and without marks: "image_url_1" is "imageurl1".
_MARKS = re.compile(r"[\W_]")
_NAME = re.compile(
    r"(input)?(image|img|picture|photo|video|audio|sound)s?"
    r"((path|file|url|uri|byte|data|base64|b64)s?)?\d*"
    r"|multimodal(data|inputs?)?|mmdata"
)

_TEXT_PARTS = ("text", "input_text", "output_text")

_TEXT_ONLY = "images, videos and sounds are not supported yet"
_FIX = "take records of texts"


def refuse_media(fields: Mapping[str, object], where: str) -> None:
    """Raise DataError if a field holds an image, a video or a sound.

    It does so by its name, or by a value that `datasets` stores or decodes.

    Args:
        fields: The columns of a record, or the fields of an object in it.
        where: The place of the record or the object.
    """
    for name, value in fields.items():
        if (_is_name(name) and not _is_empty(value)) or _holds_media(value):
            raise DataError(
                f"found something in {name!r}; {_TEXT_ONLY}", fix=_FIX, place=where
            )


def text_of_part(part: object, place: str) -> str | None:
    """Return the text of a part of a content; None if it has none.

    Args:
        place: The place of its message.

    Raises:
        DataError: The part is no text, or holds an image, a video or a sound beside it.
    """
    if not isinstance(part, dict):
        return None

    kind = part.get("type")
    if kind is not None and kind not in _TEXT_PARTS:
        raise DataError(
            f"content has a part of type {kind!r}; {_TEXT_ONLY}", fix=_FIX, place=place
        )
    refuse_media(part, place)
    # A part that does not say its type is a text if it has nothing else.
    others = part.keys() - {"type", "text"}
    is_text = kind is not None or all(_is_empty(part[name]) for name in others)
    text = part.get("text")
    return text if is_text and isinstance(text, str) else None


def _is_name(name: str) -> bool:
    """Return whether people use this name for images, videos or sounds."""
    return _NAME.fullmatch(_MARKS.sub("", name.lower())) is not None


def _is_empty(value: object) -> bool:
    """Return whether a value has nothing in it, at any depth."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list):
        return all(map(_is_empty, value))
    return value is None or value == "" or value == b""


def _holds_media(value: object) -> bool:
    """Return whether an image or a sound, stored or decoded, is in a value."""
    if isinstance(value, dict):
        has_bytes = isinstance(value.get("bytes"), bytes) and value["bytes"] != b""
        return has_bytes or any(map(_holds_media, value.values()))
    if isinstance(value, list):
        return any(map(_holds_media, value))
    return type(value).__module__.partition(".")[0] in ("PIL", "torchcodec")
