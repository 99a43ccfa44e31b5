"""Reward role by a model: one number per row, read at its last token.

Invariant: the model sees a response in the tokens of its own tokenizer and chat
template, as in its training; and the score is read where transformers reads it. The
rollout's tokens are used as they are where policy and reward model share both. A row
that does not fit the model has a typed failure for a score, and keeps no rank from the
forward pass.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.cluster.context import WorkerContext
from verl_ray.columns.batch import Ragged, offsets_of
from verl_ray.columns.stages import (
    Bool,
    Finish,
    Float32,
    Rollouts,
    Rows,
    Scores,
    TrainingBatch,
)
from verl_ray.config.data import SpecialTokens
from verl_ray.data.conversations import tokenize
from verl_ray.data.fields import Message, as_messages
from verl_ray.data.prompts import prompt_text
from verl_ray.data.records import Content
from verl_ray.data.tokenizers import (
    TemplateArguments,
    end_tokens,
    load_tokenizer,
    same_tokens,
    strip_special_tokens,
)
from verl_ray.engine.base import EngineSpec
from verl_ray.errors import DataError
from verl_ray.learning.objectives import Objective
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.rewards.health import Score, ScoreHealth, score_of_number
from verl_ray.settings.section import resolved
from workers.model_worker import ModelWorker, UpdateReport
from workers.reward import Grader, response_texts, scores_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardModelWorker(ModelWorker):
    """One rank of a reward model, which learns from preferences and scores rows."""

    def __init__(self, context: WorkerContext, spec: EngineSpec) -> None:
        from verl_ray.models.parts import read_config, text_config

        super().__init__(context, spec)
        config = read_config(spec.model_path, trusts_code=spec.trusts_code)
        self._padding: int | None = text_config(config).pad_token_id

    def learn(self, rows: TrainingBatch, objective: Objective) -> UpdateReport:
        """Make one optimizer step on these rows, in the tokens that scoring reads."""
        tokens = without_padding(Ragged(rows.tokens, rows.offsets), self._padding)
        scored = rows.replace(
            offsets=tokens.offsets,
            tokens=tokens.values,
            response_mask=_no_responses(tokens),
        )
        return super().learn(scored, objective)

    def compute_scores(self, rows: Rows) -> Scores:
        """Return the score of each row of tokens as it stands."""
        numbers = self._numbers(Ragged(rows.tokens, rows.offsets))
        return scores_of([_score(number) for number in numbers.tolist()])

    def _numbers(self, rows: Ragged) -> Float32:
        """The model's number for each row of tokens (int32), float32 [rows]."""
        tokens = without_padding(rows, self._padding)
        sequences = Rows(
            offsets=tokens.offsets,
            tokens=tokens.values,
            response_mask=_no_responses(tokens),
        )
        outputs = self.engine.forward(sequences, RequestedOutputs(scores=True))
        assert outputs.scores is not None
        return outputs.scores


class RewardModelGrader(RewardModelWorker, Grader):
    """One rank that scores rollouts of a policy, which may have another tokenizer."""

    def __init__(
        self,
        context: WorkerContext,
        spec: EngineSpec,
        policy_path: str,
        apply_chat_template: bool,
        special_tokens: SpecialTokens,
        chat_template: str | None = None,
        template_arguments: TemplateArguments | None = None,
    ) -> None:
        """Load both tokenizers next to the model.

        Args:
            apply_chat_template: Whether the policy's prompts went through its chat
                template (data.apply_chat_template).
            special_tokens: What happened to special tokens that the policy's prompts
                spelled out (data.special_tokens).
            chat_template: Text of the chat template that replaces the policy's
                (data.chat_template).
            template_arguments: What the run gives to the model's own chat template.
        """
        super().__init__(context, spec)
        self._template_arguments = template_arguments
        self._policy_tokenizer = load_tokenizer(policy_path, chat_template)
        self._model_tokenizer = load_tokenizer(spec.model_path)
        self._ends = end_tokens(self._policy_tokenizer)
        both_template = apply_chat_template == bool(self._model_tokenizer.chat_template)
        self._shares_tokens = both_template and same_tokens(
            self._policy_tokenizer, self._model_tokenizer
        )

        # A prompt that the run has read gets a score, whatever this tokenizer's special
        # tokens are called.
        self._special_tokens: SpecialTokens = "escape"
        if special_tokens == "allow":
            self._special_tokens = "allow"

        # A row has to fit the model's positions, and a micro-batch of all its ranks.
        tokens_per_rank = resolved(spec.backend.micro_batch_tokens_per_rank)
        micro_batch_tokens = tokens_per_rank * spec.backend.token_slices
        micro_batch_key = f"{spec.role}.backend.micro_batch_tokens_per_rank"
        self._longest, self._limit_name = min(
            (self.engine.max_positions, "the positions of the model"),
            (micro_batch_tokens, micro_batch_key),
        )

    def score(self, rows: Rollouts, step: int, is_held_out: bool = False) -> Scores:
        """Return a score for each response behind its prompt.

        A response that was cut before it ended is scored where it was cut, without an
        end of turn.
        """
        tokens, refused = self._tokens_of(rows)
        scores: dict[int, Score] = {}
        for row, reason in refused.items():
            scores[row] = Score(math.nan, ScoreHealth.EXCEPTION, reason)
        for row in np.flatnonzero(tokens.lengths > self._longest).tolist():
            scores[row] = self._too_long(int(tokens.lengths[row]))

        # Also a rank without such rows takes part in the forward pass: in a sharded
        # model the other ranks would wait for it.
        scorable = np.setdiff1d(np.arange(len(tokens)), list(scores))
        numbers = self._numbers(tokens.select(scorable))
        for row, number in zip(scorable.tolist(), numbers.tolist(), strict=True):
            scores[row] = _score(number)
        return scores_of([scores[row] for row in range(len(tokens))])

    def _tokens_of(self, rows: Rollouts) -> tuple[Ragged, dict[int, str]]:
        """Return each row in the model's tokens, int32.

        A row that cannot be written in them has no tokens, and a reason by its number.
        """
        if self._shares_tokens:
            return self._tokens_with_ends(rows)
        try:
            return self._retemplate(rows), {}
        except DataError:
            return self._tokens_row_by_row(rows)

    def _tokens_with_ends(self, rows: Rollouts) -> tuple[Ragged, dict[int, str]]:
        """Return the tokens as they were sampled, or anew where the last is missing.

        A response that a text has ended (rollout.stop) lacks the end of its turn.
        """
        sampled = Ragged(rows.tokens, rows.offsets)
        last = rows.tokens[rows.offsets[1:] - 1]
        has_end = (rows.finish != Finish.STOP) | np.isin(last, self._ends)
        unended = np.flatnonzero(~has_end)
        if not len(unended):
            return sampled, {}

        written, refused = self._tokens_row_by_row(rows.select(unended))
        order = np.arange(rows.num_rows)
        order[unended] = rows.num_rows + np.arange(len(unended))
        tokens = Ragged.concat([sampled, written]).select(order)
        return tokens, {int(unended[row]): why for row, why in refused.items()}

    def _tokens_row_by_row(self, rows: Rollouts) -> tuple[Ragged, dict[int, str]]:
        """Return the tokens as `_tokens_of` does, trying each row by itself.

        A row that fails then costs its own score alone.
        """
        parts: list[Ragged] = []
        refused: dict[int, str] = {}
        for row in range(rows.num_rows):
            try:
                parts.append(self._retemplate(rows.select([row])))
            except DataError as error:
                parts.append(Ragged.of_rows([[]], np.int32))
                refused[row] = str(error)
        return Ragged.concat(parts), refused

    def _retemplate(self, rows: Rollouts) -> Ragged:
        return retemplate(
            rows,
            self._policy_tokenizer,
            self._model_tokenizer,
            self._special_tokens,
            self._template_arguments,
        )

    def _too_long(self, length: int) -> Score:
        detail = (
            f"prompt and response have {length} tokens, more than {self._limit_name} ="
            f" {self._longest}"
        )
        return Score(math.nan, ScoreHealth.TOO_LONG, detail)


def retemplate(
    rows: Rollouts,
    policy_tokenizer: PreTrainedTokenizerBase,
    model_tokenizer: PreTrainedTokenizerBase,
    special_tokens: SpecialTokens,
    template_arguments: TemplateArguments | None = None,
) -> Ragged:
    """Write prompt and response of each row in another tokenizer's tokens, int32.

    The other tokenizer's chat template is used, if it has one. Special tokens of the
    policy are left out of the response. The names of the other tokenizer's special
    tokens are left out too where a text spells them: they would end the response, or
    begin another turn.

    Args:
        special_tokens: What happens to those that a prompt spells out.
        template_arguments: What the run gives to the other chat template.

    Raises:
        DataError: the template refuses a prompt, or `model_tokenizer` has no tokens for
            a text.
    """
    chat = bool(model_tokenizer.chat_template)
    prompts = rows.messages.texts()
    responses = response_texts(rows, policy_tokenizer)

    contents: list[Content] = []
    for prompt, written in zip(prompts, responses, strict=True):
        response = strip_special_tokens(written, model_tokenizer)
        if chat:
            turns: list[Message] = [
                *as_messages(json.loads(prompt)),
                {"role": "assistant", "content": response},
            ]
            contents.append(turns)
        else:
            contents.append((prompt_text(prompt), response))

    where = [f"rollout {number}" for number in rows.row_id.tolist()]
    tokens, _ = tokenize(
        contents,
        where,
        model_tokenizer,
        apply_chat_template=chat,
        special_tokens=special_tokens,
        responses="graded",
        arguments=[template_arguments or {}] * len(contents),
    )
    # A response that was cut has not written the end of its turn.
    return _without_last_token(tokens, rows.finish != Finish.STOP)


def without_padding(rows: Ragged, padding: int | None) -> Ragged:
    """Return the rows up to their last token that is not padding.

    transformers reads scores there, also at the end of a response where the same token
    pads and ends texts. At least the first token of each row remains.

    Args:
        padding: The model configuration's `pad_token_id`, if it has one.
    """
    if padding is None:
        return rows

    # The running maximum of the other tokens' positions is the last one so far.
    positions = np.arange(len(rows.values))
    is_padding = rows.values == padding
    last_so_far = np.maximum.accumulate(np.where(is_padding, -1, positions))
    last_of_row = last_so_far[rows.offsets[1:] - 1]

    # In a row of padding alone, that position lies before the row.
    starts = rows.offsets[:-1]
    ends = np.maximum(last_of_row, starts) + 1
    remains = positions < np.repeat(ends, rows.lengths)
    return Ragged(rows.values[remains], offsets_of(ends - starts))


def _no_responses(rows: Ragged) -> Bool:
    """A mask without response tokens, since scores need none, bool [tokens]."""
    return np.zeros(len(rows.values), np.bool_)


def _without_last_token(rows: Ragged, selected: Bool) -> Ragged:
    """Return all rows, the `selected` ones without their last token."""
    remains = np.ones(len(rows.values), np.bool_)
    remains[rows.offsets[1:][selected] - 1] = False
    return Ragged(rows.values[remains], offsets_of(rows.lengths - selected))


def _score(value: float) -> Score:
    return score_of_number(value, "the model's score is")
