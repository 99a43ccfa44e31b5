"""Runs whose driver and replicas are killed again and again, and what becomes of them.

`tests/test_kills.py` does it with a few chosen faults. As a program this file kills at
random, in any phase, then lets the run end, and prints what each process did, how many
drivers died, whether the ledger has every prompt once, and where the schedule promises
it whether the bits are those of a run that nothing happened to::

    python -m tests.kills [--schedule NAME] [--kills 20] [--seed 0] [--steps N] [OVERRIDE ...]

A run that ends before so many drivers died has failed: it needs more steps.

Deliberately not here: how a fault happens (`tests/faults.py`).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.controllers.runs import Inputs, lasting, make_inputs
from tests.faults import PHASES, Fault
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.data.ledger import LEDGER, Event, read_parts
from verl_ray.tracking.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 480
ENDED, KILLED, STOPPED = 0, -9, 130
STEPS_PER_KILL = 4
"""By an estimate of 200 seeds, 20 deaths come within 18 to 66 steps."""

SCHEDULES = {
    "synchronous": (),
    "one_step_off": ("schedule=one_step_off", "placement=separate"),
    "asynchronous": ("schedule=asynchronous", "placement=separate"),
    "carry_over": ("schedule=carry_over",),
}
# No reference, whose process would only take time to start.
NO_DIVERGENCE = (
    "algorithm.kl=none",
)  # fmt: skip
RESTART_METRICS = (
    "rollout/restarts", "rollout/reissued", "episode/lost_processes", "episode/run_again",
)  # fmt: skip
"""Metrics that say what was lost. A lost replica takes its own counts with it."""


@dataclass(frozen=True)
class Run:
    """A run of a few steps, in one process after another.

    Attributes:
        inputs: Its model and data.
        folder: Its run.dir.
        schedule: Its schedule.
        steps: Number of its steps.
        changes: Further overrides.
        root: Its root config.
    """

    inputs: Inputs
    folder: Path
    schedule: str
    steps: int
    changes: Sequence[str] = ()
    root: str = "grpo"

    @property
    def arguments(self) -> list[str]:
        """The command that makes or continues the run."""
        return [
            "train", "--config-name", self.root, *self.inputs.rl(self.folder), *SCHEDULES[self.schedule],
            *(NO_DIVERGENCE if self.root == "grpo" else ()), f"run.total_steps={self.steps}", "run.evaluate_every=4",
            "run.checkpoint_every=2", "rollout.max_response_tokens=24",
            "rollout.health.interval_s=1", "run.recovery.max_restarts=9",
            "actor.mini_batch_size=16", *self.changes,
        ]  # fmt: skip

    def process(self, faults: Sequence[str], *changes: str) -> tuple[int, str]:
        """Make or continue the run in a process. Return its code and what it said."""
        ended = subprocess.run(
            [sys.executable, "-m", "tests.faults", *faults, "--", *self.arguments, *changes],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S,
        )  # fmt: skip
        return ended.returncode, ended.stdout

    def lines(self) -> list[dict[str, float]]:
        """Return the metrics that do not depend on speed or on the loss of replicas."""
        return [
            {
                name: value
                for name, value in lasting(line).items()
                if name not in RESTART_METRICS
            }
            for line in read_metrics(self.folder / "metrics.jsonl")
        ]

    def weights(self, role: str = "actor") -> dict[str, object]:
        """Return the last checkpoint's state of a role."""
        newest = (
            CheckpointStore(self.folder / "checkpoints", keep=2).latest().checkpoint
        )
        assert newest is not None and newest.step == self.steps
        target = self.folder / f"{role}.pt"
        dcp_to_torch_save(newest.role(role), target)
        state: dict[str, object] = torch.load(target, weights_only=False)
        return state

    def trained(self) -> list[int]:
        """Return the ordinals of every step in their order, over all restarts."""
        return self._ordinals(Event.TRAINED)

    def has_each_once(self) -> bool:
        """Return whether each prompt was trained once and in order, or rejected.

        Each step has learned from eight groups, those that were replayed included.
        """
        trained = self.trained()
        rejected = [
            each for each in self._ordinals(Event.REJECTED) if each < trained[-1]
        ]
        num_learned = len(trained) + len(self._ordinals(Event.REPLAYED))
        is_in_order = trained == sorted(trained) and num_learned == 8 * self.steps
        return is_in_order and sorted(trained + rejected) == list(
            range(trained[-1] + 1)
        )

    def _ordinals(self, event: Event) -> list[int]:
        rows = read_parts(self.folder / LEDGER).of(event)
        ordinals: list[int] = rows["ordinal"].tolist()
        return ordinals


def differences(left: object, right: object, where: str = "") -> Iterator[str]:
    """Yield the places at which two trees of values differ in a bit."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in left.keys() | right.keys():
            yield from differences(left.get(key), right.get(key), f"{where}/{key}")
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if not torch.equal(left, right):
            yield where
    # NaN is equal to itself here.
    elif left != right and not (left != left and right != right):
        yield f"{where}: {left} and {right}"


def steps_of(lines: list[dict[str, float]]) -> list[float]:
    return [line["training/global_step"] for line in lines]


# --------------------------------------------------------------------------- as a program


def random_faults(rng: random.Random) -> list[str]:
    """A driver that dies within a few steps, often after a replica."""
    faults = []
    if rng.random() < 0.4:
        faults.append(_random_fault(rng, "kill", "rollout-0", most=3))
    if rng.random() < 0.2:
        faults.append(_random_fault(rng, "hold", "rollout-0", most=3))
    action = "stop" if rng.random() < 0.2 else "kill"
    return [*faults, _random_fault(rng, action, "driver", most=5)]


def _random_fault(rng: random.Random, action: str, process: str, most: int) -> str:
    after_s = round(rng.choice([0.0, 0.05, 0.2]) * rng.random(), 3)
    fault = Fault(rng.choice(PHASES), rng.randint(1, most), action, process, after_s)
    return str(fault)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="one_step_off")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: 4 times --kills")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()

    steps = options.steps or STEPS_PER_KILL * options.kills
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "inputs").mkdir()
        inputs = make_inputs(folder / "inputs")
        run = Run(inputs, folder / "run", options.schedule, steps, options.overrides)
        if not dies_so_often(run, options.kills, random.Random(options.seed)):
            return 1
        return _report(run, folder)


def dies_so_often(run: Run, kills: int, rng: random.Random) -> bool:
    """Let drivers of a run die, then let it end; return whether so many have died.

    A process may also end without its fault, whose phase did not come so often.
    """
    died = 0
    code = KILLED
    # Starts one process per round, the last one without a fault. It ends with the run.
    while code != ENDED:
        faults = random_faults(rng) if died < kills else []
        code, output = run.process(faults)
        died += code in (KILLED, STOPPED)
        done = len(run.lines()) if (run.folder / "metrics.jsonl").exists() else 0
        print(f"{' '.join(faults)}: code {code}, {done} lines, {died} died", flush=True)
        if code not in (ENDED, KILLED, STOPPED):
            print(output)
            return False
    print(f"{died} of {kills} drivers died in {run.steps} steps")
    return died == kills


def _report(run: Run, folder: Path) -> int:
    prompts = 8 * run.steps
    is_exact = run.has_each_once()
    print(f"{prompts} prompts, each trained once and in order: {is_exact}")
    if run.schedule not in ("synchronous", "one_step_off"):
        return not is_exact

    whole = Run(run.inputs, folder / "whole", run.schedule, run.steps, run.changes)
    code, output = whole.process([])
    assert code == 0, output
    found = [
        *differences(_by_step(whole), _by_step(run)),
        *differences(whole.weights(), run.weights()),
    ]
    print("the same bits" if not found else "\n".join(["DIFFERENT", *found]))
    return bool(found) or not is_exact


def _by_step(run: Run) -> dict[float, dict[str, float]]:
    return {line["training/global_step"]: line for line in run.lines()}


if __name__ == "__main__":
    sys.exit(main())
