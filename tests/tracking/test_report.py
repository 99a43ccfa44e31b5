"""The end of a run."""

import io

from verl_ray.tracking.base import Sample
from verl_ray.tracking.report import report


def shown(**changes: object) -> str:
    stream = io.StringIO()
    told: dict[str, object] = {
        "before": {"val-core/sums/acc/mean@1": 0.41},
        "after": {"val-core/sums/acc/mean@1": 0.755, "new": 2.0},
        "samples": [],
        "outputs": {"metrics": "/a/very/long/path" * 10},
        "next_command": "verl-ray train --config-name grpo",
    }
    report(**{**told, **changes}, stream=stream)  # type: ignore[arg-type]
    return stream.getvalue()


def test_before_after_and_change() -> None:
    rows = [line.replace("│", " ").split() for line in shown().splitlines()]
    assert ["val-core/sums/acc/mean@1", "0.41", "0.755", "+0.345"] in rows
    assert ["new", "-", "2", "-"] in rows


def test_paths_and_commands_stay_on_one_line_to_be_copied() -> None:
    lines = shown().splitlines()
    assert "metrics: " + "/a/very/long/path" * 10 in lines
    assert "next: verl-ray train --config-name grpo" in lines


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
