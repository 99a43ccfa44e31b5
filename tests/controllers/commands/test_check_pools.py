"""The idle shares that `check` predicts, from given and from measured seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controllers.command_line import main
from controllers.commands.check_pools import PoolTimes, parse_rates, pool_use
from verl_ray.errors import ConfigError

RATES = PoolTimes(generate_s=30, train_s=24, publish_s=6, origin="given")


def test_pools_that_overlap_wait_for_the_slower_one() -> None:
    for schedule in ("one_step_off", "asynchronous"):
        use = pool_use(schedule, RATES)
        assert use.step_s == 36
        assert use.trainers_idle == pytest.approx(1 - 24 / 36)
        assert use.engines_idle == pytest.approx(1 - 30 / 36)


def test_pools_that_take_turns_add_up() -> None:
    for schedule in ("synchronous", "carry_over"):
        use = pool_use(schedule, RATES)
        assert use.step_s == 60
        assert use.trainers_idle == pytest.approx(1 - 24 / 60)
        assert use.engines_idle == pytest.approx(0.5)


def test_seconds_are_given() -> None:
    assert parse_rates("generate=30,train=24,publish=6") == RATES
    assert parse_rates("train=24,generate=30").publish_s == 0


def test_seconds_are_measured_in_a_run(tmp_path: Path) -> None:
    lines = [
        {
            "training/global_step": step,
            "timing_s/step": 10.0 * step,
            "timing_s/update_weights": 1.0,
            "perf/trainers_idle": 0.25,
            "timing_s/rollouts": 5.0 * step,
        }
        for step in (1, 2, 3, 4)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)

    # The median of steps 2 to 4 is step 3, of 30 seconds.
    rates = parse_rates(str(tmp_path))
    assert (rates.generate_s, rates.train_s, rates.publish_s) == (15.0, 21.5, 1.0)
    assert str(tmp_path) in rates.origin


@pytest.mark.parametrize(
    "text", ["generate=30", "generate=x,train=1", "learn=3,generate=2", "nowhere"]
)
def test_what_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rates(text)
    (problem,) = caught.value.problems
    assert problem.key == "--rates"
    assert "generate=30,train=25" in problem.fix


def test_check_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"run.dir={tmp_path}", "schedule=one_step_off", "placement=separate"]
    flags = ["--data", "off", "--rates", "generate=30,train=24,publish=6"]
    assert main(["check", "--config-name", "quickstart", *flags, *overrides]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "a step takes at least 36 s; trainers are idle for 33 %" in printed
    assert "rollout engines for 17 %" in printed
