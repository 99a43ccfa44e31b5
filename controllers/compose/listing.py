"""The choices that the folder `configs` offers, and the root config that a user names.

Each choice comes with the first line of its file. Invariant: the files are the list,
and no choice is named here. A root config is named as such, or by the path of its file;
a path leads to the folder that it is in, as --config-dir does.
"""

from __future__ import annotations

import importlib.resources
import textwrap
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path

from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import path_suggestion, typed_path

WIDTH = 100
"""The longest line of the listing, in characters."""

# A folder with what root configs have in common, which is no choice.
_COMMON_FOLDER = "base"

RECIPES = "recipes"
"""A folder with root configs of real models."""

_SUFFIX = ".yaml"


def root_configs() -> dict[str, str]:
    """Return the names that may follow --config-name, each with what it is."""
    folder = importlib.resources.files("configs")
    recipes = {
        f"{RECIPES}/{name}": about for name, about in _choices(folder / RECIPES).items()
    }
    return _choices(folder) | recipes


def groups() -> dict[str, dict[str, str]]:
    """Return the choices of each group, each with what it is.

    A group inside of another one has the key of the section that it fills.
    """
    choices_of = {}

    for folder in importlib.resources.files("configs").iterdir():
        if not folder.is_dir() or folder.name in (_COMMON_FOLDER, RECIPES):
            continue
        choices_of[folder.name] = _choices(folder)
        for inner in folder.iterdir():
            if inner.is_dir():
                choices_of[f"{folder.name}.{inner.name}"] = _choices(inner)

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


def named_root(config_name: str, config_dir: str | None) -> tuple[str, str | None]:
    """Return the name of a root config, and the folder of the user's own that it is in.

    Args:
        config_name: what follows --config-name: a name, with or without .yaml, or the
            path of a file.
        config_dir: a folder of the user's own, or None.

    Raises:
        ConfigError: it is a path, and there is no such file.
    """
    path = Path(config_name)
    # A relative path may be one below --config-dir.
    if config_name.startswith(("~", "$")):
        path = typed_path("--config-name", config_name)
    if config_dir is not None:
        config_dir = str(typed_path("--config-dir", config_dir))
    if path.suffix in (".yml", ".json"):
        rule = f"a configuration ends in {_SUFFIX}"
        fix = f"Rename the file to {path.stem}{_SUFFIX}."
        raise ConfigError([Problem("--config-name", config_name, rule, fix)])

    name = path.stem if path.suffix == _SUFFIX else path.name
    folder = path.parent
    if config_dir is not None:
        folder = Path(config_dir) / folder

    # A name stands for a file of a folder, or for one of the project's own.
    is_file_here = path.suffix == _SUFFIX and (folder / path.name).is_file()
    if len(path.parts) == 1 and (config_dir is not None or not is_file_here):
        return name, config_dir

    file = folder / f"{name}{_SUFFIX}"
    if file.is_file():
        return name, str(folder)

    # The project has a folder of root configs, too.
    if config_dir is None and folder == Path(RECIPES):
        return f"{RECIPES}/{name}", None
    hint = "Give the path of a .yaml file, or the name of a root config."
    rule = f"there is no file {file}"
    fix = path_suggestion(file, hint)
    raise ConfigError([Problem("--config-name", config_name, rule, fix)])
