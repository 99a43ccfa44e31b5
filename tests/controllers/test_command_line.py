"""Overrides, choices and commands, as a user types them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import configs
from controllers.bench import SUITES
from controllers.command_line import _stoppable, command_to_resume, compose, main
from controllers.compose.composition import examine
from verl_ray.backends import BACKENDS
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.errors import ConfigError, Problem
from verl_ray.preflight.findings import preflight

INPUTS = ["model.path=/m", "data.train_path=t.jsonl", "data.validation_path=v.jsonl"]


def quickstart(*overrides: str) -> RLConfig:
    config = compose("quickstart", overrides)
    assert isinstance(config, RLConfig)
    return config


def problems(root: str, *overrides: str, config_dir: str | None = None) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        compose(root, overrides, config_dir)
    return {problem.key: problem for problem in caught.value.problems}


# ------------------------------------------------------------------------------------------------- backends


def kinds(config: RLConfig) -> tuple[str, str, str]:
    return config.actor.backend.kind, config.critic.backend.kind, config.reference.backend.kind


def test_backend_switches_all_roles() -> None:
    assert kinds(quickstart()) == ("engine", "engine", "engine")
    assert kinds(quickstart("backend=fsdp")) == ("fsdp", "fsdp", "fsdp")
    assert kinds(quickstart("backend=megatron")) == ("megatron", "megatron", "megatron")
    assert kinds(quickstart("backend=megatron", "backend@critic.backend=fsdp")) == ("megatron", "fsdp", "megatron")


@pytest.mark.parametrize("order", [1, -1])
def test_one_role_keeps_its_own_backend_in_either_order(order: int) -> None:
    overrides = ["backend=fsdp", "backend@critic.backend=engine"][::order]
    assert kinds(quickstart(*overrides)) == ("fsdp", "engine", "fsdp")


@pytest.mark.parametrize("order", [1, -1])
def test_a_backend_setting_reaches_all_roles_and_a_roles_own_wins(order: int) -> None:
    config = quickstart(*["backend.dtype=bfloat16", "critic.backend.dtype=float32"][::order])
    assert config.actor.backend.dtype == config.reference.backend.dtype == "bfloat16"
    assert config.critic.backend.dtype == "float32"


def test_a_setting_of_one_backend_reaches_the_roles_that_have_it() -> None:
    config = quickstart("backend=fsdp", "backend@critic.backend=engine", "backend.sharding=grad_op")
    assert config.actor.backend.kind == "fsdp" and config.actor.backend.sharding == "grad_op"
    assert config.critic.backend.kind == "engine"


def test_backend_mistakes() -> None:
    key = "backend@critic.backend"
    found = problems("quickstart", f"{key}=megatorn")[key]
    assert found.rule == "there is no such choice"
    assert found.fix == f"Did you mean megatron or megatron_fsdp? There is {', '.join(sorted(BACKENDS))}."
    found = problems("quickstart", "backend.sharding=full")["backend.sharding"]
    assert found.fix == "It belongs to backend=fsdp or backend=megatron_fsdp."
    found = problems("quickstart", "actor.backend.sharding=full")["actor.backend.sharding"]
    assert found.fix == "It belongs to backend@actor.backend=fsdp or backend@actor.backend=megatron_fsdp."
    found = problems("quickstart", "backend.pipeline_parallel=2")["backend.pipeline_parallel"]
    assert found.fix == "It belongs to backend=megatron."
    found = problems("quickstart", "critic.backend.sequence_parallel=2")["critic.backend.sequence_parallel"]
    assert found.fix == "It belongs to backend@critic.backend=fsdp or backend@critic.backend=megatron."
    found = problems("quickstart", "backend=megatron", "backend.activation_offload=true")["backend.activation_offload"]
    assert found.fix == "It belongs to backend=fsdp."
    assert "backend.tensor_parallel" in problems("quickstart", "backend.tensor_paralel=2")["backend.tensor_paralel"].fix
    found = problems("quickstart", "actor.backend.kind=fsdp")["actor.backend.kind"]
    assert found.fix == "Choose it with backend@actor.backend=fsdp."
    assert "backend.dtype" in problems("quickstart", "backend.dtyp=float32")["backend.dtyp"].fix
    assert problems("quickstart", "backend@critc.backend=fsdp")["backend@critc.backend"].fix.startswith(
        "Did you mean backend@critic.backend"
    )


# ------------------------------------------------------------------------------------------------ overrides


def test_all_bad_overrides_are_reported_at_once() -> None:
    found = problems(
        "quickstart",
        "rolout.group_size=3",
        "algoritm=grpo",
        "algorithm=gpro",
        "a=[1",
        "run.total_steps=1,2",
        "actor.num_ranks=two",
        "run.seed=-1",
        "~critic",
        "+foo=1",
        "reference.model.path=${nowhere}",
        "task=sft",
        "rollout.top_k=3",
    )
    assert found["rolout.group_size"].fix.startswith("Did you mean rollout.group_size")
    assert found["algoritm"].fix.startswith("Did you mean algorithm")
    assert found["algorithm"].fix.startswith("Did you mean grpo")
    assert found["a"].rule == "this override cannot be read"
    assert "'run.total_steps=[...]'" in found["run.total_steps"].fix
    assert found["actor.num_ranks"].fix == "Use a whole number."
    assert found["run.seed"].fix == "Use a number of at least 0."
    assert "cannot be left out" in found["~critic"].rule
    assert found["foo"].fix.startswith("Every key begins with one of actor, algorithm")
    assert "nowhere" in found["reference.model.path"].rule
    assert "--config-name" in found["task"].fix
    assert "rollout.top_k" in found  # a rule over several fields ran, too
    assert "critic.num_ranks" not in found  # it copies actor.num_ranks, which is reported


def test_missing_inputs_are_named() -> None:
    for root in ("ppo", "grpo", "sft"):
        found = problems(root)
        assert set(found) == {"model.path", "data.train_path", "data.validation_path"}
        assert found["model.path"].fix == "Give it on the command line: model.path=..."


def test_a_setting_inside_null_is_refused() -> None:
    assert "prepare is null" in problems("quickstart", "prepare.min_gain=0.1", "prepare=null")["prepare.min_gain"].rule
    key = "algorithm.value_loss.clip"
    assert "algorithm.value_loss is null" in problems("quickstart", "algorithm=grpo", f"{key}=0.1")[key].rule


def test_free_sections_take_new_keys() -> None:
    config = quickstart("rollout.vllm_args.enforce_eager=true", "reward.functions.mine=grader.py:grade")
    assert config.rollout.vllm_args == {"enforce_eager": True}
    assert config.reward.functions["mine"] == str(Path.cwd() / "grader.py:grade")


def test_a_reward_is_chosen_as_a_whole() -> None:
    found = problems("quickstart", "reward.kind=model")
    assert {key: problem.fix for key, problem in found.items()} == {"reward.kind": "Choose it with reward=model."}


def test_held_out_responses_may_have_functions_where_they_had_none() -> None:
    assert quickstart().evaluation.functions is None
    assert quickstart("evaluation.functions.default=gsm8k").evaluation.functions == {"default": "gsm8k"}


def test_plus_signs_and_dicts_are_understood() -> None:
    config = quickstart("+run.seed=3", "++run.total_steps=9", "actor.optimizer={lr: 0.5, eps: 1e-6}")
    assert (config.run.seed, config.run.total_steps) == (3, 9)
    assert (config.actor.optimizer.lr, config.actor.optimizer.eps) == (0.5, 1e-6)
    assert config.actor.optimizer.betas == (0.9, 0.999)


def test_an_unknown_root_config_is_refused() -> None:
    assert problems("quikstart")["--config-name"].fix.startswith("Did you mean quickstart?")


# -------------------------------------------------------------------------------------------------- values


def test_roles_follow_the_model_and_the_actor_unless_they_differ() -> None:
    config = compose("ppo", [*INPUTS, "critic.model.path=/other", "actor.num_ranks=2"])
    assert isinstance(config, RLConfig)
    assert (config.actor.model.path, config.critic.model.path, config.reference.model.path) == ("/m", "/other", "/m")
    assert (config.critic.num_ranks, config.reference.num_ranks) == (2, 2)


def test_a_run_is_named_after_its_root_config_and_writes_to_a_folder_of_that_name() -> None:
    outputs = Path.cwd() / "outputs"
    for root, inputs in (("quickstart", []), ("ppo", INPUTS), ("grpo", INPUTS), ("sft", INPUTS)):
        config = compose(root, inputs)
        assert config.run.name.startswith(f"{root}-2")
        assert config.run.dir == f"{outputs}/{config.run.name}"
    config = quickstart("run.name=mine")
    assert (config.run.dir, config.model.path) == (f"{outputs}/mine", f"{outputs}/mine/inputs/model")
    assert quickstart("run.dir=/tmp/x").data.train_path == "/tmp/x/inputs/train.jsonl"


def test_in_a_ray_job_a_run_writes_to_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "_ray_pkg_0123456789abcdef"
    package.mkdir()
    monkeypatch.chdir(package)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = quickstart("run.name=mine")
    assert config.run.dir == f"{tmp_path}/home/outputs/mine"
    assert [problem.key for problem in preflight(config, None).problems] == []
    (problem,) = preflight(quickstart("run.dir=outputs/mine"), None).problems
    assert problem.key == "run.dir"
    assert "Ray made for this job, and will delete" in problem.rule
    assert "~/outputs/NAME" in problem.fix


def test_local_paths_are_absolute_since_workers_have_another_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    inputs = ["model.path=m", "critic.model.path='~/c'", "data.train_path=../t.jsonl", "data.validation_path=s3://b/v"]
    config = compose("ppo", [*inputs, "run.dir=out", "run.resume=out/old", "reward.functions.mine=a/g.py:grade"])
    assert isinstance(config, RLConfig)
    assert (config.run.dir, config.run.resume) == (f"{tmp_path}/out", f"{tmp_path}/out/old")
    models = [config.model.path, config.actor.model.path, config.reference.model.path, config.critic.model.path]
    assert models == [f"{tmp_path}/m"] * 3 + ["/home/me/c"]
    assert (config.data.train_path, config.data.validation_path) == (f"{tmp_path}/../t.jsonl", "s3://b/v")
    assert config.reward.functions["mine"] == f"{tmp_path}/a/g.py:grade"
    assert config.reward.functions["default"] == "exact_match"
    assert quickstart().run.resume == "auto"


def test_roots_are_what_they_say() -> None:
    ppo, grpo, sft = (compose(root, INPUTS) for root in ("ppo", "grpo", "sft"))
    assert isinstance(ppo, RLConfig) and isinstance(grpo, RLConfig) and isinstance(sft, SFTConfig)
    assert (ppo.algorithm.advantage, ppo.has_critic, ppo.prepare) == ("gae", True, None)
    assert (grpo.algorithm.advantage, grpo.has_critic) == ("grpo", False)
    kl = grpo.algorithm.kl
    assert (kl.place, kl.estimator, kl.coefficient) == ("loss", "k3", 0.001)
    assert ppo.tracking.wandb.mode == sft.tracking.wandb.mode == "offline"


def test_configs_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\nrun: {total_steps: 7}\n")
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "wide.yaml").write_text("defaults: [ppo, _self_]\nname: wide\nclip_high: 0.28\n")
    config = compose("mine", ["algorithm=wide"], str(tmp_path))
    assert isinstance(config, RLConfig)
    assert (config.run.total_steps, config.algorithm.clip_high, config.algorithm.clip_low) == (7, 0.28, 0.2)
    assert "Did you mean wide" in problems("mine", "algorithm=wied", config_dir=str(tmp_path))["algorithm"].fix
    assert "no such folder" in problems("mine", config_dir=str(tmp_path / "x"))["--config-dir"].rule


def test_a_backend_in_the_body_of_a_users_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\nbackend: {dtype: bfloat16}\n")
    assert "reaches no role" in problems("mine", config_dir=str(tmp_path))["backend.dtype"].rule


def test_a_broken_yaml_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [nowhere/quickstart]\n")
    composition = examine("mine", [], str(tmp_path))
    assert composition.config is None
    assert "nowhere/quickstart" in composition.problems[0].rule


# ------------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("arguments", [["--help"], [], ["train", "-h"], ["evaluate", "-h"], ["check", "-h"], ["bench"]])
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
        shown = " ".join(text.split())
        for file in Path(configs.__file__).parent.glob("*.yaml"):
            assert described(file) in shown
        for file in Path(configs.__file__).parent.glob("*/[!_]*.yaml"):
            if file.parent.name != "base":
                assert f"choices of {file.parent.name}:" in text and described(file) in shown


def described(file: Path) -> str:
    """What the help says of a choice: its name, and the comment that its file begins with."""
    return f"{file.stem} {file.read_text().partition(chr(10))[0].removeprefix('# ')}"


def test_every_suite_is_in_the_help_of_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for name, about in SUITES.items():
        assert re.search(rf"\n  {name} +{re.escape(about)}\n", text)
        assert importlib.util.find_spec(f"controllers.bench.{name.replace('-', '_')}") is not None


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean train" in capsys.readouterr().err


def test_options_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.seed=1", "--config-name", "quickstart", "run.total_steps=0"]) == 2
    assert "run.total_steps = 0" in capsys.readouterr().err


@pytest.mark.processes
def test_train_checks_first_and_imports_nothing_for_it() -> None:
    code = (
        "import sys; from controllers.command_line import main\n"
        "code = main(['train', '--config-name', 'ppo', 'model.path=/nowhere'])\n"
        "print(code, [name for name in ('torch', 'ray', 'vllm') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "2 []"
    assert "model.path = /nowhere" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_with_a_message_after_its_clean_up(number: signal.Signals) -> None:
    code = (
        "import sys, time, types\n"
        "def train(config):\n"
        "    try:\n"
        "        print('working', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('gave back', flush=True)\n"
        "module = types.ModuleType('controllers.commands.train')\n"
        "module.train = train\n"
        "sys.modules['controllers.commands.train'] = module\n"
        "from controllers.command_line import main\n"
        "sys.exit(main(['train']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
def train(config):
    Compiled()
    print('working on')
    {then}
module = types.ModuleType('controllers.commands.train')
module.train = train
sys.modules['controllers.commands.train'] = module
from controllers.command_line import main
from verl_ray.cluster.signals import heed_signals
sys.exit(main(['train', 'run.dir={folder}']))
"""


@pytest.mark.processes
@pytest.mark.parametrize("then", ["heed_signals()", "raise AttributeError('half of what a call was doing is lost')"])
def test_a_signal_that_a_compiled_call_swallowed_is_still_a_stop(tmp_path: Path, then: str) -> None:
    code = SWALLOWED.format(then=then, folder=tmp_path)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "working on\n" and result.returncode == 130
    said = result.stderr.splitlines()
    assert said[0] == "SIGTERM: stopping. Another one ends it at once"
    command = shlex.join([sys.executable, "-m", "controllers", "train", f"run.dir={tmp_path}"])
    assert said[-2:] == ["stopped by SIGTERM. To begin again:", command]  # there is no checkpoint


def test_the_command_that_goes_on_is_what_was_typed() -> None:
    here, job = Path("/home/me"), Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1")

    def resume(*typed: str, of: str = "auto", has_checkpoints: bool = True, here: Path = here) -> str:
        return command_to_resume(typed, of, has_checkpoints=has_checkpoints, here=here)

    assert resume("verl-ray", "train", "run.dir=my run") == "verl-ray train 'run.dir=my run'"
    other = ("verl-ray", "train", "run.resume=/other/step_00000004", "run.seed=1")
    # What was read at the start is not where the run is now, unless it saved nothing itself.
    assert resume(*other, of="/other/step_00000004") == "verl-ray train run.seed=1 run.resume=auto"
    assert resume(*other, of="/other/step_00000004", has_checkpoints=False) == " ".join(other)
    assert resume("verl-ray", "train", "run.resume=none", of="none") == "verl-ray train run.resume=auto"
    job_command = "ray job submit --working-dir . -- python -m controllers train run.name=job"
    assert resume("python", "-m", "controllers", "train", "run.name=job", here=job) == job_command


@pytest.mark.processes
def test_a_script_is_named_as_it_was_typed() -> None:
    arguments = ["train", "--config-name", "quickstart", "run.seed=1"]
    code = SWALLOWED.format(then="heed_signals()", folder="").replace("['train', 'run.dir=']", str(arguments))
    changed = {**os.environ, "VERL_RAY_SCRIPT": "../scripts/quickstart"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=changed)
    assert result.stderr.splitlines()[-1] == "../scripts/quickstart run.seed=1"


def test_an_error_without_a_signal_is_an_error() -> None:
    def broken() -> int:
        raise SystemError("of another origin")

    with pytest.raises(SystemError, match="of another origin"):
        _stoppable(broken)
