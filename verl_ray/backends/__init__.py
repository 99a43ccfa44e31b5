"""The training backends: each is declared by a file here, and the table follows.

Invariant: the declarations are light. The configuration, its rules and preflight use
the contract in `base.py` and name no backend. The engines, which compute, are named in
`verl_ray/engine/build.py`.

It may import `settings`, `columns`, `ops`, `paths`, `profiling`, `private_files`,
`rendezvous` and `processes`, and what lies below them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args

from pydantic import Field

from verl_ray.backends.base import BackendSettings


def _declared_backends(base: Any) -> Iterator[type[BackendSettings]]:
    """Yield every subclass of `base` that declares its own value of `kind`."""
    for backend in base.__subclasses__():
        # Intermediate classes inherit `kind` and are no choice of their own.
        if "kind" in backend.__annotations__:
            yield backend

        yield from _declared_backends(backend)


def _kind_of(backend: type[BackendSettings]) -> str:
    """Return the only value of the literal type of the field `kind`."""
    annotation = backend.model_fields["kind"].annotation
    kind: str = get_args(annotation)[0]
    return kind


# Subclasses exist once their modules have been imported.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

BACKENDS = {
    _kind_of(backend): backend for backend in _declared_backends(BackendSettings)
}
"""The settings class of every choice of the group `backend`, by its name."""

DEFAULT_BACKEND = "engine"
"""The choice of a root config that makes none."""

if TYPE_CHECKING:
    Backend = BackendSettings
else:
    _AnyBackend = Union[tuple(BACKENDS.values())]  # noqa: UP007
    Backend = Annotated[_AnyBackend, Field(discriminator="kind")]
