"""Names of vLLM's parsers, by the marks that models write around their thoughts."""

from __future__ import annotations

from collections.abc import Mapping

USUAL_PARSER = "qwen3"
"""The parser of <think> and </think>, which models also write where no template does:
a prompt may ask for them."""

PARSERS: Mapping[str, str] = {
    "<seed:think>": "seed_oss",
    "<|plamo:begin_think:plamo|>": "plamo3",
    "<|START_THINKING|>": "cohere_command3",
    "<|channel>": "gemma4",
    "<mm:think>": "minimax_m3",
    "[THINK]": "mistral",
    "<ifm|think>": "k2_horizon",
    "<|open|>think<|sep|>": "kimi_k3",
    "<|content_thinking|>": "inkling",
    "<think>": USUAL_PARSER,
}
"""Mark that begins a thought -> vLLM's reasoning parser."""

PARSERS_WITHOUT_MARKS = frozenset(
    {
        "deepseek_v3",
        "granite",
        "hunyuan_a13b",
        "minimax_m2_append_think",
        "muse_glimmer",
        "openai_gptoss",
        "poolside_v1",
    }
)
"""vLLM's reasoning parsers that tell no marks, by which thoughts could be divided."""


def reasoning_parser_of(template: str) -> str | None:
    """Return the name of vLLM's reasoning parser for a chat template's thoughts.

    None if the template writes no mark that is known.
    """
    return next((name for mark, name in PARSERS.items() if mark in template), None)
