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
        "Use 'data.columns={response: solution}'.",
        "sft",
    ),
    Case(
        "template_settings_have_a_use",
        f"{OWN} data.apply_chat_template=false +data.chat_template_kwargs.think=false",
        "data.chat_template_kwargs.think",
        "would be ignored: data.apply_chat_template = false",
        "set data.apply_chat_template=auto",
        "grpo",
    ),
    Case(
        "template_settings_have_a_use",
        f"{OWN} data.apply_chat_template=false data.chat_template=plain",
        "data.chat_template",
        "would be ignored: data.apply_chat_template = false",
        "set data.apply_chat_template=auto",
        "grpo",
    ),
    Case(
        "template_settings_have_a_use",
        "data.chat_template=plain",
        "data.chat_template",
        "the run makes its own problems and model, which have no turns",
        "Leave it out, or set prepare=null",
        "quickstart",
    ),
    Case(
        "template_settings_have_a_use",
        f"{OWN} 'data.chat_template_kwargs={{tokenize: true, date_string: 1 May}}'",
        "data.chat_template_kwargs.tokenize",
        "the run itself gives this to the chat template",
        "Leave it out.",
        "sft",
    ),
    Case(
        "curriculum_is_consistent",
        "data.curriculum.solved_from=0.9 data.curriculum.easy_from=0.2",
        "data.curriculum.easy_from",
        "a prompt with this score is hard: data.curriculum.hard_to=0.25",
        "Set it above data.curriculum.hard_to.",
    ),
    Case(
        "curriculum_is_consistent",
        "data.curriculum.solved_from=0.25",
        "data.curriculum.solved_from",
        "a prompt with this score is hard",
        "or to null",
    ),
    Case(
        "curriculum_has_no_epochs",
        "data.curriculum.hard_share=0.2 run.total_steps=null run.total_epochs=2",
        "run.total_epochs",
        "an epoch does not use each prompt",
        "run.total_steps",
    ),
    Case(
        "curriculum_knows_the_batch",
        "algorithm=grpo data.curriculum.easy_share=0.2 algorithm.dynamic_sampling=10"
        " schedule=asynchronous placement=separate",
        "algorithm.dynamic_sampling",
        "depends on the order of completion",
        "Choose schedule=synchronous",
    ),
    Case(
        "curriculum_is_consistent",
        "data.curriculum.solved_from=0.5 data.curriculum.easy_share=0.5",
        "data.curriculum.easy_share",
        "none is ever easy",
        "solved_from above easy_from",
    ),
    Case(
        "curriculum_is_consistent",
        "data.curriculum.hard_to=0.3",
        "data.curriculum.hard_to",
        "every prompt is drawn in each epoch",
        "data.curriculum.hard_share",
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
