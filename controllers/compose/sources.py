"""Where configurations come from: the project's YAML behind a folder of the user's own, composed by Hydra.

Deliberately not here: what the user typed (`choices.py`, `overrides.py`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ray.algorithms.catalogue import settings
from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import in_ray_package


class ProjectConfigs(SearchPathPlugin):  # type: ignore[misc]  # Hydra ships no types
    """Puts the project's configs behind a folder of the user's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("verl_ray", "pkg://configs")


Plugins.instance().register(ProjectConfigs)


def outputs_root() -> str:
    """Where runs write unless told otherwise: `outputs` of the current folder, or of the home folder in a Ray job,
    whose current folder is a copy that Ray deletes."""
    here = Path.cwd()
    return str((Path.home() if in_ray_package(here) else here) / "outputs")


OmegaConf.register_new_resolver("outputs_root", outputs_root, replace=True)


def config_sources(config_dir: str | None) -> AbstractContextManager[None]:
    sources: AbstractContextManager[None]
    if config_dir is None:
        sources = initialize_config_module("configs", version_base="1.3")
        return sources
    if not Path(config_dir).is_dir():
        fix = "Give a folder with root configs or groups of your own."
        raise ConfigError([Problem("--config-dir", config_dir, "there is no such folder", fix)])
    sources = initialize_config_dir(str(Path(config_dir).resolve()), version_base="1.3")
    return sources


def run_hydra(config_name: str, made: Mapping[str, str], own_configs: bool) -> tuple[DictConfig, dict[str, str]]:
    """The composed tree under choices, and the choice of every group in it, by the key that overrides it."""
    compose_files = _compose_files if own_configs else _compose_packaged_files
    return copy.deepcopy(compose_files(config_name, tuple(f"{key}={choice}" for key, choice in made.items())))


def _compose_files(config_name: str, overrides: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
    tree = hydra_compose(config_name, list(overrides), return_hydra_config=True)
    choices = {str(key): str(choice) for key, choice in tree.hydra.runtime.choices.items()}
    OmegaConf.set_readonly(tree, False)
    with open_dict(tree):
        del tree["hydra"]
        if "algorithm" in tree:  # an algorithm's YAML leaves out what its formulas do not read
            tree.algorithm = OmegaConf.merge({setting.name: None for setting in settings()}, tree.algorithm)
    return tree, {key: choice for key, choice in choices.items() if not key.startswith("hydra/")}


_compose_packaged_files = functools.cache(_compose_files)  # which do not change: Hydra takes 0.2 s for them


def options_of(group: str) -> list[str]:
    found = GlobalHydra.instance().config_loader().get_group_options(group)
    return [name for name in found if not name.startswith("_")]


def backend_set_in_yaml(base: DictConfig, choices: Mapping[str, str]) -> list[Problem]:
    """`backend:` in the body of a root config of the user's own would reach no role."""
    if "backend" not in choices:
        return []
    plain = hydra_compose(f"backend/{choices['backend']}").backend
    return [
        Problem(f"backend.{key}", value, "in a YAML file this reaches no role", f"Write it under actor.backend.{key}.")
        for key, value in base.backend.items()
        if key not in plain or plain[key] != value
    ]
