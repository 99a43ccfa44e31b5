"""Finding a user's function by its spec, and running what it names."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import cloudpickle
import pytest

from verl_ray.errors import ConfigError
from verl_ray.rewards.functions import exact_match, gsm8k
from verl_ray.rewards.specs import load, spec_problem
from verl_ray.settings.function_specs import spec_of

KEY = "reward.functions.maths"
SIGNATURE = "(response, answer, *, prompt, data_source, extra)"


def test_the_built_in_functions_are_found_by_name() -> None:
    assert load("exact_match").function is exact_match
    assert load("gsm8k").function is gsm8k


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a file makes its folder importable, which is for this test alone."""
    monkeypatch.setattr(sys, "path", list(sys.path))


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
    function = load(f"{path}:f", KEY).function
    assert function("abc", "", prompt="", data_source="", extra={}) == 3.5


def test_a_file_runs_once_and_leaves_the_standard_library_alone(tmp_path: Path) -> None:
    import json

    log = tmp_path / "log"
    path = write(
        tmp_path,
        f"open({str(log)!r}, 'a').write('x')\ndef f{SIGNATURE}: return 1.0\ndef g{SIGNATURE}: return 2.0\n",
        "json.py",
    )
    assert load(f"{path}:f", KEY) != load(f"{path}:g", KEY)
    assert log.read_text() == "x"
    assert sys.modules["json"] is json


def problem_of(spec: str, *, may_pass: bool = False) -> str:
    with pytest.raises(ConfigError) as error:
        load(spec, KEY)
    [problem] = error.value.problems
    assert (problem.key, problem.value) == (KEY, spec)
    assert problem.may_pass is may_pass
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
    for spec in (path, f"./{name}:grade"):
        assert f"{path}:grade?" in problem_of(spec)
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
    ("body", "cause", "may_pass"),
    [
        (
            "import no_such_module_at_all",
            "No module named 'no_such_module_at_all'",
            False,
        ),
        ("raise SystemExit(3)", "SystemExit: 3", True),
        # Its database is away.
        ("raise ValueError('no connection')", "ValueError: no connection", True),
    ],
)
def test_a_file_that_cannot_be_imported_says_where(
    tmp_path: Path, body: str, cause: str, may_pass: bool
) -> None:
    path = write(tmp_path, f"def f{SIGNATURE}: return 1.0\n{body}\n")
    text = problem_of(f"{path}:f", may_pass=may_pass)
    assert "cannot be imported" in text
    assert cause in text
    assert f"({path}, line 2)" in text and "Traceback" not in text
    assert "importlib" not in text
    # A module that is half run is not found by the next attempt.
    assert problem_of(f"{path}:f", may_pass=may_pass) == text


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("name", ["grading.py", "json.py", "gräding.v2.py"])
@pytest.mark.processes
def test_the_processes_of_a_file_find_what_it_defines(
    tmp_path: Path, name: str, method: str
) -> None:
    path = write(
        tmp_path,
        "import multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Verdict:\n"
        "    score: float\n"
        "def compare(response, answer):\n"
        "    return Verdict(float(response == answer))\n"
        "def graded(response, answer):\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    with ProcessPoolExecutor(1, context) as pool:\n"
        "        return pool.submit(compare, response, answer).result().score\n",
        name,
    )
    function = load(f"{path}:graded", KEY).function
    assert (function("4", "4"), function("4", "5")) == (1.0, 0.0)
    verdict = sys.modules[function.__module__].Verdict(2.0)
    assert pickle.loads(pickle.dumps(verdict)) == verdict


def test_a_module_is_found_on_the_path_and_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_this_test"
    package.mkdir()
    write(package, "print('ran')\n", "__init__.py")
    write(package, "from . import maths\ndef f(response): return 1.0\n", "maths.py")
    write(package, "from package_of_this_test.maths import *\n", "open.py")
    spec = "package_of_this_test.maths:f"
    assert "there is no module 'package_of_this_test.maths'" in problem_of(spec)

    monkeypatch.chdir(tmp_path)
    assert spec_problem(spec, KEY) is None
    assert spec_problem("package_of_this_test.open:anything", KEY) is None
    missing = spec_problem("package_of_this_test.maths:g", KEY)
    assert missing is not None and "defines no 'g'" in missing.rule
    assert "there is no module" in problem_of("package_of_this_test.math:f")
    # Nothing was imported so far.
    assert "package_of_this_test" not in sys.modules

    monkeypatch.syspath_prepend(tmp_path)
    assert load(spec, KEY).function("4") == 1.0


def test_what_cloudpickle_has_written_is_loaded(tmp_path: Path) -> None:
    scale = 3

    class Scaled:
        def __call__(self, response: str) -> float:
            return scale * len(response)

    for number, target in enumerate((lambda response: scale * len(response), Scaled)):
        path = tmp_path / f"{number}.pkl"
        path.write_bytes(cloudpickle.dumps(target))
        assert spec_problem(str(path), KEY) is None
        assert load(str(path), KEY).function("ab") == 6

    path.write_bytes(b"torn")
    text = problem_of(str(path))
    assert "cannot be unpickled" in text and "Write it with cloudpickle" in text
    assert "does not exist" in problem_of(str(tmp_path / "absent.pkl"))


def test_a_class_is_built_and_may_fail(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "class Fine:\n"
        "    def __call__(self, response): return 2.0\n"
        "class Broken(Fine):\n"
        "    def __init__(self): raise OSError('no model')\n",
    )
    assert load(f"{path}:Fine", KEY).function("4") == 2.0
    text = problem_of(f"{path}:Broken", may_pass=True)
    assert "is a class that cannot be built: OSError: no model" in text


def test_arguments_reach_a_users_function_and_class(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def near(response, bonus=0.0): return len(response) + bonus\n"
        "def trl(completions, bonus, **columns): return [bonus, *columns]\n"
        "class Scaled:\n"
        "    def __init__(self, scale): self.scale = scale\n"
        "    def __call__(self, response): return self.scale * len(response)\n",
    )
    near = load(spec_of(f"{path}:near", {"bonus": 2}), KEY)
    assert near.function("ab") == 4
    assert load(spec_of(f"{path}:Scaled", {"scale": 3}), KEY).function("ab") == 6

    # A column of the same name does not replace it.
    batched = load(spec_of(f"{path}:trl", {"bonus": 2}), KEY)
    _, named = batched.signature.bind({"completions": ["a"], "bonus": [7], "b": [1]})
    assert batched.function(**named) == [2, "b"]

    for name, arguments, rule in (
        ("near", {"bonsu": 2}, "it takes no argument bonsu. Did you mean bonus?"),
        ("near", {"response": "x"}, "its argument response is a value that every"),
        ("Scaled", {}, "is a class that is built with scale"),
        ("Scaled", {"scale": 3, "size": 1}, "it takes no argument size"),
    ):
        assert rule in problem_of(spec_of(f"{path}:{name}", arguments))
