"""Preferences as a run of a policy: trained, resumed, evaluated, exported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

from controllers.trainers.reference import ReferenceLogProbs
from scripts.configuration import compose
from tests.controllers.runs import Inputs, command_here, lasting
from tests.data.pairs import write_arithmetic_pairs, write_digits
from tests.data.reading import read_preferences
from verl_ray.cluster.session import Session
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.config.tasks.dpo import DPOConfig
from verl_ray.data.arithmetic import ALPHABET, ArithmeticFiles
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.models.tiny import make_tiny_qwen3
from verl_ray.tracking.jsonl import read_metrics

BETA = 0.5
SHAPE = TinyModelConfig(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=128,
    tie_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> ArithmeticFiles:
    folder = tmp_path_factory.mktemp("pairs")
    return write_arithmetic_pairs(
        folder, max_operand=19, num_train=32, num_validation=16, seed=0
    )


def dpo_run(
    inputs: Inputs, pairs: ArithmeticFiles, run_dir: Path, *changes: str
) -> list[str]:
    return [
        "--config-name", "dpo", f"run.dir={run_dir}", f"model.path={inputs.model}",
        f"data.train_path={pairs.train.jsonl}", f"data.validation_path={pairs.validation.parquet}",
        "preference.max_tokens=16", "preference.batch_size=16", f"preference.beta={BETA}",
        "tracking.wandb.mode=disabled", "run.evaluate_every=1", "run.checkpoint_every=1",
        "actor.optimizer.lr=1e-3", "actor.optimizer.schedule=constant", *changes,
    ]  # fmt: skip


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("loss", "optimizer"),
    [
        ("sigmoid", "adamw"),
        pytest.param("sigmoid", "muon", marks=pytest.mark.slow),
        pytest.param("kto", "adamw", marks=pytest.mark.slow),
    ],
)
def test_training_resumes_to_the_same_bits(
    cluster: Session,
    inputs: Inputs,
    pairs: ArithmeticFiles,
    tmp_path: Path,
    loss: str,
    optimizer: str,
) -> None:
    """The second epoch begins after the resume, and reads what the first one kept."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for run_dir, steps in ((whole, 3), (broken, 1), (broken, 3)):
        run = dpo_run(
            inputs, pairs, run_dir, "backend=fsdp", f"run.total_steps={steps}",
            f"preference.loss={loss}", f"optimizer@actor.optimizer={optimizer}",
        )  # fmt: skip
        command_here(cluster, "train", *run)

    straight, resumed = (
        read_metrics(folder / "metrics.jsonl") for folder in (whole, broken)
    )
    assert [line["training/global_step"] for line in resumed] == [0, 1, 2, 3]
    for left, right in zip(straight, resumed, strict=True):
        assert lasting(left) == lasting(right)
    states = []
    for folder in (whole, broken):
        dcp_to_torch_save(
            folder / "checkpoints" / "step_00000003" / "actor", folder / "state.pt"
        )
        states.append(torch.load(folder / "state.pt", weights_only=False)["model"])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    if loss == "kto":
        assert all(line["kl"] >= 0 for line in straight[1:])
        return

    # At the reference the policy tells no response from the other.
    first, last = straight[0], straight[-1]
    assert first["val-core/held_out/log_loss"] == pytest.approx(np.log(2), abs=1e-6)
    for end in ("max", "min"):
        assert first[f"val-aux/held_out/margin/{end}"] == pytest.approx(0, abs=1e-5)
    assert straight[1]["actor/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert straight[1]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["rewards/chosen"] - last["rewards/rejected"] == pytest.approx(
        last["rewards/margins"], abs=1e-6
    )
    # 32 rows of training pairs twice, and as many of held-out ones.
    (kept,) = whole.glob("reference_log_probs_*.bin")
    assert kept.stat().st_size == 24 * (64 + 32)
    assert kept.read_bytes() == (broken / kept.name).read_bytes()

    accuracy, loss = by_transformers(inputs.model, whole / "model", pairs)
    assert last["val-core/held_out/log_loss"] == pytest.approx(loss, abs=1e-5)
    assert last["val-core/held_out/pair_accuracy"] == pytest.approx(accuracy)


@cache
def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def log_ratio(policy: Path, reference: Path, prompt: str, response: str) -> float:
    """The log-prob of a response by one model less that by the other."""
    tokenizer = load_tokenizer(policy)
    start = len(tokenizer(prompt)["input_ids"])
    tokens = torch.tensor(
        [[*tokenizer(prompt + response)["input_ids"], tokenizer.eos_token_id]]
    )
    sums = []
    for path in (policy, reference):
        with torch.no_grad():
            log_probs = loaded(path)(tokens).logits[0, :-1].log_softmax(-1)
        chosen = log_probs.gather(1, tokens[0, 1:, None])[start - 1 :]
        sums.append(float(chosen.sum()))
    return sums[0] - sums[1]


def by_transformers(
    reference_path: Path, model_path: Path, pairs: ArithmeticFiles
) -> tuple[float, float]:
    """Pair accuracy and log-loss of implicit rewards, one row at a time."""

    def reward(prompt: str, response: str) -> float:
        return BETA * log_ratio(model_path, reference_path, prompt, response)

    right, loss = 0.0, 0.0
    records = read_preferences(pairs.validation.jsonl)
    for record in records:
        chosen, rejected = reward(*record.chosen), reward(*record.rejected)
        right += chosen > rejected
        loss += float(torch.nn.functional.softplus(torch.tensor(rejected - chosen)))
    return right / len(records), loss / len(records)


@pytest.mark.cluster
def test_the_divergence_is_that_of_the_whole_mini_batch(
    cluster: Session, inputs: Inputs, pairs: ArithmeticFiles, tmp_path: Path
) -> None:
    """Two ranks learn from three pairs as six responses, with another reference."""
    other = make_tiny_qwen3(tmp_path / "other", inputs.model, SHAPE, seed=5)
    run = dpo_run(
        inputs, pairs, tmp_path / "run", "backend=fsdp", "actor.num_ranks=2", "preference.loss=kto",
        f"reference.model.path={other}", "data.shuffle=false", "preference.batch_size=6", "run.total_steps=1",
    )  # fmt: skip
    command_here(cluster, "train", *run)
    before, step = read_metrics(tmp_path / "run" / "metrics.jsonl")

    records = read_preferences(pairs.train.jsonl)[:3]
    responses = [
        side for record in records for side in (record.chosen, record.rejected)
    ]
    prompts, texts = zip(*responses, strict=True)

    def ratios(texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
        pairs = zip(prompts, texts, strict=True)
        return np.array([log_ratio(inputs.model, other, *pair) for pair in pairs])

    divergence = ratios([*texts[1:], texts[0]]).mean()
    assert divergence > 0.1
    assert step["kl"] == pytest.approx(divergence, abs=1e-5)
    own = ratios(texts)
    gain = BETA * (own - divergence) * np.array([1, -1] * 3)
    assert step["actor/loss"] == pytest.approx(
        (1 / (1 + np.exp(gain))).mean(), abs=1e-6
    )
    assert step["rewards/chosen"] == pytest.approx(BETA * own[0::2].mean(), abs=1e-5)
    assert step["rewards/rejected"] == pytest.approx(BETA * own[1::2].mean(), abs=1e-5)

    # Held-out pairs are measured as those of any other loss.
    accuracy, loss = by_transformers(other, inputs.model, pairs)
    assert before["val-core/held_out/log_loss"] == pytest.approx(loss, abs=1e-5)
    assert before["val-core/held_out/pair_accuracy"] == pytest.approx(accuracy)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    "changes",
    [
        ("backend=engine", "actor.lora.rank=4", "preference.loss=ipo"),
        ("backend=megatron", "backend.tensor_parallel=2", "actor.num_ranks=2"),
        ("backend=fsdp", "actor.num_ranks=2", "preference.loss=simpo"),
        ("backend=engine", "actor.lora.rank=4", "preference.loss=kto"),
        (
            "backend=engine",
            "backend@reference.backend=fsdp",
            "preference.rpo_alpha=0.5",
        ),
    ],
)
def test_an_evaluation_measures_what_the_run_measured(
    cluster: Session,
    inputs: Inputs,
    pairs: ArithmeticFiles,
    tmp_path: Path,
    changes: tuple[str, ...],
) -> None:
    """The adapter's base, a reference on another backend, and none at all."""
    run = dpo_run(inputs, pairs, tmp_path / "run", *changes, "run.total_steps=3")
    command_here(cluster, "train", *run)
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000003"
    measured = dpo_run(
        inputs, pairs, tmp_path / "again", *changes, f"run.resume={checkpoint}"
    )
    ended = command_here(cluster, "evaluate", *measured)
    folder = Path(ended.stdout.splitlines()[-1].removeprefix("evaluation: "))
    metrics = json.loads((folder / "metrics.json").read_text())["metrics"]
    for name in ("pair_accuracy", "log_loss"):
        key = f"val-core/held_out/{name}"
        assert metrics[key] == pytest.approx(last[key], abs=1e-6)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("records", "loss", "metric"),
    [
        ("pairs", "sigmoid", "pair_accuracy"),
        ("unpaired", "kto", "auc"),
        ("unpaired", "apo_zero_unpaired", "auc"),
    ],
)
def test_a_preference_is_learned_from_nothing(
    cluster: Session, tmp_path: Path, records: str, loss: str, metric: str
) -> None:
    """Of 800 held-out pairs the untrained model tells half, and then nearly all."""
    write_digits(tmp_path / "data", seed=0)
    character_tokenizer(tmp_path / "tokenizer", ALPHABET)
    model = make_tiny_qwen3(
        tmp_path / "untrained", tmp_path / "tokenizer", SHAPE, seed=0
    )
    command_here(
        cluster, "train", "--config-name", "dpo", f"run.dir={tmp_path / 'run'}", f"model.path={model}",
        f"data.train_path={tmp_path}/data/train_{records}.jsonl", f"preference.loss={loss}",
        f"data.validation_path={tmp_path}/data/validation_{records}.jsonl", "preference.max_tokens=16",
        "preference.batch_size=64", "actor.optimizer.lr=3e-3", "run.total_steps=40", "run.evaluate_every=40",
        "run.checkpoint_every=0", "tracking.wandb.mode=disabled",
    )  # fmt: skip
    before, *_, after = read_metrics(tmp_path / "run" / "metrics.jsonl")
    name = f"val-core/held_out/{metric}"
    assert 0.3 < before[name] < 0.7
    assert after[name] > 0.98


def test_half_a_record_of_the_reference_is_cut(tmp_path: Path) -> None:
    """A driver that is killed as it writes loses what it wrote, and nothing else."""
    inputs = ["model.path=/m", "data.train_path=t", "data.validation_path=v"]
    config = compose("dpo", [*inputs, "reference.backend.dtype=float32"])
    assert isinstance(config, DPOConfig)
    role = config.reference
    nobody: Any = None
    first = ReferenceLogProbs(nobody, tmp_path, role)
    first._keep([b"a" * 16, b"b" * 15 + b"\0"], np.array([-1.5, -2.5]))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:7])

    second = ReferenceLogProbs(nobody, tmp_path, role)
    assert second._known == {b"a" * 16: -1.5, b"b" * 15 + b"\0": -2.5}
    # An evaluation may write beside the run.
    first._keep([b"c" * 16], np.array([-3.5]))
    second._keep([b"d" * 16], np.array([-4.5]))
    assert path.read_bytes()[: len(whole)] == whole
    third = ReferenceLogProbs(nobody, tmp_path, role)
    assert third._known[b"c" * 16] == -3.5 and third._known[b"d" * 16] == -4.5

    # Another type gives other log-probs.
    other = compose("dpo", [*inputs, "reference.backend.dtype=bfloat16"])
    assert isinstance(other, DPOConfig)
    assert not ReferenceLogProbs(nobody, tmp_path, other.reference)._known
