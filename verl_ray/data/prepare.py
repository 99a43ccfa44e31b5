"""Command behind `scripts/prepare_data`: converts a data set to the run's format.

Invariant: the command reads and writes local files only. Deliberately not here: the
contents of each data set (`gsm8k.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data import gsm8k
from verl_ray.data.fields import Message
from verl_ray.data.records import read_prompts
from verl_ray.data.tokenizers import CHATML, train_bpe
from verl_ray.errors import VerlRayError
from verl_ray.shell import for_shell

_MODEL = TinyModelConfig(
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    intermediate_size=512,
    tie_embeddings=True,
)
_VOCABULARY = 2048
_PAIRS_HELD_OUT_FRACTION = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    source: Path = options.source
    out: Path = options.out
    # Without a vocabulary no model is made.
    vocabulary: int | None = options.tokenizer_vocab if options.model else None

    try:
        model = _prepare_gsm8k(source, out, options.prompt, vocabulary)
        if options.pairs:
            _prepare_gsm8k_pairs(source, out / "pairs", options.prompt, model)
    except VerlRayError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prepare_data", description="Turn a local data set into the run's format."
    )
    commands = parser.add_subparsers(required=True, metavar="DATA_SET")
    command = commands.add_parser(
        "gsm8k",
        help="grade-school word problems",
        description=(
            "Reads SOURCE/train.jsonl and SOURCE/test.jsonl (question, answer), writes"
            " OUT/train and OUT/validation as .jsonl, .parquet and datasets folders."
        ),
    )
    command.add_argument(
        "source", type=Path, metavar="SOURCE", help="folder of a local copy of GSM8K"
    )
    command.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    command.add_argument(
        "--prompt",
        choices=["chat", "text"],
        default="chat",
        help="chat messages (default), or plain text",
    )
    command.add_argument(
        "--pairs",
        action="store_true",
        help=(
            "also write OUT/pairs: a right and a wrong solution of the same problem,"
            f" from SOURCE/{gsm8k.SOLUTIONS_FILE}, for a reward model; the problems are"
            " those of SOURCE/test.jsonl"
        ),
    )
    command.add_argument(
        "--model",
        action="store_true",
        help=(
            "also write OUT/model: a BPE tokenizer trained on these texts and a small"
            " untrained model, enough to try a whole run without a download"
        ),
    )
    command.add_argument(
        "--tokenizer-vocab",
        type=int,
        default=_VOCABULARY,
        metavar="N",
        help=f"tokens of the tokenizer that --model trains (default {_VOCABULARY})",
    )
    return parser


def _prepare_gsm8k(
    source: Path, out: Path, prompt_format: gsm8k.PromptFormat, vocabulary: int | None
) -> str:
    """Convert the problems, and make a small model where `vocabulary` has a size.

    Returns:
        The path of the model in the command that the user is to run next.
    """
    files = gsm8k.convert(source, out, prompt_format)
    print(f"train       {files.num_train:>6} problems  {files.train.parquet}")
    print(f"validation  {files.num_validation:>6} problems  {files.validation.parquet}")

    model = "PATH_OF_A_MODEL"
    if vocabulary is not None:
        model = str(out / "model")
        _make_model(model, files, prompt_format, vocabulary)

    print(_next("gsm8k", model, files))
    return model


def _make_model(
    model: str,
    files: gsm8k.Gsm8kFiles,
    prompt_format: gsm8k.PromptFormat,
    vocabulary: int,
) -> None:
    """Train a tokenizer on the prompts, and write an untrained model that fits it."""
    # Imported here, because it imports torch, which the conversion does not need.
    from verl_ray.models.tiny import make_tiny_qwen3

    records = read_prompts(files.train.jsonl)
    texts = [_text(record.prompt) for record in records]
    # Plain texts have no turns to delimit.
    chat_template = CHATML if prompt_format == "chat" else None
    tokenizer = train_bpe(model, texts, vocabulary, chat_template)
    make_tiny_qwen3(model, model, _MODEL, seed=0)
    print(f"model       {len(tokenizer):>6} tokens    {model}")


def _prepare_gsm8k_pairs(
    source: Path, out: Path, prompt_format: gsm8k.PromptFormat, model: str
) -> None:
    files = gsm8k.convert_pairs(
        source, out, prompt_format, validation_fraction=_PAIRS_HELD_OUT_FRACTION, seed=0
    )
    print(f"train       {files.num_train:>6} pairs     {files.train.parquet}")
    print(f"validation  {files.num_validation:>6} pairs     {files.validation.parquet}")
    print(_next("reward_model", model, files))


def _next(config_name: str, model: str, files: gsm8k.Gsm8kFiles) -> str:
    command = for_shell(
        [
            *("verl-ray", "train", "--config-name", config_name),
            ("model.path", model),
            ("data.train_path", str(files.train.parquet)),
            ("data.validation_path", str(files.validation.parquet)),
        ]
    )
    return f"next: {command}"


def _text(prompt: str | list[Message]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)


if __name__ == "__main__":
    sys.exit(main())
