"""The suite `preferences`: steps of DPO on pairs of responses, compared with TRL's
DPOTrainer on the same pairs, with the same model, batch size and number of threads.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from scripts.bench.suite import Flags, circumstances, print_json, rounds
from verl_ray.config.preparation import TinyModelConfig

_CHARACTERS = "abcdefghijklmnopqrstuvwxyz "
_LAYERS = TinyModelConfig(
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    intermediate_size=384,
    tie_embeddings=True,
)
_SHORTEST, _LONGEST = 8, 96
_WARM_UP = 3


def main(argv: list[str]) -> int:
    """Run the suite and print its figures.

    Returns:
        The exit code.
    """
    if argv[:1] == ["--trl"]:
        print(json.dumps(_trl_steps(*argv[1:])))
        return 0
    flags = Flags(
        "preferences",
        "Seconds of a step of DPO, beside those of TRL's DPOTrainer on the same pairs:"
        f" a model of 0.8 million parameters, responses of {_SHORTEST} to {_LONGEST}"
        " tokens, one thread each. Both sides take turns.",
    )
    flags.number("--pairs", 64, "pairs of a step")
    flags.number("--steps", 20, "steps of a round")
    flags.number("--repeats", 3, "rounds; the median step of all of them counts")
    flags.folder()
    options = flags.parse_args(argv)

    folder = Path(options.dir).absolute() / "preferences-4x128"
    _write_inputs(folder, options.pairs * options.steps)
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    for number in rounds(options.repeats, "preferences"):
        steps = {
            "trl": _apart(folder, options.pairs, options.steps),
            "ours": _our_steps(folder, options.pairs, options.steps),
        }
        for side, measured in steps.items():
            seconds[side] += measured[_WARM_UP:] if number else []

    medians = {side: round(median(values), 4) for side, values in seconds.items()}
    figures = {
        "median_step_s": medians,
        "best_step_s": {side: round(min(each), 4) for side, each in seconds.items()},
        "speedup_over_trl": round(medians["trl"] / medians["ours"], 3),
        "pairs": options.pairs,
        **circumstances(),
    }
    print_json(figures)
    return 0


def _write_inputs(folder: Path, num_pairs: int) -> None:
    """Write a model, and pairs whose responses are of any length."""
    from verl_ray.data.tokenizers import character_tokenizer
    from verl_ray.models.tiny import make_tiny_qwen3

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer"
    character_tokenizer(tokenizer, _CHARACTERS)
    make_tiny_qwen3(folder / "model", tokenizer, _LAYERS, seed=0)

    random = np.random.default_rng(0)
    characters = np.array(list(_CHARACTERS))

    def text(shortest: int, longest: int) -> str:
        return "".join(random.choice(characters, random.integers(shortest, longest)))

    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(num_pairs):
            pair = {"prompt": "q" + text(8, 32)}
            for side in ("chosen", "rejected"):
                pair[side] = "a" + text(_SHORTEST, _LONGEST)
            file.write(json.dumps(pair) + "\n")


def _run(*command: str) -> str:
    """Return what a program of one thread prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{ran.stderr[-4000:]}")
    return ran.stdout


def _our_steps(folder: Path, pairs: int, steps: int) -> list[float]:
    """Return the seconds of each step of a run of `verl-ray train`."""
    run = folder / "run"
    for old in (run / "metrics.jsonl", *run.glob("reference_log_probs_*.bin")):
        old.unlink(missing_ok=True)
    overrides = [
        f"run.dir={run}",
        "run.resume=none",
        f"model.path={folder / 'model'}",
        f"data.train_path={folder / 'pairs.jsonl'}",
        "data.validation_path=null",
        "run.evaluate_every=0",
        "run.checkpoint_every=0",
        "run.save_at_end=false",
        "run.threads_per_rank=1",
        "tracking.wandb.mode=disabled",
        f"preference.batch_size={pairs}",
        "preference.max_tokens=256",
        f"run.total_steps={steps}",
    ]
    _run("controllers", "train", "--config-name", "dpo", *overrides)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["timing_s/step"] for line in lines if "timing_s/step" in line]


def _apart(folder: Path, pairs: int, steps: int) -> list[float]:
    """Return the seconds of each step of TRL, in a process of its own."""
    arguments = map(str, (folder, pairs, steps))
    printed = _run("scripts.bench", "preferences", "--trl", *arguments)
    measured: list[float] = json.loads(printed.splitlines()[-1])
    return measured


def _trl_steps(folder: str, pairs: str, steps: str) -> list[float]:
    """Return the seconds of each step of TRL's DPOTrainer."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    trl: Any = importlib.import_module("trl")
    torch.set_num_threads(1)
    seconds: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began_s = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.began_s)

    inputs = Path(folder)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    tokenizer.pad_token = tokenizer.eos_token
    arguments = trl.DPOConfig(
        output_dir=str(inputs / "trl"),
        per_device_train_batch_size=int(pairs),
        max_steps=int(steps),
        max_length=256,
        learning_rate=1e-6,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    data_set = load_dataset("json", data_files=str(inputs / "pairs.jsonl"))
    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(inputs / "model"),
        args=arguments,
        train_dataset=data_set["train"],
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return seconds
