"""The choices of an API call: generation requests, and the text and tokens they yield.

Invariant: every request is preemptible and has a seed of the call's own, so it changes
no response of the run.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.columns.stages import Finish
from verl_ray.config.rollout import SCORED_PROMPT_TOKENS
from verl_ray.data.encoding import encode
from verl_ray.data.tokenizers import TemplateArguments, render
from verl_ray.errors import CallRefused
from verl_ray.rollout.openai_api import (
    FINISH_REASONS,
    SEEDS,
    ApiCall,
    ChatCall,
    ChoiceDelta,
    CompletionCall,
    refuse_mixtures,
)
from verl_ray.rollout.requests import Chunk, GenerationRequest, Sampling, Tokens
from verl_ray.rollout.texts import GrowingText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHOICES = 1024

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat completion may fill the model's length."""

_SHRINKS = 4
"""How many times shorter normalisation may make a text before it is tokenized."""


@dataclass(frozen=True)
class Choice:
    """A response to a prompt of a call.

    Attributes:
        request: The request; its id is the index of the choice in the reply.
        prompt: The prompt's token ids.
        text: The text of the response so far.
        echo: The text to put before the response.
        deltas: Everything that was generated so far.
    """

    request: GenerationRequest
    prompt: list[int]
    text: GrowingText
    echo: str = ""
    deltas: list[ChoiceDelta] = field(default_factory=list)

    def add(self, chunk: Chunk) -> ChoiceDelta:
        """Add a chunk, and return what is new, up to the end of a stop string."""
        tokens = chunk.tokens.tolist()

        # The token that ends a response is not part of its text.
        text_tokens = tokens[:-1] if chunk.finish is Finish.STOP else tokens
        count, text = self.text.add(text_tokens, last=chunk.finish is not None)

        finish = None if chunk.finish is None else FINISH_REASONS[chunk.finish]
        if self.text.stopped:
            tokens = tokens[:count]
            finish = FINISH_REASONS[Finish.STOP]

        end = chunk.first_token + len(tokens)
        delta = ChoiceDelta(
            choice=self.request.request_id,
            first_token=chunk.first_token,
            text=text,
            tokens=tokens,
            log_probs=chunk.log_probs[: len(tokens)].tolist(),
            version_spans=tuple(span for span in chunk.version_spans if span[0] < end),
            finish=finish,
            prompt=chunk.prompt,
        )
        self.deltas.append(delta)
        return delta

    def whole(self) -> ChoiceDelta:
        """Return all that was generated, with the text to put before it."""
        joined = ChoiceDelta.join(self.deltas)
        return replace(joined, text=self.echo + joined.text)


class ChoiceFactory:
    """Choices for the calls to a model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: tuple[int, ...],
        max_model_len: int,
        arguments: TemplateArguments | None = None,
    ) -> None:
        """Prepare for calls.

        Args:
            tokenizer: The model's tokenizer.
            end_tokens: Tokens that end a response.
            max_model_len: Largest number of tokens of prompt and response together.
            arguments: Variables of the chat template, where a call has no others.
        """
        self._tokenizer = tokenizer
        self._arguments = arguments or {}
        self._end_tokens = end_tokens
        self._max_model_len = max_model_len
        longest_token = max(map(len, tokenizer.get_vocab()))
        self._longest_text = _SHRINKS * max_model_len * longest_token

    def choices(self, call: ApiCall) -> list[Choice]:
        """Return `call.n` choices for each prompt, prompt by prompt.

        Choice j of a prompt has the seed `call.seed` + j.

        Raises:
            CallRefused: A prompt is too long, there are too many choices, or fields are
                not supported together.
            DataError: The tokenizer or the chat template refuses a prompt.
        """
        refuse_mixtures(call)
        scores_prompt = isinstance(call, CompletionCall) and call.scores_prompt
        choices: list[Choice] = []
        for prompt, echo in zip(self._prompts(call), self._echoes(call), strict=True):
            if scores_prompt:
                _require_scorable(prompt)
            sampling = self._sampling(call, len(prompt))
            prompt_ids = prompt.tolist()
            for number in range(call.n):
                if call.seed is None:
                    seed = secrets.randbelow(SEEDS)
                else:
                    seed = (call.seed + number) % SEEDS

                request = GenerationRequest(
                    request_id=len(choices),
                    tokens=prompt,
                    sampling=sampling,
                    seed=seed,
                    # A stop string can only be noticed while tokens are sampled.
                    stream=call.stream or bool(call.stop),
                    session=call.session_id,
                    preemptible=True,
                    scores_prompt=scores_prompt,
                )
                text = GrowingText(self._tokenizer, call.stop)
                choices.append(Choice(request, prompt_ids, text, echo))
        return choices

    def _echoes(self, call: ApiCall) -> list[str]:
        """Return the text to put before the responses to each prompt."""
        if isinstance(call, ChatCall):
            return [""]
        assert isinstance(call, CompletionCall)
        if not call.echo:
            return [""] * len(call.prompt)
        return [
            prompt if isinstance(prompt, str) else str(self._tokenizer.decode(prompt))
            for prompt in call.prompt
        ]

    def _prompts(self, call: ApiCall) -> list[Tokens]:
        if isinstance(call, ChatCall):
            return [self._chat_prompt(call)]

        assert isinstance(call, CompletionCall)
        if len(call.prompt) * call.n > MAX_CHOICES:
            raise CallRefused(
                f"{len(call.prompt)} prompts with n = {call.n} are more than the"
                f" {MAX_CHOICES} responses of one call",
                "n",
            )
        texts = (prompt for prompt in call.prompt if isinstance(prompt, str))
        self._require_short(texts, "prompt")

        prompts: list[Tokens] = []
        for prompt in call.prompt:
            if isinstance(prompt, str):
                prompts.append(self._encode(prompt, "prompt", special=True))
            else:
                prompts.append(np.array(prompt, np.int32))
        return prompts

    def _chat_prompt(self, call: ChatCall) -> Tokens:
        if not self._tokenizer.chat_template:
            raise CallRefused(
                "messages: the tokenizer of this model has no chat template; use"
                " /v1/completions"
            )
        contents = (str(message["content"]) for message in call.messages)
        self._require_short(contents, "messages")

        (text,) = render(
            self._tokenizer,
            [call.messages],
            add_generation_prompt=True,
            where=lambda _: "messages",
            arguments=[{**self._arguments, **call.chat_template_kwargs}],
        )
        # The template has written the special tokens already.
        return self._encode(text, "messages", special=False)

    def _encode(self, text: str, field: str, *, special: bool) -> Tokens:
        tokens = encode(self._tokenizer, [text], special=special, where=lambda _: field)
        return tokens[0]

    def _require_short(self, texts: Iterable[str], field: str) -> None:
        """Refuse texts that are certainly too long, since tokenizing takes time."""
        for text in texts:
            if len(text) > self._longest_text:
                raise CallRefused(
                    f"{len(text)} characters are more than {self._max_model_len} tokens"
                    " have",
                    field,
                )

    def _sampling(self, call: ApiCall, prompt_tokens: int) -> Sampling:
        available = self._max_model_len - prompt_tokens
        default = available
        if not isinstance(call, ChatCall):
            default = min(available, DEFAULT_COMPLETION_TOKENS)

        field, requested = _max_tokens(call)
        if available < 1 or (requested or 0) > available:
            described = f"{prompt_tokens} prompt tokens"
            if requested:
                described += f" and {field} = {requested}"
            if available < 1:
                field = "messages" if isinstance(call, ChatCall) else "prompt"
            raise CallRefused(
                f"{described} are more than the {self._max_model_len} tokens of this"
                " endpoint",
                field,
            )

        end_tokens = () if call.ignore_eos else self._end_tokens
        return Sampling(
            temperature=call.temperature,
            top_p=call.top_p,
            # vLLM's clients also write 0 for all tokens.
            top_k=call.top_k or -1,
            max_tokens=requested or default,
            stop_token_ids=tuple(sorted({*end_tokens, *call.stop_token_ids})),
        )


def _require_scorable(prompt: Tokens) -> None:
    """Refuse a prompt whose log-probs need more memory than the plan counts."""
    if len(prompt) > SCORED_PROMPT_TOKENS:
        raise CallRefused(
            f"echo = True with logprobs: {len(prompt)} prompt tokens are more than the"
            f" {SCORED_PROMPT_TOKENS} whose log-probs the memory of this endpoint is"
            " planned for; send a shorter prompt, or leave out echo or logprobs",
            "echo",
        )


def _max_tokens(call: ApiCall) -> tuple[str, int | None]:
    """Return the field that limits a response, and its value, if any.

    A chat call has two such fields, of which `max_completion_tokens` is the newer one
    and comes first.
    """
    if isinstance(call, ChatCall) and call.max_completion_tokens is not None:
        return "max_completion_tokens", call.max_completion_tokens
    return "max_tokens", call.max_tokens


def prompts_of(call: ApiCall, choices: Sequence[Choice]) -> list[list[int]]:
    """Return the token ids of each prompt, which `call.n` choices share."""
    return [choice.prompt for choice in choices[:: call.n]]
