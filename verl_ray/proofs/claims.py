"""Claims about a model, each with its number and the bound of that number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A claim about a model, and how far from true it is."""

    statement: str

    number: float | None
    """The largest difference; None where nothing could be computed."""

    tolerance: float

    where: str = ""
    """The layer and module in which the difference arises, or the error."""

    @property
    def holds(self) -> bool:
        """Whether the number was computed and is within its bound."""
        return self.number is not None and self.number <= self.tolerance

    def __str__(self) -> str:
        return self.line("FAIL")

    def line(self, otherwise: str) -> str:
        """Return the claim in a line, which begins with another word if it fails."""
        sign = f"{'ok' if self.holds else otherwise:4}"
        number = "-" if self.number is None else f"{self.number:.1e}"
        where = f"  {self.where}" if self.where else ""
        return (
            f"{sign} {self.statement}: {number} (at most {self.tolerance:.0e}){where}"
        )
