"""One sentence on a run: what changed, by how much, and where the time went.

Invariant: a pure function of the record. A held-out change is called one where its 95 %
interval does not hold 0, and noise where it does. Nothing is said of noise without an
interval, of few problems, or of the steps of the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_ray.algorithms.intervals import Interval
from verl_ray.report.lines import RunLines
from verl_ray.report.record import HeldOutCourse
from verl_ray.tracking.block import duration_text, held_out_label

_MOST_METRICS = 2
_MOST_PHASES = 2
_SHARE = 0.05
"""Smallest share of the time that is worth a word."""

_LEARNED = {
    "critic/rewards/mean": "the reward in training",
    "train/loss": "the loss in training",
    "reward/loss": "the loss in training",
}
"""Metrics of the steps, of which the first one speaks for a run without evaluations."""

_WINDOW = 5
"""Most steps of the means at the beginning and at the end."""

FEWEST_PROBLEMS = 30
"""Fewest problems of a verdict: the bootstrap of fewer is too narrow, so that it calls
a quarter of normal changes around 0 beyond noise at 3 problems, and a ninth at 8."""

_TINY = 1e-9
"""Changes that are no larger are those of rounding."""


def is_beyond_noise(change: Interval) -> bool:
    """Whether the interval of a change on enough problems does not hold 0."""
    return _has_verdict(change) and (change.low > 0 or change.high < 0)


def _has_verdict(change: Interval) -> bool:
    return change.is_telling and change.prompts >= FEWEST_PROBLEMS


def summary(
    run: RunLines,
    courses: Sequence[HeldOutCourse],
    changes: Mapping[str, Interval],
    durations: Mapping[str, float],
    total_s: float | None,
) -> str:
    """Return the sentence; empty where nothing is recorded.

    Args:
        run: The record.
        courses: The main held-out metrics.
        changes: Paired differences of the last evaluation to the first one, by metric.
        durations: Seconds of each phase in words, the longest first.
        total_s: Wall time of the run in seconds; None if it is not known.
    """
    # Group metrics such as best@N follow from the same responses.
    singles = [course for course in courses if not course.metric.endswith("/mean")]
    parts = [
        _course_in_words(course, changes.get(course.metric))
        for course in singles[:_MOST_METRICS]
    ]
    if parts:
        parts[0] = f"held-out {parts[0]}"
    if not any(len(course.values) > 1 for course in singles[:1]):
        parts += _training_in_words(run)
    where = _time_in_words(durations, total_s)
    sentence = "; ".join([*parts, *where])
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def _course_in_words(course: HeldOutCourse, change: Interval | None) -> str:
    first, last = min(course.values), max(course.values)
    name, value = held_out_label(course.metric), course.values[last]
    if first == last:
        return f"{name} is {value:.4g} at step {last}"
    before = course.values[first]
    places = f"at step {first}", f"at step {last}"
    moved = _move(before, value, places, change)
    verdict = "" if change is None else _verdict(change, course.should_fall)
    return f"{name} {moved}{verdict}"


def _move(
    before: float, after: float, places: tuple[str, str], paired: Interval | None = None
) -> str:
    """Return how a number changed."""
    shift = after - before
    change = shift if paired is None else paired.mean
    if before == after and abs(change) <= _TINY:
        return f"is {after:.4g} {places[1]}, as {places[0]}"
    verb = "rose" if shift > 0 else "fell"
    if shift * change <= 0:
        # Other problems make the means, so these may move the other way.
        verb = "went"
    text = f"{verb} from {before:.4g} {places[0]} to {after:.4g} {places[1]}"
    if paired is None:
        return f"{text} ({change:+.3g})"
    bounds = ""
    if _has_verdict(paired):
        bounds = f", 95 % interval {paired.low:+.3g} to {paired.high:+.3g}"
    return f"{text} ({change:+.3g} on the same {paired.prompts} problems{bounds})"


def _verdict(change: Interval, should_fall: bool) -> str:
    """Return whether a paired change is beyond noise; empty where nobody can say."""
    if not _has_verdict(change):
        return ""
    if not is_beyond_noise(change):
        return ", within noise"
    is_better = (change.mean < 0) == should_fall
    return f", {'better' if is_better else 'worse'}, beyond noise"


def _training_in_words(run: RunLines) -> list[str]:
    """Return how the reward or the loss of the steps changed; nothing for none."""
    for metric, words in _LEARNED.items():
        series = run.series(metric)
        count = min(_WINDOW, len(series) // 2)
        if not count:
            continue
        before = float(series.values[:count].mean())
        after = float(series.values[-count:].mean())
        steps = f"{count} steps" if count > 1 else "step"
        places = f"in the first {steps}", f"in the last {steps}"
        return [f"{words} {_move(before, after, places)}"]
    return []


def _time_in_words(durations: Mapping[str, float], total_s: float | None) -> list[str]:
    """Return which phases took most of the time; nothing where none is known."""
    spent_s = total_s or sum(durations.values())
    if not spent_s or not durations:
        return []
    long = [item for item in durations.items() if item[1] >= _SHARE * spent_s]
    longest = long[:_MOST_PHASES] or list(durations.items())[:1]
    shares = [f"{seconds / spent_s:.0%}" for _, seconds in longest]
    shares[0] += f" of {duration_text(spent_s)} went"
    words = [
        f"{share} into {name}" for share, (name, _) in zip(shares, longest, strict=True)
    ]
    return [" and ".join(words)]
