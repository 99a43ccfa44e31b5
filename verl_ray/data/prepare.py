"""The command behind `scripts/prepare_data`: a local copy of a public data set into the run's format.

Invariant: it reads and writes local files only. Deliberately not here: what each data set looks like (`gsm8k.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data import gsm8k
from verl_ray.data.files import Message, read_prompts
from verl_ray.data.tokenizers import CHATML, train_bpe
from verl_ray.errors import VerlRayError

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
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        vocabulary = options.tokenizer_vocab if options.model else None
        model = _prepare_gsm8k(options.source, options.out, options.prompt, vocabulary)
        if options.pairs:
            _prepare_gsm8k_pairs(options.source, options.out / "pairs", options.prompt, model)
    except VerlRayError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prepare_data", description="Turn a local data set into the run's format.")
    commands = parser.add_subparsers(required=True, metavar="DATA_SET")
    command = commands.add_parser(
        "gsm8k",
        help="grade-school word problems",
        description="Reads SOURCE/train.jsonl and SOURCE/test.jsonl (question, answer), writes OUT/train and "
        "OUT/validation as .jsonl, .parquet and datasets folders.",
    )
    command.add_argument("source", type=Path, metavar="SOURCE", help="folder of a local copy of GSM8K")
    command.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    command.add_argument(
        "--prompt", choices=["chat", "text"], default="chat", help="chat messages (default), or plain text"
    )
    command.add_argument(
        "--pairs",
        action="store_true",
        help=f"also write OUT/pairs: a right and a wrong solution of the same problem, from SOURCE/"
        f"{gsm8k.SOLUTIONS_FILE}, for a reward model; the problems are those of SOURCE/test.jsonl",
    )
    command.add_argument(
        "--model",
        action="store_true",
        help="also write OUT/model: a BPE tokenizer trained on these texts and a small untrained model, enough to "
        "try a whole run without a download",
    )
    command.add_argument(
        "--tokenizer-vocab",
        type=int,
        default=_VOCABULARY,
        metavar="N",
        help=f"tokens of the tokenizer that --model trains (default {_VOCABULARY})",
    )
    return parser


def _prepare_gsm8k(source: Path, out: Path, prompt_format: gsm8k.PromptFormat, vocabulary: int | None) -> str:
    """Returns the path of the model, as the command that comes next is to name it."""
    files = gsm8k.convert(source, out, prompt_format)
    print(f"train       {files.num_train:>6} problems  {files.train.parquet}")
    print(f"validation  {files.num_validation:>6} problems  {files.validation.parquet}")
    model = "PATH_OF_A_MODEL"
    if vocabulary is not None:
        from verl_ray.models.tiny import make_tiny_qwen3  # it imports torch, which the conversion does not need

        model = str(out / "model")
        texts = [_text(record.prompt) for record in read_prompts(files.train.jsonl)]
        tokenizer = train_bpe(model, texts, vocabulary, CHATML if prompt_format == "chat" else None)
        make_tiny_qwen3(model, model, _MODEL, seed=0)
        print(f"model       {len(tokenizer):>6} tokens    {model}")
    print(_next("grpo", model, files))
    return model


def _prepare_gsm8k_pairs(source: Path, out: Path, prompt_format: gsm8k.PromptFormat, model: str) -> None:
    files = gsm8k.convert_pairs(source, out, prompt_format, validation_fraction=_PAIRS_HELD_OUT_FRACTION, seed=0)
    print(f"train       {files.num_train:>6} pairs     {files.train.parquet}")
    print(f"validation  {files.num_validation:>6} pairs     {files.validation.parquet}")
    print(_next("reward_model", model, files))


def _next(config_name: str, model: str, files: gsm8k.Gsm8kFiles) -> str:
    return (
        f"next: verl-ray train --config-name {config_name} model.path={model} data.train_path={files.train.parquet} "
        f"data.validation_path={files.validation.parquet}"
    )


def _text(prompt: str | list[Message]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


if __name__ == "__main__":
    sys.exit(main())
