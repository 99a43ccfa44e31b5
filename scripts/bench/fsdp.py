"""The suite `fsdp`: speed and memory of the training backends, compared with plain
PyTorch on the same rows.
"""

from __future__ import annotations

import argparse
from typing import Any

from scripts.bench.contest import (
    LONGEST,
    PLAIN,
    SHORTEST,
    SORTED,
    Contender,
    compare,
    device_peak,
    figures_of,
    measure,
    padded_batches,
    row_lengths,
)
from scripts.bench.inputs import MODELS
from scripts.bench.suite import Flags, circumstances, print_json, progress
from verl_ray.columns.batch import Int64

CONTENDERS = (
    Contender("plain", PLAIN, 1),
    # Rows sorted by length have the least padding that is possible.
    Contender("plain_sorted", SORTED, 1),
    Contender("engine_1", "engine", 1),
    Contender("fsdp_1", "fsdp", 1),
    Contender("fsdp_2", "fsdp", 2),
    # Weights, gradients and moments stay on the host.
    Contender(
        "fsdp_1_host",
        "fsdp",
        1,
        ("host_parameters=true", "activation_checkpointing=true"),
        by_default=False,
    ),
)


def main(argv: list[str]) -> int:
    """Run the suite and print its figures: by contender, then those of the run.

    Returns:
        The exit code: 0, or 2 where a GPU was requested and there is none.
    """
    flags = _flags()
    options = flags.parse_args(argv)
    chosen = _chosen(options)
    if not chosen:
        progress(
            f"{flags.prog}: --device cuda needs a GPU, and torch finds none on this"
            " machine"
        )
        return 2

    lengths = row_lengths(options.rows)
    rounds, shape = measure(chosen, options)
    figures: dict[str, Any] = {
        name: figures_of(rounds[name], lengths) for name in rounds
    }

    # This comes last, because on a GPU the question takes some of its memory.
    device, peak = device_peak(options.device, options.dtype)
    worlds = {contender.name: contender.world for contender in chosen}
    compare(figures, worlds, shape, lengths, peak)

    figures |= {
        "rows": {
            "count": options.rows,
            "tokens": int(lengths.sum()),
            "shortest": SHORTEST,
            "longest": LONGEST,
        },
        "micro_batch_tokens": options.micro_batch_tokens,
        "model": options.model,
        "layers": shape.num_layers,
        "layers_of_the_model": MODELS[options.model].layers.num_layers,
        "dtype": options.dtype,
        "device": device,
        **circumstances(),
    }
    if figures.keys() >= {"engine_1", PLAIN, SORTED}:
        figures["packing"] = _packing(figures, lengths, options.micro_batch_tokens)
    print_json(figures)
    return 0


def _flags() -> Flags:
    flags = Flags(
        "fsdp",
        "Tokens per second of the engine and fsdp backends, beside plain PyTorch on"
        " padded rows. Times forward, forward and backward, and whole optimizer steps,"
        f" and the peak of memory, on rows of {SHORTEST} to {LONGEST} tokens.",
    )
    flags.choice("--model", MODELS, "parameters of the policy")
    flags.number("--layers", None, "layers of the model, where fewer have to do", "all")
    flags.number("--rows", 64, "rows of a batch")
    flags.number("--repeats", 3, "rounds; the best time of each pass counts")
    flags.number("--micro-batch-tokens", 4096, "at most, per rank")
    flags.choice("--dtype", ("float32", "bfloat16"), "of computation")
    names = [contender.name for contender in CONTENDERS]
    flags.only(names, "in addition to plain PyTorch")
    about = "without plain PyTorch, where it would not fit"
    flags.add_argument("--alone", action="store_true", help=about)
    flags.choice("--device", ("cpu", "cuda"), "cuda: one GPU per rank")
    return flags


def _chosen(options: argparse.Namespace) -> list[Contender]:
    """Return the requested contenders for which there are enough devices."""
    requested = set(options.only or ())
    if not options.only:
        requested = {each.name for each in CONTENDERS if each.by_default}
    if not options.alone:
        requested.add(PLAIN)

    most = None if options.device == "cpu" else _gpus()
    return [
        contender
        for contender in CONTENDERS
        if contender.name in requested and (most is None or contender.world <= most)
    ]


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _packing(
    figures: dict[str, Any], lengths: Int64, max_tokens: int
) -> dict[str, float]:
    """Compare whole steps of padded and of packed rows.

    The padding is a fraction of the tokens that a padded step computes.
    """
    packed_s = figures["engine_1"]["best_s"]["step"]
    comparison = {"packed_step_s": packed_s}

    for contender, by_length in ((PLAIN, False), (SORTED, True)):
        name = "padded_sorted" if by_length else "padded"
        batches = padded_batches(lengths, max_tokens, by_length)
        computed = sum(len(rows) * int(lengths[rows].max()) for rows in batches)
        padding = 1 - int(lengths.sum()) / computed
        padded_s = figures[contender]["best_s"]["step"]

        comparison[f"{name}_step_s"] = padded_s
        comparison[f"{name}_padding_fraction"] = round(padding, 4)
        comparison[f"speedup_over_{name}"] = round(padded_s / packed_s, 3)

    return comparison
