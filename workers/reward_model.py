"""The reward role by a model: one number per row, read at its last token.

Invariant: what the model sees of a response is what it was trained on: its own tokenizer's and chat template's tokens,
which are the rollout's where policy and reward model share them. A row that does not fit the model has a typed failure
for a score. Deliberately not here: what a run makes of scores (`verl_ray/rewards/shaping.py`).
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.algorithms.objectives import PreferenceObjective
from verl_ray.cluster.context import WorkerContext
from verl_ray.data.batch import Int64, Ragged, offsets_of
from verl_ray.data.conversations import tokenize
from verl_ray.data.files import Content
from verl_ray.data.prompts import prompt_text
from verl_ray.data.stages import Finish, Float32, Rollouts, Rows, Scores, TrainingBatch
from verl_ray.data.tokenizers import load_tokenizer, same_tokens
from verl_ray.engine.base import EngineSpec
from verl_ray.models.role_model import Outputs
from verl_ray.rewards.health import Health, Score
from workers.model_worker import ModelWorker, UpdateReport
from workers.reward import response_texts, scores_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardModelWorker(ModelWorker):
    """Trains on preferences, and scores token sequences."""

    def train_preferences(self, rows: TrainingBatch, objective: PreferenceObjective) -> UpdateReport:
        """One optimizer step on these pairs of rows."""
        return self.learn(rows, objective)

    def compute_scores(self, rows: Rows) -> Scores:
        """The model's number at the last token of each row."""
        return scores_of([_score(value) for value in self._numbers(rows).tolist()])

    def _numbers(self, rows: Rows) -> Float32:
        silent = Rows(offsets=rows.offsets, tokens=rows.tokens, response_mask=np.zeros(rows.num_tokens, np.bool_))
        found = self.engine.forward(silent, Outputs(scores=True))
        assert found.scores is not None
        return found.scores


class RewardModelGrader(RewardModelWorker):
    """Grades rollouts of a policy, whose tokenizer may be another than the model's."""

    def __init__(self, context: WorkerContext, spec: EngineSpec, policy_path: str) -> None:
        super().__init__(context, spec)
        self._policy, self._own = load_tokenizer(policy_path), load_tokenizer(spec.model_path)
        self._shared = same_tokens(self._policy, self._own)
        positions = self.engine.max_positions
        self._longest = min(positions, spec.backend.micro_batch_tokens_per_rank)

    def score(self, rows: Rollouts) -> Scores:
        """A score for each response behind its prompt. One that was cut at the length limit is read where it was cut,
        without an end of turn."""
        tokens = Ragged(rows.tokens, rows.offsets) if self._shared else retemplated(rows, self._policy, self._own)
        fits = np.flatnonzero(tokens.lengths <= self._longest)
        chosen = tokens.select(fits)
        numbers = self._numbers(
            Rows(
                offsets=chosen.offsets,
                tokens=chosen.values.astype(np.int32, copy=False),
                response_mask=np.zeros(len(chosen.values), np.bool_),
            )
        )
        found = dict(zip(fits.tolist(), numbers.tolist(), strict=True))
        return scores_of([
            _score(found[row]) if row in found else _too_long(length, self._longest)
            for row, length in enumerate(tokens.lengths.tolist())
        ])  # fmt: skip


def retemplated(rows: Rollouts, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> Ragged:
    """Prompt and response of each row in the tokens and the chat template of another tokenizer, int32.

    Special tokens of the policy's are left out of the response, and so are the names of `own`'s special tokens where a
    text spells them out: they would end the response, or begin another turn.
    """
    prompts = [json.loads(text) for text in rows.messages.texts()]
    responses = [_unspecial(text, own) for text in response_texts(rows, policy)]
    chat = bool(own.chat_template)
    contents: list[Content] = [
        (prompt if chat or isinstance(prompt, str) else prompt_text(json.dumps(prompt)), response)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    where = [f"rollout {number}" for number in rows.row_id.tolist()]
    tokens, _ = tokenize(contents, where, own, apply_chat_template=chat, responses="last")
    return _without_last(tokens, rows.finish == Finish.LENGTH)


def _without_last(rows: Ragged, which: np.ndarray) -> Ragged:
    """The rows, those of `which` without their last token (the end of a turn that was never reached)."""
    keep = np.ones(len(rows.values), np.bool_)
    keep[rows.offsets[1:][which] - 1] = False
    lengths: Int64 = rows.lengths - which
    return Ragged(rows.values[keep], offsets_of(lengths))


def _unspecial(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    return text


def _score(value: float) -> Score:
    if math.isfinite(value):
        return Score(value, Health.OK)
    return Score(math.nan, Health.NONFINITE, f"the model's score is {value}")


def _too_long(length: int, longest: int) -> Score:
    return Score(math.nan, Health.TOO_LONG, f"prompt and response have {length} tokens, the model takes {longest}")
