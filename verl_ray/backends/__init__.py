"""The training backends: each is one file here that declares it, and the table of all follows from the files.

Invariant: light; the configuration, the rules and preflight ask a backend by the contract in `base.py` and name none.
Deliberately not here: the engines, which compute (`verl_ray/engine`) and are declared by their addresses.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args

from pydantic import Field

from verl_ray.backends.base import BackendSettings


def _declared(kind: Any) -> Iterator[type[BackendSettings]]:
    """The classes below this one that say which choice they are."""
    for one in kind.__subclasses__():
        if "kind" in one.__annotations__:
            yield one
        yield from _declared(one)


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

BACKENDS = {get_args(one.model_fields["kind"].annotation)[0]: one for one in _declared(BackendSettings)}
"""The settings of each choice of the group `backend`, by its name."""

if TYPE_CHECKING:
    Backend = BackendSettings
else:
    Backend = Annotated[Union[tuple(BACKENDS.values())], Field(discriminator="kind")]  # noqa: UP007
