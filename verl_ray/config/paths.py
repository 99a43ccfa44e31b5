"""Types of settings that hold a path.

Invariant: every local path of a configuration is absolute, because a worker's current
folder is not the user's. Deliberately not here: what `~` and `$VAR` stand for
(`verl_ray/paths.py`), and whether anything is there (`verl_ray/preflight`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from verl_ray.config.function_specs import PICKLE, names_module
from verl_ray.hub.names import is_hub_id
from verl_ray.paths import UnknownPart, expanded

UNKNOWN_PART = "unknown_part"
"""Type of the error about a path that has no meaning here."""

# Values of run.resume that are no path, in any spelling; rules refuse wrong ones.
_NO_CHECKPOINT = ("auto", "none", "true", "false")


def _local(path: str) -> str:
    try:
        return expanded(path)
    except UnknownPart as error:
        context = {"rule": error.rule, "fix": error.fix}
        raise PydanticCustomError(UNKNOWN_PART, "{rule}", context) from None


def _local_or_id(path: str) -> str:
    # What is here by that name is meant, and so is a folder here by the first part.
    if is_hub_id(path) and not Path(path).parent.is_dir():
        return path
    return _local(path)


def _checkpoint(path: str) -> str:
    return path if path.lower() in _NO_CHECKPOINT else _local(path)


def _function(spec: str) -> str:
    if spec.endswith(PICKLE):
        return _local(spec)
    path, colon, function = spec.rpartition(":")
    # A built-in function is no path, and neither is `package.module:function`.
    if not colon or names_module(spec):
        return spec
    return f"{_local(path)}:{function}"


LocalPath = Annotated[str, AfterValidator(_local)]
"""A path of this machine."""

HubPath = Annotated[str, AfterValidator(_local_or_id)]
"""A path of this machine, or the id of a model or data set on the hub."""

CheckpointPath = Annotated[str, AfterValidator(_checkpoint)]
"""The path of a checkpoint, or a word that stands for one."""

FunctionPath = Annotated[str, AfterValidator(_function)]
"""The name of a function, with the path of its file or without."""
