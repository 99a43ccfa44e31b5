"""Tokenizers: loading, making small ones, and the chat template of a run.

Invariant: no function here calls a hub; a tokenizer is a local directory, or a
ModelError. What a template gets besides the messages comes from the record before it
comes from the run, and a text among it cannot become a special token any more than a
message can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.config.data import RESERVED_ARGUMENTS, DataFilesConfig
from verl_ray.config.schema import Config
from verl_ray.data.encoding import SpelledTokens
from verl_ray.data.fields import (
    Fields,
    Message,
    excerpt,
    require_encodable,
    without_nulls,
)
from verl_ray.errors import DataError, ModelError
from verl_ray.profiling.phases import PHASES
from verl_ray.settings.section import resolved

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD = "<pad>"
EOS = "<eos>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TEXT_END = "<|endoftext|>"

CHATML = (
    "{% for message in messages %}"
    f"{TURN_START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{TURN_END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN_START}assistant\n{{% endif %}}"
)
"""A chat template: one block per message, ended by the token that ends a generation."""

PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "Assistant:\n{{ message['content'] }}{{ eos_token }}\n\n"
    "{% else %}"
    "{{ message['role'] | capitalize }}:\n{{ message['content'] }}\n\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
"""A chat template of words alone, for a tokenizer without tokens for turns."""

CHAT_TEMPLATES = {"chatml": CHATML, "plain": PLAIN}
"""Our own chat templates by their names, which `data.chat_template` takes."""

TEMPLATE_FILE = "chat_template.jinja"
"""File of a chat template in the directory of a tokenizer."""

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files that hold a vocabulary. A directory of a tokenizer has at least one of them."""

_SHOWN_REASON = 200  # characters of a library's error that an error shows
_LISTED = 8  # files of a directory that an error lists

_NUM_COMPARED = 512
"""Tokens, spread over a vocabulary, that are compared with those of another."""


def load_tokenizer(
    path: str | Path, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a local directory.

    Args:
        chat_template: The text of the chat template that replaces its own.

    Raises:
        ModelError: there is no such directory, or no tokenizer with an end-of-sequence
            token in it.
        DataError: the tokenizer lacks tokens that `chat_template` writes.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(
            "is not a directory",
            fix="set model.path to a local Hugging Face model directory",
            subject=path,
        )

    if not has_vocabulary(directory):
        present = sorted(entry.name for entry in directory.iterdir())
        listed = ", ".join(present[:_LISTED]) or "nothing"
        raise ModelError(
            f"found {listed}",
            expected="tokenizer.json, or another file of a vocabulary, next to the"
            " model",
            place=path,
        )

    try:
        tokenizer = _read_tokenizer(directory)
    # transformers and tokenizers raise bare Exception for broken files
    except Exception as error:
        # Some of these errors go on about libraries for many lines.
        reason = str(error).strip().partition("\n")[0][:_SHOWN_REASON]
        raise ModelError(
            f"the tokenizer cannot be loaded ({reason})", place=path
        ) from error
    # Without it no response could end but at its limit.
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has no eos_token, by which responses end",
            fix="set it in the tokenizer",
            place=path,
        )
    if chat_template is not None:
        tokenizer.chat_template = _fitted(chat_template, tokenizer)
    return tokenizer


def has_vocabulary(directory: Path) -> bool:
    """Return whether a directory has a file that holds a vocabulary."""
    return any((directory / name).exists() for name in VOCABULARY_FILES)


def _fitted(chat_template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a chat template as it is for this tokenizer.

    A template of ours begins with the token that the tokenizer puts in front of a plain
    text; any other one is left as it is.

    Raises:
        DataError: the tokenizer lacks tokens that a template of ours writes.
    """
    if chat_template not in CHAT_TEMPLATES.values():
        return chat_template

    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    missing = [
        token
        for token in (TURN_START, TURN_END)
        if token in chat_template and token not in added
    ]
    if missing:
        raise DataError(
            f"the tokenizer in {tokenizer.name_or_path} has no token"
            f" {' and no token '.join(missing)}, which this chat template writes",
            fix="use plain, or the path of a template for this tokenizer",
        )

    around = tokenizer("")["input_ids"]
    has_front = around[:1] == [tokenizer.bos_token_id]
    return f"{{{{ bos_token }}}}{chat_template}" if has_front else chat_template


def _read_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer without importing torch where possible.

    AutoTokenizer finds out which class a tokenizer needs. It imports torch, which costs
    3 s of CPU time in processes that do not need torch otherwise. A configuration that
    transformers 5 wrote names the class that reads tokenizer.json alone.
    """
    settings = directory / "tokenizer_config.json"
    needs_no_class = '"tokenizer_class": "TokenizersBackend"'
    if settings.is_file() and needs_no_class in settings.read_text():
        from transformers import TokenizersBackend as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer

    # Otherwise transformers asks at the terminal whether to run code of the directory.
    tokenizer: PreTrainedTokenizerBase = Tokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )
    return tokenizer


def character_tokenizer(
    directory: str | Path, alphabet: str
) -> PreTrainedTokenizerFast:
    """Make and save a tokenizer of single characters.

    Its vocabulary is the two special tokens, then `alphabet`. There is no unknown
    token: a text with another character is refused when it is encoded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if len(set(alphabet)) != len(alphabet):
        raise ModelError(f"alphabet {alphabet!r}: a character occurs twice")

    tokens = [PAD, EOS, *alphabet]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = Tokenizer(models.WordLevel(vocabulary))
    # Each character is a word, and decoding joins words without spaces.
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    return _save(model, directory, eos=EOS, pad=PAD, chat_template=None)


def train_bpe(
    directory: str | Path,
    texts: Iterable[str],
    vocab_size: int,
    chat_template: str | None = CHATML,
    *,
    single_digits: bool = False,
) -> PreTrainedTokenizerFast:
    """Train and save a byte-level BPE tokenizer of at most `vocab_size` tokens.

    It encodes every text.

    Args:
        single_digits: Whether each digit is a token, which makes calculating easier.

    Raises:
        ModelError: `vocab_size` is too small for the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = [TEXT_END, TURN_START, TURN_END]
    # With every byte in the vocabulary, every text has tokens.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(specials)
    if vocab_size < smallest:
        raise ModelError(
            f"vocabulary of {vocab_size} tokens: expected at least {smallest} (every"
            " byte, and the specials)"
        )

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if single_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        model.pre_tokenizer = pre_tokenizers.Sequence([digits, model.pre_tokenizer])
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return _save(
        model, directory, eos=TURN_END, pad=TEXT_END, chat_template=chat_template
    )


def same_tokens(
    first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase
) -> bool:
    """Return whether two tokenizers turn every conversation into the same tokens."""
    return bool(
        _rules(first) == _rules(second)
        and first.chat_template == second.chat_template
        and first.eos_token == second.eos_token
    )


def special_names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the names of the tokenizer's special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return [token.content for token in added if token.special]


def strip_special_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return `text` without the names of the tokenizer's special tokens.

    They would be encoded as these tokens: a policy that writes them could end its own
    turn and begin another one. The returned text spells none of them.
    """
    special = re.compile("|".join(map(re.escape, special_names(tokenizer))))

    # Repeated, because the text around a removed name may spell another one. Each round
    # shortens the text, so that the loop ends.
    while special.search(text):
        text = special.sub("", text)
    return text


def _rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Rules by which a text becomes tokens.

    They leave out the lengths that a trainer may have saved with the tokenizer, since
    no function here truncates or pads.
    """
    rules: dict[str, object] = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding"):
        rules.pop(name, None)
    return rules


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise DataError(
            "data.apply_chat_template = true, but the tokenizer in"
            f" {tokenizer.name_or_path} has no chat template",
            fix="set data.apply_chat_template=false, or give it one with"
            " data.chat_template",
        )


def applied_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template that is applied, of several the default; "" if none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return str(template or "")


_PARTS_OF_TURNS = ("tool_calls", "reasoning_content")
"""Parts of an assistant's turn that only some templates write."""


def _refuse_unwritten(
    conversation: Sequence[Message], names: Sequence[str], where: str
) -> None:
    """Raise DataError if a message has a part that the chat template leaves out."""
    for message in conversation:
        for name in names:
            if message.get(name):
                raise DataError(
                    f"a message has {name}, which the chat template of the model does"
                    " not write",
                    fix=f"take a model whose template does, or records without {name}",
                    place=where,
                )


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[Message]],
    *,
    add_generation_prompt: bool,
    where: Callable[[int], str],
    arguments: Sequence[Mapping[str, object]] | None = None,
) -> list[str]:
    """Write each conversation as a text, by the tokenizer's chat template.

    Args:
        add_generation_prompt: Whether the text ends with the opening of the assistant's
            turn.
        where: Returns the name of a conversation by its number, for errors.
        arguments: Variables of the template for each conversation.

    Raises:
        DataError: the template fails on a conversation.
    """
    template = applied_template(tokenizer)
    unwritten = [name for name in _PARTS_OF_TURNS if name not in template]
    texts = []
    for index, conversation in enumerate(conversations):
        PHASES.tick()
        _refuse_unwritten(conversation, unwritten, where(index))
        try:
            text = tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **(arguments[index] if arguments is not None else {}),
            )
        # Jinja has its own errors, and a template may raise any other.
        except Exception as error:
            raise DataError(
                f"the chat template refuses the messages ({error})", place=where(index)
            ) from error
        texts.append(text)
    return texts


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response, in ascending order.

    They are the tokenizer's eos_token; those of generation_config.json beside it, or of
    config.json where there is no such file; and the added token that its chat template
    writes behind an answer. All tasks use these, rollouts included.

    Raises:
        ModelError: a file beside the tokenizer is no JSON.
    """
    ends = {int(tokenizer.eos_token_id)} | configured_ends(tokenizer)
    written = _end_in_template(tokenizer)
    if written is not None:
        ends.add(written)
    return tuple(sorted(ends))


def end_names(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the names of the tokens that end a response, as texts spell them."""
    added = tokenizer.added_tokens_decoder
    names = [added[end].content for end in end_tokens(tokenizer) if end in added]
    return tuple({str(tokenizer.eos_token): None, **dict.fromkeys(names)})


def configured_ends(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the end tokens that the files of a model name."""
    # A tokenizer that was not loaded has no directory.
    if not tokenizer.name_or_path:
        return set()

    for name in ("generation_config.json", "config.json"):
        path = Path(tokenizer.name_or_path, name)
        if not path.is_file():
            continue
        try:
            settings = json.loads(path.read_text())
        except ValueError as error:
            raise ModelError(
                f"is no JSON ({error})", fix="copy it again", subject=path
            ) from error
        text_settings = settings.get("text_config") or {}
        ends = settings.get("eos_token_id", text_settings.get("eos_token_id"))
        return {ends} if isinstance(ends, int) else set(ends or [])
    return set()


def _end_in_template(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the added token that the chat template writes behind an answer."""
    if not tokenizer.chat_template:
        return None
    question: Message = {"role": "user", "content": "1 + 1 = ?"}
    answer: Message = {"role": "assistant", "content": "two"}
    try:
        (text,) = render(
            tokenizer,
            [[question, answer]],
            add_generation_prompt=False,
            where=lambda _: "an answer",
        )
    # A template may refuse this conversation and take others.
    except DataError:
        return None

    behind = text.rpartition("two")[2].lstrip()
    # Some models have the tokens of their turns as plain added ones.
    added = tokenizer.added_tokens_decoder.items()
    numbers = {token.content: index for index, token in added}
    names = [name for name in numbers if name and behind.startswith(name)]
    return numbers[max(names, key=len)] if names else None


def _save(
    model: tokenizers.Tokenizer,
    directory: str | Path,
    *,
    eos: str,
    pad: str,
    chat_template: str | None,
) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=eos, pad_token=pad
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(str(directory))
    return tokenizer


# ---------------------------------------------------------------- the template of a run

TemplateArguments = Mapping[str, object]
"""Name of a variable of the template -> its value."""

ARGUMENTS = "chat_template_kwargs"
"""The column of a record with its arguments, as TRL calls it."""

PRESENT_TIME = "strftime_now"
"""The function that a template writes the day with."""

_THINKING = "enable_thinking"

COLUMNS_OF_TEMPLATE = (ARGUMENTS, _THINKING)
"""The columns of a record that are for the chat template."""


def template_of(config: DataFilesConfig) -> str | None:
    """Return the text of the chat template of a run; None if it is the tokenizer's."""
    named = config.chat_template
    return None if named is None else CHAT_TEMPLATES.get(named, named)


def policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the data are read with, with the run's chat template.

    Raises:
        ModelError: It cannot be loaded.
        DataError: The chat template does not fit the tokenizer.
    """
    folder = config.model_roles[config.evaluated_role].model.folder
    return load_tokenizer(folder, template_of(config.data))


def arguments_of(fields: Fields, where: str) -> dict[str, object]:
    """Return what a record gives to the chat template.

    Args:
        where: The place of the record, for errors.

    Raises:
        DataError: They are no object, have a name that is not free, or contradict each
            other.
    """
    # Arrow gives each record the arguments of all others, with nulls.
    value = without_nulls(fields.get(ARGUMENTS))
    if value is not None and not isinstance(value, dict):
        raise DataError(
            f"{ARGUMENTS} is {excerpt(value)}",
            expected='an object such as {"enable_thinking": false}',
            place=where,
        )
    arguments: dict[str, object] = {**(value or {})}
    require_encodable(arguments, f"{where}, {ARGUMENTS}")
    for name in arguments:
        if name in RESERVED_ARGUMENTS:
            raise DataError(
                f"{ARGUMENTS} has {name!r}, which the run itself gives to the chat"
                " template",
                fix="leave it out",
                place=where,
            )

    thinks = fields.get(_THINKING)
    if thinks is None:
        return arguments
    # A template compares it with false, and a .csv holds texts.
    if not isinstance(thinks, bool):
        raise DataError(
            f"{_THINKING} is {excerpt(thinks)}",
            expected="true or false",
            fix="write it as .jsonl or Parquet, or in chat_template_kwargs",
            place=where,
        )
    if arguments.setdefault(_THINKING, thinks) != thinks:
        raise DataError(
            f"{_THINKING} is {thinks}, and {arguments[_THINKING]} in {ARGUMENTS}",
            fix="leave one of them out",
            place=where,
        )
    return arguments


def of_run(config: DataFilesConfig) -> dict[str, object]:
    """Return what a run gives to the template with every record."""
    return {**day_of_run(config), **config.chat_template_kwargs}


def day_of_run(config: DataFilesConfig) -> dict[str, object]:
    """Return what a run gives to every template, those of its graders included."""
    return of_day(resolved(config.template_day))


def of_day(day: str | None) -> dict[str, object]:
    """Return what a template gets that writes the present day; nothing without one."""
    return {} if day is None else {PRESENT_TIME: partial(_written, day)}


def _written(day: str, pattern: str) -> str:
    """Return the beginning of a day as a template wants the present time."""
    return datetime.fromisoformat(day).strftime(pattern)


def template_arguments(
    config: DataFilesConfig, own_arguments: Iterable[TemplateArguments]
) -> list[dict[str, object]]:
    """Return what the template gets with each record, in their order.

    Args:
        own_arguments: The arguments of the records themselves.
    """
    shared = of_run(config)
    return [{**shared, **own} for own in own_arguments]


def guarded_arguments(
    arguments: TemplateArguments, where: str, spelled: SpelledTokens
) -> dict[str, object]:
    """Return arguments whose texts are ready for the template.

    Args:
        where: The name of the record, for errors.

    Raises:
        DataError: A text spells a special token, which data.special_tokens refuses.
    """
    guarded: dict[str, object] = {}
    for name, value in arguments.items():
        place = f"{where}, {name}"
        guarded[name] = value
        if isinstance(value, str):
            guarded[name] = spelled.guard(value, place)
        elif isinstance(value, list | dict):
            parts: list[Any] = [value]
            (guarded[name],) = spelled.guard(parts, place)
    return guarded


def tokens_to_compare(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """Return a text of many tokens, and the tokens that it is read as.

    A tokenizer with another vocabulary reads others.
    """
    step = max(1, len(tokenizer) // _NUM_COMPARED)
    spread = [*range(0, len(tokenizer), step)]
    text = str(tokenizer.decode(spread, skip_special_tokens=True))
    return text, list(tokenizer.encode(text, add_special_tokens=False))
