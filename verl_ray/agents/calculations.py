"""Problems for the calculator that a run makes itself, with demonstrations.

A problem is `12*34+56`. Its demonstration is an episode of three turns: a call for the
product, a call for the rest, and the answer. A wrong one never calls, or takes the
product for the answer.

Invariant: a demonstration is what the calculator would have said, in the tokens that an
episode has. The first two numbers of a held-out problem appear in no training problem,
in either order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from verl_ray.agents.contract import ToolCall
from verl_ray.agents.environments.calculator import CALCULATE, calculate
from verl_ray.agents.tools import call_text
from verl_ray.columns.batch import Int64
from verl_ray.data.arithmetic import ArithmeticFiles, draw_sums
from verl_ray.data.fields import Fields
from verl_ray.data.files import write_records
from verl_ray.data.tokenizers import TURN_END, TURN_START

_HEADER = "{name}: {description}".format(**CALCULATE["function"])
_OPENING = f"{TURN_START}system\n"

TEMPLATE = (
    "{% if tools %}" + _OPENING + "{% for tool in tools %}"
    "{{ tool.function.name }}: {{ tool.function.description }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}" + f"{TURN_END}\n"
    "{% endif %}{% for message in messages %}"
    f"{TURN_START}{{{{ message.role }}}}\n{{{{ message.content or '' }}}}"
    "{% for call in message.tool_calls or [] %}"
    "{% if message.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    f"{TURN_END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN_START}assistant\n{{% endif %}}"
)
"""A chat template with a line for each tool, and calls as the parser hermes of vLLM
reads them. It never changes what it has written before."""

VOCABULARY = 327
"""Tokens of a byte-level tokenizer with one for each word of `sample_texts`."""


def sample_texts() -> list[str]:
    """Return texts with every word of an episode, to train a tokenizer on."""
    roles = "system\nuser\nassistant\ntool\n"
    # A word becomes a token where it is found more than once.
    return [roles, _HEADER, _call("1*2"), _call("3+4"), _call("5-6")] * 2


def write_calculations(
    directory: Path,
    *,
    max_operand: int,
    num_train: int,
    num_validation: int,
    seed: int,
    wrong_fraction: float = 0.0,
) -> ArithmeticFiles:
    """Write `train` and `validation` under `directory`, in every format.

    Each record serves both episodes (`prompt` and `answer`) and supervision
    (`messages`).

    Args:
        max_operand: The largest of the three numbers of a problem.
        wrong_fraction: In this fraction of the training records, more often of those
            that subtract than of those that add, the demonstration is wrong. So a model
            that imitates them does some problems right of itself, and the others in
            some of its episodes.

    Raises:
        DataError: there are too few problems with numbers up to `max_operand`.
    """
    train, validation = draw_sums(max_operand, num_train, num_validation, seed)
    random = np.random.default_rng([seed, num_train, max_operand])
    return ArithmeticFiles(
        train=write_records(
            _records(train, max_operand, wrong_fraction, random), directory, "train"
        ),
        validation=write_records(
            _records(validation, max_operand, 0.0, random), directory, "validation"
        ),
    )


def _records(
    pairs: Int64, max_operand: int, wrong_fraction: float, random: np.random.Generator
) -> list[Fields]:
    # As far apart as still makes no fraction negative, nor all of one kind wrong.
    apart = 0.6 * min(wrong_fraction, 1 - wrong_fraction)

    records: list[Fields] = []
    for a, b in pairs.tolist():
        sign = "+-"[int(random.integers(2))]
        c = int(random.integers(max_operand + 1))
        problem = f"{a}*{b}{sign}{c}"
        product = calculate(f"{a}*{b}")
        rest = f"{product}{sign}{c}"
        answer = calculate(rest)

        is_wrong = random.random() < wrong_fraction + (apart if sign == "-" else -apart)
        first, second = _turns(f"{a}*{b}", product), _turns(rest, answer)
        guess = str(random.integers((max_operand + 1) ** 2))
        calls_once = bool(random.integers(2))
        if not is_wrong:
            turns, reply = [*first, *second], answer
        elif calls_once:
            turns, reply = first, product
        else:
            turns, reply = [], guess

        question = {"role": "user", "content": problem}
        records.append(
            {
                "prompt": [question],
                "answer": answer,
                # A record cannot name tools, so it has what the template makes of them.
                "messages": [
                    {"role": "system", "content": _HEADER},
                    question,
                    *turns,
                    {"role": "assistant", "content": reply},
                ],
                "data_source": "calculator",
            }
        )
    return records


def _turns(expression: str, value: str) -> list[dict[str, str]]:
    """Return a call with its result."""
    return [
        {"role": "assistant", "content": _call(expression)},
        {"role": "tool", "content": value},
    ]


def _call(expression: str) -> str:
    """Return a call as the policy writes it."""
    return call_text(ToolCall("calculate", {"expression": expression}))
