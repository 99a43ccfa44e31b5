"""Tokenizers: loading one from a local directory, making small ones, and turning many texts into token columns.

Invariant: nothing here asks a hub; a tokenizer is a local directory or a ModelError. Deliberately not here: which texts
become prompts or responses (`prompts.py`, `conversations.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.data.batch import Ragged, offsets_of
from verl_ray.data.files import Message
from verl_ray.errors import DataError, ModelError

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
TURN_START, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

CHATML = (
    "{% for message in messages %}"
    f"{TURN_START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{TURN_END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN_START}assistant\n{{% endif %}}"
)
"""A chat template: one delimited block per message, ended by the token that ends a generation."""

_TEXTS_AT_ONCE = 16_384  # bounds the memory of intermediate encodings; the throughput is flat from 4,096 on


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a local directory.

    Raises:
        ModelError: there is no such directory, or no tokenizer with an end-of-sequence token in it.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"{path} is not a directory; set model.path to a local Hugging Face model directory")
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        found = ", ".join(sorted(entry.name for entry in directory.iterdir())[:8]) or "nothing"
        raise ModelError(f"{path}: found {found}, expected tokenizer.json or tokenizer_config.json beside the model")
    try:
        tokenizer = _read_tokenizer(directory)
    except Exception as error:  # transformers and tokenizers raise bare Exception for broken files
        raise ModelError(f"{path}: the tokenizer cannot be loaded ({error})") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{path}: the tokenizer has no eos_token, by which responses end; set it in the tokenizer")
    return tokenizer


def _read_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Finding out which class a tokenizer wants imports torch and with it 3 s of CPU time, in processes that need no
    more of it. One that says it is what its tokenizer.json says, as transformers 5 writes it, is spared that."""
    settings = directory / "tokenizer_config.json"
    if settings.is_file() and '"tokenizer_class": "TokenizersBackend"' in settings.read_text():
        from transformers import TokenizersBackend as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    found: PreTrainedTokenizerBase = Tokenizer.from_pretrained(str(directory), local_files_only=True)
    return found


def character_tokenizer(directory: str | Path, alphabet: str) -> PreTrainedTokenizerFast:
    """Make and save a tokenizer of single characters: the two specials, then `alphabet`, and nothing else.

    A text with another character is refused when it is encoded; there is no token for the unknown.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if len(set(alphabet)) != len(alphabet):
        raise ModelError(f"alphabet {alphabet!r}: a character occurs twice")
    vocabulary = {piece: index for index, piece in enumerate([PAD, EOS, *alphabet])}
    model = Tokenizer(models.WordLevel(vocabulary))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    return _save(model, directory, eos=EOS, pad=PAD, chat_template=None)


def train_bpe(
    directory: str | Path, texts: Iterable[str], vocab_size: int, chat_template: str | None = CHATML
) -> PreTrainedTokenizerFast:
    """Train and save a byte-level BPE tokenizer of at most `vocab_size` tokens; it encodes every text.

    Raises:
        ModelError: `vocab_size` has no room for the 256 bytes and the specials.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = [TEXT_END, TURN_START, TURN_END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(specials)
    if vocab_size < smallest:
        raise ModelError(
            f"vocabulary of {vocab_size} tokens: expected at least {smallest} (every byte, and the specials)"
        )
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    return _save(model, directory, eos=TURN_END, pad=TEXT_END, chat_template=chat_template)


def same_tokens(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers turn every conversation into the same tokens."""
    return bool(
        _rules(first) == _rules(second)
        and first.chat_template == second.chat_template
        and first.eos_token == second.eos_token
    )


def unspecial(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """`text` without the names of the tokenizer's special tokens, which would be encoded as these tokens.

    For what a policy wrote: it could end its own turn and begin another one. What is left spells none of them.
    """
    names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = re.compile("|".join(map(re.escape, names)))
    while special.search(text):  # again: what was around one may spell another
        text = special.sub("", text)
    return text


def _rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """How a text becomes tokens; without the lengths that a trainer left in the file, which nothing here keeps to."""
    rules: dict[str, object] = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: value for name, value in rules.items() if name not in ("truncation", "padding")}


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if prompts are to go through a chat template that the tokenizer does not have."""
    if not tokenizer.chat_template:
        raise DataError(
            f"data.apply_chat_template = true, but the tokenizer in {tokenizer.name_or_path} has no chat template; "
            "set data.apply_chat_template=false, or choose a chat model"
        )


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[Message]],
    *,
    add_generation_prompt: bool,
    where: Callable[[int], str],
) -> list[str]:
    """Each conversation as the chat template writes it; `where(i)` names conversation i in errors."""
    texts = []
    for index, conversation in enumerate(conversations):
        try:
            texts.append(
                tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt)
            )
        except Exception as error:  # whatever the template raises, by Jinja or by itself
            raise DataError(f"{where(index)}: the chat template refuses the messages ({error})") from error
    return texts


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool, where: Callable[[int], str]
) -> Ragged:
    """Token ids of each text, int32; `special` adds what the tokenizer puts around a plain text.

    Raises:
        DataError: a text that the tokenizer has no tokens for; `where(i)` names text i.
    """
    parts = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        chunk = list(texts[start : start + _TEXTS_AT_ONCE])
        try:
            parts.append(_encode_chunk(tokenizer, chunk, special))
        except Exception:  # the Rust library raises bare Exception, and does not say for which text
            for index, text in enumerate(chunk):
                try:
                    _encode_chunk(tokenizer, [text], special)
                except Exception as error:
                    raise DataError(
                        f"{where(start + index)}: the tokenizer in {tokenizer.name_or_path} cannot encode "
                        f"{text[:80]!r} ({error})"
                    ) from None
            raise
    return Ragged.concat(parts) if parts else Ragged(np.empty(0, dtype=np.int32), offsets_of([]))


def _encode_chunk(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> Ragged:
    rows: list[list[int]] = tokenizer(
        texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
    offsets = offsets_of([len(row) for row in rows])
    return Ragged(np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1])), offsets)


def _save(
    model: tokenizers.Tokenizer, directory: str | Path, *, eos: str, pad: str, chat_template: str | None
) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(str(directory))
    return tokenizer
