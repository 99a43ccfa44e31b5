"""Training rollouts that a run keeps for people to read.

Invariant: which groups of a step are kept follows from their prompts and lengths, not
from the order in which they were finished. A prompt that was chosen is most likely
chosen again where it returns, and in other runs on the same data. The driver copies the
rows that are kept, and no others, while the models learn.

`tracking.rollouts=sampled` orders the prompts of a step by their digests, which are as
good as random, and keeps the first `GROUPS`, or fewer where their rows are long. A
group is kept as a whole, unless it is too long by itself: then its first trajectories
are, each as a whole. Groups that `algorithm.replay` takes from earlier steps are kept
by `all` alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from controllers.watch.measures import Metrics
from controllers.watch.score_entries import read_entries
from controllers.watch.token_texts import Pieces
from verl_ray.agents.contract import End
from verl_ray.cluster.waiting import read
from verl_ray.columns.batch import Array, Int64
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import (
    Credit,
    Finish,
    Float32,
    LogProbs,
    Rollouts,
    Scores,
    last_rows,
)
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.data.token_versions import versions_of_tokens
from verl_ray.ops.masked import Moments
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.shaping import Shaping, component, failures, response_scores
from verl_ray.tracking.rollouts import RolloutFiles, RolloutTable
from workers.actor import advantages_in_loss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUPS = 2
"""Groups of a step that `tracking.rollouts=sampled` keeps."""

MOST_TOKENS = 1 << 16
"""Tokens of them together, which the driver decodes. Only a single trajectory, of which
the configuration bounds the length, may have more."""

# The last one is that of single responses.
_ENDS = [*(end.value for end in End), ""]


@dataclass(frozen=True)
class LearnedRollouts:
    """Rollouts of a step, and what it learns from them.

    Attributes:
        experience: The rollouts with their scores.
        credit: Their credit, row by row; None where the step learns nothing, since the
            run stops in it.
        log_probs: The trainer's log-probs before it learns; None where it computes them
            with the update alone.
        whitening: Moments by which the loss whitens advantages; None if it does not.
    """

    experience: Experience
    credit: Sharded[Credit] | None
    log_probs: Sharded[LogProbs] | None
    whitening: Moments | None

    def select(self, rows: Int64) -> LearnedRollouts:
        """Return the rows `rows`, int64 [rows], in this order."""
        log_probs, credit = self.log_probs, self.credit
        return LearnedRollouts(
            self.experience.select(rows),
            None if credit is None else credit.select(rows),
            None if log_probs is None else log_probs.select(rows),
            self.whitening,
        )


class RolloutRecord:
    """Writes the training rollouts that tracking.rollouts keeps.

    They are for people, so rollouts that cannot be recorded end no run: this is said
    once, and tried again with the next step.

    Attributes:
        metrics: What was written of the last step.
    """

    def __init__(self, config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Continue the files of the run's folder.

        Args:
            config: Configuration of the run.
            tokenizer: The tokenizer of the policy.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._pieces = Pieces(tokenizer)
        self._shaping = Shaping(config)
        tracking = config.tracking
        self.metrics: Metrics = {}
        self._files = RolloutFiles(Path(config.run.dir), tracking.rollouts_max_mb)

    def write(
        self, step: int, rollouts: LearnedRollouts, go_on: Callable[[], None]
    ) -> None:
        """Write the rollouts of a step that `chosen` named.

        Args:
            step: Number of the step, from 1.
            rollouts: These rollouts.
            go_on: Called between rows, so that the rest of the driver's work goes on.

        Raises:
            VerlRayError: The rows cannot be read from the object store, or `go_on`
                raised it.
        """
        num_rows = len(rollouts.experience.rollouts)
        if num_rows and not self._write(step, rollouts, go_on):
            num_rows = 0
        self.metrics = {
            "rollouts/recorded_rows": float(num_rows),
            "rollouts/recorded_every": float(self._files.every),
        }

    def write_failed(self, step: int, failed: Experience) -> None:
        """Write responses without a score, because of which the run stops in a step.

        Args:
            step: Number of the step, from 1.
            failed: The responses; `sampled` keeps as many as it has tokens for.

        Raises:
            VerlRayError: They cannot be read from the object store.
        """
        rows = np.arange(len(failed.rollouts), dtype=np.int64)
        if self._config.tracking.rollouts == "sampled":
            trajectory_id = failed.rollouts.row("trajectory_id")
            rows = _within_bound(rows, trajectory_id, failed.rollouts.lengths)
        self._write(step, LearnedRollouts(failed.select(rows), None, None, None), None)

    def _write(
        self, step: int, rollouts: LearnedRollouts, go_on: Callable[[], None] | None
    ) -> bool:
        """Write rollouts, at least one; return whether that was possible."""
        with self._files.tolerating(step):
            content = self._table(step, rollouts, go_on).encoded()
            return self._files.write(step, content, is_last=rollouts.credit is None)
        return False

    def chosen(
        self,
        step: int,
        group_id: Int64,
        trajectory_id: Int64,
        lengths: Int64,
        digests: Mapping[int, str],
    ) -> Int64:
        """Return the numbers of the rows of a step that are kept, ascending, int64.

        Args:
            step: Number of the step, from 1.
            group_id: int64 [rows], the group of each row.
            trajectory_id: int64 [rows], the trajectory of each row; its rows are
                adjacent.
            lengths: int64 [rows], tokens of each row.
            digests: A digest of each prompt, by the ordinal of its group.
        """
        if not self._files.keeps(step):
            return np.zeros(0, np.int64)
        if self._config.tracking.rollouts == "all":
            return np.arange(len(group_id), dtype=np.int64)
        groups = [group for group in np.unique(group_id).tolist() if group in digests]
        groups.sort(key=lambda group: (digests[group], group))
        groups = groups[:GROUPS]
        tokens = np.cumsum([lengths[group_id == group].sum() for group in groups])
        num_groups = max(1, int((tokens <= MOST_TOKENS).sum()))
        rows = np.flatnonzero(np.isin(group_id, groups[:num_groups]))
        if not len(rows):
            return rows

        # Only a single group may have more tokens than are kept.
        return _within_bound(rows, trajectory_id, lengths)

    def _table(
        self, step: int, rollouts: LearnedRollouts, go_on: Callable[[], None] | None
    ) -> RolloutTable:
        """Return rows, read from the object store, as columns."""
        stall_s = self._config.run.stall_s
        scores = rollouts.experience.scores
        rows = read(rollouts.experience.rollouts, stall_s)

        # A trajectory is scored as a whole, on the last of its rows.
        trajectory = rows.trajectory_id
        ends = last_rows(trajectory)
        number = np.searchsorted(ends, np.arange(rows.num_rows))
        last = ends[number]
        first = np.append(0, ends + 1)[number]
        entries = read_entries(scores, stall_s)
        texts = [json.dumps(row_entries, ensure_ascii=False) for row_entries in entries]
        has_score = self._shaping.weigh(response_scores(scores)).ok[last]
        has_reward = has_score & (rows.finish != Finish.ABORTED)

        tokens = self._token_columns(rows, rollouts)
        tokens["pieces"] = self._pieces.of_rows(rows, go_on)
        reward = np.full(rows.num_rows, np.nan)
        is_learned = np.zeros(rows.num_rows, np.bool_)
        if rollouts.credit is not None:
            reward = rollouts.credit.row("reward")
            in_loss = rollouts.credit.row("in_loss")
            is_learned = in_loss & (rows.response_length > 0)
        advantage = _means(tokens["advantages"], rows)
        columns: dict[str, Sequence[Any] | Array] = {
            "step": np.full(rows.num_rows, step),
            "ordinal": rows.group_id,
            "member": trajectory % self._config.rollout.group_size,
            "trajectory": trajectory,
            "row": np.arange(rows.num_rows) - first,
            "data_source": rows.data_source.texts(),
            "prompt": self._texts(rows, rows.offsets[:-1], rows.prompt_length),
            "response": self._texts(
                rows,
                rows.offsets[:-1] + rows.prompt_length,
                rows.lengths - rows.prompt_length,
            ),
            "answer": rows.answer.texts(),
            "reward": np.where(has_reward, reward, np.nan),
            "scores": _scores_by_grader(scores, last),
            "finish": [Finish(finish).name.lower() for finish in rows.finish],
            "end": ends_of_rows(rows),
            "failure": failures_of_rows(rows, scores, last, stall_s),
            "output": outputs_of_rows(rows),
            "entries": [texts[row] if entries[row] else "" for row in last],
            "num_turns": turns_of_rows(rows),
            "response_tokens": rows.response_length,
            "advantage": np.where(is_learned, advantage, np.nan),
            **columns_of_turns(rows),
        }
        return RolloutTable(columns, rows.offsets, tokens)

    def _token_columns(
        self, rows: Rollouts, rollouts: LearnedRollouts
    ) -> dict[str, Sequence[Any] | Array]:
        """Return the columns with one value per token, but for their texts."""
        mask = rows.response_mask
        stall_s = self._config.run.stall_s
        missing = np.float32(np.nan)
        log_probs = advantages = np.full(rows.num_tokens, missing)
        if rollouts.log_probs is not None:
            computed = read(rollouts.log_probs, stall_s).log_probs
            log_probs = np.where(mask, computed, missing)

        if rollouts.credit is not None:
            credit = read(rollouts.credit, stall_s)
            learned_from = advantages_in_loss(
                self._config.algorithm, rows, credit, rollouts.whitening
            )
            is_learned = mask & credit.in_loss[rows.row_of_token]
            advantages = np.where(is_learned, learned_from, missing)

        columns = sampled_columns(rows)
        return {**columns, "log_probs": log_probs, "advantages": advantages}

    def _texts(self, rows: Rollouts, starts: Int64, lengths: Array) -> list[str]:
        """Return parts of rows as text, without special tokens."""
        bounds = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        return [
            str(
                self._tokenizer.decode(rows.tokens[start:end], skip_special_tokens=True)
            )
            for start, end in bounds
        ]


def _within_bound(rows: Int64, trajectory_id: Int64, lengths: Int64) -> Int64:
    """Return those of some rows whose trajectories have `MOST_TOKENS` together.

    These are the first trajectories, and one in any case.

    Args:
        rows: Numbers of the rows, at least one, int64.
        trajectory_id: int64 [all rows].
        lengths: int64 [all rows], tokens of each row.
    """
    ends = last_rows(trajectory_id[rows])
    tokens = np.cumsum(lengths[rows])[ends]
    num_trajectories = max(1, int((tokens <= MOST_TOKENS).sum()))
    return rows[: ends[num_trajectories - 1] + 1]


def sampled_columns(rows: Rollouts) -> dict[str, Array]:
    """Return the columns that the sampler decides, [tokens] each; see `TOKEN_COLUMNS`.

    The texts of the tokens are not among them.
    """
    mask = rows.response_mask
    versions = np.full(rows.num_tokens, -1, np.int64)
    versions[mask] = versions_of_tokens(rows)
    return {
        "tokens": rows.tokens,
        "mask": mask,
        "rollout_log_probs": np.where(mask, rows.rollout_log_probs, np.float32(np.nan)),
        "versions": versions,
    }


def _means(values: Sequence[Any] | Array, rows: Rollouts) -> Float32:
    """Return the mean of each row over its response tokens, float32 [rows]."""
    mask = rows.response_mask
    sampled = np.asarray(values)[mask]
    sums = np.bincount(rows.row_of_token[mask], sampled, minlength=rows.num_rows)
    means: Float32 = (sums / np.maximum(rows.response_length, 1)).astype(np.float32)
    return means


def _scores_by_grader(
    scores: Mapping[str, Sharded[Scores]], last: Int64
) -> list[list[tuple[str, float | None]]]:
    """Return the scores of each row's trajectory by grader; None for a failed one."""
    by_row: list[list[tuple[str, float | None]]] = [[] for _ in last]
    for role, scored in scores.items():
        columns = scored.row("score")[last], scored.row("health")[last]
        for pairs, score, health in zip(by_row, *columns, strict=True):
            is_ok = health == ScoreHealth.OK
            pairs.append((component(role), float(score) if is_ok else None))
    return by_row


def ends_of_rows(rows: Rollouts) -> list[str]:
    """Return how the episode of each row ended; empty for single responses."""
    if rows.end is None:
        return [""] * rows.num_rows
    return [_ENDS[end] for end in rows.end]


def turns_of_rows(rows: Rollouts) -> Array:
    """Return the turns of the policy in each row's trajectory, [rows]."""
    if rows.num_turns is None:
        return np.ones(rows.num_rows, np.int32)
    return rows.num_turns


def columns_of_turns(rows: Rollouts) -> dict[str, list[list[Any]]]:
    """Return `TURN_COLUMNS` of each row; empty lists for single responses."""
    row_turns = [np.empty((0, 3))] * rows.num_rows
    if rows.turn_rewards is not None:
        turns = rows.turn_rewards
        row_turns = np.split(turns.values, turns.offsets[1:-1])
    return {
        "turns": [turns[:, 2].astype(int).tolist() for turns in row_turns],
        "turn_ends": [turns[:, 0].astype(int).tolist() for turns in row_turns],
        "turn_rewards": [turns[:, 1].tolist() for turns in row_turns],
    }


def outputs_of_rows(rows: Rollouts) -> list[str]:
    """Return what the command of each episode has printed, on its last row."""
    if rows.episode_record is None:
        return [""] * rows.num_rows
    records = rows.episode_record.texts()
    return [json.loads(text).get("output", "") if text else "" for text in records]


def failures_of_rows(
    rows: Rollouts,
    scores: Mapping[str, Sharded[Scores]],
    last: Int64,
    stall_s: float,
) -> list[str]:
    """Return what failed in each row's episode or in scoring it; empty if nothing.

    Args:
        last: The last row of the trajectory of each row, int64 [rows].
        stall_s: Limit in seconds of reading from the store.
    """
    reasons: list[list[str]] = [[] for _ in last]
    if rows.end_detail is not None:
        for row, detail in enumerate(rows.end_detail.texts()):
            if detail:
                reasons[row].append(detail)

    healths = {role: scored.row("health")[last] for role, scored in scores.items()}
    for role, has_failed in failures(healths).items():
        scored, health = scores[role], healths[role]
        failed = np.flatnonzero(has_failed)
        if not len(failed):
            continue
        details = read(scored.select(last[failed]), stall_s).detail.texts()
        for row, detail in zip(failed.tolist(), details, strict=True):
            kind = ScoreHealth(health[row]).name.lower()
            reasons[row].append(f"{component(role)}: {kind}: {detail}".strip(": "))
    return ["; ".join(row_reasons) for row_reasons in reasons]
