"""The end of a run."""

import io

from verl_ray.algorithms.intervals import Interval
from verl_ray.tracking.base import Sample
from verl_ray.tracking.report import HeldOut, Report, show

SUMS = "val-core/sums/acc/mean@1"


def shown(**changes: object) -> str:
    stream = io.StringIO()
    told: dict[str, object] = {
        "title": "first: finished after 200 steps",
        "total_s": 200.0,
        "durations": {
            "generation": 150.0,
            "evaluation": 20.0,
            **dict.fromkeys(("values", "reference", "scores"), 5.0),
            "advantages": 0.1,
        },
        "before": HeldOut(0, {SUMS: 0.41}),
        "after": HeldOut(200, {SUMS: 0.755, "new": 2.0}),
        "outputs": {"metrics": "/a/very/long/path" * 10},
    }
    show(Report(**{**told, **changes}), stream, width=80)  # type: ignore[arg-type]
    return stream.getvalue()


def rows(text: str) -> list[list[str]]:
    return [line.replace("│", " ").split() for line in text.splitlines()]


def test_before_after_and_change() -> None:
    text = shown()
    assert [SUMS, "0.41", "0.755", "+0.345"] in rows(text)
    assert ["new", "-", "2", "-"] in rows(text)
    assert "first: finished after 200 steps" in text.splitlines()
    assert "interval" not in text


def test_intervals_stand_below_their_numbers_within_80_columns() -> None:
    text = shown(
        before=HeldOut(0, {SUMS: 0.41}, {SUMS: Interval(0.41, 0.37, 0.45, 500)}),
        after=HeldOut(200, {SUMS: 0.755}, {SUMS: Interval(0.755, 0.72, 0.79, 500)}),
        changes={SUMS: Interval(0.345, 0.3, 0.3871, 500)},
    )
    ranges = ["[0.37,", "0.45]", "[0.72,", "0.79]", "[+0.3,", "+0.387]"]
    assert ranges in rows(text)
    same = Interval(0.41, 0.41, 0.41, 500)
    assert "[" not in shown(before=HeldOut(0, {SUMS: 0.41}, {SUMS: same}))
    table = [line for line in text.splitlines() if "/a/very/" not in line]
    assert max(map(len, table)) <= 80
    assert SUMS in text and "with 95 % intervals" in text


def test_where_the_time_went() -> None:
    text = shown()
    assert "wall time: 3m20s" in text
    assert ["generation", "75%", "2m30s"] in rows(text)
    assert ["evaluation", "10%", "20s"] in rows(text)
    assert "advantages" not in text  # a share that is next to nothing


def test_the_best_step_and_the_warnings() -> None:
    text = shown(best="step 190", warnings=["12 scores failed"])
    assert {"best: step 190", "warning: 12 scores failed"} <= set(text.splitlines())


def test_paths_stay_on_one_line_to_be_copied() -> None:
    assert "metrics: " + "/a/very/long/path" * 10 in shown().splitlines()


def test_rollouts_are_shown_and_not_obeyed() -> None:
    row = Sample(
        "[bold]1+1=",
        "[/red]\x1b[31m2\a",
        "[2]",
        data_source="sums",
        score=float("nan"),
        truncated=True,
    )
    text = shown(samples=[row])
    for part in (
        "[bold]1+1=",
        "[/red]",
        r"\x1b[31m2",
        r"\x07",
        "[2]",
        "nan",
        "cut at the",
    ):
        assert part in text.replace("\n", "")
    assert "\x1b" not in text and "\a" not in text


def test_a_long_response_is_cut() -> None:
    text = shown(samples=[Sample("p", "Z" * 1000, "a", "sums", 1.0, False)])
    assert text.count("Z") == 240 and "…" in text
