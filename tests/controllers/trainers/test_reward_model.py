"""A reward model as a run: trained, resumed, evaluated, and a policy learns from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForSequenceClassification

from controllers.commands.evaluate import evaluation_of
from scripts.configuration import compose
from tests.controllers.runs import GRADER, Inputs, command, command_here, lasting
from tests.data.pairs import write_arithmetic_pairs, write_digits
from tests.data.reading import read_preferences
from tests.reward_models import make_reward_model, make_tokenizers
from verl_ray.cluster.session import Session
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.config.tasks.reward_model import RewardModelConfig
from verl_ray.data.arithmetic import ALPHABET, ArithmeticFiles
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.errors import ConfigError
from verl_ray.models.tiny import make_tiny_qwen3
from verl_ray.tracking.jsonl import read_metrics
from verl_ray.tracking.rollouts import recorded_rollouts

SHORT = [
    "run.threads_per_rank=1",
    "tracking.wandb.mode=disabled",
    "run.checkpoint_every=0",
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> ArithmeticFiles:
    folder = tmp_path_factory.mktemp("pairs")
    return write_arithmetic_pairs(
        folder, max_operand=19, num_train=64, num_validation=16, seed=0, wrong_per_sum=2
    )


def preference_run(
    inputs: Inputs, pairs: ArithmeticFiles, run_dir: Path, *changes: str
) -> list[str]:
    return [
        "--config-name", "reward_model", f"run.dir={run_dir}", f"model.path={inputs.model}",
        f"data.train_path={pairs.train.jsonl}", f"data.validation_path={pairs.validation.parquet}",
        "preference.max_tokens=16", "preference.batch_size=16", "tracking.wandb.mode=disabled",
        "run.evaluate_every=2", "run.checkpoint_every=2", "reward.optimizer.lr=1e-3", *changes,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def resumed(
    cluster: Session,
    inputs: Inputs,
    pairs: ArithmeticFiles,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """The folders of a run that was made at once, and of one that was resumed."""
    folder = tmp_path_factory.mktemp("resumed")
    whole, broken = folder / "whole", folder / "broken"
    changes = ["backend=fsdp", "preference.margin=0.5", "preference.label_smoothing=0.1",
               "reward.optimizer.schedule=constant", "reward.num_ranks=2",
               "tracking.rollouts=all"]  # fmt: skip
    for run_dir, steps in ((whole, 4), (broken, 2), (broken, 4)):
        run = preference_run(
            inputs, pairs, run_dir, *changes, f"run.total_steps={steps}"
        )
        command_here(cluster, "train", *run)
    return whole, broken


@pytest.mark.cluster
def test_training_resumes_to_the_same_bits(
    pairs: ArithmeticFiles, resumed: tuple[Path, Path]
) -> None:
    straight, broken = (read_metrics(folder / "metrics.jsonl") for folder in resumed)
    assert [line["training/global_step"] for line in broken] == [0, 1, 2, 3, 4]
    for left, right in zip(straight, broken, strict=True):
        assert lasting(left) == lasting(right)
    states = []
    for folder in resumed:
        dcp_to_torch_save(
            folder / "checkpoints" / "step_00000004" / "reward", folder / "state.pt"
        )
        states.append(torch.load(folder / "state.pt", weights_only=False)["model"])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    # Each step has recorded its pairs once, with the rewards that the metrics average.
    for step in (1, 2, 3, 4):
        rows, again = (
            pq.read_table(recorded_rollouts(folder)[step]).to_pylist()
            for folder in resumed
        )
        assert rows == again and len(rows) == 2 * 16
        chosen, rejected = rows[0::2], rows[1::2]
        assert {row["label"] for row in chosen} == {"chosen"}
        assert [row["prompt"] for row in chosen] == [row["prompt"] for row in rejected]
        line = straight[step]
        for name, column in (("reward/chosen", "reward"), ("reward/margin", "margin"),
                             ("reward/loss", "loss")):  # fmt: skip
            mean = np.mean([row[column] for row in chosen])
            assert mean == pytest.approx(line[name], abs=1e-5)
        mean = np.mean([row["reward"] for row in rejected])
        assert mean == pytest.approx(line["reward/rejected"], abs=1e-5)

    _, loss = by_transformers(resumed[1] / "model", pairs)
    assert broken[-1]["val-core/held_out/log_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.cluster
@pytest.mark.parametrize(
    "what",
    [
        # A model is measured by the same command after a supervised run.
        pytest.param("model.path={}/model", marks=pytest.mark.slow),
        "run.resume={}/checkpoints/step_00000004",
    ],
)
def test_evaluate_agrees_with_transformers(
    cluster: Session,
    inputs: Inputs,
    pairs: ArithmeticFiles,
    resumed: tuple[Path, Path],
    tmp_path: Path,
    what: str,
) -> None:
    _, run_dir = resumed
    measured = preference_run(inputs, pairs, tmp_path, what.format(run_dir))
    ended = command_here(cluster, "evaluate", *measured)
    folder = Path(ended.stdout.splitlines()[-1].removeprefix("evaluation: "))
    result = json.loads((folder / "metrics.json").read_text())
    accuracy, loss = by_transformers(run_dir / "model", pairs)
    for name, expected in (("pair_accuracy", accuracy), ("log_loss", loss)):
        for mean in (
            result["metrics"][f"val-core/held_out/{name}"],
            result["intervals"][f"val-core/held_out/{name}"]["mean"],
        ):
            assert mean == pytest.approx(expected, abs=1e-4)


def test_a_model_without_a_head_is_not_evaluated(
    inputs: Inputs, pairs: ArithmeticFiles, tmp_path: Path
) -> None:
    """A new head would be random, and would be evaluated."""
    config = compose("reward_model", preference_run(inputs, pairs, tmp_path)[2:])
    assert isinstance(config, RewardModelConfig)
    with pytest.raises(
        ConfigError,
        match=r"this model has no score\.weight, and run\.resume leads to no checkpoint",
    ):
        evaluation_of(config)


def by_transformers(model_path: Path, pairs: ArithmeticFiles) -> tuple[float, float]:
    """Pair accuracy and log-loss on the held-out pairs, one row at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(
        model_path, num_labels=1, dtype=torch.float32
    )
    tokenizer = load_tokenizer(model_path)
    right, loss = 0.0, 0.0
    records = read_preferences(pairs.validation.jsonl)
    for record in records:
        with torch.no_grad():
            chosen, rejected = (
                float(
                    model(
                        torch.tensor(
                            [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
                        )
                    ).logits
                )
                for text in ("".join(record.chosen), "".join(record.rejected))
            )
        right += chosen > rejected
        loss += float(torch.nn.functional.softplus(torch.tensor(rejected - chosen)))
    return right / len(records), loss / len(records)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.vllm
def test_a_run_learns_from_a_mixture_and_reports_its_parts(
    inputs: Inputs, tmp_path: Path
) -> None:
    """The reward model scores pieces of odd sizes while rollouts are generated.

    It runs in the actor's sharded processes. The run needs more than the groups of
    other tests leave of the shared cluster.
    """
    make_tokenizers(tmp_path)
    reward_model = make_reward_model(
        tmp_path / "reward", "llama", tmp_path / "brackets"
    )
    command(
        None, "train", "--config-name", "ppo", *inputs.overrides(tmp_path / "run"), "run.total_steps=2",
        "run.evaluate_every=2", "data.prompts_per_step=8", "data.max_prompt_tokens=8", "rollout.group_size=4",
        "rollout.max_response_tokens=6", "rollout.kv_cache_gib=0.03125", "rollout.stream_rows=5", "backend=fsdp",
        "actor.num_ranks=2", "reward=mixed", f"reward.components.function.functions.default={GRADER}:ones",
        f"reward.components.model.model.path={reward_model}", "reward.weights.function=2.0",
    )  # fmt: skip
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for line in lines[1:]:
        assert line["reward_health/ok"] == 32
        assert line["reward/function/failed"] == line["reward/model/failed"] == 0
        parts = 2 * line["reward/function/mean"] + 0.5 * line["reward/model/mean"]
        assert line["critic/score/mean"] == pytest.approx(parts, abs=1e-5)
        assert line["reward/model/max"] > line["reward/model/min"]
        assert line["critic/rewards/mean"] != pytest.approx(
            parts, abs=1e-2
        )  # the model's part of it is normalised
    for line in (lines[0], lines[-1]):
        parts = (
            2 * line["val-aux/reward/function/mean"]
            + 0.5 * line["val-aux/reward/model/mean"]
        )
        assert line["val-core/arithmetic/reward/mean@1"] == pytest.approx(
            parts, abs=1e-5
        )


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_policy_that_learns_from_a_reward_model_gets_more_answers_right(
    cluster: Session, tmp_path: Path
) -> None:
    """The share of right answers rises from about 0.2 to 1.

    The reward model has seen right and wrong digits of other numbers than the held-out
    ones.
    """
    data = tmp_path / "data"
    write_digits(data, seed=0)
    character_tokenizer(tmp_path / "tokenizer", ALPHABET)
    shape = TinyModelConfig(
        hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=128,
        tie_embeddings=True,
    )  # fmt: skip
    untrained = make_tiny_qwen3(
        tmp_path / "untrained", tmp_path / "tokenizer", shape, seed=0
    )
    problems = [
        f"data.train_path={data}/train.jsonl",
        f"data.validation_path={data}/validation.jsonl",
    ]
    command_here(
        cluster, "train", "--config-name", "sft", f"run.dir={tmp_path}/sft", f"model.path={untrained}", *problems,
        *SHORT, "run.total_steps=80", "run.evaluate_every=0", "actor.optimizer.lr=2e-3", "sft.max_tokens=16",
        "sft.batch_size=64",
    )  # fmt: skip
    policy = f"model.path={tmp_path}/sft/model"
    command_here(
        cluster, "train", "--config-name", "reward_model", f"run.dir={tmp_path}/reward", policy, *SHORT,
        f"data.train_path={data}/train_pairs.jsonl", f"data.validation_path={data}/validation_pairs.jsonl",
        "run.total_steps=80", "run.evaluate_every=80", "reward.optimizer.lr=2e-3", "preference.max_tokens=16",
        "preference.batch_size=64",
    )  # fmt: skip
    judged = read_metrics(tmp_path / "reward" / "metrics.jsonl")[-1]
    assert judged["val-core/held_out/pair_accuracy"] > 0.9  # a coin: 0.5
    command_here(
        cluster, "train", "--config-name", "ppo", f"run.dir={tmp_path}/ppo", policy, *problems, *SHORT,
        "run.total_steps=12", "run.evaluate_every=12", "data.prompts_per_step=32", "data.max_prompt_tokens=16",
        "rollout.max_response_tokens=8", "rollout.kv_cache_gib=0.0625", "actor.optimizer.lr=1e-3",
        "critic.optimizer.lr=2e-3", "reward=model", "reward.normalise=none", "reward.clip=null",
        f"reward.model.path={tmp_path}/reward/model", f"critic.model.path={tmp_path}/reward/model",
        "evaluation.functions={default: exact_match}",
    )  # fmt: skip
    lines = read_metrics(tmp_path / "ppo" / "metrics.jsonl")
    before, after = (
        line["val-core/validation/acc/mean@1"] for line in (lines[0], lines[-1])
    )
    assert after > before + 0.4, (before, after)
    assert all(line["reward_health/ok"] == 256 for line in lines[1:])
