"""Commands, as a user types them: help, exit codes and stops."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import configs
from controllers.command_line import main
from controllers.commands import multirun
from controllers.run.next_command import command_to_resume
from verl_ray.cluster.signals import stoppable
from verl_ray.paths import program


@pytest.mark.parametrize(
    "arguments",
    [["--help"], [], ["train", "-h"], ["evaluate", "-h"], ["check", "-h"]],
)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse ends --help this way
        code = 0 if stop.code is None else int(stop.code)
    text = capsys.readouterr().out
    assert code == 0
    assert "usage: verl-ray" in text
    if "-h" in arguments:
        for word in ("root configs", "overrides", "examples:", "exit codes:"):
            assert word in text
        # An example that is broken into lines can be copied.
        for example in text.partition("examples:")[2].split("verl-ray ")[1:]:
            assert re.fullmatch(
                r"(\S+ )*\S+( \\\n {6}(\S+ )*\S+)*",
                example.partition("\n\n")[0].rstrip(),
            )
        shown = " ".join(text.split())
        for file in Path(configs.__file__).parent.glob("*.yaml"):
            assert described(file) in shown
        for file in Path(configs.__file__).parent.glob("*/[!_]*.yaml"):
            if file.parent.name not in ("base", "recipes"):
                assert (
                    f"choices of {file.parent.name}:" in text
                    and described(file) in shown
                )


def described(file: Path) -> str:
    """Return the help of a choice: its name, and the first comment of its file."""
    lines = file.read_text().splitlines()
    about = next(line for line in lines if not line.startswith("# @package"))
    return f"{file.stem} {about.removeprefix('# ')}"


def test_bench_names_the_program_of_a_checkout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "step", "--dir", "my inputs"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(" python -m scripts.bench step --dir 'my inputs'\n")


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean train" in capsys.readouterr().err


def test_plan_is_answered_with_the_check_that_takes_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Path(__file__).parents[1] / "model_configs" / "Qwen2.5-0.5B"
    words = ["--machine", "gpus=1,gpu=H100-80G", "--algorithm", "dapo"]
    assert main(["plan", str(model), *words, "--prompts", "64", "--backend=fsdp"]) == 2
    answer = capsys.readouterr().err
    program, *command = shlex.split(answer.splitlines()[-1])
    assert program == "verl-ray" and command[:3] == ["check", "--config-name", "grpo"]
    assert {"data.prompts_per_step=64", "backend=fsdp"} < set(command)
    assert main(command) == 0
    assert "algorithm dapo" in capsys.readouterr().out
    # Without anything behind it, too.
    assert main(["plan"]) == 2
    assert "verl-ray check --config-name grpo --machine" in capsys.readouterr().err


def test_options_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["check", "run.seed=1", "--config-name", "quickstart", "run.total_steps=0"]
        )
        == 2
    )
    assert "run.total_steps = 0" in capsys.readouterr().err


@pytest.mark.processes
def test_train_checks_first_and_imports_nothing_for_it() -> None:
    code = (
        "import sys; from controllers.command_line import main\n"
        "code = main(['train', '--config-name', 'ppo', 'model.path=/nowhere'])\n"
        "print(code, [name for name in ('torch', 'ray', 'vllm') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "2 []"
    assert "model.path = /nowhere" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.processes
def test_a_driver_does_without_torch() -> None:
    names = ["commands.train", "commands.evaluate"]
    names += [f"trainers.{task}" for task in ("rl", "sft", "reward_model")]
    code = (
        f"import sys, {', '.join(f'controllers.{name}' for name in names)}\n"
        "heavy = ('torch', 'transformers', 'vllm')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_with_a_message_after_its_clean_up(
    number: signal.Signals,
) -> None:
    code = (
        "import sys, time, types\n"
        "def train(config, command):\n"
        "    try:\n"
        "        print('working', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('gave back', flush=True)\n"
        "module = types.ModuleType('controllers.commands.train')\n"
        "module.train = train\n"
        "sys.modules['controllers.commands.train'] = module\n"
        "from controllers.command_line import main\n"
        "sys.exit(main(['train', '--config-name', 'quickstart']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert out == "gave back\n"
    assert f"stopped by {number.name}" in err
    assert "Traceback" not in err


SWALLOWED = """
import os, signal, sys, types
class Compiled:
    def __del__(self):  # what is raised in here goes nowhere, as in some of Ray's calls
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): pass
def train(config, command):
    Compiled()
    print('working on')
    {then}
module = types.ModuleType('controllers.commands.train')
module.train = train
sys.modules['controllers.commands.train'] = module
from controllers.command_line import main
from verl_ray.cluster.signals import heed_signals
sys.exit(main(['train', '--config-name', 'quickstart', 'run.dir={folder}']))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "then",
    ["heed_signals()", "raise AttributeError('half of what a call was doing is lost')"],
)
def test_a_signal_that_a_compiled_call_swallowed_is_still_a_stop(
    tmp_path: Path, then: str
) -> None:
    code = SWALLOWED.format(then=then, folder=tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert result.stdout == "working on\n" and result.returncode == 130
    lines = result.stderr.splitlines()
    assert lines[0] == "SIGTERM: stopping. Another one ends it at once"
    typed = ["train", "--config-name", "quickstart", f"run.dir={tmp_path}"]
    command = shlex.join([program("verl-ray"), *typed])  # it is a program of the user's
    assert lines[-2:] == [
        "stopped by SIGTERM. To begin again:",
        command,
    ]  # there is no checkpoint


def test_the_command_that_goes_on_is_what_was_typed() -> None:
    here, job = (
        Path("/home/me"),
        Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1"),
    )

    def resume(
        *typed: str, of: str = "auto", has_checkpoints: bool = True, here: Path = here
    ) -> str:
        return command_to_resume(
            typed, of, has_checkpoints=has_checkpoints, current_folder=here
        )

    assert (
        resume("verl-ray", "train", "run.dir=my run")
        == "verl-ray train 'run.dir=my run'"
    )
    other = ("verl-ray", "train", "run.resume=/other/step_00000004", "run.seed=1")
    # What was read at the start is not where the run is now, unless it saved nothing
    # itself.
    assert (
        resume(*other, of="/other/step_00000004")
        == "verl-ray train run.seed=1 run.resume=auto"
    )
    assert resume(*other, of="/other/step_00000004", has_checkpoints=False) == " ".join(
        other
    )
    assert (
        resume("verl-ray", "train", "run.resume=none", of="none")
        == "verl-ray train run.resume=auto"
    )
    job_command = (
        "ray job submit --working-dir . -- python -m controllers train run.name=job"
    )
    assert (
        resume("python", "-m", "controllers", "train", "run.name=job", here=job)
        == job_command
    )


@pytest.mark.processes
def test_a_script_is_named_as_it_was_typed() -> None:
    arguments = ["train", "--config-name", "quickstart", "run.seed=1"]
    code = SWALLOWED.format(then="heed_signals()", folder="").replace(
        "['train', '--config-name', 'quickstart', 'run.dir=']", str(arguments)
    )
    changed = {**os.environ, "VERL_RAY_SCRIPT": "../scripts/quickstart"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=changed
    )
    assert result.stderr.splitlines()[-1] == "../scripts/quickstart run.seed=1"


SWALLOWED_IN_THE_CHECK = """
import os, signal, sys
from controllers import command_line
from verl_ray.errors import ConfigError
def checked_config(*arguments, **more):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): pass
    except Exception:
        {then}
command_line.checked_config = checked_config
sys.exit(command_line.main(['train', '--config-name', 'quickstart']))
"""


@pytest.mark.processes
@pytest.mark.parametrize("then", ["pass", "raise ConfigError([])"])
def test_a_signal_that_is_lost_in_the_check_is_still_a_stop(then: str) -> None:
    code = SWALLOWED_IN_THE_CHECK.format(then=then)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert result.returncode == 130
    assert "stopped by SIGTERM. To begin again" in result.stderr


def test_an_error_without_a_signal_is_an_error() -> None:
    def broken() -> int:
        raise SystemError("of another origin")

    with pytest.raises(SystemError, match="of another origin"):
        stoppable(broken)


def test_versions_are_told_without_an_import(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["verl_ray", "torch", "ray", "vllm"]
    assert all(re.search(r" \d+\.\d+", line) for line in lines)


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--info", "verl-ray check --print"),
        ("--config_name", "Did you mean --config-name?"),
        ("--run.seed=3", "Write run.seed=3: a setting has no dashes."),
        ("--learning-rate=1", "Here it is actor.optimizer.lr."),
        ("--resolve", "Add --cfg job."),
        ("--config=own.yaml", "Did you mean --config-name own.yaml?"),
    ],
)
def test_other_options_are_answered(
    option: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", option]) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_what_starts_processes_has_to_be_named(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "run.total_steps=3"]) == 2
    assert "--config-name quickstart, or another" in capsys.readouterr().err


def test_a_printed_configuration_is_one_to_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = ["run.name=mine", "run.total_steps=7", "algorithm=grpo"]
    assert main(["check", "--print", *changed]) == 0
    printed = capsys.readouterr().out
    assert "path: ${run.dir}/inputs/model" in printed
    Path("mine.yaml").write_text(printed)

    assert main(["train", "--cfg", "job", "--resolve", *changed]) == 0
    values = capsys.readouterr().out
    assert f"dir: {tmp_path}/outputs/mine" in values and "total_steps: 7" in values
    for named in (
        ["--config-name", "mine.yaml"],
        ["--config-name", str(tmp_path / "mine.yaml")],
        ["--config-path", str(tmp_path), "--config-name", "mine"],
    ):
        assert main(["check", "--cfg", "job", "--resolve", *named]) == 0
        assert capsys.readouterr().out == values

    # What must be given yet stands as it is, and is no problem here.
    assert main(["check", "--print", "--config-name", "grpo.yaml"]) == 0
    assert "path: ???" in capsys.readouterr().out
    assert main(["check", "--config-name", "mines.yaml"]) == 2
    assert main(["check", "--config-name", f"{tmp_path}/mines.yaml"]) == 2
    assert f"Did you mean {tmp_path}/mine.yaml?" in capsys.readouterr().err


def test_all_runs_of_a_sweep_are_checked_before_the_first_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    swept = ["run.total_steps=3,0", "algorithm=ppo,grpo", "run.name=mine"]
    assert main(["train", "--multirun", "--config-name", "quickstart", *swept]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("1 problem in the configuration:")
    assert "run.total_steps = 0" in captured.err and captured.out == ""


CHILD = """
import json, os, sys
from pathlib import Path
from controllers.compose.grammar import parsed_override
read = [parsed_override(word) for word in sys.argv[1:] if "=" in word]
words = {override.key_or_group: override.value() for override in read}
folder = Path(words["run.dir"])
folder.mkdir(parents=True)
line = {"training/global_step": 3, "val-core/sums/acc/mean@1": 0.5}
(folder / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
sys.exit({1: 0, 2: 1, 3: 130, 4: 0}[words["run.seed"]])
"""


@pytest.mark.processes
@pytest.mark.parametrize(("seeds", "code", "runs"), [("1,2", 1, 2), ("2,3,4", 130, 2)])
def test_a_sweep_runs_one_after_another_until_it_is_stopped(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seeds: str,
    code: int,
    runs: int,
) -> None:
    monkeypatch.setattr(multirun, "_program", lambda: [sys.executable, "-c", CHILD])
    folder = tmp_path / "größe=1"
    typed = [f"run.seed={seeds}", f"run.dir='{folder}'", "run.name=mine"]
    assert main(["train", "-m", "-cn", "quickstart", *typed]) == code
    out = capsys.readouterr().out
    made = sorted(path.name for path in folder.iterdir())
    assert made == [*(str(number) for number in range(runs)), "sweep.txt"]
    assert out.count("step 3 │") == runs
    assert "best: run 0, with sums/acc/mean@1 0.5 at step 3" in out
    assert ("not started" in out) == (code == 130)
    if code == 130:
        assert out.splitlines()[-2] == "To go on:"
