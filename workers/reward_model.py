"""The reward role by a model: one number per row, read at its last token.

Invariant: what the model sees of a response is what it was trained on: its own tokenizer's and chat template's tokens,
which are the rollout's where policy and reward model share them; and the score is read where transformers reads it. A
row that does not fit the model has a typed failure for a score, and keeps no rank from the forward pass. Deliberately
not here: what a run makes of scores (`verl_ray/rewards/shaping.py`).
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.algorithms.objectives import PreferenceObjective
from verl_ray.cluster.context import WorkerContext
from verl_ray.data.batch import Ragged, offsets_of
from verl_ray.data.conversations import tokenize
from verl_ray.data.files import Content, Message
from verl_ray.data.prompts import as_messages, prompt_text
from verl_ray.data.stages import Bool, Finish, Float32, Rollouts, Rows, Scores, TrainingBatch
from verl_ray.data.tokenizers import load_tokenizer, same_tokens, unspecial
from verl_ray.engine.base import EngineSpec
from verl_ray.errors import DataError
from verl_ray.ops.outputs import Outputs
from verl_ray.rewards.health import Health, Score
from workers.grader import Grader
from workers.model_worker import ModelWorker, UpdateReport
from workers.reward import response_texts, scores_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardModelWorker(ModelWorker):
    """Trains on preferences, and scores token sequences."""

    def __init__(self, context: WorkerContext, spec: EngineSpec) -> None:
        from transformers import AutoConfig

        super().__init__(context, spec)
        self._padding: int | None = AutoConfig.from_pretrained(spec.model_path, local_files_only=True).pad_token_id

    def train_preferences(self, rows: TrainingBatch, objective: PreferenceObjective) -> UpdateReport:
        """One optimizer step on these pairs of rows."""
        tokens = without_padding(Ragged(rows.tokens, rows.offsets), self._padding)
        silent = np.zeros(len(tokens.values), np.bool_)
        return self.learn(rows.replace(offsets=tokens.offsets, tokens=tokens.values, response_mask=silent), objective)

    def compute_scores(self, rows: Rows) -> Scores:
        """The score of each row as it stands."""
        numbers = self._numbers(Ragged(rows.tokens, rows.offsets))
        return scores_of([_score(number) for number in numbers.tolist()])

    def _numbers(self, rows: Ragged) -> Float32:
        """The model's number for each row of tokens (int32), as float32."""
        tokens = without_padding(rows, self._padding)
        silent = np.zeros(len(tokens.values), np.bool_)
        found = self.engine.forward(
            Rows(offsets=tokens.offsets, tokens=tokens.values, response_mask=silent), Outputs(scores=True)
        )
        assert found.scores is not None
        return found.scores


class RewardModelGrader(RewardModelWorker, Grader):
    """Grades rollouts of a policy, whose tokenizer may be another than the model's."""

    def __init__(
        self,
        context: WorkerContext,
        spec: EngineSpec,
        policy_path: str,
        apply_chat_template: bool,
    ) -> None:
        """`apply_chat_template`: whether the policy's prompts went through its template (data.apply_chat_template)."""
        super().__init__(context, spec)
        self._policy, self._own = load_tokenizer(policy_path), load_tokenizer(spec.model_path)
        self._shared = same_tokens(self._policy, self._own) and apply_chat_template == bool(self._own.chat_template)
        together = spec.backend.micro_batch_tokens_per_rank * spec.backend.token_slices
        self._longest, self._limit = min(
            (self.engine.max_positions, "max_position_embeddings"),
            (together, f"{spec.role}.backend.micro_batch_tokens_per_rank"),
        )

    def score(self, rows: Rollouts) -> Scores:
        """A score for each response behind its prompt. One that was cut before it ended is read where it was cut,
        without an end of turn."""
        tokens, refused = self._read(rows)
        found = {row: Score(math.nan, Health.EXCEPTION, reason) for row, reason in refused.items()}
        found |= {row: self._too_long(tokens.lengths[row]) for row in np.flatnonzero(tokens.lengths > self._longest)}
        good = np.setdiff1d(np.arange(len(tokens)), list(found))
        numbers = self._numbers(tokens.select(good))  # without rows too: the ranks may have to meet
        found |= {row: _score(number) for row, number in zip(good, numbers.tolist(), strict=True)}
        return scores_of([found[row] for row in range(len(tokens))])

    def _read(self, rows: Rollouts) -> tuple[Ragged, dict[int, str]]:
        """Each row in the model's tokens, int32; of those that cannot be written so, none, and why."""
        if self._shared:
            return Ragged(rows.tokens, rows.offsets), {}
        try:
            return retemplated(rows, self._policy, self._own), {}
        except DataError:
            parts: list[Ragged] = []
            refused: dict[int, str] = {}
            for row in range(rows.num_rows):
                try:
                    parts.append(retemplated(rows.select([row]), self._policy, self._own))
                except DataError as error:
                    parts.append(Ragged.of_rows([[]], np.int32))
                    refused[row] = str(error)
            return Ragged.concat(parts), refused

    def _too_long(self, length: int) -> Score:
        what = f"prompt and response have {length} tokens, more than {self._limit} = {self._longest}"
        return Score(math.nan, Health.TOO_LONG, what)


def retemplated(rows: Rollouts, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> Ragged:
    """Prompt and response of each row in the tokens and the chat template of another tokenizer, int32.

    Special tokens of the policy's are left out of the response, and so are the names of `own`'s special tokens where a
    text spells them out: they would end the response, or begin another turn.

    Raises:
        DataError: the template refuses a prompt, or `own` has no tokens for a text.
    """
    chat = bool(own.chat_template)
    contents: list[Content] = []
    for prompt, written in zip(rows.messages.texts(), response_texts(rows, policy), strict=True):
        response = unspecial(written, own)
        turns: list[Message] = [*as_messages(json.loads(prompt)), {"role": "assistant", "content": response}]
        contents.append(turns if chat else (prompt_text(prompt), response))
    where = [f"rollout {number}" for number in rows.row_id.tolist()]
    tokens, _ = tokenize(contents, where, own, apply_chat_template=chat, responses="last")
    return _without_last(tokens, rows.finish != Finish.STOP)


def without_padding(rows: Ragged, padding: int | None) -> Ragged:
    """The rows up to their last token that is not `padding`, the config's `pad_token_id`; at least their first token.

    transformers reads scores there, also at the end of a response where the same token pads and ends texts.
    """
    if padding is None:
        return rows
    places = np.arange(len(rows.values))
    last = np.maximum.accumulate(np.where(rows.values != padding, places, -1))[rows.offsets[1:] - 1]
    ends = np.maximum(last, rows.offsets[:-1]) + 1
    return Ragged(rows.values[places < np.repeat(ends, rows.lengths)], offsets_of(ends - rows.offsets[:-1]))


def _without_last(rows: Ragged, which: Bool) -> Ragged:
    """The rows, those of `which` without their last token (the end of a turn that was never reached)."""
    keep = np.ones(len(rows.values), np.bool_)
    keep[rows.offsets[1:][which] - 1] = False
    return Ragged(rows.values[keep], offsets_of(rows.lengths - which))


def _score(value: float) -> Score:
    if math.isfinite(value):
        return Score(value, Health.OK)
    return Score(math.nan, Health.NONFINITE, f"the model's score is {value}")
