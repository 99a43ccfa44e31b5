"""`verl-ray bench weight-sync`: weight syncs from a training group to a rollout engine,
compared with their bounds.

Invariant: a weight sync is the one of `train`: Ray, the wire, fingerprints, vLLM's
loading, and verification by log-probs. In turn with it the rollout process loads the
same tensors from its memory by vLLM's own `reload_weights`, and copies their bytes. So
a slow minute of the machine slows all of them. On a GPU that both share, the trainer's
state is offloaded and restored as well, compared with a plain copy between pinned
memory and the device. Deliberately not here: generation, and wires that leave the
machine.
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

from controllers.bench.inputs import POLICIES, run_with_inputs
from controllers.bench.step import shown_versions
from controllers.system.build import build_replicas
from controllers.system.plan import ClusterShape, plan_processes, resolve_on
from verl_ray.backends import BACKENDS
from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.config.rollout import WireName
from verl_ray.config.section import resolved
from verl_ray.config.tasks.rl import RLConfig
from workers.actor import ActorWorker
from workers.rollout import RolloutSpec, RolloutWorker

if TYPE_CHECKING:
    from torch import Tensor

    from verl_ray.rollout.base import RolloutEngine

ROLES = ("actor", "rollout")
LINK_BYTES = 1 << 30


class MeasuredWorker(RolloutWorker):
    """A replica that also measures the yardsticks of a weight sync."""

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        super().__init__(context, spec)
        self._device = context.device
        self._dtype = resolved(spec.config.dtype)

    def hold(self, path: str) -> int:
        """Read the weights of a model directory into the memory of the device.

        Returns:
            The bytes of the weights.
        """
        import torch
        from safetensors.torch import load_file

        dtype = getattr(torch, self._dtype)
        self._weights: dict[str, Tensor] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                self._weights[name] = tensor.to(self._device, dtype)

        self._copies = {name: tensor.clone() for name, tensor in self._weights.items()}
        return sum(tensor.nbytes for tensor in self._weights.values())

    def reload(self) -> float:
        """Return the seconds of vLLM's own `reload_weights` of these weights."""

        def run(engine: RolloutEngine) -> float:
            assert hasattr(engine, "core")
            with self._timed() as elapsed:
                engine.core.reload(self._weights.items())
            return elapsed[0]

        return self.server.run(run)

    def copy(self) -> float:
        """Return the seconds of a plain copy of their bytes, memory to memory."""
        with self._timed() as elapsed:
            for name, tensor in self._weights.items():
                self._copies[name].copy_(tensor)
        return elapsed[0]

    def link(self) -> tuple[float, float]:
        """Return bytes per second from the device to pinned host memory, and back."""
        import torch

        on_device = torch.empty(LINK_BYTES, dtype=torch.uint8, device=self._device)
        on_host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)

        with self._timed() as to_host:
            on_host.copy_(on_device)
        with self._timed() as to_device:
            on_device.copy_(on_host)
        return LINK_BYTES / to_host[0], LINK_BYTES / to_device[0]

    @contextlib.contextmanager
    def _timed(self) -> Iterator[list[float]]:
        """Time the block until the device has finished it.

        The yielded list holds the seconds once the block has ended.
        """
        import torch

        on_gpu = self._device != "cpu"
        if on_gpu:
            torch.cuda.synchronize()
        elapsed: list[float] = []
        start = time.perf_counter()

        yield elapsed

        if on_gpu:
            torch.cuda.synchronize()
        elapsed.append(time.perf_counter() - start)


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; return the exit code, 0."""
    options = _parser().parse_args(argv)
    overrides = [
        f"backend.dtype={options.dtype}",
        f"rollout.dtype={options.dtype}",
        f"rollout.sync.transport={options.transport}",
        f"placement={options.placement}",
    ]
    folder = Path(options.dir)
    figures = {
        model: measure(model, options.backend, folder, options.repeats, overrides)
        for model in options.models
    }

    cores = len(os.sched_getaffinity(0))
    result = {**figures, "cores": cores, "versions": shown_versions()}
    print(json.dumps(result, indent=2))
    return 0


def measure(
    model: str, backend: str, folder: Path, repeats: int, overrides: Sequence[str]
) -> dict[str, object]:
    """Return the figures of one size of model."""
    config = run_with_inputs(model, folder, overrides, backend=backend)

    log_dir = Path(config.run.dir) / "logs"
    with Session.open(config.ray.address, log_dir=log_dir) as session:
        stop_on_signals()
        shape = ClusterShape.of(session)
        config = resolve_on(config, shape)

        plan = plan_processes(config, shape)
        roles = {name: role for name, role in plan.roles.items() if name in ROLES}
        roles["rollout"] = replace(roles["rollout"], factory=MeasuredWorker)
        set_names = {role.processes for role in roles.values()}
        groups = start_groups(
            [processes for processes in plan.sets if processes.name in set_names],
            list(roles.values()),
            stall_s=config.run.stall_s,
            log_dir=Path(config.run.dir) / "logs",
        )

        with groups:
            contest = _SyncContest(
                config,
                groups[roles["actor"]],
                groups.replicas(roles["rollout"]),
                on_gpu=shape.gpus > 0,
            )
            return contest.run(repeats)


class _SyncContest:
    """Weight syncs and their yardsticks, in turns."""

    def __init__(
        self,
        config: RLConfig,
        actor: WorkerGroup[ActorWorker],
        replicas: Sequence[WorkerGroup[RolloutWorker]],
        *,
        on_gpu: bool,
    ) -> None:
        self._config = config
        self._actor = actor
        self._replicas = build_replicas(
            config, replicas, actor, [actor], on_gpus=on_gpu
        )
        measured = cast(Sequence[WorkerGroup[MeasuredWorker]], replicas)
        (self._replica,) = measured
        self._on_gpu = on_gpu
        self._seconds: dict[str, list[float]] = {}

    def run(self, repeats: int) -> dict[str, object]:
        """Return the figures of `repeats` rounds."""
        self._replicas.publish(0)
        hold = self._replica.rank_zero(
            MeasuredWorker.hold, self._config.actor.model.folder
        )
        nbytes = hold.result()

        for number in range(1, repeats + 2):
            if number == 2:
                self._seconds.clear()  # the first round does one-time set-up
            self._run_round(number, nbytes)
            done = f"weight sync {number - 1} of {repeats}"
            print(done, file=sys.stderr, flush=True)

        medians = {name: median(times) for name, times in self._seconds.items()}
        best = {name: min(times) for name, times in self._seconds.items()}
        share = medians["fingerprints"] / medians["hand_over"]
        figures: dict[str, object] = {
            "bytes": nbytes,
            "median_s": {name: round(value, 4) for name, value in medians.items()},
            "best_s": {name: round(value, 4) for name, value in best.items()},
            "gb_per_s": {
                name: round(nbytes / value / 1e9, 3)
                for name, value in medians.items()
                if value > 1e-5
            },
            "stream_to_reload": round(medians["stream"] / medians["reload"], 3),
            "hand_over_to_reload": round(medians["hand_over"] / medians["reload"], 3),
            "fingerprints_share": round(share, 3),
        }
        if self._on_gpu:
            figures |= self._link_figures(medians)
        return figures | {"repeats": repeats}

    def _run_round(self, number: int, nbytes: int) -> None:
        metrics = self._replicas.publish(number)
        self._note("stream", metrics["timing_s/weight_sync/stream"])
        self._note("prove", metrics["timing_s/weight_sync/prove"])
        self._note("wake", metrics["timing_s/weight_sync/wake"])
        self._note("hand_over", nbytes / metrics["weight_sync/bytes_per_s"])

        self._note("reload", self._replica.rank_zero(MeasuredWorker.reload).result())
        self._note("copy", self._replica.rank_zero(MeasuredWorker.copy).result())
        self._note("fingerprints", metrics["timing_s/weight_sync/fingerprints"])

        if self._on_gpu:
            self._replicas.switch_to_training()
            self._note("offload", self._place("host"))
            self._note("onload", self._place("device"))

    def _note(self, name: str, seconds: float) -> None:
        self._seconds.setdefault(name, []).append(seconds)

    def _place(self, where: str) -> float:
        """Move the actor's state, and return the seconds."""
        start = time.perf_counter()
        self._actor.broadcast(ActorWorker.place, where, where).result()
        return time.perf_counter() - start

    def _link_figures(self, medians: dict[str, float]) -> dict[str, object]:
        """Compare the offload of the trainer's state with the link to the device."""
        to_host, to_device = self._replica.rank_zero(MeasuredWorker.link).result()
        manifest = self._actor.rank_zero(ActorWorker.manifest).result()
        elements = sum(parameter.numel for parameter in manifest.sent)
        nbytes = self._config.actor.backend.offload_width * elements

        return {
            "link_gb_per_s": {
                "to_host": round(to_host / 1e9, 2),
                "to_device": round(to_device / 1e9, 2),
            },
            "offload_to_link": round(nbytes / medians["offload"] / to_host, 3),
            "onload_to_link": round(nbytes / medians["onload"] / to_device, 3),
        }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray bench weight-sync",
        description=(
            "Time weight syncs from the actor to vLLM, compared with vLLM's own"
            " reload_weights of the same tensors in memory and a plain copy of their"
            " bytes."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(POLICIES),
        default=["1m", "100m", "400m"],
        help="1m 100m 400m; the others are for GPUs",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="weight syncs that count (5)",
    )
    parser.add_argument(
        "--backend",
        choices=tuple(BACKENDS),
        default="engine",
        help="of the actor (engine)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of both sides (float32)",
    )
    wires = ("auto", *get_args(WireName))
    parser.add_argument(
        "--transport",
        choices=wires,
        default="auto",
        help="rollout.sync.transport (auto)",
    )
    parser.add_argument(
        "--placement",
        choices=("colocated", "separate"),
        default="colocated",
        help="separate: each role has GPUs of its own (colocated)",
    )
    parser.add_argument(
        "--dir",
        default="outputs/bench",
        help="where its inputs are kept (outputs/bench)",
    )
    return parser
