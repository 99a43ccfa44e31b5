"""The choices that the folder `configs` offers: root configs and groups.

Each comes with the first line of its file. Invariant: the files are the list, and no
choice is named here. Deliberately not here: what a choice sets (its YAML), and configs
of a user's own.
"""

from __future__ import annotations

import importlib.resources
import textwrap
from collections.abc import Mapping
from importlib.resources.abc import Traversable

WIDTH = 100
"""The longest line of the listing, in characters."""

# A folder with what root configs have in common, which is no choice.
_COMMON_FOLDER = "base"

RECIPES = "recipes"
"""A folder with root configs of real models."""


def root_configs() -> dict[str, str]:
    """Return the names that may follow --config-name, each with what it is."""
    folder = importlib.resources.files("configs")
    recipes = {
        f"{RECIPES}/{name}": about for name, about in _choices(folder / RECIPES).items()
    }
    return _choices(folder) | recipes


def groups() -> dict[str, dict[str, str]]:
    """Return the choices of each group, each with what it is."""
    choices_of = {}

    for folder in importlib.resources.files("configs").iterdir():
        if folder.is_dir() and folder.name not in (_COMMON_FOLDER, RECIPES):
            choices_of[folder.name] = _choices(folder)

    return {name: choices_of[name] for name in sorted(choices_of) if choices_of[name]}


def formatted_choices(choices: Mapping[str, str], indent: str) -> str:
    """Return one choice per line, with what it is in a second column."""
    width = max(map(len, choices))
    lines: list[str] = []

    for name, about in choices.items():
        lines += _lines(f"{indent}{name:<{width}}  ", about)

    return "\n".join(lines)


def _lines(heading: str, about: str) -> list[str]:
    """Return a heading and the text beside it, wrapped into its column."""
    lines = textwrap.wrap(
        about,
        WIDTH,
        initial_indent=heading,
        subsequent_indent=" " * len(heading),
    )

    # A file without a comment has no text to wrap.
    return lines or [heading.rstrip()]


def _choices(folder: Traversable) -> dict[str, str]:
    """Return the YAML files of a folder, by name, each with what it is."""
    choices = {}

    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        # Files that begin with an underscore are parts of others.
        if file.name.endswith(".yaml") and not file.name.startswith("_"):
            choices[file.name.removesuffix(".yaml")] = _about(file)

    return choices


def _about(file: Traversable) -> str:
    """Return the comment that a YAML file begins with; empty if there is none."""
    lines = file.read_text("utf-8").splitlines()
    # Hydra reads the place of its settings from the first line.
    if lines and lines[0].startswith("# @package"):
        del lines[0]
    if not lines or not lines[0].startswith("#"):
        return ""
    return lines[0].removeprefix("#").strip()
