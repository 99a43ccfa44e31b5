"""Settings that were typed: the overrides of a run's commands, and what they became.

Invariant: it follows from the record alone. An override is shown as it was typed, and
of a setting that several commands name the last one counts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from verl_ray.report.lines import setting

_OVERRIDE = re.compile(r"[+~]{0,2}([\w./:@-]+)=(.*)", re.DOTALL)
_WITH_VALUE = ("--config-name", "--config-dir")

_RESOLVED = {"run.total_epochs": "run.total_steps"}
"""Settings that a run replaces by another one."""


@dataclass(frozen=True)
class TypedSetting:
    """An override of a command."""

    key: str
    text: str
    """The value as it was typed."""

    became: str
    """The value in the configuration of the run; empty where it has no such key."""


def typed_settings(
    commands: Iterable[str], config: Mapping[str, object]
) -> list[TypedSetting]:
    """Return what some commands set, in the order of the keys.

    Args:
        commands: Commands quoted for a shell, the oldest one first.
        config: Configuration of the run as a tree of plain values.
    """
    texts: dict[str, str] = {}
    for command in commands:
        texts |= _overrides(command)
    return [
        TypedSetting(key, text, _became(key, text, config))
        for key, text in sorted(texts.items())
    ]


def _overrides(command: str) -> dict[str, str]:
    """Return the overrides of a command by their keys."""
    try:
        words = shlex.split(command)
    except ValueError:
        # A record may hold anything.
        return {}
    texts = {}
    for before, word in zip(["", *words], words, strict=False):
        match = _OVERRIDE.fullmatch(word)
        if (
            match is not None
            and not word.startswith("--")
            and before not in _WITH_VALUE
        ):
            texts[match[1]] = match[2]
    return texts


def _became(key: str, text: str, config: Mapping[str, object]) -> str:
    """Return what a setting is in a run."""
    value = setting(config, key)
    other = _RESOLVED.get(key)
    if value is None and other is not None and text != "null":
        return f"{other} = {_in_words(setting(config, other))}"
    if isinstance(value, Mapping) and not text.startswith("{"):
        return f"the values of {key}"
    *section, _ = key.split(".")
    parent = setting(config, ".".join(section)) if section else config
    has_key = isinstance(parent, Mapping) and key.rpartition(".")[2] in parent
    return _in_words(value) if has_key else ""


def _in_words(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
