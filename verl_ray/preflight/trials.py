"""Results of the trials of users' code, which the commands print together."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_ray.errors import Problem


@dataclass
class Trials:
    """The course of some trials, in words, and what is wrong.

    Attributes:
        lines: What `check` prints.
        problems: Failures of the code, and settings that do not fit it.
        warnings: What does not stop the run.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __add__(self, other: Trials) -> Trials:
        return Trials(
            self.lines + other.lines,
            self.problems + other.problems,
            self.warnings + other.warnings,
        )
