"""Supervised steps on real engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from controllers.trainers.sft import ACCURACY, SFTTrainer
from controllers.trainers.supervised import Examples
from tests.controllers.runs import Inputs, start_some
from verl_ray.cluster.session import Session
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.data.conversations import SupervisedSource
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.models.tiny import make_tiny

pytestmark = pytest.mark.cluster


def source(config: SFTConfig, path: Path) -> SupervisedSource:
    tokenizer = load_tokenizer(config.model.path)
    return SupervisedSource(
        str(path), tokenizer, config.data, max_tokens=16, seed=config.run.seed
    )


def greedy_accuracy(model_path: Path, config: SFTConfig, path: Path) -> float:
    """By generating, with transformers."""
    tokenizer = load_tokenizer(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(str(model_path), dtype=torch.float32)
    rows = source(config, path).all()
    right = 0
    for start, end in zip(rows.offsets, rows.offsets[1:], strict=False):
        tokens = torch.tensor(rows.tokens[start:end], dtype=torch.long)
        learned = torch.tensor(rows.response_mask[start:end])
        prompt, response = tokens[~learned], tokens[learned]
        said = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt)[None], do_sample=False,
            max_new_tokens=len(response), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )[0, len(prompt) :]  # fmt: skip
        right += said.tolist() == response.tolist()
    return right / rows.num_rows


def test_the_loss_falls_and_accuracy_is_that_of_greedy_decoding(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.supervised(tmp_path, "actor.optimizer.lr=5e-3", "actor.num_ranks=2", "backend=fsdp",
                               "actor.optimizer.schedule=constant", "run.total_steps=40")  # fmt: skip
    train = source(config, inputs.train)
    groups, roles = start_some(config, tmp_path, sampling=False)
    with groups:
        trainer = SFTTrainer(
            roles["actor"],
            Examples(train, train.all()),
            batch_size=16,
            max_skipped_steps=5,
        )
        steps = [trainer.step(number) for number in range(40)]
        assert steps[-1]["train/loss"] < steps[0]["train/loss"] / 3
        assert steps[-1]["training/epoch"] >= 9
        accuracy = trainer.evaluate().metrics[ACCURACY]
        trainer.export(str(tmp_path / "model"))
    assert 0.2 < accuracy <= 1
    assert greedy_accuracy(tmp_path / "model", config, inputs.train) == pytest.approx(
        accuracy
    )
    assert (
        trainer.state().keys() == {"cursor", "finished", "gradients"}
        and not trainer.finished
    )


def test_experts_learn_and_are_kept_in_balance(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    shape = TinyModelConfig(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_size=32, intermediate_size=96,
        tie_embeddings=True,
    )  # fmt: skip
    model = make_tiny("qwen3_moe", tmp_path / "experts", inputs.model, shape, seed=0)
    config = inputs.supervised(tmp_path, f"model.path={model}", "actor.optimizer.lr=5e-3",
                               "actor.optimizer.schedule=constant", "run.total_steps=20",
                               "actor.expert_balance=1.0")  # fmt: skip
    train = source(config, inputs.train)
    groups, roles = start_some(config, tmp_path, sampling=False)
    with groups:
        trainer = SFTTrainer(
            roles["actor"],
            Examples(train, train.all()),
            batch_size=16,
            max_skipped_steps=5,
        )
        steps = [trainer.step(number) for number in range(20)]
        trainer.export(str(tmp_path / "model"))
        accuracy = trainer.evaluate().metrics[ACCURACY]
    first, last = steps[0], steps[-1]
    assert last["train/loss"] < first["train/loss"] / 1.5
    # top_k = 2 where every expert is used alike
    assert 2 < last["actor/expert_balance_loss"] < first["actor/expert_balance_loss"]
    assert (
        0 <= first["actor/expert_load_min"] < 1 < first["actor/expert_load_max"] <= 2
    )  # of 4, with 2 each
    assert first["actor/expert_idle_fraction"] == 0
    assert greedy_accuracy(tmp_path / "model", config, inputs.train) == pytest.approx(
        accuracy
    )
