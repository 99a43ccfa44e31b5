"""A trial of the components of a mixed reward on a sample of the records.

A component that returns None leaves a response to the others. How many records of a
sample each component scores says before the run whether it knows its task, and whether
some responses would have no score at all.

Invariant: user's code runs in a process that is killed at its deadline, never in this
one. Components that are models or services are not asked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np

from verl_ray.columns.stages import Bool
from verl_ray.config.reward import MixedReward, SingleReward
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.data_files import DataFile
from verl_ray.preflight.reward_trial import VALIDATION_KEY
from verl_ray.preflight.timed_scores import PROCESSES, score_in_time
from verl_ray.preflight.trial_requests import (
    as_the_run_asks,
    pair_of,
    requests_at,
    tokenizer_for,
)
from verl_ray.preflight.trials import Trials
from verl_ray.profiling.phases import blocking
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.request import ScoreRequest
from verl_ray.user_files import last_cause

SAMPLE_RECORDS = 16
"""Records of the sample, evenly spaced in the training data."""

LONGEST_S = 10.0
"""Seconds after which a component scores no further records of the sample."""


def try_components(config: Config, files: Sequence[DataFile]) -> Trials:
    """Let the components of a mixed reward score a sample of the training data.

    The response is a record's own answer, or its prompt if it has no answer. A reward
    that is not mixed has no trials here.

    Args:
        config: Configuration of the run, without `auto`.
        files: The data files of the run.
    """
    if not isinstance(config, RLConfig) or not isinstance(config.reward, MixedReward):
        return Trials()
    sample = _sample(files)
    if not sample:
        return Trials()
    sample = [as_the_run_asks(request, config) for request in sample]

    lines: list[str] = []
    warnings: list[str] = []
    is_left: Bool = np.ones(len(sample), np.bool_)
    for key, grader in config.graders.items():
        functions = grader.named_functions
        scores: list[Score] = []
        if functions is not None:
            with blocking(f"trying {key} on {len(sample)} records"):
                scores = _scores_of(key, grader, functions, sample, config)
            counts = Counter(score.health for score in scores)
            lines.append(_line(key, counts))
            warnings += _failures(key, scores)
        # A record that was not tried may have a score.
        declines = [score.health is ScoreHealth.NONE for score in scores]
        declines += [False] * (len(sample) - len(scores))
        is_left &= np.array(declines)

    if is_left.any():
        first = sample[int(is_left.argmax())].prompt
        warnings.append(
            f"all components of the reward return None for {int(is_left.sum())} of"
            f" {len(sample)} records of the training data: responses to them have no"
            " score, which counts as a failed one (max_failed_fraction). The first:"
            f" {first[:80]!r}"
        )
    return Trials(lines, warnings=warnings)


def _sample(files: Sequence[DataFile]) -> list[ScoreRequest]:
    """Return requests for records of the first file of training data."""
    for file in files:
        if file.prompts is None or file.key == VALIDATION_KEY:
            continue
        count = min(SAMPLE_RECORDS, file.prompts.num_rows)
        rows = np.arange(count) * file.prompts.num_rows // max(count, 1)
        return requests_at(file.prompts, rows.tolist())
    return []


def _scores_of(
    key: str,
    grader: SingleReward,
    functions: Mapping[str, str],
    sample: Sequence[ScoreRequest],
    config: Config,
) -> list[Score]:
    """Return the scores of the first records, of as many as the time allows."""
    tokenizer = tokenizer_for(functions, config)
    scored = score_in_time(
        functions,
        grader,
        f"{key}.functions",
        deque(sample),
        lambda request: pair_of(request, tokenizer)[:1],
        processes=min(PROCESSES, len(sample)),
        at_once=PROCESSES,
        longest_s=LONGEST_S,
    )
    return [score for _, (score,) in scored]


def _line(key: str, counts: Counter[ScoreHealth]) -> str:
    total = counts.total()
    declined = counts[ScoreHealth.NONE]
    leaves = f", and leaves {declined} to the others" if declined else ""
    return f"{key} scores {counts[ScoreHealth.OK]} of {total} sample records{leaves}"


def _failures(key: str, scores: Sequence[Score]) -> list[str]:
    """Return a warning about records that a component fails on, if there are any."""
    kinds = (ScoreHealth.OK, ScoreHealth.NONE)
    failed = [score for score in scores if score.health not in kinds]
    if not failed:
        return []
    return [
        f"{key} fails on {len(failed)} of {len(scores)} sample records, of which"
        f" {key}.max_failed_fraction bounds the share in a step. The first:"
        f" {last_cause(failed[0].detail)}"
    ]
