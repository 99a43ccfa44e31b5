"""The servers of data sources, and a teacher's prompts on the first record.

The function that writes these runs in a real process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.preflight.configs import settled
from tests.preflight.test_data_files import tokenizer, write
from verl_ray.preflight.data_files import examine_data
from verl_ray.preflight.teacher_trial import records_of_servers, try_teacher_prompt
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


def test_each_data_source_has_a_server_before_the_run(
    tokenizer: Path, tmp_path: Path
) -> None:
    sources = "gsm8k", "math", "gsm8k"
    records = [{"prompt": "1", "answer": "2", "data_source": each} for each in sources]
    inputs = [
        f"model.path={tokenizer}", f"data.train_path={write(tmp_path, records)}",
        "data.validation_path=null", "run.evaluate_every=0",
    ]  # fmt: skip

    def counted(*servers: str) -> Trials:
        table = ", ".join(f"{name}: {{url: http://{name}/v1}}" for name in servers)
        teacher = f"distill.teacher={{{table}}}"
        config = settled(compose("distill", [*inputs, teacher]))
        return records_of_servers(config, examine_data(config).files)

    served = counted("gsm8k", "aime", "default")
    assert not served.problems
    assert served.lines == [
        "distill.teacher.gsm8k=http://gsm8k/v1 is asked about 2 of 3 records, of data"
        " source 'gsm8k'",
        "distill.teacher.default=http://default/v1 is asked about 1 of 3 records, of data"
        " source 'math'",
    ]
    assert served.warnings == [
        "distill.teacher.aime=http://aime/v1 is asked about no record of data.train_path"
    ]

    (problem,) = counted("gsm8k").problems
    assert problem.key == "distill.teacher"
    assert problem.rule == "there is no server for data source 'math'"
    assert problem.fix.startswith(
        "Set distill.teacher.math, or distill.teacher.default"
    )


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
