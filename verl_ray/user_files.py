"""Python files of users, imported as modules whose names say where the files are.

Such a module is `verl_ray.user_files.PATH`. PATH is the absolute path of the file, with
dots and what is not ASCII percent-encoded. Whoever unpickles an object of the module
imports it by that name, so that processes which a user's code starts find it.

Invariant: a file is run once per process, and it is never the module that others import
by a name of their own: a user's `math.py` must not become the `math` of everybody.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from itertools import dropwhile
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote_to_bytes

# Only a package has modules inside; none of them is searched in a folder.
__path__: list[str] = []

_PREFIX = f"{__name__}."

_FRAMES = 4  # innermost frames of a traceback that are worth showing

_INSTALLED = (
    "<frozen",
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
"""Beginnings of the names of files that are hardly the user's own."""

_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/")
"""Parts of the names of such files of any Python, that of a command included."""

# Frames of an import, which mean nothing to the user.
_IMPORT_FRAMES = (__file__, "<frozen", importlib.__file__)


def module_path() -> list[str]:
    """Return where modules are searched: as Python does, then in the current folder.

    Ray's workers have the current folder of the driver on their path as well.
    """
    here = str(Path.cwd())
    return sys.path if here in sys.path else [*sys.path, here]


def run_file(path: Path) -> ModuleType:
    """Import the file, if this process has not done so yet.

    Its folder is importable from then on.

    Raises:
        ImportError: The name of the file does not end in `.py`.
        BaseException: Whatever running the file raises.
    """
    path = path.absolute()
    if path.suffix != ".py":
        raise ImportError(f"{path.name} does not end in .py")
    return importlib.import_module(_module_name(path))


def _module_name(path: Path) -> str:
    # A dot would divide the name into those of a package and of a module inside.
    return _PREFIX + quote(os.fsencode(path)).replace(".", "%2E")


class _UserFileFinder:
    """The entry of `sys.meta_path` that finds a file by the name of its module."""

    def find_spec(
        self,
        name: str,
        _path: Sequence[str] | None = None,
        _target: ModuleType | None = None,
        /,
    ) -> ModuleSpec | None:
        """Return how the module is loaded; None if it is no user's file."""
        encoded = name.removeprefix(_PREFIX)
        file = Path(os.fsdecode(unquote_to_bytes(encoded)))
        if encoded == name or not file.is_absolute():
            return None

        # At the end of the path, where no file of the user hides another module.
        folder = str(file.parent)
        if folder not in sys.path:
            sys.path.append(folder)
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(_UserFileFinder())


def words_of(error: BaseException, our_files: tuple[str, ...]) -> str:
    """Return in one line what a user's code raised, and where.

    Args:
        error: What it raised.
        our_files: Beginnings of the names of files whose frames mean nothing to the
            user.
    """
    skipped = (*_IMPORT_FRAMES, *our_files)
    return last_cause(short_traceback(error, skip_files=skipped))


# --------------------------------------------------------------------------- tracebacks


def short_traceback(
    error: BaseException, skip_files: tuple[str, ...], limit: int = 2000
) -> str:
    """Return the error and the innermost frames that led to it, as text.

    The innermost one of the user's own code is among them.

    Args:
        skip_files: Outer frames are left out while their files' names begin with one of
            these.
        limit: The text is at most this many characters, from its end.
    """
    report = traceback.TracebackException.from_exception(error)
    # Ends at the first frame that is not ours.
    while report.stack and report.stack[0].filename.startswith(skip_files):
        report.stack.pop(0)
    outer = report.stack[:-_FRAMES]
    del report.stack[:-_FRAMES]
    if outer and all(map(_is_installed, report.stack)):
        own = [frame for frame in outer if not _is_installed(frame)]
        report.stack[0] = own[-1] if own else outer[0]
    return "".join(report.format(chain=False)).strip()[-limit:]


def _is_installed(frame: traceback.FrameSummary) -> bool:
    return _is_of_a_library(frame.filename)


def _is_of_a_library(path: str) -> bool:
    """Return whether a file is hardly the user's own, in any Python's folders."""
    return path.startswith(_INSTALLED) or _LIBRARY.search(path) is not None


def shortened(text: str, limit: int) -> str:
    """Return the text of a traceback without frames in its middle, which are marked.

    The last frame of the user's own code stays.

    Args:
        limit: Most characters behind the mark.
    """
    head, _, rest = text.partition("\n")
    if len(rest) <= limit:
        return text
    # A message that is longer than all has no frame here.
    tail = rest[-limit:]
    frame = re.search("^  File ", tail, re.M)
    tail = tail[frame.start() :] if frame else tail
    omitted = rest.removesuffix(tail)
    frames = re.findall(r'^  File "[^"]+", line .*\n(?:    .*\n)*', omitted, re.M)
    own = [each for each in frames if _own_places(each)]
    shown = own[-1] if own and not _own_places(tail) else ""
    return f"{head}\n{shown}  ...\n{tail}"


def _own_places(detail: str) -> list[tuple[str, str]]:
    return [each for each in places_in(detail) if not _is_of_a_library(each[0])]


def last_cause(detail: str) -> str:
    """Return a failed score's detail in one line, with the place of a raised error.

    It is the innermost one of the user's own code, if there is any.

    Args:
        detail: A sentence, or the text of tracebacks, of which each is a cause.
    """
    parts = re.split("^(?=Traceback )", detail.strip(), flags=re.MULTILINE)
    return "; ".join(filter(None, map(_cause, parts))) or "no reason was given"


def places_in(detail: str) -> tuple[tuple[str, str], ...]:
    """Return file and line of each frame in the text of tracebacks."""
    return tuple(re.findall(r'File "([^"]+)", line (\d+)', detail))


def _cause(part: str) -> str:
    lines = part.rstrip().splitlines()
    places = places_in(part)
    if not places:
        return lines[-1] if lines else ""
    # Behind the last frame, whose lines of code are indented, is the error's message.
    last = max(n for n, line in enumerate(lines) if line.startswith("  File "))
    message = [*dropwhile(lambda line: line.startswith("    "), lines[last + 1 :])]
    words = " ".join(" ".join(message or lines[-1:]).split())
    path, line = (_own_places(part) or places)[-1]
    return f"{words} ({path}, line {line})"
