"""Ways of training that take turns on the same rows, and what of it is common to the suites that compare them.

Invariant: every contender computes the log-probs of the same rows of mixed lengths with the same model in the same run,
in processes of its own; their losses are printed, by which that can be seen. They take turns in rounds, so that a slow
minute of the machine is not one contender's alone. Deliberately not here: what a contender does (`contender.py`),
generation, and any Ray.
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
from controllers.bench.contender import LONGEST, SHORTEST, Work, row_lengths
from controllers.bench.processes import ask
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.batch import Int64
from verl_ray.profiling.flops import ModelShape, forward_flops, peak_flops_per_s, training_flops
from verl_ray.profiling.memory import GIB

PASSES = ("forward", "forward_backward", "step")


@dataclass(frozen=True)
class Contender:
    """A way of training: what it is called, plain PyTorch or a backend, its ranks, and settings of the backend."""

    name: str
    kind: str
    world: int
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Size:
    """A model to be made; its vocabulary is of characters without a meaning."""

    vocab_size: int
    layers: TinyModelConfig


MODELS = {
    "1m": Size(
        1024,
        TinyModelConfig(
            hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=384,
            tie_embeddings=True,
        ),
    ),
    "20m": Size(
        4096,
        TinyModelConfig(
            hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, head_size=64, intermediate_size=1408,
            tie_embeddings=True,
        ),
    ),
    "500m": Size(  # the sizes of Qwen2.5-0.5B
        151_936,
        TinyModelConfig(
            hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2, head_size=64, intermediate_size=4864,
            tie_embeddings=True,
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Contest:
    """A suite: its name, who takes part, and which of them is the yardstick."""

    program: str
    about: str
    contenders: tuple[Contender, ...]
    yardstick: str

    def run(self, argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]] | None:
        """The flags, and the figures as they are printed, by contender, with what was measured beside them; None, with
        a word on stderr, where there is no GPU and one was asked for."""
        given = _parser(self.program, self.about, [one.name for one in self.contenders]).parse_args(argv)
        wanted = {self.yardstick, *(given.only or [one.name for one in self.contenders])}
        contenders = [one for one in self.contenders if one.name in wanted]
        contenders = [one for one in contenders if given.device == "cpu" or one.world <= _gpus()]
        if not contenders:
            print(f"{self.program}: --device cuda needs a GPU, and torch finds none on this machine", file=sys.stderr)
            return None
        cores = len(os.sched_getaffinity(0))
        lengths = row_lengths(given.rows)
        told: dict[str, list[list[dict[str, Any]]]] = {one.name: [] for one in contenders}
        with tempfile.TemporaryDirectory() as folder:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:  # it loads torch
                model = other.submit(make_model, given.model, folder).result()
            shape = ModelShape.from_config(json.loads((Path(model) / "config.json").read_text()))
            for turn, one in product(range(given.repeats), contenders):
                print(f"round {turn + 1}: {one.name} ...", file=sys.stderr, flush=True)
                work = Work(
                    one.kind, 0, one.world, given.device, given.dtype, model, f"{folder}/{turn}-{one.name}", given.rows,
                    max(1, cores // one.world), given.micro_batch_tokens, one.settings,
                )  # fmt: skip
                ranks = [asdict(replace(work, rank=rank)) for rank in range(one.world)]
                told[one.name].append(ask(contender.__name__, ranks, work.threads))
        figures = {name: figures_of(rounds, lengths) for name, rounds in told.items()}
        device, peak = _device(given.device, given.dtype)
        compare(figures, {one.name: one.world for one in contenders}, self.yardstick, shape, lengths, peak)
        return given, {
            **figures,
            "rows": {"count": given.rows, "tokens": int(lengths.sum()), "shortest": SHORTEST, "longest": LONGEST},
            "micro_batch_tokens": given.micro_batch_tokens,
            "model": given.model,
            "dtype": given.dtype,
            "device": device,
            "cores": cores,
            "versions": {"python": platform.python_version(), "torch": version("torch")},
        }


def figures_of(rounds: list[list[dict[str, Any]]], lengths: Int64) -> dict[str, Any]:
    """Of one contender, from what its ranks found in each round. A pass takes what its slowest rank takes, and counts
    when it was fastest, since whatever else runs on the machine only slows it. Memory is the sum of the ranks' peaks.
    """
    seconds = {name: min(max(rank["seconds"][name] for rank in ranks) for ranks in rounds) for name in PASSES}
    return {
        "tokens_per_s": {name: round(int(lengths.sum()) / value) for name, value in seconds.items()},
        "best_s": {name: round(value, 4) for name, value in seconds.items()},
        "peak_memory_gib": round(max(sum(rank["peak_bytes"] for rank in ranks) for ranks in rounds) / GIB, 3),
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
    """Add to each contender's figures its speed as a multiple of the yardstick's, and the share of `peak` (FLOPs per
    second of one device) that the model's own arithmetic is. `worlds`: ranks of each."""
    passes = {"forward": forward_flops(shape, lengths)}
    passes["forward_backward"] = passes["step"] = training_flops(shape, lengths)
    slow = figures[yardstick]["best_s"]
    for name, one in figures.items():
        ranks = worlds[name]
        one[f"times_{yardstick}"] = {key: round(slow[key] / value, 3) for key, value in one["best_s"].items()}
        one["model_flops_utilization"] = peak and {
            key: round(flops / (one["best_s"][key] * peak * ranks), 4) for key, flops in passes.items()
        }


def make_model(name: str, folder: str) -> str:
    from verl_ray.data.tokenizers import character_tokenizer
    from verl_ray.models.tiny import make_tiny_qwen3

    size = MODELS[name]
    specials, first = 2, 0x10000  # the planes of Unicode above the surrogates
    alphabet = "".join(map(chr, range(first, first + size.vocab_size - specials)))
    character_tokenizer(f"{folder}/tokenizer", alphabet)
    return str(make_tiny_qwen3(f"{folder}/model", f"{folder}/tokenizer", size.layers, seed=0))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _device(kind: str, dtype: str) -> tuple[str, float | None]:
    """Its name, and its peak where that is known. Asked last: on a GPU the answer takes some of its memory."""
    if kind == "cpu":
        return kind, None
    import torch

    return torch.cuda.get_device_name(), peak_flops_per_s(torch.device(kind), dtype)


def _parser(program: str, about: str, contenders: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=f"{about} Of forward, forward and backward, and whole optimizer steps, with the peak of memory, on "
        f"rows of {SHORTEST} to {LONGEST} tokens.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=list(MODELS), default="1m", help="parameters of the policy (1m)")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="rows of a batch (64)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds; each pass's best counts (3)")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096, metavar="N", help="at most, per rank (4096)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of computation (float32)")
    parser.add_argument("--only", nargs="+", choices=contenders, help="beside the yardstick (all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU per rank (cpu)")
    return parser
