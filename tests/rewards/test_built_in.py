"""The catalogue of built-in functions, and their specs in a configuration."""

from __future__ import annotations

import importlib.util
import inspect

import pytest

from verl_ray.errors import ConfigError
from verl_ray.rewards.built_in import (
    BUILT_IN,
    graded_by,
    is_accuracy,
    usual_function,
)
from verl_ray.rewards.signatures import signature_of
from verl_ray.rewards.specs import load, spec_problem
from verl_ray.settings.function_specs import parts_of, spec_of

KEY = "reward.functions.default"
TAGS = spec_of("format", {"tags": ["think", "answer"]})


def test_a_declaration_names_the_arguments_of_its_class() -> None:
    for name, declared in BUILT_IN.items():
        is_class = isinstance(declared.target, type)
        parameters = inspect.signature(declared.target).parameters if is_class else ()
        assert set(declared.arguments) == set(parameters), name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("math_dapo", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("aime_2024", "math"),
        ("sums", "exact_match"),
        ("mathematics", "exact_match"),
    ],
)
def test_the_usual_function_of_a_data_source(source: str, name: str) -> None:
    assert usual_function(source) == graded_by("by_data_source", source) == name
    assert graded_by("f1", source) == "f1"


def test_a_data_source_is_graded_as_usual() -> None:
    grade = load("by_data_source").function
    assert grade("it is 12", "#### 12", "openai/gsm8k") == 1.0
    assert grade("it is 12", "12", "sums") == 0.0
    assert grade("Answer: 24/2", "12", "aime25") == 1.0


def test_only_right_or_wrong_is_an_accuracy() -> None:
    accuracies = {name for name in BUILT_IN if is_accuracy(name)}
    assert accuracies == {
        "by_data_source", "exact_match", "gsm8k", "gsm8k_strict", "math",
        "multiple_choice",
    }  # fmt: skip
    assert not is_accuracy(TAGS)
    assert not is_accuracy(spec_of("rouge", {"stem": True}))
    assert not is_accuracy("own.py:f")


def test_arguments_reach_the_class_and_are_no_values_of_a_response() -> None:
    loaded = load(TAGS)
    assert loaded.function("<think>a</think><answer>b</answer>") == 1.0
    assert loaded.function("b") == 0.0
    assert signature_of(loaded.function).required == {"response"}
    assert load(spec_of("rouge", {"kind": "rouge1"})).function("a", "a b") == (
        pytest.approx(2 / 3)
    )


@pytest.mark.parametrize(
    ("spec", "rule", "fix"),
    [
        (spec_of("format", {"pattern": "("}), "no regular expression", "Correct it."),
        ("format", "a pattern or tags", "Give tags: [think, answer]"),
        (spec_of("format", {"tag": ["a"]}), "takes no argument tag", "mean tags?"),
        (spec_of("gsm8k", {"strict": True}), "no argument strict", "It takes none"),
        (spec_of("gsm8k", {"answer": "4"}), "every response brings", "Leave it out"),
        (spec_of("formt", {"tags": ["a"]}), "no built-in reward", "mean format?"),
    ],
)
def test_a_mistake_in_an_argument_is_told_without_a_run(
    spec: str, rule: str, fix: str
) -> None:
    problem = spec_problem(spec, KEY)
    assert problem is not None and (problem.key, problem.value) == (KEY, spec)
    assert rule in problem.rule and fix in problem.fix
    with pytest.raises(ConfigError) as error:
        load(spec, KEY)
    assert error.value.problems == [problem]


def test_a_missing_package_is_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, package in (
        ("math", "math-verify"),
        (spec_of("rouge", {"stem": True}), "rouge-score"),
        ("bleu", "sacrebleu"),
    ):
        problem = spec_problem(name, KEY)
        assert problem is not None and problem.key == KEY
        short, _ = parts_of(name)
        assert problem.rule == (
            f"{short} needs the package {package}, which is not installed"
        )
        assert problem.fix.startswith(f"Install it: pip install {package}.")
    for name in ("gsm8k", "f1", "json_schema", "by_data_source"):
        assert spec_problem(name, KEY) is None
