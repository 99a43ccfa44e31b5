"""Reward functions: their signature, the built-in ones, and how a user's own is found.

Invariant: a built-in function returns 1.0 or 0.0, by fixed rules that do not depend on the data set. Deliberately
not here: where functions run (`process.py`), and models that grade.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import symtable
import sys
import traceback
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Protocol

from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import ConfigError, DataError, Problem

EXPECTED = "Expected the name of a built-in function or path/to/file.py:function"


class RewardFunction(Protocol):
    """Grades one response. The user's own functions have this signature too."""

    def __call__(
        self, response: str, answer: str, /, *, prompt: str, data_source: str, extra: dict[str, object]
    ) -> float | None:
        """The score of `response`, or None to leave it ungraded.

        Args:
            response: the decoded response, without special tokens.
            answer: the record's `answer`.
            prompt: the record's `prompt`; of chat messages their contents, with empty lines between.
            data_source: the record's `data_source`.
            extra: the record's remaining fields.
        """
        ...


# ------------------------------------------------------------------------------------------------- the built-in ones


def exact_match(response: str, answer: str, /, *, prompt: str, data_source: str, extra: dict[str, object]) -> float:
    """1.0 when the two texts are equal after the white space around them is stripped."""
    return float(response.strip() == answer.strip())


def gsm8k(response: str, answer: str, /, *, prompt: str, data_source: str, extra: dict[str, object]) -> float:
    """1.0 when the final numbers of the two texts are equal as numbers ("1,234.50" and "1234.5"), see `final_number`.

    A response without a number scores 0.0.

    Raises:
        DataError: the answer has no number.
    """
    expected = final_number(answer)
    if expected is None:
        raise DataError(f"answer {answer[-80:]!r} of data source {data_source!r} has no number, so gsm8k cannot grade")
    return float(final_number(response) == expected)


_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])-(?!\s))?"  # a minus sign; not the operator in `7-3` or `7 - 3`, nor the hyphen in `mid-30`
    r"[$€£]?\s?(?P<late_sign>(?<=[$€£])-)?"  # -$5 and $-5
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))"  # 1,234,567 or 1234567 or .5
    r"(?P<fraction>\.[0-9]+)?"
)


def final_number(text: str) -> Decimal | None:
    """The number behind the last `####`, else the last number of `text`, else None.

    Currency and percent signs, commas between groups of three digits, and a full stop at the end are not part of a
    number; exponents and fractions (`3/4`) are not read as one number.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    _, mark, tail = text.rpartition("####")
    found = _NUMBER.search(tail) if mark else None
    if found is None:
        found = next(reversed([*_NUMBER.finditer(text)]), None)
    if found is None:
        return None
    number = Decimal((found["digits"].replace(",", "") or "0") + (found["fraction"] or ""))
    return -number if found["sign"] or found["late_sign"] else number


REWARD_FUNCTIONS: Mapping[str, RewardFunction] = {"exact_match": exact_match, "gsm8k": gsm8k}


# --------------------------------------------------------------------------------------------------- finding a function


def spec_problem(spec: str, key: str) -> Problem | None:
    """What is wrong with `spec` (a built-in name, or `path/to/file.py:function`) as far as can be told without running
    the file; None when nothing is. `key` is the configuration key that the problem will name."""
    if spec in REWARD_FUNCTIONS:
        return None
    path_text, colon, name = spec.rpartition(":")
    if not colon:
        fix = did_you_mean(spec, list(REWARD_FUNCTIONS), "built-in reward function")
        return Problem(key, spec, "is no built-in reward function", f"{fix} {EXPECTED}")
    path = Path(path_text).expanduser()
    if not path.is_file():
        where = "" if path.is_absolute() else f" (the current folder is {Path.cwd()})"
        return Problem(key, spec, f"the file {path} does not exist{where}", EXPECTED)
    try:
        module = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    except (SyntaxError, ValueError, OSError) as error:
        return Problem(key, spec, f"the file {path} cannot be read as Python: {error}", "Correct the file")
    symbols = {symbol.get_name(): symbol for symbol in module.get_symbols()}
    bound = symbols.get(name)
    if bound is None or not (bound.is_assigned() or bound.is_imported()):
        functions = [text for text, symbol in symbols.items() if symbol.is_namespace()]
        fix = did_you_mean(name, functions, "function")
        return Problem(key, spec, f"the file {path} defines no {name!r} at its top level", fix)
    return None


def resolve(spec: str, key: str = "reward.functions") -> RewardFunction:
    """The function that `spec` names; a user's file is run, once per process, with its folder importable.

    Raises:
        ConfigError: there is no such function, its file cannot be run (the cause is in the message), or it does not
            take the arguments of a `RewardFunction`.
    """
    if problem := spec_problem(spec, key):
        raise ConfigError([problem])
    if spec in REWARD_FUNCTIONS:
        return REWARD_FUNCTIONS[spec]
    path_text, _, name = spec.rpartition(":")
    path = Path(path_text).expanduser().resolve()
    try:
        function: RewardFunction = getattr(_run_file(path), name)
    except BaseException as error:  # SystemExit at import is a failure like any other
        cause = short_traceback(error, skip_files=(__file__, "<frozen"))
        raise ConfigError([Problem(key, spec, f"the file {path} cannot be imported: {cause}", "Correct it")]) from error
    if mistake := _signature_mistake(function):
        fix = "Expected def f(response, answer, *, prompt, data_source, extra) -> float | None"
        raise ConfigError([Problem(key, spec, mistake, fix)])
    return function


def _run_file(path: Path) -> ModuleType:
    """The module of the file, named by its path: a user's `math.py` must not become the `math` of everybody."""
    name = str(path)
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{path.name} does not end in .py")
    module = importlib.util.module_from_spec(module_spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _signature_mistake(function: Callable[..., object]) -> str | None:
    if not callable(function):
        return f"is a {type(function).__name__}, which cannot be called"
    if inspect.iscoroutinefunction(function):
        return "is a coroutine function, which nobody would await"
    try:
        inspect.signature(function).bind("", "", prompt="", data_source="", extra={})
    except TypeError as error:
        return f"does not take the arguments of a reward function: {error}"
    except ValueError:  # some functions written in C have no signature to look at
        return None
    return None


def short_traceback(error: BaseException, skip_files: tuple[str, ...], limit: int = 2000) -> str:
    """The error and the last four frames that led to it, without the outer frames from files whose names begin like
    one of `skip_files`; at most `limit` characters, the end kept."""
    report = traceback.TracebackException.from_exception(error)
    while report.stack and report.stack[0].filename.startswith(skip_files):
        report.stack.pop(0)
    del report.stack[:-4]
    return "".join(report.format(chain=False)).strip()[-limit:]
