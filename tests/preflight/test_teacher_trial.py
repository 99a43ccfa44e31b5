"""The function of a teacher's prompts on the first record, in a real process."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.preflight.configs import settled
from tests.preflight.test_data_files import tokenizer, write
from verl_ray.preflight.data_files import examine_data
from verl_ray.preflight.teacher_trial import try_teacher_prompt
from verl_ray.preflight.trials import Trials

__all__ = ["tokenizer"]

PROMPTS = """
def hint(request, *, sign):
    return f"{request.answer}{sign}{request.prompt}"

def broken(request):
    return request.extra["solution"]

def number(request):
    return 7
"""


@pytest.mark.processes
def test_a_prompt_is_written_before_the_run(tokenizer: Path, tmp_path: Path) -> None:
    script = tmp_path / "prompts.py"
    script.write_text(PROMPTS)
    records = [{"prompt": "12", "answer": "3"}, {"prompt": "4", "answer": "5"}]
    inputs = [
        f"model.path={tokenizer}", f"data.train_path={write(tmp_path, records)}",
        "data.validation_path=null", "run.evaluate_every=0", "distill.teacher=actor",
    ]  # fmt: skip

    def tried(function: str, *changes: str) -> Trials:
        spec = f"distill.teacher_prompt={function}"
        config = settled(compose("distill", [*inputs, spec, *changes]))
        return try_teacher_prompt(config, examine_data(config).files)

    spec = f"{{function: '{script}:hint', sign: '1'}}"
    (line,) = tried(spec).lines
    assert line.endswith('writes 23 tokens: "3112"')

    for function, changes, words in (
        (spec, ["distill.max_prompt_tokens=22"], "it writes 23 tokens, and distill.max_prompt_tokens is 22"),
        (f"{script}:broken", [], "KeyError: 'solution'"),
        (f"{script}:number", [], "returned 7; expected a text, or a list of messages"),
    ):  # fmt: skip
        (problem,) = tried(function, *changes).problems
        assert problem.key == "distill.teacher_prompt"
        assert words in problem.rule, problem.rule
