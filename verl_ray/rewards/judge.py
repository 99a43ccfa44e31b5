"""Question to a judge and reading of its verdict: text to text, without a model.

Invariant: a verdict is a number within the judge's scale; any other reply is a typed
failure, never a number that was made up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from verl_ray.config.reward import TEMPLATE_FIELDS, JudgeReward
from verl_ray.data.encoding import encode
from verl_ray.data.fields import Message
from verl_ray.data.tokenizers import TemplateArguments, render
from verl_ray.rewards.health import Score, ScoreHealth, score_of_number
from verl_ray.rewards.request import ScoreRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Int32 = npt.NDArray[np.int32]

_SHOWN = 200  # characters of a reply without a verdict, from its end


class Judgement:
    """Question and verdict of a judge, by a template and a pattern.

    `verl_ray.config.reward` has verified both.
    """

    def __init__(self, config: JudgeReward) -> None:
        environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
        self._template = environment.from_string(config.template)
        self._verdict = re.compile(config.verdict)
        self._lowest = config.lowest
        self._highest = config.highest

    def question(self, request: ScoreRequest) -> str | Score:
        """Return the question about a response, or the failure to make one.

        A record without an answer has an empty one. The template fails, for example,
        where it needs a field that `extra` lacks.
        """
        shown = {name: getattr(request, name) for name in TEMPLATE_FIELDS}
        shown["answer"] = request.answer or ""
        try:
            return self._template.render(shown)
        # Jinja has its own errors, and an expression may raise any other.
        except Exception as error:
            detail = f"the judge's template fails on this response: {error}"
            return Score(math.nan, ScoreHealth.EXCEPTION, detail)

    def verdict(self, reply: str, *, cut: bool) -> Score:
        """Return the last verdict in the judge's reply, as a score.

        Args:
            cut: Whether the reply was cut. A verdict at the end of such a reply is not
                read, since it may be the beginning of another: "1" of "10".
        """
        matches = list(self._verdict.finditer(reply))
        if not matches:
            return _unparsed(f"no verdict in the judge's reply: {_end_of(reply)}")

        last = matches[-1]
        if cut and last.end() == len(reply):
            return _unparsed(
                f"the judge's reply was cut in its verdict: {_end_of(reply)}"
            )
        try:
            value = float(last[1] or "")
        except ValueError:
            return _unparsed(f"the judge's verdict is no number: {last[0]!r}")
        if not self._lowest <= value <= self._highest:
            return _unparsed(
                f"the judge's verdict is {value:g}, outside of {self._lowest:g} to"
                f" {self._highest:g}"
            )
        return score_of_number(value, "the judge's verdict is")


def question_tokens(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    role: str,
    arguments: TemplateArguments,
) -> list[Int32]:
    """Return questions in the judge's tokens; all of them fail together.

    Args:
        texts: The questions.
        tokenizer: The judge's tokenizer. Its chat template is used if it has one.
        role: Role of the judge, for errors.
        arguments: What the run gives to the template.

    Raises:
        DataError: The template or the tokenizer does not take a question.
    """

    def where(_: int) -> str:
        return f"the question of {role}"

    chat = bool(tokenizer.chat_template)
    if chat:
        conversations: list[list[Message]] = [
            [{"role": "user", "content": text}] for text in texts
        ]
        texts = render(
            tokenizer,
            conversations,
            add_generation_prompt=True,
            where=where,
            arguments=[arguments] * len(conversations),
        )
    # A chat template writes the special tokens itself.
    rows = encode(tokenizer, texts, special=not chat, where=where)
    return [rows[index] for index in range(len(rows))]


def _unparsed(detail: str) -> Score:
    return Score(math.nan, ScoreHealth.UNPARSED, detail)


def _end_of(reply: str) -> str:
    return f"...{reply[-_SHOWN:]!r}"
