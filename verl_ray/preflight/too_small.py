"""A GPU, or the host of a node, that is too small for a run.

Invariant: only a lower bound that does not fit is certain; an estimate is a warning.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ray.errors import Problem


@dataclass(frozen=True)
class Shortage:
    """A GPU, or the host of a node, that is too small: certainly, or by estimate."""

    place: str
    """What is too small, in words."""
    available: str
    """What there is; and what is needed, if that is an estimate."""
    key: str = "model.path"
    """Key of the setting that needs most."""
    value: object = None
    """Value of this setting."""
    rule: str | None = None
    """What is certainly needed; None for an estimate."""
    own_advice: str | None = None
    """What to do, where no change of settings is searched for."""

    @property
    def is_certain(self) -> bool:
        """Whether a lower bound does not fit."""
        return self.rule is not None

    def problem(self, advice: str) -> Problem:
        """Return what is certain as a problem."""
        assert self.rule is not None, "an estimate is no problem"
        return Problem(self.key, self.value, self.rule, f"{self.available}: {advice}.")

    def warning(self, advice: str) -> str:
        """Return what is estimated as a warning."""
        return f"{self.available}: {advice}"
