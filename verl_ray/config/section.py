"""What every class of the configuration is built from: a frozen section, and numbers with their ranges.

Invariant: a section has no defaults and refuses keys it does not know. Deliberately not here: any setting, and what
`auto` stands for (`resolve.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # NumPy's range; random streams made from it fit torch's 64 bits
Temperature = Annotated[float, Field(ge=0, le=2)]  # vLLM's range

Auto = Literal["auto"]
"""The value of a setting that the run is to choose by itself."""

T = TypeVar("T")


def resolved(value: T | Auto) -> T:
    """The value of a setting that may be `auto`, in a configuration that `resolve` has been through."""
    assert value != "auto", "a setting is read before the configuration is resolved"
    return value


class Section(BaseModel):
    """A frozen part of the configuration that refuses keys it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class OneOf:
    """Beside `str` in `Annotated`: the text is one of these names, and what is not is refused as a `Literal` does."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.literal_schema(list(self._names))
