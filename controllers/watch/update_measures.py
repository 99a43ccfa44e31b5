"""Optimizer steps, from the reports of all ranks: metrics, ages, and limits on them.

Invariant: metrics are pure functions of the reports. Token means are over the tokens of
all ranks and steps, never means of means.

Beyond the limit on the mismatch between sampler and trainer a run stops, or the
correction is switched on, and likely causes are reported. A cause is named from what is
known of this step and configuration, never guessed from the size of a number. Whether
the correction is on is part of a checkpoint.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import nan

import numpy as np

from controllers.watch.measures import Metrics
from verl_ray.algorithms.mismatch import MISMATCH_PREFIX, mismatch_metrics
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Rollouts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import RolloutBuffer
from verl_ray.engine.base import LossReport
from verl_ray.errors import MismatchError, NonFiniteError
from verl_ray.learning.correction_weights import CORRECTION_PREFIX, correction_metrics
from verl_ray.profiling.memory import GIB
from verl_ray.rollout.requests import Sampling
from workers.model_worker import UpdateReport


def update_metrics(role: str, updates: Sequence[Sequence[UpdateReport]]) -> Metrics:
    """Return the metrics of a role's optimizer steps.

    The loss and its terms are aggregated as the configuration says and averaged over
    the steps. All other means are over the tokens of all steps. The mismatch is left
    out, since it may cover only some of the steps (`step_mismatch_metrics`).

    Args:
        role: Name of the role.
        updates: Report of every rank for each optimizer step, [steps][ranks].
    """
    reports = [sum((rank.loss for rank in ranks), LossReport()) for ranks in updates]
    everything = sum(reports, LossReport())
    means = everything.means()

    # Every rank reports the same step.
    steps = [ranks[0].step for ranks in updates]
    # The norm of a skipped step is not finite.
    norms = [step.grad_norm for step in steps if step.skipped is None]
    skipped = sum(step.skipped is not None for step in steps)
    grad_norm = nan
    if norms:
        grad_norm = float(np.mean(norms))

    # The correction is derived from several of these means, see below.
    metrics: Metrics = {}
    for name, value in means.items():
        if not name.startswith((MISMATCH_PREFIX, CORRECTION_PREFIX)):
            metrics[name] = value
    metrics |= correction_metrics(means, everything.maxima)

    metrics[f"{role}/loss"] = float(np.mean([report.loss for report in reports]))
    for name, total in everything.terms.items():
        metrics[name] = total / len(reports)

    metrics[f"{role}/grad_norm"] = grad_norm
    metrics[f"{role}/lr"] = steps[-1].lr
    metrics[f"{role}/skipped_steps"] = float(skipped)
    metrics |= expert_metrics(role, everything)
    metrics |= utilisation_metrics(role, updates)
    return metrics


def expert_metrics(role: str, report: LossReport) -> Metrics:
    """Return how evenly tokens are spread over experts; empty without experts.

    `max` and `min` are the loads of the fullest and the emptiest expert of any layer,
    in multiples of an even share. `idle_fraction` is the share of experts that no token
    was routed to.
    """
    if report.expert_load is None:
        return {}

    # Loads are tokens per expert, [layers, experts].
    even_share = report.expert_load.mean(axis=1, keepdims=True)
    share = report.expert_load / even_share
    return {
        f"{role}/expert_load_max": float(share.max()),
        f"{role}/expert_load_min": float(share.min()),
        f"{role}/expert_idle_fraction": float((share == 0).mean()),
    }


def utilisation_metrics(
    role: str, updates: Sequence[Sequence[UpdateReport]]
) -> Metrics:
    """Return how far a role's optimizer steps use its devices.

    The metrics are arithmetic per rank and second, and the peak memory of a device.
    perf/mfu is the model FLOPs utilisation of PaLM (arXiv:2204.02311, appendix B) as a
    fraction, where the peak of the device is known. perf/tflops counts the same
    arithmetic on any device.
    """
    ranks = [rank for step in updates for rank in step]
    flops = sum(rank.flops for rank in ranks)
    # A step takes as long as its slowest rank, while the others wait.
    rank_seconds = sum(
        max(rank.seconds for rank in step) * len(step) for step in updates
    )

    metrics: Metrics = {}
    if flops and rank_seconds:
        metrics[f"perf/tflops/{role}"] = flops / rank_seconds / 1e12
        # All ranks of a role have the same kind of device.
        peak_flops_per_s = ranks[0].peak_flops_per_s
        if peak_flops_per_s:
            metrics[f"perf/mfu/{role}"] = flops / rank_seconds / peak_flops_per_s

    memory = [rank.memory for rank in ranks if rank.memory is not None]
    if memory:
        allocated = max(rank.peak_allocated_bytes for rank in memory)
        reserved = max(rank.peak_reserved_bytes for rank in memory)
        metrics[f"{role}/perf/max_memory_allocated_gb"] = allocated / GIB
        metrics[f"{role}/perf/max_memory_reserved_gb"] = reserved / GIB
        # The smallest device is the first that is full.
        total = min(rank.total_bytes for rank in memory)
        metrics[f"{role}/perf/device_memory_gb"] = total / GIB
    return metrics


def step_mismatch_metrics(reports: Sequence[LossReport]) -> Metrics:
    """Return the differences between trainer and sampler that ranks reported.

    They are empty if no rank had a token to compare.
    """
    report = sum(reports, LossReport())
    if not report.tokens:
        return {}
    return mismatch_metrics(report.means(), report.maxima)


# --------------------------------------------------------------------- ages of tokens

# How far behind the learning policy tokens were sampled.
#
# Invariant: the shares of all ages add up to 1, over the response tokens of a step. In
# a synchronous run every token is of age 0, and there are no such metrics.


def age_metrics(
    updates: Sequence[Sequence[UpdateReport]], policy_version: int, staleness: int
) -> Metrics:
    """Return the histogram of ages in policy versions, by token, and its moments.

    Args:
        updates: Reports of the actor, [steps][ranks].
        policy_version: Version that the trainer held before it learned.
        staleness: The largest age; with 0 there are no metrics.
    """
    if not staleness:
        return {}

    tokens = Counter[int]()
    oldest_optimizer_steps = 0
    for ranks in updates:
        for report in ranks:
            oldest_optimizer_steps = max(
                oldest_optimizer_steps, report.oldest_optimizer_steps
            )
            for version, count in report.tokens_of_versions.items():
                tokens[policy_version - version] += count
    total = tokens.total()
    if not total:
        return {}

    shares = {age: tokens[age] / total for age in range(staleness + 1)}
    metrics = {f"staleness/share_of_age_{age}": share for age, share in shares.items()}
    return metrics | {
        "staleness/age_mean": sum(age * share for age, share in shares.items()),
        "staleness/age_max": float(max(tokens)),
        "staleness/optimizer_steps_max": float(oldest_optimizer_steps),
    }


def version_metrics(rollouts: Sharded[Rollouts], staleness: int) -> Metrics:
    """Return the share of rows that were sampled from several versions."""
    if not staleness:
        return {}
    changes = rollouts.row("oldest_version") != rollouts.row("newest_version")
    return {"staleness/rows_of_several_versions": float(changes.mean())}


def queue_metrics(buffer: RolloutBuffer, staleness: int) -> Metrics:
    """Return how many groups waited as others were taken, and how long those did."""
    if not staleness:
        return {}
    return {
        "staleness/groups_waiting": float(buffer.num_waiting),
        "timing_s/queue": buffer.take_queue_s(),
    }


# ---------------------------------------------------- gradients that are not finite

# The limit on optimizer steps that are skipped for gradients that are not finite, and
# the end of a run whose weights are not.
#
# Invariant: weights that are not finite are neither published nor saved. Skipped steps
# are counted per role, whatever the other roles do, and the counts are part of a
# checkpoint.


class GradientWatch:
    """Stops a run whose role breaks its weights, or skips too many steps in a row."""

    def __init__(self, limit: int) -> None:
        """Create a watch without skipped steps.

        Args:
            limit: run.max_skipped_steps, the number of steps in a row that stops a run.
        """
        self._limit = limit
        self._in_a_row: dict[str, int] = {}

    def observe(
        self, role: str, number: int, updates: Sequence[Sequence[UpdateReport]]
    ) -> None:
        """Count the skipped optimizer steps of a role, and look at what others left.

        Args:
            role: Name of the role.
            number: Number of the training step.
            updates: Report of every rank for each optimizer step, [steps][ranks].

        Raises:
            NonFiniteError: The limit is reached, or a step has left weights that are
                not finite. The message has the tensor that a rank named.
        """
        for ranks in updates:
            _require_finite_weights(role, number, ranks)
            # Every rank reports the same step, and not every rank knows the tensor.
            reasons = [
                report.step.skipped
                for report in ranks
                if report.step.skipped is not None
            ]

            # One healthy step is enough to begin counting again.
            if not reasons:
                self._in_a_row[role] = 0
            else:
                self._in_a_row[role] = self._in_a_row.get(role, 0) + 1

            if self._in_a_row[role] >= self._limit:
                raise NonFiniteError(
                    f"{role}: {self._limit} optimizer steps in a row"
                    f" (run.max_skipped_steps) had no finite gradient: {reasons[0]}"
                )

    def state(self) -> dict[str, int]:
        """Return the number of skipped steps in a row by role, as JSON."""
        return dict(self._in_a_row)

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue counting from the state of a checkpoint."""
        self._in_a_row = dict(state)


def _require_finite_weights(
    role: str, number: int, ranks: Sequence[UpdateReport]
) -> None:
    """Raise NonFiniteError if an optimizer step has left weights not finite."""
    # Ranks may hold parts of the same tensor; the order is that of the model.
    names = list(dict.fromkeys(name for rank in ranks for name in rank.step.broken))
    if not names:
        return
    step = ranks[0].step
    raise NonFiniteError(
        f"{role}: the update of training step {number} left {len(names)}"
        f" {'tensors' if len(names) > 1 else 'tensor'} of its weights with NaN or"
        f" infinities, first {names[0]}, although the gradients were finite (norm"
        f" {step.grad_norm:.3g}, learning rate {step.lr:.3g}). They are neither"
        " published nor saved. Resume from the last checkpoint with a lower"
        f" {role}.optimizer.lr; if this was the first step behind a checkpoint, its"
        " optimizer state is damaged: resume from an earlier one (run.resume)"
    )


# ------------------------------------------------------------ the limit on the mismatch

OTHER_PRECISION = ("quantization", "quantization_config", "kv_cache_dtype")
"""Arguments of the rollout engine that lower its precision below rollout.dtype."""


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

    lower_precision = {}
    for name in OTHER_PRECISION:
        value = config.rollout.vllm_args.get(name)
        # vLLM's "auto" is the type of the model.
        if value not in (None, "auto"):
            lower_precision[f"rollout.vllm_args.{name}"] = value

    if len(set(dtypes.values())) > 1 or lower_precision:
        settings = ", ".join(
            f"{key}={value}" for key, value in (dtypes | lower_precision).items()
        )
        yield f"precision ({settings}: use the same precision, or correct for it)"
