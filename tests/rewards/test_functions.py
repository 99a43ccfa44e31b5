"""Built-in reward functions on tables, and finding a user's function."""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path

import pytest

from verl_ray.errors import ConfigError, DataError
from verl_ray.rewards.functions import (
    REWARD_FUNCTIONS,
    exact_match,
    final_number,
    gsm8k,
    resolve,
    spec_problem,
)

KEY = "reward.functions.maths"
SIGNATURE = "(response, answer, *, prompt, data_source, extra)"


def grade(function: str, response: str, answer: str) -> float | None:
    return REWARD_FUNCTIONS[function](
        response, answer, prompt="", data_source="maths", extra={}
    )


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("12", "12", 1.0),
        (" 12\n", "12", 1.0),
        ("12", "12 ", 1.0),
        ("12.0", "12", 0.0),
        ("1 2", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_exact_match(response: str, answer: str, score: float) -> None:
    assert grade("exact_match", response, answer) == score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        (
            "#### 18 dollars for 3 days",
            "18",
        ),  # the number behind the mark, not the last one
        ("#### 1\nwait\n#### 2", "2"),
        ("It is 7. ####", "7"),
        ("####", None),
        ("the answer is 72.", "72"),
        ("3 apples and 4 pears", "4"),
        ("#### 0", "0"),
        ("5 #### 0 of 9", "0"),
        ("$1,450,000.", "1450000"),
        ("1,2", "2"),  # a list, not a number
        ("1,2345", "2345"),
        ("12,345,678.90", "12345678.90"),
        ("1234567", "1234567"),
        ("007", "7"),
        ("3.50", "3.5"),
        (".5", "0.5"),
        ("$.75", "0.75"),
        ("50%", "50"),
        ("\\boxed{42}", "42"),
        ("-5", "-5"),
        ("7 - 5", "5"),
        ("x=-5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("\N{MINUS SIGN}5", "-5"),
        ("10-3", "3"),  # an operator
        ("10 - 3 = 7", "7"),
        ("mid-30", "30"),  # a hyphen
        ("(2)-1", "1"),
        ("v1.2.3", "3"),
        ("3/4", "4"),
        ("\N{ARABIC-INDIC DIGIT THREE}", None),
        ("no number", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("so 20 + 22 = 42.\n#### 42", "42", 1.0),
        ("#### $1,234.50", "1234.5", 1.0),
        ("#### 42", "6 * 7 = <<6*7=42>>42\n#### 42", 1.0),
        ("#### 42.5", "42", 0.0),
        ("#### 0.30000000000000001", "0.3", 0.0),  # decimal numbers, compared exactly
        ("#### -42", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("9" * 100_000, "42", 0.0),
    ],
)
def test_gsm8k(response: str, answer: str, score: float) -> None:
    assert grade("gsm8k", response, answer) == score


def test_gsm8k_refuses_an_answer_without_a_number() -> None:
    with pytest.raises(
        DataError, match=r"answer 'forty' of data source 'maths' has no number"
    ):
        grade("gsm8k", "#### 40", "forty")


def test_the_built_in_functions_are_found_by_name() -> None:
    assert resolve("exact_match") is exact_match
    assert resolve("gsm8k") is gsm8k


def write(folder: Path, source: str, name: str = "grading.py") -> Path:
    path = folder / name
    path.write_text(source)
    return path


def test_a_users_function_is_loaded_with_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "BONUS = 0.5\n", "bonus_of_this_test.py")
    path = write(
        tmp_path,
        f"import bonus_of_this_test\ndef f{SIGNATURE}:\n    return len(response) + bonus_of_this_test.BONUS\n",
    )
    function = resolve(f"{path}:f", KEY)
    assert function("abc", "", prompt="", data_source="", extra={}) == 3.5


def test_a_file_runs_once_and_leaves_the_standard_library_alone(tmp_path: Path) -> None:
    import json

    log = tmp_path / "log"
    path = write(
        tmp_path,
        f"open({str(log)!r}, 'a').write('x')\ndef f{SIGNATURE}: return 1.0\ndef g{SIGNATURE}: return 2.0\n",
        "json.py",
    )
    assert resolve(f"{path}:f", KEY) is not resolve(f"{path}:g", KEY)
    assert log.read_text() == "x"
    assert sys.modules["json"] is json


def problem_of(spec: str) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(spec, KEY)
    [problem] = error.value.problems
    assert (problem.key, problem.value) == (KEY, spec)
    return str(problem)


def test_an_unknown_name_suggests_the_built_in_ones() -> None:
    text = problem_of("exact_mach")
    assert "is no built-in reward function" in text
    assert "exact_match" in text
    assert "path/to/file.py:function" in text


def test_a_missing_file_is_named_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = problem_of("nowhere.py:f")
    assert "the file nowhere.py does not exist" in text
    assert str(tmp_path) in text


def test_a_missing_function_lists_those_of_the_file_without_running_it(
    tmp_path: Path,
) -> None:
    path = write(
        tmp_path, "raise SystemExit\ndef grade(): ...\ndef other(): ...\nX = 1\n"
    )
    problem = spec_problem(f"{path}:grad", KEY)
    assert problem is not None
    assert "defines no 'grad' at its top level" in problem.rule
    assert "Did you mean grade?" in problem.fix
    assert "other" in problem.fix


def test_half_a_specification_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "def grade(): ...\n").name
    name = path.removesuffix(".py")
    for spec in (path, f"{name}:grade"):
        assert f"Did you mean {path}:grade?" in problem_of(spec)
    Path(path).write_text("X = 1\n")
    assert "path/to/file.py:function" in problem_of(path)
    assert "Define it there: def grade(response, answer" in problem_of(f"{path}:grade")


def test_names_bound_by_import_and_assignment_count(tmp_path: Path) -> None:
    path = write(
        tmp_path, "from somewhere import f\ng = f\nif True:\n    def h(): ...\n"
    )
    assert [spec_problem(f"{path}:{name}", KEY) for name in "fgh"] == [None, None, None]


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    path = write(tmp_path, "def f(:\n")
    assert "cannot be read as Python: invalid syntax" in problem_of(f"{path}:f")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported_says_where(
    tmp_path: Path, body: str, cause: str
) -> None:
    path = write(tmp_path, f"def f{SIGNATURE}: return 1.0\n{body}\n")
    text = problem_of(f"{path}:f")
    assert "cannot be imported" in text
    assert cause in text
    assert f"({path}, line 2)" in text and "Traceback" not in text
    assert "importlib" not in text
    assert str(path) not in sys.modules


@pytest.mark.parametrize(
    ("definition", "rule"),
    [
        (
            "def f(response, answer): return 1.0",
            "does not take the arguments of a reward function",
        ),
        (f"async def f{SIGNATURE}: return 1.0", "is a coroutine function"),
        ("f = 3", "is a int, which cannot be called"),
    ],
)
def test_what_cannot_be_a_reward_function(
    tmp_path: Path, definition: str, rule: str
) -> None:
    path = write(tmp_path, definition + "\n")
    assert rule in problem_of(f"{path}:f")
