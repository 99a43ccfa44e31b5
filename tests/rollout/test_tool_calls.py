"""Sampled tokens as actions, by vLLM's own parsers."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from verl_ray.agents.contract import ToolCall
from verl_ray.data.stages import Finish
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.rollout.tool_calls import ActionReader

pytestmark = pytest.mark.vllm

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]  # fmt: skip


def test_turns_are_parsed_without_building_the_vocabulary_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    character_tokenizer(tmp_path, string.ascii_lowercase + string.digits + ' {}":,_')
    tokenizer = load_tokenizer(tmp_path)
    # The parser looks it up.
    tokenizer.add_tokens(["<|python_tag|>"])
    get_vocab = PreTrainedTokenizerFast.get_vocab
    built: list[int] = []

    def counted(tokenizer: Any) -> dict[str, int]:
        built.append(1)
        return get_vocab(tokenizer)

    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", counted)
    reader = ActionReader(tokenizer, "llama3_json")
    before = len(built)
    for number in range(3):
        text = f'{{"name": "add", "parameters": {{"of": {number}}}}}'
        tokens = tokenizer.encode(text)
        action = reader([*tokens, tokenizer.eos_token_id], Finish.STOP, TOOLS)
        assert action.tool_calls == [ToolCall("add", {"of": number})]
        assert action.parse_error is None and action.finish == "stop"
    assert len(built) == before
