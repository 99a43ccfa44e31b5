"""`verl-ray plan` prints a command that `check --machine` accepts."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from controllers.command_line import main
from controllers.commands.plan import origin_lines, time_table
from tests.preflight.plan_bases import bases
from verl_ray.preflight.machine import parse_machine
from verl_ray.preflight.plan_search import Plan, search

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
        pytest.param(
            "Qwen3-235B-A22B",
            "nodes=64,gpus=8,gpu=H100-80G",
            ("--prompts", "512"),
            marks=pytest.mark.slow,
        ),
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


@pytest.mark.parametrize(
    ("model", "machine", "named"),
    [
        ("Qwen2.5-0.5B", "gpus=8,gpu=H100-80G,memory=1G", 2),
        ("Qwen3-8B", "gpus=1,gpu=H200-141G", 2),
        # No engine of it is on one such GPU, whatever its host has.
        ("Qwen3-235B-A22B", "gpus=1,gpu=L40S-48G,memory=64G", 1),
    ],
)
def test_where_nothing_fits_each_machine_that_is_named_would_do(
    model: str, machine: str, named: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ("plan", str(MODELS / model), "--machine")
    assert run(*plan, machine) == 2
    out = capsys.readouterr().out
    assert "nothing fits" in out and "GiB of" in out
    found = re.findall("would do: --machine (.*)", out)
    assert len(found) == named
    for would_do in found:
        assert run(*plan, would_do) == 0


def test_a_machine_that_is_named_says_what_the_user_said_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "nodes=2,gpus=1,gpu=H200-141G,memory=1G,cores=4,shm=0.5G,link=100G"
    assert run("plan", str(MODELS / "Qwen3-8B"), "--machine", words) == 2
    first, second = re.findall("would do: --machine (.*)", capsys.readouterr().out)
    assert re.fullmatch(
        r"nodes=2,gpus=1,gpu=H200-141G,cores=4,memory=\d+G,shm=0.5G,link=100G", first
    )
    # The other is another machine.
    assert second.startswith("nodes=1,gpus=1,gpu=RTX-4090-24G,memory=")
    assert "cores" not in second and "shm" not in second


def test_gpus_that_a_plan_leaves_unused_are_idle() -> None:
    eight = parse_machine("gpus=8,gpu=H100-80G")
    plan = search(bases("Qwen2.5-0.5B"), eight)
    assert isinstance(plan, Plan) and plan.time.used_gpus == 8
    assert "unused" not in origin_lines(plan, eight)
    # Of twice as many GPUs, each computes half as long in the mean.
    both = replace(eight, nodes=2)
    assert "unused: 8 of 16 GPUs; no config" in origin_lines(plan, both)
    busy = 100 * (1 - plan.time.idle_share_of(8))
    names, _, shares = (column.cells for column in time_table(plan.time, both).columns)
    assert list(names)[-1] == "all GPUs idle (16 GPUs)"
    assert list(shares)[-1] == f"{100 - busy / 2:.0f} %"


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
