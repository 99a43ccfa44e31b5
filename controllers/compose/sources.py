"""The sources of configurations, composed by Hydra, and the plain trees they yield.

They are the project's YAML and, before it, a folder of the user's own. Trees of plain
values are searched, resolved and typed here.

Invariant: a value that cannot be used becomes a problem, and the rest is still checked.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from controllers.tasks import typed_config
from verl_ray.algorithms.catalogue import declared_settings
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.config.algorithm import ADDITIONS
from verl_ray.config.renamed import migrated
from verl_ray.config.schema import Config
from verl_ray.config.suggest import did_you_mean, nearest_divisors
from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import in_ray_package


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


def for_loss(policy_loss: str, values: Mapping[str, object]) -> object:
    """Return the value for a loss, by the way in which its older tokens are corrected.

    Args:
        policy_loss: The value of algorithm.policy_loss, which may be a mistake.
        values: A value for each of `PolicyLoss.corrected_as`.
    """
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

    Raises:
        ConfigError: a file cannot be read or composed.
    """
    overrides = tuple(f"{key}={choice}" for key, choice in chosen.items())
    if config_dir is None:
        # The caller changes the tree, and the cache keeps its own.
        return copy.deepcopy(_compose_packaged_files(config_name, overrides))

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


# ------------------------------------------------------------ files that cannot be read

# Problems of YAML files that cannot be read or composed.
#
# Invariant: a problem names the file, the line and the column where they are known,
# and what is expected there.

UNREADABLE = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    # A defaults list that is none, and bytes that are no text.
    ValueError,
    # A config whose defaults list leads back to itself.
    RecursionError,
)
"""What Hydra and YAML raise where a file is at fault."""

_WHOLE_FILE = (
    "A root config of your own begins with `defaults: [grpo, _self_]`; sections of"
    " keys follow, such as `run: {total_steps: 7}`."
)
_MISSING_CHOICE = re.compile(r"Could not (?:find|load) '(?:(.+)/)?([^/']+)'")


def file_problem(
    error: Exception,
    config_name: str,
    config_dir: str | None,
    options_of: Callable[[str], list[str]],
) -> Problem:
    """Return what is wrong with the file that Hydra stopped at.

    Args:
        error: what Hydra raised, one of `UNREADABLE`.
        config_name: the root config.
        config_dir: the folder of the user's own, or None.
        options_of: the choices of a group, or the root configs for "".
    """
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return _syntax_problem(error)

    key = "--config-name"
    if isinstance(error, UnicodeDecodeError):
        file = _file_of(error.object, config_dir)
        rule = "this file is no text in UTF-8"
        return Problem(key, file or config_name, rule, "Save it as UTF-8.")

    if isinstance(error, RecursionError):
        rule = "its defaults list leads back to itself"
        fix = "Take the config itself, and those that begin with it, out of the list."
        return Problem(key, config_name, rule, fix)

    message = _message(error)
    choice = _MISSING_CHOICE.search(message)
    if choice is not None:
        group, name = choice.groups()
        group = group or ""
        options = [name for name in options_of(group) if group or name != config_name]
        fix = did_you_mean(name, options, group or "config")
        return Problem(key, config_name, first_line(message), fix)

    if "ListConfig" in message:
        rule = "this file is a list, and a configuration is made of sections"
        return Problem(key, config_name, rule, _WHOLE_FILE)

    if "Invalid defaults list" in message:
        return Problem(key, config_name, first_line(message), _WHOLE_FILE)

    rule = f"this file cannot be composed: {first_line(message)}"
    fix = "A value may refer to a key, as in ${model.path}; nothing else has a ${."
    return Problem(key, config_name, rule, fix)


def _syntax_problem(error: MarkedYAMLError) -> Problem:
    """Return the problem of a file that is no YAML."""
    mark = error.problem_mark
    assert mark is not None
    file = Path(mark.name)
    place = f"line {mark.line + 1}, column {mark.column + 1}"

    rule = f"{place}: {error.problem}"
    if error.context and error.context_mark is not None:
        rule += (
            f" ({error.context}, which begins in line {error.context_mark.line + 1})"
        )

    return Problem(str(file), _line(file, mark.line), rule, _repair(str(error.problem)))


def _repair(problem: str) -> str:
    """Return what YAML expects where a parser found something else."""
    if r"'\t'" in problem:
        return "Indent with blanks; YAML takes no tabs."
    if "duplicate key" in problem:
        return "A section stands in a file once: join the two."
    if "expected ',' or" in problem:
        return "Close the bracket, and separate what is inside by commas."
    if "tag" in problem:
        return "Write a plain value: a text, a number, true, false, null, or a list."
    return "Write `key: value`; what is inside of a section is indented by blanks."


def _line(file: Path, number: int) -> str:
    """Return a line of a file, counted from 0; empty after its end."""
    lines = file.read_text("utf-8", errors="replace").splitlines()
    if number >= len(lines):
        return ""
    return lines[number].strip()


def _file_of(content: bytes, config_dir: str | None) -> str | None:
    """Return the YAML file in a folder that holds some bytes; None if there is none."""
    if config_dir is None:
        return None

    for file in sorted(Path(config_dir).rglob("*.yaml")):
        if content in file.read_bytes():
            return str(file)

    return None


def _message(error: BaseException) -> str:
    """Return the message of an error, or of its cause where it has none."""
    cause: BaseException | None = error
    while cause is not None:
        if str(cause).strip():
            return str(cause)
        cause = cause.__cause__ or cause.__context__

    return type(error).__name__


# ---------------------------------------------------------------- trees of plain values

TABLES = re.compile(
    r"(reward(\.components\.\w+)?|evaluation)\.functions|reward\.weights"
    r"|agent\.(environments|models|ends)"
    r"|data\.(columns|train_path|validation_path)"
)
"""Sections that are one value: a function for `default` alone serves all sources."""

MISSING = "???"
"""Hydra's mark of a value that the user must set."""

Tree = dict[str, Any]


# -------------------------------------------------------------------------- plain trees


def as_plain(tree: DictConfig) -> Tree:
    """Return the tree with its interpolations as they are written."""
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def key_exists(tree: Tree, key: str) -> bool:
    """Return whether the tree has a dotted key."""
    node: object = tree
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]

    return True


def value_at(tree: Tree, key: str) -> object:
    """Return the value at a dotted key that exists."""
    node: Any = tree
    for part in key.split("."):
        node = node[part]

    return node


def interpolations(tree: Tree) -> dict[str, list[str]]:
    """Return the keys that each key takes its value from, and so its problems, too.

    `num_ranks: ${actor.num_ranks}` takes its value from `actor.num_ranks`.
    """
    return {
        key: re.findall(r"\$\{([\w.]+)\}", str(value)) for key, value in _items(tree)
    }


def is_within(keys: Sequence[str], sections: Collection[str]) -> bool:
    """Return whether one of `keys` is one of `sections` or lies inside one."""
    return any(
        key == section or key.startswith(f"{section}.")
        for key in keys
        for section in sections
    )


def leaves(node: object) -> Iterator[str]:
    """Yield the dotted keys of everything that is not a section with content."""
    for key, _ in _items(node):
        yield key


def _items(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the same keys with their values; a user's own key may hold a dot."""
    is_section = isinstance(node, dict)

    # An empty section is a value, but the whole tree is none.
    if not is_section or (not node and prefix):
        yield prefix, node
        return

    assert isinstance(node, dict)
    for key, value in node.items():
        yield from _items(value, f"{prefix}.{key}" if prefix else str(key))


# ------------------------------------------------------------------------------- values


def resolve(tree: DictConfig, problems: list[Problem]) -> Tree:
    """Return the tree as plain values, with interpolations followed.

    A value that the user must set and has not becomes a problem and an empty text. An
    interpolation that leads nowhere becomes a problem and null.

    Args:
        tree: the composed tree, which is changed.
        problems: where problems are added.
    """
    plain = as_plain(tree)

    # The tree changes on the way, so its keys are read from a copy.
    for key, value in _items(plain):
        if value == MISSING:
            OmegaConf.update(tree, key, "")
            fix = f"Give it: {key}=..."
            if key == "data.validation_path":
                fix += f"; or, to evaluate nothing, {key}=null run.evaluate_every=0"
            problems.append(Problem(key, None, "this key must be set", fix))

    # Each key is resolved alone, so that a bad reference does not hide others.
    for key, value in _items(plain):
        try:
            OmegaConf.select(tree, key, throw_on_resolution_failure=True)
        except OmegaConfBaseException as error:
            OmegaConf.update(tree, key, None)
            rule = first_line(str(error))
            problems.append(Problem(key, value, rule, _reference_meant(value)))

    resolved = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _reference_meant(value: object) -> str:
    """Return what to write in place of a value with a reference that leads nowhere."""
    variables = [
        name for name in re.findall(r"\$\{(\w+)\}", str(value)) if name in os.environ
    ]
    if not variables:
        return "Refer to a key that exists, as in ${model.path}."
    name = variables[0]
    return f"An environment variable is ${name} in a path, or ${{oc.env:{name}}}."


# ----------------------------------------------------------------- typed configurations


def as_typed(tree: Tree, base: DictConfig, problems: list[Problem]) -> Config | None:
    """Return the typed configuration of a tree, as far as that is possible.

    Values that do not fit become problems, and values of `base` replace them. None if
    the configuration cannot be typed even so.

    Args:
        tree: plain values, which are changed where they do not fit.
        base: the tree without the user's values.
        problems: where problems of keys that have none yet are added.
    """
    try:
        return typed_config(tree)
    except ConfigError as error:
        bad_keys = {problem.key for problem in problems}
        problems += [
            problem for problem in error.problems if problem.key not in bad_keys
        ]

        # The problems of `base` itself are reported already.
        defaults = resolve(base, [])
        for problem in error.problems:
            _replace(tree, defaults, problem.key.split("."))

    # A root config of the user's own may have mistakes itself.
    try:
        return typed_config(tree)
    except ConfigError:
        return None


def _replace(tree: Tree, defaults: Tree, path: list[str]) -> None:
    """Replace the value at `path` by the default, or remove it where there is none.

    Where one of the trees has no section on the way, that place is replaced.
    """
    for part in path[:-1]:
        inner = tree.get(part)
        inner_defaults = defaults.get(part)
        if not isinstance(inner, dict) or not isinstance(inner_defaults, dict):
            break

        tree = inner
        defaults = inner_defaults
        path = path[1:]

    name = path[0]
    if name in defaults:
        tree[name] = defaults[name]
    else:
        # A key that no configuration has.
        tree.pop(name, None)


def first_line(message: str) -> str:
    """Return the first line of a message, without its full stop."""
    first, _, _ = message.strip().partition("\n")
    return first.rstrip(".")
