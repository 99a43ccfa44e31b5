"""`verl-ray check`: without frameworks, every problem of configuration and
machine at once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from controllers.command_line import main
from controllers.commands import check
from tests.controllers.runs import Inputs
from tests.preflight.configs import NO_GAIN
from verl_ray.config.schema import Config
from verl_ray.preflight.data_files import DataFindings, examine_data


@pytest.mark.processes
def test_it_imports_no_framework() -> None:
    code = (
        "import sys; from controllers.command_line import main; code = main(['check'])\n"
        "print(code, [name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.splitlines()[-1] == "0 []"


def test_it_prints_the_algebra_the_roles_and_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "run.name=mine", "backend@critic.backend=fsdp"]) == 0
    out = capsys.readouterr().out
    assert "32 prompts x 8 = 256 rows, each of up to 24 tokens" in out
    assert [cell.strip() for cell in _row(out, "actor", 7)] == [
        "actor",
        "1",
        "256",
        "256",
        "256",
        "1",
        "<= 8192",
    ]
    assert [cell.strip() for cell in _row(out, "critic", 5)][:3] == [
        "critic",
        "fsdp",
        "float32",
    ]
    assert "this machine:" in out and "cores" in out
    assert f"mine can run; it writes to {Path.cwd()}/outputs/mine" in out


def test_it_says_what_auto_stands_for_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["check", f"run.dir={tmp_path}", "rollout.sync.bucket_mib=8"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    became = {line[0]: line[1:] for line in map(_cells, out.splitlines())}
    assert became["rollout.sync.transport"] == [
        "shared_memory",
        "the cluster is one node",
    ]
    assert became["run.resume"][0] == "none" and "rollout.sync.bucket_mib" not in out
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert (
        "read from the cluster when the run starts, and so is what auto becomes" in out
    )
    assert "rollout.sync.transport" not in out
    # Nothing of a CPU is shown or judged for it.
    assert _row(out, "rollout", 5)[2].strip() == "auto"
    assert "memory in GiB" not in out


def test_keys_of_earlier_versions_lead_to_the_new_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.yaml").write_text(
        "defaults: [quickstart, _self_]\nrun: {call_deadline_s: 60}\n"
    )
    named = ["check", "--config-dir", str(tmp_path), "--config-name", "old"]
    assert main([*named, "rollout.health.stall_s=3"]) == 2
    err = capsys.readouterr().err
    assert (
        "run.call_deadline_s is now run.stall_s." in err
        and "rollout.health.stall_s is now run.stall_s." in err
    )


def test_the_role_table_says_how_ranks_share_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = [
        "backend=megatron",
        "backend@critic.backend=fsdp",
        "actor.num_ranks=4",
        "backend.tensor_parallel=2",
    ]
    layout += ["actor.backend.pipeline_parallel=2", f"run.dir={tmp_path}"]
    assert main(["check", *layout]) == 0
    out = capsys.readouterr().out
    shown = {
        role: [cell.strip() for cell in _row(out, role, 5)][1:4]
        for role in ("actor", "critic", "reference")
    }
    assert shown == {
        "actor": ["megatron tp2 pp2 dp1", "float32", "4"],
        "critic": ["fsdp", "float32", "4"],
        "reference": ["megatron tp2 dp2", "float32", "4"],
    }
    assert [
        _row(out, role, 7)[2].strip() for role in ("actor", "critic", "reference")
    ] == ["256", "64", "128"]


def test_the_role_table_says_who_scores(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(role: str, *overrides: str) -> tuple[list[str], str]:
        # The judge's tokenizer, of which there is only the name, is part of the data.
        assert main(["check", "--data", "off", *overrides]) == 0
        out = capsys.readouterr().out
        return [cell.strip() for cell in _row(out, role, 5)], out

    judge = [
        "reward=judge",
        f"reward.model.path={model}",
        "reward.max_prompt_tokens=512",
        NO_GAIN,
    ]
    cells, out = row(
        "reward", *judge, "reward.engine.num_replicas=2", "reward.engine.dtype=bfloat16"
    )
    assert cells == ["reward", "vllm", "bfloat16", "2 x 1", "separate"]
    assert f"\n  reward: {model}\n" in out
    service, out = row(
        "reward",
        "reward=http",
        "reward.url=http://h:80/s",
        "reward.num_ranks=2",
        NO_GAIN,
    )
    assert service == ["reward", "http", "-", "2", "CPU only"]
    assert "\n  reward: http://h:80/s\n" in out


def test_tables_keep_their_names_at_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = tmp_path / ("a_folder_with_a_long_name/" * 4)
    assert main(["check", f"run.dir={long}"]) == 0
    out = capsys.readouterr().out
    *tables, _ = out.split("this machine:")
    for line in tables[0].splitlines():
        assert len(line) <= 80 or str(tmp_path) in line
    for name in ("updates", "reference", "rollout.sync.probe_tolerance", "activations"):
        assert name in out
    assert _row(out, "actor", 7)[-1].strip() == "<= 8192"
    assert f"  actor, critic, reference, rollout: {long}/inputs/model\n" in out


def test_the_role_table_names_the_components_of_a_mixture(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    components = (
        "function@components.function, http@components.service, judge@components.judge"
    )
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text(
        f"defaults: [{components}, _self_]\nkind: mixed\nweights: {{function: 1.0, service: 1.0, judge: 1.0}}\n"
    )
    section = "reward.components.judge"
    mine = [
        "--data=off",
        "--config-dir",
        str(tmp_path),
        "reward=mine",
        "reward.components.service.url=http://h/s",
        NO_GAIN,
    ]
    assert (
        main(
            [
                "check",
                *mine,
                f"{section}.model.path={model}",
                f"{section}.max_prompt_tokens=512",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    kinds = {
        name: _row(out, f"reward.components.{name}", 5)[1].strip()
        for name in ("function", "service", "judge")
    }
    assert kinds == {"function": "function", "service": "http", "judge": "vllm"}
    assert main(["check", *mine, f"{section}.model.path={model}s"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(
        f"1 problem in the configuration:\n\n  {section}.model.path = {model}s\n"
    )
    assert f"Did you mean {model}?" in err


def _cells(line: str) -> list[str]:
    """The cells of a line of a table without frames."""
    return re.split(r" {2,}", line.strip())


def _row(table: str, role: str, columns: int) -> list[str]:
    rows = (
        line.strip("│ ").split("│")
        for line in table.splitlines()
        if line.startswith(f"│ {role} ")
    )
    return next(row for row in rows if len(row) == columns)


def test_problems_of_configuration_and_machine_come_together(
    capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    arguments = [
        *(
            "--config-name",
            "ppo",
            "rollout.group_size=0",
            "rolout.top_p=1",
            "actor.mini_batch_size=100",
        ),
        *(
            f"model.path={data}/nowhere",
            f"data.train_path={data}/trian.jsonl",
            f"data.validation_path={data}/notes.txt",
        ),
        "reward.functions.default=exact_mach",
        "backend.device=cuda",
    ]
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("8 problems in the configuration:")
    said = " ".join(captured.err.split())
    assert "cluster has any. This machine has " in said
    for text in (
        "rolout.top_p = 1\n    rule: no such key\n    fix:  Did you mean rollout.top_p",
        "rollout.group_size = 0\n    rule: this number is out of range\n    fix:  Use a number above 0; the nearest is",
        "actor.mini_batch_size = 100\n    rule: it must divide the 256 rows",
        f"model.path = {data}/nowhere\n    rule: there is no such directory",
        f"Did you mean {data}/train.jsonl",
        f"data.validation_path = {data}/notes.txt\n    rule: a file of this kind (.txt) cannot be read",
        "reward.functions.default = exact_mach",
    ):
        assert text in captured.err


def test_a_step_of_preferences_is_counted_in_pairs(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = [
        f"model.path={model}",
        f"data.train_path={data}/train.jsonl",
        f"data.validation_path={data}/test.jsonl",
    ]
    assert (
        main(
            [
                "check",
                "--config-name",
                "reward_model",
                *inputs,
                "preference.max_tokens=64",
                "--data=off",
            ]
        )
        == 0
    )
    assert (
        "one step: 32 pairs = 64 rows, each of up to 64 tokens"
        in capsys.readouterr().out
    )


def test_epochs_are_shown_as_steps_where_the_data_are_read(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = ["run.total_epochs=2"]
    typed = ["check", "--config-name", "sft", *inputs.overrides(tmp_path), *epochs]
    # 2 x 64 / 32
    assert main(typed) == 0
    shown = capsys.readouterr().out
    assert "run.total_steps = 4: run.total_epochs=2 x 64 examples / 32" in shown
    assert "4 steps of 32 are 2 passes over 64" in shown

    assert main([*typed, "--data", "off"]) == 0
    assert "/ 32 per step; the run counts its examples" in capsys.readouterr().out


def test_runs_of_a_sweep_read_the_data_that_differ(
    tmp_path: Path,
    inputs: Inputs,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"sum": "1+1="}\n')
    read: list[str] = []

    def examine(config: Config, *, evaluates: bool) -> DataFindings:
        read.append(config.data.train_path)
        return examine_data(config, evaluates=evaluates)

    monkeypatch.setattr(check, "examine_data", examine)
    sweep = [
        "check",
        "--multirun",
        "--config-name=grpo",
        f"model.path={inputs.model}",
        f"data.validation_path={inputs.validation}",
        "data.max_prompt_tokens=8",
        "rollout.max_response_tokens=6",
        "reward=http",
        "reward.url=http://127.0.0.1:9/",
        "run.name=a,b",
    ]
    assert main([*sweep, f"data.train_path={inputs.train},{bad}"]) == 2
    assert read == [str(inputs.train), str(bad)]
    assert f"data.train_path = {bad}\n    rule: line 1" in capsys.readouterr().err
