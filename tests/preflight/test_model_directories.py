"""What a model's directory lacks for what the run wants of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts.configuration import compose
from scripts.tiny_families import tiny_config
from tests.preflight.configs import BIG, NO_GAIN, ppo, problems_by_key, with_judge
from tests.preflight.models import LLAMA, write_model
from verl_ray.preflight import model_directories
from verl_ray.preflight.findings import preflight
from verl_ray.preflight.machine import GIB, Machine
from verl_ray.preflight.model_files import tensor_shapes
from verl_ray.preflight.model_proof import ModelProof
from verl_ray.proofs.cut_model import random_model


def test_parameters_are_counted_from_the_headers(model: Path) -> None:
    assert sum(math.prod(shape) for shape in tensor_shapes(str(model)).values()) == 120


def test_an_incomplete_model_directory_says_what_it_lacks(
    tmp_path: Path, data: Path
) -> None:
    assert (
        "no readable config.json"
        in problems_by_key(preflight(ppo(tmp_path, data), BIG))["model.path"]
    )
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "max_position_embeddings": 1000}'
    )
    messages = [
        problem.rule for problem in preflight(ppo(tmp_path, data), BIG).problems
    ]
    assert messages == [
        "this directory has no *.safetensors",
        "this directory has no tokenizer",
        "the model has 1000 positions, and a row may have 1536 tokens",
    ]


def test_a_run_or_a_checkpoint_is_no_model_directory(
    tmp_path: Path, data: Path
) -> None:
    def problem(folder: Path) -> str:
        return problems_by_key(preflight(ppo(folder, data), BIG))["model.path"]

    checkpoint = tmp_path / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    assert problem(tmp_path).startswith("this is the folder of a run")
    assert f"verl-ray export {checkpoint} DIR" in problem(checkpoint)


def test_rows_are_shortened_by_no_more_than_there_is(
    tmp_path: Path, data: Path
) -> None:
    def advice(*overrides: str) -> str:
        return problems_by_key(preflight(ppo(tmp_path, data, *overrides), BIG))[
            "model.path"
        ]

    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "max_position_embeddings": 2048}'
    )
    tokens = "backend.micro_batch_tokens_per_rank=9000"
    # 1600 + 1024 - 2048, and 1024 are not to be had of 4000 + 1024 - 2048.
    assert "Lower rollout.max_response_tokens by 576, or" in advice(
        tokens, "data.max_prompt_tokens=1600"
    )
    assert (
        "Lower data.max_prompt_tokens + rollout.max_response_tokens to 2048 in all"
        in advice(tokens, "data.max_prompt_tokens=4000")
    )


def test_a_role_with_a_model_of_its_own_is_checked_under_its_key(
    model: Path, data: Path
) -> None:
    messages = problems_by_key(
        preflight(ppo(model, data, f"critic.model.path={model}s"), BIG)
    )
    assert list(messages) == ["critic.model.path"]
    assert f"Did you mean {model}?" in messages["critic.model.path"]


def test_a_reward_model_gives_one_number_per_text(
    tmp_path: Path, model: Path, data: Path
) -> None:
    def classifier(labels: int) -> Path:
        directory = tmp_path / f"{labels} labels"
        directory.mkdir()
        for name in ("config.json", "tokenizer.json", "model-1.safetensors"):
            (directory / name).write_bytes((model / name).read_bytes())
        save_file(
            {"score.weight": np.zeros((labels, 8), np.float32)},
            directory / "model-2.safetensors",
        )
        return directory

    one, two = classifier(1), classifier(2)
    scored = ("reward=model", f"reward.model.path={one}")
    for roles in (
        scored,
        (f"critic.model.path={one}",),
        (*scored, f"critic.model.path={one}"),
    ):
        assert preflight(ppo(model, data, *roles), BIG).problems == []
    for key, path, rule in (
        (
            "reward.model.path",
            model,
            "this model has no score.weight: it is no reward model",
        ),
        (
            "reward.model.path",
            two,
            "this model gives 2 numbers per text (labels), and a score is one",
        ),
        (
            "critic.model.path",
            two,
            "this model gives 2 numbers per text (labels), and a score is one",
        ),
    ):
        (problem,) = preflight(ppo(model, data, *scored, f"{key}={path}"), BIG).problems
        assert (problem.key, problem.value, problem.rule) == (key, str(path), rule)
        assert "one label; `train --config-name reward_model` makes one" in problem.fix
    mixed = ppo(
        model, data, "reward=mixed", f"reward.components.model.model.path={model}"
    )
    assert list(problems_by_key(preflight(mixed, BIG))) == [
        "reward.components.model.model.path"
    ]


def test_the_model_that_a_run_makes_is_no_reward_model(tmp_path: Path) -> None:
    own = compose(
        "quickstart",
        [
            f"run.dir={tmp_path}/run",
            "reward=model",
            "reward.model.path=${model.path}",
            NO_GAIN,
        ],
    )
    assert (
        "it is no reward model"
        in problems_by_key(preflight(own, BIG))["reward.model.path"]
    )


def test_a_reward_model_starts_from_a_language_model(model: Path, data: Path) -> None:
    inputs = [
        f"model.path={model}",
        f"data.train_path={data}/train.jsonl",
        f"data.validation_path={data}/test.jsonl",
    ]
    assert preflight(compose("reward_model", inputs), BIG).problems == []


def test_a_critic_reads_the_actors_tokens(
    tmp_path: Path, model: Path, data: Path
) -> None:
    """A reward model has tokens of its own; a critic that starts from it reads rollouts
    as they are.
    """

    def numbering(name: str, vocabulary: object, *added: str) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        for file in ("config.json", "model-1.safetensors"):
            (directory / file).write_bytes((model / file).read_bytes())
        extra = [
            {"content": content, "id": number}
            for number, content in enumerate(added, start=2)
        ]
        tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": extra}
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        return directory

    actor, wider = (
        numbering("actor", {"a": 0, "b": 1}),
        numbering("wider", {"a": 0, "b": 1}, "<pad>"),
    )
    pieces, other = (
        numbering("pieces", [["a", -1.0], ["b", -2.0]]),
        numbering("other", {"b": 0, "a": 1}),
    )
    for path in (wider, pieces):
        assert (
            preflight(ppo(actor, data, f"critic.model.path={path}"), BIG).problems == []
        )
    for key in ("critic.model.path", "reference.model.path"):
        messages = problems_by_key(preflight(ppo(actor, data, f"{key}={other}"), BIG))
        assert (
            list(messages) == [key]
            and "numbers 2 of them otherwise: 0 is 'a', and here 'b'; 1 is 'b', and here"
            " 'a'"
            in messages[key]
        )
    assert list(
        problems_by_key(preflight(ppo(wider, data, f"critic.model.path={actor}"), BIG))
    ) == ["critic.model.path"]


def test_a_judge_is_checked_under_its_own_keys(
    model: Path, data: Path, tmp_path: Path
) -> None:
    assert preflight(with_judge(model, data, model), BIG).problems == []
    assert list(
        problems_by_key(
            preflight(with_judge(model, data, model.with_name("gone")), BIG)
        )
    ) == ["reward.model.path"]
    messages = problems_by_key(
        preflight(
            with_judge(model, data, model, "reward.engine.tensor_parallel=3"), BIG
        )
    )
    assert (
        "4 attention heads" in messages["reward.engine.tensor_parallel"]
        and len(messages) == 1
    )
    messages = problems_by_key(
        preflight(with_judge(model, data, model, "reward.max_prompt_tokens=1537"), BIG)
    )
    assert messages["reward.max_prompt_tokens"].startswith(
        "the judge has 2048 positions, and question and answer may have 2049 tokens | Lower it or "
        "reward.max_response_tokens by 1 in all"
    )
    messages = problems_by_key(
        preflight(
            with_judge(
                model, data, model, "reward.engine.vllm_args.enforce_eager=false"
            ),
            BIG,
        )
    )
    assert (
        "may not change on a CPU" in messages["reward.engine.vllm_args.enforce_eager"]
    )
    for name in ("tokenizer.json", "model-1.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    settings = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "hidden_size": 128,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert (
        "head size is 16"
        in problems_by_key(preflight(with_judge(model, data, tmp_path), BIG))[
            "reward.model.path"
        ]
    )


def test_the_model_that_a_run_makes_may_judge(tmp_path: Path) -> None:
    own = [
        "reward=judge",
        "reward.model.path=${model.path}",
        f"run.dir={tmp_path}/run",
        NO_GAIN,
    ]
    assert preflight(compose("quickstart", own), BIG).problems == []


def test_the_rollout_engine_fits_the_model(
    tmp_path: Path, model: Path, data: Path
) -> None:
    messages = problems_by_key(
        preflight(ppo(model, data, "rollout.tensor_parallel=3"), BIG)
    )
    assert (
        "4 attention heads" in messages["rollout.tensor_parallel"]
        and "2 or 4" in messages["rollout.tensor_parallel"]
    )
    for name in ("tokenizer.json", "model-1.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    settings = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "hidden_size": 128,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert (
        "head size is 16"
        in problems_by_key(preflight(ppo(tmp_path, data), BIG))["model.path"]
    )
    on_gpu = Machine(cores=8, gpus=8, memory_bytes=2 * GIB, shm_free_bytes=GIB)
    assert preflight(ppo(tmp_path, data), on_gpu).problems == []


def test_the_rollout_engine_computes_the_activation(
    tmp_path: Path, model: Path, data: Path
) -> None:
    settings = LLAMA | {"hidden_act": "gelu"}
    folder = write_model(tmp_path / "model", model, settings)
    assert problems_by_key(preflight(ppo(folder, data), BIG)) == {
        "model.path": "its hidden_act is gelu, and the rollout engine computes silu |"
        " Take a model with silu."
    }
    inputs = [f"model.path={folder}", f"data.train_path={data}/train.jsonl"]
    supervised = [*inputs, "data.validation_path=null", "run.evaluate_every=0"]
    assert preflight(compose("sft", supervised), BIG).problems == []
    gemma = settings | {"model_type": "gemma", "tie_word_embeddings": True}
    folder = write_model(tmp_path / "gemma", model, gemma)
    assert preflight(ppo(folder, data), BIG).problems == []


def test_a_cache_smaller_than_a_row_is_refused_with_ways_that_help(
    tmp_path: Path, model: Path, data: Path
) -> None:
    # 1536 tokens x 3 layers x 2 heads x 32, keys and values: 2.25 MiB in float32.
    small = write_model(tmp_path / "small", model, LLAMA)

    def told(*overrides: str) -> str | None:
        run = ppo(small, data, "rollout.kv_cache_gib=0.001", *overrides)
        return problems_by_key(preflight(run, BIG)).get("rollout.kv_cache_gib")

    more = "Give more than that, for several rows at a time; or shorter rows"
    rule = "one row of 1536 tokens needs {} GiB of it"
    assert told("rollout.dtype=float32") == (
        f"{rule.format(0.0022)} | {more} or rollout.dtype=bfloat16."
    )
    assert told("rollout.dtype=bfloat16") == f"{rule.format(0.0011)} | {more}."


def test_ranks_that_share_out_heads_must_be_able_to(model: Path, data: Path) -> None:
    changes = ["backend=fsdp", "actor.num_ranks=6", "backend.sequence_parallel=3"]
    told = problems_by_key(preflight(ppo(model, data, *changes), BIG))
    assert told["actor.backend.sequence_parallel"] == (
        "these ranks share out the model's 4 attention heads and 4 key-value heads | Use 1 or 2."
    )
    assert not preflight(
        ppo(model, data, *changes[:2], "backend.sequence_parallel=2"), BIG
    ).problems


def described(
    folder: Path, model: Path, family: str, *tensors: tuple[str, tuple[int, ...]]
) -> Path:
    """A directory whose files say that it is such a model, with these tensors."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    settings = json.loads((model / "config.json").read_text()) | {"model_type": family}
    (folder / "config.json").write_text(json.dumps(settings))
    layer = "model.layers.0.self_attn"
    every = {
        "model.embed_tokens.weight": (9, 8),
        f"{layer}.q_proj.weight": (8, 8),
        f"{layer}.q_norm.weight": (8,),
    }
    save_file(
        {
            name: np.zeros(shape, np.float32)
            for name, shape in (every | dict(tensors)).items()
        },
        folder / "m.safetensors",
    )
    return folder


def test_families_whose_tensors_are_described_need_no_proof(
    tmp_path: Path, model: Path, data: Path
) -> None:
    for family in ("gemma", "llama", "qwen2", "qwen3"):
        assert (
            preflight(
                ppo(described(tmp_path / family, model, family), data), BIG
            ).problems
            == []
        )
    described(tmp_path / "other", model, "gemma2")
    assert (
        preflight(with_judge(model, data, tmp_path / "other"), BIG).problems == []
    )  # vLLM alone runs a judge


def test_experts_fit_the_rollout_engine_and_their_settings_belong_to_them(
    tmp_path: Path, model: Path, data: Path
) -> None:
    experts = described(tmp_path / "experts", model, "qwen3_moe")
    assert preflight(ppo(experts, data), BIG).problems == []
    quantized = ppo(experts, data, "rollout.quantization=fp8")
    assert problems_by_key(preflight(quantized, BIG)) == {
        "rollout.quantization": "vLLM quantizes no experts on a CPU, and the model has some"
        " | Use null, or a GPU."
    }
    settings = json.loads((experts / "config.json").read_text())
    (experts / "config.json").write_text(json.dumps(settings | {"hidden_size": 48}))
    assert problems_by_key(preflight(ppo(experts, data), BIG)) == {
        "model.path": "the model's hidden size is 48, which the rollout engine's experts do not take on a CPU | "
        "Take a multiple of 32, or a GPU; supervised runs train this one on a CPU, too."
    }
    on_gpu = Machine(cores=8, gpus=8, memory_bytes=2 * GIB, shm_free_bytes=GIB)
    assert preflight(ppo(experts, data), on_gpu).problems == []
    assert preflight(quantized, on_gpu).problems == []
    supervised = [
        f"model.path={experts}",
        f"data.train_path={data}/train.jsonl",
        "data.validation_path=null",
    ]
    supervised.append("run.evaluate_every=0")
    assert (
        preflight(
            compose("sft", [*supervised, "actor.expert_balance=0.1"]), BIG
        ).problems
        == []
    )
    cut = ["backend=fsdp", "actor.num_ranks=2", "backend.sequence_parallel=2"]
    messages = problems_by_key(preflight(compose("sft", [*supervised, *cut]), BIG))
    assert list(messages) == ["actor.backend.sequence_parallel"]
    (message,) = messages.values()
    # What the message names is no problem, and tests/engine/contract.py computes it.
    named = ["actor.backend.tensor_parallel=2", "actor.backend.sequence_parallel=true"]
    assert all(setting in message for setting in named)
    megatron = ["backend@actor.backend=megatron", "actor.num_ranks=2", *named]
    assert preflight(compose("sft", [*supervised, *megatron]), BIG).problems == []
    messages = problems_by_key(
        preflight(ppo(model, data, "critic.expert_balance=0.1"), BIG)
    )
    assert messages == {
        "critic.expert_balance": f"this setting would be ignored: {model} has no experts | Set it to null."
    }
    replay = "rollout.routing_replay=true"
    assert preflight(ppo(experts, data, replay), on_gpu).problems == []
    assert problems_by_key(preflight(ppo(model, data, replay), BIG)) == {
        "rollout.routing_replay": f"this setting would be ignored: {model} has no experts | Set it to false."
    }


def test_biases_expert_parts_move_where_there_are_some_and_a_backend_moves_them(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_directories, "proof_of", lambda path, **_: ModelProof())

    def rules(*settings: str) -> set[str]:
        config = compose("sft", [*inputs, "actor.expert_bias_update=0.001", *settings])
        return {
            problem.rule
            for problem in model_directories.model_problems(config, None)
            if problem.key == "actor.expert_bias_update"
        }

    random_model(tiny_config("glm4_moe"), seed=1).save_pretrained(tmp_path / "glm")
    inputs = [
        f"model.path={tmp_path / 'glm'}", f"data.train_path={data}/train.jsonl", "data.validation_path=null",
        "run.evaluate_every=0",
    ]  # fmt: skip
    assert rules() == set() == rules("backend=fsdp")
    assert rules("backend=megatron") == {"backend=megatron does not move biases"}
    (rule,) = rules("actor.lora.rank=4")
    assert "stays as it is under an adapter" in rule
    random_model(tiny_config("qwen3_moe"), seed=1).save_pretrained(tmp_path / "qwen")
    (rule,) = rules(f"model.path={tmp_path / 'qwen'}")
    assert rule.endswith("have no biases")
    (rule,) = rules(f"model.path={model}")
    assert rule.endswith("has no experts")


def test_adapters_are_put_on_linear_layers(
    tmp_path: Path, model: Path, data: Path
) -> None:
    router, inner = (
        ("model.layers.0.mlp.gate.weight", (4, 8)),
        ("model.layers.0.mlp.experts.0.up_proj.weight", (6, 8)),
    )
    packed = ("model.layers.0.mlp.experts.down_proj", (2, 6, 8))
    experts = described(tmp_path / "experts", model, "qwen3_moe", router, inner, packed)
    fine = ppo(experts, data, "actor.lora.rank=4", "actor.lora.targets=[q_proj]")
    assert preflight(fine, BIG).problems == []
    expert_parts = ("up_proj", "down_proj", "experts")
    for target in (*expert_parts, "gate", "q_norm", "embed_tokens"):
        reason = "; experts have no adapters here" if target in expert_parts else ""
        asked = ppo(
            experts, data, "actor.lora.rank=4", f"actor.lora.targets=[q_proj,{target}]"
        )
        told = problems_by_key(preflight(asked, BIG))
        assert told == {
            "actor.lora.targets": f"{target}: no linear layer of {experts} has this name{reason} | It has q_proj."
        }


def test_tied_embeddings_are_not_gathered_apart(
    tmp_path: Path, model: Path, data: Path
) -> None:
    tied = described(tmp_path / "tied", model, "llama")
    untied = described(tmp_path / "untied", model, "llama", ("lm_head.weight", (9, 8)))
    apart = ["backend=fsdp", "backend.embedding_units=true"]
    assert preflight(ppo(untied, data, *apart), BIG).problems == []
    assert set(problems_by_key(preflight(ppo(tied, data, *apart), BIG))) == {
        "actor.backend.embedding_units", "reference.backend.embedding_units",
    }  # fmt: skip


def test_the_model_that_a_run_makes_is_known_before_it_is_there(tmp_path: Path) -> None:
    def told(*overrides: str) -> dict[str, str]:
        return problems_by_key(
            preflight(
                compose("quickstart", [f"run.dir={tmp_path}/run", NO_GAIN, *overrides]),
                BIG,
            )
        )

    assert told("actor.lora.rank=4") == {}
    assert told("actor.lora.rank=4", "actor.lora.targets=[nothing]").keys() == {
        "actor.lora.targets"
    }
    cut = told("backend=fsdp", "actor.num_ranks=3", "backend.sequence_parallel=3")
    assert cut.keys() == {
        f"{role}.backend.sequence_parallel" for role in ("actor", "critic", "reference")
    }
    assert "actor.backend.embedding_units" in told(
        "backend=fsdp", "backend.embedding_units=true"
    )
    assert told("critic.expert_balance=0.1").keys() == {"critic.expert_balance"}
