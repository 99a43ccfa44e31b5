"""Settings that hold a path: what `~`, `$VAR` and ids of the hub become."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.command_line import main
from controllers.compose.composition import examine
from scripts.configuration import compose
from verl_ray.config.load import parse, to_tree
from verl_ray.config.reward import MixedReward
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import Problem
from verl_ray.settings.function_specs import command_of, in_words, parts_of, spec_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("STORE", "/store")
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.chdir(tmp_path)


def problem(*overrides: str) -> Problem:
    data = ["data.train_path=t", "data.validation_path=v"]
    (problem,) = examine("grpo", [*data, *overrides]).problems
    return problem


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("model.path=~/m", "/home/me/m"),
        ("model.path='~/m'", "/home/me/m"),
        ("model.path=~", "/home/me"),
        ("model.path=$STORE/m", "/store/m"),
        ("model.path='$STORE/m'", "/store/m"),
        ("model.path=${oc.env:STORE}/m", "/store/m"),
        ("model.path='${oc.env:STORE}/m'", "/store/m"),
        ("model.path=${run.dir}/m", "/home/me/out/m"),
        ("model.path=s3://b/$m", "s3://b/$m"),
        ("model.path=Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("model.path=./Qwen/Qwen3-0.6B", "{here}/Qwen/Qwen3-0.6B"),
        ("model.path=here/model", "{here}/here/model"),
    ],
)
def test_a_path_is_absolute_or_an_id_however_it_is_quoted(
    typed: str, path: str, tmp_path: Path
) -> None:
    (tmp_path / "here/model").mkdir(parents=True)
    data = ["data.train_path=t", "data.validation_path=v", "run.dir=$HOME/out"]
    config = compose("grpo", [*data, typed])
    assert config.model.path == path.format(here=tmp_path)
    assert config.model_roles["actor"].model == config.model


def test_functions_and_checkpoints_are_paths_too() -> None:
    functions = "{default: ~/r.py:f, a: $STORE/r.py:f, b: exact_match, c: pack.age:f}"
    config = compose(
        "grpo",
        ["model.path=~/m", "data.train_path=~/t.jsonl",
         "data.validation_path=openai/gsm8k", f"reward.functions={functions}",
         "run.resume=$STORE/old", "rollout.sync.transport=disk", "rollout.sync.folder=~/sync"],
    )  # fmt: skip
    assert (
        isinstance(config, RolloutTaskConfig)
        and config.rollout.sync.folder == "/home/me/sync"
    )
    assert config.run.resume == "/store/old"
    assert config.data.train_path == "/home/me/t.jsonl"
    assert config.data.validation_path == "openai/gsm8k"
    assert config.graders["reward"].named_functions == {
        "default": "/home/me/r.py:f", "a": "/store/r.py:f", "b": "exact_match",
        "c": "pack.age:f",
    }  # fmt: skip


def test_what_does_not_exist_is_told_with_its_key_and_the_way_on() -> None:
    unknown = problem("model.path=$NOWHERE/m")
    assert (unknown.key, unknown.value) == ("model.path", "$NOWHERE/m")
    assert unknown.rule == "there is no environment variable NOWHERE"
    assert "export NOWHERE=" in unknown.fix
    assert "~no_such_user" in problem("model.path='~no_such_user/m'").rule

    # Braces are a reference to a key of the configuration.
    braced = problem("model.path=${STORE}/m")
    assert "$STORE in a path, or ${oc.env:STORE}" in braced.fix
    assert "${model.path}" in problem("model.path=${NOWHERE}/m").fix

    folder = problem("model.path=~/m", "model.revision=v1")
    assert folder.key == "model.revision" and "is a folder" in folder.rule


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["check", "--config-dir", "$NOWHERE"], "--config-dir"),
        (["check", "--config-name", "$NOWHERE/a.yaml"], "--config-name"),
        (["export", "$NOWHERE/run", "out"], "CHECKPOINT"),
    ],
)
def test_arguments_of_commands_are_paths_too(
    arguments: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert f"{key} = $NOWHERE" in message
    assert "no environment variable NOWHERE" in message


def test_a_function_with_arguments_is_a_table_whose_paths_are_absolute(
    tmp_path: Path,
) -> None:
    table = "{function: ~/r.py:f, bonus: 0.5, words_path: w.txt}"
    inputs = ["model.path=~/m", "data.train_path=t", "data.validation_path=v"]
    config = compose("grpo", [*inputs, f"reward.functions.default={table}"])
    tree = to_tree(config)
    assert tree["reward"]["functions"] == {  # type: ignore[index]
        "default": {
            "function": "/home/me/r.py:f",
            "bonus": 0.5,
            "words_path": f"{tmp_path}/w.txt",
        }
    }
    assert parse(tree, type(config)) == config
    assert isinstance(config, RLConfig) and not isinstance(config.reward, MixedReward)
    (grader,) = config.graders.values()
    assert grader.named_functions is not None
    name, arguments = parts_of(grader.named_functions["default"])
    assert (name, arguments["bonus"]) == ("/home/me/r.py:f", 0.5)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("reward.functions.default={tags: [a]}", "the table names no function"),
        ("reward.functions.default={function: 3}", "the table names no function"),
        ("reward.functions.default='{function'", "the table names no function"),
        (
            "reward.functions.default.tags=[a]",
            "reward.functions.default is by_data_source and has nothing inside",
        ),
        (
            "reward.functions.sums=exact_match  reward.functions.sums.x=3",
            "reward.functions.sums is exact_match and has nothing inside",
        ),
        (
            "agent.environments.sums={cmd: python a.py}",
            "the table names neither a function nor a command; did you mean command by cmd?",
        ),
        (
            "agent.environments.sums={command: [python, a.py]}",
            "the table names neither a function nor a command: its command is no text",
        ),
        (
            "agent.environments.sums={command: a, function: a.py:run}",
            "the table names a function and a command",
        ),
        ("reward.functions.default={command: a}", "the table names no function"),
        (
            "agent.environments.sums.n=3  agent.environments.sums=w.py:W",
            "agent.environments.sums is w.py:W and has nothing inside",
        ),
    ],
)
def test_a_table_without_a_function_is_refused(override: str, rule: str) -> None:
    assert problem("model.path=m", *override.split("  ")).rule == rule


def test_files_of_a_command_are_absolute_and_its_table_stays(tmp_path: Path) -> None:
    (tmp_path / "my agent.py").touch()
    (tmp_path / "python").touch()
    inputs = ["model.path=~/m", "data.train_path=t", "data.validation_path=v"]
    words = 'python "my agent.py" --log my --mark $5 ./python'
    table = f"{{command: '{words}', reward: post, env: {{N: '3'}}}}"
    config = compose("grpo", [*inputs, f"agent.environments.default={table}"])
    here = f"python '{tmp_path}/my agent.py' --log my --mark '$5' {tmp_path}/python"
    assert isinstance(config, RLConfig)
    spec = config.agent.environments["default"]
    name, options = parts_of(spec)
    assert command_of(name) == here
    assert options == {"reward": "post", "env": {"N": "3"}}
    assert in_words(spec) == f"command \"{here}\" (reward=post, env={{'N': '3'}})"
    assert spec_of(name, options) == spec

    tree = to_tree(config)
    saved = {"command": here, "reward": "post", "env": {"N": "3"}}
    assert tree["agent"]["environments"] == {"default": saved}  # type: ignore[index]
    assert parse(tree, type(config)) == config
