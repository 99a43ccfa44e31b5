"""Names of the metrics of held-out scores, which hold the name of a data source.

Invariant: they are put together and taken apart here. A data source may have any name,
that of a metric included: what stands around it has fixed forms, so a name is read from
both of its ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

ACCURACY = "acc"
"""Entry of a function's result that is an accuracy; its metric has the same name."""
REWARD = "reward"

_CORE, _AUX = "val-core", "val-aux"
_NAME = re.compile(
    rf"({_CORE}|{_AUX})/(.*)/({ACCURACY}|{REWARD})"
    r"/(mean@\d+|(?:pass|best|maj)@\d+/mean)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ScoreName:
    """The parts of val-{core,aux}/<data source>/{acc,reward}/<statistic>."""

    source: str
    kind: str
    """`ACCURACY` or `REWARD`."""
    statistic: str
    """What it is of the scores, such as mean@4 or best@4/mean."""
    is_core: bool = True

    @classmethod
    def of_means(cls, source: str, kind: str, group_size: int) -> Self:
        """Return the name of the mean over groups of `group_size` responses."""
        return cls(source, kind, f"mean@{group_size}")

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return the parts of a name; None if it is that of another metric."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        place, source, kind, statistic = match.groups()
        return cls(source, kind, statistic, is_core=place == _CORE)

    @property
    def group_size(self) -> int | None:
        """Responses per problem of a mean over all; None of another statistic."""
        number = self.statistic.removeprefix("mean@")
        return int(number) if number.isdigit() else None

    @property
    def aside(self) -> Self:
        """The same score, which is not the main one of its data source."""
        return replace(self, is_core=False)

    def with_statistic(self, statistic: str) -> Self:
        """Return the name of another statistic of the same scores."""
        return replace(self, statistic=statistic)

    def __str__(self) -> str:
        place = _CORE if self.is_core else _AUX
        return f"{place}/{self.source}/{self.kind}/{self.statistic}"


def label_of(name: str) -> str:
    """Return the name of a held-out metric without val-core/ or val-aux/."""
    return name.removeprefix(f"{_CORE}/").removeprefix(f"{_AUX}/")


def kind_of(name: str) -> str:
    """Return what a held-out metric measures, such as accuracy, reward or loss."""
    parts = ScoreName.parse(name)
    kind = name.rpartition("/")[2] if parts is None else parts.kind
    return "accuracy" if kind == ACCURACY else kind


def accuracy_beside(name: str) -> str | None:
    """Return the accuracy that a mean reward stands beside; None of another metric."""
    parts = ScoreName.parse(name)
    if parts is None or parts.is_core or parts.kind != REWARD:
        return None
    if parts.group_size is None:
        return None
    return str(replace(parts, kind=ACCURACY, is_core=True))


def main_names(metrics: Mapping[str, float]) -> list[str]:
    """Return the held-out metrics of an evaluation that say what it came to.

    They are the core ones, and the mean rewards that differ from the accuracy beside
    them: those that equal it say nothing more.
    """
    names = [name for name in metrics if name.startswith(f"{_CORE}/")]
    for name, value in metrics.items():
        accuracy = accuracy_beside(name)
        if accuracy is not None and accuracy in metrics and value != metrics[accuracy]:
            names.insert(names.index(accuracy) + 1, name)
    return names
