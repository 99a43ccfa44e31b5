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
from hydra.errors import HydraException

from verl_ray.errors import ConfigError, Problem


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
        override = OverridesParser.create().parse_override(text)
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


def quoted(key: str, value: str) -> str:
    """Return an override that sets a text, whatever characters it has."""
    if re.fullmatch(r"[\w./-]+", value):
        return f"{key}={value}"

    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"
