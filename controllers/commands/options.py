"""Options that the commands do not have, Hydra's and other systems' among them.

Invariant: each is answered with what to type. Deliberately not here: the options that
there are (`usage.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_ray.config.advice import advice_on
from verl_ray.config.load import value_keys
from verl_ray.config.suggest import closest, is_misspelt
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import Problem

_OF_HYDRA = {
    "--info": (
        "Type `verl-ray check` for what a run would do, `verl-ray check --print` for"
        " its configuration, `verl-ray train --help` for all groups and their choices."
    ),
    "--package": "Type `verl-ray check --print`, which prints every section.",
    "--run": "Leave it out: `verl-ray train` is one run.",
    "--hydra-help": "Type `verl-ray train --help`.",
    "--shell-completion": "Leave it out; a misspelt key is answered with near ones.",
    "--experimental-rerun": (
        "Type `verl-ray train --config-name outputs/NAME/config.yaml run.dir=FOLDER`."
    ),
    "-i": "Type `verl-ray check`, or `verl-ray check --print`.",
    "-p": "Type `verl-ray check --print`, which prints every section.",
    "-r": "Leave it out: `verl-ray train` is one run.",
}
"""Option of Hydra -> what to type instead."""


def unknown_options(
    command: str, arguments: Sequence[str], options: Sequence[str]
) -> list[Problem]:
    """Return a problem for each option that a command does not have.

    Args:
        command: the command.
        arguments: what was typed and is no option of the command.
        options: the options of the command.
    """
    known = value_keys(RLConfig)
    problems = []

    for text in arguments:
        option, _, value = text.partition("=")
        if not option.startswith("-"):
            # The value of the option before it.
            continue

        rule = f"verl-ray {command} has no such option"
        fix = _OF_HYDRA.get(option) or _advice(option, value, options, known)
        problems.append(Problem(option, value or None, rule, fix))

    if not problems:
        rule = "it says how a configuration is printed, and none is"
        problems.append(Problem("--resolve", None, rule, "Add --cfg job."))
    return problems


def _advice(
    option: str, value: str, options: Sequence[str], known: Sequence[str]
) -> str:
    """Return what to type in place of an option that Hydra does not have either."""
    if is_misspelt(option, options):
        return f"Did you mean {closest(option, options, 1)[0]}?"
    if option.startswith("--config"):
        return f"Did you mean --config-name {value or 'FILE.yaml'}?"

    key = option.lstrip("-")
    if key in known:
        return f"Write {key}={value or '...'}: a setting has no dashes."
    return f"{advice_on(option, known)} A setting has no dashes: key=value."
