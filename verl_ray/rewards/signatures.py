"""Signatures of reward functions: which style one has, and which values it names.

A function is written in one of three styles. Its parameters tell which:

| style | recognised by                     | called with                              |
|-------|-----------------------------------|------------------------------------------|
| ours  | none of the names below           | one response: `response`, `answer`,      |
|       |                                   | `prompt`, `data_source`, `extra`,        |
|       |                                   | `num_tokens`, `finish_reason`, `step`,   |
|       |                                   | `episode_score`, `episode_end`,          |
|       |                                   | `episode_messages`,                      |
|       |                                   | `episode_conversations`,                 |
|       |                                   | `episode_output`                         |
| verl  | `solution_str`                    | one response: `data_source`,             |
|       |                                   | `solution_str`, `ground_truth`,          |
|       |                                   | `extra_info`, and those above            |
| TRL   | `completions` or `completion_ids` | the responses to one prompt, as lists:   |
|       |                                   | `prompts`, `completions`,                |
|       |                                   | `completion_ids`, `answer`,              |
|       |                                   | `data_source`, each column of the record;|
|       |                                   | and `trainer_state` with its             |
|       |                                   | `global_step`, `log_extra(column,        |
|       |                                   | values)`, `log_metric(name, value)`;     |
|       |                                   | `num_tokens`, `finish_reason`, `step`,   |
|       |                                   | and the five of episodes                |

Invariant: a function gets the values that its signature names and no others; `**kwargs`
gets all of its style (of verl's, the four). A parameter before `/` of another name is
the response if it is the first, the answer if it is the second. A coroutine function of
any style is awaited.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from verl_ray.suggest import closest, did_you_mean

OURS = (
    "response",
    "answer",
    "prompt",
    "data_source",
    "extra",
    "num_tokens",
    "finish_reason",
    "step",
    "episode_score",
    "episode_end",
    "episode_messages",
    "episode_conversations",
    "episode_output",
)
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)
RESPONSE_VALUES = ("num_tokens", "finish_reason", "step")
EPISODE_VALUES = (
    "episode_score",
    "episode_end",
    "episode_messages",
    "episode_conversations",
    "episode_output",
)
"""Values that episodes alone have."""
GIVEN = frozenset({*OURS, *VERL, *TRL})
"""Names of all values that a reward function gets in some style."""
"""What TRL's trainer does not tell, and ours does."""
ANSWERS = ("answer", "ground_truth")
"""Parameters that are the record's answer."""

LACKS = "the record has no"
"""Beginning of what a `MissingValue` says."""

_BY_PLACE = ("response", "answer")

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Style(enum.Enum):
    """How a reward function is called."""

    OURS = "ours"
    VERL = "verl"
    TRL = "TRL"


_ALL = {Style.OURS: frozenset(OURS), Style.VERL: frozenset(VERL)}
"""What `**kwargs` gets in a style; in TRL's every value."""


class SignatureMistake(Exception):
    """A function cannot be called as a reward function; the text is rule and fix.

    It may pass where code of the user's has failed that may ask another machine.
    """

    def __init__(self, rule: str, fix: str, may_pass: bool = False) -> None:
        super().__init__(rule, fix, may_pass)
        self.rule = rule
        self.fix = fix
        self.may_pass = may_pass


class MissingValue(Exception):
    """A function names a value that the record does not have."""


@dataclass(frozen=True)
class Signature:
    """The values that a reward function names."""

    style: Style
    by_place: tuple[str, ...]
    """Values of the parameters before `/`, in their order."""
    by_name: frozenset[str]
    """Values that are passed by name."""
    required: frozenset[str]
    """Values without which the function cannot be called."""
    takes_all: bool
    """Whether it has `**kwargs`."""
    is_async: bool
    """Whether its result is awaited."""
    arguments: frozenset[str] = frozenset()
    """Names that the configuration gives a value; no column of a record replaces it."""

    def names(self, *values: str) -> bool:
        """Return whether the function gets any of these values."""
        named = self.by_name.union(self.by_place)
        return self.takes_all or not named.isdisjoint(values)

    def bind(
        self, values: Mapping[str, object]
    ) -> tuple[list[object], dict[str, object]]:
        """Return the arguments by place and by name.

        Args:
            values: The values of one call that there are, by name.

        Raises:
            MissingValue: The function needs another one.
        """
        if not self.required <= values.keys():
            missing = min(self.required - values.keys())
            raise MissingValue(_missing(missing, values))

        by_place = [values[name] for name in self.by_place if name in values]
        names = self._names_but_by_place
        if self.takes_all and self.style is Style.TRL:
            names = values.keys() - self.by_place - self.arguments
        by_name = {name: values[name] for name in names if name in values}
        return by_place, by_name

    @functools.cached_property
    def _names_but_by_place(self) -> Set[str]:
        """Values that are passed by name, apart from the columns of a record."""
        names = self.by_name
        if self.takes_all:
            names |= _ALL.get(self.style, frozenset())
        return names.difference(self.by_place)


def signature_of(function: Callable[..., object]) -> Signature:
    """Return the signature of a reward function.

    Raises:
        SignatureMistake: It cannot be called as one.
    """
    if not callable(function):
        rule = f"is a {type(function).__name__}, which cannot be called"
        raise SignatureMistake(rule, "Expected a function or a class.")
    try:
        parameters = inspect.signature(function).parameters
    # Some functions written in C have no signature to look at.
    except ValueError:
        needed = frozenset(_BY_PLACE)
        return Signature(
            Style.OURS, _BY_PLACE, frozenset(), needed, takes_all=False, is_async=False
        )

    arguments = _arguments_of(function)
    named = [
        parameter
        for name, parameter in parameters.items()
        if parameter.kind not in _STARRED and name not in arguments
    ]
    style = _style_of({parameter.name for parameter in named})
    known = _known(style)
    by_place: list[str] = []
    by_name: set[str] = set()
    required: set[str] = set()
    for place, parameter in enumerate(named):
        name = parameter.name
        is_positional = parameter.kind is _POSITIONAL
        if is_positional and name not in known and place < len(_BY_PLACE):
            name = _BY_PLACE[place]

        needed_here = parameter.default is inspect.Parameter.empty
        # Every name may be a column of the record in TRL's style.
        if name not in known and style is not Style.TRL:
            if needed_here:
                raise _unknown_parameter(name, known)
            continue
        if is_positional:
            by_place.append(name)
        else:
            by_name.add(name)
        if needed_here:
            required.add(name)

    kinds = {parameter.kind for parameter in parameters.values()}
    return Signature(
        style,
        tuple(by_place),
        frozenset(by_name),
        frozenset(required),
        inspect.Parameter.VAR_KEYWORD in kinds,
        _is_async(function),
        arguments,
    )


def _arguments_of(function: Callable[..., object]) -> frozenset[str]:
    """Return the names that a function has values of already."""
    if isinstance(function, functools.partial):
        return frozenset(function.keywords)
    return frozenset()


def _style_of(names: set[str]) -> Style:
    if "solution_str" in names:
        return Style.VERL
    if "completions" in names or "completion_ids" in names:
        return Style.TRL
    return Style.OURS


def _known(style: Style) -> tuple[str, ...]:
    """Return the values that a function of this style may name."""
    if style is Style.VERL:
        return (*VERL, *OURS)
    if style is Style.TRL:
        return TRL
    return OURS


def _is_async(function: Callable[..., object]) -> bool:
    # An instance of a class is called through its class.
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _unknown_parameter(name: str, known: tuple[str, ...]) -> SignatureMistake:
    rule = f"its parameter {name!r} has no default and is none that a reward gets"
    suggestion = f"There is {', '.join(known)}."
    if closest(name, known):
        suggestion = did_you_mean(name, known, "parameter")
    fix = f"{suggestion} verl's solution_str and TRL's completions are known, too."
    return SignatureMistake(rule, fix)


def _missing(name: str, values: Mapping[str, object]) -> str:
    """Return what the record lacks, and what to change, in two sentences."""
    if name in EPISODE_VALUES:
        return (
            f"the response is no episode, so there is no {name}. Set"
            " agent.environments.default=my_env.py:NAME."
        )
    if name in ANSWERS:
        return (
            f"{LACKS} answer, but the function has a parameter {name!r}. Set"
            " data.columns={answer: NAME} to the column of the answers, or give the"
            f" parameter a default: {name}=None."
        )
    columns = ", ".join(sorted(set(values) - {*TRL, *RESPONSE_VALUES})) or "none"
    return (
        f"{LACKS} column {name!r}, which the function names; its columns are {columns}."
        " Name one of them, or give the parameter a default."
    )
