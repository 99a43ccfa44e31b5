"""Flags, rounds and the printing of figures, which all suites share.

Invariant: stdout holds the figures of a suite and nothing else, as JSON or as a table
in Markdown. Progress goes to stderr. This module loads no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from statistics import median

from scripts.bench.inputs import FOLDER
from verl_ray.rollout.vllm_core import installed_version

MIB = 1 << 20


class Flags(argparse.ArgumentParser):
    """The flags of a suite; the help of each ends with what it is by default."""

    def __init__(self, suite: str, about: str) -> None:
        program = f"python -m scripts.bench {suite}"
        super().__init__(prog=program, description=about, allow_abbrev=False)

    def number(
        self, flag: str, default: int | None, about: str, shown: str | None = None
    ) -> None:
        """Add a flag whose value is a number; `shown` describes the default."""
        shown = str(default) if shown is None else shown
        self.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{about} ({shown})"
        )

    def choice(
        self, flag: str, choices: Iterable[str], about: str, default: str | None = None
    ) -> None:
        """Add a flag whose value is a name; without a default it is the first one."""
        names = list(choices)
        default = names[0] if default is None else default
        self.add_argument(
            flag, choices=names, default=default, help=f"{about} ({default})"
        )

    def only(self, names: Sequence[str], about: str) -> None:
        """Add the flag `--only`, which takes some names of all."""
        self.add_argument("--only", nargs="+", choices=names, help=f"{about} (all)")

    def folder(self) -> None:
        """Add the flag `--dir`."""
        about = f"where its inputs are kept ({FOLDER})"
        self.add_argument("--dir", default=FOLDER, help=about)

    def table(self) -> None:
        """Add the flag `--table`."""
        about = "a table in Markdown in place of JSON"
        self.add_argument("--table", action="store_true", help=about)

    def overrides(self) -> None:
        """Add overrides of the configuration."""
        about = "overrides of the configuration"
        self.add_argument("overrides", nargs="*", metavar="key=value", help=about)


def progress(text: str) -> None:
    """Tell the user who waits how far a suite is."""
    print(text, file=sys.stderr, flush=True)


def rounds(count: int, about: str) -> Iterator[int]:
    """Yield 0 for a round that only warms up, then 1 to `count`.

    In a round all sides take turns, so that a slow minute of the machine slows all.
    """
    for number in range(count + 1):
        yield number
        progress(f"{about} {number} of {count}")


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each entry of the first over all, to 0.1 ms."""
    return {name: round(median(step[name] for step in steps), 4) for name in steps[0]}


def shown_versions() -> dict[str, str | None]:
    """Return the versions on which the figures of a suite depend."""
    versions = {name: version(name) for name in ("torch", "ray", "transformers")}
    return {
        "python": platform.python_version(),
        "vllm": installed_version(),
        **versions,
    }


def circumstances() -> dict[str, object]:
    """Return what all figures depend on: cores and versions."""
    return {"cores": len(os.sched_getaffinity(0)), "versions": shown_versions()}


def print_json(figures: object) -> None:
    """Print the figures of a suite."""
    print(json.dumps(figures, indent=2))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    head, rule, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, rule.replace(" ", ""), *body])
