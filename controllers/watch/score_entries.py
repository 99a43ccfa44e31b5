"""Entries that reward functions return beside scores: metrics, and texts to read.

Invariant: a number of an entry is averaged over the responses that have it; a text is
never averaged. Entries of several graders have the grader's name before their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from controllers.watch.measures import Metrics, component_metrics, spread
from verl_ray.cluster.waiting import read
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import (
    Finish,
    Scores,
)
from verl_ray.data.buffer import Experience
from verl_ray.rewards.health import (
    ENVIRONMENT_PREFIX,
    Entries,
    entries_of,
    health_metrics,
)
from verl_ray.rewards.shaping import (
    ResponseScores,
    Shaping,
    component,
    response_scores,
)


def score_metrics(
    score: ResponseScores,
    raw: Mapping[str, ResponseScores],
    aborted: npt.NDArray[np.bool_],
) -> Metrics:
    """Return the scores of the responses, and how many of them failed.

    Scores are neither normalised nor clipped. The policy learns from
    `critic/rewards`.

    Args:
        score: Score of each response; of several graders, their weighted sum.
        raw: Scores of each grader.
        aborted: Responses to leave out of the statistics of `score`, bool [rows].
    """
    metrics = spread("critic/score", score.score[score.ok & ~aborted])
    metrics |= health_metrics(score.health.tolist())

    # These rows were scored again, since their first process died.
    rescored = sum(scored.rescored for scored in raw.values())
    metrics["reward_health/rescored"] = float(rescored)
    return metrics | component_metrics(raw, "reward")


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
                # All graders of an episode have what its environment has recorded.
                is_of_environment = name.startswith(ENVIRONMENT_PREFIX)
                entries[row][name if is_of_environment else prefix + name] = value
    return entries


def scored_metrics(groups: Experience, shaping: Shaping, stall_s: float) -> Metrics:
    """Return the metrics of the scores and entries of what was generated for a step.

    Args:
        groups: Responses of the step.
        shaping: How the scores of several graders are weighed.
        stall_s: Limit in seconds of reading from the store.
    """
    groups = groups.of_trajectories()
    raw_scores = response_scores(groups.scores)
    aborted = groups.rollouts.row("finish") == Finish.ABORTED
    weighed = shaping.weigh(raw_scores)
    metrics = score_metrics(weighed, raw_scores, aborted)
    return metrics | entry_metrics(read_entries(groups.scores, stall_s))


def entry_metrics(entries: Sequence[Entries]) -> Metrics:
    """Return reward/<entry>/mean of the responses of a step.

    What environments have recorded is episode/world/<name> over all data sources, and
    episode/world/<data source>/<name>.
    """
    metrics: Metrics = {}
    for name, mean in _means(entries).items():
        is_of_environment = name.startswith(ENVIRONMENT_PREFIX)
        metrics[name if is_of_environment else f"reward/{name}/mean"] = mean
    return metrics | _means([_without_source(row) for row in entries])


def _without_source(entries: Entries) -> Entries:
    """Return what an environment has recorded, without the name of a data source."""
    # A data source may have a slash in its name.
    return {
        ENVIRONMENT_PREFIX + name.rpartition("/")[2]: value
        for name, value in entries.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def held_out_entry_metrics(
    sources: Sequence[str], entries: Sequence[Entries], group_size: int
) -> Metrics:
    """Return val-aux/<data source>/<entry>/mean@N of held-out responses.

    The entries of environments are episode/world/<name>.

    Args:
        sources: Data source of each response, [rows].
        entries: Entries of each response, [rows].
        group_size: Number of responses per prompt.
    """
    metrics: Metrics = {}
    for source in sorted(set(sources)):
        source_entries = [
            row for name, row in zip(sources, entries, strict=True) if name == source
        ]
        means = _means(source_entries)
        means = {
            name: means[name]
            for name in means
            if not name.startswith(ENVIRONMENT_PREFIX)
        }
        means |= _means([_without_source(row) for row in source_entries])
        for name, mean in means.items():
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
