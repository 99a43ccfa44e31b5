"""Calls and replies of OpenAI's API: completions and chat completions.

Invariant: a field that would change the result is honoured, or refused by its name. In
addition to OpenAI's fields there are vLLM's `top_k`, `stop_token_ids`, `ignore_eos`,
`session_id`, `chat_template_kwargs`, `return_token_ids` and
`return_tokens_as_token_ids`, and `abort_is_error` of this project. A reply has OpenAI's
fields, and every choice also `policy_versions`: pairs of the first token of a span and
the policy version of that span. Log-probs are those of the distribution that was
sampled from.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from verl_ray.columns.stages import Finish
from verl_ray.config.data import RESERVED_ARGUMENTS
from verl_ray.config.rollout import VLLM_LEAST_TEMPERATURE
from verl_ray.data.fields import Message
from verl_ray.errors import (
    CallRefused,
    CannotGenerate,
    DataError,
    EngineFailed,
    RolloutError,
)
from verl_ray.rollout.requests import PromptLogProbs

SEEDS = 2**63
"""Number of seeds: a seed is in [0, 2^63)."""

WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
    }
)
"""Fields whose values do not matter, since they change no result here."""

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "priority": (0,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
}
"""Fields that are not supported, with the values at which they have no effect."""

# --------------------------------------------------------------------------- validators


def _require_temperature(value: float) -> float:
    if 0 < value < VLLM_LEAST_TEMPERATURE:
        raise ValueError(
            f"expected 0, which is greedy, or at least {VLLM_LEAST_TEMPERATURE}"
        )
    return value


def _as_list_of_texts(value: object) -> object:
    """Turn a single text into a list; other values are validated as they are."""
    return [value] if isinstance(value, str) else value


def _as_list_of_prompts(value: object) -> object:
    """Turn a single prompt, a text or token ids, into a list of prompts."""
    prompts: list[object] = [value]
    if isinstance(value, list) and not all(type(token) is int for token in value):
        prompts = value

    for prompt in prompts:
        is_valid = isinstance(prompt, str) or _is_token_ids(prompt)
        if not prompt or not is_valid:
            raise ValueError(
                "expected a text, a list of token ids, or a list of either, and nothing"
                " empty"
            )
    return prompts


def _is_token_ids(value: object) -> bool:
    # A bool is an int for isinstance, but no token id.
    return isinstance(value, list) and all(
        type(token) is int and 0 <= token < 2**31 for token in value
    )


def _as_messages(value: object) -> object:
    """Return messages of role and content, each content being a single text."""
    messages = value if isinstance(value, list) else []
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError("expected a list of messages")
    return [_as_message(message) for message in messages]


def _as_message(fields: Message) -> Message:
    # Clients send back the messages they got, which have fields without a value.
    message = {name: value for name, value in fields.items() if value is not None}

    content = message.get("content")
    if isinstance(content, list) and all(map(_is_text_part, content)):
        texts = [str(part.get("text")) for part in content]
        message["content"] = "\n".join(texts)

    has_texts_only = all(isinstance(value, str) for value in message.values())
    if message.keys() != {"role", "content"} or not has_texts_only:
        raise ValueError(
            "expected messages of role and content, which are texts, found"
            f" {_shortened(message)}"
        )
    return message


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _without_reserved(arguments: dict[str, Any]) -> dict[str, Any]:
    reserved = sorted(RESERVED_ARGUMENTS & arguments.keys())
    if reserved:
        raise ValueError(f"the endpoint itself sets {reserved[0]}; leave it out")
    return arguments


# -------------------------------------------------------------------------------- calls

Count = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_require_temperature)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], BeforeValidator(_as_list_of_texts)]


class StreamOptions(BaseModel):
    """Options of a call that streams its reply."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = False


class ApiCall(BaseModel):
    """Fields that both kinds of calls have, by their names in the JSON object."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False
    )
    ID_PREFIX: ClassVar[str]
    """Beginning of the ids of replies."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] | None = None
    max_tokens: Count | None = None
    stop: Texts = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    session_id: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    abort_is_error: bool = False
    """Reply 503 in place of a response that sleep or a weight update has cut short, for
    clients that would take it for a whole one; ignored by streams."""


class CompletionCall(ApiCall):
    """A call that continues texts or token ids."""

    ID_PREFIX = "cmpl"

    prompt: Annotated[list[Any], BeforeValidator(_as_list_of_prompts)]
    """Prompts, each a text or token ids."""
    logprobs: Literal[0, 1] | None = None
    """0 adds the log-probs of the sampled tokens. 1 adds those of the likeliest tokens
    in their places, which are known of a greedy response; no others are."""
    echo: bool = False
    """Put the prompt before the response, with the log-probs of its tokens."""

    @property
    def scores_prompt(self) -> bool:
        """Whether the reply has log-probs of the prompt."""
        return self.echo and self.logprobs is not None


class ChatCall(ApiCall):
    """A call that responds to a conversation."""

    ID_PREFIX = "chatcmpl"

    messages: Annotated[list[Message], BeforeValidator(_as_messages)]
    chat_template_kwargs: Annotated[
        dict[str, Any], AfterValidator(_without_reserved)
    ] = {}
    """Variables of the chat template; they go before those of the run."""
    max_completion_tokens: Count | None = None
    logprobs: bool = False


def refuse_mixtures(call: ApiCall) -> None:
    """Refuse fields that each are supported, and not together.

    Raises:
        CallRefused: The error names one of the fields.
    """
    if not isinstance(call, CompletionCall):
        return
    if call.logprobs == 1 and call.temperature != 0:
        raise CallRefused(
            "logprobs = 1: the likeliest tokens are known of greedy responses alone;"
            " set temperature = 0 or logprobs = 0",
            "logprobs",
        )
    if call.echo and call.stream:
        raise CallRefused("echo = True: a stream has no prompt; leave it out", "echo")


C = TypeVar("C", bound=ApiCall)


def read_call(kind: type[C], body: object) -> C:
    """Return the call that a JSON value describes.

    Raises:
        CallRefused: The value is no call of this kind. The error names the first field
            that cannot be honoured.
    """
    if not isinstance(body, dict):
        raise CallRefused(f"expected a JSON object, found {type(body).__name__}")

    fields = {
        name: value for name, value in body.items() if not _has_no_effect(name, value)
    }
    try:
        return kind.model_validate(fields)
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]

    name = str(first["loc"][0])
    if first["type"] == "missing":
        raise CallRefused(f"{name} is missing", name)

    shown = f"{name} = {_shortened(fields[name])}"
    is_unknown_field = first["type"] == "extra_forbidden" and len(first["loc"]) == 1
    if is_unknown_field:
        raise CallRefused(
            f"{shown}: this endpoint does not support it; leave it out", name
        )
    raise CallRefused(f"{shown}: {first['msg']}", name)


def _has_no_effect(name: str, value: object) -> bool:
    if value is None or name in WITHOUT_EFFECT:
        return True
    return value in NEUTRAL_VALUES.get(name, ())


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]} ..."


# ------------------------------------------------------------------------------ replies

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
            prompt_names = self._names(prompt)
            names = prompt_names + names
            scored: list[float] = []
            tops: list[dict[str, float]] = []
            if delta.prompt is not None:
                scored = delta.prompt.log_probs.tolist()
                tops = self._tops(prompt_names[1:], delta.prompt)
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
