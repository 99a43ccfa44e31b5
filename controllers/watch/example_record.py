"""Rows of a data set that a run keeps for people to read, with their losses.

Invariant: the losses are those that the step computes anyway, so recording changes no
bit of a run. Which examples of a step are kept depends on their tokens alone, so the
same ones are kept when they return, and in other runs on the same data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from controllers.watch.measures import Metrics
from controllers.watch.token_texts import Pieces
from verl_ray.columns.batch import Array, Int64
from verl_ray.columns.stages import Bool, Float32, TrainingBatch
from verl_ray.config.run import RolloutTrackingConfig
from verl_ray.engine.base import LOSS
from verl_ray.learning.preference_objective import LABEL_PREFIX
from verl_ray.tracking.evaluations import digest
from verl_ray.tracking.rollouts import ExampleTable, RolloutFiles
from workers.model_worker import UpdateReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXAMPLES = 8
"""Examples or pairs of a step that `tracking.rollouts=sampled` keeps."""

MOST_TOKENS = 1 << 16
"""Tokens of them together, which the driver decodes; the first is kept in any case."""

_NONE = np.zeros(0, np.float32)

# What objectives call the reward of a response, by its label.
_REWARDS = {
    label: (f"reward/{label}", f"rewards/{label}", f"{LABEL_PREFIX}{label}/rewards")
    for label in ("chosen", "rejected")
}


class ExampleRecord:
    """Writes the rows that `tracking.rollouts` keeps of steps on a data set.

    A step calls `mark`, `read` while its ranks learn, and `write`.

    Attributes:
        metrics: What was written of the last step.
    """

    def __init__(
        self,
        folder: Path,
        tracking: RolloutTrackingConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Continue the files of a run's folder.

        Args:
            folder: Folder of the run.
            tracking: What is kept.
            tokenizer: The tokenizer of the rows.
        """
        self.metrics: Metrics = {}
        self._is_all = tracking.rollouts == "all"
        self._tokenizer = tokenizer
        self._pieces = Pieces(tokenizer)
        self._files = RolloutFiles(folder, tracking.rollouts_max_mb)

    def mark(self, step: int, rows: TrainingBatch) -> TrainingBatch:
        """Return the rows of a step with `recorded`, where some of them are kept.

        Args:
            step: Number of the step, from 1.
            rows: All rows of the step.
        """
        if not self._files.keeps(step):
            return rows
        recorded = np.arange(rows.num_rows)
        if not self._is_all:
            recorded = np.where(_is_chosen(rows), recorded, -1)
        return rows.replace(recorded=recorded)

    def read(
        self, step: int, rows: TrainingBatch, units_before: int
    ) -> MarkedRows | None:
        """Return the texts of the rows that `mark` has marked; None without any.

        Args:
            step: Number of the step, from 1.
            rows: All rows of the step.
            units_before: Examples, or pairs, of the steps before.
        """
        if rows.recorded is None:
            return None
        marked = np.flatnonzero(rows.recorded >= 0)
        selected = rows.select(marked)
        with self._files.tolerating(step):
            pieces = [
                self._pieces.of(tokens.tolist())
                for tokens in np.split(selected.tokens, selected.offsets[1:-1])
            ]
            return MarkedRows(
                rows=selected,
                numbers=marked,
                ordinals=units_before + unit_of_rows(rows)[marked],
                pieces=[piece for row in pieces for piece in row],
                texts=[self._texts(selected, row) for row in range(selected.num_rows)],
            )
        return None

    def write(
        self, step: int, marked: MarkedRows | None, reports: Sequence[UpdateReport]
    ) -> None:
        """Write the rows of a step, once it is made.

        Args:
            step: Number of the step, from 1.
            marked: What `read` returned.
            reports: Reports of all ranks.
        """
        num_rows = 0
        if marked is not None:
            losses: dict[int, dict[str, Float32]] = {}
            for report in reports:
                losses |= report.loss.recorded
            with self._files.tolerating(step):
                content = marked.table(step, losses).encoded()
                if self._files.write(step, content):
                    num_rows = marked.rows.num_rows
        self.metrics = {
            "rollouts/recorded_rows": float(num_rows),
            "rollouts/recorded_every": float(self._files.every),
        }

    def _texts(self, rows: TrainingBatch, row: int) -> tuple[str, str]:
        """Return what stands before the first token that is learned from, and after."""
        start, end = rows.offsets[row], rows.offsets[row + 1]
        learned = np.flatnonzero(rows.response_mask[start:end])
        cut = start + learned[0] if len(learned) else end
        prompt, response = (
            str(self._tokenizer.decode(tokens, skip_special_tokens=True))
            for tokens in (rows.tokens[start:cut], rows.tokens[cut:end])
        )
        return prompt, response


@dataclass(frozen=True, eq=False)
class MarkedRows:
    """Rows of a step that are kept, and their texts."""

    rows: TrainingBatch
    numbers: Int64
    """int64 [rows], their places in the step."""

    ordinals: Int64
    """int64 [rows], running number of the example or the pair of each."""

    pieces: Sequence[str]
    """Text of each token, [tokens]."""

    texts: Sequence[tuple[str, str]]
    """Prompt and response of each row."""

    def table(
        self, step: int, losses: Mapping[int, Mapping[str, Float32]]
    ) -> ExampleTable:
        """Return the rows with their losses.

        Args:
            step: Number of the step, from 1.
            losses: `LossReport.recorded` of all ranks.
        """
        rows = self.rows
        labels = _labels(rows)
        member = np.zeros(rows.num_rows, np.int64)
        if rows.unit is not None:
            member[1::2] = 1
        # The first row of a pair has the numbers of both.
        values = [losses.get(number, {}) for number in (self.numbers - member).tolist()]
        rewards, margins = _rewards(values, labels)
        row_losses = [columns.get(LOSS, _NONE) for columns in values]
        by_token = np.full(rows.num_tokens, np.nan, np.float32)
        if not any(labels):
            by_token[rows.response_mask] = np.concatenate(row_losses)

        columns: dict[str, Sequence[Any] | Array] = {
            "step": np.full(rows.num_rows, step),
            "ordinal": self.ordinals,
            "member": member,
            "label": labels,
            "prompt": [prompt for prompt, _ in self.texts],
            "response": [response for _, response in self.texts],
            "response_tokens": np.bincount(
                rows.row_of_token[rows.response_mask], minlength=rows.num_rows
            ),
            "loss": [_mean(losses) for losses in row_losses],
            "reward": rewards,
            "margin": margins,
        }
        tokens: dict[str, Sequence[Any] | Array] = {
            "tokens": rows.tokens,
            "pieces": self.pieces,
            "mask": rows.response_mask,
            "losses": by_token,
        }
        return ExampleTable(columns, rows.offsets, tokens)


def unit_of_rows(rows: TrainingBatch) -> Int64:
    """Return the number of each row's example or pair, from 0, int64 [rows]."""
    if rows.unit is None:
        return np.arange(rows.num_rows)
    return np.cumsum(np.diff(rows.unit, prepend=rows.unit[:1]) != 0)


def _is_chosen(rows: TrainingBatch) -> Bool:
    """Return which rows `sampled` keeps, bool [rows]."""
    unit = unit_of_rows(rows)
    first_rows = np.flatnonzero(np.diff(unit, prepend=-1))
    units = np.split(rows.tokens, rows.offsets[first_rows[1:]])
    digests = [digest(tokens.tobytes()) for tokens in units]
    order = sorted(range(len(units)), key=lambda place: (digests[place], place))
    order = order[:EXAMPLES]
    tokens = np.cumsum([len(units[place]) for place in order])
    num_units = max(1, int((tokens <= MOST_TOKENS).sum()))
    chosen: Bool = np.isin(unit, order[:num_units])
    return chosen


def _labels(rows: TrainingBatch) -> list[str]:
    """Return chosen or rejected for each row; empty without labels."""
    if rows.unit is not None:
        return ["chosen", "rejected"] * (rows.num_rows // 2)
    if rows.desirable is not None:
        return [
            "chosen" if is_desirable else "rejected" for is_desirable in rows.desirable
        ]
    return [""] * rows.num_rows


def _rewards(
    values: Sequence[Mapping[str, Float32]], labels: Sequence[str]
) -> tuple[list[float], list[float]]:
    """Return the reward of each row, and the margin of its pair; NaN where none is.

    Args:
        values: Losses and metrics of each row's example or pair.
        labels: Label of each row.
    """
    rewards, margins = [], []
    for columns, label in zip(values, labels, strict=True):
        by_label = {
            name: _mean(columns.get(key))
            for name, keys in _REWARDS.items()
            for key in keys
            if key in columns
        }
        rewards.append(by_label.get(label, nan))
        is_pair = not any(name.startswith(LABEL_PREFIX) for name in columns)
        margin = by_label.get("chosen", nan) - by_label.get("rejected", nan)
        margins.append(margin if is_pair else nan)
    return rewards, margins


def _mean(values: Float32 | None) -> float:
    """Return the mean of some values; NaN without any."""
    return nan if values is None or not len(values) else float(values.mean())
