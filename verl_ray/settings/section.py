"""The base of every section of the configuration and of its rules, numbers with ranges.

Invariant: a section has no defaults and refuses keys that it does not know. A rule only
inspects a configuration: it yields what is wrong and never changes or completes a
setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema

from verl_ray.errors import Problem

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
ZeroIsOff = Annotated[
    int, BeforeValidator(lambda value: 0 if value is None else value), Field(ge=0)
]
"""A number that turns something off where it is 0; null, off elsewhere, becomes 0."""


def read_never(value: object) -> object:
    """Return 0 for each value that means never in some system: null, false and -1."""
    return 0 if value is None or value is False or value == -1 else value


ZeroIsNever = Annotated[int, BeforeValidator(read_never), Field(ge=0)]
"""An interval that is never over where it is 0."""

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

        def validate(value: Any, by_name: Callable[[Any], Any]) -> Any:
            allowed = other(value) if isinstance(value, str) else None
            return by_name(value) if allowed is None else allowed

        return core_schema.no_info_wrap_validator_function(validate, names)


# -------------------------------------------------------------------------------- rules

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class OverriddenKeys:
    """The dotted keys that the user set on the command line, and their values."""

    keys: Collection[str]
    """The keys; `critic.backend` stands for a whole section."""
    evaluates: bool
    """Whether the command is a single evaluation, whatever run.evaluate_every says."""
    config: Section
    """The configuration as a whole, which holds the values."""
    before: Mapping[str, object] = field(default_factory=dict)
    """The values that the keys had before, where they are known."""

    def replaced(self, key: str) -> object:
        """Return the value of a key that the user's replaces; None if none does."""
        before = self.before.get(key)
        return None if before == value_of(self.config, key) else before

    def under(self, section: str) -> list[str]:
        """Return the overridden keys that are `section` or lie inside it, sorted."""
        return sorted(
            key for key in self.keys if key == section or key.startswith(f"{section}.")
        )

    def ignored(
        self, keys: Iterable[str], reason: str, fix: str = "Leave it out."
    ) -> Iterator[Problem]:
        """Yield a problem for each key that the user set and the run would not read."""
        rule = f"this setting would be ignored: {reason}"

        for key in keys:
            yield Problem(key, value_of(self.config, key), rule, fix)

    def follow_reference(self, value: object) -> object:
        """Return the value that a text such as `${run.seed}` refers to.

        Any other value is returned as it is.
        """
        if not isinstance(value, str):
            return value

        reference = _REFERENCE.fullmatch(value)
        if reference is None:
            return value
        return value_of(self.config, reference[1])


def set_exactly_when(
    required: bool, key: str, value: object, because: str, usual: object
) -> Iterator[Problem]:
    """Yield a problem unless a key has a value exactly when it is required.

    Args:
        required: whether the run reads the key.
        key: the dotted key.
        value: its value in the configuration.
        because: the setting that reads the key or does not, such as `a.b=c`.
        usual: a value to recommend if there is none.
    """
    if required and value is None:
        yield Problem(key, None, f"{because} needs it", f"{usual} is usual.")
    if not required and value is not None:
        yield Problem(key, value, f"{because} does not use it", "Set it to null.")


C_contra = TypeVar("C_contra", bound=Section, contravariant=True)


@dataclass(frozen=True)
class RuleRow(Generic[C_contra]):
    """A rule of one condition about one setting: a row of a table.

    Attributes:
        name: What holds where the rule is kept.
        key: The dotted key of the setting to change.
        is_broken: Whether a configuration breaks the rule.
        rule: The rule in words; `{a.b}` stands for the value of a setting, and
            `{config.a}` for what the configuration says of itself.
        fix: What would be right, in the same form.
    """

    name: str
    key: str
    is_broken: Callable[[C_contra], bool]
    rule: str
    fix: str

    def problems(self, config: C_contra) -> Iterator[Problem]:
        """Yield the problem of a configuration that breaks the rule."""
        if self.is_broken(config):
            values = {"config": config, **dict(config)}
            rule = self.rule.format_map(values)
            fix = self.fix.format_map(values)
            yield Problem(self.key, value_of(config, self.key), rule, fix)


def value_of(config: Section, key: str) -> object:
    """Return the value at a dotted key; for a section with a `kind`, the kind.

    None for a key that the configuration does not have. The user may have typed one
    that was refused already.
    """
    node: object = config.model_dump()
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None

    # The user chose the section by its kind, so that is what a message shows.
    if isinstance(node, dict) and "kind" in node:
        return node["kind"]
    return node
