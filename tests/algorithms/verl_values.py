"""Values that verl computes, in `verl_values.json`, and the numbers it computed them of.

As a program this file computes them again, in an environment that has verl, which this
project does not need::

    python tests/algorithms/verl_values.py > tests/algorithms/verl_values.json

`test_verl.py` compares ours with them. All tokens are [5 rows, 5 places], of which 14
count; verl gets the whole table in float64, and ours the tokens that count.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

MASK = np.array([
    [1, 1, 0, 1, 1],
    [1, 1, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [1, 1, 1, 1, 1],
    [0, 1, 1, 1, 0],
])  # fmt: skip
"""Rows with a gap, with padding, without a token, whole, and with both."""

MODES = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean")  # fmt: skip


def spread(seed: int, low: float, high: float, count: int = 25) -> Float64:
    """Return numbers between two bounds, spread evenly by the golden ratio."""
    numbers: Float64 = np.modf(0.6180339887498949 * (np.arange(count) + 37 * seed))[0]
    return np.round(low + (high - low) * numbers, 3)


def table(seed: int, low: float, high: float) -> Float64:
    return spread(seed, low, high).reshape(5, 5)


OLD = table(1, -2.5, -0.3)
LOG_PROBS = np.minimum(OLD + table(2, -0.6, 0.6), -0.05)
SAMPLER = np.minimum(OLD + table(3, -0.8, 0.8), -0.05)
REFERENCE = OLD + table(4, -1.0, 1.0)
ADVANTAGES = np.repeat([[1.5], [-0.5], [0.8], [-2.0], [0.6]], 5, axis=1)
REWARDS = table(5, -1.0, 1.0)
VALUES, OLD_VALUES, RETURNS = (table(seed, -1.0, 1.0) for seed in (6, 7, 8))

SCORES = np.array([1.0, 0.25, 0.5, 2.0, 3.0, 2.0, 4.0, 0.0, 0.0])
GROUP = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
LENGTH = np.array([3, 1, 2, 4, 4, 1, 2, 5, 1])
PARTS = spread(9, 0.0, 1.0, 18).reshape(2, 9)
PART_WEIGHTS = (1.0, 0.5)

ENERGY_MASK = np.array(
    [
        [1, 1, 1, 1, 1],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
    ]
)
"""verl counts places by the table, so that no row has a gap or padding before it."""
ENERGY_SCORES = np.array([1.0, 0.25, 2.0, 0.5, 3.0])
ENERGY_GROUP = np.array([0, 0, 0, 1, 1])
SQUARED_PROBS = np.exp(OLD) ** 2 + table(10, 0.0, 0.1)

KL_STEPS = ((1.7, 128), (0.2, 64), (1.4, 256), (0.5, 32), (1.05, 512))

LOSSES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # By our name: verl's name, verl's settings, our settings.
    "ppo_clip": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
                 {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}),
    "reinforce": ("gpg", {}, {}),
    # verl's bounds are distances from 1.
    "cispo": ("cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, {"ratio_min": 0.8, "ratio_max": 1.28}),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, {}),
    "dppo_tv": ("dppo_tv", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.4},
                {"divergence_low": 0.05, "divergence_high": 0.1, "ratio_max": 1.4}),
    "dppo_kl": ("dppo_kl", {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.4},
                {"divergence_low": 0.02, "divergence_high": 0.03, "ratio_max": 1.4}),
    "dro": ("dro", {"policy_loss": {"dro_beta": 0.3}}, {"distance_penalty": 0.3}),
    "gspo": ("gspo", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}, {"clip_low": 0.05, "clip_high": 0.1}),
    "gmpo": ("geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, {}),
    # verl leaves tokens out of the choice that PPO clips. Here PPO clips none.
    "clip_cov": ("clip_cov", {"clip_ratio_low": 0.9, "clip_ratio_high": 9.0,
                              "policy_loss": {"clip_cov_ratio": 0.99, "clip_cov_lb": 0.2, "clip_cov_ub": 1.0}},
                 {"clip_low": 0.9, "clip_high": 9.0, "cov_share": 0.99, "cov_min": 0.2, "cov_max": 1.0}),
    "kl_cov": ("kl_cov", {"policy_loss": {"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.7}},
               {"cov_share": 0.25, "cov_penalty": 0.7}),
}  # fmt: skip

ESTIMATORS = {
    "k1": "k1", "k2": "k2", "k3": "k3", "abs": "abs", "k1_straight_through": "k1+", "k3_straight_through": "k3+",
}  # fmt: skip

CORRECTIONS: dict[str, tuple[str, float | str]] = {
    "tis token": ("token", 1.5),
    "tis sequence": ("sequence", 1.5),
    "icepop token": ("token", "0.6_1.5"),
    "icepop sequence": ("sequence", "0.6_1.5"),
}

SEQUENCE_PARTS = ("mean", "std", "max", "min", "max_deviation", "fraction_high", "fraction_low")  # fmt: skip

REJECTIONS: dict[str, tuple[float | None, float]] = {
    "token_k1": (0.6, 1.5), "token_k2": (None, 0.1), "token_k3": (None, 0.1),
    "seq_sum_k1": (0.6, 1.5), "seq_sum_k2": (None, 0.3), "seq_sum_k3": (None, 0.3),
    "seq_mean_k1": (0.8, 1.2), "seq_mean_k2": (None, 0.08), "seq_mean_k3": (None, 0.08),
    "seq_max_k2": (None, 0.2), "seq_max_k3": (None, 0.2),
}  # fmt: skip


def main() -> None:
    # verl does not need it for what is computed here.
    sys.modules["vllm"] = None  # type: ignore[assignment]
    import verl
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    found = {
        "verl": verl.__version__,
        "losses": losses(core_algos),
        "aggregations": aggregations(core_algos),
        "advantages": advantages(core_algos),
        "tokens": token_advantages(core_algos),
        "energy": energy_baselines(core_algos),
        "divergences": divergences(core_algos),
        "values": value_losses(core_algos),
        "kl_control": kl_control(core_algos),
        "corrections": corrections(rollout_corr_helper),
        "normalised": normalised(rollout_corr_helper),
        "rejections": rejections(rollout_corr_helper),
        "two_policy": two_policy(core_algos),
        "mismatch": mismatch(rollout_corr_helper),
    }
    # A list takes one line.
    text = json.dumps(rounded(found), indent=1)
    print(re.sub(r"(?<=[\[,])\n +(?=[-\d])|(?<=\d)\n +(?=\])", "", text))


def rounded(value: Any) -> Any:
    """Return plain numbers of eight digits, and tables as the tokens that count."""
    if isinstance(value, Mapping):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, str):
        return value
    array = np.asarray(value, np.float64)
    if array.shape == MASK.shape:
        array = array[MASK == 1]
    if array.ndim == 0:
        return float(f"{float(array):.8g}")
    return [rounded(each) for each in array.tolist()]


def tensor(values: Any) -> Any:
    import torch

    return torch.tensor(np.asarray(values, np.float64))


def actor_config(**settings: Any) -> Any:
    from verl.workers.config import ActorConfig, PolicyLossConfig

    loss_config = PolicyLossConfig(**settings.pop("policy_loss", {}))
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=loss_config, **settings
    )  # fmt: skip


def value_and_gradient(function: Any, at: Any) -> tuple[float, Any, Any]:
    import torch

    leaf = tensor(at).requires_grad_()
    loss, metrics = function(leaf)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad.numpy(), metrics


def losses(core_algos: Any) -> dict[str, Any]:
    found = {}
    for name, (theirs, settings, _) in LOSSES.items():
        function = core_algos.get_policy_loss_fn(theirs)

        def loss_at(log_probs: Any, mode: str, f: Any = function, s: Any = settings) -> Any:  # fmt: skip
            return f(
                tensor(OLD), log_probs, tensor(ADVANTAGES), tensor(MASK), mode.replace("_", "-"), config=actor_config(**s)
            )  # fmt: skip

        # These two ignore the aggregation.
        modes = MODES[-1:] if name in ("sapo", "gmpo") else MODES
        by_mode = {
            mode: value_and_gradient(lambda at, m=mode, f=loss_at: f(at, m), LOG_PROBS)
            for mode in modes
        }
        _, grad, metrics = by_mode["seq_mean_token_mean"]
        clipped = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")
        found[name] = {
            "loss": {mode: value for mode, (value, _, _) in by_mode.items()},
            "gradient": grad,
            "clipped": sum(metrics.get(key, 0) for key in clipped),
        }
        # KL-Cov has another metric of this name, the mean of |log ratio|.
        if "actor/ppo_kl" in metrics and name != "kl_cov":
            found[name]["ppo_kl"] = metrics["actor/ppo_kl"]
    return found


def aggregations(core_algos: Any) -> dict[str, Any]:
    return {
        mode: core_algos.agg_loss(
            tensor(REWARDS), tensor(MASK), mode.replace("_", "-"), loss_scale_factor=8
        ).item()
        for mode in MODES
    }


def advantages(core_algos: Any) -> dict[str, Any]:
    """Advantages of rows, each with one token that bears the score."""
    ones = tensor(np.ones((9, 1)))
    lengths = tensor(np.arange(5) < LENGTH[:, None])
    greedy = np.array([0.5, 0.5, 0.5, 4.0, 4.0, 4.0, 4.0, 0.0, 0.0])
    given: dict[str, dict[str, Any]] = {
        "grpo": {},
        "dr_grpo": {"norm_adv_by_std_in_grpo": False},
        "rloo": {},
        "reinforce_plus_plus_baseline": {},
        "opo": {"response_mask": lengths},
        "gpg": {},
        "pass_at_k": {"config": {"norm_adv_by_std_in_grpo": False}},
        "remax": {"reward_baselines": tensor(greedy)},
    }
    theirs = {"dr_grpo": "grpo", "pass_at_k": "grpo_passk"}
    found = {}
    for name, more in given.items():
        function = core_algos.get_adv_estimator_fn(theirs.get(name, name))
        arguments = {
            "token_level_rewards": tensor(SCORES[:, None]),
            "response_mask": ones,
            **more,
        }
        if name != "remax":
            arguments["index"] = GROUP
        found[name] = function(**arguments)[0][:, 0].numpy()

    parts, _ = core_algos.compute_gdpo_outcome_advantage(
        tensor(SCORES[:, None]), ones, GROUP, config={
            "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": PART_WEIGHTS,
        },
        non_tensor_batch={"a": PARTS[0], "b": PARTS[1]},
        batch={"prompts": tensor(np.zeros((9, 1))), "attention_mask": tensor(np.ones((9, 2))).long()},
    )  # fmt: skip
    return found | {"gdpo": parts[:, 0].numpy()}


def token_advantages(core_algos: Any) -> dict[str, Any]:
    mask = tensor(MASK)
    found = {}
    for gamma, lam in ((1.0, 0.95), (0.9, 0.8)):
        whitened, returns = core_algos.compute_gae_advantage_return(
            tensor(REWARDS * MASK), tensor(VALUES), mask, gamma, lam
        )
        found[f"gae {gamma} {lam}"] = {"whitened": whitened.numpy(), "returns": returns.numpy()}  # fmt: skip
    for gamma in (1.0, 0.9):
        config = type("Config", (), {"gamma": gamma})()
        whitened, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            tensor(REWARDS * MASK), mask, config=config
        )
        found[f"reinforce_plus_plus {gamma}"] = {"whitened": whitened.numpy(), "returns": returns.numpy()}  # fmt: skip
    return found


def energy_baselines(core_algos: Any) -> list[float]:
    """Advantages of the optimal token baseline, of the tokens in ENERGY_MASK."""
    rewards = np.zeros(ENERGY_MASK.shape)
    rewards[np.arange(5), ENERGY_MASK.sum(1) - 1] = ENERGY_SCORES
    advantages, _ = core_algos.compute_optimal_token_baseline_advantage(
        tensor(rewards), tensor(ENERGY_MASK), ENERGY_GROUP, tensor(OLD), tensor(SQUARED_PROBS),
        handle_zero_tail=False,
    )  # fmt: skip
    found: list[float] = advantages.numpy()[ENERGY_MASK == 1].tolist()
    return found


def divergences(core_algos: Any) -> dict[str, Any]:
    found = {}
    for name, theirs in ESTIMATORS.items():
        estimate: Any = core_algos.kl_penalty
        values = estimate(tensor(LOG_PROBS), tensor(REFERENCE), theirs).numpy()
        _, grad, _ = value_and_gradient(
            lambda at, t=theirs, f=estimate: (f(at, tensor(REFERENCE), t).sum(), None),
            LOG_PROBS,
        )
        found[name] = {"values": values, "gradient": grad}
    return found


def value_losses(core_algos: Any) -> dict[str, Any]:
    by_mode = {
        mode: value_and_gradient(
            lambda at, m=mode: core_algos.compute_value_loss(
                at, tensor(RETURNS), tensor(OLD_VALUES), tensor(MASK), 0.3, m.replace("_", "-")
            ),
            VALUES,
        )
        for mode in MODES
    }  # fmt: skip
    return {
        "loss": {mode: value for mode, (value, _, _) in by_mode.items()},
        "gradient": by_mode["token_mean"][1],
        "clipped": by_mode["token_mean"][2].item(),
    }


def kl_control(core_algos: Any) -> list[float]:
    controller = core_algos.AdaptiveKLController(0.1, 1.0, 10_000)
    found = []
    for divergence, rows in KL_STEPS:
        controller.update(divergence, rows)
        found.append(float(controller.value))
    return found


def has_tokens(values: Float64) -> Any:
    """Return the rows with tokens: verl's means over rows count empty ones."""
    return tensor(values[MASK.sum(1) > 0])


def corrections(helper: Any) -> dict[str, Any]:
    found = {}
    for name, (level, threshold) in CORRECTIONS.items():
        weights, metrics = helper.compute_rollout_correction_weights(
            has_tokens(OLD - SAMPLER), has_tokens(MASK), level, threshold
        )
        whole = np.zeros(MASK.shape)
        whole[MASK.sum(1) > 0] = weights.numpy()
        kept = ("rollout_is_mean", "rollout_is_std", "rollout_is_eff_sample_size", "rollout_is_max",
                "rollout_is_min", "rollout_is_ratio_fraction_high", "rollout_is_ratio_fraction_low",
                *(f"rollout_is_seq_{part}" for part in SEQUENCE_PARTS))  # fmt: skip
        found[name] = {
            "weights": whole, "metrics": {f"rollout_corr/{key}": metrics[key] for key in kept},
        }  # fmt: skip
    return found


def normalised(helper: Any) -> dict[str, Any]:
    """Weights over their mean, and the mean."""
    found = {}
    for name, (level, threshold) in CORRECTIONS.items():
        weights, metrics = helper.compute_rollout_correction_weights(
            has_tokens(OLD - SAMPLER), has_tokens(MASK), level, threshold, rollout_is_batch_normalize=True
        )  # fmt: skip
        whole = np.zeros(MASK.shape)
        whole[MASK.sum(1) > 0] = weights.numpy()
        found[name] = {"weights": whole, "mean": metrics["rollout_is_batch_norm_factor"]}  # fmt: skip
    return found


def rejections(helper: Any) -> dict[str, Any]:
    found = {}
    for name, (lower, upper) in REJECTIONS.items():
        # verl bounds the inverse of the ratio, by mistake: verl-project/verl#6377.
        threshold = upper if lower is None else f"{1 / upper}_{1 / lower}"
        mask, _ = helper.compute_rollout_rejection_mask(
            has_tokens(OLD - SAMPLER), has_tokens(MASK), name, threshold
        )
        whole = np.zeros(MASK.shape)
        whole[MASK.sum(1) > 0] = mask.numpy()
        found[name] = whole
    return found


def two_policy(core_algos: Any) -> dict[str, Any]:
    """The policy that learns against the sampler's alone."""
    found = {}
    for name, settings in {
        "ppo_clip": {"loss_type": "ppo_clip"},
        "ppo_clip, rejected": {
            "loss_type": "ppo_clip", "rollout_rs": "token_k1", "rollout_rs_threshold": f"{1 / 1.5}_{1 / 0.6}",
        },
        "reinforce, token": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.5},
        "reinforce, sequence": {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 1.5},
    }.items():  # fmt: skip
        config = actor_config(
            clip_ratio_c=1e9, policy_loss={"rollout_correction": settings}
        )
        # The sum: what is rejected leaves verl's denominators, and stays in ours.
        value, grad, _ = value_and_gradient(
            lambda at, c=config: core_algos.compute_policy_loss_bypass_mode(
                tensor(SAMPLER), at, tensor(ADVANTAGES), tensor(MASK), "token-sum", config=c
            ),
            LOG_PROBS,
        )  # fmt: skip
        found[name] = {"loss": value, "gradient": grad}
    return found


def mismatch(helper: Any) -> dict[str, float]:
    from verl.protocol import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    old, sampler, mask = has_tokens(OLD), has_tokens(SAMPLER), has_tokens(MASK)
    found = helper.compute_offpolicy_metrics(old, sampler, mask)
    data = {
        "rollout_log_probs": sampler, "old_log_probs": old, "response_mask": mask.long(), "responses": mask,
    }  # fmt: skip
    debug = calculate_debug_metrics(DataProto.from_dict(data))
    return {f"rollout_corr/{name}": value for name, value in found.items()} | debug


if __name__ == "__main__":
    main()
