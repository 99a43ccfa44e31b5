"""Commands as Python functions: in a script, in a thread, and beside the caller's Ray."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

import verl_ray
from controllers.python_api.arguments import command_of
from controllers.python_api.contract import RunRequest
from controllers.python_api.foreign_process import result_of
from scripts.configuration import compose
from tests.controllers.runs import ROOT, Inputs
from verl_ray.cluster.session import Session
from verl_ray.config.load import to_tree
from verl_ray.errors import ConfigError
from verl_ray.rewards.functions import exact_match
from verl_ray.rewards.specs import load
from verl_ray.tracking.history import begin_segment

LOCK = threading.Lock()
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.mark.processes
def test_importing_it_brings_nothing() -> None:
    heavy = {"torch", "ray", "hydra", "controllers", "transformers", "numpy"}
    code = (
        f"import sys, verl_ray; print({heavy!r} & sys.modules.keys());"
        "names = [getattr(verl_ray, name) for name in verl_ray.__all__];"
        f"print({heavy!r} & sys.modules.keys())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    # The names are of the driver, but nothing is called.
    assert printed.stdout == "set()\n{'controllers'}\n"


def test_the_arguments_of_calls_are_shown_and_checked() -> None:
    arguments = inspect.signature(verl_ray.train).parameters
    assert list(arguments)[:3] == ["config_name", "model", "data"]
    assert inspect.signature(verl_ray.Run).parameters == arguments
    assert list(inspect.signature(verl_ray.check).parameters) == [*arguments, "machine"]
    calls: list[Any] = [verl_ray.train, verl_ray.Run]
    for call in calls:
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\).*'modle'"):
            call("grpo", modle="m")


def overrides_of_call(**arguments: object) -> list[str]:
    request = RunRequest("grpo", **arguments)  # type: ignore[arg-type]
    with command_of(request) as command:
        return command.overrides


def test_rows_become_a_file_of_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    call = {"model": "m", "run_dir": run_dir, "name": "r", "validation_data": "v.jsonl"}
    file = run_dir / "arguments" / "train.jsonl"
    for rows in (ROWS, iter(ROWS), datasets.Dataset.from_list(ROWS)):
        overrides = overrides_of_call(**call, data=rows)
        assert overrides[-1] == f"data.train_path='{file}'"
        assert "data.validation_path='v.jsonl'" in overrides
        assert [json.loads(line) for line in file.read_text().splitlines()] == ROWS
    # The same rows leave the file alone, for a run that goes on.
    written = file.stat().st_mtime_ns
    overrides_of_call(**call, data=ROWS)
    assert file.stat().st_mtime_ns == written

    sets = [{"path": "a.jsonl", "weight": 2}, "b.jsonl"]
    assert "data.train_path=[{path: 'a.jsonl', weight: 2}, 'b.jsonl']" in (
        overrides_of_call(**call, data=sets)
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data": [{"prompt": "1"}, "x"]}, "rule: row 2 is a str"),
        ({"data": [{"prompt": b"1"}]}, "row 1 cannot be written as JSON"),
        ({"data": datasets.DatasetDict()}, "these are several splits"),
        ({"data": 5}, "rule: this is a int"),
        ({"overrides": "run.seed=1"}, "this is a single text"),
        ({"model": "m", "overrides": ["model.path=n"]}, "an override as well"),
        ({"reward": 1.0}, "this is a float"),
        ({"reward": lambda response, answer: LOCK.locked()}, "cannot be sent"),
        ({"config_name": "grpoo"}, "Did you mean grpo?"),
    ],
)
def test_mistakes_in_the_arguments(
    arguments: dict[str, object], words: str, tmp_path: Path
) -> None:
    call = {"config_name": "grpo", "run_dir": tmp_path / "runs" / "r"} | arguments
    with pytest.raises(ConfigError) as caught:
        verl_ray.check(**call)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert caught.value.report() == "\n".join(caught.value._render_traceback_())
    # Nothing remains of a call that was refused.
    assert not any(tmp_path.iterdir())


def test_a_refused_call_leaves_the_arguments_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "arguments"
    call = {"model": "no model", "run_dir": tmp_path / "run"}
    overrides_of_call(**call, data=ROWS)
    with pytest.raises(ConfigError, match="no model"):
        verl_ray.check("grpo", **call, data=ROWS[:1], reward=lambda response: 1.0)  # type: ignore[arg-type]
    lines = (folder / "train.jsonl").read_text().splitlines()
    assert [path.name for path in folder.iterdir()] == ["train.jsonl"]
    assert [json.loads(line) for line in lines] == ROWS


def test_functions_are_named_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "arguments"
    package = tmp_path / "package_of_rewards"
    package.mkdir()
    (package / "scale.py").write_text("SCALE = 2")
    code = "from .scale import SCALE\ndef scaled(response): return SCALE"
    (package / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = {
        "a": "gsm8k", "b": exact_match, "c/d": lambda response, answer: 1.0,
        "e": importlib.import_module("package_of_rewards").scaled,
        "f": {"function": "rouge", "stem": True},
    }  # fmt: skip
    overrides = overrides_of_call(reward=rewards, run_dir=tmp_path / "run")
    assert overrides[-1] == (
        "reward.functions={a: 'gsm8k', b: 'verl_ray.rewards.functions:exact_match',"
        f" c/d: '{folder / 'reward_2.pkl'}', e: 'package_of_rewards:scaled',"
        " f: {function: 'rouge', stem: true}}"
    )
    assert load("package_of_rewards:scaled").function("") == 2
    assert [path.name for path in folder.iterdir()] == ["reward_2.pkl"]


def test_a_run_of_an_earlier_version_has_a_result(tmp_path: Path) -> None:
    config: dict[str, Any] = to_tree(compose("quickstart"))
    del config["run"]["resolved"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    begin_segment(tmp_path, 3, begun_s=0.0)
    result = result_of(str(tmp_path))
    assert result is not None and (result.state, result.steps) == ("running", 3)


SCRIPT = """
import json, os, signal, sys, threading, time
import psutil, ray
import verl_ray

model, train, folder, address = sys.argv[1:]
rows = [json.loads(line) for line in open(train)]
settings = {
    "run": {"threads_per_rank": 1, "checkpoint_every": 100_000, "evaluate_every": 0},
    "tracking": {"wandb": {"mode": "disabled"}}, "sft.batch_size": 8,
    "actor.optimizer": {"lr": 1e-3, "warmup_steps": 0},
    "ray.address": address,
}

def call(name, steps, **more):
    return dict(model=model, data=rows, run_dir=f"{folder}/{name}",
        overrides=settings | {"data.validation_path": None, "run.total_steps": steps} | more)

def state():
    return [dict(os.environ), os.getcwd(), sys.stdout, sorted(thread.name for thread in threading.enumerate()),
        [signal.getsignal(number) for number in (1, 2, 15)],
        [child.name() for child in psutil.Process().children(recursive=True)]]

def interrupt(path):
    while not os.path.exists(path) or open(path).read().count("\\n") < 2:
        time.sleep(0.05)
    # In a step, and not between two of them, where Ctrl-C is the script's own.
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

before = state()

# A thread that is not the main one.
results = []
thread = threading.Thread(target=lambda: results.append(verl_ray.train("sft", **call("a", 2))))
thread.start()
thread.join()
assert (results[0].state, results[0].steps, len(results[0].history)) == ("finished", 2, 2)

# Ctrl-C in a step by hand: saved, closed, and a KeyboardInterrupt.
run = verl_ray.Run("sft", **call("b", 100_000))
threading.Thread(target=interrupt, args=[f"{folder}/b/metrics.jsonl"]).start()
try:
    for metrics in run:
        pass
except KeyboardInterrupt as stop:
    assert isinstance(stop, verl_ray.Stopped) and f"run_dir='{folder}/b'" in str(stop)
    steps = stop.result.steps
    assert stop.result.state == "stopped" and steps == run.global_step >= 2
    assert stop.result.checkpoint.name == f"step_{steps:08d}"
try:
    run.step()
except verl_ray.ConfigError as error:
    assert "this run is closed" in str(error)

# By hand and at once, the first of them goes on from a checkpoint: the same bits.
for _ in range(2):
    with verl_ray.Run("sft", **call("c", 2)) as run:
        run.step()
        run.save()
assert run.has_ended and run.result.state == "finished" and run.result.steps == 2
weights = [open(f"{folder}/{name}/model/model.safetensors", "rb").read() for name in "ac"]
assert weights[0] == weights[1]

measured = verl_ray.evaluate("sft", model=f"{folder}/c/model", validation_data=rows[:4],
    run_dir=f"{folder}/d", overrides=settings)
assert 0 <= measured.metrics["val-core/held_out/acc/mean@1"] <= 1 and measured.step == 0

print([(a, b) for a, b in zip(before, state()) if a != b])

# The caller's own Ray. The cluster of these tests listens on 127.0.0.1 alone.
from verl_ray.cluster.session import on_loopback
with on_loopback():
    ray.init(address=address, log_to_driver=False)
try:
    verl_ray.train("sft", **call("e", 2))
except verl_ray.VerlRayError as error:
    assert "Call ray.shutdown()" in str(error) and not os.path.exists(f"{folder}/e")
ray.shutdown()

"""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_script(cluster: Session, inputs: Inputs, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(inputs.model), str(inputs.train), str(tmp_path), cluster.address],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"
