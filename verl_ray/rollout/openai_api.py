"""OpenAI's completions and chat completions in this project's words: what a call asks, and how it is answered.

Invariant: a field that would change the answer is honoured or refused by its name. Beside OpenAI's fields there are
vLLM's `top_k`, `stop_token_ids`, `ignore_eos`, `session_id`, `return_token_ids` and `return_tokens_as_token_ids`, and
in every choice `policy_versions`: (first token of a span, its policy version). Log-probs are of the distribution drawn
from. Deliberately not here: HTTP, tokens of texts, and drawing (`endpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from verl_ray.config.rules.rollout import VLLM_LEAST_TEMPERATURE
from verl_ray.data.files import Message
from verl_ray.data.stages import Finish
from verl_ray.errors import CallRefused

FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORTED: "abort"}
"""`finish_reason`; "abort" is a response that gave way to a weight update or to sleep, as far as it got."""

SEEDS = 2**63

WITHOUT_EFFECT = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
})  # fmt: skip
"""Fields that change no answer here, whatever they say."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "min_tokens": (0,),
    "logit_bias": ({},), "best_of": (1,), "echo": (False,), "suffix": ("",), "top_logprobs": (0,), "tools": ([],),
    "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},), "priority": (0,),
    "skip_special_tokens": (True,), "include_stop_str_in_output": (False,), "use_beam_search": (False,),
}  # fmt: skip
"""Fields that are not supported, and the values by which they ask for nothing."""


def _temperature(value: float) -> float:
    if 0 < value < VLLM_LEAST_TEMPERATURE:
        raise ValueError(f"expected 0, which is greedy, or at least {VLLM_LEAST_TEMPERATURE}")
    return value


def _texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _prompts(value: object) -> object:
    """One prompt, as a text or token ids, is a list of one."""
    given = value if isinstance(value, list) and not all(type(token) is int for token in value) else [value]
    for prompt in given:
        is_tokens = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 2**31 for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_tokens):
            raise ValueError("expected a text, a list of token ids, or a list of either, and nothing empty")
    return given


def _messages(value: object) -> object:
    """With contents in one piece, and without the fields that say nothing."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise ValueError("expected a list of messages")
    return [_message(message) for message in value]


def _message(given: Message) -> Message:
    message = {name: field for name, field in given.items() if field is not None}
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        message["content"] = "\n".join(str(part.get("text")) for part in content)
    texts = all(isinstance(field, str) for field in message.values())
    if message.keys() != {"role", "content"} or not texts:
        raise ValueError(f"expected messages of role and content, which are texts, found {_shown(message)}")
    return message


Count = Annotated[int, Field(ge=1)]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_texts)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = False


class Call(BaseModel):
    """What both kinds of calls may ask."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    PREFIX: ClassVar[str]
    """Of the ids of its answers."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_temperature)] = 1.0
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


class CompletionCall(Call):
    PREFIX = "cmpl"

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    """Each a text or token ids."""
    logprobs: Literal[0] | None = None
    """Those of the drawn tokens; there are no others."""


class ChatCall(Call):
    PREFIX = "chatcmpl"

    messages: Annotated[list[Message], BeforeValidator(_messages)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False


C = TypeVar("C", bound=Call)


def read_call(kind: type[C], body: object) -> C:
    """Raises CallRefused, which names the first field that cannot be honoured."""
    if not isinstance(body, dict):
        raise CallRefused(f"expected a JSON object, found {type(body).__name__}")
    given = {
        name: value
        for name, value in body.items()
        if value is not None and name not in WITHOUT_EFFECT and not _asks_for_nothing(name, value)
    }
    try:
        return kind.model_validate(given)
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        field = str(first["loc"][0])
        if first["type"] == "missing":
            raise CallRefused(f"{field} is missing", field) from None
        found = f"{field} = {_shown(given[field])}"
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            raise CallRefused(f"{found}: this endpoint does not support it; leave it out", field) from None
        raise CallRefused(f"{found}: {first['msg']}", field) from None


def _asks_for_nothing(name: str, value: object) -> bool:
    return value in NEUTRAL.get(name, ())


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]} ..."


@dataclass(frozen=True)
class Part:
    """What is new of one choice."""

    choice: int
    first_token: int
    text: str
    tokens: list[int]
    log_probs: list[float]
    version_spans: tuple[tuple[int, int], ...]
    finish: str | None  # None = more to come

    @classmethod
    def join(cls, parts: list[Part]) -> Part:
        """All of a choice."""
        spans: list[tuple[int, int]] = []
        for span in (span for part in parts for span in part.version_spans):
            if not spans or spans[-1][1] != span[1]:
                spans.append(span)
        return cls(
            parts[0].choice, 0, "".join(part.text for part in parts), [t for part in parts for t in part.tokens],
            [value for part in parts for value in part.log_probs], tuple(spans), parts[-1].finish,
        )  # fmt: skip


class Answers:
    """The answers to one call, as JSON values."""

    def __init__(self, call: Call, head: Mapping[str, object], spell: Callable[[int], str]) -> None:
        """`head`: what every object begins with. `spell`: the text of one token."""
        self._call, self._head, self._spell = call, head, spell
        self._chat = isinstance(call, ChatCall)
        self._kind = "chat.completion" if self._chat else "text_completion"

    def whole(self, parts: list[Part], prompts: list[list[int]], usage: Mapping[str, int]) -> dict[str, object]:
        """`prompts`: of each choice."""
        choices = [self._choice(part, "message", prompt) for part, prompt in zip(parts, prompts, strict=True)]
        ids = {"prompt_token_ids": prompts[0]} if self._chat and self._call.return_token_ids else {}
        return {**self._head, "object": self._kind, "choices": choices, **ids, "usage": usage}

    def event(self, part: Part, prompt: list[int]) -> dict[str, object]:
        """One piece of a stream."""
        begins = part.first_token == 0
        choice = self._choice(part, "delta", prompt if begins else None)
        ids = {"prompt_token_ids": prompt} if begins and self._chat and self._call.return_token_ids else {}
        return {**self._head, "object": self._stream_kind, "choices": [choice], **ids}

    def last_event(self, usage: Mapping[str, int]) -> dict[str, object]:
        """What ends a stream that is to include the usage."""
        return {**self._head, "object": self._stream_kind, "choices": [], "usage": usage}

    @property
    def _stream_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else self._kind

    def _choice(self, part: Part, key: str, prompt: list[int] | None) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": part.choice,
            "finish_reason": part.finish,
            "logprobs": self._log_probs(part),
            "policy_versions": part.version_spans,
        }
        if self._chat:
            begins = key == "message" or part.first_token == 0
            choice[key] = {"role": "assistant", "content": part.text} if begins else {"content": part.text}
        else:
            choice["text"] = part.text
        if self._call.return_token_ids:
            choice["token_ids"] = part.tokens
            if not self._chat and prompt is not None:
                choice["prompt_token_ids"] = prompt
        return choice

    def _log_probs(self, part: Part) -> dict[str, object] | None:
        if isinstance(self._call, CompletionCall) and self._call.logprobs is None:
            return None
        if isinstance(self._call, ChatCall) and not self._call.logprobs:
            return None
        as_ids = self._call.return_tokens_as_token_ids
        names = [f"token_id:{token}" if as_ids else self._spell(token) for token in part.tokens]
        if not self._chat:
            return {"tokens": names, "token_logprobs": part.log_probs, "top_logprobs": None}
        return {
            "content": [
                {"token": name, "logprob": value, "bytes": list(name.encode()), "top_logprobs": []}
                for name, value in zip(names, part.log_probs, strict=True)
            ]
        }
