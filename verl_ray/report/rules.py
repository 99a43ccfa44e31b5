"""The form of a rule, and what rules have in common.

Invariant: a rule yields evidence, which is a span of steps with its worst value; what
is said of it follows from the row of the table alone (`findings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_ray.report.causes import Finding, RunLines, Series, Severity

WINDOW = 5
"""Steps over which medians are taken, so that no single step is a finding."""


@dataclass(frozen=True)
class Evidence:
    """The steps in which a rule holds, and its worst value there."""

    seen: str
    """What was seen, in words."""
    metric: str
    step: int
    last_step: int
    num_steps: int
    value: float
    threshold: float
    setting: str | None = None
    """Key of the setting to change, where it is not that of the rule."""


@dataclass(frozen=True)
class Rule:
    """A row of the table: when something is a finding, and why."""

    kind: str
    severity: Severity
    title: str
    when: str
    """The condition, for the documents."""
    why: str
    """Why the threshold is where it is, with its source."""
    advice: str
    """What to change. A key in braces is replaced by the setting and its value, words
    in braces by the setting that the evidence names."""
    test: Callable[[RunLines], Iterator[Evidence | None]]
    unless: frozenset[str] = frozenset()
    """Kinds of the causes that say the same, and more."""

    def advice_with(self, in_words: Callable[[str], str]) -> str:
        """Return the advice, with what is in braces in these words."""
        return re.sub(r"{(.+?)}", lambda part: in_words(part[1]), self.advice)


def finding_of(run: RunLines, rule: Rule, evidence: Evidence) -> Finding:
    """Return what a rule says of the steps in which it holds."""
    keys = [part for part in re.findall(r"{(.+?)}", rule.advice) if " " not in part]
    setting = evidence.setting or keys[0]
    advice = rule.advice_with(
        lambda part: run.in_words(setting if " " in part else part)
    )
    return Finding(
        rule.kind,
        rule.severity,
        rule.title,
        f"{evidence.seen}. {advice}",
        evidence.metric,
        evidence.step,
        evidence.value,
        evidence.threshold,
        setting,
        evidence.last_step,
        evidence.num_steps,
    )


def evidence_where(
    series: Series,
    holds: npt.NDArray[np.bool_],
    metric: str,
    threshold: float,
    *,
    below: bool = False,
    setting: str | None = None,
) -> Evidence | None:
    """Return the steps of medians at which a rule holds; None if there are none."""
    if not holds.any():
        return None
    steps = series.steps[holds]
    values = series.values[holds]
    worst = float(values.min() if below else values.max())
    seen = (
        f"{metric} came to {worst:.3g}, {'below' if below else 'above'} {threshold:.3g}"
    )
    first, last = int(steps[0]), int(steps[-1])
    return Evidence(seen, metric, first, last, len(steps), worst, threshold, setting)


def evidence_above(
    run: RunLines, metric: str, threshold: float, setting: str | None = None
) -> Evidence | None:
    """Return where the median over five steps is above a threshold."""
    medians = run.series(metric).medians(WINDOW)
    holds = medians.values > threshold
    return evidence_where(medians, holds, metric, threshold, setting=setting)
