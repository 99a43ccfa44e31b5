"""The suite `schedule`: the schedules of rollouts and training, compared with the
synchronous one.

Invariant: all schedules have the same processes, prompts, lengths of responses and rows
in flight, and take turns in every round. So a slow minute of the machine slows all of
them, and a ratio is of two blocks of the same round, which made the same steps one soon
after the other. Every block of steps begins without rollouts, so that none learns from
what was generated before it. What is learned does not matter, since the lengths are
forced.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from controllers.system.build import System, start
from controllers.system.plan import ROLLOUT, WORKERS, ClusterShape, resolve_on
from controllers.watch.measures import Metrics
from scripts.bench.inputs import run_with_inputs
from scripts.bench.running import cluster
from scripts.bench.schedule_run import (
    LEARNING,
    Lengths,
    Reaction,
    RecordingWorker,
    ScheduleTrainer,
    graded,
    percentiles,
    replaced,
)
from scripts.bench.suite import Flags, circumstances, markdown, print_json
from verl_ray.cluster.session import Session
from verl_ray.config.tasks.rl import RLConfig

SYNCHRONOUS = "synchronous"
"""The schedule that the others are compared with."""

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
_UNEQUAL = (SYNCHRONOUS, "one_step_off")
_COLOCATED = (SYNCHRONOUS, "carry_over")

CASES: Mapping[str, Comparison] = {
    "equal": Comparison("separate", Lengths("equal", 64), 10, _SEPARATE),
    "tail": Comparison("separate", Lengths("tail", 192), 44, _SEPARATE),
    "long_updates": Comparison("separate", Lengths("equal", 12), 40, _UNEQUAL),
    "long_rollouts": Comparison("separate", Lengths("equal", 192), 3, _UNEQUAL),
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
    flags = _flags()
    options = flags.parse_args(argv)
    cases = TINY if options.tiny else CASES
    if options.only is not None:
        cases = {name: case for name, case in cases.items() if name in options.only}
    if not cases:
        flags.error(f"--tiny has the cases {', '.join(TINY)}")
    load_before = os.getloadavg()[0]

    blocks: dict[str, dict[str, list[Block]]] = {}
    first = _configuration(options, next(iter(cases.values())), SYNCHRONOUS)
    with (
        contextlib.redirect_stdout(sys.stderr),  # stdout is for the figures
        cluster(first) as (session, shape),
    ):
        for placement in dict.fromkeys(case.placement for case in cases.values()):
            blocks |= _measure(options, session, shape, cases, placement)

    cases_measured = {name: figures(blocks[name]) for name in blocks}
    if options.table:
        print(table(cases_measured))
        return 0
    load = [round(load_before, 1), round(os.getloadavg()[0], 1)]
    print_json({**cases_measured, "load": load, **circumstances()})
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
    shape: ClusterShape,
    cases: Mapping[str, Comparison],
    placement: str,
) -> dict[str, dict[str, list[Block]]]:
    """Return the blocks of all cases with a placement, by case and schedule."""
    chosen = {name: case for name, case in cases.items() if case.placement == placement}
    most = max(case.lengths.most for case in chosen.values())
    system_config = _configuration(
        options,
        next(iter(chosen.values())),
        SYNCHRONOUS,
        f"rollout.max_response_tokens={most}",
    )
    workers = {**WORKERS, ROLLOUT: RecordingWorker}

    blocks: dict[str, dict[str, list[Block]]] = {
        name: {schedule: [] for schedule in case.schedules}
        for name, case in chosen.items()
    }
    with start(resolve_on(system_config, shape), session, workers) as system:
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

    began_s = time.perf_counter()
    numbers = range(options.warmup + 1, options.warmup + options.steps + 1)
    metrics = [trainer.step(number) for number in numbers]
    elapsed_s = time.perf_counter() - began_s

    replica = trainer.end()
    driver = trainer.record
    reactions: dict[str, list[Reaction]] = {"graded": graded(replica.ended, driver)}
    # Where the number follows the engine, it is not known when a group has capacity.
    concurrency = config.rollout.concurrency
    if isinstance(concurrency, int):
        reactions["replaced"] = replaced(replica, driver, concurrency, GROUP_SIZE)
    return Block(elapsed_s / options.steps, metrics, reactions)


def _flags() -> Flags:
    flags = Flags(
        "schedule",
        "Time steps of GRPO under every schedule: with the trainers on one core and the"
        " rollouts on another, with responses of one length and with heavy-tailed"
        " lengths; and on all cores, with the same tail.",
    )
    flags.only([*CASES], "cases")
    flags.number("--rounds", 3, "rounds")
    about = "steps that count, of each schedule in each round"
    flags.number("--steps", 5, about)
    flags.number("--warmup", 2, "steps before those that count")
    about = "only show that everything works"
    flags.add_argument("--tiny", action="store_true", help=about)
    flags.table()
    flags.folder()
    flags.overrides()
    return flags


# -------------------------------------------------------------------------- the figures


SECONDS = (
    "gen",
    "ref",
    "update_actor",
    "drain",
    "update_weights",
    "weight_sync/pause",
    "queue",
    "controller",
)
"""Timings of a step that are shown, in medians."""

MEANS = (
    "perf/trainers_idle",
    "perf/rollouts_idle",
    "perf/overlap",
    "staleness/age_mean",
    "staleness/rows_of_several_versions",
    "rollout_corr/k3_kl",
    "response_length/mean",
)
"""Metrics of a step that are shown, in means."""


@dataclass(frozen=True)
class Block:
    """Steps of one schedule, one after another.

    Attributes:
        step_s: Mean seconds of a step, with what is between two of them.
        metrics: The metrics of each step.
        reactions: The driver's reactions to finished rows, by kind.
    """

    step_s: float
    metrics: list[Metrics]
    reactions: Mapping[str, Sequence[Reaction]]


def figures(blocks: Mapping[str, Sequence[Block]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each schedule of a case, whose blocks are in rounds.

    Ratios are left out where there is no synchronous schedule.
    """
    by_schedule = {schedule: _figures(own) for schedule, own in blocks.items()}
    synchronous = blocks.get(SYNCHRONOUS)
    if synchronous is None:
        return by_schedule

    for schedule, own in blocks.items():
        rounds = zip(synchronous, own, strict=True)
        ratios = [first.step_s / block.step_s for first, block in rounds]
        least_s = min(block.step_s for block in own)
        by_schedule[schedule] |= {
            "ratio": round(median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "best_ratio": round(
                min(block.step_s for block in synchronous) / least_s, 3
            ),
        }
    return by_schedule


def _figures(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the figures of one schedule that need no other."""
    steps = [metrics for block in blocks for metrics in block.metrics]
    seconds = {
        name: round(median(step[f"timing_s/{name}"] for step in steps), 4)
        for name in SECONDS
        if f"timing_s/{name}" in steps[0]
    }
    means = {
        name: round(fmean(step[name] for step in steps), 6)
        for name in MEANS
        if name in steps[0]
    }

    reactions: dict[str, list[Reaction]] = {}
    for block in blocks:
        for kind, block_reactions in block.reactions.items():
            reactions.setdefault(kind, []).extend(block_reactions)
    return {
        "step_s": round(median(step["timing_s/step"] for step in steps), 4),
        "mean_step_s": round(fmean(block.step_s for block in blocks), 4),
        "seconds": seconds,
        **means,
        "reactions": {kind: percentiles(all_) for kind, all_ in reactions.items()},
    }


_COLUMNS = (
    *("case", "schedule", "s per step", "x synchronous", "best", "trainers idle"),
    *("rollouts idle", "overlap", "age", "k3 KL", "sync s", "pause s", "drain s"),
    *("graded, p99 ms", "replaced, p99 ms"),
)


def table(cases: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the figures of all cases as a table in Markdown.

    Reactions are those while the trainer computes.
    """
    rows = [
        [case, schedule, *_cells(shown)]
        for case, schedules in cases.items()
        for schedule, shown in schedules.items()
    ]
    return markdown(_COLUMNS, rows)


def _cells(shown: Mapping[str, Any]) -> list[str]:
    """Return the cells of one schedule in a case."""
    seconds = shown["seconds"]
    ratios = [shown.get(name) for name in ("ratio", "best_ratio")]
    reactions = [
        shown["reactions"].get(kind, {}).get(LEARNING, {}).get("p99_ms")
        for kind in ("graded", "replaced")
    ]
    return [
        f"{shown['step_s']:.2f}",
        *(_shown(ratio, ".2f") for ratio in ratios),
        f"{shown['perf/trainers_idle']:.0%}",
        f"{shown['perf/rollouts_idle']:.0%}",
        f"{shown['perf/overlap']:.0%}",
        _shown(shown.get("staleness/age_mean"), ".2f"),
        f"{shown['rollout_corr/k3_kl']:.1e}",
        f"{seconds['update_weights']:.3f}",
        f"{seconds['weight_sync/pause']:.3f}",
        f"{seconds.get('drain', 0):.3f}",
        *(_shown(p99_ms, ".0f") for p99_ms in reactions),
    ]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
