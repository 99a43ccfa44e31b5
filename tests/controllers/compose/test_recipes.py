"""Each recipe names its machine, and `check --machine` accepts it there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import configs
from controllers.command_line import main
from controllers.compose.composition import examine
from controllers.compose.listing import root_configs
from tests.preflight.published import PARAMETERS, published
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.machine import parse_machine
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.resolve import resolve

FILES = sorted((Path(configs.__file__).parent / "recipes").glob("*.yaml"))
DATA = ["data.train_path=/none/train.jsonl", "data.validation_path=/none/test.jsonl"]


def line(file: Path, name: str) -> str:
    """Return what a recipe says of itself in a comment."""
    (match,) = re.findall(rf"^# {name}: (.+)$", file.read_text(), re.MULTILINE)
    return str(match)


def model_of(file: Path) -> str:
    """Return the published model whose config.json stands for that of a recipe."""
    (path,) = re.findall(r"^  path: \S+/(\S+)$", file.read_text(), re.MULTILINE)
    return str(path).removesuffix("-Instruct")


def test_there_is_one_for_each_model() -> None:
    assert sorted(map(model_of, FILES)) == sorted(PARAMETERS)
    listed = {f"recipes/{file.stem}" for file in FILES}
    assert listed == {name for name in root_configs() if "/" in name}


@pytest.mark.parametrize(
    "file",
    # The largest one takes as long as all others.
    [
        pytest.param(file, marks=[pytest.mark.slow] if "235b" in file.stem else [])
        for file in FILES
    ],
    ids=lambda file: file.stem,
)
def test_check_accepts_it_on_its_machine(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, machine = f"recipes/{file.stem}", line(file, "machine")
    overrides = [f"model.path={published(model_of(file))}", *DATA]
    words = ["check", "--config-name", root, "--data", "off", *overrides]
    assert main([*words, "--machine", machine]) == 0
    out = capsys.readouterr().out
    assert "can run" in out
    warnings = [text for text in out.splitlines() if text.startswith("warning:")]
    assert all("untested on GPUs" in text for text in warnings)
    assert line(file, "run on").startswith("no machine yet")

    # What is only estimated fits as well.
    config = examine(root, overrides).config
    assert config is not None
    described = parse_machine(machine)
    planned = resolve(config, facts_here(config, described))
    _, needed = memory_plan(planned, on_gpus=True).fullest(on_device=True)
    assert described.gpu_memory_bytes is not None
    assert needed < 0.95 * described.gpu_memory_bytes
    # On one GPU less each node has too few.
    fewer = machine.replace(f"gpus={described.gpus},", f"gpus={described.gpus - 1},")
    if described.gpus > 1:
        assert main([*words, "--machine", fewer]) == 2


def test_a_misspelt_recipe_is_answered_with_near_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--config-name", "recipes/qwen3_8"]) == 2
    assert "qwen3_8b" in capsys.readouterr().err
