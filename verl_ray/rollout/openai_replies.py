"""Replies of OpenAI's API: JSON values of responses, stream events and errors.

Invariant: a reply has OpenAI's fields, and every choice also `policy_versions`: pairs
of the first token of a span and the policy version of that span. Log-probs are those
of the distribution that was sampled from. Deliberately not here: calls
(`openai_api.py`), and HTTP (`endpoint.py`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ray.data.stages import Finish
from verl_ray.errors import (
    CallRefused,
    CannotGenerate,
    DataError,
    EngineFailed,
    RolloutError,
)
from verl_ray.rollout.openai_api import ApiCall, ChatCall, CompletionCall
from verl_ray.rollout.requests import PromptLogProbs

FINISH_REASONS = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.ABORTED: "abort",
}
"""Values of `finish_reason`.

"abort" marks a response that a weight update or sleep has preempted; the reply has the
tokens that were sampled until then.
"""


@dataclass(frozen=True)
class ChoiceDelta:
    """The part of a choice that was not sent before.

    Attributes:
        choice: Index of the choice in the reply.
        first_token: Index of `tokens[0]` in the response.
        text: The new text.
        tokens: The new token ids.
        log_probs: The log-prob of each new token.
        version_spans: Pairs of the first token of a span, as an index in the response,
            and its policy version.
        finish: The finish reason; None while more follows.
        prompt: Log-probs of the prompt, where the call asks for them.
    """

    choice: int
    first_token: int
    text: str
    tokens: list[int]
    log_probs: list[float]
    version_spans: tuple[tuple[int, int], ...]
    finish: str | None
    prompt: PromptLogProbs | None = None

    @classmethod
    def join(cls, deltas: list[ChoiceDelta]) -> ChoiceDelta:
        """Return a whole choice from its deltas, which are in order."""
        tokens: list[int] = []
        log_probs: list[float] = []
        spans: list[tuple[int, int]] = []
        for delta in deltas:
            tokens += delta.tokens
            log_probs += delta.log_probs
            for span in delta.version_spans:
                # A span may continue over the border between two deltas.
                if not spans or spans[-1][1] != span[1]:
                    spans.append(span)

        return cls(
            choice=deltas[0].choice,
            first_token=0,
            text="".join(delta.text for delta in deltas),
            tokens=tokens,
            log_probs=log_probs,
            version_spans=tuple(spans),
            finish=deltas[-1].finish,
            prompt=deltas[0].prompt,
        )


class ReplyBuilder:
    """JSON values of the reply to a call."""

    def __init__(
        self, call: ApiCall, head: Mapping[str, object], spell: Callable[[int], str]
    ) -> None:
        """Prepare the reply to `call`.

        Args:
            call: The call, which decides which fields the reply has.
            head: The fields with which every object begins.
            spell: Returns the text of a token.
        """
        self._call = call
        self._head = head
        self._spell = spell
        self._is_chat = isinstance(call, ChatCall)
        self._object = "chat.completion" if self._is_chat else "text_completion"

    def whole(
        self,
        choices: list[ChoiceDelta],
        prompts: list[list[int]],
        usage: Mapping[str, int],
    ) -> dict[str, object]:
        """Return the reply to a call that does not stream.

        Args:
            choices: All choices, whole.
            prompts: The token ids of each choice's prompt.
            usage: The numbers of tokens.
        """
        pairs = zip(choices, prompts, strict=True)
        reply: dict[str, object] = {
            **self._head,
            "object": self._object,
            "choices": [
                self._choice(choice, "message", prompt) for choice, prompt in pairs
            ],
        }
        if self._is_chat and self._call.return_token_ids:
            reply["prompt_token_ids"] = prompts[0]
        reply["usage"] = usage
        return reply

    def event(self, delta: ChoiceDelta, prompt: list[int]) -> dict[str, object]:
        """Return an event of a stream, with the prompt's ids in a choice's first."""
        is_first = delta.first_token == 0
        choice = self._choice(delta, "delta", prompt if is_first else None)

        event: dict[str, object] = {
            **self._head,
            "object": self._stream_object,
            "choices": [choice],
        }
        if is_first and self._is_chat and self._call.return_token_ids:
            event["prompt_token_ids"] = prompt
        return event

    def usage_event(self, usage: Mapping[str, int]) -> dict[str, object]:
        """Return the last event of a stream that is to include the usage."""
        return {
            **self._head,
            "object": self._stream_object,
            "choices": [],
            "usage": usage,
        }

    @property
    def _stream_object(self) -> str:
        return "chat.completion.chunk" if self._is_chat else self._object

    def _choice(
        self, delta: ChoiceDelta, key: str, prompt: list[int] | None
    ) -> dict[str, object]:
        """Return a choice, or a part of it.

        Args:
            delta: The text and tokens.
            key: The field of a chat reply that has the text: "message" or "delta".
            prompt: The prompt's token ids where the reply may contain them.
        """
        choice: dict[str, object] = {
            "index": delta.choice,
            "finish_reason": delta.finish,
            "logprobs": self._log_probs(delta, prompt),
            "policy_versions": delta.version_spans,
        }

        if not self._is_chat:
            choice["text"] = delta.text
        elif key == "message" or delta.first_token == 0:
            choice[key] = {"role": "assistant", "content": delta.text}
        else:
            choice[key] = {"content": delta.text}

        if self._call.return_token_ids:
            choice["token_ids"] = delta.tokens
            if not self._is_chat and prompt is not None:
                choice["prompt_token_ids"] = prompt
        return choice

    def _log_probs(
        self, delta: ChoiceDelta, prompt: list[int] | None
    ) -> dict[str, object] | None:
        if isinstance(self._call, CompletionCall):
            if self._call.logprobs is None:
                return None
            return self._completion_log_probs(self._call, delta, prompt)
        if isinstance(self._call, ChatCall) and not self._call.logprobs:
            return None

        names = self._names(delta.tokens)
        pairs = zip(names, delta.log_probs, strict=True)
        return {
            "content": [
                {
                    "token": name,
                    "logprob": log_prob,
                    "bytes": list(name.encode()),
                    "top_logprobs": [],
                }
                for name, log_prob in pairs
            ]
        }

    def _completion_log_probs(
        self, call: CompletionCall, delta: ChoiceDelta, prompt: list[int] | None
    ) -> dict[str, object]:
        """Return the log-probs of a completion, behind those of an echoed prompt.

        The first token of a prompt has none.
        """
        names = self._names(delta.tokens)
        log_probs: list[float | None] = [*delta.log_probs]
        # The likeliest token of a greedy response is the one that was sampled.
        pairs = zip(names, delta.log_probs, strict=True)
        top: list[dict[str, float] | None] = [dict([pair]) for pair in pairs]

        if call.scores_prompt and prompt is not None:
            of_prompt = self._names(prompt)
            names = of_prompt + names
            scored: list[float] = []
            tops: list[dict[str, float]] = []
            if delta.prompt is not None:
                scored = delta.prompt.log_probs.tolist()
                tops = self._tops(of_prompt[1:], delta.prompt)
            log_probs = [None, *scored, *log_probs]
            top = [None, *tops, *top]

        return {
            "tokens": names,
            "token_logprobs": log_probs,
            "top_logprobs": top if call.logprobs else None,
        }

    def _tops(self, names: list[str], prompt: PromptLogProbs) -> list[dict[str, float]]:
        """Return the log-probs of a prompt's tokens and of the likeliest ones."""
        columns = zip(
            names,
            prompt.log_probs.tolist(),
            self._names(prompt.best_tokens.tolist()),
            prompt.best_log_probs.tolist(),
            strict=True,
        )
        # Two tokens may have the same text, and the likelier one has it then.
        return [{name: own} | {best: most} for name, own, best, most in columns]

    def _names(self, tokens: list[int]) -> list[str]:
        if self._call.return_tokens_as_token_ids:
            return [f"token_id:{token}" for token in tokens]
        return [self._spell(token) for token in tokens]


def usage_of(
    prompts: Sequence[list[int]], deltas: Sequence[ChoiceDelta]
) -> dict[str, int]:
    """Return the numbers of tokens of the prompts and of all choices."""
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(len(delta.tokens) for delta in deltas)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_body(error: Exception) -> dict[str, Any]:
    """Return an error in OpenAI's form.

    An error that is not the client's mistake is also printed to the process's log.
    """
    param = None
    if isinstance(error, CallRefused):
        status = error.status
        param = error.param
    elif isinstance(error, CannotGenerate):
        status = 503
    elif _is_refusal(error):
        status = 400
    else:
        status = 500
        traceback.print_exception(error)

    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {
        "error": {"message": str(error), "type": kind, "param": param, "code": status}
    }


def _is_refusal(error: Exception) -> bool:
    """Whether the error is about the request, and not about the engine."""
    if isinstance(error, EngineFailed):
        return False
    return isinstance(error, RolloutError | DataError)
