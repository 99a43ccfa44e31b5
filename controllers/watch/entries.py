"""Entries that reward functions return beside scores: metrics, and texts to read.

Invariant: a number of an entry is averaged over the responses that have it; a text is
never averaged. The entries of several graders have the grader's name before their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from controllers.watch import measures
from controllers.watch.measures import Metrics
from verl_ray.cluster.waiting import read
from verl_ray.data.buffer import Experience
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Finish, Scores
from verl_ray.rewards.health import Entries, entries_of
from verl_ray.rewards.shaping import Shaping, component


def read_entries(
    scores: Mapping[str, Sharded[Scores]], stall_s: float
) -> list[Entries]:
    """Return the entries of each response, from all graders.

    Only rows with entries are read from the store.

    Args:
        scores: Scores of the same responses by grader.
        stall_s: Limit in seconds of reading from the store.
    """
    texts: dict[str, dict[int, str]] = {}
    for role, rows in scores.items():
        numbers = np.flatnonzero(rows.row("has_entries"))
        texts[role] = {}
        if len(numbers):
            columns = read(rows.select(numbers), stall_s).entries.texts()
            texts[role] = dict(zip(numbers.tolist(), columns, strict=True))
    num_rows = max(len(rows) for rows in scores.values())
    return merged_entries(num_rows, texts)


def merged_entries(
    num_rows: int, texts: Mapping[str, Mapping[int, str]]
) -> list[Entries]:
    """Return the entries of each response, from all graders.

    Args:
        num_rows: Number of responses.
        texts: Entries by grader and by number of the response, as JSON objects.
    """
    entries: list[Entries] = [{} for _ in range(num_rows)]
    for role, rows in texts.items():
        prefix = "" if len(texts) == 1 else f"{component(role)}/"
        for row, text in rows.items():
            for name, value in entries_of(text).items():
                entries[row][prefix + name] = value
    return entries


def scored_metrics(groups: Experience, shaping: Shaping, stall_s: float) -> Metrics:
    """Return the metrics of the scores and entries of what was generated for a step.

    Args:
        groups: Responses of the step.
        shaping: How the scores of several graders are weighed.
        stall_s: Limit in seconds of reading from the store.
    """
    groups = groups.of_trajectories()
    raw_scores = measures.response_scores(groups.scores)
    aborted = groups.rollouts.row("finish") == Finish.ABORTED
    weighed = shaping.weigh(raw_scores)
    metrics = measures.score_metrics(weighed, raw_scores, aborted)
    return metrics | entry_metrics(read_entries(groups.scores, stall_s))


def entry_metrics(entries: Sequence[Entries]) -> Metrics:
    """Return reward/<entry>/mean of the responses of a step."""
    return {f"reward/{name}/mean": mean for name, mean in _means(entries).items()}


def held_out_entry_metrics(
    sources: Sequence[str], entries: Sequence[Entries], group_size: int
) -> Metrics:
    """Return val-aux/<data source>/<entry>/mean@N of held-out responses.

    Args:
        sources: Data source of each response, [rows].
        entries: Entries of each response, [rows].
        group_size: Number of responses per prompt.
    """
    metrics: Metrics = {}
    for source in sorted(set(sources)):
        of_source = [
            row for name, row in zip(sources, entries, strict=True) if name == source
        ]
        for name, mean in _means(of_source).items():
            metrics[f"val-aux/{source}/{name}/mean@{group_size}"] = mean
    return metrics


def _means(entries: Sequence[Entries]) -> dict[str, float]:
    """Return the mean of each entry that is a number, over the rows that have it."""
    numbers: dict[str, list[float]] = {}
    for row in entries:
        for name, value in row.items():
            if not isinstance(value, str):
                numbers.setdefault(name, []).append(value)
    return {name: float(np.mean(numbers[name])) for name in sorted(numbers)}
