"""The manager's contract on groups of one, two and four ranks.

The reference is one rank that has everything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.parallel import ranks
from tests.rank_processes import run_ranks
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import EngineError
from verl_ray.models.role_model import HeadKind
from verl_ray.models.tiny import make_tiny
from verl_ray.ops.outputs import TokenOutputs
from verl_ray.parallel.sharding import PackedTokens, ShardingManager
from verl_ray.parallel.ulysses import UlyssesManager

pytestmark = pytest.mark.ranks

ROWS = PackedTokens(
    tokens=np.array([5, 6, 7, 8, 9]),
    positions=np.array([0, 1, 2, 0, 1]),
    predecessors=np.array([0, 1, 3]),
    targets=np.array([6, 7, 9]),
    last_tokens=np.array([2, 4]),
    offsets=np.array([0, 3, 5]),
)
OUTPUTS = TokenOutputs(
    log_probs=torch.tensor([1.0, 2.0, 3.0]), greedy=torch.tensor([True, False, True])
)


EXACT = 1e-5
Found = dict[int, list[list[dict[str, Any]]]]


@pytest.fixture(params=[True, False], ids=["same rows", "own rows"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[UlyssesManager]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    assert dist.group.WORLD is not None
    yield UlyssesManager(dist.group.WORLD, same_rows=request.param)
    dist.destroy_process_group()


def same(left: PackedTokens, right: PackedTokens) -> bool:
    return all(
        np.array_equal(value, vars(right)[name]) for name, value in vars(left).items()
    )


def test_without_peers_nothing_is_done() -> None:
    plain = ShardingManager()
    with plain:
        assert (
            plain.preprocess(ROWS) is ROWS
            and plain.postprocess(OUTPUTS) is OUTPUTS
            and plain.exchange is None
        )


def test_what_was_sliced_is_put_together_again(manager: UlyssesManager) -> None:
    with manager:
        assert same(manager.preprocess(ROWS), ROWS)
        found = manager.postprocess(OUTPUTS)
        assert manager.exchange is not None and manager.exchange.tokens == 5
    assert torch.equal(found.log_probs, OUTPUTS.log_probs) and torch.equal(
        found.greedy, OUTPUTS.greedy
    )
    assert found.greedy.dtype == torch.bool and found.values is None


def test_a_block_inside_another_leaves_it_as_it_was(manager: UlyssesManager) -> None:
    with manager:
        manager.preprocess(ROWS)
        outer = manager.exchange
        with manager:
            assert manager.exchange is outer
            manager.preprocess(ROWS)
            assert manager.exchange is not outer
        assert manager.exchange is outer
        with pytest.raises(ZeroDivisionError), manager:
            manager.preprocess(ROWS)
            raise ZeroDivisionError
        assert manager.exchange is outer
    assert manager.exchange is None


def test_an_exception_leaves_nothing_behind(manager: UlyssesManager) -> None:
    with pytest.raises(ZeroDivisionError), manager:
        manager.preprocess(ROWS)
        raise ZeroDivisionError
    assert manager.exchange is None
    with pytest.raises(EngineError, match="inside `with manager:`"):
        manager.preprocess(ROWS)
    with pytest.raises(EngineError, match="no rows have been sliced"):
        manager.postprocess(OUTPUTS)


# ------------------------------------------------------------------- several real ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ulysses")
    character_tokenizer(root / "tokenizer", "0123456789+=")
    sizes = TinyModelConfig(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, intermediate_size=48,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3", root / "model", root / "tokenizer", sizes, seed=1)
    return root


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """The findings of each rank of each group, by the size of the group."""
    run_ranks(
        ranks.__name__,
        [[(rank,) for rank in range(ranks.WORLD)]],
        folder,
        deadline_s=ranks.DEADLINE_S + 30,
    )
    everyone = [
        torch.load(folder / f"found_{rank}.pt", weights_only=False)
        for rank in range(ranks.WORLD)
    ]
    return {
        size: [
            [one[size] for one in everyone[first : first + size]]
            for first in range(0, ranks.WORLD, size)
        ]
        for size in ranks.ROWS
    }


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare relative to the largest number, and to 1."""
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT * largest)


def check_outputs(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["outputs"].keys() == expected["outputs"].keys()
    for name, value in found["outputs"].items():
        assert value.dtype == expected["outputs"][name].dtype
        close(value.float(), expected["outputs"][name].float())
    close(found["loss"], expected["loss"])


def check_gradients(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, gradient in expected["gradients"].items():
        assert gradient.any(), name
        close(found["gradients"][name], gradient)


@functools.cache
def alone(folder: Path, head: HeadKind, given: ranks.Given) -> dict[str, Any]:
    """Return the findings of one rank that has these rows to itself."""
    return ranks.learn(folder, head, ShardingManager(), given)


@pytest.mark.parametrize("head", ranks.WANTED)
@pytest.mark.parametrize("size", ranks.ROWS)
def test_each_rank_gets_the_outputs_of_its_own_rows_and_all_of_them_the_gradient_of_one(
    folder: Path, found: Found, size: int, head: HeadKind
) -> None:
    assert sorted(row for given in ranks.ROWS[size] for row in given) == list(ranks.ALL)
    for group in found[size]:
        for rank, given in zip(group, ranks.ROWS[size], strict=True):
            check_outputs(rank[f"{head}, own rows"], alone(folder, head, given))
            check_gradients(rank[f"{head}, own rows"], alone(folder, head, ranks.ALL))


@pytest.mark.parametrize("head", ranks.WANTED)
@pytest.mark.parametrize("size", ranks.ROWS)
def test_of_the_same_rows_each_rank_gets_all_outputs(
    folder: Path, found: Found, size: int, head: HeadKind
) -> None:
    for group in found[size]:
        for rank in group:
            check_outputs(rank[f"{head}, same rows"], alone(folder, head, ranks.ALL))
            check_gradients(rank[f"{head}, same rows"], alone(folder, head, ranks.ALL))


@pytest.mark.parametrize("size", ranks.ROWS)
def test_other_rows_inside_do_not_disturb_those_on_their_way(
    folder: Path, found: Found, size: int
) -> None:
    given = ranks.ROWS[size]
    for group in found[size]:
        for number, rank in enumerate(group):
            close(
                rank["nested"]["outside"],
                alone(folder, "policy", given[number])["outputs"]["log_probs"],
            )
            close(
                rank["nested"]["inside"],
                alone(folder, "policy", given[number - 1])["outputs"]["log_probs"],
            )
            assert rank["nested"]["exchange left"] is None
