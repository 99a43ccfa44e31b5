"""`verl-ray bench schedule`: the schedules of rollouts and training, compared with the
synchronous one.

Invariant: all schedules have the same processes, prompts, lengths of responses and rows
in flight, and take turns in every round. So a slow minute of the machine slows all of
them, and the ratios of a round are of the same work. Every block of steps begins
without rollouts, so that none learns from what was generated before it. Deliberately
not here: what is learned, since the lengths are forced; evaluation and checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from controllers.bench.inputs import run_with_inputs
from controllers.bench.schedule_figures import SYNCHRONOUS, Block, figures, table
from controllers.bench.schedule_reactions import Reaction, graded, replaced
from controllers.bench.schedule_replica import Lengths, RecordingWorker
from controllers.bench.schedule_trainer import ScheduleTrainer
from controllers.bench.step import shown_versions
from controllers.system.build import System, start
from controllers.system.plan import ROLLOUT, WORKERS, ClusterShape, resolve_on
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.config.tasks.rl import RLConfig

GROUP_SIZE = 4

MODEL = (
    "prepare.model.hidden_size=64",
    "prepare.model.num_layers=12",
    "prepare.model.num_heads=2",
    "prepare.model.num_kv_heads=2",
    "prepare.model.intermediate_size=192",
    "rollout.kv_cache_gib=0.25",
)
"""A narrow and deep model: as on a GPU, a token takes nearly as long for one row as for
many, so that the longest row decides how long generation takes."""

SCHEDULES: Mapping[str, tuple[str, ...]] = {
    SYNCHRONOUS: ("schedule=synchronous",),
    "one_step_off": ("schedule=one_step_off",),
    "asynchronous_recompute": ("schedule=asynchronous", "rollout.kv=recompute"),
    "asynchronous_keep": ("schedule=asynchronous", "rollout.kv=keep"),
    "carry_over": ("schedule=carry_over",),
}
"""The overrides of each schedule."""


@dataclass(frozen=True)
class Comparison:
    """Work, and the schedules that are compared with it.

    Attributes:
        placement: separate: trainers on one core, rollouts on another. colocated: both
            on all cores.
        lengths: The lengths of the responses.
        prompts: Prompts per step. On the machine of `README.md` a synchronous step
            generates for about as long as it learns.
        schedules: The schedules.
        overrides: Further settings.
    """

    placement: Literal["separate", "colocated"]
    lengths: Lengths
    prompts: int
    schedules: tuple[str, ...]
    overrides: tuple[str, ...] = ()


_SEPARATE = (
    SYNCHRONOUS,
    "one_step_off",
    "asynchronous_recompute",
    "asynchronous_keep",
)
_COLOCATED = (SYNCHRONOUS, "carry_over")

CASES: Mapping[str, Comparison] = {
    "equal": Comparison("separate", Lengths("equal", 64), 10, _SEPARATE),
    "tail": Comparison("separate", Lengths("tail", 192), 44, _SEPARATE),
    "reactions": Comparison(
        "separate",
        Lengths("tail", 64),
        16,
        ("asynchronous_keep",),
        ("rollout.concurrency=32", "rollout.stream_rows=1"),
    ),
    "tail_colocated": Comparison("colocated", Lengths("tail", 192), 26, _COLOCATED),
}
"""In the case "reactions" groups always wait for a replica, and every row is handed on
by itself."""

TINY: Mapping[str, Comparison] = {
    "equal": Comparison("separate", Lengths("equal", 4), 2, _SEPARATE),
    "reactions": Comparison(
        "separate",
        Lengths("tail", 16),
        2,
        ("asynchronous_keep",),
        ("rollout.concurrency=4", "rollout.stream_rows=1"),
    ),
    "tail_colocated": Comparison("colocated", Lengths("tail", 16), 2, _COLOCATED),
}
"""Cases that only show that everything works."""


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; return the exit code, 0."""
    options = _parser().parse_args(argv)
    cases = TINY if options.tiny else CASES
    load_before = os.getloadavg()[0]

    blocks: dict[str, dict[str, list[Block]]] = {}
    inputs = _configuration(options, next(iter(cases.values())), SYNCHRONOUS)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the figures
        log_dir = Path(inputs.run.dir) / "logs"
        with Session.open(inputs.ray.address, log_dir=log_dir) as session:
            stop_on_signals()  # again: Ray's own handler exits without a message
            for placement in ("separate", "colocated"):
                blocks |= _measure(options, session, cases, placement)

    cases_found = {name: figures(blocks[name]) for name in blocks}
    result = {
        **cases_found,
        "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "cores": len(os.sched_getaffinity(0)),
        "versions": shown_versions(),
    }
    print(table(cases_found) if options.table else json.dumps(result, indent=2))
    return 0


def _configuration(
    options: argparse.Namespace, case: Comparison, schedule: str, *more: str
) -> RLConfig:
    """Return the configuration of a schedule, with the model of all of them."""
    # Trainers and rollouts that are separate have one core each.
    threads = 1 if case.placement == "separate" else "auto"
    overrides = (
        *MODEL,
        *SCHEDULES[schedule],
        f"placement={case.placement}",
        f"run.threads_per_rank={threads}",
        f"data.prompts_per_step={case.prompts}",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.max_response_tokens={case.lengths.most}",
        *case.overrides,
        *more,
        *options.overrides,
    )
    return run_with_inputs("1m", options.dir, overrides)


def _measure(
    options: argparse.Namespace,
    session: Session,
    cases: Mapping[str, Comparison],
    placement: str,
) -> dict[str, dict[str, list[Block]]]:
    """Return the blocks of all cases with a placement, by case and schedule."""
    chosen = {name: case for name, case in cases.items() if case.placement == placement}
    most = max(case.lengths.most for case in chosen.values())
    of_system = _configuration(
        options,
        next(iter(chosen.values())),
        SYNCHRONOUS,
        f"rollout.max_response_tokens={most}",
    )
    shape = ClusterShape.of(session)
    workers = {**WORKERS, ROLLOUT: RecordingWorker}

    blocks: dict[str, dict[str, list[Block]]] = {
        name: {schedule: [] for schedule in case.schedules}
        for name, case in chosen.items()
    }
    with start(resolve_on(of_system, shape), session, workers) as system:
        if placement == "separate":
            pin(system)
        for number in range(options.rounds):
            for name, case in chosen.items():
                # Another schedule is the first in every round.
                first = number % len(case.schedules)
                order = case.schedules[first:] + case.schedules[:first]
                for schedule in order:
                    config = resolve_on(_configuration(options, case, schedule), shape)
                    block = _block(config, system, case, options)
                    blocks[name][schedule].append(block)
                    print(
                        f"round {number + 1}, {name}, {schedule}:"
                        f" {block.step_s:.3f} s per step",
                        flush=True,
                    )
    return blocks


def pin(system: System) -> None:
    """Bind the trainers to the first core and the replica to the last."""
    assert system.rollout is not None
    cores = sorted(os.sched_getaffinity(0))
    trainers = [
        member for group in system.models.values() for member in group.members()
    ]
    pairs = [(member, cores[0]) for member in trainers]
    pairs += [(member, cores[-1]) for member in system.rollout.members()]
    for member, core in pairs:
        assert member.process_info is not None
        for thread in Path(f"/proc/{member.process_info.pid}/task").iterdir():
            # A thread may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {core})


def _block(
    config: RLConfig, system: System, case: Comparison, options: argparse.Namespace
) -> Block:
    """Make steps of one schedule from its beginning, and return those that count."""
    trainer = ScheduleTrainer(config, system, case.lengths)
    trainer.begin(0)
    for number in range(options.warmup):
        trainer.step(number + 1)

    usage = _CpuUse()
    began_s = time.perf_counter()
    numbers = range(options.warmup + 1, options.warmup + options.steps + 1)
    metrics = [trainer.step(number) for number in numbers]
    elapsed_s = time.perf_counter() - began_s
    busy_elsewhere = usage.elsewhere_s() / elapsed_s

    replica = trainer.end()
    driver = trainer.record
    reactions: dict[str, list[Reaction]] = {"graded": graded(replica.ended, driver)}
    # Where the number follows the engine, it is not known when a group has capacity.
    concurrency = config.rollout.concurrency
    if isinstance(concurrency, int):
        reactions["replaced"] = replaced(replica, driver, concurrency, GROUP_SIZE)
    return Block(elapsed_s / options.steps, busy_elsewhere, metrics, reactions)


class _CpuUse:
    """The CPU time of other programs from now on, which make the figures worse."""

    def __init__(self) -> None:
        self._before_s = self._elsewhere_s()

    def elsewhere_s(self) -> float:
        """Return the CPU seconds since the beginning."""
        return self._elsewhere_s() - self._before_s

    def _elsewhere_s(self) -> float:
        times = psutil.cpu_times()
        driver = psutil.Process()
        own_s = 0.0
        # Ray's processes, and with them all workers, are descendants of this one.
        for process in (driver, *driver.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                user_s, system_s, *_ = process.cpu_times()
                own_s += user_s + system_s
        busy_s: float = times.user + times.nice + times.system
        return busy_s - own_s


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray bench schedule",
        description=(
            "Time steps of GRPO under every schedule: with the trainers on one core and"
            " the rollouts on another, with responses of one length and with"
            " heavy-tailed lengths; and on all cores, with the same tail."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (3)")
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help="steps that count, of each schedule in each round (5)",
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=2,
        metavar="N",
        help="steps before those that count (2)",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="only show that everything works"
    )
    parser.add_argument(
        "--table", action="store_true", help="a table in Markdown in place of JSON"
    )
    parser.add_argument(
        "--dir",
        default="outputs/bench",
        help="where its inputs are kept (outputs/bench)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides of the configuration",
    )
    return parser
