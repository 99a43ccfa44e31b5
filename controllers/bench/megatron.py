"""`verl-ray bench megatron`: speed and memory of megatron's layouts, compared with the
plain engine on the same rows. Whether layouts agree is measured by `layouts.py`.
"""

from __future__ import annotations

from controllers.bench.contest import Contender, Contest
from controllers.bench.suite import print_json

_TENSOR_PARALLEL = ("tensor_parallel=2", "sequence_parallel=true")

CONTEST = Contest(
    "megatron",
    "Tokens per second of megatron's layouts and of Megatron-FSDP, beside the plain"
    " engine.",
    (
        Contender("engine", "engine", 1),
        Contender("tp1", "megatron", 1),
        Contender("tp2", "megatron", 2, _TENSOR_PARALLEL),
        Contender("pp2", "megatron", 2, ("pipeline_parallel=2",)),
        Contender("dp2", "megatron", 2),
        Contender("megatron_fsdp_2", "megatron_fsdp", 2),
    ),
    yardstick="engine",
)


def main(argv: list[str]) -> int:
    """Run the suite and print its figures.

    Returns:
        The exit code: 0, or 2 where a GPU was requested and there is none.
    """
    results = CONTEST.run(argv)
    if results is None:
        return 2

    _, figures = results
    print_json(figures)
    return 0
