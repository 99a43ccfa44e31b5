"""`verl-ray bench megatron`: tokens per second and memory of layouts, beside the plain engine on the same rows.

Deliberately not here: how contenders are measured (`contest.py`), and whether layouts agree (`layouts.py`).
"""

from __future__ import annotations

import json

from controllers.bench.contest import Contender, Contest

CONTEST = Contest(
    "verl-ray bench megatron",
    "Tokens per second of megatron's layouts and of Megatron-FSDP, beside the plain engine.",
    (
        Contender("engine", "engine", 1),
        Contender("tp1", "megatron", 1),
        Contender("tp2", "megatron", 2, ("tensor_parallel=2", "sequence_parallel=true")),
        Contender("pp2", "megatron", 2, ("pipeline_parallel=2",)),
        Contender("dp2", "megatron", 2),
        Contender("megatron_fsdp_2", "megatron_fsdp", 2),
    ),
    yardstick="engine",
)


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; returns 0, or 2 where there is no GPU and one was asked for."""
    found = CONTEST.run(argv)
    if found is None:
        return 2
    print(json.dumps(found[1], indent=2))
    return 0
