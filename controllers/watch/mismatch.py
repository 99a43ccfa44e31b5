"""How far sampler and trainer may be apart: the end of a run that goes too far, or the correction, and why.

Invariant: a cause is named from what is known of this step and configuration, never guessed from the size of a number;
whether the correction is on is part of a checkpoint. Deliberately not here: the metrics (`verl_ray/algorithms`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import MismatchError
from verl_ray.rollout.requests import Sampling
from workers.model_worker import UpdateReport

OTHER_PRECISION = ("quantization", "quantization_config", "kv_cache_dtype")
"""Arguments of the rollout engine that make its arithmetic another than rollout.dtype says."""


class MismatchWatch:
    """Holds the metric that algorithm.mismatch names against its limit. `sampling`: how the rollouts are drawn."""

    def __init__(self, config: RLConfig, sampling: Sampling) -> None:
        self._config, self._sampling = config, sampling
        self._crossed = False

    @property
    def corrects(self) -> bool:
        """Whether algorithm.correction applies: from the start, unless algorithm.mismatch is to turn it on."""
        algorithm = self._config.algorithm
        return algorithm.correction.form != "none" and (algorithm.mismatch.then != "correct" or self._crossed)

    def see(
        self, number: int, metrics: Mapping[str, float], updates: Sequence[Sequence[UpdateReport]], policy_version: int
    ) -> None:
        """The metrics of step `number`, in which the policy learned, and the actor's reports of it. A metric that is
        not a number is beyond any limit; one that is absent was not measured, since no row was learned from. Raises
        MismatchError where the run is to stop."""
        wanted = self._config.algorithm.mismatch
        if wanted.metric is None or wanted.limit is None or (wanted.then == "correct" and self._crossed):
            return
        found = metrics.get(wanted.metric)
        if found is None or found <= wanted.limit:
            return
        versions = [rank.oldest_version for ranks in updates for rank in ranks if rank.oldest_version is not None]
        reasons = causes(self._config, self._sampling, policy_version, min(versions, default=policy_version))
        message = (
            f"step {number}: {wanted.metric} is {found:.3g}, beyond algorithm.mismatch.limit = {wanted.limit:.3g}: the "
            f"sampler draws from another policy than the trainer computes. What fits: {'; '.join(reasons)}"
        )
        if wanted.then == "stop":
            raise MismatchError(message)
        self._crossed = True
        print(f"warning: {message}. algorithm.correction is on from the next step", file=sys.stderr, flush=True)

    def state(self) -> dict[str, bool]:
        """Whether the limit was crossed, as JSON."""
        return {"crossed": self._crossed}

    def load_state(self, state: Mapping[str, bool]) -> None:
        self._crossed = state["crossed"]


def causes(config: RLConfig, sampling: Sampling, policy_version: int, oldest_version: int) -> list[str]:
    """Every known cause that the facts bear out, with what to do; weights or kernels where none is left.

    `policy_version` is what the trainer held before it learned, `oldest_version` the oldest that sampled a token.
    """
    found, rollout = [], config.rollout
    if oldest_version != policy_version:
        found.append(
            f"stale version (tokens of policy version {oldest_version}, a trainer at {policy_version}: publish more "
            "often, or correct for it)"
        )
    support = {
        "temperature": (sampling.temperature, rollout.temperature),
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, -1),
    }
    other = [f"{name} is {its} there and {ours} here" for name, (its, ours) in support.items() if its != ours]
    if other:
        found.append(f"sampling support ({', '.join(other)}: set rollout.* to what the trainer assumes)")
    types = {"rollout.dtype": rollout.dtype, "actor.backend.dtype": config.actor.backend.dtype}
    coarser = {f"rollout.vllm_args.{name}": rollout.vllm_args.get(name) for name in OTHER_PRECISION}
    coarser = {key: value for key, value in coarser.items() if value not in (None, "auto")}
    if len(set(types.values())) > 1 or coarser:
        told = ", ".join(f"{key}={value}" for key, value in (types | coarser).items())
        found.append(f"precision ({told}: compute alike, or correct for it)")
    return found or [
        f"weights or kernels (version {policy_version}, sampling and {rollout.dtype} are the same on both sides; the "
        "weights that were sent arrived bit by bit, so look at what the engines compute with them)"
    ]
