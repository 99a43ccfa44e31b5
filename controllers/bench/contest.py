"""Ways of training that take turns on the same rows.

Invariant: every contender computes the log-probs of the same rows of mixed lengths with
the same model in the same run, in its own processes. Their losses are printed, so that
a reader sees that they agree. Contenders take turns in rounds, so that a slow minute of
the machine does not count against one of them alone. Deliberately not here: the work of
a contender (`contender.py`), generation, and any Ray.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from controllers.bench import contender
from controllers.bench.contender import LONGEST, SHORTEST, ContenderTask, row_lengths
from controllers.bench.inputs import MODELS, Size, make_model, with_layers
from controllers.bench.processes import run_processes
from verl_ray.data.batch import Int64
from verl_ray.profiling.flops import (
    ModelShape,
    forward_flops,
    peak_flops_per_s,
    training_flops,
)
from verl_ray.profiling.memory import GIB

PASSES = ("forward", "forward_backward", "step")

Rounds = list[list[dict[str, Any]]]
"""The reports of a contender: one list per round, with one report per rank."""


@dataclass(frozen=True)
class Contender:
    """A way of training: plain PyTorch or a backend, on `world` ranks.

    Attributes:
        name: The name in the figures.
        kind: `PLAIN`, `SORTED` or the name of a backend.
        world: The number of ranks.
        settings: Settings of the backend, `key=value`.
        by_default: Whether it takes part without being named.
    """

    name: str
    kind: str
    world: int
    settings: tuple[str, ...] = ()
    by_default: bool = True


@dataclass(frozen=True)
class Contest:
    """A suite: its name, its contenders, and the contender that is the yardstick."""

    program: str
    about: str
    contenders: tuple[Contender, ...]
    yardstick: str

    def run(self, argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]] | None:
        """Measure the contenders.

        Returns:
            The flags, and the figures as they are printed: by contender, then the
            circumstances of the run. None where a GPU was requested and there is none;
            a sentence on stderr says it.
        """
        names = [contender.name for contender in self.contenders]
        options = _parser(self.program, self.about, names).parse_args(argv)

        chosen = self._chosen(options)
        if not chosen:
            print(
                f"{self.program}: --device cuda needs a GPU, and torch finds none on"
                " this machine",
                file=sys.stderr,
            )
            return None

        lengths = row_lengths(options.rows)
        rounds, shape = _measure(chosen, options)
        figures = {name: figures_of(rounds[name], lengths) for name in rounds}

        # This comes last, because on a GPU the question takes some of its memory.
        device, peak = _device(options.device, options.dtype)
        worlds = {contender.name: contender.world for contender in chosen}
        compare(figures, worlds, self.yardstick, shape, lengths, peak)

        return options, figures | _circumstances(options, lengths, device)

    def _chosen(self, options: argparse.Namespace) -> list[Contender]:
        """Return the requested contenders for which there are enough devices."""
        requested = set(options.only or ())
        if not options.only:
            requested = {each.name for each in self.contenders if each.by_default}
        if not options.alone:
            requested.add(self.yardstick)

        return [
            contender
            for contender in self.contenders
            if contender.name in requested
            and (options.device == "cpu" or contender.world <= _gpus())
        ]


def _measure(
    contenders: Sequence[Contender], options: argparse.Namespace
) -> tuple[dict[str, Rounds], ModelShape]:
    """Let the contenders take turns.

    Returns:
        The reports of each contender, by name, and the shape of the model.
    """
    cores = len(os.sched_getaffinity(0))
    rounds: dict[str, Rounds] = {contender.name: [] for contender in contenders}

    with tempfile.TemporaryDirectory() as folder:
        # Another process makes the model, because this one may not load torch.
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawning) as executor:
            size = _size(options)
            model = executor.submit(make_model, size, f"{folder}/model").result()
        model_config = json.loads((Path(model) / "config.json").read_text())
        shape = ModelShape.from_config(model_config)

        for turn, chosen in product(range(options.repeats), contenders):
            print(f"round {turn + 1}: {chosen.name} ...", file=sys.stderr, flush=True)
            task = ContenderTask(
                kind=chosen.kind,
                rank=0,
                world=chosen.world,
                device=options.device,
                dtype=options.dtype,
                model=model,
                rendezvous=f"{folder}/{turn}-{chosen.name}",
                rows=options.rows,
                threads=max(1, cores // chosen.world),
                micro_batch_tokens=options.micro_batch_tokens,
                settings=chosen.settings,
            )
            tasks = [asdict(replace(task, rank=rank)) for rank in range(chosen.world)]
            reports = run_processes(contender.__name__, tasks, task.threads)
            rounds[chosen.name].append(reports)

    return rounds, shape


def _size(options: argparse.Namespace) -> Size:
    """Return the size of the model that is trained."""
    size = MODELS[options.model]
    return size if options.layers is None else with_layers(size, options.layers)


def _circumstances(
    options: argparse.Namespace, lengths: Int64, device: str
) -> dict[str, Any]:
    """Return what the figures depend on, beside the contenders."""
    return {
        "rows": {
            "count": options.rows,
            "tokens": int(lengths.sum()),
            "shortest": SHORTEST,
            "longest": LONGEST,
        },
        "micro_batch_tokens": options.micro_batch_tokens,
        "model": options.model,
        "layers": _size(options).layers.num_layers,
        "layers_of_the_model": MODELS[options.model].layers.num_layers,
        "dtype": options.dtype,
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }


def figures_of(rounds: Rounds, lengths: Int64) -> dict[str, Any]:
    """Return the figures of one contender.

    The time of a pass is that of its slowest rank. The fastest round counts, because
    other work on the machine only makes a round slower. Memory is the sum of the ranks'
    peaks.
    """
    tokens = int(lengths.sum())
    seconds = {}
    for name in PASSES:
        slowest = [max(rank["seconds"][name] for rank in ranks) for ranks in rounds]
        seconds[name] = min(slowest)
    peaks = [sum(rank["peak_bytes"] for rank in ranks) for ranks in rounds]

    return {
        "tokens_per_s": {
            name: round(tokens / value) for name, value in seconds.items()
        },
        "best_s": {name: round(value, 4) for name, value in seconds.items()},
        "peak_memory_gib": round(max(peaks) / GIB, 3),
        "loss": sum(rank["loss"] for rank in rounds[0]),
    }


def compare(
    figures: dict[str, Any],
    worlds: dict[str, int],
    yardstick: str,
    shape: ModelShape,
    lengths: Int64,
    peak: float | None,
) -> None:
    """Add the relative speed and the model FLOPs utilization to each contender.

    Args:
        figures: The figures by contender; changed in place.
        worlds: The number of ranks of each contender.
        yardstick: The contender whose speed is 1, if it has taken part.
        shape: The sizes of the model.
        lengths: Tokens of each row, int64 [rows].
        peak: FLOPs per second of one device, or None where they are unknown.
    """
    forward = forward_flops(shape, lengths)
    training = training_flops(shape, lengths)
    flops = {"forward": forward, "forward_backward": training, "step": training}
    yardstick_s = figures[yardstick]["best_s"] if yardstick in figures else None

    for name, contender_figures in figures.items():
        best_s = contender_figures["best_s"]
        if yardstick_s is not None:
            contender_figures[f"times_{yardstick}"] = {
                key: round(yardstick_s[key] / value, 3) for key, value in best_s.items()
            }

        utilization: dict[str, float] | None = None
        if peak is not None:
            available = peak * worlds[name]
            utilization = {
                key: round(flops[key] / (best_s[key] * available), 4) for key in flops
            }
        contender_figures["model_flops_utilization"] = utilization


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _device(kind: str, dtype: str) -> tuple[str, float | None]:
    """Return the name of the device and its peak in FLOPs per second, where known."""
    if kind == "cpu":
        return kind, None
    import torch

    return torch.cuda.get_device_name(), peak_flops_per_s(torch.device(kind), dtype)


def _parser(
    program: str, about: str, contenders: Sequence[str]
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=(
            f"{about} Times forward, forward and backward, and whole optimizer steps,"
            f" and the peak of memory, on rows of {SHORTEST} to {LONGEST} tokens."
        ),
        allow_abbrev=False,
    )
    _add_model(parser)
    add = parser.add_argument
    add("--rows", type=int, default=64, metavar="N", help="rows of a batch (64)")
    add(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="rounds; the best time of each pass counts (3)",
    )
    add(
        "--micro-batch-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="at most, per rank (4096)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of computation (float32)",
    )
    add(
        "--only",
        nargs="+",
        choices=contenders,
        help="in addition to the yardstick (all)",
    )
    add(
        "--alone",
        action="store_true",
        help="without the yardstick, where it would not fit",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: one GPU per rank (cpu)",
    )
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model."""
    parser.add_argument(
        "--model",
        choices=list(MODELS),
        default="1m",
        help="parameters of the policy (1m)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="layers of the model, where fewer have to do (all)",
    )
