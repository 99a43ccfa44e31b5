"""Slices of a head on two and three ranks against the float64 formula.

What they send and hold is checked, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from tests.ops import slices
from tests.ops.naive import naive, naive_log_p
from tests.ops.slices import Case
from tests.rank_processes import run_ranks
from verl_ray.errors import EngineError
from verl_ray.ops.log_probs import head_log_probs
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.ops.vocab_parallel import VocabularySlice

pytestmark = pytest.mark.ranks

EXACT = 1e-6
Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The findings of each rank of a group, by the size of the group."""
    folder = tmp_path_factory.mktemp("slices")
    run_ranks(
        slices.__name__,
        [[(rank,) for rank in range(slices.WORLD)]],
        folder,
        deadline_s=slices.DEADLINE_S + 30,
    )
    everyone = [
        torch.load(folder / f"found_{rank}.pt", weights_only=False)
        for rank in range(slices.WORLD)
    ]
    return {
        size: [everyone[rank][size] for rank in range(size)] for size in slices.SIZES
    }


def close(found: Tensor, expected: Tensor, within: float = EXACT) -> None:
    """Compare relative to the largest number, and to 1."""
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=0, atol=within * largest
    )


def whole_gradients(case: Case, ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Sum the parts of hidden's gradient, and join the slices of the others."""
    parts = [
        rank[case.name]["gradients"]
        for rank in (ranks[::-1] if case.backwards else ranks)
    ]
    whole = {
        name: torch.cat([part[name] for part in parts]) for name in ("weight", "bias")
    }
    return whole | {
        "hidden": torch.stack([part["hidden"].double() for part in parts]).sum(0)
    }


@pytest.mark.parametrize(
    "case", [*slices.GRID, *slices.HARD, *slices.DRAWN], ids=lambda case: case.name
)
@pytest.mark.parametrize("size", slices.SIZES)
def test_slices_together_equal_the_naive_float64_computation(
    found: Found, size: int, case: Case
) -> None:
    given = slices.inputs(case)
    learning = {
        name: getattr(given, name).double().requires_grad_()
        for name in ("hidden", "weight", "bias")
    }
    log_probs, entropy = naive(*learning.values(), given.targets, given.temperature)
    log_p = naive_log_p(*learning.values(), given.temperature)
    squared_probs = (2 * log_p).exp().sum(-1)
    loss = (log_probs * given.slopes[0]).sum() + (
        (entropy * given.slopes[1]).sum() if case.entropy else 0
    )
    candidate_log_probs = log_p.gather(1, given.candidates)
    loss = loss + (candidate_log_probs * given.slopes[1, :, None]).sum()
    loss.backward()
    # The last token of the vocabulary was left out.
    top = log_p.detach()[:, :-1].topk(case.beside, dim=1)
    for rank in found[size]:
        outputs = rank[case.name]["outputs"]
        assert (
            outputs["log_probs"].dtype == torch.float32
            and ("entropy" in outputs) == case.entropy
        )
        close(outputs["log_probs"], log_probs.detach())
        close(outputs["squared_probs"], squared_probs.detach())
        if case.entropy:
            close(outputs["entropy"], entropy.detach())
        if case.beside:
            close(outputs["candidate_log_probs"], candidate_log_probs.detach())
            close(outputs["top_log_probs"], top.values)
            assert torch.equal(outputs["top_tokens"], top.indices)
    for name, gradient in whole_gradients(case, found[size]).items():
        expected = learning[name].grad
        assert expected is not None and expected.any()
        close(gradient, expected)


@pytest.mark.parametrize("name", ["by hand", "by hand, backwards"])
@pytest.mark.parametrize("size", slices.SIZES)
def test_numbers_by_hand(found: Found, size: int, name: str) -> None:
    """The odds are 2 : 3 : 1 : 3 : 3, so there are twelve parts.

    H = log 12 - (2 log 2 + 9 log 3) / 12. Of the three most probable tokens, which are
    in two slices, the first is the greedy one.
    """
    for rank in found[size]:
        outputs = rank[name]
        assert outputs["log_probs"].exp().tolist() == pytest.approx(
            [2 / 12, 3 / 12, 1 / 12, 3 / 12, 3 / 12]
        )
        assert outputs["entropy"].tolist() == pytest.approx([1.5454231] * 5, abs=1e-6)
        squares = (4 + 9 + 1 + 9 + 9) / 144
        assert outputs["squared_probs"].tolist() == pytest.approx([squares] * 5)
        assert outputs["greedy"].tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("size", slices.SIZES)
def test_all_ranks_have_the_same_bits(found: Found, size: int) -> None:
    first, *others = found[size]
    for case in slices.CASES:
        for other in others:
            for name, value in first[case.name]["outputs"].items():
                assert torch.equal(value, other[case.name]["outputs"][name]), (
                    case.name,
                    name,
                )


@pytest.mark.parametrize("size", slices.SIZES)
def test_greedy_is_that_of_the_whole_head(found: Found, size: int) -> None:
    """`far apart` has whole numbers as logits, and so equals among them."""
    for case in [*slices.GRID, *slices.HARD, *slices.DRAWN]:
        given = slices.inputs(case)
        expected = (
            linear(given.hidden, given.weight, given.bias).argmax(-1) == given.targets
        )
        assert torch.equal(found[size][0][case.name]["outputs"]["greedy"], expected)


@pytest.mark.parametrize("case", slices.HALF, ids=lambda case: case.name)
@pytest.mark.parametrize("size", slices.SIZES)
def test_bfloat16_is_softmaxed_in_float32(found: Found, size: int, case: Case) -> None:
    given = slices.inputs(case)
    hidden, weight, bias = (
        tensor.bfloat16() for tensor in (given.hidden, given.weight, given.bias)
    )
    logits = torch.cat(
        [linear(hidden, weight[at:end], bias[at:end]) for at, end in case.bounds(size)],
        dim=1,
    )
    log_probs, entropy = naive(
        logits, torch.eye(case.vocabulary), None, given.targets, 1.0
    )
    outputs = found[size][0][case.name]["outputs"]
    close(outputs["log_probs"], log_probs)
    close(outputs["entropy"], entropy)

    learning = {
        name: getattr(given, name).double().requires_grad_()
        for name in ("hidden", "weight", "bias")
    }
    exact, exact_entropy = naive(*learning.values(), given.targets, 1.0)
    (
        (exact * given.slopes[0]).sum() + (exact_entropy * given.slopes[1]).sum()
    ).backward()
    for rank in found[size]:
        assert {
            gradient.dtype for gradient in rank[case.name]["gradients"].values()
        } == {case.dtype}
    for name, gradient in whole_gradients(case, found[size]).items():
        expected = learning[name].grad
        assert expected is not None
        close(gradient, expected, within=0.03)


@pytest.mark.parametrize("size", slices.SIZES)
def test_one_collective_forward_and_none_backward_whatever_the_chunks(
    found: Found, size: int
) -> None:
    for rank in found[size]:
        assert {rank[case.name]["collectives"] for case in slices.CASES} == {(1, 0)}


@pytest.mark.parametrize("case", slices.LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("size", slices.SIZES)
def test_nothing_is_larger_than_a_chunk_of_the_slice_or_its_kept_logits(
    found: Found, size: int, case: Case
) -> None:
    assert case.chunk is not None
    for rank, (first, end) in zip(found[size], case.bounds(size), strict=True):
        most = (case.tokens if case.kept else case.chunk) * (end - first)
        sent = (
            size * 6 * case.tokens
        )  # log-prob, entropy, squares, best token, its logit and its log-prob
        assert rank[case.name]["numel"] == max(most, sent)


@pytest.mark.parametrize("size", slices.SIZES)
def test_no_tokens(found: Found, size: int) -> None:
    for rank in found[size]:
        assert all(
            value.shape == (0,) for value in rank["no tokens"]["outputs"].values()
        )
        assert not any(
            gradient.any() for gradient in rank["no tokens"]["gradients"].values()
        )


# ----------------------------------------------------------------------- a group of one


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_slice_is_the_whole_head_bit_by_bit(alone: dist.ProcessGroup) -> None:
    given = slices.inputs(Case("one slice"))
    results = []
    for vocabulary in (None, VocabularySlice(alone, 0)):
        hidden, weight = (
            given.hidden.clone().requires_grad_(),
            given.weight.clone().requires_grad_(),
        )
        outputs = head_log_probs(
            hidden,
            weight,
            given.targets,
            vocabulary=vocabulary,
            requested=RequestedOutputs(entropy=True, greedy=True),
        )
        assert outputs.entropy is not None
        (outputs.log_probs.sum() + outputs.entropy.sum()).backward()
        results.append([*slices.outputs_of(outputs).values(), hidden.grad, weight.grad])
    for plain, sliced in zip(*results, strict=True):
        assert plain is not None and sliced is not None and torch.equal(plain, sliced)


def test_a_target_in_no_slice_has_no_probability(alone: dist.ProcessGroup) -> None:
    found = head_log_probs(
        torch.zeros(3, 1),
        torch.zeros(2, 1),
        torch.tensor([1, 2, 4]),
        vocabulary=VocabularySlice(alone, 2),
    )
    assert found.log_probs.tolist() == pytest.approx(
        [-torch.inf, -0.6931472, -torch.inf]
    )


def test_misuse_is_named(alone: dist.ProcessGroup) -> None:
    with pytest.raises(
        EngineError,
        match=r"slice of the language head has no rows; each rank needs one or more",
    ):
        head_log_probs(
            torch.ones(1, 2),
            torch.ones(0, 2),
            torch.zeros(1).long(),
            vocabulary=VocabularySlice(alone, 7),
        )
