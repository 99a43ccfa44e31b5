"""A memory of facts in a long stream, of which the policy sees one part at a time.

Invariant: no conversation holds more than one part of the facts, the notes and a
question. What the policy did not write into its notes is lost to it.

An episode is several conversations, so it has several rows: each part of the facts
begins a new one, as the compaction of a long history does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from verl_ray.agents.contract import EpisodeTask, Policy
from verl_ray.agents.environments.conversation import opening, user
from verl_ray.errors import DataError
from verl_ray.rewards.functions import gsm8k

FACTS_PER_CONVERSATION = 6
MOST_CHARACTERS_OF_NOTES = 2000
"""Longest notes; what is beyond is cut, so that the context stays small."""

_THINGS = (
    "anchor", "basket", "candle", "drum", "engine", "feather", "garden", "hammer",
    "island", "jacket", "kettle", "ladder", "mirror", "needle", "orchard", "pillow",
)  # fmt: skip

_INSTRUCTION = """\
A question about a long list of facts will be asked later. You see a part of them at a \
time, and remember nothing but your notes. Where two facts differ, the later one holds.

Your notes so far:
{notes}

New facts:
{facts}

Write your notes anew, with all that a question may need."""


async def run(task: EpisodeTask, policy: Policy) -> float:
    """Let the policy read the facts of a record, then ask the record's question.

    The record's messages are the question, its field `facts` is a list of texts, and
    its answer is a number. Notes are the policy's text behind its thoughts.

    Returns:
        1.0 when the last number of the policy's answer is the right one, else 0.0.

    Raises:
        DataError: The record has no facts, or no number as its answer.
    """
    facts = _facts_of(task)
    if task.answer is None:
        raise DataError(
            "the record has no answer", "a number", place="key_value_memory"
        )
    notes = "(none)"

    for start in range(0, len(facts), FACTS_PER_CONVERSATION):
        part = "\n".join(facts[start : start + FACTS_PER_CONVERSATION])
        text = _INSTRUCTION.format(notes=notes, facts=part)
        action = await policy.respond([user(text)])
        _, _, written = action.text.rpartition("</think>")
        notes = written.strip()[:MOST_CHARACTERS_OF_NOTES] or "(none)"

    question = opening(task.messages, f"Answer from your notes:\n{notes}")
    action = await policy.respond(question)
    return gsm8k(action.text, task.answer)


def _facts_of(task: EpisodeTask) -> Sequence[str]:
    facts = task.extra.get("facts")
    if isinstance(facts, list | tuple) and facts:
        texts = [fact for fact in facts if isinstance(fact, str)]
        if len(texts) == len(facts):
            return texts
    expected = "a list of texts, such as records() of this module makes"
    raise DataError("facts are missing", expected, place="key_value_memory")


def records(count: int, seed: int, num_facts: int = 24) -> list[dict[str, Any]]:
    """Return records of facts: the code of a thing, which may change later."""
    return [_record(random.Random(f"{seed} {i}"), num_facts) for i in range(count)]


def _record(rng: random.Random, num_facts: int) -> dict[str, Any]:
    codes: dict[str, int] = {}
    facts = []
    for _ in range(num_facts):
        thing = rng.choice(_THINGS)
        codes[thing] = rng.randrange(100, 1000)
        facts.append(f"The code of the {thing} is {codes[thing]}.")

    thing = rng.choice(sorted(codes))
    return {
        "prompt": f"What is the code of the {thing}? End with the number.",
        "answer": str(codes[thing]),
        "facts": facts,
    }
