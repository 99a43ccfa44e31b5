"""`verl-ray check --machine`: a machine that one does not sit on, from config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import verl_ray
from controllers.command_line import main
from tests.controllers.runs import Inputs
from tests.preflight.published import copied, published
from verl_ray.errors import ConfigError

BFLOAT16 = ("backend.dtype=bfloat16", "rollout.dtype=bfloat16")


def check(model: object, machine: str, *overrides: str) -> list[str]:
    """Return a command that checks a run whose data are not here."""
    data = ["data.train_path=/none/train.jsonl", "data.validation_path=null"]
    data += ["run.evaluate_every=0", f"model.path={model}"]
    words = ["check", "--config-name", "grpo", "--data", "off", *data, *overrides]
    return [*words, "--machine", machine]


def numbers(out: str, role: str) -> list[str]:
    """Return the memory of a role, in the order of the columns."""
    table = out[out.index("predicted") :].splitlines()
    return next(line for line in table if line.startswith(f" {role} ")).split()


@pytest.mark.parametrize(
    ("name", "machine", "overrides", "weights"),
    [
        # 494,032,768 parameters on one GPU, in GiB; weights are kept in float32.
        ("Qwen2.5-0.5B", "gpus=1,gpu=RTX-4090-24G", (), 1.84),
        # 8,190,735,360 over 8 ranks.
        (
            "Qwen3-8B",
            "gpus=8,gpu=H100-80G",
            ("backend=fsdp", "actor.num_ranks=8", "rollout.num_replicas=8"),
            3.81,
        ),
        # 70,553,706,496 over 16 ranks; as many for the reference, and 32 for engines.
        (
            "Llama-3.1-70B",
            "nodes=8,gpus=8,gpu=H100-80G",
            (
                "backend=fsdp", "placement=separate", "actor.num_ranks=16", "reference.num_ranks=16",
                "rollout.tensor_parallel=8", "rollout.num_replicas=4",
            ),
            16.4,
        ),
        # 235,093,634,560 over 128 ranks; as many for the reference, 256 for engines. It
        # takes as long as a hundred others.
        pytest.param(
            "Qwen3-235B-A22B",
            "nodes=64,gpus=8,gpu=H200-141G",
            (
                "backend=fsdp", "placement=separate", "actor.num_ranks=128", "reference.num_ranks=128",
                "rollout.tensor_parallel=8", "rollout.num_replicas=32",
            ),
            6.84,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["1", "8", "64", "512"],
)  # fmt: skip
def test_published_models_on_many_gpus(
    name: str,
    machine: str,
    overrides: tuple[str, ...],
    weights: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(check(published(name), machine, *BFLOAT16, *overrides)) == 0
    out = capsys.readouterr().out
    assert float(numbers(out, "actor")[1]) == weights
    assert "(described)" in out and "this machine" not in out


def test_the_machine_is_named_and_what_was_assumed_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = check(
        published("Qwen3-8B"),
        "nodes=2,gpus=8,gpu=H100-80G,memory=2T",
        f"run.dir={tmp_path}/run",
        "run.name=mine",
        "backend=fsdp",
        "actor.num_ranks=16",
        "rollout.num_replicas=16",
        *BFLOAT16,
    )
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "machine: 2 nodes of 8 H100-80G (described), each with 96 cores, 2048 GiB"
        " memory, 1024 GiB in /dev/shm",
        "--machine does not say, and assumed is: cores=96, shm=1024G",
        "mine can run",
    ]
    assert any(line.startswith(" 2 hosts ") for line in lines)
    # Its folder of the run is not this one, and its tokenizer is not here.
    shown = "\n".join(lines)
    assert "the cluster is 2 nodes" in shown and "become there" in shown
    assert "run.resume" not in shown and "chat_template" not in shown
    # Only what is typed with --rates, or was measured, says how long a step takes.
    assert "a step takes" not in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("machine", "settings", "is_shown"),
    [
        ("gpus=8,gpu=H100-80G", ("schedule=one_step_off", "placement=separate"), True),
        ("gpus=8,gpu=H100-80G", ("schedule=asynchronous", "placement=separate"), False),
        ("gpus=8,gpu=H100-80G", (), False),
        ("gpus=0,cores=64", ("schedule=one_step_off", "placement=separate"), False),
    ],
    ids=["one_step_off", "asynchronous", "synchronous", "a CPU"],
)
def test_equal_bits_are_promised_on_a_cpu_alone(
    machine: str,
    settings: tuple[str, ...],
    is_shown: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = check(
        published("Qwen2.5-0.5B"), f"{machine},memory=2T", "backend=fsdp", *settings
    )
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert ("equal bits in two runs are promised on a CPU alone" in out) == is_shown


@pytest.mark.processes
def test_data_and_tokenizer_that_are_here_are_read(
    tmp_path: Path, inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copied("Qwen2.5-0.5B", tmp_path / "model", inputs.model)
    arguments = [
        "check", "--config-name", "grpo", *inputs.overrides(tmp_path / "run"), f"model.path={model}",
        "data.max_prompt_tokens=16", *BFLOAT16, "--machine", "gpus=1,gpu=L40S-48G",
    ]  # fmt: skip
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "data.apply_chat_template" in out and "prompt 1 of data.train_path" in out

    for file in model.glob("tokenizer*"):
        file.unlink()
    assert main(arguments) == 2
    assert "Expected tokenizer.json" in capsys.readouterr().err


@pytest.mark.processes
def test_a_model_without_config_json_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(check(tmp_path, "gpus=1,gpu=L40S-48G")) == 2
    assert "no readable config.json" in capsys.readouterr().err
    settings = json.loads(Path(published("Qwen3-8B"), "config.json").read_text())
    settings["model_type"] = "stablelm"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert main(check(tmp_path, "gpus=1,gpu=L40S-48G")) == 2
    assert "'stablelm' model" in capsys.readouterr().err


def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    # Weights, gradients and two moments of 8,190,735,360 numbers in float32 take 122
    # GiB on one GPU.
    assert main(check(published("Qwen3-8B"), "gpus=1,gpu=H200-141G")) == 2
    err = capsys.readouterr().err
    assert "take at least" in err and "These have 139.0 GiB" in err


def test_mistakes_in_the_description_come_before_all_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(check("/none", "gpus=8,gpu=H100")) == 2
    err = capsys.readouterr().err
    assert "--machine = gpu=H100\n" in err and "Did you mean H100-80G?" in err
    assert "/none" not in err
    # Only `check` asks about other machines.
    assert main(["train", "--config-name", "grpo", "--machine", "gpus=0"]) == 2
    assert "verl-ray train has no such option" in capsys.readouterr().err


def test_every_run_of_a_sweep_is_checked_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    swept = check(
        published("Qwen2.5-0.5B"),
        "nodes=2,gpus=2,gpu=A100-40G",
        "backend=fsdp",
        "actor.num_ranks=4,8",
        *BFLOAT16,
    )
    assert main([*swept, "--multirun"]) == 2
    err = capsys.readouterr().err
    assert "needs 8 GPUs (actor 8), and the machine has 4" in err
    assert err.count("fix:") == 1


@pytest.mark.processes
def test_the_python_function_takes_it_too(
    tmp_path: Path, inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copied("Qwen2.5-0.5B", tmp_path / "model", inputs.model)
    settings = ["run.evaluate_every=0", "data.validation_path=null", *BFLOAT16]

    def call(machine: str) -> None:
        verl_ray.check(
            "grpo", model=model, data=inputs.train, overrides=settings, machine=machine
        )

    call("gpus=2,gpu=B200-180G")
    assert "machine: 1 node of 2 B200-180G (described)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="gpus=0 for nodes without GPUs"):
        call("gpu=B200-180G")
