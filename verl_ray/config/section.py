"""The base class of every section of the configuration, and numbers with ranges.

Invariant: a section has no defaults and refuses keys that it does not know.
Deliberately not here: any setting, and what `auto` stands for
(`verl_ray/preflight/resolve.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]

# NumPy's range of seeds; random streams derived from one fit torch's 64 bits.
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]

# vLLM's range of temperatures.
Temperature = Annotated[float, Field(ge=0, le=2)]

Auto = Literal["auto"]
"""The value of a setting that the run is to choose by itself."""

Dtype = Literal["float32", "bfloat16"]
"""The type that a model computes in."""

T = TypeVar("T")


def resolved(value: T | Auto) -> T:
    """Return the value of a setting that may be `auto`.

    The configuration must have been through `resolve`, which replaces every `auto`.
    """
    assert value != "auto", "a setting is read before the configuration is resolved"
    return value


class Section(BaseModel):
    """A frozen part of the configuration that refuses keys it does not know."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class OneOf:
    """An annotation of `str` that allows a fixed set of names.

    It stands in for a `Literal` whose names are only known when a table is read. Any
    other name is refused with the same error as a `Literal` gives.
    """

    def __init__(
        self, names: Iterable[str], other: Callable[[str], str | None] | None = None
    ) -> None:
        """Allow these names, and what `other` returns a value for."""
        self._names = tuple(names)
        self._other = other

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        names = core_schema.literal_schema(list(self._names))
        other = self._other
        if other is None:
            return names

        def validate(value: Any, of_names: Callable[[Any], Any]) -> Any:
            allowed = other(value) if isinstance(value, str) else None
            return of_names(value) if allowed is None else allowed

        return core_schema.no_info_wrap_validator_function(validate, names)
