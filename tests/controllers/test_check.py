"""`verl-ray check`: fast, without frameworks, every problem of configuration and machine at once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from controllers.command_line import main
from controllers.composition import compose
from controllers.preflight import GIB, Findings, Machine, parameter_count, preflight
from verl_ray.config.schema import Config

BIG = Machine(cores=64, gpus=0, memory_bytes=512 * GIB, shm_free_bytes=64 * GIB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What preflight reads of a model directory; 120 parameters in two files."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    settings = {"num_attention_heads": 4, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((10, 10), np.float32)}, directory / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": np.zeros(20, np.float16)}, directory / "model-2.safetensors")
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    for name in ("train.jsonl", "test.jsonl", "notes.txt"):
        (directory / name).write_text("")
    return directory


def ppo(model: Path, data: Path, *overrides: str) -> Config:
    inputs = [f"model.path={model}", f"data.train_path={data}/train.jsonl", f"data.validation_path={data}/test.jsonl"]
    return compose("ppo", [*inputs, *overrides])


def found(findings: Findings) -> dict[str, str]:
    return {problem.key: f"{problem.rule} | {problem.fix}" for problem in findings.problems}


# ------------------------------------------------------------------------------------------------ the command


def test_it_is_fast_and_imports_no_framework() -> None:
    code = (
        "import sys; from controllers.command_line import main; code = main(['check'])\n"
        "print(code, [name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert output.splitlines()[-1] == "0 []"
    # Time on a processor, which other work on the machine does not lengthen as it does the time on the clock.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_it_prints_the_algebra_the_roles_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.name=mine", "backend@critic.backend=fsdp"]) == 0
    out = capsys.readouterr().out
    assert "32 prompts x 8 = 256 rows, each of up to 24 tokens" in out
    assert [cell.strip() for cell in _row(out, "actor", 7)] == ["actor", "1", "256", "128", "128", "2", "<= 8192"]
    assert [cell.strip() for cell in _row(out, "critic", 6)][:3] == ["critic", "fsdp", "float32"]
    assert "this machine:" in out and "cores" in out
    assert f"mine can run; it writes to {Path.cwd()}/outputs/mine" in out


def _row(table: str, role: str, columns: int) -> list[str]:
    rows = (line.strip("│ ").split("│") for line in table.splitlines() if line.startswith(f"│ {role} "))
    return next(row for row in rows if len(row) == columns)


def test_problems_of_configuration_and_machine_come_together(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    arguments = [
        *("--config-name", "ppo", "rollout.group_size=0", "rolout.top_p=1", "actor.mini_batch_size=100"),
        *(
            f"model.path={data}/nowhere",
            f"data.train_path={data}/trian.jsonl",
            f"data.validation_path={data}/notes.txt",
        ),
        "reward.functions.default=exact_mach",
    ]
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("7 problems in the configuration:")
    for text in (
        "rolout.top_p = 1\n    rule: no such key\n    fix:  Did you mean rollout.top_p",
        "rollout.group_size = 0\n    rule: this number is out of range\n    fix:  Use a number above 0; the nearest is",
        "actor.mini_batch_size = 100\n    rule: it must divide the 256 rows",
        f"model.path = {data}/nowhere\n    rule: there is no such directory (nothing is looked up on a hub)",
        f"Did you mean {data}/train.jsonl",
        f"data.validation_path = {data}/notes.txt\n    rule: a file of this kind (.txt) cannot be read",
        "reward.functions.default = exact_mach",
    ):
        assert text in captured.err


# -------------------------------------------------------------------------------------------------- preflight


def test_nothing_to_complain_about(model: Path, data: Path) -> None:
    findings = preflight(ppo(model, data), BIG)
    assert (findings.problems, findings.warnings) == ([], [])


def test_what_the_run_makes_itself_is_not_missing(tmp_path: Path) -> None:
    assert preflight(compose("quickstart", [f"run.dir={tmp_path}/run"]), BIG).problems == []
    own = compose("quickstart", [f"run.dir={tmp_path}/run", "prepare=null"])
    assert set(found(preflight(own, BIG))) == {"model.path", "data.train_path", "data.validation_path"}


def test_parameters_are_counted_from_the_headers(model: Path) -> None:
    assert parameter_count(str(model)) == 120


def test_an_incomplete_model_directory_says_what_it_lacks(tmp_path: Path, data: Path) -> None:
    assert "no readable config.json" in found(preflight(ppo(tmp_path, data), BIG))["model.path"]
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1000}')
    messages = [problem.rule for problem in preflight(ppo(tmp_path, data), BIG).problems]
    assert messages == [
        "this directory has no *.safetensors",
        "this directory has no tokenizer",
        "the model has 1000 positions, and a row may have 1536 tokens",
    ]


def test_a_role_with_a_model_of_its_own_is_checked_under_its_key(model: Path, data: Path) -> None:
    messages = found(preflight(ppo(model, data, f"critic.model.path={model}s"), BIG))
    assert list(messages) == ["critic.model.path"]
    assert f"Did you mean {model}?" in messages["critic.model.path"]


def test_the_rollout_engine_fits_the_model(tmp_path: Path, model: Path, data: Path) -> None:
    messages = found(preflight(ppo(model, data, "rollout.tensor_parallel=3"), BIG))
    assert (
        "4 attention heads" in messages["rollout.tensor_parallel"] and "2 or 4" in messages["rollout.tensor_parallel"]
    )
    for name in ("tokenizer.json", "model-1.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    settings = {"num_attention_heads": 8, "hidden_size": 128, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert "head size is 16" in found(preflight(ppo(tmp_path, data), BIG))["model.path"]
    on_gpu = Machine(cores=8, gpus=8, memory_bytes=GIB, shm_free_bytes=GIB)
    assert preflight(ppo(tmp_path, data), on_gpu).problems == []


def test_a_reward_function_of_the_users_own_is_found_without_running_it(
    tmp_path: Path, model: Path, data: Path
) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text("raise SystemExit\ndef grade(response, answer, **rest):\n    return 1.0\n")
    assert preflight(ppo(model, data, f"reward.functions.default={grader}:grade"), BIG).problems == []
    messages = found(preflight(ppo(model, data, f"reward.functions.default={grader}:grad"), BIG))
    assert "grade" in messages["reward.functions.default"]


def test_more_threads_than_cores_is_a_warning_on_a_cpu(model: Path, data: Path) -> None:
    two = Machine(cores=2, gpus=0, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    assert preflight(ppo(model, data, "actor.num_ranks=2"), two).warnings == []
    (warning,) = preflight(ppo(model, data, "placement=separate"), two).warnings
    assert "4 threads compute at once (actor 1 + critic 1 + reference 1 + rollout 1" in warning


def test_ranks_without_rows_are_a_warning(model: Path, data: Path) -> None:
    overrides = ["actor.num_ranks=4", "actor.mini_batch_size=2"]
    warnings = preflight(ppo(model, data, *overrides), BIG).warnings
    assert warnings[0].startswith("actor.num_ranks=4 share mini-batches of 2 rows: 2 ranks have nothing to do")


def test_more_gpus_than_there_are_is_a_problem(model: Path, data: Path) -> None:
    four = Machine(cores=8, gpus=4, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    assert preflight(ppo(model, data, "actor.num_ranks=4"), four).problems == []
    config = ppo(model, data, "placement=separate", "rollout.num_replicas=2", "rollout.tensor_parallel=2")
    message = found(preflight(config, four))["rollout.num_replicas"]
    assert "needs 7 GPUs (actor 1 + critic 1 + reference 1 + rollout 4), and this machine has 4" in message
    assert "Lower it by 3" in message


def test_memory_that_cannot_be_enough_is_a_problem(model: Path, data: Path) -> None:
    small = Machine(cores=8, gpus=0, memory_bytes=GIB, shm_free_bytes=32 * 2**20)
    messages = found(preflight(ppo(model, data), small))
    # 256 rows x 1536 tokens x 32 bytes are 12 MiB: Ray's floor of 128 MiB is what counts.
    assert "about 128 MiB" in messages["/dev/shm"] and "--shm-size" in messages["/dev/shm"]
    assert "at least 2.0 GiB" in messages["model.path"]  # the key-value cache alone
    # A cluster is asked for its own.
    assert preflight(ppo(model, data), None).problems == []


def test_a_run_dir_and_a_checkpoint_that_cannot_be(model: Path, data: Path) -> None:
    blocked = ppo(model, data, f"run.dir={data}/notes.txt/run", f"run.resume={data}/gone")
    messages = found(preflight(blocked, BIG))
    assert "cannot be written to" in messages["run.dir"]
    assert "no such checkpoint" in messages["run.resume"]


def test_with_an_address_the_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from controllers.preflight import machine_of

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert machine_of(compose("quickstart")) is not None
    assert machine_of(compose("quickstart", ["ray.address=10.0.0.1:6379"])) is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert machine_of(compose("quickstart")) is None
