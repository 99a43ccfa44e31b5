"""One broken setting, and what the user is told about it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from controllers.compose.composition import examine
from verl_ray.errors import Problem

INPUTS = ["model.path=/m", "data.train_path=t.jsonl", "data.validation_path=v.jsonl"]
JUDGE = "reward=judge reward.model.path=/judge"


@dataclass(frozen=True)
class Case:
    rule: str
    overrides: str
    key: str
    says: str
    fix: str
    root: str = "quickstart"

    def __str__(self) -> str:
        return f"{self.rule}-{self.key}"

    def problem(self) -> Problem:
        """The only one under its key."""
        (problem,) = (one for one in examine(self.root, shlex.split(self.overrides)).problems if one.key == self.key)
        return problem
