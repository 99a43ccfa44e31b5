"""The requests of lm-evaluation-harness, against a real engine and Transformers.

They are those that `local-completions` and `local-chat-completions` of lm_eval 0.4.13
send, written down from runs of the package. docs/evaluation.md has the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_ray.config.rollout import EndpointConfig
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import CallRefused, CannotGenerate
from verl_ray.rollout.choices import ChoiceFactory
from verl_ray.rollout.endpoint import Endpoint, _refuse_aborted
from verl_ray.rollout.openai_api import ChatCall, ChoiceDelta, CompletionCall, read_call
from verl_ray.rollout.server import RolloutServer
from verl_ray.rollout.vllm_engine import VllmEngine

pytestmark = pytest.mark.vllm

MODEL = "policy"
SETTINGS = EndpointConfig(
    enabled=True, host="127.0.0.1", port=0, in_flight=8, token_env=None
)

Post = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def path(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen3", tie=False)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    return tokenizer


def posting(
    server: RolloutServer, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Post]:
    endpoint = Endpoint(
        server, tokenizer, SETTINGS, port=0, model=MODEL, max_model_len=96
    )

    def post(route: str, **fields: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{endpoint.port}/v1/{route}"
        fields = {"model": MODEL, "seed": 1234, "temperature": 0, **fields}
        return httpx.post(url, json=fields, timeout=60)

    yield post
    endpoint.close()
    server.close()


@pytest.fixture(scope="module")
def post(
    start_vllm: Callable[..., VllmEngine],
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[Post]:
    def start() -> VllmEngine:
        torch.set_num_threads(1)
        return start_vllm(path, initial_version=0)

    yield from posting(RolloutServer(start), tokenizer)


def of_transformers(model: PreTrainedModel, row: list[int]) -> np.ndarray:
    """The log-probs of every token at each place of a row, [tokens - 1, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, :-1].float()
    return logits.log_softmax(-1).numpy()


def test_log_likelihoods_are_those_of_transformers(
    post: Post, path: Path, tokenizer: PreTrainedTokenizerBase, load_reference: Any
) -> None:
    """As of multiple_choice and loglikelihood tasks: a batch of contexts with their
    continuations, of which the last generated token is left out.
    """
    model = load_reference(path)
    rows = [list(tokenizer(text)["input_ids"]) for text in ("12+3=15", "7+7=9", "1=")]
    reply = post("completions", prompt=rows, max_tokens=1, logprobs=1, echo=True)
    assert reply.status_code == 200, reply.text
    choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    for row, choice in zip(rows, choices, strict=True):
        found = choice["logprobs"]
        assert len(found["token_logprobs"]) == len(row) + 1
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["tokens"][:-1] == [tokenizer.decode([token]) for token in row]
        assert choice["text"].startswith(tokenizer.decode(row))

        expected = of_transformers(model, row)
        own = expected[np.arange(len(row) - 1), row[1:]]
        assert found["token_logprobs"][1:-1] == pytest.approx(own.tolist(), abs=1e-4)
        # The harness compares a token with the likeliest one in its place.
        most = [max(top.values()) for top in found["top_logprobs"][1:-1]]
        assert most == pytest.approx(expected.max(axis=1).tolist(), abs=1e-4)
        assert all(len(top) <= 2 for top in found["top_logprobs"][1:])
        # The sampled token is the likeliest one behind the row.
        (pair,) = found["top_logprobs"][-1].items()
        assert pair == (found["tokens"][-1], found["token_logprobs"][-1])


def test_a_greedy_continuation_is_its_own_likeliest(
    post: Post, tokenizer: PreTrainedTokenizerBase
) -> None:
    context = list(tokenizer("12+3=")["input_ids"])
    asked = {"max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    greedy = post("completions", prompt=[context], **asked).json()["choices"][0]
    row = context + greedy["token_ids"]
    scored = post("completions", prompt=[row], max_tokens=1, logprobs=1, echo=True)
    found = scored.json()["choices"][0]["logprobs"]
    places = slice(len(context), -1)
    for own, top in zip(
        found["token_logprobs"][places], found["top_logprobs"][places], strict=True
    ):
        assert own == max(top.values())


def test_a_text_that_is_echoed_is_the_one_that_was_sent(post: Post) -> None:
    plain = post("completions", prompt="1+1=", max_tokens=3).json()["choices"][0]
    echoed = post("completions", prompt="1+1=", max_tokens=3, echo=True).json()
    (choice,) = echoed["choices"]
    assert choice["text"] == "1+1=" + plain["text"] and choice["logprobs"] is None


def test_generations_end_at_the_stop_strings(
    post: Post, tokenizer: PreTrainedTokenizerBase
) -> None:
    """As of generate_until tasks, whose `until` and end token become stop strings."""
    rows = [list(tokenizer(text)["input_ids"]) for text in ("12+3=", "7+7=")]
    free = post("completions", prompt=rows, max_tokens=20, stop=["<eos>"]).json()
    until = free["choices"][0]["text"][5:7]
    cut = post("completions", prompt=rows, max_tokens=20, stop=[until, "<eos>"]).json()
    whole = free["choices"][0]["text"]
    assert cut["choices"][0]["text"] == whole[: whole.index(until)]
    assert [choice["index"] for choice in cut["choices"]] == [0, 1]

    messages = [{"role": "user", "content": "12+3"}]
    chat = post("chat/completions", messages=messages, max_tokens=20, stop=["\n"])
    assert chat.status_code == 200, chat.text
    assert chat.json()["choices"][0]["message"]["content"] == whole


def test_what_is_not_known_is_refused(post: Post) -> None:
    sampled = post("completions", prompt="1", logprobs=1, temperature=1)
    assert sampled.status_code == 400 and "greedy" in sampled.text
    streamed = post("completions", prompt="1", echo=True, stream=True)
    assert streamed.status_code == 400 and "a stream has no prompt" in streamed.text


def test_a_prompt_that_needs_too_much_memory_is_not_scored(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    factory = ChoiceFactory(tokenizer, end_tokens=(), max_model_len=4096)
    for length, logprobs in ((2048, 1), (2049, None)):
        call = CompletionCall(prompt=[[3] * length], echo=True, logprobs=logprobs)
        assert len(factory.choices(call.model_copy(update={"temperature": 0}))) == 1
    long = CompletionCall(prompt=[[3] * 2049], echo=True, logprobs=0)
    with pytest.raises(CallRefused, match=r"2049 prompt tokens .* the 2048 whose"):
        factory.choices(long)


def test_a_call_has_arguments_for_the_chat_template(path: Path) -> None:
    """Those of a call go before those of the run."""
    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ first }}{{ second }}="
    run_arguments = {"first": 1, "second": 2}
    factory = ChoiceFactory(tokenizer, (), max_model_len=64, arguments=run_arguments)

    def prompt(**fields: object) -> str:
        body = {"messages": [{"role": "user", "content": "0"}], **fields}
        (choice,) = factory.choices(read_call(ChatCall, body))
        return str(tokenizer.decode(choice.prompt))

    assert prompt() == "012="
    assert prompt(chat_template_kwargs={"second": 3}) == "013="
    with pytest.raises(CallRefused, match="the endpoint itself sets tokenize"):
        prompt(chat_template_kwargs={"tokenize": True})


def test_a_response_that_is_cut_by_an_update_is_no_answer() -> None:
    """A harness reads no finish reason, so it is told to send the request again."""
    whole = ChoiceDelta(0, 0, "1", [3], [-0.5], ((0, 0),), "stop")
    cut = ChoiceDelta(1, 0, "1", [3], [-0.5], ((0, 0),), "abort")
    plain = CompletionCall(prompt=["1"])
    _refuse_aborted(plain, [whole, cut])
    for fields in ({"abort_is_error": True}, {"echo": True, "logprobs": 1}):
        call = CompletionCall.model_validate({"prompt": ["1"], **fields})
        _refuse_aborted(call, [whole])
        with pytest.raises(CannotGenerate, match="send it again"):
            _refuse_aborted(call, [whole, cut])
