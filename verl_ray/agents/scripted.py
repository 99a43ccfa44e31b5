"""A sampler that answers from a script, for tests and for `check`.

Invariant: it knows no model. What it answers depends on its script and on how often it
was called, and each answer ends as an engine's does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_ray.agents.contract import Action, Constraint, Listener, Sampled, ToolSchema
from verl_ray.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_ray.agents.template import Renderer


def read_words(tokens: Sequence[int], text: str, finish: str) -> Action:
    """Return a turn as words alone, in which no tool is called."""
    return Action(tokens, text, finish=finish)


def turn_end(renderer: Renderer) -> int:
    """Return the token at which turns end, as the chat template writes it.

    It is the first of the end tokens where the template writes none.
    """
    word = {"content": "1"}
    user, assistant = {"role": "user", **word}, {"role": "assistant", **word}
    try:
        following = renderer.continuation([user, assistant], [user], (), ())
    # The vocabulary of a small model may lack the words of its template.
    except DataError:
        following = None
    written = (following or [])[:1]
    return min(renderer.end_tokens.intersection(written) or renderer.end_tokens)


@dataclass(frozen=True)
class SampleCall:
    """A call of the scripted sampler."""

    tokens: Sequence[int]
    seed: int
    max_tokens: int
    tools: Sequence[ToolSchema] = ()
    stop: Sequence[str] = ()
    constraint: Constraint | None = None


class ScriptedSampler:
    """A sampler that gives each text of a script as a turn."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Iterable[str],
        *,
        repeats: bool = False,
        end: int | None = None,
        version: int = 0,
        delay_s: float = 0.0,
        read: Callable[[Sequence[int], str, str], Action] = read_words,
    ) -> None:
        """Take the script.

        Args:
            repeats: Whether the script begins again at its end. Another one raises
                LookupError there.
            end: The token that ends a turn; the tokenizer's eos_token if None.
            version: The policy version of each token.
            delay_s: Seconds that each call takes.
            read: Makes the action of the tokens, the text without the token that ended
                the turn, and "stop" or "length".
        """
        self.calls: list[SampleCall] = []
        self._tokenizer = tokenizer
        self._texts: Iterator[str] = itertools.cycle(texts) if repeats else iter(texts)
        self._end = int(tokenizer.eos_token_id) if end is None else end
        self._version = version
        self._delay_s = delay_s
        self._read = read

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        tools: Sequence[ToolSchema],
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        listener: Listener | None = None,
    ) -> Sampled:
        """Return the next text as a turn, cut at `max_tokens` or a text to stop at.

        The script holds to a constraint or not. The log-prob of the n-th token of a
        turn is -n / 100.
        """
        self.calls.append(
            SampleCall(list(tokens), seed, max_tokens, tools, stop, constraint)
        )
        await asyncio.sleep(self._delay_s)
        text = next(self._texts, None)
        if text is None:
            raise LookupError(f"the script has {len(self.calls) - 1} texts")

        encoded = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        finish = "stop"
        sampled = [*encoded, self._end]
        count = self._length_at(stop, encoded)
        if count is not None:
            sampled = sampled[:count]
            text = str(self._tokenizer.decode(sampled))
        if len(sampled) > max_tokens:
            finish = "length"
            sampled = sampled[:max_tokens]
            text = str(self._tokenizer.decode(sampled))
        return Sampled(
            tokens=sampled,
            log_probs=[-n / 100 for n in range(1, len(sampled) + 1)],
            versions=[(0, self._version)],
            action=self._read(sampled, text, finish),
        )

    def _length_at(self, stop: Sequence[str], tokens: list[int]) -> int | None:
        """Return how many tokens have the first text to stop at; None for no text."""
        for count in range(1, len(tokens) + 1 if stop else 0):
            text = str(self._tokenizer.decode(tokens[:count]))
            if any(each in text for each in stop):
                return count
        return None
