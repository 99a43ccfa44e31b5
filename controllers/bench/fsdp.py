"""`verl-ray bench fsdp`: speed and memory of the training backends, compared with plain
PyTorch on the same rows.
"""

from __future__ import annotations

from typing import Any

from controllers.bench.contest import (
    PLAIN,
    SORTED,
    Contender,
    Contest,
    padded_batches,
    row_lengths,
)
from controllers.bench.suite import print_json
from verl_ray.data.batch import Int64

CONTEST = Contest(
    "fsdp",
    "Tokens per second of the engine and fsdp backends, beside plain PyTorch on padded"
    " rows.",
    (
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
    ),
    yardstick="plain",
)


def main(argv: list[str]) -> int:
    """Run the suite and print its figures.

    Returns:
        The exit code: 0, or 2 where a GPU was requested and there is none.
    """
    results = CONTEST.run(argv)
    if results is None:
        return 2
    options, figures = results

    if figures.keys() >= {"engine_1", PLAIN, SORTED}:
        lengths = row_lengths(options.rows)
        figures["packing"] = _packing(figures, lengths, options.micro_batch_tokens)
    print_json(figures)
    return 0


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
