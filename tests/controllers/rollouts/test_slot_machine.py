"""Every order of events: no deadlock, the bound on ages, each batch once, and no bias.

What holds in every state is in `slot_machine.py`, which checks it after each event.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controllers.rollouts.slot_machine import Machine, Scenario, explore

CASES = [
    ("synchronous", 0),
    *(("one_step_off", staleness) for staleness in (1, 2, 3)),
    *(("asynchronous", staleness) for staleness in (1, 2, 3)),
    *(("carry_over", staleness) for staleness in (1, 2, 3)),
]
FEWER_CASES = [
    # What lies between the smallest and the largest window has no order of its own kind.
    pytest.param(*case, marks=pytest.mark.slow) if case[1] == 2 else case
    for case in CASES
]
FAULTS = ("kill", "stop", "crash", "lose", "evaluate")


def finish(machine: Machine) -> int:
    """Let a run end without further faults, its events in turn. Return how many."""
    count = 0
    while machine.phase != "end":
        events = [event for event in machine.events() if event[0] not in FAULTS]
        machine.apply(events[count % len(events)])
        count += 1
        assert count < 1000, "the run does not end"
    return count


# --------------------------------------------------------------------------- every order


def one_row_each(schedule: str, staleness: int, **settings: Any) -> Scenario:
    """A run that is two steps longer than its window, with one row a step."""
    return Scenario(
        schedule, staleness, **{"steps": staleness + 2, "group_size": 1, **settings}
    )


@pytest.mark.parametrize(("schedule", "staleness"), FEWER_CASES)
def test_every_order_of_rows_steps_and_updates(schedule: str, staleness: int) -> None:
    """Responses have one or two tokens; one where there would be too many states."""
    settings: dict[str, Any] = {}
    if schedule in ("asynchronous", "carry_over") and staleness > 1:
        settings = {"steps": 4, "length": lambda _: 1}
    assert explore(one_row_each(schedule, staleness, **settings)) > 15


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["asynchronous", "carry_over"])
@pytest.mark.parametrize("staleness", [2, 3])
def test_every_order_under_open_rows(schedule: str, staleness: int) -> None:
    assert explore(one_row_each(schedule, staleness)) > 600


@pytest.mark.parametrize(("schedule", "staleness"), FEWER_CASES)
def test_every_order_with_a_stop_or_a_kill(schedule: str, staleness: int) -> None:
    """The run goes on from its last checkpoint, wherever it ended."""
    scenario = Scenario(schedule, staleness, steps=2, group_size=2, kills=1)
    assert explore(scenario) > 30


@pytest.mark.parametrize(("schedule", "staleness"), FEWER_CASES)
def test_every_order_with_a_lost_trainer(schedule: str, staleness: int) -> None:
    """The run goes back to its last step in memory, and uses finished groups again."""
    scenario = Scenario(schedule, staleness, steps=2, group_size=2, crashes=1)
    assert explore(scenario) > 30
    # A batch that is newer than the snapshot: of version 3, when it is of step 2. With
    # open rows it comes with 4 steps, and further ones make too many states.
    steps = 4 if schedule in ("asynchronous", "carry_over") else staleness + 4
    scenario = one_row_each(
        schedule,
        staleness,
        steps=steps,
        length=lambda _: 1,
        crashes=1,
        snapshot_every=2,
    )
    assert explore(scenario) > 30


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "staleness"), [c for c in CASES if c[1] < 3])
def test_every_order_with_faults(schedule: str, staleness: int) -> None:
    """A kill, the loss of a replica and an evaluation, at every moment."""
    scenario = one_row_each(
        schedule, staleness, steps=3, kills=1, losses=1, evaluations=1
    )
    assert explore(scenario) > 150


@pytest.mark.parametrize(("schedule", "staleness"), CASES)
@settings(max_examples=15)
@given(choices=st.lists(st.integers(0, 99), max_size=80), updates=st.integers(1, 3))
def test_larger_runs_in_any_order(
    schedule: str, staleness: int, choices: list[int], updates: int
) -> None:
    """Several replicas, groups and optimizer steps, and faults of all kinds."""
    scenario = Scenario(
        schedule, staleness, steps=5, prompts=2, updates=updates, replicas=2,
        length=lambda ordinal: 1 + ordinal % 4, kills=2, crashes=3, losses=3, evaluations=2,
    )  # fmt: skip
    machine = Machine(scenario)
    for choice in choices:
        events = machine.events()
        if events:
            machine.apply(events[choice % len(events)])
    finish(machine)
    assert [machine.trained[step] for step in range(1, 6)] == [
        list(range(4 * step, 4 * step + 4)) for step in range(5)
    ]


@pytest.mark.parametrize(("schedule", "staleness"), CASES)
def test_a_lost_trainer_learns_from_the_same_rows(
    schedule: str, staleness: int
) -> None:
    """A step that fails as it learns is made again, and nothing is generated for it."""
    scenario = Scenario(schedule, staleness, steps=3, crashes=2)
    machine = Machine(scenario)
    while machine.step < 1 or machine.phase != "learn":
        machine.apply(machine.events()[0])
    rows = machine.taken
    assert rows is not None
    for _ in range(2):
        machine.apply(("crash", 0))
        assert (machine.step, machine.phase) == (1, "rest")
        machine.apply(("next", 0))
        assert machine.phase == "learn" and machine.taken is not None
        for name in ("row_id", "newest_version"):
            again = machine.taken.rollouts.row(name)
            assert again.tolist() == rows.rollouts.row(name).tolist()
    finish(machine)


def sampled_by(machine: Machine) -> list[set[int]]:
    """The versions of each batch, once the run has ended."""
    finish(machine)
    sampled = machine.producer.sampled
    return [{*sampled[2 * batch]} for batch in range(machine.step)]


def test_a_finished_run_that_gets_further_steps_says_that_versions_are_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It had not drawn ahead of its end; from batch 6 on all is as in a longer run."""
    whole = Machine(Scenario("one_step_off", 2, steps=8))
    assert sampled_by(whole) == [{0}, {0}, {0}, {1}, {2}, {3}, {4}, {5}]
    short = Machine(Scenario("one_step_off", 2, steps=4))
    finish(short)
    assert "warning" not in capsys.readouterr().err

    extended = Machine(Scenario("one_step_off", 2, steps=8), saved=short.committed)
    assert sampled_by(extended) == [{0}, {0}, {0}, {1}, {4}, {4}, {4}, {5}]
    assert extended.supply.other_batches == [4, 5]
    said = capsys.readouterr().err
    assert said.startswith("warning: steps 5 to 6 learn from responses of newer policy")
    assert said.count("\n") == 1


def test_another_staleness_or_schedule_goes_on_with_the_groups_that_are_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = Machine(Scenario("one_step_off", 1, steps=8))
    while short.step < 3 or short.phase != "rest":
        short.apply(short.events()[0])
    # Batch 3 is of version 2. Batch 4 and those after it are drawn with version 3.
    machine = Machine(Scenario("one_step_off", 3, steps=8), saved=short.committed)
    assert sampled_by(machine)[3:] == [{2}, {3}, {3}, {3}, {4}]
    assert "warning: steps 4 to 6 learn" in capsys.readouterr().err
    machine = Machine(Scenario("asynchronous", 3, steps=8), saved=short.committed)
    finish(machine)
    assert "warning" not in capsys.readouterr().err


# ------------------------------------------------------------------------------- no bias

SLOW = 60
"""Tokens of a response of the slow class; a training step takes far fewer."""


def is_slow(ordinal: int) -> bool:
    return ordinal % 3 == 0


def run_by_the_clock(scenario: Scenario, learning_ticks: int) -> Machine:
    """Let all replicas sample a token per tick, while a step takes so many ticks.

    What is sampled is scored at once.
    """
    machine = Machine(scenario)
    ticks = 0
    while machine.phase != "end":
        for place in machine.producer.busy:
            machine.apply(("replica", place))
        while machine.producer.pieces:
            machine.apply(("score", 0))
        if machine.phase == "learn":
            ticks += 1
        if ticks == learning_ticks:
            machine.apply(("learned", 0))
            ticks = 0
        if machine.phase == "rest":
            machine.apply(("next", 0))
    return machine


@pytest.mark.parametrize(("schedule", "staleness"), CASES)
def test_class_shares_trained_are_class_shares_drawn(
    schedule: str, staleness: int
) -> None:
    """A third of the prompts takes 60 times as long as the others.

    That is longer than s training steps, and still each of them is trained, in its own
    batch.
    """
    scenario = Scenario(
        schedule, staleness, steps=8, prompts=3, group_size=2, replicas=2,
        length=lambda ordinal: SLOW if is_slow(ordinal) else 1,
    )  # fmt: skip
    machine = run_by_the_clock(scenario, learning_ticks=2)
    for rows in machine.trained.values():
        shares = Counter(is_slow(row // 2) for row in rows)
        assert shares == {True: 2, False: 4}
    trained = [row // 2 for step in range(1, 9) for row in machine.trained[step][::2]]
    assert trained == list(range(24))


def test_a_prompt_that_outlasts_several_steps_is_trained_with_all_its_versions() -> (
    None
):
    """The one slow prompt is of the last batch; its rows take as long as 3 steps."""
    scenario = Scenario(
        "asynchronous", 3, steps=4, prompts=1, group_size=2, replicas=2,
        length=lambda ordinal: 14 if ordinal == 3 else 1,
    )  # fmt: skip
    machine = Machine(scenario)
    machine.apply(("next", 0))
    spans: list[int] = []
    while machine.phase != "end":
        for place in machine.producer.busy:
            machine.apply(("replica", place))
        while machine.producer.pieces:
            machine.apply(("score", 0))
        spans = machine.producer.sampled.get(6, spans)
        if machine.phase == "learn":
            machine.apply(("learned", 0))
        elif machine.phase == "rest":
            machine.apply(("next", 0))
    assert machine.trained[4] == [6, 7]
    assert len(spans) == 14 and set(spans) == {0, 1, 2, 3}


def test_a_group_that_waits_long_in_the_queue_counts_its_time_there() -> None:
    """All rows of the window are sampled at once, and wait for their steps."""
    scenario = Scenario("one_step_off", 3, steps=4, length=lambda _: 1)
    machine = Machine(scenario)
    ages = []
    while machine.phase != "end":
        # Replicas and graders come before the trainer.
        event, *_ = [event for event in machine.events() if event[0] != "save"]
        if event[0] == "learned":
            (sampled,) = {*machine.producer.sampled[2 * machine.step]}
            ages.append(machine.step - sampled)
        machine.apply(event)
    assert ages == [0, 1, 2, 3]


def test_the_machine_notices_what_it_looks_for() -> None:
    """A window that is one batch larger breaks the bound."""
    machine = Machine(Scenario("asynchronous", 1, steps=4))
    machine.supply._admission._staleness = 2
    with pytest.raises(AssertionError):
        finish(machine)
    # One that is smaller keeps the bound, and not the versions.
    machine = Machine(Scenario("one_step_off", 2, steps=5))
    machine.supply._admission._staleness = 1
    with pytest.raises(
        Exception, match=r"step 3 would learn .* version 1; .* are of 0"
    ):
        finish(machine)
    # A bound that admission does not know of holds where groups are taken.
    machine = Machine(Scenario("one_step_off", 2, steps=4))
    machine.supply.buffer.staleness = 1
    with pytest.raises(Exception, match=r"at most rollout\.staleness = 1"):
        finish(machine)
