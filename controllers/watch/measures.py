"""The numbers of a step under their published names, from the per-row columns that the driver holds.

Invariant: pure functions of columns with one value (or one row of sums) per response; no token is looked at, and
failed scores are counted, never averaged in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.correction import APPLIED, correction_metrics
from verl_ray.algorithms.mismatch import COMPARED, mismatch_metrics
from verl_ray.data.batch import Int64
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Credit, Finish, Rollouts, Scores, Statistics
from verl_ray.engine.base import LossReport
from verl_ray.ops.masked import Moments, explained_variance, whiten
from verl_ray.profiling.memory import GIB
from verl_ray.rewards.health import health_metrics
from verl_ray.rewards.shaping import Graded, component
from workers.model_worker import UpdateReport

Metrics = dict[str, float]

TURNS = 2.0
"""Messages of a conversation as num_turns/* counts them: the prompt's is one of them, as on the field's dashboards."""


def spread(name: str, values: npt.NDArray[np.generic]) -> Metrics:
    """Mean, maximum and minimum; NaN of nothing."""
    if not values.size:
        return {f"{name}/{what}": float("nan") for what in ("mean", "max", "min")}
    found = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{what}": float(value) for what, value in found.items()}


def of_rollouts(rollouts: Sharded[Rollouts], max_prompt_tokens: int, dealt: Sequence[Int64]) -> Metrics:
    """Lengths and ends of prompts and responses; `dealt`: the rows of each rank of the actor."""
    finish, response, prompt = (rollouts.row(name) for name in ("finish", "response_length", "prompt_length"))
    whole = finish != Finish.ABORTED
    cut = finish == Finish.LENGTH
    return {
        **spread("response_length", response),
        "response_length/clip_ratio": float(cut.mean()),
        **spread("response_length_non_aborted", response[whole]),
        "response_length_non_aborted/clip_ratio": float(cut[whole].mean()) if whole.any() else nan,
        "response/aborted_ratio": float((~whole).mean()),
        **spread("prompt_length", prompt),
        "prompt_length/clip_ratio": float((prompt >= max_prompt_tokens).mean()),
        **spread("num_turns", np.full(len(rollouts), TURNS)),
        "perf/total_num_tokens": float(rollouts.num_tokens),
        **balance(rollouts.lengths, dealt),
    }


def balance(lengths: Int64, dealt: Sequence[Int64]) -> Metrics:
    """Tokens per rank: in the order they came (min, max), and as they are `dealt` (balanced_min, _max)."""
    in_order = [int(part.sum()) for part in np.array_split(lengths, len(dealt))]
    shares = [int(lengths[part].sum()) for part in dealt]
    return {
        "global_seqlen/min": float(min(in_order)),
        "global_seqlen/max": float(max(in_order)),
        "global_seqlen/minmax_diff": float(max(in_order) - min(in_order)),
        "global_seqlen/balanced_min": float(min(shares)),
        "global_seqlen/balanced_max": float(max(shares)),
        "global_seqlen/mean": float(lengths.sum() / len(dealt)),
    }


def graded(scores: Mapping[str, Sharded[Scores]]) -> dict[str, Graded]:
    """What each grader said, as columns of the driver's."""
    return {
        name: Graded(one.row("score"), one.row("health"), int(one.row("rescored").sum()))
        for name, one in scores.items()
    }


def of_scores(score: Graded, raw: Mapping[str, Graded], aborted: npt.NDArray[np.bool_]) -> Metrics:
    """What was said of each response, of several graders their weighted sum, those left out that were `aborted` (bool
    [rows]); what each grader said, and what failed. Nothing of it is normalised or clipped: what is learned from is
    `critic/rewards`."""
    metrics = spread("critic/score", score.score[score.ok & ~aborted])
    rescored = sum(one.rescored for one in raw.values())
    metrics |= health_metrics(score.health.tolist()) | {"reward_health/rescored": float(rescored)}
    return metrics | of_components(raw, "reward")


def of_components(raw: Mapping[str, Graded], prefix: str) -> Metrics:
    """Per grader of several: <prefix>/<component>/mean, max, min of its own scores, and how many failed."""
    if len(raw) == 1:
        return {}
    metrics: Metrics = {}
    for role, one in raw.items():
        name = f"{prefix}/{component(role)}"
        metrics |= {**spread(name, one.score[one.ok]), f"{name}/failed": float((~one.ok).sum())}
    return metrics


def of_credit(credit: Sharded[Credit], response_length: npt.NDArray[np.generic], whitening: Moments | None) -> Metrics:
    """Rewards per response; advantages, returns and values per response token. Advantages are those that the policy
    learns from: after `whitening`, where there is one."""
    counted = credit.row("in_loss")
    metrics = spread("critic/rewards", credit.row("reward")[counted])
    tokens = int(response_length[counted].sum())
    for name in ("advantage", "return", "value"):
        column = credit.columns.get(f"{name}_statistics")
        if column is not None:
            table = column[counted]
            mean = float(table[:, 0].sum() / tokens) if tokens else float("nan")
            found = np.array([mean, table[:, 2].max(initial=-np.inf), table[:, 3].min(initial=np.inf)])
            if name == "advantage" and whitening is not None and tokens:
                found = whiten(found, whitening)
            names = [f"critic/{name}s/{what}" for what in ("mean", "max", "min")]
            metrics |= dict(zip(names, found.tolist(), strict=True))
    if "residual_statistics" in credit.columns:
        residuals = moments(credit.row("residual_statistics")[counted], tokens)
        returns = moments(credit.row("return_statistics")[counted], tokens)
        metrics["critic/vf_explained_var"] = explained_variance(residuals, returns)
    return metrics


@dataclass(frozen=True)
class Charge:
    """How far the policy is from the reference, in nats, over the responses of a step that are learned from."""

    responses: int
    per_response: float
    """Mean of the sums over tokens; NaN of nothing."""
    per_token: float
    """Mean over the responses of the means over their tokens; NaN of nothing."""

    @classmethod
    def of(cls, credit: Sharded[Credit], response_length: npt.NDArray[np.int32]) -> Charge:
        """Responses without tokens have no mean, and are left out."""
        counted = credit.row("in_loss") & (response_length > 0)
        kl = credit.row("kl")[counted].astype(np.float64)
        if not len(kl):
            return cls(0, nan, nan)
        return cls(len(kl), float(kl.mean()), float((kl / response_length[counted]).mean()))

    def metrics(self, coefficient: float) -> Metrics:
        """actor/reward_kl_penalty is per token, as on the field's dashboards; actor/reward_kl_per_response, ours, is
        what algorithm.kl.target is compared with."""
        return {
            "actor/reward_kl_penalty": self.per_token,
            "actor/reward_kl_per_response": self.per_response,
            "actor/reward_kl_penalty_coeff": coefficient,
        }


def moments(statistics: Statistics, tokens: int) -> Moments:
    """The moments of all tokens whose rows these are."""
    return Moments(tokens, float(statistics[:, 0].sum()), float(statistics[:, 1].sum()))


def of_updates(role: str, updates: Sequence[Sequence[UpdateReport]]) -> Metrics:
    """What a role's optimizer steps reported, each step by every rank. The loss and its terms are aggregated as the
    configuration says and averaged over the steps; everything else is a token mean over all of them. Not the mismatch,
    of which not all of them may speak (`of_mismatch`)."""
    reports = [sum((rank.loss for rank in ranks), LossReport()) for ranks in updates]
    steps = [ranks[0].step for ranks in updates]
    norms = [step.grad_norm for step in steps if step.skipped is None]
    everything = sum(reports, LossReport())
    means = everything.means()
    return {
        **{name: value for name, value in means.items() if not name.startswith((COMPARED, APPLIED))},
        **correction_metrics(means, everything.maxima),
        f"{role}/loss": float(np.mean([report.loss for report in reports])),
        **{name: total / len(reports) for name, total in everything.terms.items()},
        f"{role}/grad_norm": float(np.mean(norms)) if norms else float("nan"),
        f"{role}/lr": steps[-1].lr,
        f"{role}/skipped_steps": float(sum(step.skipped is not None for step in steps)),
        **of_experts(role, everything),
        **utilisation(role, updates),
    }


def of_experts(role: str, report: LossReport) -> Metrics:
    """How evenly tokens are spread: the fullest and the emptiest expert of any layer, in multiples of an even share,
    and the share of experts that were given nothing."""
    if report.expert_load is None:
        return {}
    share = report.expert_load / report.expert_load.mean(axis=1, keepdims=True)
    return {
        f"{role}/expert_load_max": float(share.max()),
        f"{role}/expert_load_min": float(share.min()),
        f"{role}/expert_idle_fraction": float((share == 0).mean()),
    }


def utilisation(role: str, updates: Sequence[Sequence[UpdateReport]]) -> Metrics:
    """Arithmetic per rank and second of a role's optimizer steps, and what it needed of the devices' memory.

    perf/mfu is the model FLOPs utilisation of PaLM (arXiv:2204.02311, appendix B) as a fraction; only where the peak
    of the device is known. perf/tflops counts the same arithmetic on any device.
    """
    ranks = [rank for step in updates for rank in step]
    seconds = sum(max(rank.seconds for rank in step) * len(step) for step in updates)
    flops = sum(rank.flops for rank in ranks)
    metrics: Metrics = {}
    if flops and seconds:
        metrics[f"perf/tflops/{role}"] = flops / seconds / 1e12
        if peak := ranks[0].peak_flops_per_s:
            metrics[f"perf/mfu/{role}"] = flops / seconds / peak
    memory = [rank.memory for rank in ranks if rank.memory is not None]
    if memory:
        metrics[f"{role}/perf/max_memory_allocated_gb"] = max(one.peak_allocated_bytes for one in memory) / GIB
        metrics[f"{role}/perf/max_memory_reserved_gb"] = max(one.peak_reserved_bytes for one in memory) / GIB
    return metrics


def of_mismatch(reports: Sequence[LossReport]) -> Metrics:
    """Trainer beside sampler, as ranks report it; nothing where no rank had a token to compare."""
    report = sum(reports, LossReport())
    return mismatch_metrics(report.means(), report.maxima) if report.tokens else {}


def of_preferences(chosen: npt.NDArray[np.float64], rejected: npt.NDArray[np.float64]) -> Metrics:
    """A reward model on held-out pairs: how often the chosen response scores higher (a tie counts half), the log-loss
    of its preferences (log 2 = a coin), how far its certainty is from how often it is right, and its scores.

    The calibration error is the mean distance of certainty and accuracy over ten bins of certainty from 1/2 to 1,
    weighted by pairs (arXiv:1706.04599, section 2). Scores that are not finite make everything NaN.
    """
    difference = chosen - rejected
    right = (1 + np.sign(difference)) / 2
    certainty = 1 / (1 + np.exp(-np.abs(np.clip(difference, -700, 700))))
    finite = bool(np.isfinite(difference).all())
    bins = np.minimum(((certainty - 0.5) * 20).astype(np.int64), 9) if finite else None
    gap = math.nan if bins is None else np.abs(np.bincount(bins, right - certainty, minlength=10)).sum() / len(right)
    return {
        "val-core/held_out/pair_accuracy": float(right.mean()),
        "val-core/held_out/log_loss": float(np.logaddexp(0, -difference).mean()) if finite else math.nan,
        "val-aux/held_out/calibration_error": float(gap),
        "val-aux/held_out/num_pairs": float(len(right)),
        **spread("val-aux/held_out/margin", difference),
        **spread("val-aux/held_out/chosen", chosen),
        **spread("val-aux/held_out/rejected", rejected),
        "val-aux/held_out/std": float(np.concatenate([chosen, rejected]).std()),
    }


def per_token_ms(timings: Mapping[str, float], response_tokens: int, all_tokens: int) -> Metrics:
    """timing_per_token_ms/<name>: generation per response token, everything else per token."""
    tokens = dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), all_tokens)
    tokens["gen"] = response_tokens
    return {
        f"timing_per_token_ms/{name}": 1e3 * timings[f"timing_s/{name}"] / count
        for name, count in tokens.items()
        if f"timing_s/{name}" in timings and count
    }


def accuracy(sources: Sequence[str], graded: Graded, group_size: int) -> Metrics:
    """Mean score per data source: val-core/<data source>/acc/mean@N. Failed scores count as wrong."""
    names, scores = np.array(sources), np.where(graded.ok, graded.score, 0)
    means = {name: float(scores[names == name].mean()) for name in sorted(set(sources))}
    return {f"val-core/{name}/acc/mean@{group_size}": mean for name, mean in means.items()}


def held_out_reward(sources: Sequence[str], graded: Graded, group_size: int) -> Metrics:
    """The same where scores are no grades from 0 to 1: val-core/<data source>/reward/mean@N, failed ones left out."""
    names = np.array(sources)
    found = {name: graded.score[(names == name) & graded.ok] for name in sorted(set(sources))}
    return {
        f"val-core/{name}/reward/mean@{group_size}": float(scores.mean()) if len(scores) else math.nan
        for name, scores in found.items()
    }
