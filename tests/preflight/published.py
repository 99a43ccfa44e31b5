"""The config.json of published models, which stand for them where no weights are."""

from __future__ import annotations

import shutil
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "model_configs"

PARAMETERS = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Llama-3.1-70B": 70_553_706_496,
}
"""Number of parameters of each, as its page on the hub states it."""


def published(name: str) -> str:
    """Return the folder of a model, with its config.json alone."""
    assert name in PARAMETERS
    return str(FOLDER / name)


def copied(name: str, folder: Path, tokenizer: Path) -> Path:
    """Write the config.json of a model and the tokenizer of another."""
    folder.mkdir()
    shutil.copy(FOLDER / name / "config.json", folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
