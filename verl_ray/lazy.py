"""Names of things that are imported only when they are used.

Declarations stay light that way, whatever their functions and classes need.

Invariant: naming a thing imports nothing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lazy:
    """A function or class at an address `module:name`.

    A call of it imports its module first.
    """

    address: str

    @property
    def target(self) -> Any:
        """The function or class itself."""
        module_name, _, name = self.address.partition(":")
        module = importlib.import_module(module_name)
        return getattr(module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs)
