"""One rank of megatron-fsdp in all its strategies and settings.

`main` is a rank of test_megatron_fsdp.py and leaves its findings in a file, which that
checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine import contract, inputs
from verl_ray.checkpoint import sharded
from verl_ray.config.roles import LoraConfig

KIND = "megatron_fsdp"
STRATEGIES = ("none", "optimizer", "optimizer_gradients", "all")
HYBRID: dict[str, dict[str, Any]] = {
    "groups": {"shard_size": 2},
    "groups, outer optimizer": {"shard_size": 2, "outer_sharding": "optimizer"},
    "groups, gradients": {"shard_size": 2, "sharding": "optimizer_gradients"},
    "groups, optimizer": {"shard_size": 2, "sharding": "optimizer"},
}
MODEL = "deep"  # of four layers
LAYER = 30_912  # its elements
SETTINGS: dict[str, dict[str, Any]] = {
    "small buckets": {"bucket_size": 1},
    "layers ahead": {"bucket_size": LAYER},
    "buckets of the optimizer": {"bucket_size": 20_000, "sharding": "optimizer"},
    "one bucket": {"sharding": "optimizer"},
    "gathered at once": {"sharding": "optimizer", "overlap_param_gather": False},
    "gathered at once, gradients": {
        "sharding": "optimizer_gradients",
        "overlap_param_gather": False,
    },
    "summed at once": {"sharding": "optimizer", "overlap_grad_reduce": False},
    "summed at once, none": {"sharding": "none", "overlap_grad_reduce": False},
    "bfloat16 sums": {"reduce_in_float32": False},
    "double buffer": {"double_buffer": True},
    "double buffer, recomputed": {
        "double_buffer": True,
        "activation_checkpointing": True,
    },
}
MICRO_BATCH = 40  # tokens: several micro-batches
WRITERS = tuple((name, 2) for name in STRATEGIES) + tuple(
    (name, 4) for name in list(HYBRID)[:2]
)


class Watched:
    """A record of what an engine sends, in order, and of when layers compute.

    What is sent is ("gather" or "sum", elements, type, address).
    """

    def __init__(self, engine: Any) -> None:
        self.said: list[Any] = []
        self.live = [0.0, 0.0]
        buffer = engine._sharded.param_and_grad_buffer
        gradient_allocators = [
            group.main_grad_buffer.temporary_bucket_allocator
            for group in buffer.parameter_groups
        ]

        def note(number: int) -> None:
            self.said.append(("layer", number))
            now = in_flight([buffer.weight_alloc]), in_flight(gradient_allocators)
            self.live = [max(pair) for pair in zip(self.live, now, strict=True)]

        for i, layer in enumerate(engine.model.layers):
            layer.register_forward_pre_hook(lambda *_, i=i: note(i))
        self._note = note

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[Any]]:
        """Record what is sent in the block."""
        names = {
            "all_gather_into_tensor": ("gather", "output_tensor"),
            "reduce_scatter_tensor": ("sum", "input"),
            "all_reduce": ("sum", "tensor"),
        }
        before = {name: getattr(dist, name) for name in names}
        self.said = said = []

        def heard(name: str) -> Any:
            kind, argument = names[name]

            def call(*given: Any, **named: Any) -> Any:
                sent: Tensor = named[argument] if argument in named else given[0]
                if (
                    sent.dim() and sent.is_floating_point()
                ):  # not the norm, and not numbers of micro-batches
                    said.append(
                        (
                            kind,
                            sent.numel(),
                            str(sent.dtype).removeprefix("torch."),
                            sent.data_ptr(),
                        )
                    )
                    self._note(-1)
                    said.pop()
                return before[name](*given, **named)

            return call

        for name in names:
            setattr(dist, name, heard(name))
        try:
            yield said
        finally:
            for name, call in before.items():
                setattr(dist, name, call)


def in_flight(allocators: list[Any]) -> float:
    """Return the elements of buckets that come and go, in layers."""
    data = [
        bucket.data
        for one in allocators
        for bucket in getattr(one, "buckets", {}).values()
    ]
    return (
        sum(one.untyped_storage().size() // one.element_size() for one in data) / LAYER
    )


def check_strategies(ranks: inputs.Ranks) -> dict[str, Any]:
    """Take three steps of every strategy and of the plain engine, and one in bfloat16.

    The states are for others to read.
    """
    mine = inputs.rows_of().select(ranks.mine(inputs.rows_of()))
    plain = ranks.engine("engine", MODEL, micro_batch_tokens_per_rank=MICRO_BATCH)
    found: dict[str, Any] = {
        "plain": ranks.train(plain, mine, inputs.POLICY),
        "plain weights": ranks.weights(plain),
    }
    for name, settings in how(ranks.world).items():
        settings = {"micro_batch_tokens_per_rank": MICRO_BATCH, **settings}
        engine: Any = ranks.engine(KIND, MODEL, **settings)
        fresh = [
            (group["weight_decay"], len(group["params"]))
            for group in engine.optimizer.param_groups
        ]
        steps = [int(held["step"]) for held in engine.optimizer.state.values()]
        before = ranks.weights(engine)
        trained = ranks.train(engine, mine, inputs.POLICY)
        after = [int(held["step"]) for held in engine.optimizer.state.values()]
        found[name] = {
            **trained, "groups": fresh, "steps": (steps, after), "before": before, "weights": ranks.weights(engine),
            "bytes": held_bytes(engine),
        }  # fmt: skip
        sharded.save(engine.state(), str(ranks.folder / f"{name}_{ranks.world}"))
        sharded.BackgroundSave(
            engine.state(), str(ranks.folder / f"{name}_{ranks.world}_copied"), None
        ).wait()
        ranks.train(engine, mine, inputs.POLICY, 1)
        found[name]["on"] = ranks.weights(engine)
        halved = ranks.engine(KIND, MODEL, dtype="bfloat16", **settings)
        found[name]["bfloat16"] = ranks.train(halved, mine, inputs.POLICY, 1)
        found[name]["exact"] = all(
            value.dtype == torch.float32 for _, value in halved.shards(before)
        )
    if ranks.world == 4:  # of which two hold nothing of what learns
        small = LoraConfig(rank=1, alpha=2, targets=("q_proj",))
        found["small adapter"] = [
            ranks.train(ranks.engine(kind, MODEL, lora=small), mine, inputs.POLICY, 2)
            for kind in (KIND, "engine")
        ]
    return found


def how(world: int) -> dict[str, dict[str, Any]]:
    return {name: {"sharding": name} for name in STRATEGIES} if world == 2 else HYBRID


def held_bytes(engine: Any) -> int:
    """Return the bytes that this rank holds between steps.

    Storages of buffers, weights and moments count once each.
    """
    buffer = engine._sharded.param_and_grad_buffer
    held: list[Tensor] = [
        value.detach().to_local() for value in engine.parameters().values()
    ]
    held += [parameter.data for parameter in buffer.params]
    held += [
        state[kind].to_local()
        for state in engine.optimizer.state.values()
        for kind in ("exp_avg", "exp_avg_sq")
    ]
    held += buffer.buffer.values()
    for group in buffer.parameter_groups:
        held += [
            one.data
            for one in (group.model_weight_buffer, group.main_weight_buffer)
            if one is not None
        ]
    return sum(
        {
            value.untyped_storage()._cdata: value.untyped_storage().nbytes()
            for value in held
        }.values()
    )


def check_settings(ranks: inputs.Ranks) -> dict[str, Any]:
    """Take three steps of every setting, and record what is sent in the third."""
    mine = inputs.rows_of().select(ranks.mine(inputs.rows_of()))
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        engine: Any = ranks.engine(
            KIND, MODEL, micro_batch_tokens_per_rank=10_000, **settings
        )
        watched = Watched(engine)
        trained = ranks.train(engine, mine, inputs.POLICY, 2)
        watched.live = [0.0, 0.0]
        with watched.listening() as computing:
            report = ranks.total(engine.forward_backward(mine, inputs.POLICY))
        with watched.listening() as stepping:
            norm = engine.optimizer_step().grad_norm
        trained = {
            "loss": [*trained["loss"], report.loss],
            "norm": [*trained["norm"], norm],
        }
        found[name] = {
            **trained,
            "computing": computing,
            "stepping": stepping,
            "live": watched.live,
        }
    return found


def of_two_groups(model: nn.Module) -> torch.optim.AdamW:
    matrix, *rest = model.parameters()
    groups = [
        {"params": [matrix], "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "lr": 0.5},
    ]
    return torch.optim.AdamW(groups, lr=0.25)


def check_package(ranks: inputs.Ranks) -> dict[str, Any]:
    """Record what the package does to an optimizer with two groups, alone and here."""
    from verl_ray.engine.megatron_fsdp import sharding

    found: dict[str, Any] = {}
    for name in ("alone", "mended"):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        how: dict[str, Any] = {
            "dp_shard_dim": "shard",
            "tp_dim": "tp",
            "zero_dp_strategy": "optim",
        }
        how |= {
            "device_mesh": sharding._device_mesh("cpu", 1, ranks.world)[0],
            "device": torch.device("cpu"),
        }
        if name == "alone":
            optimizer = of_two_groups(model)
            sharding.megatron_fsdp.fully_shard(model, optimizer, **how)
        else:
            sharding.megatron_fsdp.fully_shard_model(model, **how)
            optimizer = sharding.shard_optimizer(of_two_groups(model))
        norm = (
            dict(model.named_parameters())["1.weight"].detach().to_local()
        )  # it began as ones
        found[name] = {
            "groups": [
                (group["lr"], group["weight_decay"]) for group in optimizer.param_groups
            ],
            "steps": {int(state["step"]) for state in optimizer.state.values()},
            "norm": {round(value, 6) for value in norm.tolist()},
        }
    return found


def check_elsewhere(ranks: inputs.Ranks) -> dict[str, Any]:
    """Read states that other numbers of ranks wrote: weights, and a step from there."""
    mine = inputs.rows_of().select(ranks.mine(inputs.rows_of()))
    found: dict[str, Any] = {}
    readers: dict[str, dict[str, Any]] = (
        {"all": {}} if ranks.world == 1 else how(ranks.world)
    )
    if ranks.world == 4:
        readers = {name: HYBRID[name] for name in ("groups", "groups, outer optimizer")}
    first = next(iter(readers))
    for reader, settings in readers.items():
        for writer, world in WRITERS:
            for kept in ("", "_copied"):
                if (
                    world == 4
                    and not (ranks.folder / f"{writer}_{world}{kept}").exists()
                ):
                    continue  # four ranks are not run
                if world == ranks.world or (
                    kept != "" and (reader != first or ranks.world == 1)
                ):
                    continue
                engine = ranks.engine(KIND, MODEL, **settings)
                contract.load(engine, ranks.folder / f"{writer}_{world}{kept}")
                weights = ranks.weights(engine)
                trained = ranks.train(engine, mine, inputs.POLICY, 1)
                found[f"{reader} reads {writer} on {world}{kept}"] = {
                    "writer": writer, "weights": weights, "on": ranks.weights(engine), **trained,
                }  # fmt: skip
    return found


def write(ranks: inputs.Ranks) -> dict[str, Any]:
    """Find what this process can find alone, and write states for others to read."""
    found = check_strategies(ranks)
    if ranks.world == 2:
        found["settings"] = check_settings(ranks)
        found["package"] = check_package(ranks)
    return found


def read(ranks: inputs.Ranks) -> dict[str, Any]:
    return {"elsewhere": check_elsewhere(ranks)}


PARTS = {"write": write, "read": read}


def waves(*, with_four: bool) -> list[list[tuple[str, int, int]]]:
    """List the processes to start, in waves of processes that run at the same time.

    A process has a mode, a rank and a number of ranks. Two ranks read only what four
    have written.
    """
    worlds = (
        {"write": (2, 4), "read": (1, 2, 4)}
        if with_four
        else {"write": (2,), "read": (1,)}
    )
    return [
        [(part, rank, world) for rank in range(world)]
        for part in PARTS
        for world in worlds[part]
    ]


def main(part: str, rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = inputs.Ranks(rank, world, folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting_{part}_{world}", rank=rank, world_size=world,
        timeout=timedelta(seconds=inputs.DEADLINE_S),
    )  # fmt: skip
    found: dict[str, Any] = {}
    if (part, world) == ("write", 2):
        parts, own = [torch.empty(2), torch.empty(1)], torch.ones(2 - rank)
        with contextlib.suppress(Exception):
            dist.all_gather(parts, own)
            found["gathers unevenly"] = True
    torch.save(found | PARTS[part](ranks), folder / f"found_{part}_{world}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
