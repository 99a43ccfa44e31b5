"""The sentence that says what a run came to."""

from __future__ import annotations

from verl_ray.algorithms.intervals import Interval
from verl_ray.report.lines import Line, RunLines
from verl_ray.report.record import held_out_courses
from verl_ray.report.summary import summary

ACCURACY = "val-core/sums/acc/mean@1"
REWARD = "val-aux/sums/reward/mean@1"
LOSS = "val-core/held_out/loss"
DURATIONS = {"generation": 30.0, "update of the actor": 20.0, "evaluation": 1.0}


def sentence(
    lines: list[Line], task: str = "rl", changes: dict[str, Interval] | None = None
) -> str:
    config = {"task": task, "run": {"best_metric": None, "best_is": None}}
    courses = held_out_courses(lines, config)
    return summary(RunLines(lines, config), courses, changes or {}, DURATIONS, 60.0)


def at(step: int, **metrics: float) -> Line:
    names = {"acc": ACCURACY, "reward": REWARD, "loss": LOSS}
    return {
        "training/global_step": step,
        **{names.get(name, name): value for name, value in metrics.items()},
    }


def test_accuracy_and_reward_each_with_its_interval() -> None:
    lines = [at(0, acc=0.0, reward=0.25), at(9, acc=0.0, reward=0.5)]
    changes = {
        ACCURACY: Interval(0.0, 0.0, 0.0, 30),
        REWARD: Interval(0.25, 0.125, 0.375, 30),
    }
    assert sentence(lines, changes=changes) == (
        "Held-out sums/acc/mean@1 is 0 at step 9, as at step 0; sums/reward/mean@1 rose"
        " from 0.25 at step 0 to 0.5 at step 9 (+0.25 on the same 30 problems, 95 %"
        " interval +0.125 to +0.375), better, beyond noise; 50% of 1m00s went into"
        " generation and 33% into update of the actor."
    )
    noise = {**changes, REWARD: Interval(0.25, -0.125, 0.625, 30)}
    assert "95 % interval -0.125 to +0.625), within noise; 50%" in sentence(
        lines, changes=noise
    )
    # Few problems say nothing of noise.
    few = {**changes, REWARD: Interval(0.25, 0.125, 0.375, 29)}
    assert "(+0.25 on the same 29 problems); 50%" in sentence(lines, changes=few)
    # Of other problems, the means may move the other way.
    other = {ACCURACY: Interval(-0.5, -0.75, -0.25, 30)}
    rising = [at(0, acc=0.25), at(9, acc=0.5)]
    assert sentence(rising, changes=other).startswith(
        "Held-out sums/acc/mean@1 went from 0.25 at step 0 to 0.5 at step 9 (-0.5 on the"
        " same 30 problems, 95 % interval -0.75 to -0.25), worse, beyond noise; 50%"
    )
    # Records of earlier versions have no rewards of single problems.
    assert "to 0.5 at step 9 (+0.25); 50%" in sentence(lines)
    # A reward that is the accuracy says nothing more.
    same = [at(0, acc=0.25, reward=0.25), at(9, acc=0.5, reward=0.5)]
    assert "reward" not in sentence(same)


def test_a_loss_is_better_where_it_is_lower() -> None:
    lines = [at(0, loss=2.0), at(4, loss=1.5)]
    changes = {LOSS: Interval(-0.5, -0.75, -0.25, 30)}
    assert "to -0.25), better, beyond noise; 50%" in sentence(lines, "sft", changes)
    changes = {LOSS: Interval(0.5, 0.25, 0.75, 30)}
    worse = [at(0, loss=1.5), at(4, loss=2.0)]
    text = sentence(worse, "sft", changes)
    assert "rose from 1.5 at step 0 to 2 at step 4 (+0.5 on the same" in text
    assert "to +0.75), worse, beyond noise; 50%" in text


def test_steps_speak_for_a_run_without_two_evaluations() -> None:
    rewards = (0.0, 0.25, 0.0, 0.25, 1.0, 1.25, 1.0, 1.25)
    lines = [
        at(step, **{"critic/rewards/mean": reward})
        for step, reward in enumerate(rewards, start=1)
    ]
    assert sentence(lines).startswith(
        "The reward in training rose from 0.125 in the first 4 steps to 1.125 in the"
        " last 4 steps (+1); 50%"
    )
    first = {**at(0, acc=0.5)}
    assert sentence([first, *lines]).startswith(
        "Held-out sums/acc/mean@1 is 0.5 at step 0; the reward in training rose"
    )
    assert summary(RunLines([], {}), [], {}, {}, None) == ""
