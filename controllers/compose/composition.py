"""From a root config and overrides to the typed configuration; the only module that knows Hydra.

Invariant: all problems are found in one pass. Hydra stops at the first bad override, so overrides are parsed and
compared with the composed tree before Hydra sees them, and a bad one is set aside while the rest is still checked.
Every local path in a configuration is absolute, because a worker's current folder is not the user's.
Deliberately not here: what the values mean (`verl_ray.config`) and whether the machine has what they ask for
(`findings.py`).
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_ray.config.backends import BACKENDS
from verl_ray.config.load import parse
from verl_ray.config.renamed import new_name
from verl_ray.config.rules import broken
from verl_ray.config.schema import Config
from verl_ray.config.suggest import did_you_mean, either
from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import in_ray_package

FREE_SECTIONS = re.compile(
    r"(rollout|reward(\.components\.\w+)?\.engine)\.vllm_args\..+"
    r"|(reward(\.components\.\w+)?|evaluation)\.functions\..+|reward\.weights\..+"
)
"""Keys in sections whose keys are the user's own."""

PATHS = re.compile(r"run\.dir|run\.resume|rollout\.sync\.folder|data\.(train|validation)_path|([\w.]+\.)?model\.path")
"""Keys that hold a path."""

FUNCTIONS = re.compile(r"(reward(\.components\.\w+)?|evaluation)\.functions\..+")
"""Keys that may hold a path and a function in it."""

NO_CHECKPOINT = ("auto", "none", "true", "false")
"""What run.resume may say besides a path, in any spelling: the rules refuse the wrong ones."""

Tree = dict[str, Any]


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


@dataclass
class Composition:
    """A configuration as far as it could be made, and everything wrong with it."""

    config: Config | None = None
    """With bad settings replaced by the root config's, so that the rest can be checked; None = too little is left."""
    problems: list[Problem] = field(default_factory=list)


def compose(config_name: str, overrides: Sequence[str] = (), config_dir: str | None = None) -> Config:
    """The typed configuration of root `config_name` under `overrides` (Hydra's grammar).

    `config_dir` is a folder with root configs or groups of the user's own, which come before the project's.
    Raises ConfigError with all problems: syntax, unknown keys and choices, types, ranges, rules over several fields.
    """
    composition = examine(config_name, overrides, config_dir)
    if composition.config is None or composition.problems:
        raise ConfigError(composition.problems)
    return composition.config


def examine(
    config_name: str, overrides: Sequence[str] = (), config_dir: str | None = None, *, evaluates: bool = False
) -> Composition:
    """As `compose`, with the problems as a value; `evaluates` for one evaluation in place of training."""
    result = Composition()
    try:
        with _config_sources(config_dir):
            _compose_into(result, config_name, overrides, own_configs=config_dir is not None, evaluates=evaluates)
    except ConfigError as error:
        result.problems += error.problems
    except (HydraException, OmegaConfBaseException) as error:  # what only Hydra knows, such as a broken YAML file
        result.problems.append(Problem("--config-name", config_name, _first_line(error), "Repair that config."))
    return result


# ------------------------------------------------------------------------------------------------- the steps


def _compose_into(
    result: Composition, config_name: str, overrides: Sequence[str], *, own_configs: bool, evaluates: bool
) -> None:
    if config_name not in (roots := _options("")):
        fix = did_you_mean(config_name, roots, "root config")
        raise ConfigError([Problem("--config-name", config_name, "no such root config", fix)])
    parsed = _parsed(overrides, result.problems)
    base, choices, values = _chosen(config_name, parsed, result.problems, own_configs=own_configs)
    if own_configs:
        result.problems += _backend_set_in_yaml(base, choices)
    accepted = _accepted(values, base, choices, result.problems)
    with open_dict(base):
        base.pop("backend", None)  # the group is a choice for the roles and no section of the configuration
    composed = copy.deepcopy(base)
    for key, override in accepted:
        _apply(composed, key, override)
    sources = _sources(_plain(composed))
    result.config = _typed(_resolved(composed, result.problems), base, result.problems)
    if result.config is not None:
        touched = {key for override in parsed for key in _touched(override)}
        known_bad = {problem.key for problem in result.problems}
        result.problems += [p for p in broken(result.config, touched, evaluates=evaluates) if p.key not in known_bad]
    bad = {problem.key for problem in result.problems}
    result.problems = [problem for problem in result.problems if not _within(sources.get(problem.key, ()), bad)]


def _config_sources(config_dir: str | None) -> AbstractContextManager[None]:
    sources: AbstractContextManager[None]
    if config_dir is None:
        sources = initialize_config_module("configs", version_base="1.3")
        return sources
    if not Path(config_dir).is_dir():
        fix = "Give a folder with root configs or groups of your own."
        raise ConfigError([Problem("--config-dir", config_dir, "there is no such folder", fix)])
    sources = initialize_config_dir(str(Path(config_dir).resolve()), version_base="1.3")
    return sources


def _run_hydra(config_name: str, made: Mapping[str, str], own_configs: bool) -> tuple[DictConfig, dict[str, str]]:
    """The composed tree under choices, and the choice of every group in it, by the key that overrides it."""
    compose_files = _compose_files if own_configs else _compose_packaged_files
    return copy.deepcopy(compose_files(config_name, tuple(f"{key}={choice}" for key, choice in made.items())))


def _compose_files(config_name: str, overrides: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
    tree = hydra_compose(config_name, list(overrides), return_hydra_config=True)
    choices = {str(key): str(choice) for key, choice in tree.hydra.runtime.choices.items()}
    OmegaConf.set_readonly(tree, False)
    with open_dict(tree):
        del tree["hydra"]
    return tree, {key: choice for key, choice in choices.items() if not key.startswith("hydra/")}


_compose_packaged_files = functools.cache(_compose_files)  # which do not change: Hydra takes 0.2 s for them


def _options(group: str) -> list[str]:
    found = GlobalHydra.instance().config_loader().get_group_options(group)
    return [name for name in found if not name.startswith("_")]


# ------------------------------------------------------------------------------------------------- overrides


def _parsed(overrides: Sequence[str], problems: list[Problem]) -> list[Override]:
    """The overrides that can be understood; the others become problems."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            fix = "Write key=value; quote lists, dicts and blanks for the shell: 'key=[1, 2]'."
            problems.append(Problem(text.partition("=")[0] or text, text, "this override cannot be read", fix))
            continue
        if override.is_sweep_override():
            fix = f"Give one value; a list is written '{override.key_or_group}=[...]'."
            problems.append(Problem(_key(override), _raw(text), "several values are a sweep, and this is one run", fix))
        elif override.key_or_group == "":
            problems.append(Problem(text, text, "an override needs a key", "Write key=value."))
        else:
            parsed.append(override)
    return parsed


def _chosen(
    config_name: str, parsed: list[Override], problems: list[Problem], *, own_configs: bool
) -> tuple[DictConfig, dict[str, str], list[Override]]:
    """The tree under all choices from groups, the choices, and the overrides that set a value. A choice may bring
    further ones (`reward=model` brings `backend@reward.backend`), so they are made until none is left."""
    base, choices = _run_hydra(config_name, {}, own_configs)
    made: dict[str, str] = {}
    left = parsed
    while True:
        now = [override for override in left if _key(override) in choices]
        left = [override for override in left if override not in now]
        made |= _choices_of(now, problems)
        shared = [key for key, choice in choices.items() if choice == "_shared" and key not in made]
        made |= dict.fromkeys(shared, made.get("backend", choices.get("backend", "engine")))
        if not now and not shared:
            break
        base, choices = _run_hydra(config_name, made, own_configs)
    for override in left:
        if override.package is not None:
            fix = did_you_mean(_key(override), sorted(choices), "choice")
            problems.append(Problem(_key(override), override.value(), "there is no such choice to make", fix))
    return base, choices, [override for override in left if override.package is None]


def _choices_of(overrides: list[Override], problems: list[Problem]) -> dict[str, str]:
    """The valid ones among overrides that choose from a group."""
    made: dict[str, str] = {}
    for override in overrides:
        group, key, choice = override.key_or_group, _key(override), override.value()
        if override.is_delete():
            problems.append(Problem(f"~{key}", None, "a choice cannot be left out", f"Choose: {key}=..."))
        elif not isinstance(choice, str) or choice not in _options(group):
            problems.append(_bad_choice(group, key, choice))
        else:
            made[key] = choice
    return made


def _bad_choice(group: str, key: str, choice: object) -> Problem:
    return Problem(key, choice, "there is no such choice", did_you_mean(str(choice), _options(group), group))


def _accepted(
    values: list[Override], base: DictConfig, choices: Mapping[str, str], problems: list[Problem]
) -> list[tuple[str, Override]]:
    """Every override whose key exists, beside the key it sets. `backend.X` is expanded to the roles first, so
    that a role's own override, wherever it stands, wins."""
    shared: list[tuple[str, Override]] = []
    own: list[tuple[str, Override]] = []
    tree = _plain(base)
    keys = sorted([*_leaves(tree), *choices])
    nulls = [str(override.key_or_group) for override in values if _sets_null(override)]
    roles_backends = {f"{name}.backend" for name in _backend_roles(choices)}
    for override in values:
        key = str(override.key_or_group)
        null = next((section for section in nulls if key.startswith(f"{section}.")), None)
        if null is not None:
            problems.append(_inside_null(override, null))
        elif key.startswith("backend."):
            roles = [name for name in _backend_roles(choices) if _exists(tree, f"{name}.{key}")]
            problems += [] if roles and key != "backend.kind" else [_bad_backend_key(override)]
            if key != "backend.kind":
                shared += [(f"{name}.{key}", override) for name in roles]
        elif re.fullmatch(r"[\w.]+\.backend\.kind", key) or (
            key in roles_backends and isinstance(override.value(), str)
        ):
            group = f"backend@{key.removesuffix('.kind')}"
            rule = "a backend is chosen as a whole, with its settings"
            problems.append(Problem(key, override.value(), rule, f"Choose it with {group}={override.value()}."))
        elif key == "reward.kind" and not override.is_delete():
            rule = "a reward is chosen as a whole, with its settings"
            problems.append(Problem(key, override.value(), rule, f"Choose it with reward={override.value()}."))
        elif key == "task":
            problems.append(Problem(key, override.value(), "a root config fixes this", "Choose another --config-name."))
        elif override.is_delete():
            if FREE_SECTIONS.fullmatch(key) and _exists(tree, key):
                own.append((key, override))
            else:
                rule = "a key cannot be left out; the YAML holds every value"
                problems.append(Problem(f"~{key}", None, rule, f"Set {key}=null where it allows that."))
        elif _exists(tree, key) or FREE_SECTIONS.fullmatch(key):
            own.append((key, override))
        else:
            problems.append(_unknown_key(override, tree, keys))
    return shared + own


def _bad_backend_key(override: Override) -> Problem:
    key = override.key_or_group
    if key == "backend.kind":
        rule = "a backend is chosen as a whole, with its settings"
        return Problem(key, override.value(), rule, f"Choose it with backend={override.value()}.")
    return _unknown_backend_field("backend", override, "backend.")


def _unknown_backend_field(group: str, override: Override, prefix: str) -> Problem:
    key = override.key_or_group
    name = key.removeprefix(prefix)
    having = [f"{group}={choice}" for choice, settings in BACKENDS.items() if name in settings.model_fields]
    if having:
        fix = f"It belongs to {either(having)}."
        return Problem(key, override.value(), "the chosen backend has no such setting", fix)
    known = dict.fromkeys(field for settings in BACKENDS.values() for field in settings.model_fields if field != "kind")
    return Problem(key, override.value(), "no such key", did_you_mean(key, [prefix + field for field in known], "key"))


def _unknown_key(override: Override, tree: Tree, keys: list[str]) -> Problem:
    key = str(override.key_or_group)
    role, backend, _ = key.partition(".backend.")
    if backend and _exists(tree, f"{role}.backend"):
        return _unknown_backend_field(f"backend@{role}.backend", override, f"{role}.backend.")
    parts = key.split(".")
    for length in range(1, len(parts)):
        parent = ".".join(parts[:length])
        if _exists(tree, parent) and _at(tree, parent) is None:
            return _inside_null(override, parent)
    return Problem(key, override.value(), "no such key", new_name(key) or did_you_mean(key, keys, "key"))


def _inside_null(override: Override, section: str) -> Problem:
    rule = f"this setting would be ignored: {section} is null"
    return Problem(override.key_or_group, override.value(), rule, f"Leave it out, or give all of {section}.")


def _sets_null(override: Override) -> bool:
    return not override.is_delete() and override.value() is None


def _backend_set_in_yaml(base: DictConfig, choices: Mapping[str, str]) -> list[Problem]:
    """`backend:` in the body of a root config of the user's own would reach no role."""
    if "backend" not in choices:
        return []
    plain = hydra_compose(f"backend/{choices['backend']}").backend
    return [
        Problem(f"backend.{key}", value, "in a YAML file this reaches no role", f"Write it under actor.backend.{key}.")
        for key, value in base.backend.items()
        if key not in plain or plain[key] != value
    ]


def _backend_roles(choices: Mapping[str, str]) -> list[str]:
    return sorted(match[1] for key in choices if (match := re.fullmatch(r"backend@([\w.]+)\.backend", key)))


def _apply(tree: DictConfig, key: str, override: Override) -> None:
    """Set the value at `key`; a dict is merged into a section that is there."""
    if override.is_delete():
        section, _, name = key.rpartition(".")
        with open_dict(tree):
            del OmegaConf.select(tree, section)[name]
    else:
        OmegaConf.update(tree, key, override.value(), merge=True, force_add=True)


def _key(override: Override) -> str:
    group = str(override.key_or_group)
    return group if override.package is None else f"{group}@{override.package}"


def _raw(line: str) -> str:
    return line.partition("=")[2]


def _touched(override: Override) -> Iterator[str]:
    """The keys that an override sets: those inside a dict that it gives, the section that a group choice fills."""
    if override.package is not None:
        yield str(override.package)
        return
    value = None if override.is_delete() else override.value()
    yield from _leaves({override.key_or_group: value}) if isinstance(value, dict) else (override.key_or_group,)


# ------------------------------------------------------------------------------------------------------ trees


def _plain(tree: DictConfig) -> Tree:
    """The tree with its interpolations as they are written."""
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _exists(tree: Tree, key: str) -> bool:
    node: object = tree
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _at(tree: Tree, key: str) -> object:
    node: Any = tree
    for part in key.split("."):
        node = node[part]
    return node


def _sources(tree: Tree) -> dict[str, list[str]]:
    """The keys that each key takes its value from (`num_ranks: ${actor.num_ranks}`), and so its problems too."""
    return {key: re.findall(r"\$\{([\w.]+)\}", str(value)) for key, value in _items(tree)}


def _within(keys: Sequence[str], sections: Collection[str]) -> bool:
    """Whether one of `keys` is one of `sections` or lies inside one."""
    return any(key == section or key.startswith(f"{section}.") for key in keys for section in sections)


def _leaves(node: object) -> Iterator[str]:
    """Dotted keys of everything that is not a non-empty section."""
    return (key for key, _ in _items(node))


def _items(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The same with its values; a key of a user's own may hold a dot."""
    if isinstance(node, dict) and (node or not prefix):
        for key, value in node.items():
            yield from _items(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _resolved(tree: DictConfig, problems: list[Problem]) -> Tree:
    """Plain values: interpolations followed; what is missing becomes a problem and an empty text."""
    plain = _plain(tree)
    for key, value in _items(plain):
        if value == "???":
            OmegaConf.update(tree, key, "")
            problems.append(Problem(key, None, "this key must be set", f"Give it on the command line: {key}=..."))
    for key, value in _items(plain):
        try:
            OmegaConf.select(tree, key, throw_on_resolution_failure=True)
        except OmegaConfBaseException as error:
            OmegaConf.update(tree, key, None)
            fix = "Refer to a key that exists, as in ${model.path}."
            problems.append(Problem(key, value, _first_line(error), fix))
    resolved = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(resolved, dict)
    _make_paths_absolute(resolved)
    return {str(key): value for key, value in resolved.items()}


def _make_paths_absolute(node: object, prefix: str = "") -> None:
    """In place, `~` included; what is no local path (an empty text, a URL, a built-in reward function) stays."""
    if not isinstance(node, dict):
        return
    for name, value in node.items():
        key = f"{prefix}{name}"
        if not isinstance(value, str):
            _make_paths_absolute(value, f"{key}.")
        elif FUNCTIONS.fullmatch(key):
            path, colon, function = value.rpartition(":")
            node[name] = f"{_absolute(path)}:{function}" if colon else value
        elif PATHS.fullmatch(key) and not (key == "run.resume" and value.lower() in NO_CHECKPOINT):
            node[name] = _absolute(value)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path.strip() and "://" not in path else path


def _typed(tree: Tree, base: DictConfig, problems: list[Problem]) -> Config | None:
    """`tree` typed. Values that do not fit become problems and are replaced by those of `base`."""
    try:
        return parse(tree)
    except ConfigError as error:
        known_bad = {problem.key for problem in problems}
        problems += [problem for problem in error.problems if problem.key not in known_bad]
        defaults = _resolved(base, [])
        for problem in error.problems:
            _replace(tree, defaults, problem.key.split("."))
    try:
        return parse(tree)
    except ConfigError:
        return None


def _replace(tree: Tree, defaults: Tree, path: list[str]) -> None:
    for part in path[:-1]:
        if not isinstance(tree.get(part), dict) or not isinstance(defaults.get(part), dict):
            break
        tree, defaults = tree[part], defaults[part]
        path = path[1:]
    if path[0] in defaults:
        tree[path[0]] = defaults[path[0]]
    else:
        tree.pop(path[0], None)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
