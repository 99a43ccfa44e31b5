"""The sources of configurations, composed by Hydra, and the plain trees they yield.

They are the project's YAML and, before it, a folder of the user's own. Trees of plain
values are searched, resolved and typed here.

Invariant: a value that cannot be used becomes a problem, and the rest is still checked.
"""

from __future__ import annotations

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

from controllers.compose.trees import as_plain
from controllers.compose.unreadable import UNREADABLE, file_problem
from verl_ray.algorithms.catalogue import declared_settings
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.config.algorithm import ADDITIONS
from verl_ray.config.renamed import migrated
from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import in_ray_package
from verl_ray.suggest import nearest_divisors


class ProjectConfigs(SearchPathPlugin):  # type: ignore[misc]  # Hydra ships no types
    """A plugin that puts the project's configs behind a folder of the user's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("verl_ray", "pkg://configs")


Plugins.instance().register(ProjectConfigs)


def outputs_root() -> str:
    """Return the folder where runs write unless the user names another one.

    It is `outputs` in the current folder. In a Ray job it is in the home folder, since
    the current folder of a job is a copy that Ray deletes.
    """
    folder = Path.cwd()
    if in_ray_package(folder):
        folder = Path.home()
    return str(folder / "outputs")


OmegaConf.register_new_resolver("outputs_root", outputs_root, replace=True)


def for_loss(
    policy_loss: str, values: Mapping[str, object], *, _root_: DictConfig
) -> object:
    """Return the value for a loss, by the way in which its older tokens are corrected.

    Args:
        policy_loss: The value of algorithm.policy_loss, which may be a mistake.
        values: A value for each of `PolicyLoss.corrected_as`; for a loss of pairs,
            which needs no correction, that of `pairs`, or None.
        _root_: The whole configuration, from OmegaConf.
    """
    if _root_.get("preference") is not None:
        return values.get("pairs")
    declared = POLICY_LOSSES.get(policy_loss)
    return values["tokens" if declared is None else declared.corrected_as]


OmegaConf.register_new_resolver("for_loss", for_loss, replace=True)


def quarter_of_rows(prompts_per_step: object, group_size: object) -> int:
    """Return the largest size of four or more equal mini-batches of a step's rows.

    Where a number is a mistake, which is reported, any size does.
    """
    if not isinstance(prompts_per_step, int) or not isinstance(group_size, int):
        return 1
    rows = prompts_per_step * group_size
    return nearest_divisors(rows, max(rows // 4, 1))[0] if rows > 0 else 1


OmegaConf.register_new_resolver("quarter_of_rows", quarter_of_rows, replace=True)


def config_sources(config_dir: str | None) -> AbstractContextManager[None]:
    """Return a context in which Hydra knows the project's configs and the user's.

    Args:
        config_dir: a folder of the user's own, or None.

    Raises:
        ConfigError: there is no such folder.
    """
    sources: AbstractContextManager[None]

    if config_dir is None:
        sources = initialize_config_module("configs", version_base="1.3")
        return sources

    folder = Path(config_dir)
    if not folder.is_dir():
        rule = "there is no such folder"
        fix = "Give a folder with root configs or groups of your own."
        raise ConfigError([Problem("--config-dir", config_dir, rule, fix)])

    sources = initialize_config_dir(str(folder.resolve()), version_base="1.3")
    return sources


def run_hydra(
    config_name: str, chosen: Mapping[str, str], config_dir: str | None
) -> tuple[DictConfig, dict[str, str]]:
    """Compose a root config under choices from groups.

    Returns:
        The tree, and the choice of every group in it by the key that overrides it.
        Other callers have them too, so that neither may be changed.

    Raises:
        ConfigError: a file cannot be read or composed.
    """
    overrides = tuple(f"{key}={choice}" for key, choice in chosen.items())
    if config_dir is None:
        return _compose_packaged_files(config_name, overrides)

    try:
        return _compose_files(config_name, overrides)
    except UNREADABLE as error:
        problem = file_problem(error, config_name, config_dir, options_of)
        raise ConfigError([problem]) from error


def _compose_files(
    config_name: str, overrides: tuple[str, ...]
) -> tuple[DictConfig, dict[str, str]]:
    tree = hydra_compose(config_name, list(overrides), return_hydra_config=True)

    choices = {}
    for key, choice in tree.hydra.runtime.choices.items():
        # Hydra's own settings are groups as well.
        if not str(key).startswith("hydra/"):
            choices[str(key)] = str(choice)

    OmegaConf.set_readonly(tree, False)
    with open_dict(tree):
        del tree["hydra"]

        # The YAML of an algorithm leaves out what its formulas do not read.
        if "algorithm" in tree:
            unset = dict.fromkeys(
                (*(setting.name for setting in declared_settings()), *ADDITIONS)
            )
            tree.algorithm = OmegaConf.merge(unset, tree.algorithm)

    # A whole configuration in one file is the config.yaml of a run, of any version.
    if not choices and "task" in tree:
        tree = OmegaConf.create(migrated(as_plain(tree)), flags={"struct": True})

    return tree, choices


# Packaged files do not change, and Hydra takes 0.2 s for them.
_compose_packaged_files = functools.cache(_compose_files)


def options_of(group: str) -> list[str]:
    """Return the choices of a group; those of the empty group are the root configs."""
    loader = GlobalHydra.instance().config_loader()
    options = loader.get_group_options(group)

    # Files that begin with an underscore are parts of others.
    return [name for name in options if not name.startswith("_")]


def roots_beside(config_name: str) -> list[str]:
    """Return the root configs in the folder of one, by the names that users type."""
    folder = config_name.rpartition("/")[0]
    prefix = f"{folder}/" if folder else ""
    return [f"{prefix}{name}" for name in options_of(folder)]


def backend_set_in_yaml(base: DictConfig, choices: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each backend setting in the body of a user's root config.

    A `backend:` section there would reach no role.
    """
    if "backend" not in choices:
        return []

    unchanged = hydra_compose(f"backend/{choices['backend']}").backend
    problems = []

    for name, value in base.backend.items():
        if name not in unchanged or unchanged[name] != value:
            rule = "in a YAML file this reaches no role"
            fix = f"Write it under actor.backend.{name}."
            problems.append(Problem(f"backend.{name}", value, rule, fix))

    return problems
