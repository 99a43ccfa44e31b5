"""Settings that were typed: the overrides of a run's commands, and what they became.

Invariant: it follows from the record alone. An override is shown as it was typed, and
of a setting that several commands name the last one counts. A command that does not go
on from a folder's configuration begins with no override of the commands before.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl_ray.report.lines import setting

_OVERRIDE = re.compile(r"[+~]{0,2}([\w./:@-]+)=(.*)", re.DOTALL)
_WITH_VALUE = ("--config-name", "--config-dir")

_RESOLVED = {"run.total_epochs": "run.total_steps", "schedule": "rollout.schedule"}
"""What stands in another setting of the run: one that is counted, and a choice."""


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
        try:
            words = shlex.split(command)
        except ValueError:
            # A record may hold anything.
            continue
        if not any(word.startswith("--config-dir") for word in words):
            texts.clear()
        texts |= _overrides(words)
    return [
        TypedSetting(key, text, _became(key, text, config))
        for key, text in sorted(texts.items())
    ]


def _overrides(words: Sequence[str]) -> dict[str, str]:
    """Return the overrides of a command by their keys."""
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
    # A choice of a group names the section that it is for, or is for all that have one.
    _, is_choice, section_key = key.rpartition("@")
    if is_choice and isinstance(setting(config, section_key), Mapping):
        return f"the values of {section_key}"
    if "." not in key and key not in config:
        keys = [f"{section}.{key}" for section in config]
        keys = [each for each in keys if isinstance(setting(config, each), Mapping)]
        if keys:
            return f"the values of {', '.join(keys)}"
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
