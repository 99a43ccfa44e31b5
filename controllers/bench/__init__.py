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

SUITES = ("data", "fsdp", "layouts", "megatron", "megatron_fsdp_memory", "rollout", "step", "weight-sync")


def main(argv: list[str]) -> int:
    """Run the suite that `argv` begins with, with the flags behind it; returns the exit code."""
    suite, *flags = argv
    if suite not in SUITES:
        print(f"verl-ray bench: no suite {suite!r}. {did_you_mean(suite, list(SUITES), 'suite')}", file=sys.stderr)
        return 2
    run = cast(Callable[[list[str]], int], importlib.import_module(f"controllers.bench.{suite.replace('-', '_')}").main)
    return run(flags)
