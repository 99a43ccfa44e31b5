"""What there is to choose from, as the folder `configs` has it: root configs and groups, each with its first line.

Invariant: the files are the list; nothing here names one. Deliberately not here: what a choice sets (its YAML), and
configs of a user's own.
"""

from __future__ import annotations

import importlib.resources
import textwrap
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable

WIDTH = 100
_FILES = "base"  # a folder of what root configs have in common, and no choice


def root_configs() -> dict[str, str]:
    """What may follow --config-name, and what each is."""
    return _choices(importlib.resources.files("configs"))


def groups() -> dict[str, dict[str, str]]:
    """The choices of each group, and what each is."""
    folders = (one for one in importlib.resources.files("configs").iterdir() if one.is_dir() and one.name != _FILES)
    found = {folder.name: _choices(folder) for folder in folders}
    return {name: found[name] for name in sorted(found) if found[name]}


def listed(choices: Mapping[str, str], indent: str) -> str:
    """One choice below the other, what it is beside it."""
    width = max(map(len, choices))
    return "\n".join(line for name, about in choices.items() for line in _lines(name, about, width, indent))


def _lines(name: str, about: str, width: int, indent: str) -> Iterator[str]:
    first = f"{indent}{name:<{width}}  "
    yield from textwrap.wrap(about, WIDTH, initial_indent=first, subsequent_indent=" " * len(first)) or [first.rstrip()]


def _choices(folder: Traversable) -> dict[str, str]:
    """Files that begin with an underscore are parts of others."""
    files = sorted((one for one in folder.iterdir() if one.name.endswith(".yaml")), key=lambda one: one.name)
    return {one.name.removesuffix(".yaml"): _about(one) for one in files if not one.name.startswith("_")}


def _about(file: Traversable) -> str:
    """The comment that a YAML file begins with."""
    first = file.read_text("utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
