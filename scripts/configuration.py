"""The configuration of a root config under overrides, for benchmarks and tests.

Invariant: it is composed as a command composes it, and it is returned without problems.
"""

from __future__ import annotations

from collections.abc import Sequence

from controllers.compose.composition import examine
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError


def compose(
    config_name: str, overrides: Sequence[str] = (), config_dir: str | None = None
) -> Config:
    """Return the typed configuration of a root config under overrides.

    Args:
        config_name: The root config.
        overrides: Overrides in Hydra's grammar.
        config_dir: A folder with root configs or groups of the caller's own, which
            come before the project's.

    Raises:
        ConfigError: All problems, which are syntax, unknown keys and choices, types,
            ranges, and rules over several fields.
    """
    composition = examine(config_name, overrides, config_dir)
    if composition.config is None or composition.problems:
        raise ConfigError(composition.problems)
    return composition.config
