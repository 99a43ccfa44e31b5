"""A check of sets of reasoning-gym, by the rules that the environment relies on.

Invariant: whatever a scorer does with a text, to run it, to hang, to end its process,
it does in a process of its own, and becomes a problem in the list.

As a program it prints the problems of the sets that are named, or of all of them::

    python -m scripts.reasoning_gym_conformance [NAME ...]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from verl_ray.agents.contract import Action, EpisodeTask, Message
from verl_ray.agents.environments.reasoning_gym import ReasoningGym, installed_package
from verl_ray.json_lines import lines_of

NUM_PROBLEMS = 3
"""Problems of each set that are looked at."""

_FLAG = "VERL_RAY_WAS_RUN"
_PROGRAM = f"__import__('os').environ.__setitem__('{_FLAG}', '1')"

WORTHLESS = (
    "",
    "I am not sure, but I think that it is (perhaps) a matter of taste.",
    _PROGRAM,
    f"[{_PROGRAM}]",
    f'eval("{_PROGRAM}")',
    "9**9**9",
    "1e999999999",
    "[" * 5000,
    "-" * 5000,
    "nan",
    "-inf",
    "[]",
    "{}",
    "null",
    "\ud800",
    "a " * 3000,
    "7" * 4000,
)
"""Texts that answer no problem."""


def conformance(names: Sequence[str], seconds_per_set: int = 120) -> list[str]:
    """Return the problems of sets, each a text that begins with the set's name.

    Each set is looked at in two processes with different hash seeds. Sets that are
    refused are looked at as well.
    """
    first = _reports(names, "1", seconds_per_set)
    second = _reports(names, "2", seconds_per_set)
    problems = []

    for name in names:
        rules = list(first[name]["problems"])
        rules += [rule for rule in second[name]["problems"] if rule not in rules]
        if first[name]["questions"] != second[name]["questions"]:
            rules.append("its questions differ between processes")
        problems += [f"{name}: {rule}" for rule in rules]
    return problems


def _reports(
    names: Sequence[str], hash_seed: str, seconds_per_set: int
) -> dict[str, dict[str, Any]]:
    """Return what a process reports of each set; it is started again when it dies."""
    reports: dict[str, dict[str, Any]] = {}
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}

    while len(reports) < len(names):
        remaining = [name for name in names if name not in reports]
        program = [sys.executable, "-m", __spec__.name, "--child"]
        child = subprocess.run(
            [*program, str(seconds_per_set), *remaining],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        lines = lines_of(child.stdout)
        reports |= {report["name"]: report for report in map(json.loads, lines)}
        if child.returncode != 0:
            # The first set without a report is the one that the process died of.
            name = next(name for name in remaining if name not in reports)
            rule = f"it ended its process ({child.returncode}) or took too long"
            reports[name] = {"problems": [rule], "questions": ""}

    return reports


def _report_to_parent(names: Sequence[str], seconds_per_set: int) -> None:
    """Write a line of JSON for each set."""
    stdout = os.fdopen(os.dup(1), "w")
    # Some sets print.
    os.dup2(2, 1)
    for name in names:
        # The signal's usual effect ends the process, also inside of a long C function.
        signal.alarm(seconds_per_set)
        report = asyncio.run(_report(name))
        signal.alarm(0)
        stdout.write(json.dumps({"name": name, **report}) + "\n")
        stdout.flush()


async def _report(name: str) -> dict[str, Any]:
    """Return the problems of a set, and a digest of its questions."""
    problems: list[str] = []
    try:
        environment = ReasoningGym(
            name, size=NUM_PROBLEMS, seed=5, allow_unsuitable=True
        )
        digest = hashlib.sha256()
        for index in range(NUM_PROBLEMS):
            question = await _reset(environment, index)
            digest.update(question.encode())
            problems += await _problems_of(environment, index)
            random.seed(len(question))
            await _reset(environment, (index + 1) % NUM_PROBLEMS)
            if await _reset(environment, index) != question:
                problems.append("its questions depend on what else is asked for")
    except Exception as error:
        rule = f"it raises {type(error).__name__}: {str(error)[:80]}"
        return {"problems": [rule], "questions": ""}
    return {
        "problems": list(dict.fromkeys(problems)),
        "questions": digest.hexdigest(),
    }


async def _reset(environment: ReasoningGym, index: int) -> str:
    begun = await environment.reset(EpisodeTask([], extra={"index": index}), seed=0)
    return str(begun.messages[-1]["content"])


async def _problems_of(environment: ReasoningGym, index: int) -> list[str]:
    """Return what is wrong with the scores of a problem."""
    problems = []
    own = environment.entry(index)["answer"]
    best = 1.0
    if own is None:
        problems.append("it has no stored answer, so its best score was not seen")
    elif await _score(environment, str(own)) != best:
        problems.append("its own answer has not the best score")

    for text in WORTHLESS:
        os.environ.pop(_FLAG, None)
        shown = repr(text[:20])
        if await _score(environment, text) == best and text != own:
            problems.append(f"the text {shown} has the best score")
        if _FLAG in os.environ:
            problems.append(f"the text {shown} is run as Python")
    return problems


async def _score(environment: ReasoningGym, answer: str) -> float:
    message: Message = {"content": f"<answer>{answer}</answer>"}
    step = await environment.step(Action([], message["content"]))
    return step.reward


def main(arguments: Sequence[str]) -> None:
    """Print the problems of sets."""
    if arguments[:1] == ["--child"]:
        _report_to_parent(arguments[2:], int(arguments[1]))
        return
    names = arguments or sorted(installed_package().factory.DATASETS)
    for problem in conformance(names):
        print(problem)
    print(f"{len(names)} sets")


if __name__ == "__main__":
    main(sys.argv[1:])
