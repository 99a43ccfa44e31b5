"""Demonstrations for the calculator: what they show is what an episode would be."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from verl_ray.agents.calculations import (
    TEMPLATE,
    VOCABULARY,
    sample_texts,
    write_calculations,
)
from verl_ray.agents.contract import Action, EpisodeTask, ToolCall
from verl_ray.agents.environments.calculator import CALCULATE, Calculator
from verl_ray.agents.template import Renderer, prefix_problems
from verl_ray.data.conversations import tokenize
from verl_ray.data.tokenizers import load_tokenizer, train_bpe


def records(path: Path, wrong_fraction: float) -> tuple[list[dict[str, Any]], ...]:
    files = write_calculations(
        path, max_operand=99, num_train=2000, num_validation=50, seed=0, wrong_fraction=wrong_fraction
    )  # fmt: skip
    return tuple(
        [json.loads(line) for line in part.jsonl.read_text().splitlines()]
        for part in (files.train, files.validation)
    )


def numbers_of(record: dict[str, Any]) -> tuple[int, int, str, int]:
    """The three numbers of a problem, and the sign before the last."""
    (question,) = record["prompt"]
    read = re.fullmatch(r"(\d+)\*(\d+)([+-])(\d+)", question["content"])
    assert read is not None
    return int(read[1]), int(read[2]), read[3], int(read[4])


def spoken(text: str) -> Action:
    """What the policy writes, as vLLM's parser hermes reads it."""
    opening, closing = "<tool_call>\n", "\n</tool_call>"
    if not text.startswith(opening):
        return Action([1], text)
    call = json.loads(text.removeprefix(opening).removesuffix(closing))
    return Action([1], "", [ToolCall(call["name"], call["arguments"])])


async def played(record: dict[str, Any]) -> float:
    """The score of a demonstration in the environment, which answers as it shows."""
    environment = Calculator()
    _, *shown = record["messages"]
    task = EpisodeTask(record["prompt"], record["answer"])
    begun = await environment.reset(task, 0)
    assert list(begun.messages) == shown[:1]
    for said, replied in zip(shown[1::2], [*shown[2::2], None], strict=True):
        step = await environment.step(spoken(said["content"]))
        assert step.done == (replied is None)
        assert [message["content"] for message in step.messages] == (
            [replied["content"]] if replied else []
        )
    return step.reward


def test_right_demonstrations_are_right_and_wrong_ones_as_many_as_asked_for(
    tmp_path: Path,
) -> None:
    train, held_out = records(tmp_path, wrong_fraction=0.5)
    # Eight of ten that subtract are wrong, and two of ten that add.
    scores: dict[str, list[float]] = {"+": [], "-": []}
    for record in train:
        scores[numbers_of(record)[2]].append(asyncio.run(played(record)))
    means = [sum(each) / len(each) for each in scores.values()]
    assert means == pytest.approx([0.8, 0.2], abs=0.04)

    for record in held_out:
        a, b, sign, c = numbers_of(record)
        assert int(record["answer"]) == a * b + (c if sign == "+" else -c)
        assert len(record["messages"]) == 7 and asyncio.run(played(record)) == 1

    pairs = [
        {frozenset(numbers_of(each)[:2]) for each in part} for part in (train, held_out)
    ]
    assert not pairs[0] & pairs[1]


def test_a_demonstration_has_the_tokens_of_an_episode(tmp_path: Path) -> None:
    train_bpe(tmp_path, sample_texts(), VOCABULARY, TEMPLATE, single_digits=True)
    tokenizer = load_tokenizer(tmp_path)
    assert prefix_problems(tokenizer) == []

    (record, *_), _ = records(tmp_path, wrong_fraction=0)
    tokens, mask = tokenize(
        [record["messages"]], ["a"], tokenizer, apply_chat_template=True, special_tokens="refuse",
        responses="all",
    )  # fmt: skip

    # An episode: its prompt with tools, and behind each turn what the template adds.
    renderer = Renderer(tokenizer)
    row = renderer.begin(record["prompt"], [CALCULATE])
    is_sampled = [False] * len(row)
    _, *shown = record["messages"]
    for at in (1, 3, 5):
        sampled = [*tokenizer.encode(shown[at]["content"]), tokenizer.eos_token_id]
        rest = renderer.continuation(
            shown[: at + 1], shown[at + 1 : at + 2], [CALCULATE], sampled
        )
        assert rest is not None
        row += sampled + rest
        is_sampled += [True] * len(sampled) + [False] * len(rest)
    assert tokens[0].tolist() == row[: len(tokens[0])]
    assert mask.tolist() == is_sampled[: len(tokens[0])]
    assert sum(is_sampled) == sum(mask.tolist())
