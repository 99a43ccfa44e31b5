"""What each optimizer steps, compared with torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.inputs import OTHERS
from verl_ray.engine.muon import MOMENTUM
from verl_ray.engine.optimizer import build_optimizer


class Model(nn.Module):
    """An embedding, and a block with two matrices, two experts, kernels and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 8)
        block = nn.Module()
        block.tall, block.wide = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        block.experts = nn.Parameter(torch.randn(2, 6, 8))
        block.kernels = nn.Parameter(torch.randn(8, 1, 4))
        block.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList([block])


def step(optimizers: list[torch.optim.Optimizer], model: Model) -> list[Tensor]:
    """Take three steps with the same gradients each time, and return the parameters."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class Experts(torch.optim.Optimizer):
    """torch's Muon of every matrix of a stack."""

    def __init__(self, stack: Tensor, **settings: Any) -> None:
        super().__init__([stack], {})
        self.stack = stack
        self.matrices = [matrix.clone() for matrix in stack.detach()]
        self.muon = torch.optim.Muon(self.matrices, **settings)

    def step(self, closure: Any = None) -> Any:
        assert self.stack.grad is not None
        for matrix, gradient in zip(self.matrices, self.stack.grad, strict=True):
            matrix.grad = gradient
        self.muon.step()
        self.stack.data = torch.stack(self.matrices)


def test_muon_steps_matrices_of_blocks_as_torchs_and_the_rest_with_adamw() -> None:
    config: Any = OTHERS["muon"]
    own = Model()
    optimizer = build_optimizer(own, config)  # type: ignore[arg-type]
    names = {
        name for name, p in own.named_parameters() if MOMENTUM in optimizer.state[p]
    }
    assert names == {"layers.0.tall.weight", "layers.0.wide.weight", "layers.0.experts"}

    model = Model()
    block: Any = model.layers[0]
    settings: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
        "adjust_lr_fn": "match_rms_adamw",
    }
    rest = [
        {"params": [model.embedding.weight, block.kernels], "weight_decay": 0.1},
        {
            "params": [block.tall.bias, *block.norm.parameters()],
            "weight_decay": 0.0,
        },
    ]
    expected = step(
        [
            torch.optim.Muon([block.tall.weight, block.wide.weight], **settings),
            Experts(block.experts, **settings),
            torch.optim.AdamW(
                rest, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
            ),
        ],
        model,
    )
    for mine, theirs in zip(step([optimizer], own), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_others_step_as_torchs_and_begin_with_their_whole_state() -> None:
    for name, kind in (("sgd", torch.optim.SGD), ("adafactor", torch.optim.Adafactor)):
        config: Any = OTHERS[name]
        own, model = Model(), Model()
        settings = {"lr": config.lr}
        if name == "sgd":
            settings["momentum"] = config.momentum
        groups = [
            {
                "params": [p for p in model.parameters() if (p.dim() >= 2) == decays],
                "weight_decay": 0.1 if decays else 0.0,
            }
            for decays in (True, False)
        ]
        theirs = kind(groups, **settings)
        optimizer = build_optimizer(own, config)  # type: ignore[arg-type]
        begun = {
            p: {key: value.shape for key, value in state.items()}
            for p, state in optimizer.state.items()
        }
        expected = step([theirs], model)
        for mine, other in zip(step([optimizer], own), expected, strict=True):
            assert torch.equal(mine, other)
        for mine, other in zip(own.parameters(), model.parameters(), strict=True):
            state = theirs.state[other]
            assert begun[mine] == {key: value.shape for key, value in state.items()}
