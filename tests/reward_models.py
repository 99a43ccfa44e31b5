"""Small reward models with tokenizers of their own, rollouts for them, and what
transformers makes of both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification

from tests.rows import rollouts_of
from verl_ray.columns.batch import Ragged
from verl_ray.columns.stages import Finish, Rollouts
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.fields import as_messages
from verl_ray.data.tokenizers import character_tokenizer, train_bpe
from verl_ray.models.tiny import Architecture, make_tiny

EXACT = 1e-5
FAMILIES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")
SIZES = TinyModelConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_size=32,
    intermediate_size=96,
    tie_embeddings=True,
)
TEXTS = [
    "What is 12 + 30?",
    "The sum of 12 and 30 is 42.",
    "Answer with a number, and be brief.",
    "I do not know it.",
]
BRACKETS = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A chat template of another form than CHATML: it opens with a token of its own, trims, and ends without a newline."""
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    + BRACKETS
)

Prompt = str | list[dict[str, object]]
Row = tuple[Prompt, str, Finish]
"""Prompt, response, how it ended."""

SUM: Prompt = "What is 12 + 30?"
BRIEF: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "12 + 30?"},
]
AGAIN: Prompt = [
    *BRIEF,
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And 1 more?"},
]
ROWS: list[Row] = [
    (SUM, "The sum is 42.", Finish.STOP),
    (BRIEF, "42", Finish.STOP),
    (SUM, "The sum of 12 and 30 is the number that", Finish.LENGTH),
    (AGAIN, "43.", Finish.STOP),
    (SUM, "I do", Finish.ABORTED),
    (BRIEF, "", Finish.STOP),
]


def make_tokenizers(folder: Path) -> None:
    """Tokenizers of several kinds, each in a folder of its own: those of policies, and
    those of reward models.
    """
    train_bpe(folder / "chatml", TEXTS, 400)
    train_bpe(folder / "same", TEXTS, 400)
    character_tokenizer(folder / "characters", "\n" + "".join(map(chr, range(32, 127))))
    for name, template in {
        "brackets": BRACKETS,
        "no_system": NO_SYSTEM,
        "plain": None,
    }.items():
        tokenizer = train_bpe(folder / name, TEXTS[::-1], 330, template)
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
        tokenizer.save_pretrained(folder / name)


def make_reward_model(
    directory: Path,
    family: Architecture,
    tokenizer: Path,
    *,
    scale: float = 2.0,
    **settings: Any,
) -> Path:
    """A model of one label with a head whose scores differ by about `scale`; `settings`
    go into its config.
    """
    make_tiny(family, directory, tokenizer, SIZES, seed=3)
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=1, **settings
    )
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(5)).mul_(
            scale / 8
        )
    model.save_pretrained(directory)
    return directory


def rollouts(policy: Any, rows: Sequence[Row]) -> Rollouts:
    """What a policy with this tokenizer would have sampled; names of special tokens
    that a response spells out are made of other tokens, as by a policy that has no such
    special token.
    """
    prompts = [
        policy.apply_chat_template(
            as_messages(prompt), add_generation_prompt=True, return_dict=False
        )
        if policy.chat_template
        else policy("".join(message["content"] for message in as_messages(prompt)))[
            "input_ids"
        ]
        for prompt, *_ in rows
    ]
    responses = [
        policy(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        + [policy.eos_token_id] * (finish == Finish.STOP)
        for _, text, finish in rows
    ]
    plain = rollouts_of(
        [len(response) for response in responses],
        prompts=[len(prompt) for prompt in prompts],
        finish=[finish for *_, finish in rows],
    )
    tokens = np.concatenate(
        [
            [*prompt, *response]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    )
    messages = Ragged.of_texts([json.dumps(prompt) for prompt, *_ in rows])
    return plain.replace(tokens=tokens.astype(np.int32), messages=messages)


def conversation(own: Any, prompt: Prompt, response: str, finish: Finish) -> list[int]:
    """The conversation as the tokenizer's own template writes it, up to the end of the
    last turn.
    """
    messages = [*as_messages(prompt), {"role": "assistant", "content": response}]
    tokens: list[int] = own.apply_chat_template(messages, return_dict=False)
    end = len(tokens) - tokens[::-1].index(own.eos_token_id)
    return tokens[: end - (finish != Finish.STOP)]


def lists(rows: Ragged) -> list[list[int]]:
    return [rows[index].tolist() for index in range(len(rows))]


def transformers_scores(model: Path, rows: Sequence[Sequence[int]]) -> list[float]:
    plain = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        return [
            float(plain(input_ids=torch.tensor([list(row)])).logits) for row in rows
        ]
