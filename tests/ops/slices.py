"""The findings of three ranks, and of the first two, with their slices of a head.

`main` is a rank of test_vocab_parallel.py. It leaves its findings in a file, which that
checks.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.naive import Watch
from verl_ray.ops import log_probs as module
from verl_ray.ops.log_probs import HeadOutputs, head_log_probs
from verl_ray.ops.outputs import RequestedOutputs, TopTokens
from verl_ray.ops.vocab_parallel import VocabularySlice

DEADLINE_S = 120
WORLD = 3
SIZES = (2, 3)


@dataclass(frozen=True)
class Case:
    """A head and how it is computed.

    `cuts` are the bounds of the slices for each size of a group.
    """

    name: str
    tokens: int = 23
    hidden: int = 8
    vocabulary: int = 37
    cuts: tuple[tuple[int, ...], ...] = ((5,), (1, 20))
    backwards: bool = False  # the last rank holds the first slice
    numbers: Literal["normal", "far apart", "far from zero"] = "normal"
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    temperature: float = 1.0
    chunk: int | None = None
    kept: bool = True
    entropy: bool = True
    beside: int = 0  # candidates beside the target, and most probable tokens

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """Return the first row and the end of each rank's slice."""
        bounds = list(itertools.pairwise((0, *self.cuts[size - 2], self.vocabulary)))
        return bounds[::-1] if self.backwards else bounds


def _drawn(seed: int) -> Case:
    draw = random.Random(seed)
    tokens, vocabulary = draw.randint(1, 40), draw.randint(3, 60)
    return Case(
        f"drawn {seed}",
        tokens=tokens,
        vocabulary=vocabulary,
        cuts=tuple(
            tuple(sorted(draw.sample(range(1, vocabulary), size - 1))) for size in SIZES
        ),
        backwards=draw.random() < 0.5,
        temperature=draw.choice([1.0, 0.6]),
        chunk=draw.choice([None, draw.randint(1, tokens)]),
        kept=draw.random() < 0.5,
        entropy=draw.random() < 0.5,
        beside=2,
    )


GRID = [
    Case(
        f"{kept=} {chunk=} {temperature=} {entropy=}",
        kept=kept,
        chunk=chunk,
        temperature=temperature,
        entropy=entropy,
        beside=3 if entropy else 0,
    )
    for kept in (True, False)
    for chunk in (5, None)
    for temperature in (1.0, 0.7)
    for entropy in (True, False)
]
# Slices whose share is 0 in float32; logits so large that a float32 logsumexp of them
# keeps two digits after the point.
HARD = [
    Case(f"{numbers} {kept=}", numbers=numbers, kept=kept, chunk=5)
    for numbers in ("far apart", "far from zero")
    for kept in (True, False)
]
DRAWN = [_drawn(seed) for seed in range(16)]
HALF = [
    Case(f"half {kept=} {autocast=}", kept=kept, autocast=autocast, chunk=5,
         dtype=torch.float32 if autocast else torch.bfloat16)
    for kept in (True, False) for autocast in (True, False)
]  # fmt: skip
LARGE = [
    Case(
        f"large {kept=}",
        tokens=64,
        hidden=4,
        vocabulary=500,
        cuts=((240,), (230, 460)),
        kept=kept,
        chunk=6,
    )
    for kept in (True, False)
]
EMPTY = [Case("no tokens", tokens=0)]
CASES = [*GRID, *HARD, *DRAWN, *HALF, *LARGE, *EMPTY]


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    temperature: float
    slopes: Tensor  # [2, T]: the loss per log-prob and per nat of entropy
    candidates: Tensor  # [T, beside]


def inputs(case: Case) -> Inputs:
    """Return the inputs, which are the same on every rank and in the checks."""
    torch.manual_seed(0)
    shapes = (
        (case.tokens, case.hidden),
        (case.vocabulary, case.hidden),
        (case.vocabulary,),
    )
    hidden, weight, bias = (torch.randn(*shape) for shape in shapes)
    if case.numbers != "normal":  # whole numbers, so that the logits are exact
        hidden, weight, bias = (
            hidden.mul(2).round(),
            weight.mul(2).round(),
            bias.mul(2).round(),
        )
    if case.numbers == "far apart":
        weight, bias = weight * 50, bias * 50
    if case.numbers == "far from zero":
        bias = bias + 2**15
    targets = torch.randint(case.vocabulary, (case.tokens,))
    slopes = torch.randn(2, case.tokens)
    return Inputs(
        hidden.to(case.dtype),
        weight.to(case.dtype),
        bias.to(case.dtype),
        targets,
        case.temperature,
        slopes,
        torch.randint(case.vocabulary, (case.tokens, case.beside)),
    )


def outputs_of(found: HeadOutputs) -> dict[str, Tensor]:
    return {
        name: value.detach() for name, value in vars(found).items() if value is not None
    }


def learn(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return outputs, gradients of this rank, and what the passes did."""
    first, end = case.bounds(dist.get_world_size(group))[dist.get_rank(group)]
    given = inputs(case)
    hidden, weight, bias = (
        given.hidden,
        given.weight[first:end].clone(),
        given.bias[first:end].clone(),
    )
    for tensor in (hidden, weight, bias):
        tensor.requires_grad_()
    module.KEPT_LOGITS = 2**40 if case.kept else 0
    with (
        Watch() as forward,
        torch.autocast("cpu", torch.bfloat16, enabled=case.autocast),
    ):
        outputs = head_log_probs(hidden, weight, given.targets, bias=bias, vocabulary=VocabularySlice(group, first), candidates=given.candidates if case.beside else None, chunk_tokens=case.chunk, requested=RequestedOutputs(temperature=given.temperature, entropy=case.entropy, greedy=True, squared_probs=True, top=TopTokens(case.beside, case.vocabulary - 1) if case.beside else None))  # fmt: skip
    loss = (outputs.log_probs * given.slopes[0]).sum()
    if outputs.candidate_log_probs is not None:
        loss = loss + (outputs.candidate_log_probs * given.slopes[1, :, None]).sum()
    if outputs.entropy is not None:
        loss = loss + (outputs.entropy * given.slopes[1]).sum()
    with Watch() as backward:
        loss.backward()
    return {
        "outputs": outputs_of(outputs),
        "gradients": {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad},
        "collectives": (len(forward.collectives), len(backward.collectives)),
        "numel": max(forward.numel, backward.numel),
    }


def by_hand(group: dist.ProcessGroup, backwards: bool) -> dict[str, Tensor]:
    """Return inputs with odds 2 : 3 : 1 : 3 : 3 of five tokens, for each of them."""
    case = Case("by hand", vocabulary=5, cuts=((2,), (1, 3)), backwards=backwards)
    first, end = case.bounds(dist.get_world_size(group))[dist.get_rank(group)]
    odds = torch.tensor([2.0, 3, 1, 3, 3])[first:end, None]
    found = head_log_probs(torch.ones(5, 1), odds.log(), torch.arange(5), vocabulary=VocabularySlice(group, first), requested=RequestedOutputs(entropy=True, greedy=True, squared_probs=True))  # fmt: skip
    return outputs_of(found)


def find(group: dist.ProcessGroup) -> dict[str, Any]:
    found: dict[str, Any] = {case.name: learn(case, group) for case in CASES}
    return found | {
        "by hand": by_hand(group, False),
        "by hand, backwards": by_hand(group, True),
    }


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=DEADLINE_S),
    )  # fmt: skip
    three, two = dist.group.WORLD, dist.new_group([0, 1])
    assert three is not None and two is not None
    found = {3: find(three)}
    if rank < 2:
        found[2] = find(two)
    torch.save(found, folder / f"found_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
