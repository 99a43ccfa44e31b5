"""Differences between versions of torch, and the tensors that torch finds."""

from __future__ import annotations

import pytest
import torch
from torch.nn import parallel
from torch.nn.attention import varlen
from torch.utils._pytree import tree_flatten, tree_unflatten

from verl_ray.models import role_model
from verl_ray.ops.installed_torch import ddp_without_buffers, varlen_attn_groups_heads
from verl_ray.ops.log_probs import HeadOutputs
from verl_ray.ops.outputs import Routing, TokenOutputs


def test_torch_finds_the_tensors_in_outputs() -> None:
    assert role_model.TokenOutputs is TokenOutputs
    numbers = [torch.full((2,), float(value), requires_grad=True) for value in range(4)]
    outputs = TokenOutputs(
        log_probs=numbers[0],
        entropy=numbers[1],
        routing=Routing(numbers[2], numbers[3]),
    )
    leaves, how = tree_flatten(
        outputs
    )  # where FSDP2 of torch 2.11 looks for what its hooks hang on
    assert [leaf for leaf in leaves if leaf is not None] == numbers
    again = tree_unflatten(leaves, how)
    assert (
        isinstance(again, TokenOutputs)
        and again.routing == outputs.routing
        and again.values is None
    )
    head, _ = tree_flatten(
        HeadOutputs(log_probs=numbers[0], entropy=None, greedy=None, squared_probs=None)
    )
    assert head[0] is numbers[0]


def test_features_are_read_from_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert varlen_attn_groups_heads() and ddp_without_buffers() == {
        "forward_sync_buffers": False
    }

    def varlen_attn(query: object, *, scale: float | None = None) -> None: ...

    class DistributedDataParallel:
        def __init__(
            self, module: object, broadcast_buffers: bool = True, init_sync: bool = True
        ) -> None: ...

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(parallel, "DistributedDataParallel", DistributedDataParallel)
    assert not varlen_attn_groups_heads() and ddp_without_buffers() == {
        "broadcast_buffers": False
    }
