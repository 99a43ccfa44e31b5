"""The proof of a sync: log-probs of a few fixed tokens, which the actor and every replica have to agree on.

Invariant: a version's probe is made by the actor while it holds that version's weights, and serves every replica that
gets them, however late. Deliberately not here: fingerprints, which every sync compares (`verl_ray/weight_sync`).
"""

from __future__ import annotations

from typing import Literal

from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.drawing import DrawingConfig
from verl_ray.config.section import resolved
from verl_ray.rollout.update import Probe
from workers.actor import ActorWorker

PROBE_TOKENS = 16
ROUNDED_TOLERANCE = (0.1, 1.0)
"""Largest difference of a log-prob where rollout.sync.probe_tolerance=measured. The first probe of a run, of weights
that were sent as a whole, may find as much as the larger; it shows how much rounding does, and later ones may find so
many times as much, within these limits."""
TIMES_THE_FIRST = 5


class Proof:
    """When it is due, how much may differ, and the probe of the present version."""

    def __init__(self, actor: WorkerGroup[ActorWorker], config: DrawingConfig) -> None:
        self._actor = actor
        rollout = config.rollout
        self._every: int = resolved(rollout.sync.probe_every)
        tolerance: float | Literal["measured"] = resolved(rollout.sync.probe_tolerance)
        self._measures_rounding = tolerance == "measured"
        self._tolerance = ROUNDED_TOLERANCE[1] if tolerance == "measured" else tolerance
        self._longest = min(PROBE_TOKENS, config.data.max_prompt_tokens + rollout.max_response_tokens - 1)
        self._kept: tuple[int, Probe] | None = None

    def is_due(self, syncs: int) -> bool:
        """Whether the next sync is proved, after so many."""
        return syncs % self._every == 0

    def of(self, version: int) -> Probe | None:
        """The probe of this version; None = the actor has not made one."""
        return self._kept[1] if self._kept is not None and self._kept[0] == version else None

    def ask(self, version: int) -> Call[list[Probe | None]] | None:
        """Ask the actor, which holds this version, for its probe; None = there is one."""
        if self.of(version) is not None:
            return None
        return self._actor.broadcast(ActorWorker.probe, self._longest, self._tolerance)

    def keep(self, version: int, asked: Call[list[Probe | None]] | None) -> None:
        """Wait for what `ask` has returned."""
        if asked is not None:
            (probe,) = (told for told in asked.result() if told is not None)
            self._kept = version, probe

    def found(self, difference: float) -> None:
        """The largest difference that replicas found; the first one shows how much rounding does."""
        if self._measures_rounding:
            least, most = ROUNDED_TOLERANCE
            self._tolerance = min(max(TIMES_THE_FIRST * difference, least), most)
            self._measures_rounding = False
