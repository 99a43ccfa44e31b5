"""From what the graders said to one score per response: normalised, clipped, weighted and added up.

Invariant: works on one number per response and grader; a response that one of its graders could not score has none.
The state is the moments of the scores seen so far, so a resumed run shapes as one that never stopped. Deliberately not
here: the KL charge and what a truncated response is worth (`verl_ray/algorithms`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_ray.config.reward import SingleReward
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.stages import Float32
from verl_ray.ops.masked import Moments, whiten
from verl_ray.rewards.health import Health

Healths = npt.NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Graded:
    """Scores of some responses."""

    score: Float32  # [rows], NaN where health is not OK
    health: Healths  # [rows], a Health
    rescored: int = 0
    """Rows that were scored again, since the process that scored them first died."""

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """[rows] where there is a score."""
        good: npt.NDArray[np.bool_] = self.health == Health.OK
        return good


class Shaping:
    """What a run makes of its graders' scores."""

    def __init__(self, config: RLConfig) -> None:
        self._graders = config.graders
        weights = {} if config.reward.mixed is None else config.reward.mixed.weights
        self._weights = {role: weights.get(component(role), 1.0) for role in self._graders}
        self._seen = dict.fromkeys(self._graders, Moments(0, 0, 0))

    def shape(self, raw: Mapping[str, Graded], aborted: npt.NDArray[np.bool_] | None = None) -> Graded:
        """The scores to learn from, float32 [rows], of what each grader said. Scores of responses that were `aborted`,
        bool [rows] (None: none was), do not count towards the moments that scores are normalised with."""
        shaped = {role: self._weights[role] * self._shaped(role, one, aborted) for role, one in raw.items()}
        return _sum(shaped, raw)

    def weigh(self, raw: Mapping[str, Graded]) -> Graded:
        """The same without normalising and clipping, which leaves no trace: for held-out problems, and for people."""
        return _sum({role: np.float32(self._weights.get(role, 1)) * one.score for role, one in raw.items()}, raw)

    def state(self) -> dict[str, Any]:
        """The moments so far, as JSON."""
        return {role: {"kind": self._graders[role].kind, **asdict(seen)} for role, seen in self._seen.items()}

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the moments; a grader that was not there, or was of another kind, begins anew."""
        for role, grader in self._graders.items():
            saved = dict(state.get(role, {}))
            if saved.pop("kind", None) == grader.kind:
                self._seen[role] = Moments(**saved)

    def _shaped(self, role: str, graded: Graded, aborted: npt.NDArray[np.bool_] | None) -> Float32:
        grader: SingleReward = self._graders[role]
        score = graded.score
        if grader.normalise != "none":
            counted = graded.ok if aborted is None else graded.ok & ~aborted
            moments = Moments.of(score, counted)
            if grader.normalise == "running":
                moments = self._seen[role] = self._seen[role] + moments
            score = whiten(score, moments)
        return score if grader.clip is None else np.clip(score, -grader.clip, grader.clip)


def component(role: str) -> str:
    """The name of a grader among the metrics: `reward.components.style` is style."""
    return role.rpartition(".")[2]


def _sum(scores: Mapping[str, Float32], raw: Mapping[str, Graded]) -> Graded:
    health = np.zeros(len(next(iter(scores.values()))), np.int8)
    for one in raw.values():
        health = np.where(health == Health.OK, one.health, health)
    total = np.sum([np.where(health == Health.OK, score, 0) for score in scores.values()], axis=0)
    return Graded(np.where(health == Health.OK, total, np.nan).astype(np.float32), health)
