"""The balance of experts, by hand and against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeTopKRouter,
    load_balancing_loss_func,
)
from transformers.utils.output_capturing import OutputRecorder

from scripts.tiny_families import tiny_config
from verl_ray.backends.engine import EngineBackend
from verl_ray.engine.base import EngineSpec
from verl_ray.engine.expert_balance import balance_coefficient
from verl_ray.models.role_model import RoleModel
from verl_ray.models.routing import RouterDecision, RouterWatch, summarize_routing
from verl_ray.proofs.cut_model import random_model


def said(logits: torch.Tensor, k: int) -> RouterDecision:
    return RouterDecision(logits, logits.topk(k, -1).indices)


def test_by_hand() -> None:
    # two tokens that prefer expert 0 with probability 3/4: all of them go there
    one_sided = torch.tensor([[math.log(3.0), 0.0], [math.log(3.0), 0.0]])
    found = summarize_routing([said(one_sided, 1)], torch.tensor([1]))
    assert found.balance.tolist() == pytest.approx([2 * (1 * 0.75 + 0 * 0.25)])
    assert found.load.tolist() == [[2, 0]]
    # one token each way: even, which is top_k
    even = torch.tensor([[math.log(3.0), 0.0], [0.0, math.log(3.0)]])
    assert summarize_routing(
        [said(even, 1)], torch.tensor([1])
    ).balance.tolist() == pytest.approx([1.0])
    # the same two tokens as rows of their own: each is one-sided
    assert summarize_routing(
        [said(even, 1)], torch.tensor([0, 1])
    ).balance.tolist() == pytest.approx([1.5, 1.5])
    # of two layers, the mean; the load of each
    both = summarize_routing([said(one_sided, 1), said(even, 1)], torch.tensor([1]))
    assert both.balance.tolist() == pytest.approx([1.25]) and both.load.tolist() == [
        [2, 0],
        [1, 1],
    ]


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_probabilities_are_those_scores_whose_ratios_the_weights_have(
    factor: float,
) -> None:
    # sigmoids 3/4, 1/2 and 1/4, and exponentials 3, 1 and 1/3
    logits = torch.tensor([[math.log(3.0), 0.0, -math.log(3.0)]])
    chosen = torch.tensor([[0, 1]])

    def balance(weights: list[float]) -> float:
        decision = RouterDecision(logits, chosen, factor * torch.tensor([weights]))
        return float(summarize_routing([decision], torch.tensor([0])).balance[0])

    assert balance([0.6, 0.4]) == pytest.approx(3 * (1 / 2 + 1 / 3))
    assert balance([0.75, 0.25]) == pytest.approx(3 * (9 / 13 + 3 / 13))


def test_probabilities_that_a_router_returns_are_not_taken_for_logits() -> None:
    router = Gemma4TextRouter(
        Gemma4TextConfig(hidden_size=4, num_experts=4, top_k_experts=2)
    )
    # Every token prefers the first two experts, which share its probability.
    with torch.no_grad():
        router.proj.weight.copy_(torch.tensor([[99.0], [99], [0], [0]]).expand(4, 4))
        router.per_expert_scale.copy_(torch.tensor([3.0, 1, 1, 1]))
        probabilities, weights, chosen = router(torch.ones(5, 4))
    assert probabilities[0].tolist() == pytest.approx([0.5, 0.5, 0, 0])
    decision = RouterDecision(probabilities, chosen, weights)
    balance = summarize_routing([decision], torch.tensor([4])).balance
    assert balance.tolist() == pytest.approx([4 * (1 / 2 + 1 / 2)])


@pytest.mark.parametrize(
    ("family", "biases", "weight"),
    [("ernie4_5_moe", 0, 0.001), ("minimax_m2", 2, 0.0), ("mixtral", 0, 0.001)],
)
def test_the_weight_of_config_json_counts_where_no_bias_can_be_moved(
    family: str, biases: int, weight: float
) -> None:
    config = tiny_config(family, router_aux_loss_coef=0.001)
    model = RoleModel(random_model(config, seed=1), "policy")
    assert model.router_watch is not None
    assert len(model.router_watch.biases) == biases
    backend = EngineBackend(
        kind="engine",
        dtype="float32",
        micro_batch_tokens_per_rank=8,
        activation_checkpointing=False,
    )
    spec = EngineSpec("actor", "m", "policy", backend, None, 1, seed=0)
    assert balance_coefficient(spec, model) == weight


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2"])
def test_sigmoids_of_a_family_are_found_and_its_biases(family: str) -> None:
    model = random_model(tiny_config(family), seed=1).model
    watch = RouterWatch(model)
    assert [tuple(bias.shape) for bias in watch.biases] == [(4,)] * len(watch.routers)
    with watch.recording() as heard, torch.no_grad():
        model(torch.arange(3, 20)[None])
    probabilities = torch.sigmoid(heard[-1].logits)
    probabilities /= probabilities.sum(-1, keepdim=True)
    picked = torch.zeros(17, 4).scatter_(1, heard[-1].chosen, 1.0).mean(0)
    balance = summarize_routing(heard[-1:], torch.tensor([16])).balance
    torch.testing.assert_close(balance[0], 4 * (picked * probabilities.mean(0)).sum())


def test_tokens_behind_the_last_row_count_for_nothing() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    some, rest = (
        summarize_routing([said(logits[:3], 2)], torch.tensor([2])),
        summarize_routing([said(logits, 2)], torch.tensor([2])),
    )
    assert torch.equal(some.balance, rest.balance) and torch.equal(some.load, rest.load)
    nothing = summarize_routing(
        [said(logits[:1], 2)], torch.tensor([], dtype=torch.int64)
    )
    assert nothing.balance.shape == (0,) and not nothing.load.any()


def test_of_one_row_it_is_the_loss_of_transformers_and_has_its_gradient() -> None:
    logits = torch.randn(
        7, 4, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    ours = summarize_routing([said(logits, 2)], torch.tensor([6])).balance[0]
    theirs = load_balancing_loss_func((logits,), 4, 2)
    torch.testing.assert_close(ours, theirs)
    (our_gradient,), (their_gradient,) = (
        torch.autograd.grad(loss, logits) for loss in (ours, theirs)
    )
    torch.testing.assert_close(our_gradient, their_gradient)
    assert float(our_gradient.abs().max()) > 1e-3


def test_routers_are_heard_only_while_somebody_listens() -> None:
    config = type(
        "Sizes",
        (),
        {
            "num_experts_per_tok": 1,
            "num_experts": 2,
            "norm_topk_prob": True,
            "hidden_size": 3,
        },
    )
    router = Qwen3MoeTopKRouter(config)
    backbone = torch.nn.Sequential(router)
    declared = {"router_logits": OutputRecorder(Qwen3MoeTopKRouter, index=0)}
    backbone._can_record_outputs = declared  # type: ignore[assignment]
    watch = RouterWatch(backbone)
    assert len(watch.routers) == 1
    router(torch.ones(4, 3))
    with watch.recording() as heard:
        router(torch.ones(5, 3))
    router(torch.ones(6, 3))
    (decision,) = heard
    assert decision.weights is not None
    assert decision.logits.shape == (5, 2)
    assert decision.chosen.shape == decision.weights.shape == (5, 1)
