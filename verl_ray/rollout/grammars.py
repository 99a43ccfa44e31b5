"""Constraints of turns as grammars: structural tags of xgrammar, as JSON.

Invariant: a constraint that cannot be held to is refused before it reaches an engine,
with the field of a request that has it. Thoughts in front of what is constrained are
free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from verl_ray.agents.contract import Constraint, ToolSchema
from verl_ray.errors import CallRefused

_MOST_CHARACTERS = 1 << 16
"""Characters of a grammar. What a larger one takes is not known."""

Format = dict[str, Any]
"""A part of a structural tag."""

FormatOfCalls = Callable[[Sequence[ToolSchema]], Format | None]
"""Returns the format of one or several calls of tools; None if that is not known."""


def grammar_of(
    constraint: Constraint,
    tools: Sequence[ToolSchema],
    format_of_calls: FormatOfCalls,
    thoughts: Format | None = None,
) -> str:
    """Return the grammar of a turn.

    Args:
        constraint: What the turn has to be.
        tools: The tools that it may call.
        format_of_calls: The model's format of calls.
        thoughts: What may stand in front; None if nothing may.

    Raises:
        CallRefused: It cannot be held to.
    """
    if "tools" in constraint:
        field = "tool_choice"
        content = _calls(constraint["tools"], tools, format_of_calls)
    else:
        field = "response_format"
        schema = constraint.get("json", {"type": "object"})
        _require_usable(field, json=json.dumps(schema))
        content = {"type": "json_schema", "json_schema": schema}
    if thoughts is not None:
        margin = {"type": "regex", "pattern": r"\s*"}
        content = {"type": "sequence", "elements": [thoughts, margin, content]}
    grammar = json.dumps({"type": "structural_tag", "format": content})
    _require_usable(field, structural_tag=grammar)
    return grammar


def _calls(
    names: Sequence[str], tools: Sequence[ToolSchema], format_of_calls: FormatOfCalls
) -> Format:
    called = [tool for tool in tools if tool["function"]["name"] in names]
    if not called:
        raise CallRefused(
            f"tool_choice: none of the tools is {', '.join(names)}", "tool_choice"
        )
    content = format_of_calls(called)
    if content is None:
        raise CallRefused(
            "tool_choice: a call cannot be required, since vLLM has no grammar of the"
            " calls that agent.tool_parser reads",
            "tool_choice",
        )
    return content


def _require_usable(field: str, **grammar: str) -> None:
    """Raise `CallRefused` for what xgrammar refuses or would not heed, or is too large.

    Args:
        field: The field of a request that has it.
        grammar: It, by its kind.
    """
    size = sum(map(len, grammar.values()))
    if size > _MOST_CHARACTERS:
        raise CallRefused(
            f"{field}: its schema has {size} characters, expected at most"
            f" {_MOST_CHARACTERS}",
            field,
        )
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    try:
        outputs = StructuredOutputsParams(**grammar)
        validate_xgrammar_grammar(SamplingParams(structured_outputs=outputs))
    # It raises ValueError, RuntimeError, and what its own library has.
    except Exception as error:
        raise CallRefused(f"{field}: {error.__cause__ or error}", field) from error
