"""Procedural problems of the package reasoning-gym, one turn each.

Invariant: a question depends on the set, its seed and the index alone; and no text of
the policy is run as a program, raises an exception, or is worth more than its answer.

Scorers of reasoning-gym 0.1.25 were written for texts of good will. Nine pass the text
to Python's eval, by themselves or by way of sympy; some raise exceptions, or never
return. So a text is looked at before a scorer sees it, and some sets are refused.
`python -m scripts.reasoning_gym_conformance` finds what is listed here.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from verl_ray.agents.contract import Action, EpisodeTask, Observation, Step
from verl_ray.agents.environments.calculator import NotComputable, evaluate
from verl_ray.agents.environments.conversation import end_of, opening
from verl_ray.errors import DataError, InputError, InstallationError

_RUNS = "its scorer runs the policy's text as Python"
_HASH = "its questions depend on PYTHONHASHSEED, so they differ between processes"

UNSUITABLE: Mapping[str, str] = {
    "composite": "it is made of other sets; name one of them",
    "game_of_life_halting": "its scorer gives every text the best score",
    "intermediate_integration": _RUNS,
    "isomorphic_strings": _HASH,
    "polynomial_multiplication": f"{_RUNS}, and {_HASH}",
    "ransom_note": _HASH,
    "simple_integration": _RUNS,
}
"""Sets of reasoning-gym 0.1.25 that are refused, and why."""

MOST_CHARACTERS = 10_000
"""Longest answer that is scored; a longer one is worth 0."""

# 1e999999999 is short, and would be written out as an integer.
_HUGE_EXPONENT = re.compile(r"[0-9.][eE][+-]?[0-9_]{3,}")
# A comparison with one of these, such as |nan - 3| > 0.1, is false whatever is right.
_NO_NUMBER = re.compile(r"[+-]?\s*(?:nan|inf|infinity)[ij]?", re.IGNORECASE)


def _is_arithmetic(text: str) -> bool:
    """Return whether the calculator can compute a text, which bounds its value."""
    try:
        evaluate(text)
    except NotComputable:
        return False
    return True


_LITERALS = (
    ast.Expression,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Name,
    ast.UnaryOp,
    ast.USub,
    ast.Load,
)


def _is_literal(text: str) -> bool:
    """Return whether Python's eval does nothing but to build values, or to refuse."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return True
    except (MemoryError, RecursionError, ValueError):
        return False
    return all(isinstance(node, _LITERALS) for node in ast.walk(tree))


_HARMLESS: Mapping[str, Callable[[str], bool]] = {
    "binary_matrix": _is_literal,
    "countdown": _is_arithmetic,
    "n_queens": _is_literal,
    "puzzle24": _is_arithmetic,
    "spiral_matrix": _is_literal,
    "string_insertion": _is_literal,
}
"""Sets whose scorers run the text as Python -> whether a text is harmless."""


class ReasoningGym:
    """A problem of a set of reasoning-gym, which is answered in one turn.

    The record's field `index` says which problem; without it the seed does. Where the
    record's messages do not hold the question yet, it follows them.
    """

    def __init__(
        self,
        dataset: str,
        size: int = 500,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        tag: str | None = "answer",
        exact: bool = False,
        allow_unsuitable: bool = False,
    ) -> None:
        """Take the set.

        Args:
            dataset: Name of the set.
            size: Number of its problems.
            seed: Seed of the set. Problem i is made from seed + i, so two sets are
                apart only where their seeds differ by at least the size.
            config: Further settings of the set, as reasoning-gym names them.
            tag: The answer is the text of the last element of this name, as in
                `<answer>4</answer>`; the question says so. None: it is the whole text.
            exact: Whether all scores but the best one, 1, become 0. Several sets give
                every text a little, such as 0.01.
            allow_unsuitable: Whether a set of `UNSUITABLE` is taken all the same.

        Raises:
            InstallationError: reasoning-gym is not installed.
            InputError: There is no such set, it is refused, or does not take the
                settings.
        """
        if dataset in UNSUITABLE and not allow_unsuitable:
            rule = f"the set {dataset} is refused: {UNSUITABLE[dataset]}"
            raise InputError(rule, fix="Use another set.", place="ReasoningGym")

        settings = json.dumps({**(config or {}), "size": size, "seed": seed})
        self._name = dataset
        self._size = size
        self._tag = tag
        self._exact = exact
        self._set = _dataset(dataset, settings)
        self._entry: Mapping[str, Any] = {}

    def entry(self, index: int) -> Mapping[str, Any]:
        """Return a problem as reasoning-gym makes it: question, answer and metadata.

        Raises:
            DataError: The set has no such index.
        """
        if not 0 <= index < self._size:
            rule = f"index {index} is not in the set"
            expected = f"0 to {self._size - 1}"
            raise DataError(rule, expected, place=f"ReasoningGym {self._name}")
        with _randomness_of(index):
            entry: Mapping[str, Any] = self._set[index]
        return entry

    def question(self, index: int) -> str:
        """Return the text of a problem, with how to answer it."""
        text = str(self.entry(index)["question"])
        if self._tag is None:
            return text
        return (
            f"{text}\n\nEnd with your final answer, and nothing else, between"
            f" <{self._tag}> and </{self._tag}>."
        )

    def record(self, index: int) -> dict[str, Any]:
        """Return a problem as a record of a data file.

        A record without an answer is of a set that has none stored.
        """
        answer = self.entry(index)["answer"]
        record = {
            "prompt": self.question(index),
            "data_source": f"reasoning_gym/{self._name}",
            "index": index,
        }
        return record if answer is None else {**record, "answer": str(answer)}

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Make the problem.

        Raises:
            DataError: The record's index is not in the set.
        """
        index = task.extra.get("index")
        if index is None:
            index = random.Random(seed).randrange(self._size)
        elif isinstance(index, bool) or not isinstance(index, int):
            raise DataError(f"index is {index!r}", "an integer", place="ReasoningGym")

        self._entry = self.entry(index)
        question = self.question(index)
        contents = [message.get("content") for message in task.messages]
        if any(isinstance(text, str) and question in text for text in contents):
            return Observation([dict(message) for message in task.messages])
        return Observation(opening(task.messages, question))

    async def step(self, action: Action) -> Step:
        """Score the answer; the episode is over."""
        reward = self.score(self._answer_in(action.text))
        return Step(reward=reward, done=True, end=end_of(action))

    def _answer_in(self, text: str) -> str:
        if self._tag is None:
            return text.strip()
        before, closer, _ = text.rpartition(f"</{self._tag}>")
        _, opener, answer = before.rpartition(f"<{self._tag}>")
        return answer.strip() if opener and closer else ""

    def score(self, answer: str) -> float:
        """Return the score of an answer to the present problem, from 0 to 1.

        An answer is worth 0 where the scorer raises an exception, and where it is
        empty, too long, no number where it should be one, or would be run as a
        program. The stored answer is exempt from the last rules.
        """
        stored = self._entry["answer"]
        if answer != stored and not self._can_be_scored(answer):
            return 0.0

        try:
            with _randomness_of(0):
                score = float(self._set.score_answer(answer, self._entry))
        # The scorer was made for answers, and this may be any text.
        except Exception:
            return 0.0
        if not math.isfinite(score) or (self._exact and score < 1.0):
            return 0.0
        return min(max(score, 0.0), 1.0)

    def _can_be_scored(self, answer: str) -> bool:
        if not answer or len(answer) > MOST_CHARACTERS:
            return False
        if _HUGE_EXPONENT.search(answer) or _NO_NUMBER.search(answer):
            return False
        is_harmless = _HARMLESS.get(self._name)
        return is_harmless is None or is_harmless(answer)

    async def close(self) -> None:
        """Do nothing: a problem holds nothing."""


# A set is a value, see the conformance check, and some take a second to be built.
@functools.lru_cache(maxsize=16)
def _dataset(name: str, settings: str) -> Any:
    package = installed_package()
    place = f"ReasoningGym {name}"
    if name not in package.factory.DATASETS:
        raise InputError("reasoning-gym has no such set", place=place)

    try:
        with _randomness_of(0):
            return package.create_dataset(name, **json.loads(settings))
    # Its checks of settings are assertions.
    except (AssertionError, TypeError, ValueError) as error:
        rule = f"the set does not take the settings {settings}: {error}"
        raise InputError(rule, place=place) from error


def installed_package() -> ModuleType:
    """Return the package reasoning-gym.

    Raises:
        InstallationError: It is not installed.
    """
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ModuleNotFoundError as error:
        raise InstallationError(
            f"the environment ReasoningGym needs the package reasoning-gym ({error})."
            " Install it: pip install 'verl_ray[reasoning-gym]'"
        ) from error
    return reasoning_gym  # type: ignore[no-any-return, unused-ignore]


@contextlib.contextmanager
def _randomness_of(seed: int) -> Iterator[None]:
    """Seed the generators that all of a process share, and restore them afterwards."""
    state = random.getstate()
    numpy_state = np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
