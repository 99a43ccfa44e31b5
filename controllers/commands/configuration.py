"""The composed configuration as YAML: `check --print`, and Hydra's `--cfg job`.

Invariant: what is printed can be written to a file and named by --config-name; nothing
else goes to stdout, and nothing is started. Deliberately not here: how a configuration
is composed (`controllers/compose`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import yaml

from controllers.compose.composition import examine
from controllers.compose.trees import MISSING, key_exists, value_at
from verl_ray.config.load import to_tree
from verl_ray.errors import ConfigError, Problem


def print_configuration(
    config_name: str,
    overrides: Sequence[str],
    config_dir: str | None,
    *,
    evaluates: bool,
    resolved: bool,
) -> int:
    """Print a configuration as YAML and return 0.

    Args:
        config_name: the root config.
        overrides: what the user typed, in Hydra's grammar.
        config_dir: a folder of the user's own, or None.
        evaluates: whether the command is `evaluate`.
        resolved: whether references such as `${model.path}` are followed. Otherwise
            they stand as they are written, and so does a value that must be given yet.

    Raises:
        ConfigError: the problems of the configuration alone, not of the machine.
    """
    composition = examine(config_name, overrides, config_dir, evaluates=evaluates)
    tree = composition.tree
    problems = composition.problems

    if not resolved:
        problems = [problem for problem in problems if not _is_missing(problem, tree)]
    elif composition.config is not None:
        tree = to_tree(composition.config)

    if problems:
        raise ConfigError(problems)
    yaml.safe_dump(tree, sys.stdout, sort_keys=False, allow_unicode=True)
    return 0


def _is_missing(problem: Problem, tree: dict[str, object]) -> bool:
    """Return whether a problem is that a value must be given yet."""
    return key_exists(tree, problem.key) and value_at(tree, problem.key) == MISSING
