"""The choice of experts that is replayed, in routers of many families."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scripts.tiny_families import tiny_config
from verl_ray.errors import EngineError
from verl_ray.models.routing import RouterDecisions, RouterWatch
from verl_ray.models.routing_replay import (
    RecordedRouting,
    RoutingReplay,
    require_choices,
)
from verl_ray.proofs.cut_model import random_model
from verl_ray.settings.config_json import num_experts

TOKENS = torch.arange(3, 20)[None]


@pytest.mark.parametrize(
    "family",
    [
        # A softmax before the choice, and behind it.
        "qwen3_moe", "mixtral", "gpt_oss", "granitemoe",
        # Sigmoids, biases of the choice, and groups of experts.
        "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe", "dots1",
        "olmoe", "qwen2_moe", "hunyuan_v1_moe",
    ],
)  # fmt: skip
def test_a_router_weighs_the_experts_that_are_recorded(family: str) -> None:
    config = tiny_config(family)
    if family == "deepseek_v2":
        # The weights are those that the groups are hidden from.
        config.update(
            {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
        )
    model = random_model(config, seed=1).train()
    watch = RouterWatch(model.model)
    replay = RoutingReplay(watch.routers, num_experts(model.config.to_dict()))

    def computed() -> tuple[torch.Tensor, RouterDecisions, list[torch.Tensor]]:
        with watch.recording() as decisions:
            logits = model(TOKENS, use_cache=False).logits
        parameters = [value for value in model.parameters() if value.requires_grad]
        loss = logits.float().log_softmax(-1)[..., 5].sum()
        gradients = torch.autograd.grad(
            loss, parameters, allow_unused=True, materialize_grads=True
        )
        return logits, decisions, list(gradients)

    def recorded(experts: dict[int, torch.Tensor]) -> RecordedRouting:
        num_tokens, top_k = next(iter(experts.values())).shape
        table = torch.zeros(num_tokens, max(experts) + 1, top_k, dtype=torch.int16)
        for layer, chosen in experts.items():
            table[:, layer] = chosen
        # The last token chooses itself.
        return RecordedRouting(
            table, torch.arange(num_tokens)[:, None] < num_tokens - 1
        )

    logits, own, gradients = computed()
    by_layer = dict(zip(watch.routers, own, strict=True))

    # What a router would choose anyway changes no bit.
    replay.recorded = recorded({i: each.chosen for i, each in by_layer.items()})
    same_logits, _, same_gradients = computed()
    assert torch.equal(logits, same_logits)
    assert all(map(torch.equal, gradients, same_gradients))

    # Others are computed with, and weighed by the router's own scores.
    others = {
        layer: (each.chosen + 1) % num_experts(model.config.to_dict())
        for layer, each in by_layer.items()
    }
    replay.recorded = recorded(others)
    other_logits, replayed, _ = computed()
    for layer, decision in zip(watch.routers, replayed, strict=True):
        assert torch.equal(decision.chosen[:-1], others[layer][:-1].to(decision.chosen))
    first, second = own[0], replayed[0]
    torch.testing.assert_close(first.logits, second.logits)
    assert first.weights is not None and second.weights is not None
    assert torch.equal(first.chosen[-1], second.chosen[-1])
    assert torch.equal(first.weights[-1], second.weights[-1])
    assert not torch.equal(first.weights[:-1], second.weights[:-1])
    assert float(second.weights.detach().min()) > 0
    assert float((other_logits - logits).detach().abs().max()) > 1e-3


def test_a_router_that_chooses_otherwise_is_refused() -> None:
    model = random_model(tiny_config("qwen3_moe"), seed=1)
    replay = RoutingReplay(RouterWatch(model.model).routers, 4)
    # Three experts of each token, where the model takes two; a token too few.
    for shape, message in (
        ((17, 2, 3), "has 3 experts of 17 tokens, expected 2 of 17"),
        ((16, 2, 2), "chose 0 times of 4 experts by topk"),
    ):
        table = torch.zeros(shape, dtype=torch.int16)
        is_recorded = torch.ones(shape[0], 1, dtype=torch.bool)
        replay.recorded = RecordedRouting(table, is_recorded)
        with pytest.raises(EngineError, match=message):
            model(TOKENS)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros((1, 3, 2), np.int16), "has 3 layers, and the model 2"),
        (np.array([[[0, 0], [1, 4]]], np.int16), "the experts 1 to 4.*0 to 3"),
        (np.array([[[0, 1], [0, 0]]], np.int16), "an expert twice for a token"),
    ],
)
def test_what_no_router_has_chosen_is_refused(table: np.ndarray, message: str) -> None:
    # The first layer has no experts.
    with pytest.raises(EngineError, match=message):
        require_choices(table, [1], 2, 4)
    require_choices(np.array([[[0, 0], [2, 1]]], np.int16), [1], 2, 4)
