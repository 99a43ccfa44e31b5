"""Metrics of optimizer steps, from the reports of all ranks.

Invariant: metrics are pure functions of the reports. Token means are over the tokens of
all ranks and steps, never means of means.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np

from controllers.watch.measures import Metrics
from verl_ray.algorithms.mismatch import MISMATCH_PREFIX, mismatch_metrics
from verl_ray.engine.base import LossReport
from verl_ray.learning.correction_weights import CORRECTION_PREFIX, correction_metrics
from verl_ray.learning.preference_objective import LABEL_PREFIX, label_metrics
from verl_ray.profiling.memory import GIB
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

    # The correction and labels are derived from several of these means, see below.
    metrics: Metrics = {}
    for name, value in means.items():
        if not name.startswith((MISMATCH_PREFIX, CORRECTION_PREFIX, LABEL_PREFIX)):
            metrics[name] = value
    metrics |= correction_metrics(means, everything.maxima)
    metrics |= label_metrics(means)

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
