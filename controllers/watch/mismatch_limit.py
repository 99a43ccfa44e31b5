"""The limit on the mismatch between sampler and trainer.

Beyond it a run stops, or the correction is switched on, and likely causes are reported.
Whether the correction is on is part of a checkpoint.

Invariant: a cause is named from what is known of this step and configuration, never
guessed from the size of a number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import MismatchError
from verl_ray.rollout.requests import Sampling
from workers.model_worker import UpdateReport


class MismatchWatch:
    """Compares the metric of algorithm.mismatch with its limit after every step."""

    def __init__(self, config: RLConfig, sampling: Sampling) -> None:
        """Create a watch whose limit was not crossed yet.

        Args:
            config: Configuration of the run.
            sampling: Sampling parameters of the rollouts.
        """
        self._config = config
        self._sampling = sampling
        self._crossed = False
        self._warned = False

    @property
    def corrects(self) -> bool:
        """Whether algorithm.correction applies now.

        It applies from the start, unless algorithm.mismatch switches it on.
        """
        algorithm = self._config.algorithm
        if algorithm.correction.form == "none":
            return False
        return algorithm.mismatch.then != "correct" or self._crossed

    def observe(
        self,
        number: int,
        metrics: Mapping[str, float],
        updates: Sequence[Sequence[UpdateReport]],
        policy_version: int,
    ) -> None:
        """Compare the metric of a step with the limit.

        NaN is beyond any limit. A missing metric was not measured, since the step had
        no row to learn from, or none of its tokens has the age that the metric is of.

        Args:
            number: Number of the step in which the policy learned.
            metrics: Metrics of the step.
            updates: Reports of the actor, [steps][ranks].
            policy_version: Version that the trainer held before it learned.

        Raises:
            MismatchError: The limit is crossed and algorithm.mismatch.then is stop.
        """
        mismatch = self._config.algorithm.mismatch
        metric = mismatch.metric
        limit = mismatch.limit
        if metric is None or limit is None:
            return
        # The correction is already on, and stays on.
        if mismatch.then == "correct" and self._crossed:
            return

        # NaN compares as neither smaller nor equal, so it goes on from here.
        value = metrics.get(metric)
        if value is None:
            self._warn_of_missing(number, metric)
            return
        if value <= limit:
            return

        oldest_version = _oldest_version(updates, policy_version)
        likely_causes = causes(
            self._config, self._sampling, policy_version, oldest_version
        )
        message = (
            f"step {number}: {metric} is {value:.3g}, beyond"
            f" algorithm.mismatch.limit = {limit:.3g}: the sampler draws from"
            " another policy than the trainer computes. What fits:"
            f" {'; '.join(likely_causes)}"
        )
        if mismatch.then == "stop":
            raise MismatchError(message)

        # The policy has learned from this step already, so the correction begins with
        # the next one.
        self._crossed = True
        print(
            f"warning: {message}. algorithm.correction is on from the next step",
            file=sys.stderr,
            flush=True,
        )

    def _warn_of_missing(self, number: int, metric: str) -> None:
        """Print once that steps without fresh tokens are not compared."""
        if self._warned or not metric.startswith("staleness/"):
            return
        self._warned = True
        print(
            f"warning: step {number} has no {metric}: the policy that learned sampled"
            " none of its tokens. algorithm.mismatch.limit does not apply to such"
            " steps, of which there may be many",
            file=sys.stderr,
            flush=True,
        )

    def state(self) -> dict[str, bool]:
        """Return whether the limit was crossed, as JSON."""
        return {"crossed": self._crossed}

    def load_state(self, state: Mapping[str, bool]) -> None:
        """Continue from the state of a checkpoint."""
        self._crossed = state["crossed"]


def _oldest_version(
    updates: Sequence[Sequence[UpdateReport]], policy_version: int
) -> int:
    """Return the oldest policy version that sampled a token, if a rank reported any."""
    versions = [
        version
        for ranks in updates
        for rank in ranks
        for version in rank.tokens_of_versions
    ]
    return min(versions, default=policy_version)


def causes(
    config: RLConfig, sampling: Sampling, policy_version: int, oldest_version: int
) -> list[str]:
    """Return every known cause that the facts support, each with its remedy.

    If there is none, the cause is in the weights or the kernels.

    Args:
        config: Configuration of the run.
        sampling: Sampling parameters of the rollouts.
        policy_version: Version that the trainer held before it learned.
        oldest_version: Oldest version that sampled a token.
    """
    known = [
        *_version_causes(policy_version, oldest_version),
        *_sampling_causes(config, sampling),
        *_precision_causes(config),
    ]
    if known:
        return known

    return [
        f"weights or kernels (version {policy_version}, sampling and"
        f" {config.rollout.dtype} are the same on both sides; the weights that were"
        " sent arrived bit by bit, so look at what the engines compute with them)"
    ]


def _version_causes(policy_version: int, oldest_version: int) -> Iterator[str]:
    """Yield a cause if older policy versions sampled tokens."""
    if oldest_version != policy_version:
        yield (
            f"stale version (tokens of policy version {oldest_version}, a trainer at"
            f" {policy_version}: publish more often, or correct for it)"
        )


def _sampling_causes(config: RLConfig, sampling: Sampling) -> Iterator[str]:
    """Yield a cause if rollouts are sampled from another distribution."""
    # The trainer computes with the temperature, and without top_p and top_k.
    expected = {
        "temperature": (sampling.temperature, config.rollout.temperature),
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, -1),
    }
    differences = [
        f"{name} is {sampler_value} there and {trainer_value} here"
        for name, (sampler_value, trainer_value) in expected.items()
        if sampler_value != trainer_value
    ]
    if differences:
        yield (
            f"sampling support ({', '.join(differences)}: set rollout.* to what the"
            " trainer assumes)"
        )


def _precision_causes(config: RLConfig) -> Iterator[str]:
    """Yield a cause if sampler and trainer compute with different precision."""
    dtypes = {
        "rollout.dtype": config.rollout.dtype,
        "actor.backend.dtype": config.actor.backend.dtype,
    }

    # What lowers the precision of the engine below rollout.dtype. vLLM's "auto" is the
    # type of the model.
    others = {
        "rollout.quantization": config.rollout.quantization,
        "rollout.vllm_args.kv_cache_dtype": config.rollout.vllm_args.get(
            "kv_cache_dtype"
        ),
    }
    lower_precision = {
        key: value for key, value in others.items() if value not in (None, "auto")
    }

    if len(set(dtypes.values())) > 1 or lower_precision:
        settings = ", ".join(
            f"{key}={value}" for key, value in (dtypes | lower_precision).items()
        )
        yield f"precision ({settings}: use the same precision, or correct for it)"
