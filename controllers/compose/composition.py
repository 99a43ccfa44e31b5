"""Composition of a root config and overrides to the typed configuration.

Invariant: all problems are found in one pass. Hydra stops at the first bad override, so
overrides are parsed and compared with the composed tree before Hydra sees them, and a
bad one is set aside while the rest is still checked.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from controllers.compose.grammar import parse_overrides
from controllers.compose.overrides import (
    accept,
    choose,
    forget_resolved,
    set_value,
    touched_keys,
)
from controllers.compose.sources import (
    backend_set_in_yaml,
    config_sources,
    roots_beside,
)
from controllers.compose.trees import (
    Tree,
    as_plain,
    as_typed,
    interpolations,
    is_within,
    key_exists,
    resolve,
    value_at,
)
from verl_ray.config.load import with_auto_again
from verl_ray.config.schema import Config, rule_violations
from verl_ray.errors import ConfigError, Problem
from verl_ray.suggest import did_you_mean


@dataclass
class Composition:
    """A configuration as far as it could be composed, and everything wrong with it."""

    config: Config | None = None
    """The configuration, or None if too little could be composed.

    Values of the root config replace bad ones, so that the rest can be checked.
    """
    problems: list[Problem] = field(default_factory=list)
    tree: Tree = field(default_factory=dict)
    """The composed values with their references as they are written; empty as above."""


def examine(
    config_name: str,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    *,
    evaluates: bool = False,
    assumed: Sequence[str] = (),
) -> Composition:
    """Compose a configuration and return it with its problems, as far as possible.

    Args:
        config_name: the root config.
        overrides: what the user typed, in Hydra's grammar.
        config_dir: a folder of the user's own, or None.
        evaluates: whether the command is a single evaluation instead of training.
        assumed: overrides of the command itself, which the user has not typed.
    """
    result = Composition()
    try:
        with config_sources(config_dir):
            _compose_into(
                result,
                config_name,
                overrides,
                config_dir=config_dir,
                evaluates=evaluates,
                assumed=assumed,
            )
    except ConfigError as error:
        result.problems += error.problems

    return result


def _compose_into(
    result: Composition,
    config_name: str,
    overrides: Sequence[str],
    *,
    config_dir: str | None,
    evaluates: bool,
    assumed: Sequence[str],
) -> None:
    """Fill `result` as far as possible, while Hydra knows the sources of configs."""
    roots = roots_beside(config_name)
    if config_name not in roots:
        rule = "no such root config"
        fix = did_you_mean(config_name, roots, "root config")
        raise ConfigError([Problem("--config-name", config_name, rule, fix)])

    lengths = _replaced_lengths(overrides)
    overrides = [*overrides, *(f"{replaced}=null" for replaced in lengths.values())]
    parsed = parse_overrides(overrides, result.problems)
    base, choices, values = choose(
        config_name, parsed, result.problems, config_dir=config_dir
    )
    if config_dir is not None:
        result.problems += backend_set_in_yaml(base, choices)

    values += parse_overrides(assumed, result.problems)
    if evaluates:
        values += _data_of_an_evaluation(base, values)
    accepted = accept(values, base, choices, result.problems)
    composed = _with_values(base, accepted)

    # Interpolations are noted before they are followed and can no longer be seen.
    result.tree = as_plain(composed)
    sources = dict(interpolations(result.tree))
    sources |= {replaced: [typed] for typed, replaced in lengths.items()}
    tree = resolve(composed, result.problems)
    result.config = as_typed(tree, base, result.problems)

    # An evaluation may take place on another machine than the run.
    if result.config is not None and evaluates:
        result.config = with_auto_again(result.config)

    if result.config is not None:
        violations = _violations(result.config, parsed, base, evaluates=evaluates)
        bad_keys = {problem.key for problem in result.problems}
        result.problems += [
            violation for violation in violations if violation.key not in bad_keys
        ]

    # A problem that a value inherits from another key is reported there alone.
    bad_keys = {problem.key for problem in result.problems}
    result.problems = [
        problem
        for problem in result.problems
        if not is_within(_causes(problem.key, sources), bad_keys)
    ]


def _violations(
    config: Config, parsed: Sequence[Override], base: DictConfig, *, evaluates: bool
) -> list[Problem]:
    """Return the problems of every rule, which know what the user replaced by what."""
    touched = {key for override in parsed for key in touched_keys(override)}
    tree = as_plain(base)
    tree.pop("backend", None)
    before = {key: value_at(tree, key) for key in touched if key_exists(tree, key)}
    return rule_violations(config, touched, evaluates=evaluates, before=before)


def _replaced_lengths(overrides: Sequence[str]) -> dict[str, str]:
    """Return the length of the run that another one replaces, by the key of the other.

    A number of epochs that the user gives replaces the root config's number of steps,
    and the other way round.
    """
    texts = {text.partition("=")[0].lstrip("+"): text for text in overrides}
    lengths = ("run.total_steps", "run.total_epochs")
    typed = [key for key in lengths if key in texts]
    if len(typed) != 1 or texts[typed[0]].endswith("=null"):
        return {}

    (replaced,) = (key for key in lengths if key not in typed)
    return {typed[0]: replaced}


def _data_of_an_evaluation(
    base: DictConfig, values: Sequence[Override]
) -> list[Override]:
    """Return an override that names training data, where an evaluation has none.

    Nothing is learned from it. A checkpoint has the cursor of its own training data,
    which only the user can name.
    """
    typed = {override.key_or_group for override in values}
    is_missing = OmegaConf.is_missing(base.get("data", {}), "train_path")
    if not is_missing or typed & {"data.train_path", "run.resume"}:
        return []
    return parse_overrides(["data.train_path=${data.validation_path}"], [])


def _causes(key: str, sources: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the keys that a key takes its value from, unless they refer back to it."""
    return [
        source
        for source in sources.get(key, ())
        if source != key and key not in sources.get(source, ())
    ]


def _with_values(
    base: DictConfig, accepted: Sequence[tuple[str, Override]]
) -> DictConfig:
    """Return a copy of the tree in which the accepted overrides are set."""
    composed = copy.deepcopy(base)
    # The group `backend` is a choice for the roles and no section of a configuration.
    with open_dict(composed):
        composed.pop("backend", None)

    for key, override in accepted:
        set_value(composed, key, override)
        forget_resolved(composed, key, override)

    return composed
