"""Sweeps: overrides with several values (`key=1,2,3`), as a list of overrides per run.

Invariant: the runs are all combinations, and the last override varies fastest.
Deliberately not here: running them (`controllers/commands/multirun.py`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from verl_ray.errors import ConfigError, Problem

# `~` as the whole first part of a path, where a value begins.
_HOME = re.compile(r"(?<=[=:,\[ ])~(?=[/,\]} ]|$)")


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """Every override of the run, in the order in which they were typed."""
    own: tuple[str, ...]
    """The overrides that set it apart from the other runs."""


def swept_runs(overrides: Sequence[str]) -> list[SweptRun]:
    """Return the runs of a sweep: a single one if no override has several values.

    Raises:
        ConfigError: the values of an override cannot be listed.
    """
    problems: list[Problem] = []
    alternatives = [_alternatives(text, problems) for text in overrides]
    if problems:
        raise ConfigError(problems)

    runs = []
    for combination in itertools.product(*alternatives):
        own = [
            text
            for text, values in zip(combination, alternatives, strict=True)
            if len(values) > 1
        ]
        runs.append(SweptRun(combination, tuple(own)))

    return runs


def _alternatives(text: str, problems: list[Problem]) -> list[str]:
    """Return an override as it is typed for each of its values."""
    try:
        override = parsed_override(text)
    except HydraException:
        # What cannot be read is reported when each run is checked.
        return [text]

    if not override.is_sweep_override():
        return [text]

    key = override.get_key_element()
    try:
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException:
        rule = "the values of this sweep cannot be listed"
        fix = f"Write them: {key}=1,2,3 or {key}=range(1,4)."
        problems.append(Problem(key, text.partition("=")[2], rule, fix))
        return [text]


def parsed_override(text: str) -> Override:
    """Return an override as Hydra reads it; a path may begin with `~` without quotes.

    Raises:
        HydraException: it cannot be read.
    """
    parser = OverridesParser.create()
    try:
        return parser.parse_override(text)
    except HydraException:
        # Hydra's grammar knows no such character. A path has another word for it.
        without_tilde = _HOME.sub("$HOME", text)
        if without_tilde == text:
            raise
        return parser.parse_override(without_tilde)
