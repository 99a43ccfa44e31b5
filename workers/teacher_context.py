"""The student's responses behind other prompts, as its teacher reads them.

Invariant: the response tokens are those that were sampled, in their order, and only
what stands before the first of them differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.algorithms.distillation import TEACHER_PROMPTS
from verl_ray.columns.batch import Array, offsets_of
from verl_ray.columns.stages import LogProbs, Rollouts, Rows
from verl_ray.config.data import DataConfig
from verl_ray.data.encoding import SpelledTokens
from verl_ray.data.prompts import tokens_of_prompts
from verl_ray.data.tokenizers import load_tokenizer, of_run, template_of
from verl_ray.errors import DataError
from verl_ray.settings.section import resolved
from workers.reward import requests_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TeacherContext:
    """The prompts that a teacher reads.

    Attributes:
        function: `distill.teacher_prompt`.
        max_tokens: The longest of these prompts.
        data: How prompts are written as tokens.
        tokenizer_path: Directory of the student's tokenizer.
    """

    function: str
    max_tokens: int
    data: DataConfig
    tokenizer_path: str

    def rows(self, rows: Rollouts) -> Rows:
        """Return each response behind the prompt that the user's function writes.

        Raises:
            DataError: The function fails, or writes no prompt or one that is too long.
        """
        tokenizer = _tokenizer(self.tokenizer_path, template_of(self.data))
        function = TEACHER_PROMPTS[self.function].function
        prompts = [function(request) for request in requests_of(rows, 0, tokenizer)]
        chat = resolved(self.data.apply_chat_template)
        tokens = tokens_of_prompts(
            prompts,
            [f"the teacher's prompt of rollout {row}" for row in rows.row_id.tolist()],
            tokenizer,
            SpelledTokens(tokenizer, self.data.special_tokens),
            [of_run(self.data)] * rows.num_rows if chat else None,
        )
        if not tokens.lengths.all():
            raise DataError(
                "distill.teacher_prompt wrote a prompt without a token",
                fix="write at least one",
            )
        longest = int(tokens.lengths.max(initial=0))
        if longest > self.max_tokens:
            raise DataError(
                f"distill.teacher_prompt wrote a prompt of {longest} tokens, and"
                f" distill.max_prompt_tokens is {self.max_tokens}",
                fix="write shorter ones, or allow this many",
            )

        place = np.arange(rows.num_tokens) - rows.offsets[rows.row_of_token]
        remains = place >= rows.prompt_length[rows.row_of_token]
        lengths = tokens.lengths + np.bincount(
            rows.row_of_token[remains], minlength=rows.num_rows
        )
        offsets = offsets_of(lengths)
        row_of_token = np.repeat(np.arange(rows.num_rows), lengths)
        is_prompt = (
            np.arange(offsets[-1]) - offsets[row_of_token]
            < tokens.lengths[row_of_token]
        )
        all_tokens = np.empty(offsets[-1], np.int32)
        all_tokens[is_prompt] = tokens.values
        all_tokens[~is_prompt] = rows.tokens[remains]
        mask = np.zeros(offsets[-1], np.bool_)
        mask[~is_prompt] = rows.response_mask[remains]
        return Rows(offsets=offsets, tokens=all_tokens, response_mask=mask)


def behind_own_prompts(teacher: LogProbs, read: Rows, rows: Rows) -> LogProbs:
    """Return the log-probs of the response tokens of `read` at those of `rows`.

    Args:
        teacher: Log-probs of `read`.
        read: The rows that a teacher has read.
        rows: The same responses behind the student's prompts.
    """

    def column(values: Array | None) -> Array | None:
        if values is None:
            return None
        moved = np.zeros((rows.num_tokens, *values.shape[1:]), values.dtype)
        moved[rows.response_mask] = values[read.response_mask]
        return moved

    log_probs = column(teacher.log_probs)
    assert log_probs is not None
    return LogProbs(
        offsets=rows.offsets,
        log_probs=log_probs,
        top_tokens=column(teacher.top_tokens),
        top_log_probs=column(teacher.top_log_probs),
    )


@cache
def _tokenizer(path: str, chat_template: str | None) -> PreTrainedTokenizerBase:
    return load_tokenizer(path, chat_template)
