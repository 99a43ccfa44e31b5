"""Cases of the rules: a broken setting, and the message about it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

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
            for problem in examine(self.root, shlex.split(self.overrides)).problems
            if problem.key == self.key
        )
        return problem
