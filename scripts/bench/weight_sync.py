"""The suite `weight-sync`: weight syncs from a training group to a rollout engine,
compared with their bounds.

Invariant: a weight sync is the one of `train`: Ray, the wire, fingerprints, vLLM's
loading, and verification by log-probs. In turn with it the rollout process loads the
same tensors from its memory by vLLM's own `reload_weights`, and copies their bytes. So
a slow minute of the machine slows all of them. On a GPU that both share, the trainer's
state is offloaded and restored as well, compared with a plain copy between pinned
memory and the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, get_args

from scripts.bench.inputs import POLICIES, run_with_inputs
from scripts.bench.running import ActorAndReplicas, actor_and_replicas, cluster
from scripts.bench.suite import Flags, circumstances, medians, print_json, rounds
from verl_ray.backends import BACKENDS
from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.rollout import WireName
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.model_files import model_size
from verl_ray.settings.section import resolved
from workers.actor import ActorWorker
from workers.rollout import RolloutSpec, RolloutWorker

if TYPE_CHECKING:
    from torch import Tensor

    from verl_ray.rollout.base import RolloutEngine

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
                weights = iter(self._weights.items())
                engine.core.call_workers("reload_weights", weights)
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
    options = _flags().parse_args(argv)
    overrides = [
        f"backend.dtype={options.dtype}",
        f"rollout.dtype={options.dtype}",
        f"rollout.sync.transport={options.transport}",
        f"placement={options.placement}",
    ]
    figures = {}
    for model in options.models:
        config = run_with_inputs(model, options.dir, overrides, backend=options.backend)
        figures[model] = measure(config, options.repeats)

    print_json(figures | circumstances())
    return 0


def measure(config: RLConfig, repeats: int) -> dict[str, object]:
    """Return the figures of one size of model."""
    with (
        cluster(config) as (_, shape),
        actor_and_replicas(config, shape, MeasuredWorker) as running,
    ):
        (member,) = running.members
        weights_path = running.config.actor.model.folder
        nbytes = member.rank_zero(MeasuredWorker.hold, weights_path).result()

        seconds = [
            _seconds_of_a_round(running, member, number + 1, nbytes)
            for number in rounds(repeats, "weight sync")
        ][1:]
        link = (
            member.rank_zero(MeasuredWorker.link).result() if running.on_gpus else None
        )

    figures = _figures(seconds, nbytes)
    if link is not None:
        offloaded = _offloaded_bytes(running.config)
        figures |= _link_figures(medians(seconds), offloaded, link)
    return figures | {"repeats": repeats}


def _seconds_of_a_round(
    running: ActorAndReplicas,
    member: WorkerGroup[MeasuredWorker],
    version: int,
    nbytes: int,
) -> dict[str, float]:
    """Publish a version, then do the same in the ways that it is compared with."""
    metrics = running.replicas.sync_weights(version)
    timing = "timing_s/weight_sync/"
    seconds = {
        name: metrics[f"{timing}{name}"]
        for name in ("stream", "prove", "wake", "fingerprints")
    }
    seconds["hand_over"] = nbytes / metrics["weight_sync/bytes_per_s"]
    seconds["reload"] = member.rank_zero(MeasuredWorker.reload).result()
    seconds["copy"] = member.rank_zero(MeasuredWorker.copy).result()

    if running.on_gpus:
        running.replicas.free_devices()
        running.replicas.device_sharing.switch_to("training")
        for name, where in (("offload", "host"), ("onload", "device")):
            start = time.perf_counter()
            running.actor.broadcast(ActorWorker.place, where, where).result()
            seconds[name] = time.perf_counter() - start
    return seconds


def _figures(seconds: list[dict[str, float]], nbytes: int) -> dict[str, object]:
    exact = {name: median(each[name] for each in seconds) for name in seconds[0]}
    return {
        "bytes": nbytes,
        "median_s": medians(seconds),
        "best_s": {
            name: round(min(each[name] for each in seconds), 4) for name in exact
        },
        "gb_per_s": {
            name: round(nbytes / value / 1e9, 3)
            for name, value in exact.items()
            if value > 1e-5
        },
        "stream_to_reload": round(exact["stream"] / exact["reload"], 3),
        "hand_over_to_reload": round(exact["hand_over"] / exact["reload"], 3),
        "fingerprints_share": round(exact["fingerprints"] / exact["hand_over"], 3),
    }


def _offloaded_bytes(config: Config) -> int:
    """Return the bytes of weights and optimizer that a rank of the actor holds."""
    actor = config.model_roles["actor"]
    model = model_size("actor", actor, config)
    memory = actor.backend.rank_memory(actor.num_ranks, model, model.parameters)
    return memory.persistent["weights"] + memory.persistent["optimizer"]


def _link_figures(
    median_s: dict[str, float], offloaded_bytes: int, link: tuple[float, float]
) -> dict[str, object]:
    """Compare the offload of the trainer's state with the link to the device."""
    to_host, to_device = link
    return {
        "link_gb_per_s": {
            "to_host": round(to_host / 1e9, 2),
            "to_device": round(to_device / 1e9, 2),
        },
        "offload_to_link": round(offloaded_bytes / median_s["offload"] / to_host, 3),
        "onload_to_link": round(offloaded_bytes / median_s["onload"] / to_device, 3),
    }


def _flags() -> Flags:
    flags = Flags(
        "weight-sync",
        "Time weight syncs from the actor to vLLM, compared with vLLM's own"
        " reload_weights of the same tensors in memory and a plain copy of their"
        " bytes.",
    )
    small = ["1m", "100m", "400m"]
    about = f"{' '.join(small)}; the others are for GPUs"
    flags.add_argument(
        "--models", nargs="+", choices=list(POLICIES), default=small, help=about
    )
    flags.number("--repeats", 5, "weight syncs that count")
    flags.choice("--backend", BACKENDS, "of the actor", "engine")
    flags.choice("--dtype", ("float32", "bfloat16"), "of both sides")
    flags.choice("--transport", ("auto", *get_args(WireName)), "rollout.sync.transport")
    about = "separate: each role has GPUs of its own"
    flags.choice("--placement", ("colocated", "separate"), about)
    flags.folder()
    return flags
