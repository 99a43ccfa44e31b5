"""`verl-ray bench fsdp`: tokens per second and memory of the training backends, beside plain PyTorch on the same rows.

Deliberately not here: how contenders are measured (`contest.py`), and the head by itself (`head.py`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from controllers.bench import head
from controllers.bench.contender import PLAIN, SORTED, padded_batches, row_lengths
from controllers.bench.contest import Contender, Contest
from verl_ray.data.batch import Int64

CONTEST = Contest(
    "verl-ray bench fsdp",
    "Tokens per second of the engine and fsdp backends, beside plain PyTorch on padded rows.",
    (
        Contender("plain", PLAIN, 1),
        Contender("plain_sorted", SORTED, 1),  # by length: the least padding that rows can have
        Contender("engine_1", "engine", 1),
        Contender("fsdp_1", "fsdp", 1),
        Contender("fsdp_2", "fsdp", 2),
    ),
    yardstick="plain",
)


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; returns 0, or 2 where there is no GPU and one was asked for."""
    found = CONTEST.run(argv)
    if found is None:
        return 2
    given, figures = found
    if figures.keys() >= {"engine_1", PLAIN, SORTED}:
        figures["packing"] = _packing(figures, row_lengths(given.rows), given.micro_batch_tokens)
    if not given.only:
        print("the head ...", file=sys.stderr, flush=True)
        figures["head"] = head.measure(given.device, given.dtype, given.repeats, figures["cores"])
    print(json.dumps(figures, indent=2))
    return 0


def _packing(figures: dict[str, Any], lengths: Int64, max_tokens: int) -> dict[str, float]:
    """Whole steps of padded and of packed rows; padding as a fraction of the tokens that a padded step computes."""
    found = {"packed_step_s": figures["engine_1"]["best_s"]["step"]}
    for name, by_length in ((PLAIN, False), (SORTED, True)):
        of = "padded_sorted" if by_length else "padded"
        computed = sum(len(b) * int(lengths[b].max()) for b in padded_batches(lengths, max_tokens, by_length))
        found[f"{of}_step_s"] = figures[name]["best_s"]["step"]
        found[f"{of}_padding_fraction"] = round(1 - int(lengths.sum()) / computed, 4)
        found[f"speedup_over_{of}"] = round(found[f"{of}_step_s"] / found["packed_step_s"], 3)
    return found
