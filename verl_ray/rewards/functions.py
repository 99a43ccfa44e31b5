"""Reward functions: their signature, the built-in ones, and the import of a user's.

Invariant: a built-in function returns 1.0 or 0.0, by fixed rules that do not depend on
the data set. Deliberately not here: where functions run (`pool.py`), and models that
score.
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

from verl_ray.config.suggest import did_you_mean, either
from verl_ray.errors import ConfigError, DataError, Problem
from verl_ray.paths import path_suggestion

EXPECTED = "Expected the name of a built-in function or path/to/file.py:function."

_ARGUMENTS = "(response, answer, *, prompt, data_source, extra) -> float | None"

_FRAMES = 4  # innermost frames of a traceback that are worth showing


class RewardFunction(Protocol):
    """Signature of every reward function, built in or a user's."""

    def __call__(
        self,
        response: str,
        answer: str,
        /,
        *,
        prompt: str,
        data_source: str,
        extra: dict[str, object],
    ) -> float | None:
        """Return the score of `response`, or None to leave it without a score.

        Args:
            response: The decoded response, without special tokens.
            answer: The record's `answer`.
            prompt: The record's `prompt`; for chat messages their contents, with empty
                lines between.
            data_source: The record's `data_source`.
            extra: The object in the record's `extra`.
        """
        ...


# -------------------------------------------------------------------- the built-in ones


def exact_match(
    response: str,
    answer: str,
    /,
    *,
    prompt: str,
    data_source: str,
    extra: dict[str, object],
) -> float:
    """Return 1.0 when the texts are equal but for the white space around them."""
    return float(response.strip() == answer.strip())


def gsm8k(
    response: str,
    answer: str,
    /,
    *,
    prompt: str,
    data_source: str,
    extra: dict[str, object],
) -> float:
    """Return 1.0 when the final numbers of the texts are equal, see `final_number`.

    They are compared as numbers: "1,234.50" and "1234.5" are equal. A response without
    a number scores 0.0.

    Raises:
        DataError: the answer has no number.
    """
    expected = final_number(answer)
    if expected is None:
        raise DataError(
            f"answer {answer[-80:]!r} of data source {data_source!r} has no number, so"
            " gsm8k cannot grade"
        )
    return float(final_number(response) == expected)


_NUMBER = re.compile(
    # A minus sign; not the operator in `7-3` or `7 - 3`, nor the hyphen in `mid-30`.
    r"(?P<sign>(?<![\w)])-(?!\s))?"
    r"[$€£]?\s?(?P<late_sign>(?<=[$€£])-)?"  # -$5 and $-5
    # 1,234,567 or 1234567 or .5
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))"
    r"(?P<fraction>\.[0-9]+)?"
)


def final_number(text: str) -> Decimal | None:
    """Return the number behind the last `####`, else the last number of `text`.

    Currency and percent signs, commas between groups of three digits, and a full stop
    at the end are not part of a number; exponents and fractions (`3/4`) are not read as
    one number. A text without a number has None.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    _, mark, tail = text.rpartition("####")

    match = _NUMBER.search(tail) if mark else None
    if match is None:
        matches = list(_NUMBER.finditer(text))
        if not matches:
            return None
        match = matches[-1]

    # ".5" has no digits before the point
    digits = match["digits"].replace(",", "") or "0"
    fraction = match["fraction"] or ""
    number = Decimal(digits + fraction)
    if match["sign"] or match["late_sign"]:
        return -number
    return number


REWARD_FUNCTIONS: Mapping[str, RewardFunction] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
}


# ------------------------------------------------------------------- finding a function


def spec_problem(spec: str, key: str) -> Problem | None:
    """Return what is wrong with `spec`, without running the file that it names.

    Args:
        spec: A built-in name, or `path/to/file.py:function`.
        key: The configuration key that the problem will name.
    """
    if spec in REWARD_FUNCTIONS:
        return None

    path_text, colon, name = spec.rpartition(":")
    if not colon and not spec.endswith(".py"):
        fix = did_you_mean(spec, list(REWARD_FUNCTIONS), "built-in reward function")
        return Problem(key, spec, "is no built-in reward function", f"{fix} {EXPECTED}")

    # A file without a function is a path as a whole.
    path = Path(path_text if colon else spec).expanduser()
    if not path.is_file():
        where = "" if path.is_absolute() else f" (the current folder is {Path.cwd()})"
        rule = f"the file {path} does not exist{where}"
        if colon and path.with_name(f"{path.name}.py").is_file():
            return Problem(key, spec, rule, f"Did you mean {path_text}.py:{name}?")
        return Problem(key, spec, rule, path_suggestion(path, EXPECTED))

    # The symbol table shows the names of a file without running it.
    try:
        module = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    except (SyntaxError, ValueError, OSError) as error:
        rule = f"the file {path} cannot be read as Python: {error}"
        return Problem(key, spec, rule, "Correct the file.")

    symbols = {symbol.get_name(): symbol for symbol in module.get_symbols()}
    functions = [text for text, other in symbols.items() if other.is_namespace()]
    if not colon:
        specs = [f"{spec}:{text}" for text in functions]
        fix = f"Did you mean {either(specs)}?" if specs else EXPECTED
        return Problem(key, spec, "names a file and no function in it", fix)

    symbol = symbols.get(name)
    if symbol is None or not (symbol.is_assigned() or symbol.is_imported()):
        rule = f"the file {path} defines no {name!r} at its top level"
        fix = f"Define it there: def {name}{_ARGUMENTS}."
        if functions:
            fix = did_you_mean(name, functions, "function")
        return Problem(key, spec, rule, fix)
    return None


def resolve(spec: str, key: str = "reward.functions") -> RewardFunction:
    """Return the function that `spec` names.

    A user's file is run, once per process, with its folder importable.

    Raises:
        ConfigError: there is no such function, its file cannot be run (the cause is in
            the message), or it does not take the arguments of a `RewardFunction`.
    """
    problem = spec_problem(spec, key)
    if problem is not None:
        raise ConfigError([problem])
    if spec in REWARD_FUNCTIONS:
        return REWARD_FUNCTIONS[spec]

    path_text, _, name = spec.rpartition(":")
    path = Path(path_text).expanduser().resolve()
    try:
        function: RewardFunction = getattr(_run_file(path), name)
    # SystemExit at import is a failure like any other.
    except BaseException as error:
        cause = last_cause(short_traceback(error, skip_files=(__file__, "<frozen")))
        rule = f"the file {path} cannot be imported: {cause}"
        raise ConfigError([Problem(key, spec, rule, "Correct it.")]) from error

    mistake = _signature_mistake(function)
    if mistake is not None:
        fix = f"Expected def {name}{_ARGUMENTS}."
        raise ConfigError([Problem(key, spec, mistake, fix)])
    return function


def _run_file(path: Path) -> ModuleType:
    """Import the file as a module whose name is its path.

    A user's `math.py` must not become the `math` of everybody.
    """
    name = str(path)
    if name in sys.modules:
        return sys.modules[name]

    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{path.name} does not end in .py")
    module = importlib.util.module_from_spec(module_spec)
    # At the end of the path, where no file of the user hides another module.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        # A module that is half run must not be found by the next import.
        del sys.modules[name]
        raise
    return module


def _signature_mistake(function: Callable[..., object]) -> str | None:
    if not callable(function):
        return f"is a {type(function).__name__}, which cannot be called"
    if inspect.iscoroutinefunction(function):
        return "is a coroutine function, which would not be awaited"
    try:
        inspect.signature(function).bind("", "", prompt="", data_source="", extra={})
    except TypeError as error:
        return f"does not take the arguments of a reward function: {error}"
    # Some functions written in C have no signature to look at.
    except ValueError:
        return None
    return None


def short_traceback(
    error: BaseException, skip_files: tuple[str, ...], limit: int = 2000
) -> str:
    """Return the error and the innermost frames that led to it, as text.

    Args:
        skip_files: Outer frames are left out while their files' names begin with one of
            these.
        limit: The text is at most this many characters, from its end.
    """
    report = traceback.TracebackException.from_exception(error)
    # Ends at the first frame that is not ours.
    while report.stack and report.stack[0].filename.startswith(skip_files):
        report.stack.pop(0)
    del report.stack[:-_FRAMES]
    return "".join(report.format(chain=False)).strip()[-limit:]


def last_cause(detail: str) -> str:
    """Return a failed score's detail in one line, with the place of a raised error.

    Args:
        detail: A sentence, or the text of a traceback.
    """
    lines = detail.strip().splitlines() or ["no reason was given"]
    places = re.findall(r'File "([^"]+)", line (\d+)', detail)
    if not places:
        return lines[-1]
    path, line = places[-1]
    return f"{lines[-1]} ({path}, line {line})"
