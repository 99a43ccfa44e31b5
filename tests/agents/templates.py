"""Chat templates of the kinds that models have, and a tokenizer for them."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedTokenizerBase

from verl_ray.data.tokenizers import load_tokenizer, train_bpe

_SYSTEM_WITH_TOOLS = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}"
    "Tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{%- endif %}"
)

_CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "{% if not loop.first or content %}{{ '\\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>"
    "{% endfor %}"
)

_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

PRESERVING = (
    _SYSTEM_WITH_TOOLS + "{% for message in messages %}"
    "{% set content = message.content %}"
    "{% if message.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ content }}" + _CALLS + "<|im_end|>\n"
    "{% elif message.role != 'system' %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n"
    "{% endif %}{% endfor %}" + _PROMPT
)
"""A block per message, whatever it is, and tools in the system's."""

MERGING = (
    _SYSTEM_WITH_TOOLS + "{% for message in messages %}"
    "{% set content = message.content %}"
    "{% if message.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ content }}" + _CALLS + "<|im_end|>\n"
    "{% elif message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif message.role != 'system' %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n"
    "{% endif %}{% endfor %}" + _PROMPT
)
"""The results of tools that follow each other are one turn of the user, as Qwen does."""

STRIPPING = (
    "{% set asked = namespace(last=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
    + _SYSTEM_WITH_TOOLS
    + "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{% set content = message.content %}{% set thought = '' %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > asked.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ content }}" + _CALLS + "<|im_end|>\n"
    "{% elif message.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif message.role != 'system' %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    + _PROMPT
    + "{% if add_generation_prompt and no_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
"""Thinking is left out of turns before the user's last one, as Qwen3 does."""

ROLE_ENDED = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|im_start|>{% else %}<|im_end|>{% endif %}"
    "{{ '\\n' + message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>\n{% endif %}"
)
"""A token for each role, and turns that end by the token of who comes next, as GLM's
do. Here <|im_start|> is the assistant's and <|im_end|> that of all others.
"""

TEXTS = [
    "What is 12 plus 7? It is 19.",
    "<|im_start|>user\nassistant tool system <tool_call> name arguments </tool_call>",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}\n<think>\n</think>\n\n',
]


@cache
def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    """Make a byte-level tokenizer with this chat template; <|im_end|> ends its turns."""
    # An engine reads it again, so it stays until this process ends.
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    train_bpe(Path(folder.name), TEXTS * 20, 400, template)
    return load_tokenizer(folder.name)
