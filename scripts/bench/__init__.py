"""The benchmarks: suites that measure this machine and print figures as JSON.

Invariant: every figure comes with its yardstick, measured in the same run, because
machines differ and are shared. Figures of other machines are in `README.md`.

A suite is a module that says what is measured, and a line in `SUITES`. It takes flags,
rounds and tables from `suite.py`, its inputs from `inputs.py`, and its processes from
one of these: `running.py` (the actor and the replicas of a run), `processes.py` (ranks
of a training backend, without a cluster), `contest.py` (backends that take turns),
`raw.py` (vLLM and PyTorch without us). `agents.py` has its engine in its own process.

It may import what `scripts` may.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import cast

from verl_ray.suggest import did_you_mean

SUITES = {
    "agents": (
        "episodes of several turns, compared with the same turns drawn without an"
        " environment; and a thousand episodes at once"
    ),
    "broadcast": (
        "weights from several ranks to several receivers over gloo, by the number of"
        " ranks that broadcast, with the bytes of each process"
    ),
    "fsdp": (
        "the training backends on 1 and 2 ranks, compared with plain PyTorch on the"
        " same rows"
    ),
    "gpu": (
        "everything that only a GPU can show, one part after another, in under ten"
        " minutes"
    ),
    "layouts": "results of megatron in every layout, compared with the plain engine",
    "megatron_fsdp_memory": (
        "memory of a rank under each sharding strategy, compared with the formula"
    ),
    "peaks": "the most memory of passes on a CPU, compared with the memory plan",
    "preferences": "steps of DPO, compared with TRL's DPOTrainer on the same pairs",
    "rollout": "the rollout servers, compared with vLLM's own offline `LLM.generate`",
    "schedule": "the schedules of rollouts and training, compared with each other",
    "step": (
        "whole training steps of a small GRPO run, compared with a floor of raw"
        " generation and raw training"
    ),
    "weight-sync": (
        "weights from a training group to a rollout engine, compared with vLLM's own"
        " reload and a copy"
    ),
}
"""The subject of each suite; the module of the same name runs it."""

_WIDTH = max(map(len, SUITES))

USAGE = f"""\
usage: python -m scripts.bench <suite> [flags of the suite]

Measure speed on this machine and print the figures as JSON.

suites:
{chr(10).join(f"  {name:<{_WIDTH}}  {about}" for name, about in SUITES.items())}

examples:
  python -m scripts.bench step
  python -m scripts.bench step --help
"""


def main(argv: list[str]) -> int:
    """Run the suite that `argv` begins with; the rest of `argv` are its flags.

    Returns:
        The exit code.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    suite, *flags = argv
    if suite not in SUITES:
        hint = did_you_mean(suite, list(SUITES), "suite")
        print(f"python -m scripts.bench: no suite {suite!r}. {hint}", file=sys.stderr)
        return 2

    module = importlib.import_module(f"scripts.bench.{suite.replace('-', '_')}")
    run = cast(Callable[[list[str]], int], module.main)
    return run(flags)
