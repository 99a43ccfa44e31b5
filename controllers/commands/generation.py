"""Options of `verl-ray generate`, and the overrides that they stand for.

Invariant: this module is light, since the command line imports it. Responses are those
of an evaluation on the training data, sampled as a run's rollouts are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from verl_ray.errors import ConfigError, Problem

SUFFIXES = (".jsonl", ".parquet")
"""Formats of the file, by its name."""

SAME_AS_ROLLOUTS = {
    "data.validation_path": "${data.train_path}",
    "evaluation.group_size": "${rollout.group_size}",
    "evaluation.temperature": "${rollout.temperature}",
    "evaluation.top_p": "${rollout.top_p}",
    "evaluation.top_k": "${rollout.top_k}",
    "evaluation.functions": "null",
    "evaluation.num_prompts": "null",
}
"""Settings of an evaluation, as `generate` has them."""

_INSTEAD = {
    "data.validation_path": "data.train_path",
    "evaluation.group_size": "--n",
    "evaluation.temperature": "rollout.temperature",
    "evaluation.top_p": "rollout.top_p",
    "evaluation.top_k": "rollout.top_k",
    "evaluation.functions": "reward.functions",
    "evaluation.deadline_s": "reward.deadline_s",
    "evaluation.samples": "--output, which has all responses",
}
"""Settings of an evaluation that `generate` does not read, and what it reads."""

_UNGRADED = {
    "reward.functions": "{default: ungraded}",
    "reward.max_failed_fraction": "1.0",
}
"""Settings with which no response has a score."""

_SAMPLING = ("evaluation.temperature", SAME_AS_ROLLOUTS["evaluation.temperature"])


@dataclass(frozen=True)
class RequestedResponses:
    """A choice of the responses that are written, and their file.

    Attributes:
        output: The file.
        choice: all = a record per response; best = the response of each prompt with the
            highest score; pairs = that one and the one with the lowest.
        min_score: The lowest score of a response that is written; None = any. Of a
            pair it is that of the better one.
        with_cut: Whether responses count that reached rollout.max_response_tokens.
        is_graded: Whether responses are scored.
        top_log_probs: Number of the most probable tokens in the place of each response
            token that are written with their log-probs; 0 for none.
        group_size: Responses to each prompt; None: rollout.group_size.
    """

    output: Path
    choice: Literal["all", "best", "pairs"] = "all"
    min_score: float | None = None
    with_cut: bool = False
    is_graded: bool = True
    top_log_probs: int = 0
    group_size: int | None = None

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> RequestedResponses:
        """Return what the options of the command say.

        Raises:
            ConfigError: They cannot be.
        """
        requested = cls(
            Path(options.output).expanduser(),
            options.keep,
            options.min_score,
            options.with_cut,
            not options.ungraded,
            options.top_logprobs,
            options.n,
        )
        problems = list(requested._problems())
        if problems:
            raise ConfigError(problems)
        return requested

    def _problems(self) -> Iterator[Problem]:
        output = str(self.output)
        if self.output.suffix not in SUFFIXES:
            rule = "the name of the file says its format"
            fix = f"Let it end in {' or '.join(SUFFIXES)}."
            yield Problem("--output", output, rule, fix)
        elif self.output.exists():
            rule = "there is such a file"
            fix = "Name another one, or remove it."
            yield Problem("--output", output, rule, fix)

        if not self.is_graded and (self.choice != "all" or self.min_score is not None):
            rule = "--keep and --min-score choose by scores"
            fix = "Leave it out, or use --keep all without --min-score."
            yield Problem("--ungraded", True, rule, fix)
        if self.group_size is not None and self.group_size < 1:
            rule = "it is a number of responses"
            yield Problem("--n", self.group_size, rule, "Use at least 1.")
        if self.min_score is not None and not math.isfinite(self.min_score):
            rule = "no score is compared with it"
            yield Problem("--min-score", self.min_score, rule, "Use a number.")
        if self.top_log_probs < 0:
            rule = "it is a number of tokens"
            yield Problem("--top-logprobs", self.top_log_probs, rule, "Use 32.")
        if self.top_log_probs and self.choice == "pairs":
            rule = "a distillation reads single responses"
            fix = "Leave it out, or use --keep all or best."
            yield Problem("--top-logprobs", self.top_log_probs, rule, fix)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only `generate` has."""
    parser.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help=f"the data file to write, {' or '.join(SUFFIXES)}",
    )
    parser.add_argument(
        "--n",
        type=int,
        metavar="N",
        help="responses to each prompt; rollout.group_size without it",
    )
    parser.add_argument(
        "--keep",
        choices=("all", "best", "pairs"),
        default="all",
        help="all = a record per response (the default); best = the response of each"
        " prompt with the highest score; pairs = that one and the one with the lowest,"
        " as chosen and rejected",
    )
    parser.add_argument(
        "--min-score",
        type=float,
        metavar="X",
        help="leave out responses with a lower score (rejection sampling); of a pair,"
        " the score of the chosen one",
    )
    parser.add_argument(
        "--with-cut",
        action="store_true",
        help="also responses that rollout.max_response_tokens has cut",
    )
    parser.add_argument(
        "--ungraded",
        action="store_true",
        help="score nothing: for prompts without answers",
    )
    parser.add_argument(
        "--top-logprobs",
        type=int,
        default=0,
        metavar="K",
        help="also the tokens, and the K most probable ones in the place of each with"
        " their log-probs, from which sft.divergence learns",
    )


def assumed_overrides(typed: Sequence[str], requested: RequestedResponses) -> list[str]:
    """Return the overrides that make an evaluation of the user's.

    Args:
        typed: The user's overrides.
        requested: What the options say.

    Raises:
        ConfigError: A setting is typed that has no use.
    """
    keys = {text.partition("=")[0].lstrip("+~") for text in typed}
    problems = []
    for key in keys:
        instead = _INSTEAD.get(key)
        if instead is not None:
            rule = "it is of evaluations, and has no use here"
            problems.append(Problem(key, None, rule, f"Use {instead}."))
        if not requested.is_graded and key.split(".")[0] == "reward":
            rule = "it would be ignored: --ungraded scores nothing"
            problems.append(Problem(key, None, rule, "Leave one of them out."))
    if problems:
        raise ConfigError(problems)

    assumed = dict(SAME_AS_ROLLOUTS)
    if requested.group_size is not None:
        assumed["evaluation.group_size"] = str(requested.group_size)
    if not requested.is_graded:
        assumed |= _UNGRADED
    return [f"{key}={value}" for key, value in assumed.items() if key not in keys]


def in_words_of_generate(error: ConfigError) -> ConfigError:
    """Return the problems of an evaluation as those of the command that was typed."""
    for problem in error.problems:
        # No user types these, so it is the task or the reward that has no such key.
        if problem.key in _UNGRADED and problem.value == _UNGRADED[problem.key]:
            rule = "it is of functions alone, and the reward is another one"
            fix = "Add reward=function."
            return ConfigError([Problem("--ungraded", True, rule, fix)])
        if (problem.key, problem.value) == _SAMPLING:
            rule = "this task generates no responses"
            fix = "Use --config-name grpo, or a configuration of such a run."
            return ConfigError([Problem("--config-name", None, rule, fix)])

    problems: dict[str, Problem] = {}
    for problem in error.problems:
        if problem.key == "data.validation_path":
            problem = replace(problem, key="data.train_path")
        # Both settings name the same files.
        problems.setdefault(str(problem), problem)
    return ConfigError(list(problems.values()))
