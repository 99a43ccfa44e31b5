"""Names of vLLM's parsers, by the marks that models write around their thoughts."""

from __future__ import annotations

from collections.abc import Mapping

_PARSERS: Mapping[str, str] = {
    "<seed:think>": "seed_oss",
    "<|plamo:begin_think:plamo|>": "plamo3",
}
"""Mark that begins a thought -> vLLM's reasoning parser."""

_USUAL = "qwen3"
"""The parser of <think> and </think>, which models also write where no template does:
a prompt may ask for them."""


def reasoning_parser_of(template: str) -> str:
    """Return the name of vLLM's reasoning parser for a chat template's thoughts."""
    return next((name for mark, name in _PARSERS.items() if mark in template), _USUAL)
