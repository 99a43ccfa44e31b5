"""The figures of `verl-ray bench schedule`: of each schedule, from its blocks of steps.

Invariant: a ratio is of two blocks of the same round, which made the same steps one
soon after the other. Deliberately not here: the measurement (`schedule.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from controllers.bench.schedule_reactions import LEARNING, Reaction, percentiles
from controllers.watch.measures import Metrics

SYNCHRONOUS = "synchronous"
"""The schedule that the others are compared with."""

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
        busy_elsewhere: Cores that other programs of the machine used meanwhile.
        metrics: The metrics of each step.
        reactions: The driver's reactions to finished rows, by kind.
    """

    step_s: float
    busy_elsewhere: float
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
        for kind, of_block in block.reactions.items():
            reactions.setdefault(kind, []).extend(of_block)
    return {
        "step_s": round(median(step["timing_s/step"] for step in steps), 4),
        "mean_step_s": round(fmean(block.step_s for block in blocks), 4),
        "busy_elsewhere": [round(block.busy_elsewhere, 2) for block in blocks],
        "seconds": seconds,
        **means,
        "reactions": {kind: percentiles(all_) for kind, all_ in reactions.items()},
    }


_COLUMNS = (
    "case",
    "schedule",
    "s per step",
    "x synchronous",
    "best",
    "trainers idle",
    "rollouts idle",
    "overlap",
    "age",
    "k3 KL",
    "sync s",
    "pause s",
    "drain s",
    "graded, p99 ms",
    "replaced, p99 ms",
)


def table(cases: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the figures of all cases as a table in Markdown.

    Reactions are those while the trainer computes.
    """
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for case, schedules in cases.items():
        for schedule, shown in schedules.items():
            cells = [case, schedule, *_cells(shown)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
