"""`verl-ray bench weight-sync`: handing weights from a training group to a rollout engine, beside what bounds it.

Invariant: the hand-over is the one of `train` (Ray, the wire, fingerprints, vLLM's loading, the proof by log-probs).
In turn with it the rollout process loads the very same tensors, which it has in memory, by vLLM's own `reload_weights`,
and copies their bytes: so a slow minute of the machine slows all of them. On a GPU that both share, the trainer's state
leaves it and comes back as well, beside a plain copy between pinned memory and the device; what runs there has not met
a GPU yet. Deliberately not here: generation, and wires that leave the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast, get_args

from controllers.bench.step import MODELS, configuration, make_inputs, shown_versions
from controllers.system.build import Shape, own_replicas, plan_processes, resolve_on
from verl_ray.backends import BACKENDS
from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.config.rollout import WireName
from verl_ray.config.tasks.rl import RLConfig
from workers.actor import ActorWorker
from workers.rollout import RolloutSpec, RolloutWorker

if TYPE_CHECKING:
    from torch import Tensor

    from verl_ray.rollout.base import RolloutEngine

ROLES = ("actor", "rollout")
LINK_BYTES = 1 << 30


class MeasuredWorker(RolloutWorker):
    """A replica that also does what the hand-over is compared with."""

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        super().__init__(context, spec)
        self._device, self._dtype = context.device, spec.config.dtype

    def hold(self, path: str) -> int:
        """Read the weights of a model directory into the memory of the device; returns their bytes."""
        import torch
        from safetensors.torch import load_file

        dtype = getattr(torch, self._dtype)
        found = [load_file(file) for file in sorted(Path(path).glob("*.safetensors"))]
        self._weights: dict[str, Tensor] = {
            name: tensor.to(self._device, dtype) for one in found for name, tensor in one.items()
        }
        self._copies = {name: tensor.clone() for name, tensor in self._weights.items()}
        return sum(tensor.nbytes for tensor in self._weights.values())

    def reload(self) -> float:
        """Seconds that vLLM's own `reload_weights` takes with them."""

        def run(engine: RolloutEngine) -> float:
            assert hasattr(engine, "core")
            with self._timed() as took:
                engine.core.reload(self._weights.items())
            return took[0]

        return self.server.run(run)

    def copy(self) -> float:
        """Seconds of a plain copy of their bytes, memory to memory."""
        with self._timed() as took:
            for name, tensor in self._weights.items():
                self._copies[name].copy_(tensor)
        return took[0]

    def link(self) -> tuple[float, float]:
        """Bytes per second from the device to pinned memory of the host, and back."""
        import torch

        there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=self._device)
        here = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        with self._timed() as out:
            here.copy_(there)
        with self._timed() as back:
            there.copy_(here)
        return LINK_BYTES / out[0], LINK_BYTES / back[0]

    @contextlib.contextmanager
    def _timed(self) -> Iterator[list[float]]:
        """The seconds of the block, until the device has done it."""
        import torch

        wait = torch.cuda.synchronize if self._device != "cpu" else _no_device
        wait()
        took: list[float] = []
        began = time.perf_counter()
        yield took
        wait()
        took.append(time.perf_counter() - began)


def _no_device() -> None: ...


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; returns 0."""
    given = _parser().parse_args(argv)
    overrides = [f"backend.dtype={given.dtype}", f"rollout.dtype={given.dtype}"]
    overrides += [f"rollout.sync.transport={given.transport}"]
    figures = {
        model: measure(model, given.backend, Path(given.dir), given.repeats, overrides) for model in given.models
    }
    print(json.dumps({**figures, "cores": len(os.sched_getaffinity(0)), "versions": shown_versions()}, indent=2))
    return 0


def measure(model: str, backend: str, folder: Path, repeats: int, overrides: Sequence[str]) -> dict[str, object]:
    """The figures of one size of model."""
    config = configuration(model, backend, folder, overrides)
    with contextlib.redirect_stdout(sys.stderr):  # what is printed there is JSON
        make_inputs(config, warm_start=False)
    with Session.open(config.ray.address) as session:
        stop_on_signals()
        shape = Shape.of(session)
        config = resolve_on(config, shape)
        plan = plan_processes(config, shape)
        roles = {name: role for name, role in plan.roles.items() if name in ROLES}
        roles["rollout"] = replace(roles["rollout"], factory=MeasuredWorker)
        homes = {role.processes for role in roles.values()}
        groups = start_groups(
            [one for one in plan.sets if one.name in homes],
            list(roles.values()),
            stall_s=config.run.stall_s,
            log_dir=Path(config.run.dir) / "logs",
        )
        with groups:
            replicas = groups.replicas(roles["rollout"])
            return _in_turns(config, groups[roles["actor"]], replicas, repeats, on_gpu=shape.gpus > 0)


def _in_turns(
    config: RLConfig,
    actor: WorkerGroup[ActorWorker],
    replicas: Sequence[WorkerGroup[RolloutWorker]],
    repeats: int,
    *,
    on_gpu: bool,
) -> dict[str, object]:
    owner = own_replicas(config, replicas, actor, [actor], on_gpus=on_gpu)
    (replica,) = cast(Sequence[WorkerGroup[MeasuredWorker]], replicas)
    owner.publish(0)
    nbytes = replica.rank_zero(MeasuredWorker.hold, config.actor.model.path).result()
    took: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        took.setdefault(name, []).append(seconds)

    def place(where: str) -> float:
        began = time.perf_counter()
        actor.broadcast(ActorWorker.place, where, where).result()
        return time.perf_counter() - began

    for number in range(1, repeats + 2):
        if number == 2:
            took.clear()  # what is set up once is not timed
        metrics = owner.publish(number)
        note("stream", metrics["timing_s/weight_sync/stream"])
        note("prove", metrics["timing_s/weight_sync/prove"])
        note("wake", metrics["timing_s/weight_sync/wake"])
        note("hand_over", nbytes / metrics["weight_sync/bytes_per_s"])
        note("reload", replica.rank_zero(MeasuredWorker.reload).result())
        note("copy", replica.rank_zero(MeasuredWorker.copy).result())
        note("fingerprints", metrics["timing_s/weight_sync/fingerprints"])
        if on_gpu:
            owner.switch_to_training()
            note("offload", place("host"))
            note("onload", place("device"))
        print(f"hand-over {number - 1} of {repeats}", file=sys.stderr, flush=True)
    best, middle = ({name: pick(seconds) for name, seconds in took.items()} for pick in (min, median))
    link: dict[str, object] = {}
    if on_gpu:
        out, back = replica.rank_zero(MeasuredWorker.link).result()
        sent = sum(one.numel for one in actor.rank_zero(ActorWorker.manifest).result().sent)
        moved = config.actor.backend.moved_width * sent
        link = {
            "link_gb_per_s": {"to_host": round(out / 1e9, 2), "to_device": round(back / 1e9, 2)},
            "offload_to_link": round(moved / middle["offload"] / out, 3),
            "onload_to_link": round(moved / middle["onload"] / back, 3),
        }
    return {
        "bytes": nbytes,
        "median_s": {name: round(seconds, 4) for name, seconds in middle.items()},
        "best_s": {name: round(seconds, 4) for name, seconds in best.items()},
        "gb_per_s": {name: round(nbytes / seconds / 1e9, 3) for name, seconds in middle.items() if seconds > 1e-5},
        "stream_to_reload": round(middle["stream"] / middle["reload"], 3),
        "hand_over_to_reload": round(middle["hand_over"] / middle["reload"], 3),
        "fingerprints_share": round(middle["fingerprints"] / middle["hand_over"], 3),
        **link,
        "repeats": repeats,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray bench weight-sync",
        description="Time the hand-over of weights from the actor to vLLM through shared memory, beside vLLM's own "
        "reload_weights of the same tensors in memory and a plain copy of their bytes.",
        allow_abbrev=False,
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["1m", "100m", "400m"],
                        help="1m 100m 400m; the others are for GPUs")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="hand-overs that count (5)")
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="engine", help="of the actor (engine)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both sides (float32)")
    wires = ("auto", *get_args(WireName))
    parser.add_argument("--transport", choices=wires, default="auto", help="rollout.sync.transport (auto)")
    parser.add_argument("--dir", default="outputs/bench", help="where its inputs are kept (outputs/bench)")
    return parser
