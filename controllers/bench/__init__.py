"""The command `bench`: suites that measure speed on this machine and print their figures as one JSON object.

Invariant: every figure comes with its yardstick, measured in the same run, since machines differ and are shared.
Deliberately not here: figures of other machines, and pass marks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import cast

from verl_ray.config.suggest import did_you_mean

SUITES = {
    "data": "split, concatenate, select, put and get rows, beside the memory bandwidth of the same minute",
    "fsdp": "the training backends on 1 and 2 ranks, beside plain PyTorch on the same rows",
    "layouts": "whether megatron computes in every layout what the plain engine computes",
    "megatron": "layouts of megatron, beside the plain engine on the same rows",
    "megatron_fsdp_memory": "memory of a rank by what ranks share out, beside the formula",
    "rollout": "the rollout servers, beside vLLM's own offline `LLM.generate`",
    "step": "whole training steps of a small GRPO run, beside a floor of raw generation and raw training",
    "weight-sync": "weights from a training group to a rollout engine, beside vLLM's own reload and a copy",
}
"""What each suite measures; the module of the same name runs it."""

_WIDTH = max(map(len, SUITES))

USAGE = f"""\
usage: verl-ray bench <suite> [flags of the suite]

Measure speed on this machine and print the figures as JSON.

suites:
{chr(10).join(f"  {name:<{_WIDTH}}  {about}" for name, about in SUITES.items())}

examples:
  verl-ray bench data
  verl-ray bench step --help
"""


def main(argv: list[str]) -> int:
    """Run the suite that `argv` begins with, with the flags behind it; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    suite, *flags = argv
    if suite not in SUITES:
        print(f"verl-ray bench: no suite {suite!r}. {did_you_mean(suite, list(SUITES), 'suite')}", file=sys.stderr)
        return 2
    run = cast(Callable[[list[str]], int], importlib.import_module(f"controllers.bench.{suite.replace('-', '_')}").main)
    return run(flags)
