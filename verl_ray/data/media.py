"""Images, videos and sounds in a record, which a model of texts would never see.

Invariant: whatever holds one is refused, be it a column, a field of an object or of a
message, or a part of its content. What is empty loses nothing and stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from verl_ray.errors import DataError

# Names are compared in lower case and without marks: "image_url_1" is "imageurl1".
_MARKS = re.compile(r"[\W_]")
_NAME = re.compile(
    r"(input)?(image|img|picture|photo|video|audio|sound)s?"
    r"((path|file|url|uri|byte|data|base64|b64)s?)?\d*"
    r"|multimodal(data|inputs?)?|mmdata|pixelvalues(images?|videos?)?"
)

# Longer names are what their last word says: "question_image" is an image, but
# "image_caption" is a caption. The words behind it may tell how it is stored.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_MEDIUM = re.compile(r"(image|img|picture|photo|video|audio|screenshot)s?|frames")
_PROGRAM = ("docker", "container", "oci", "vm", "disk")
"""Words before "image" that say that it is one of a file system."""
_FORM = re.compile(r"(path|file|filename|url|uri|link|byte|data|base|b|list|array)s?")

_MEDIA_PART = re.compile(r"(input_)?(image|video|audio)(_url|_file)?")

_DATA_URL = re.compile(r"\s*data:(image|video|audio)/", re.IGNORECASE)
# PNG, JPEG, GIF, WAV and WebP and AVI, MP3, Ogg, FLAC, Matroska, TIFF, MP4.
_MAGIC = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF|ID3|OggS|fLaC|\x1aE\xdf\xa3|II\*\0|MM\0\*|....ftyp",
    re.DOTALL,
)
_BASE64_MAGIC = re.compile(
    r"(iVBORw0KGgo|/9j/|R0lGOD|UklGR|SUQz|T2dnUw|ZkxhQ)[A-Za-z0-9+/\s]{40,}=*\s*"
)

# A CSV file has nothing but texts.
_EMPTY_TEXTS = ("", "[]", "{}", "null", "none", "nan", "false", "0")

_TEXT_PARTS = ("text", "input_text", "output_text")

_TEXT_ONLY = "images, videos and sounds are not supported yet"
_FIX = "take records of texts"


def refuse_media(
    fields: Mapping[str, object], where: str, *, read: Collection[str] = ()
) -> None:
    """Raise DataError if a field, at any depth, holds an image, a video or a sound.

    It does so by its name, or by a value that is one whatever its name is.

    Args:
        fields: The columns of a record, or the fields of an object in it.
        where: The place of the record or the object.
        read: The paths of fields that are read as texts or messages. In these neither
            names nor typed parts count: an answer may be an object of any fields.
    """
    path = next(_paths_of_media(fields, read), None)
    if path is not None:
        raise DataError(
            f"found something in {path!r}; {_TEXT_ONLY}", fix=_FIX, place=where
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


def is_typed_part(value: object) -> bool:
    """Return whether a value is a part of a content: a text, image, video or sound."""
    if not isinstance(value, dict):
        return False
    is_text = value.get("type") in _TEXT_PARTS and isinstance(value.get("text"), str)
    return is_text or _is_media_part(value)


def _is_media_part(value: object) -> bool:
    """Return whether a value is a part of a content by its type, and no text."""
    kind = value.get("type") if isinstance(value, dict) else None
    return isinstance(kind, str) and _MEDIA_PART.fullmatch(kind) is not None


def _paths_of_media(
    value: object, read: Collection[str], path: str = "", *, by_name: bool = True
) -> Iterator[str]:
    """Yield the path of each image, video and sound in an object or a list.

    Args:
        path: The path of the value; it is that of its items, too.
        by_name: Whether names and typed parts count.
    """
    items: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        items = ((str(name), part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        items = (("", part) for part in value)

    for name, part in items:
        # A number counts or numbers images, and false says that there is none.
        if isinstance(part, int | float):
            continue
        inner = f"{path}.{name}" if path and name else path or name
        counts = by_name and inner not in read
        is_named = counts and _is_name(name) and not _is_empty(part)
        is_typed = counts and isinstance(part, list) and any(map(_is_media_part, part))
        if is_named or is_typed or _is_media(part):
            yield inner
        else:
            yield from _paths_of_media(part, read, inner, by_name=counts)


def _is_name(name: str) -> bool:
    """Return whether people use this name for images, videos or sounds."""
    if _NAME.fullmatch(_MARKS.sub("", name.lower())):
        return True
    words = [word.lower() for word in _WORD.findall(name)]
    while words and _FORM.fullmatch(words[-1]):
        words.pop()
    if not words or not _MEDIUM.fullmatch(words[-1]):
        return False
    return len(words) == 1 or words[-2] not in _PROGRAM


def _is_empty(value: object) -> bool:
    """Return whether a value has nothing in it, at any depth."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list):
        return all(map(_is_empty, value))
    if isinstance(value, str):
        return value.strip().lower() in _EMPTY_TEXTS
    return value is None or value is False or value == b""


def _is_media(value: object) -> bool:
    """Return whether a value is an image, a video or a sound, whatever its name is."""
    if isinstance(value, str):
        # Nearly every text is known from its first letters.
        return bool(_DATA_URL.match(value) or _BASE64_MAGIC.fullmatch(value))
    if isinstance(value, bytes):
        return _MAGIC.match(value) is not None
    if isinstance(value, dict):
        content = value.get("bytes")
        # `datasets` stores them so, and decodes sounds to an array.
        if isinstance(content, bytes):
            return content != b"" or not _is_empty(value.get("path"))
        if value.keys() == {"path", "bytes"}:
            is_stored = content is None or isinstance(content, str)
            return is_stored and not _is_empty(value)
        has_array = not _is_empty(value.get("array"))
        return has_array and "sampling_rate" in value
    return type(value).__module__.partition(".")[0] in ("PIL", "torchcodec")
