"""The end of a run."""

import io

from verl_ray.algorithms.intervals import Interval
from verl_ray.tracking.base import Sample
from verl_ray.tracking.printed_report import HeldOut, Report, show

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


def test_a_reward_stands_below_its_accuracy_where_it_differs() -> None:
    reward = "val-aux/sums/reward/mean@1"

    def names(rewards: float) -> list[str]:
        after = HeldOut(200, {"val-aux/dropped": 1.0, reward: rewards, SUMS: 0.755})
        text = shown(before=HeldOut(0, {reward: 0.41, SUMS: 0.41}), after=after)
        return [row[0] for row in rows(text) if row and row[0].startswith("val-")]

    assert names(0.5) == [SUMS, reward, "val-aux/dropped"]
    assert names(0.755) == [SUMS, "val-aux/dropped"]
    text = shown(summary="Held-out \x1b[2J rose " + "by a lot " * 20)
    assert "\x1b" not in text and " ".join(text.split()).count("by a lot") == 20
    assert max(map(len, text.splitlines()[:6])) <= 80


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


def test_a_name_is_broken_at_its_slashes_and_numbers_never() -> None:
    name = "val-core/arithmetic/acc/mean@1"
    interval = Interval(0.41234, 0.37123, 0.45123, 500)
    sides = [HeldOut(step, {name: 0.41234}, {name: interval}) for step in (0, 1000)]
    change = Interval(-0.34567, -0.3871, -0.30001, 500)
    text = shown(before=sides[0], after=sides[1], changes={name: change})
    assert ["val-core/arithmetic/acc/", "0.4123", "0.4123", "+0"] in rows(text)
    numbers = ["[0.371,", "0.451]", "[0.371,", "0.451]", "[-0.387,", "-0.3]"]
    assert ["mean@1", *numbers] in rows(text)


def test_rows_that_say_nothing_are_left_out() -> None:
    counts = {
        "val-aux/num_prompts": 16.0,
        "val-aux/failed_scores": 0.0,
        "val-aux/dropped": 0.0,
    }
    lengths = {f"val-aux/sums/response_length/{kind}": 3.0 for kind in ("mean", "max")}
    counts |= {**lengths, "val-aux/sums/response_length/clip_ratio": 0.0}
    ends = [f"val-aux/sums/episode/ends/{end}" for end in ("aborted", "max_turns")]
    before = HeldOut(0, counts | dict.fromkeys(ends, 0.0))
    longer = {"val-aux/sums/response_length/max": 4.0}
    after = HeldOut(2, {SUMS: 1.0, **counts, **longer, ends[0]: 0.0, ends[1]: 0.25})
    text = shown(before=before, after=after)
    silent = ("num_prompts", "failed_scores", "dropped", "clip_ratio", "length/mean")
    assert not any(name in text for name in silent) and "response_length/max" in text
    assert "aborted" not in text and "max_turns" in text
    failed = shown(after=HeldOut(2, counts | {"val-aux/failed_scores": 3.0}))
    assert "failed_scores" in failed


def test_a_single_evaluation_has_one_column() -> None:
    alone = HeldOut(7, {SUMS: 0.5, "val-aux/num_prompts": 16.0})
    text = shown(before=None, after=alone)
    assert [SUMS, "0.5"] in rows(text) and ["metric", "step", "7"] in [
        [word.strip("┃") for word in cells if word != "┃"] for cells in rows(text)
    ]
    assert "before" not in text and "change" not in text and "num_prompts" in text


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
