"""A model of a family that is not described needs a proof, which is done once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from controllers.command_line import main
from controllers.compose.composition import examine
from scripts.tiny_families import tiny_config
from tests.own_code import importers, own_model
from verl_ray.errors import ModelError
from verl_ray.preflight import findings, model_directories, model_proof
from verl_ray.preflight.findings import cost_warnings
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.model_directories import content_problems
from verl_ray.preflight.model_files import config_json, tensor_shapes
from verl_ray.preflight.model_proof import (
    ModelProof,
    RolloutProof,
    keep_rollout_proof,
    kept_rollout_proof,
    proof_of,
)
from verl_ray.proofs.cut_model import random_model
from verl_ray.proofs.proof import config_of


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model_proof._proof_of.cache_clear()


def directory(folder: Path, family: str) -> str:
    tiny_config(family).save_pretrained(folder / family)
    return str(folder / family)


def without_tensors(proof: ModelProof) -> ModelProof:
    assert proof.tensors
    return replace(proof, tensors={}, passed_over=())


def test_a_described_family_needs_none_unless_it_has_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = []
    monkeypatch.setattr(
        model_proof,
        "_proof_of",
        lambda path, settings, code: (
            requested.append(path) or ModelProof(failure="requested")
        ),
    )
    assert proof_of(directory(tmp_path, "qwen3")) == ModelProof() and not requested
    assert proof_of(str(tmp_path / "not made yet")) == ModelProof() and not requested
    windows = tiny_config("qwen3", layer_types=["sliding_attention"] * 2)
    windows.save_pretrained(tmp_path / "windows")
    assert proof_of(str(tmp_path / "windows")).failure == "requested"
    requested.clear()
    # It is refused in any case.
    dropped = tiny_config("mixtral", attention_dropout=0.1)
    dropped.save_pretrained(tmp_path / "dropped")
    assert proof_of(str(tmp_path / "dropped")) == ModelProof() and not requested


@pytest.mark.processes
def test_a_proof_is_done_once_and_kept_for_the_next_process(tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    random_model(tiny_config("lfm2"), seed=1).save_pretrained(path)
    first = proof_of(path)
    assert without_tensors(first) == ModelProof(
        packs_rows=False, has_states=True, has_balance=False, has_biases=False
    )
    assert_tensors_are_compared(path)

    (kept,) = (tmp_path / "cache" / "verl_ray" / "proofs").iterdir()
    kept.write_text(json.dumps({"packs_rows": True, "failure": "as it was kept"}))
    assert proof_of(path) == first  # this process remembers it
    model_proof._proof_of.cache_clear()
    assert proof_of(path).failure == "as it was kept"


def assert_tensors_are_compared(path: str) -> None:
    """Lose, add and cut a tensor of the model in a directory."""
    file = Path(path, "model.safetensors")
    tensors = load_file(file)

    def differences(changed: dict[str, Tensor]) -> list[str]:
        save_file(changed, file)
        found = content_problems(
            "model.path", path, head="policy", is_judge=False, needs_files=False
        )
        return [problem.rule.partition("describes: ")[2] for problem in found]

    name = "model.layers.0.feed_forward.w1.weight"
    shape = list(tensors[name].shape)
    others = {key: value for key, value in tensors.items() if key != name}
    # The second name of a tied tensor may be there.
    tied = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert differences(tensors | tied) == []
    assert differences(others) == [f"{name} is absent, and would have shape {shape}"]
    assert differences(others | {name: tensors[name][1:].clone()}) == [
        f"{name} has shape {[shape[0] - 1, shape[1]]}, and would have shape {shape}"
    ]
    assert differences(tensors | {"model.new": torch.ones(3)}) == [
        "model.new has shape [3], and would be absent"
    ]


@pytest.mark.processes
def test_a_family_is_refused_for_a_proof_that_fails(tmp_path: Path) -> None:
    path = directory(tmp_path, "phimoe")
    (problem,) = (
        problem
        for problem in content_problems(
            "model.path", path, head="policy", is_judge=False, needs_files=False
        )
        if "not computed" in problem.rule
    )
    assert problem.rule.startswith(
        "this is a 'phimoe' model, which is not computed here: FAIL log-probs of packed"
        " rows: "
    )
    assert problem.rule.endswith("layers.0.self_attn")
    assert problem.fix == f"verl-ray prove {path} shows all; take another model."


@pytest.mark.parametrize(
    ("family", "has_balance", "has_biases"),
    [("jamba", False, False), ("ernie4_5_moe", True, False), ("dots1", True, True)],
)
def test_a_proof_says_what_the_routers_of_a_family_return(
    family: str, has_balance: bool, has_biases: bool, tmp_path: Path
) -> None:
    fields = {"path": directory(tmp_path, family), "trusts_code": False}
    proof = model_proof._prove(fields, lambda *_: None)["proof"]
    assert proof["failure"] is None
    assert (proof["has_balance"], proof["has_biases"]) == (has_balance, has_biases)


@pytest.mark.processes
def test_code_of_a_model_runs_in_the_process_of_its_proof_where_it_is_trusted(
    tmp_path: Path,
) -> None:
    path = str(own_model(tmp_path))
    where = {"head": "policy", "is_judge": False}
    (refused,) = content_problems("actor.model.path", path, **where)
    assert (refused.key, refused.value) == ("actor.model.trust_remote_code", False)
    with pytest.raises(ModelError, match="--trust-remote-code"):
        config_of(path)
    assert not importers(tmp_path)

    assert not [*content_problems("model.path", path, **where, trusts_code=True)]
    proof = ModelProof(has_balance=False, has_biases=False)
    assert without_tensors(proof_of(path, trusts_code=True)) == proof
    (child,) = importers(tmp_path)
    assert child != os.getpid()

    # Another code is another model.
    before = model_proof._trusted_code(path, {"auto_map": {}})
    Path(path, "modeling_own.py").write_text("")
    assert model_proof._trusted_code(path, {"auto_map": {}}) != before

    config = Path(path, "config.json")
    config.write_text(config.read_text().replace("modeling_own.", "a/b--modeling_own."))
    (elsewhere,) = content_problems("model.path", path, **where, trusts_code=True)
    assert "code of another repository" in elsewhere.rule


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_a_model_that_sees_images_is_looked_at_by_its_text_part(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_directories, "proof_of", lambda path, **_: ModelProof())
    whole = random_model(tiny_config(family), seed=1)
    whole.save_pretrained(tmp_path)

    def problems() -> list[str]:
        found = content_problems(
            "model.path", str(tmp_path), head="policy", is_judge=False, needs_files=False
        )  # fmt: skip
        return [problem.rule for problem in found]

    assert problems() == []
    assert config_json(str(tmp_path))["hidden_size"] == 128
    language_model = whole.model.language_model
    sizes = {
        f"model.{name}": list(value.shape)
        for name, value in language_model.named_parameters()
    }
    shapes = tensor_shapes(str(tmp_path))
    shapes.pop("lm_head.weight", None)
    assert shapes == sizes

    file = tmp_path / "model.safetensors"
    tower = {name: value for name, value in load_file(file).items() if "vis" in name}
    save_file(tower, file)
    assert problems() == ["none of its tensors has the name of a language model's"]


@pytest.mark.processes
def test_kernels_are_those_installed_and_rows_are_packed_by_them_in_bfloat16() -> None:
    # transformers reads it later: none of its code is imported by then.
    program = (
        "import os, sys, verl_ray.models;"
        " print(os.environ['USE_HUB_KERNELS'], 'transformers' in sys.modules)"
    )
    unset = {k: v for k, v in os.environ.items() if k != "USE_HUB_KERNELS"}
    for said, used in (({}, "NO"), ({"USE_HUB_KERNELS": "YES"}, "YES")):
        ended = subprocess.run(
            [sys.executable, "-c", program], env=unset | said, capture_output=True, text=True
        )  # fmt: skip
        assert ended.stdout.split() == [used, "False"], ended.stderr

    by_kernels = ModelProof(has_states=True)
    assert [by_kernels.packs_rows_in(each) for each in ("bfloat16", "float32")] == [
        True,
        False,
    ]
    assert ModelProof().packs_rows_in("float32")


def test_each_use_that_a_proof_does_not_allow_names_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = ModelProof(
        packs_rows=False, has_states=True, has_values=False, has_adapters=False
    )
    for module in (model_directories, findings):
        monkeypatch.setattr(module, "proof_of", lambda path, **_: proof)
    inputs = [
        f"model.path={directory(tmp_path, 'lfm2')}", "data.train_path=t.jsonl", "data.validation_path=v.jsonl",
        "run.evaluate_every=0",
    ]  # fmt: skip

    def keys(root: str, *changes: str) -> set[str]:
        config = examine(root, [*inputs, *changes]).config
        assert config is not None
        return {
            problem.key for problem in model_directories.model_problems(config, None)
        }

    every = keys(
        "ppo", "actor.lora.rank=4", "actor.lora.targets=[q_proj]", "algorithm.sequence=trajectory",
        "backend=fsdp", "actor.num_ranks=2", "actor.backend.sequence_parallel=2",
    )  # fmt: skip
    assert every >= {
        "critic.model.path", "actor.lora.rank", "algorithm.sequence", "actor.backend.sequence_parallel",
    }  # fmt: skip
    assert "reward.model.path" in keys("reward_model")

    # Rows of one length cost micro-batches: 32 prompts times 8, over 2 ranks.
    config = examine(
        "grpo",
        [
            *inputs, "backend=fsdp", "actor.num_ranks=2", "data.max_prompt_tokens=24",
            "rollout.max_response_tokens=8", "actor.backend.micro_batch_tokens_per_rank=1024",
        ],
    ).config  # fmt: skip
    assert config is not None
    (warning,) = (
        each
        for each in findings.cost_warnings(config, None, evaluates=False)
        if "have states" in each
    )
    assert "up to 128 per rank and update, where packed rows take about 4 at" in warning

    # Routers that return no choice, and biases that are parameters.
    proof = ModelProof(has_balance=False, has_biases=False)
    experts = f"model.path={directory(tmp_path, 'jamba')}"
    set_keys = {"actor.expert_balance", "actor.expert_bias_update"}
    assert set_keys & keys("grpo", experts) == set()
    values = [experts, "actor.expert_balance=0.01", "actor.expert_bias_update=0.001"]
    assert set_keys <= keys("grpo", *values)
    config = examine("grpo", [*inputs, experts]).config
    assert config is not None
    (warning,) = (
        each
        for each in findings.cost_warnings(config, None, evaluates=False)
        if "balance loss" in each
    )
    assert "the weight 0.001, and this loss is not computed" in warning
    proof = ModelProof(has_biases=False)
    assert set_keys & keys("grpo", *values) == {"actor.expert_bias_update"}

    # Kernels that take the borders pack rows, and still cannot be cut.
    proof = ModelProof(has_states=True)
    assert keys("grpo", "backend=fsdp", "actor.backend.sequence_parallel=2") >= {
        "actor.backend.sequence_parallel"
    }


def test_the_command_prints_every_claim_and_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory(tmp_path, "granite")
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    file = Path(path, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))
    seconds = ["prove", path, "--no-rollouts", "--no-ranks"]
    assert main(seconds) == 0
    output = capsys.readouterr().out
    assert output.startswith("granite, cut to 2 layers, random weights, float32\n  ok ")
    assert output.count("\n  ok   ") == 7 and "FAIL" not in output
    assert "It trains, with packed rows.\n" in output
    assert "A run refuses the directory itself: quantization_config says" in output
    assert main([*seconds, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["trains"] and values["packs_rows"] and len(values["claims"]) == 7


@pytest.mark.parametrize(
    ("kept", "settings", "problems"),
    [
        (None, [], {}),
        (RolloutProof("auto", "float32"), [], {}),
        (
            RolloutProof("transformers", "float32"),
            [],
            {"rollout.vllm_args.model_impl": "Set it to transformers."},
        ),
        (
            RolloutProof("transformers", "float32"),
            ["rollout.vllm_args={model_impl: transformers}"],
            {},
        ),
        (
            RolloutProof("auto", "bfloat16"),
            [],
            {"rollout.dtype": "Set it to bfloat16."},
        ),
        (RolloutProof("auto", "bfloat16"), ["rollout.dtype=bfloat16"], {}),
        (RolloutProof(None, None), [], {"model.path": "Train it without rollouts"}),
    ],
)
def test_what_prove_has_found_about_vllm_is_known_before_a_run(
    tmp_path: Path,
    kept: RolloutProof | None,
    settings: list[str],
    problems: dict[str, str],
) -> None:
    path = directory(tmp_path, "granite")
    assert kept_rollout_proof(path) is None
    if kept is not None:
        keep_rollout_proof(path, kept)
        assert kept_rollout_proof(path) == kept
    inputs = [
        f"model.path={path}", "data.train_path=t.jsonl", "data.validation_path=v.jsonl", "run.evaluate_every=0",
    ]  # fmt: skip
    config = examine("grpo", [*inputs, *settings]).config
    assert config is not None
    machine = Machine(cores=2, gpus=0, memory_bytes=1 << 40, shm_free_bytes=1 << 40)
    engine = config.engines["rollout"]
    shown = {
        problem.key: problem.fix
        for problem in model_directories.engine_problems(engine, machine)
    }
    assert shown.keys() == problems.keys()
    assert all(shown[key].startswith(fix) for key, fix in problems.items())
    warnings = cost_warnings(config, machine, evaluates=True)
    unknown = any("vLLM has not been compared with" in each for each in warnings)
    assert unknown == (kept is None)


@pytest.mark.slow
@pytest.mark.vllm
def test_the_command_keeps_what_vllm_agrees_with_and_says_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory(tmp_path, "cohere2")
    assert main(["prove", path, "--json"]) == 0
    rollouts = json.loads(capsys.readouterr().out)["rollouts"]
    assert rollouts["model_impl"] == "transformers" and rollouts["relative_speed"] > 0
    assert kept_rollout_proof(path) == RolloutProof("transformers", "float32")
