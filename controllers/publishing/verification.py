"""Verification of weight syncs by log-probs of a few fixed tokens.

The actor and every replica have to agree on the log-probs.

Invariant: the actor makes the probe of a version while it holds that version's weights,
and the probe serves every replica that gets the version, however late.
"""

from __future__ import annotations

from typing import Literal

from controllers.publishing.wire import Receivers
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.rollout.probes import Probe
from verl_ray.settings.section import resolved
from workers.actor import ActorWorker

PROBE_TOKENS = 16

ROUNDED_TOLERANCE = (0.1, 1.0)
"""Limits of the tolerance where rollout.sync.probe_tolerance=measured.

The first probe of a run is of weights that were sent as a whole, and may differ by
the upper limit. It shows how much rounding does. Later probes may differ by
`TIMES_THE_FIRST` as much, within these limits.
"""

TIMES_THE_FIRST = 5

ProbeCall = Call[list[Probe | None]]
"""A call of the actor's ranks for a probe, which only one of the ranks returns."""


class Verification:
    """The probe of the present version, its tolerance, and when a probe is due."""

    def __init__(
        self, actor: WorkerGroup[ActorWorker], config: RolloutTaskConfig
    ) -> None:
        """Begin without a probe."""
        self._actor = actor
        rollout = config.rollout
        self._every: int = resolved(rollout.sync.probe_every)
        self._version: int | None = None
        self._probe: Probe | None = None

        tolerance: float | Literal["measured"] = resolved(rollout.sync.probe_tolerance)
        self._measures_rounding = tolerance == "measured"
        if tolerance == "measured":
            self._tolerance = ROUNDED_TOLERANCE[1]
        else:
            self._tolerance = tolerance

        # The engine generates a token after the probe's, so one token less fits.
        longest_row = config.data.max_prompt_tokens + rollout.max_response_tokens
        self._num_tokens = min(PROBE_TOKENS, longest_row - 1)

    def is_due(self, num_syncs: int) -> bool:
        """Whether the next sync is to be verified.

        Args:
            num_syncs: Number of syncs so far.
        """
        return num_syncs % self._every == 0

    def probe_of(self, version: int) -> Probe | None:
        """Return the probe of this version, or None if the actor has made none."""
        return self._probe if self._version == version else None

    def request_probe(self, version: int) -> ProbeCall | None:
        """Request the probe of a version from the actor, which holds that version.

        Returns:
            The call to wait for, or None if the probe is there already.
        """
        if self.probe_of(version) is not None:
            return None
        return self._actor.broadcast(
            ActorWorker.probe, self._num_tokens, self._tolerance
        )

    def store_probe(
        self, version: int, call: ProbeCall | None, receivers: Receivers | None = None
    ) -> None:
        """Wait for the call of `request_probe`, and keep the probe.

        Args:
            version: The version.
            call: The call; None does nothing.
            receivers: The replicas of the sync, if there is one.
        """
        if call is not None:
            probes = call.result() if receivers is None else receivers.wait([call])[0]
            # All ranks compute, and one of them returns the probe.
            (probe,) = (probe for probe in probes if probe is not None)
            probe.require_finite(version)
            self._probe = probe
            self._version = version

    def note_difference(self, difference: float) -> None:
        """Derive the tolerance of later probes from the first difference.

        Args:
            difference: The largest difference of a log-prob that a replica has found.
        """
        if self._measures_rounding:
            lower, upper = ROUNDED_TOLERANCE
            self._tolerance = min(max(TIMES_THE_FIRST * difference, lower), upper)
            self._measures_rounding = False
