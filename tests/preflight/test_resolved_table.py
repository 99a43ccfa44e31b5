"""The table of what each `auto` became: every key once, as its user would type it."""

from __future__ import annotations

import re

import pytest

from verl_ray.preflight.resolve import Resolution
from verl_ray.preflight.tables import print_resolutions, resolutions_in_words


def test_roles_that_share_a_value_share_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    need = "else learn needs 90.1 GiB"
    resolutions = [
        Resolution("actor.backend.dtype", "bfloat16", "the run computes on GPUs"),
        Resolution("critic.backend.dtype", "bfloat16", "the run computes on GPUs"),
        Resolution("actor.backend.activation_checkpointing", True, need),
        Resolution("critic.backend.activation_checkpointing", False, need),
        Resolution("run.threads_per_rank", {"trainers": 8, "engines": 4}, "cores"),
    ]
    print_resolutions(resolutions)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "auto: what these settings become here"
    cells = [re.split(r" {2,}", line.strip()) for line in lines if line.strip()]
    assert cells[2:] == [
        ["backend.dtype of", "bfloat16", "the run computes on GPUs"],
        ["actor, critic"],
        ["actor.backend.activation_checkpointing", "true", need],
        ["critic.backend.activation_checkpointing", "false", need],
        ["run.threads_per_rank", "{trainers: 8, engines:", "cores"],
        ["4}"],
    ]
    assert resolutions_in_words(resolutions) == (
        "4 settings were auto: backend.dtype=bfloat16,"
        " backend.activation_checkpointing=true,"
        " critic.backend.activation_checkpointing=false, ..."
    )


def test_nothing_is_printed_where_nothing_was_left_open(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_resolutions([])
    assert capsys.readouterr().out == ""
