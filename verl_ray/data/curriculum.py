"""The choice of prompts that are drawn again, by the scores of their last groups.

A prompt whose last group scored low or high on average teaches little, so an epoch
draws a share of such prompts only, and none that are solved. Prompts that no group has
been trained of are always drawn. Prime-rl keeps three pools of tasks likewise; POLARIS
(2025) drops what is solved.

Invariant: what batch n holds follows from the data, the seed, and the scores of the
batches up to n - 1 - staleness. These are trained whenever the batch may be drawn, so
neither the order of completion nor a restart changes it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_ray.columns.batch import Int64
from verl_ray.columns.seeds import row_seeds
from verl_ray.columns.stages import Bool, Float32
from verl_ray.config.data import CurriculumConfig
from verl_ray.errors import CheckpointError

FILE = "curriculum.npz"
"""Name of the file in a checkpoint."""


@dataclass(frozen=True)
class _Trained:
    """The scores of a trained batch."""

    batch: int
    rows: Int64
    means: Float32


class Curriculum:
    """The mean score of the last group of each row of the data, and what is drawn."""

    def __init__(
        self, config: CurriculumConfig, num_rows: int, *, seed: int, staleness: int
    ) -> None:
        """Begin without scores.

        Args:
            config: Its settings.
            num_rows: Number of rows of all data sets.
            seed: The seed of the run.
            staleness: How many batches beyond the next one may be drawn.
        """
        self._config = config
        self._seed = seed
        self._staleness = staleness

        self._scores = np.full(num_rows, np.nan, np.float32)
        """Mean score of the last group of each row, NaN before its first one, as far as
        it counts for the oldest batch that is not trained."""
        self._is_useless = np.zeros(num_rows, np.bool_)
        """Rows that turned out to have no use as they were drawn."""
        self._later: list[_Trained] = []
        """Trained batches that do not count for it yet, in their order."""
        self._counted = self._scores
        """The scores that count for the batch that is drawn."""
        self._row_of: dict[int, int] = {}
        """Row of each ordinal that was drawn and has no scores yet."""
        self._noted: dict[int, tuple[int, float]] = {}
        """Row and mean score of each ordinal of the present batch."""

    @property
    def num_rows(self) -> int:
        """Number of rows of all data sets."""
        return len(self._scores)

    @property
    def is_exhausted(self) -> bool:
        """Whether every row is solved or has no use, so that none can be drawn."""
        return bool((self._is_solved(self._counted) | self._is_useless).all())

    def note_useless(self, rows: Int64) -> None:
        """Note rows that the run cannot use, int64 [rows]; they are passed over."""
        self._is_useless[rows] = True

    def begin_batch(self, batch: int) -> None:
        """Let the scores count that the choice of this batch, from 0, depends on."""
        self._counted = self._counted_for(batch)

    def _counted_for(self, batch: int) -> Float32:
        """Return the scores that the choice of a batch depends on, float32 [rows]."""
        newest = batch - 1 - self._staleness
        counted = [trained for trained in self._later if trained.batch <= newest]
        if not counted:
            return self._scores
        # Copies of the curriculum share the array, so it is not changed in place.
        scores = self._scores.copy()
        for trained in counted:
            scores[trained.rows] = trained.means
        return scores

    def accepts(self, rows: Int64, place: int) -> Bool:
        """Return which rows are drawn, bool [rows].

        Args:
            rows: Rows in the order of the data, int64 [rows].
            place: The place of the first one in that order, over all epochs.
        """
        config = self._config
        scores = self._counted[rows]
        share = np.ones(len(rows), np.float64)
        # Comparisons with NaN are false.
        share[scores <= config.hard_to] = config.hard_share
        share[scores >= config.easy_from] = config.easy_share
        share[self._is_solved(scores)] = 0.0

        places = place + np.arange(len(rows))
        chance = row_seeds(self._seed, "curriculum", places) / 2.0**63
        is_drawn: Bool = chance < share
        return is_drawn

    def _is_solved(self, scores: Float32) -> Bool:
        solved_from = self._config.solved_from
        if solved_from is None:
            return np.zeros(len(scores), np.bool_)
        is_solved: Bool = scores >= solved_from
        return is_solved

    def note_drawn(self, ordinals: Int64, rows: Int64) -> None:
        """Note which row each ordinal is, int64 [prompts] both."""
        self._row_of.update(zip(ordinals.tolist(), rows.tolist(), strict=True))

    def note_scores(self, group_id: Int64, score: Float32, ok: Bool) -> None:
        """Note the scores of whole groups of the present batch, or rejected for it.

        Args:
            group_id: The ordinal of each response, int64 [rows].
            score: float32 [rows].
            ok: bool [rows]; False: the score has failed, and does not count.
        """
        ordinals, group = np.unique(group_id, return_inverse=True)
        totals = np.bincount(group[ok], score[ok], minlength=len(ordinals))
        counts = np.bincount(group[ok], minlength=len(ordinals))
        for ordinal, total, count in zip(
            ordinals.tolist(), totals.tolist(), counts.tolist(), strict=True
        ):
            row = self._row_of.pop(ordinal)
            if count:
                self._noted[ordinal] = (row, total / count)

    def end_batch(self, batch: int) -> None:
        """Note that the present batch, whose number is counted from 0, is trained."""
        # Of several groups of a row, that of the last ordinal is the one that counts.
        in_order = [self._noted[ordinal] for ordinal in sorted(self._noted)]
        rows = np.array([row for row, _ in in_order], np.int64)
        means = np.array([mean for _, mean in in_order], np.float32)
        self._later.append(_Trained(batch, rows, means))
        self._noted.clear()

        self._scores = self._counted_for(batch + 1)
        newest = batch - self._staleness
        self._later = [trained for trained in self._later if trained.batch > newest]

    def metrics(self) -> dict[str, float]:
        """Return the shares of rows that are new, hard, easy and solved."""
        scores = self._counted
        is_solved = self._is_solved(scores)
        shares = {
            "new": np.isnan(scores),
            "hard": (scores <= self._config.hard_to) & ~is_solved,
            "easy": (scores >= self._config.easy_from) & ~is_solved,
            "solved": is_solved,
        }
        return {f"curriculum/{name}": float(of.mean()) for name, of in shares.items()}

    # ------------------------------------------------------------------------- recovery

    def copy(self) -> Curriculum:
        """Return a copy, which later scores do not change."""
        copied = copy.copy(self)
        copied._later = list(self._later)
        return copied

    def restore(self, other: Curriculum) -> None:
        """Take over the scores of another one for the same data."""
        self._scores = self._counted = other._scores
        self._later = list(other._later)
        self._noted.clear()

    def write(self, folder: Path) -> None:
        """Write the scores to the folder of a checkpoint."""
        later = self._later
        batches = [np.full(len(trained.rows), trained.batch) for trained in later]
        empty = [np.empty(0, np.int64)]
        with (folder / FILE).open("wb") as file:
            np.savez(
                file,
                scores=self._scores,
                later_batches=np.concatenate([*batches, *empty]),
                later_rows=np.concatenate([*(of.rows for of in later), *empty]),
                later_means=np.concatenate(
                    [*(of.means for of in later), np.empty(0, np.float32)]
                ),
            )

    def read(self, folder: Path) -> None:
        """Take back what `write` wrote; a checkpoint without it has no scores.

        Raises:
            CheckpointError: The scores are those of other data.
        """
        path = folder / FILE
        if not path.exists():
            return

        with np.load(path, allow_pickle=False) as arrays:
            scores = arrays["scores"]
            batches = arrays["later_batches"]
            rows, means = arrays["later_rows"], arrays["later_means"]
        if len(scores) != self.num_rows:
            raise CheckpointError(
                f"has scores of {len(scores)} rows, and the data have {self.num_rows}",
                fix="give data.train_path the records of the checkpoint",
                subject=path,
            )
        self._scores = self._counted = scores
        self._later = [
            _Trained(batch, rows[batches == batch], means[batches == batch])
            for batch in np.unique(batches).tolist()
        ]
