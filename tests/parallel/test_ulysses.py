"""The manager's contract, on a group of one; several ranks are in tests/engine/test_contract.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from verl_ray.errors import EngineError
from verl_ray.models.role_model import TokenOutputs
from verl_ray.parallel.sharding_manager import PackedTokens, ShardingManager
from verl_ray.parallel.ulysses import UlyssesManager

ROWS = PackedTokens(
    tokens=np.array([5, 6, 7, 8, 9]),
    positions=np.array([0, 1, 2, 0, 1]),
    before=np.array([0, 1, 3]),
    targets=np.array([6, 7, 9]),
    ends=np.array([2, 4]),
)
OUTPUTS = TokenOutputs(log_probs=torch.tensor([1.0, 2.0, 3.0]), greedy=torch.tensor([True, False, True]))


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[UlyssesManager]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield UlyssesManager(dist.group.WORLD)
    dist.destroy_process_group()


def same(left: PackedTokens, right: PackedTokens) -> bool:
    return all(np.array_equal(value, vars(right)[name]) for name, value in vars(left).items())


def test_without_peers_nothing_is_done() -> None:
    plain = ShardingManager()
    with plain:
        assert plain.preprocess(ROWS) is ROWS and plain.postprocess(OUTPUTS) is OUTPUTS and plain.exchange is None


def test_what_was_sliced_is_put_together_again(manager: UlyssesManager) -> None:
    with manager:
        assert same(manager.preprocess(ROWS), ROWS)
        found = manager.postprocess(OUTPUTS)
        assert manager.exchange is not None and manager.exchange.tokens == 5
    assert torch.equal(found.log_probs, OUTPUTS.log_probs) and torch.equal(found.greedy, OUTPUTS.greedy)
    assert found.greedy.dtype == torch.bool and found.values is None


def test_it_may_be_entered_again_and_leaves_nothing_behind(manager: UlyssesManager) -> None:
    with manager:
        with manager:
            manager.preprocess(ROWS)
        assert manager.exchange is not None  # the outer block goes on
    assert manager.exchange is None
    with pytest.raises(ZeroDivisionError), manager:
        manager.preprocess(ROWS)
        raise ZeroDivisionError
    assert manager.exchange is None
    with pytest.raises(EngineError, match="inside `with manager:`"):
        manager.preprocess(ROWS)
    with pytest.raises(EngineError, match="no rows have been sliced"):
        manager.postprocess(OUTPUTS)
