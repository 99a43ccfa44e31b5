"""What is named now and imported once it is used: declarations stay light, whatever their functions and classes need.

Deliberately not here: which things are declared so (`verl_ray/algorithms/catalogue.py`, `verl_ray/backends`).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Lazy:
    """A function or a class at an address, `module:name`; to call it imports its module."""

    address: str

    @property
    def target(self) -> Any:
        """What is there."""
        module, _, name = self.address.partition(":")
        return getattr(importlib.import_module(module), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*args, **kwargs)
