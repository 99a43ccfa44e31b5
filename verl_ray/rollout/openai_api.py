"""Calls of OpenAI's API: completions and chat completions, with their fields.

Invariant: a field that would change the result is honoured, or refused by its name. In
addition to OpenAI's fields there are vLLM's `top_k`, `stop_token_ids`, `ignore_eos`,
`session_id`, `chat_template_kwargs`, `return_token_ids` and
`return_tokens_as_token_ids`, and `abort_is_error` of this project. Deliberately not
here: replies (`openai_replies.py`), HTTP (`endpoint.py`), tokens of texts, and
generation (`choices.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from verl_ray.config.data import RESERVED_ARGUMENTS
from verl_ray.config.rollout import VLLM_LEAST_TEMPERATURE
from verl_ray.data.field_values import Message
from verl_ray.errors import CallRefused

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
