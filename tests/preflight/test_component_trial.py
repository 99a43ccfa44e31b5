"""The components of a mixed reward on a sample of the records, in real processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.preflight.configs import settled
from tests.preflight.test_data_files import tokenizer, write
from verl_ray.preflight.component_trial import try_components
from verl_ray.preflight.data_files import examine_data
from verl_ray.preflight.trials import Trials

__all__ = ["tokenizer"]

GRADERS = """
def of_math(response, extra):
    return 1.0 if extra["task"] == "math" else None

def of_code(response, extra):
    if extra["task"] == "broken":
        raise ValueError("no such task")
    return 0.5 if extra["task"] == "code" else None
"""


@pytest.mark.processes
def test_it_says_how_many_records_each_component_scores(
    tokenizer: Path, tmp_path: Path
) -> None:
    script = tmp_path / "graders.py"
    script.write_text(GRADERS)
    (tmp_path / "reward").mkdir()
    components = "function@components.math, function@components.code"
    (tmp_path / "reward" / "two.yaml").write_text(
        f"defaults: [{components}, _self_]\nkind: mixed\nweights: {{math: 1, code: 1}}\n"
        f"components: {{math: {{functions: {{default: '{script}:of_math'}}}}, code:"
        f" {{functions: {{default: '{script}:of_code'}}}}}}\n"
    )

    def tried(tasks: Sequence[str], *reward: str) -> Trials:
        records = [{"prompt": f"{i}", "task": task} for i, task in enumerate(tasks)]
        own = [f"model.path={tokenizer}", f"data.train_path={write(tmp_path, records)}",
               "data.validation_path=null", "run.evaluate_every=0"]  # fmt: skip
        config = settled(compose("grpo", [*own, *reward], config_dir=str(tmp_path)))
        return try_components(config, examine_data(config).files)

    # Of 32 records every second one is in the sample.
    found = tried(
        ["math", "x", "code", "x", "code", "x", "math", "x"] * 4, "reward=two"
    )
    assert found.lines == [
        "reward.components.math scores 8 of 16 sample records, and leaves 8 to the others",
        "reward.components.code scores 8 of 16 sample records, and leaves 8 to the others",
    ]  # fmt: skip
    assert not found.warnings

    found = tried(["math", "art", "broken"], "reward=two")
    assert "math scores 1 of 3 sample records, and leaves 2" in found.lines[0]
    failed, left = found.warnings
    assert "code fails on 1 of 3 sample records" in failed and "no such task" in failed
    assert "return None for 1 of 3 records" in left and left.endswith("'1'")

    single = f"reward.functions={{default: {script}:of_math}}"
    assert tried(["math"], single) == Trials()
