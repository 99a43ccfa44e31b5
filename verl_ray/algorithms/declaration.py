"""The declaration of a formula that a run may choose: name, paper and settings.

Invariant: a declaration is light, so that the configuration can use it; a function that
needs torch imports it when it is called. The names that the configuration accepts, its
fields, its rules, and the documents' tables all follow from the declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from verl_ray.errors import DataError


@dataclass(frozen=True, eq=False)
class Setting:
    """A number that formulas read: the key `<section>.<name>`.

    It is null if none of the chosen formulas reads it.

    Attributes:
        name: The last part of the key.
        kind: Its type, as pydantic takes it.
        meaning: Its description.
    """

    name: str
    kind: Any
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """One choice of a formula.

    Attributes:
        section: The section of the configuration that its settings are in.
        name: Its name in the configuration.
        paper: Its source.
        reads: The settings that its function takes as keyword arguments, each with its
            usual value. This is a value, `${key}` for the value of another setting, or
            None if null means something to the function.
    """

    section: ClassVar[str] = "algorithm"

    name: str
    paper: str
    reads: Mapping[Setting, object] = field(default_factory=dict)

    def settings(self, section: object) -> dict[str, Any]:
        """Return the keyword arguments of the function.

        Args:
            section: The section of the configuration.

        Raises:
            DataError: A setting that needs a value is null.
        """
        values = {
            setting.name: getattr(section, setting.name) for setting in self.reads
        }

        missing = [
            f"{self.section}.{setting.name}"
            for setting, usual_value in self.reads.items()
            if usual_value is not None and values[setting.name] is None
        ]
        if missing:
            raise DataError(f"{self.name} needs {' and '.join(missing)}, which is null")

        return values


@dataclass(frozen=True, kw_only=True)
class DeclarationWithUsualValues(Declaration):
    """One choice of a formula whose settings are their usual values where null."""

    def settings(self, section: object) -> dict[str, Any]:
        """Return the keyword arguments of the function; usual ones where null."""
        values = {}
        for setting, usual_value in self.reads.items():
            value = getattr(section, setting.name)
            values[setting.name] = usual_value if value is None else value
        return values


def fields_of_settings(settings: Iterable[Setting], formula: str) -> dict[str, Any]:
    """Return the pydantic fields of settings that are usual values where null.

    Args:
        settings: The settings.
        formula: What has the usual values, in a word.
    """
    usual = f"null = the usual value of the {formula}."
    return {
        setting.name: (
            setting.kind | None,
            Field(description=f"{setting.meaning} {usual}"),
        )
        for setting in settings
    }


D = TypeVar("D", bound=Declaration)


def by_name(*declarations: D) -> dict[str, D]:
    """Return the table of one kind of choice, by the names of the choices."""
    table = {declaration.name: declaration for declaration in declarations}
    assert len(table) == len(declarations), "each name is declared once"
    return table
