"""From a root config and overrides to the typed configuration; the only module that knows Hydra.

Invariant: all problems are found in one pass. Hydra stops at the first bad override, so overrides are parsed and
compared with the composed tree before Hydra sees them, and a bad one is set aside while the rest is still checked.
Every local path in a configuration is absolute, because a worker's current folder is not the user's.
Deliberately not here: what the values mean (`verl_ray.config`) and whether the machine has what they ask for
(`findings.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra.errors import HydraException
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException

from controllers.compose.choices import choose, parse_overrides
from controllers.compose.overrides import accept, set_value, touched_keys
from controllers.compose.sources import backend_set_in_yaml, config_sources, options_of
from controllers.compose.trees import as_plain, as_typed, first_line, interpolations, is_within, resolve
from verl_ray.config.rules import broken
from verl_ray.config.schema import Config
from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import ConfigError, Problem


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
        with config_sources(config_dir):
            _compose_into(result, config_name, overrides, own_configs=config_dir is not None, evaluates=evaluates)
    except ConfigError as error:
        result.problems += error.problems
    except (HydraException, OmegaConfBaseException) as error:  # what only Hydra knows, such as a broken YAML file
        result.problems.append(Problem("--config-name", config_name, first_line(error), "Repair that config."))
    return result


def _compose_into(
    result: Composition, config_name: str, overrides: Sequence[str], *, own_configs: bool, evaluates: bool
) -> None:
    if config_name not in (roots := options_of("")):
        fix = did_you_mean(config_name, roots, "root config")
        raise ConfigError([Problem("--config-name", config_name, "no such root config", fix)])
    parsed = parse_overrides(overrides, result.problems)
    base, choices, values = choose(config_name, parsed, result.problems, own_configs=own_configs)
    if own_configs:
        result.problems += backend_set_in_yaml(base, choices)
    accepted = accept(values, base, choices, result.problems)
    with open_dict(base):
        base.pop("backend", None)  # the group is a choice for the roles and no section of the configuration
    composed = copy.deepcopy(base)
    for key, override in accepted:
        set_value(composed, key, override)
    sources = interpolations(as_plain(composed))
    result.config = as_typed(resolve(composed, result.problems), base, result.problems)
    if result.config is not None:
        touched = {key for override in parsed for key in touched_keys(override)}
        known_bad = {problem.key for problem in result.problems}
        result.problems += [p for p in broken(result.config, touched, evaluates=evaluates) if p.key not in known_bad]
    bad = {problem.key for problem in result.problems}
    result.problems = [problem for problem in result.problems if not is_within(sources.get(problem.key, ()), bad)]
