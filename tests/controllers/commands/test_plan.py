"""`verl-ray plan` prints a command that `check --machine` accepts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from controllers.command_line import main

MODELS = Path(__file__).parents[2] / "model_configs"


def run(*words: str) -> int:
    return main(list(words))


@pytest.mark.parametrize(
    ("model", "machine", "options"),
    [
        ("Qwen2.5-0.5B", "gpus=1,gpu=H100-80G", ()),
        ("Qwen3-8B", "gpus=8,gpu=H100-80G,memory=2T", ("--max-tokens", "8192")),
        ("Qwen2.5-1.5B", "gpus=8,gpu=A100-80G", ("--algorithm", "ppo")),
        ("Llama-3.1-70B", "nodes=8,gpus=8,gpu=H100-80G", ("--prompts", "128")),
        ("Qwen3-235B-A22B", "nodes=64,gpus=8,gpu=H100-80G", ("--prompts", "512")),
    ],
)
def test_each_plan_passes_the_check(
    model: str, machine: str, options: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("train", "validation"):
        Path(f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')

    assert run("plan", str(MODELS / model), "--machine", machine, *options) == 0
    out = capsys.readouterr().out
    assert "nothing of this plan on a GPU" in out
    _, _, command = out.partition("copy, with data of your own:")
    program, verb, *words = shlex.split(command.replace("\\\n", " "))
    assert (program, verb) == ("verl-ray", "train")

    # Between hosts weights travel over gloo, which takes longer than all else here.
    assert ("transport=broadcast uses NCCL" in out) == ("nodes=" in machine)

    # Lengths of prompts and tokens need no data.
    assert run("check", *words, "--data", "off", "--machine", machine) == 0
    assert "can run" in capsys.readouterr().out


def test_the_tables_fit_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run("plan", str(MODELS / "Qwen2.5-0.5B"), "--machine", "gpus=8,gpu=H100-80G")
    tables = [
        line for line in capsys.readouterr().out.splitlines() if set(line) & set("│─")
    ]
    assert tables and max(map(len, tables)) <= 80


def test_where_nothing_fits_it_says_what_is_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("plan", str(MODELS / "Llama-3.1-70B"), "--machine", "gpus=1,gpu=L40S-48G")
    assert run(*words) == 2
    out = capsys.readouterr().out
    assert "nothing fits" in out and "GiB of" in out
    assert "the smallest listed machine that would do: --machine nodes=" in out


def test_mistakes_are_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(MODELS / "Qwen2.5-0.5B")
    assert run("plan", model, "--machine", "gpus=0") == 2
    assert "a plan is for GPUs" in capsys.readouterr().err
    assert run("plan", model, "--machine", "gpus=8,gpu=H1000") == 2
    assert "H100-80G" in capsys.readouterr().err
    assert run("plan", str(tmp_path), "--machine", "gpus=8,gpu=H100-80G") == 2
    assert "config.json" in capsys.readouterr().err
    # A group of one has no baseline.
    single = ("--machine", "gpus=8,gpu=H100-80G", "--group-size", "1")
    assert run("plan", model, *single) == 2
    assert "rollout.group_size" in capsys.readouterr().err


def test_a_backend_that_cannot_compute_the_model_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.loads((MODELS / "Qwen2.5-0.5B" / "config.json").read_text())
    gemma = settings | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    words = ("plan", str(tmp_path), "--machine", "gpus=1,gpu=H100-80G")
    assert run(*words, "--backend", "megatron") == 2
    assert "--backend = megatron" in capsys.readouterr().err
    assert run(*words) == 0
