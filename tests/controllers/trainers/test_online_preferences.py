"""Pairs from the rollouts of a run: what is compared, and how it is resumed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.controllers.runs import (
    Inputs,
    Samplers,
    command_here,
    lasting,
    training,
    watched,
)
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import read
from verl_ray.columns.stages import Rollouts
from verl_ray.data.buffer import Experience
from verl_ray.rewards.shaping import response_scores
from verl_ray.tracking.jsonl import read_metrics

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]

TEMPERATURE = 0.7


def pairs_of(experience: Experience) -> list[tuple[int, int]]:
    """Rows of the best and the worst response of each group, one group at a time."""
    score = response_scores(experience.scores)["reward"].score
    group = experience.rollouts.row("group_id")
    pairs = []
    for number in sorted(set(group.tolist())):
        rows = np.flatnonzero(group == number)
        best, worst = rows[score[rows].argmax()], rows[score[rows].argmin()]
        if score[best] > score[worst]:
            pairs.append((int(best), int(worst)))
    return pairs


def norm_by_transformers(
    model: Path, rows: Rollouts, pairs: list[tuple[int, int]], beta: float
) -> float:
    """The norm of the gradient of DPO's loss at the reference, one row at a time."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def log_prob(row: int) -> Tensor:
        start, end = rows.offsets[row : row + 2]
        tokens = torch.tensor(rows.tokens[start:end].astype(np.int64))
        logits = plain(tokens[None]).logits[0, :-1] / TEMPERATURE
        log_probs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        return log_probs[torch.tensor(rows.response_mask[start + 1 : end])].sum()

    # There the slope of -log sigmoid is -1/2.
    for best, worst in pairs:
        loss = -0.5 * beta * (log_prob(best) - log_prob(worst)) / len(pairs)
        loss.backward()
    squares = [each.grad.square().sum() for each in plain.parameters()]
    return math.sqrt(float(sum(squares)))


@pytest.mark.parametrize(
    "changes",
    [
        (
            "backend@reference.backend=fsdp",
            "actor.num_ranks=2",
            "actor.backend.micro_batch_tokens_per_rank=28",
        ),
        pytest.param(
            ("actor.lora.rank=4", "rollout.sync.adapter=merged"), marks=pytest.mark.slow
        ),
    ],
)
def test_the_first_step_compares_the_best_and_the_worst_response_of_each_group(
    inputs: Inputs,
    samplers: Samplers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: tuple[str, ...],
) -> None:
    """At the reference, with log-probs at the temperature of the sampler."""
    config = inputs.config(
        "grpo", tmp_path, "algorithm=online_dpo", f"rollout.temperature={TEMPERATURE}",
        "preference.beta=0.5", *changes,
    )  # fmt: skip
    is_adapted = config.actor.lora.rank > 0
    assert config.has_reference != is_adapted
    with training(config, samplers) as run:
        taken = watched(run, monkeypatch)
        run.begin(0)
        first = run.step(1)

    scores = response_scores(taken[0].scores)["reward"].score
    assert first["critic/rewards/mean"] == pytest.approx(scores.mean())
    rows, pairs = read(taken[0].rollouts, 60), pairs_of(taken[0])
    assert 2 < len(pairs) <= 8
    assert first["preference/pairs"] == len(pairs)
    assert first["preference/groups_without_pair"] == pytest.approx(1 - len(pairs) / 8)
    sampled = np.add.reduceat(rows.rollout_log_probs, rows.offsets[:-1])
    best, worst = (sampled[list(side)].mean() for side in zip(*pairs, strict=True))
    assert first["logps/chosen"] == pytest.approx(best, abs=1e-4)
    assert first["logps/rejected"] == pytest.approx(worst, abs=1e-4)

    assert first["actor/loss"] == pytest.approx(math.log(2), abs=1e-5)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert first[name] == pytest.approx(0, abs=1e-5)
    assert first["training/rollout_probs_diff_max"] < 1e-4
    assert "timing_s/ref" in first and "timing_s/old_log_prob" not in first
    if not is_adapted:
        norm = norm_by_transformers(inputs.model, rows, pairs, beta=0.5)
        assert first["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    """Of an adapter, in two updates per step."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for run_dir, steps in ((whole, 3), (broken, 1), (broken, 3)):
        command_here(
            cluster, "train", "--config-name", "grpo", *inputs.rl(run_dir), "algorithm=online_dpo",
            "preference.loss=ipo", "preference.rpo_alpha=0.1", "actor.lora.rank=4",
            "actor.mini_batch_size=16", "run.checkpoint_every=1", f"run.total_steps={steps}",
            "run.evaluate_every=1", "actor.optimizer.schedule=constant",
        )  # fmt: skip
    straight, resumed = (
        read_metrics(folder / "metrics.jsonl") for folder in (whole, broken)
    )
    assert [line["training/global_step"] for line in resumed] == [0, 1, 2, 3]
    for left, right in zip(straight, resumed, strict=True):
        assert lasting(left) == lasting(right)
    assert straight[1]["rewards/margins"] != 0 < straight[1]["actor/nll_loss"]
