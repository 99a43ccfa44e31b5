"""Cases of the rules: a broken setting, and the message about it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cache

from controllers.compose.composition import examine
from verl_ray.errors import Problem

INPUTS = ["model.path=/m", "data.train_path=t.jsonl", "data.validation_path=v.jsonl"]
JUDGE = "reward=judge reward.model.path=/judge"


@dataclass(frozen=True)
class Case:
    """A broken setting, and parts of the message about it."""

    rule: str
    overrides: str
    key: str
    says: str
    fix: str
    root: str = "quickstart"

    def __str__(self) -> str:
        return f"{self.rule}-{self.key}"

    def problem(self) -> Problem:
        """Return the only problem under the key of the case."""
        (problem,) = (
            problem
            for problem in problems_of(self.root, self.overrides)
            if problem.key == self.key
        )
        return problem


@cache
def problems_of(root: str, overrides: str) -> list[Problem]:
    """Return all problems of a root config with what the user typed."""
    return examine(root, shlex.split(overrides)).problems
