"""The root config that a user names: by its name, or by the path of its file.

Invariant: a path leads to the folder that it is in, as --config-dir does. Deliberately
not here: which root configs there are (`sources.py`).
"""

from __future__ import annotations

from pathlib import Path

from controllers.compose.listing import RECIPES
from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import path_suggestion, typed_path

_SUFFIX = ".yaml"


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
