"""The columns that hold the fields of a record."""

from __future__ import annotations

from controllers.compose.composition import examine
from tests.config.rules.cases import INPUTS, Case

OWN = " ".join(INPUTS)

CASES = [
    Case(
        "columns_are_of_fields",
        f"{OWN} 'data.columns={{promt: question, answer: a.b}}'",
        "data.columns.promt",
        "no field 'promt'",
        "Did you mean prompt?",
        "grpo",
    ),
    Case(
        "columns_are_of_fields",
        f"{OWN} 'data.columns={{answer: solution}}'",
        "data.columns.answer",
        "records of this task have no field 'answer'",
        "Use data.columns={response: solution}.",
        "sft",
    ),
]


def test_columns_of_the_task_are_accepted() -> None:
    for root, columns in (
        ("grpo", "{prompt: question, answer: extra_info.truth}"),
        ("sft", "{messages: chosen}"),
        ("reward_model", "{chosen: better, rejected: worse, margin: gap}"),
    ):
        composition = examine(root, [*INPUTS, f"data.columns={columns}"])
        assert composition.problems == []


def test_a_run_that_makes_its_inputs_reads_no_columns() -> None:
    problems = examine("quickstart", ["data.columns={prompt: question}"]).problems
    assert [problem.key for problem in problems] == ["data.columns.prompt"]
