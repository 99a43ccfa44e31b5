"""The catalogue of built-in reward functions.

Invariant: one declaration says everything about a function: the object that is called,
whether its mean is an accuracy, what reads the answers that it compares, and the
package that it needs beyond those that are always installed.

Answers are what responses vote with in `maj@k`: two responses with the same answer have
equal texts. The answers of `math` are texts, too, so 1/2 and 0.5 are two answers. What
reads them is what the functions compare by, so responses with the same answer to a
problem have the same score but for the form that `gsm8k_strict` wants.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_ray.errors import Problem
from verl_ray.rewards.functions import (
    Bleu,
    Format,
    JsonSchema,
    Rouge,
    chosen_letter,
    exact_match,
    f1,
    gsm8k,
    gsm8k_strict,
    marked_or_final_number_text,
    multiple_choice,
    number_text,
)
from verl_ray.rewards.math_answers import Math, spelled_answer
from verl_ray.settings.function_specs import parts_of

BY_DATA_SOURCE = "by_data_source"
"""Name of the function that chooses another one by the data source of a record."""

PRED = "pred"
"""Entry of a held-out score that holds the answer. A user's function, as verl's
functions do, returns its own under this name."""

Reader = Callable[[str], str | None]
"""Returns the answer in a response; None where it has none."""


@dataclass(frozen=True)
class Package:
    """A package that a function needs, and that is not always installed."""

    module: str
    name: str
    """Name in the package index."""


@dataclass(frozen=True)
class BuiltIn:
    """Declaration of a built-in function."""

    target: Callable[..., Any]
    """The function, or the class whose instances are called."""
    about: str
    """What it gives a response, in a few words."""
    arguments: tuple[str, ...] = ()
    """Names of the arguments that the class is built with."""
    is_accuracy: bool = True
    """Whether a score is 1.0 for a right response and 0.0 for a wrong one, so that the
    mean is an accuracy."""
    compares: bool = True
    """Whether it compares a response with the record's answer, which is right then."""
    is_fast: bool = True
    """Whether a score takes microseconds, so that all answers can be tried."""
    reader: Reader | None = None
    """What reads the answers that it compares; None where it has none."""
    package: Package | None = None


def by_data_source(response: str, answer: str, data_source: str) -> float:
    """Grade as the usual function of a data source does, see `usual_function`."""
    return _built(usual_function(data_source))(response, answer)


def environment(episode_score: float) -> float:
    """Return what the environment paid for the episode."""
    return episode_score


def ungraded(response: str) -> None:
    """Return no score."""


BUILT_IN: Mapping[str, BuiltIn] = {
    BY_DATA_SOURCE: BuiltIn(
        by_data_source,
        "`gsm8k`, `math` or `exact_match`, as the data source usually has it",
    ),
    "exact_match": BuiltIn(
        exact_match, "1 for the answer's text, else 0", reader=str.strip
    ),
    "gsm8k": BuiltIn(
        gsm8k, "1 if the last number is the answer's, else 0", reader=number_text
    ),
    "gsm8k_strict": BuiltIn(
        gsm8k_strict,
        "1 if the number right behind `#### ` is the answer's, else 0",
        reader=marked_or_final_number_text,
    ),
    "math": BuiltIn(
        Math,
        "1 if the last `\\boxed{}` or `Answer:` equals the answer, else 0",
        is_fast=False,
        reader=spelled_answer,
        package=Package("math_verify", "math-verify"),
    ),
    "multiple_choice": BuiltIn(
        multiple_choice, "1 for the answer's letter, else 0", reader=chosen_letter
    ),
    "format": BuiltIn(
        Format,
        "1 if the response consists of these tags or matches the pattern, else 0",
        arguments=("tags", "first_tag_in_prompt", "pattern"),
        is_accuracy=False,
        compares=False,
    ),
    "json_schema": BuiltIn(
        JsonSchema,
        "1 if the response, or its last fenced block, is valid JSON under a schema, by"
        " default the answer; else 0",
        arguments=("schema", "schema_path"),
        is_accuracy=False,
        compares=False,
    ),
    "environment": BuiltIn(
        environment,
        "what the environment of an episode paid",
        is_accuracy=False,
        compares=False,
    ),
    "ungraded": BuiltIn(
        ungraded,
        "no score, for `generate --ungraded`",
        is_accuracy=False,
        compares=False,
    ),
    "f1": BuiltIn(
        f1, "F1 of the words shared with the answer, as in SQuAD", is_accuracy=False
    ),
    "rouge": BuiltIn(
        Rouge,
        "ROUGE-L or another kind, the F measure",
        arguments=("kind", "stem"),
        is_accuracy=False,
        package=Package("rouge_score", "rouge-score"),
    ),
    "bleu": BuiltIn(
        Bleu,
        "BLEU of the response as one sentence, from 0 to 1",
        arguments=("tokenize",),
        is_accuracy=False,
        package=Package("sacrebleu", "sacrebleu"),
    ),
}
"""Name -> declaration."""

_READERS = {built_in.target: built_in.reader for built_in in BUILT_IN.values()}

_USUAL = {
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "word_problems": "gsm8k",
    # The names of verl's data sets.
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math",
    "math_dapo": "math",
    "math_dapo_reasoning": "math",
}


def usual_function(data_source: str) -> str:
    """Return the name of the built-in function that usually grades a data source.

    It is gsm8k for GSM8K and word problems in its form, math for MATH, DAPO's problems
    and every data source whose name begins with aime; else exact_match.
    """
    if data_source.startswith("aime"):
        return "math"
    return _USUAL.get(data_source, "exact_match")


def graded_by(spec: str, data_source: str) -> str:
    """Return the spec of the function that grades a data source.

    It is the same spec, unless that names `by_data_source`.
    """
    return usual_function(data_source) if spec == BY_DATA_SOURCE else spec


def built_in_of(spec: str) -> BuiltIn | None:
    """Return the declaration of a built-in function; None for a user's function."""
    return BUILT_IN.get(parts_of(spec)[0])


def answer_in(
    function: Callable[..., object], response: str, data_source: str
) -> str | None:
    """Return the answer that a reward function reads; None where there is none."""
    if function is by_data_source:
        function = BUILT_IN[usual_function(data_source)].target
    # An instance of a user's class may have no hash.
    is_whole = inspect.isfunction(function) or inspect.isclass(function)
    reader = _READERS.get(function if is_whole else type(function))
    return None if reader is None else reader(response)


def is_accuracy(spec: str) -> bool:
    """Return whether the mean of a function's scores is known to be an accuracy."""
    built_in = built_in_of(spec)
    return built_in is not None and built_in.is_accuracy


def package_problem(spec: str, key: str) -> Problem | None:
    """Return a problem if the package of a built-in function is not installed.

    Args:
        spec: The spec of the function.
        key: The configuration key that the problem will name.
    """
    name, _ = parts_of(spec)
    package = BUILT_IN[name].package
    if package is None or importlib.util.find_spec(package.module) is not None:
        return None
    rule = f"{name} needs the package {package.name}, which is not installed"
    fix = f"Install it: pip install {package.name}. Or name another function."
    return Problem(key, spec, rule, fix)


@functools.cache
def _built(name: str) -> Callable[..., float]:
    """Return a function that is built without arguments, once per process."""
    target = BUILT_IN[name].target
    return target() if isinstance(target, type) else target
