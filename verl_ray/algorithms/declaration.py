"""What a declaration of an algorithm holds: its name, its paper, and the settings that its function reads.

Invariant: a declaration is light, so that the configuration may ask it; a function that needs torch is named by its
address. The names that may stand in the configuration, its fields, its rules, and the documents' tables all follow from
the declarations. Deliberately not here: any of them (`advantages.py`, `row_weights.py`, `catalogue.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl_ray.errors import DataError


@dataclass(frozen=True, eq=False)
class Setting:
    """A number that formulas read: the key `algorithm.<name>`, null where the chosen ones do not read it."""

    name: str
    kind: Any
    """Its type, as pydantic takes it."""
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One choice of an algorithm."""

    name: str
    """As the configuration has it."""
    paper: str
    reads: Mapping[Setting, object] = field(default_factory=dict)
    """What its function takes as keyword arguments, each with its usual value: a value, `${key}` for that of another
    setting, or None where null means something to the function."""

    def settings(self, algorithm: object) -> dict[str, Any]:
        """The keyword arguments, from the settings of an algorithm. Raises DataError where one has no value."""
        values = {setting.name: getattr(algorithm, setting.name) for setting in self.reads}
        missing = [one.name for one, usual in self.reads.items() if usual is not None and values[one.name] is None]
        if missing:
            raise DataError(f"{self.name} needs {' and '.join(f'algorithm.{name}' for name in missing)}, which is null")
        return values


D = TypeVar("D", bound=Declaration)


def by_name(*declared: D) -> dict[str, D]:
    """The table of one kind of choice."""
    assert len({one.name for one in declared}) == len(declared), "each name is declared once"
    return {one.name: one for one in declared}
