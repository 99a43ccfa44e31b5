"""What leaves the device and comes back is unchanged, even if transfers are slow."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.engine import inputs
from tests.engine.fake_ranks import playing
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.engine.build import build_engine
from verl_ray.engine.offload import HostArena, Offload, Transfers, offloadable
from verl_ray.errors import EngineError
from verl_ray.models.tiny import make_tiny

CPU = torch.device("cpu")
STALE = 7.0
"""What memory holds before a transfer arrives: any number that no weight has."""


class LateTransfers(Transfers):
    """A link that delivers nothing until it is awaited, as a copy engine may."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._begun: list[tuple[Tensor, Tensor]] = []

    def begin(self, target: Tensor, source: Tensor) -> None:
        target.fill_(STALE)
        self._begun.append((target, source))

    def wait(self) -> None:
        for target, source in self._begun:
            target.copy_(source)
        self._begun.clear()


class FlippedBit(Transfers):
    """A link that changes one element of everything that it copies."""

    def begin(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        target[-1] += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offload")
    character_tokenizer(folder / "tokenizer", "0123456789+=")
    sizes = TinyModelConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_size=16, intermediate_size=40,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3", folder / "qwen3", folder / "tokenizer", sizes, seed=1)
    return folder


@pytest.fixture(params=[0, 1, 2])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    """One rank of three, all played by this process.

    32 and 40 rows are no multiple of 3.
    """
    rank: int = request.param
    with playing(rank, 3):
        spec = inputs.Ranks(rank, 3, folder).spec("fsdp", "qwen3")
        built: Any = build_engine(spec, device=CPU, rank=rank, world_size=3)
        with torch.no_grad():
            for state in built.optimizer.state.values():
                state["exp_avg"].to_local().normal_()
                state["exp_avg_sq"].to_local().uniform_()
        yield built


def locals_of(engine: Any) -> dict[str, Tensor]:
    """Return copies of this rank's part of everything that moves."""
    found = {
        name: value._local_tensor.clone() for name, value in engine.parameters().items()
    }
    for name, value in engine.model.hf.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{kind} of {name}"] = engine.optimizer.state[value][
                kind
            ]._local_tensor.clone()
    return found


def test_uneven_shards_survive_a_late_transfer(engine: Any) -> None:
    engine.offload = offload = Offload(CPU, LateTransfers())
    before, objects = locals_of(engine), dict(engine.parameters())
    state = engine.offloadable_weights() + engine.offloadable_moments()
    for move in (offload.to_host, offload.to_device, offload.to_host):
        addresses = {held.name: held.memory().data_ptr() for held in state}
        move(state)

        after = locals_of(engine)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert all(
            held.memory().data_ptr() != addresses[held.name]
            for held in state
            if held.memory().numel()
        )
        for unit in engine._units():
            group = unit._get_fsdp_state()._fsdp_param_group
            for shard in group.fsdp_params if group else ():
                flat, local = (
                    shard._sharded_param_data,
                    shard.sharded_param._local_tensor,
                )
                assert flat.numel() == shard.padded_sharded_param_size.numel()
                assert (
                    flat.untyped_storage().data_ptr()
                    == local.untyped_storage().data_ptr()
                )
                assert (
                    torch.equal(flat[: local.numel()], local.reshape(-1))
                    and not flat[local.numel() :].any()
                )
                assert (
                    isinstance(shard.sharded_param, DTensor)
                    and shard.sharded_param.requires_grad
                )
        assert {name: id(value) for name, value in engine.parameters().items()} == {
            name: id(value) for name, value in objects.items()
        }


def test_torch_itself_loses_uneven_shards(engine: Any) -> None:
    """This is why the engine does not call `module.to`: FSDP2 pads on the host at once.

    A later torch may do better.
    """
    before, late = locals_of(engine), LateTransfers()

    def to_host(value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        there = torch.empty_like(value._local_tensor)
        late.begin(there, value._local_tensor)
        return DTensor(there, value._spec, requires_grad=False)

    engine.model._apply(to_host)
    late.wait()
    lost = [
        name
        for name, value in engine.parameters().items()
        if not torch.equal(value._local_tensor, before[name])
    ]
    assert bool(lost) == (engine.rank == 2)  # of 32 rows the ranks hold 11, 11 and 10


def test_a_changed_element_is_refused_by_name() -> None:
    long, short = torch.arange(5000.0), torch.arange(3.0)
    offload = Offload(CPU, FlippedBit(CPU))
    with pytest.raises(
        EngineError,
        match=r"^long \(and 1 others\) changed on the way to the host: .*placement.offload",
    ):
        offload.to_host([offloadable("long", long), offloadable("short", short)])


def test_every_direction_is_verified_once() -> None:
    weight = torch.arange(10.0)
    offload = Offload(CPU)
    state = [offloadable("weight", weight)]
    offload.to_host(state)
    offload._transfers = FlippedBit(CPU)
    with pytest.raises(EngineError, match=r"^weight changed on the way to the device"):
        offload.to_device(state)


def test_what_moves_later_is_verified_too() -> None:
    moment, weight = torch.arange(10.0), torch.arange(10.0)
    offload = Offload(CPU)
    offload.to_host(
        [offloadable("moment", moment)]
    )  # as a publisher does, before the weights have been sent
    offload._transfers = FlippedBit(CPU)
    with pytest.raises(EngineError, match=r"^weight changed on the way to the host"):
        offload.to_host([offloadable("moment", moment), offloadable("weight", weight)])


def test_one_arena_to_the_byte_is_used_again() -> None:
    first, second, third = (
        torch.arange(1000.0),
        torch.arange(6, dtype=torch.bfloat16),
        torch.arange(3.0),
    )
    offload = Offload(CPU)
    state = [offloadable("first", first), offloadable("second", second)]
    offload.to_host(state)
    assert [len(arena._memory) for arena in offload._arenas] == [
        4096 + 512
    ]  # 4000 and 12 bytes, 512 to 512
    assert (
        first.untyped_storage().nbytes() == 4000
        and second.untyped_storage().nbytes() == 12
    )
    addresses = first.data_ptr(), second.data_ptr()
    offload.to_host(state)
    assert (first.data_ptr(), second.data_ptr()) == addresses  # there already
    offload.to_device(state)
    assert first.data_ptr() != addresses[0]
    first += 1
    offload.to_host([*state, offloadable("third", third)])
    assert (first.data_ptr(), second.data_ptr()) == addresses and first[999] == 1000
    assert [len(arena._memory) for arena in offload._arenas] == [4096 + 512, 512]


def test_memory_of_an_arena_outlives_it() -> None:
    arena = HostArena(512, pinned=False)
    kept = arena.cut(4, torch.float32)
    kept.fill_(3.0)
    del arena
    assert kept.tolist() == [3.0] * 4


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, whose collectives are real."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_and_its_buckets_go_when_no_step_follows(alone: None, folder: Path) -> None:
    spec = inputs.Ranks(0, 2, folder).spec("engine", "qwen3")
    engine: Any = build_engine(spec, device=CPU, rank=0, world_size=2)
    rows = inputs.rows_of()
    engine.forward_backward(rows, inputs.POLICY)
    with pytest.raises(
        EngineError, match=r"has a gradient that no step has used; call optimizer_step"
    ):
        engine.release_gradients()
    engine.optimizer_step()

    ddp = weakref.ref(engine.module)
    engine.release_gradients()
    assert ddp() is None and engine.module is engine.model  # its buckets are its own

    engine.renew_gradients()
    again = engine.module
    engine.renew_gradients()
    assert engine.module is again and isinstance(again, DistributedDataParallel)
    engine.forward_backward(rows, inputs.POLICY)
    in_buckets = [
        value.grad
        for value in engine.model.parameters()
        if value.grad is not None and value.grad._is_view()
    ]
    assert len(in_buckets) == len(list(engine.model.parameters()))
    assert engine.optimizer_step().skipped is None
