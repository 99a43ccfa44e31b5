"""What a stop is announced to bring at each moment of a run, and what it then brings."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from controllers.run.loop import Loop, NoPersistence, UnguardedSteps
from controllers.run.recovery import Recovery
from controllers.run.resumption import Resumption
from controllers.run.stopping import Stopping
from controllers.trainers.base import Trainable
from controllers.watch.held_out_measures import Evaluation
from tests.cluster.crew import SlowWriter
from tests.cluster.crew import processes as worker_processes
from tests.controllers.conftest import MakeTrainer
from tests.controllers.run.checkpoints import write_checkpoints
from tests.controllers.runs import Inputs, timed_by
from verl_ray.cluster import signals
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import (
    Outlook,
    all_or_nothing,
    deferring_signals,
    heed_signals,
    pass_point_of_no_return,
    stop_on_signals,
)
from verl_ray.cluster.waiting import Background
from verl_ray.errors import Interrupted
from verl_ray.profiling.phases import Timers
from verl_ray.tracking import Trackers
from verl_ray.tracking.held_out_responses import HeldOutResponse, recorded_responses
from verl_ray.tracking.jsonl import JsonlTracker, read_metrics


@pytest.fixture
def stoppable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process obeys signals, and forgets them again."""
    state = (signals._state.finishing, signals._state.deferring, signals._state.work)
    assert state == (0, 0, None), "an earlier test left this process in such a block"
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    stop_on_signals()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    forget()


def forget() -> None:
    signals._state.received = None
    signals._state.announced_at = None
    signals._state.disturbed = False
    signals._state.outlook = lambda: signals.NOTHING_AT_STAKE
    signals._state.announced.clear()


@dataclass
class Cursor:
    """A trainer without a model: all that it has is how many rows it has drawn."""

    drawn: int = 0
    groups: dict[str, WorkerGroup[Any]] = field(default_factory=dict)
    stopped_in: int | None = None
    """The step in which a signal comes."""
    fails_in: int | None = None
    """The step whose update fails."""
    refused_in: int | None = None
    """The step that fails before its update."""
    evaluated: list[int] = field(default_factory=list)
    timers: Timers = field(default_factory=Timers)
    finished: bool = False
    background: Background | None = None

    def begin(self, done: int) -> None:
        assert self.drawn == 8 * done

    def step(self, number: int) -> dict[str, float]:
        if number == self.refused_in:
            raise RuntimeError(f"nothing can be graded in step {number}")
        pass_point_of_no_return()
        self.drawn += 8
        if number == self.stopped_in:
            os.kill(os.getpid(), signal.SIGINT)
        if number == self.fails_in:
            raise RuntimeError("the new weights did not arrive")
        return {"actor/loss": 0.1 * number, "actor/grad_norm": math.nan}

    def draw_ahead(self) -> None: ...

    def evaluate(self) -> Evaluation:
        self.evaluated.append(self.drawn)
        metrics = {"val-core/sums/acc/mean@1": self.drawn / 64}
        response = HeldOutResponse(0, "sums", "1+1=", "2", "2", 1.0, "stop")
        return Evaluation(metrics, responses=[response])

    def state(self) -> dict[str, Any]:
        return {
            "cursor": {
                "rows": 100,
                "drawn": self.drawn,
                "epoch": 0,
                "position": self.drawn,
            }
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.drawn = state["cursor"]["drawn"]

    supply_memory = None

    def inherit(self, *_: object) -> None: ...

    def files(self, _: int) -> None: ...

    def load_files(self, checkpoint: Path) -> None: ...


def test_what_a_signal_brings_is_told_at_every_moment(
    inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.config("ppo", tmp_path, "run.checkpoint_every=10")
    recovery, trainer = Recovery(Resumption(config)), Cursor()
    run = Stopping(config, recovery)
    assert run.outlook() == Outlook(
        "stopping; no step is finished yet, so there is nothing to save", ""
    )
    for number in (1, 2):
        with run.step(number):
            given_up = run.outlook()
            pass_point_of_no_return()
            time.sleep(0.01)
            finished = run.outlook()
            recovery.commit(number, trainer)
        if number == 1:
            assert (
                "step 1 is given up, its update has not begun; no step is finished yet"
                in given_up.next
            )
            said = r"step 1 is finished first \(it has taken \d+ s since its update began\), then saved"
            assert re.fullmatch(said, finished.next) and finished.lost == "step 1"
    assert given_up == Outlook(
        "step 2 is given up, its update has not begun; step 1 is saved first", "step 1"
    )
    run._closing_s = 100.0  # what a step took from its update to its end
    with run.step(3):
        pass_point_of_no_return()
        outlook = run.outlook()
        assert re.fullmatch(
            r"step 3 is finished first \(about (100|\d\d) s left\), then saved",
            outlook.next,
        )
        assert outlook.lost == "steps 1 to 3"
    recovery.commit(2, trainer, unrecorded={"actor/loss": 0.5})
    said = "the evaluation of step 2, if it is not done by then, is made when the run goes on; step 2 is saved first"
    assert run.outlook() == Outlook(said, "steps 1 to 2")
    recovery.commit(2, trainer)
    recovery.saved_step = 2
    assert run.outlook() == Outlook("stopping; step 2 is saved already", "")
    recovery._writing.step, recovery.saved_step = 2, None
    assert run.outlook() == Outlook(
        "stopping; the checkpoint of step 2 is written first", "steps 1 to 2"
    )


@pytest.mark.cluster
@pytest.mark.usefixtures("stoppable")
def test_an_evaluation_is_left_to_the_resumed_run(
    cluster: Session, inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    every = [
        "run.checkpoint_every=10",
        "run.checkpoint_behind=true",
        "run.evaluate_every=2",
        "run.total_steps=6",
    ]
    config = inputs.config("ppo", tmp_path, *every)
    gates = tmp_path / "gates"
    gates.mkdir()
    (gates / "step_00000002").touch()
    role = Role("actor", "actor", SlowWriter, (str(gates),))
    with start_groups(
        [worker_processes("actor", 1, cpus=0.1)], [role], stall_s=120, log_dir=tmp_path
    ) as groups:
        recovery, trainer = (
            Recovery(Resumption(config)),
            Cursor(groups={"actor": groups[role]}, stopped_in=2),
        )
        trackers = Trackers([JsonlTracker(tmp_path)])
        with pytest.raises(Interrupted), deferring_signals():
            Loop(
                config.run, trainer, trackers, recovery, Stopping(config, recovery)
            ).run()
        trackers.close(failed=True)
        said = f"step 2 is saved in {tmp_path}/checkpoints; its evaluation is made when the run goes on\n"
        assert said in capfd.readouterr().err
        before, first, second = read_metrics(tmp_path / "metrics.jsonl")
        # The responses are decoded as they are recorded, which is a part of this time.
        assert before.pop("timing_s/testing") > 0
        assert before == {"val-core/sums/acc/mean@1": 0.0, "training/global_step": 0}
        assert (
            trainer.evaluated == [0]
            and first["actor/loss"] == 0.1
            and second.keys() == first.keys()
        )

        forget()
        found = Resumption(config)
        recovery, trainer = Recovery(found), Cursor(groups=trainer.groups, stopped_in=3)
        assert found.step == 2 and recovery.recorded_step == 1
        trackers = Trackers(
            [JsonlTracker(tmp_path, recovery.recorded_step, recovery.tracker_state)]
        )
        (gates / "step_00000003").touch()
        with pytest.raises(Interrupted), deferring_signals():
            Loop(
                config.run, trainer, trackers, recovery, Stopping(config, recovery)
            ).run()
        trackers.close(failed=True)
        again = Resumption(config)
        assert (
            again.step == 3 and again.unrecorded is None
        )  # the evaluation is not made again
    *others, resumed, third = read_metrics(tmp_path / "metrics.jsonl")
    assert (
        len(others) == 2
        and third["training/global_step"] == 3
        and trainer.evaluated == [16]
    )
    assert resumed.pop("timing_s/testing") > 0
    assert resumed == pytest.approx(
        second | {"val-core/sums/acc/mean@1": 0.25}, nan_ok=True
    )
    assert list(recorded_responses(tmp_path)) == [0, 2]


@pytest.mark.usefixtures("stoppable")
def test_half_of_an_update_is_not_saved(
    inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The roles hold what is neither of the step before nor of the one that failed."""
    config = inputs.config("ppo", tmp_path, "run.checkpoint_every=10")
    recovery, trainer = Recovery(Resumption(config)), Cursor(stopped_in=2, fails_in=2)
    with (
        pytest.raises(RuntimeError, match="the new weights did not arrive"),
        deferring_signals(),
    ):
        Loop(
            config.run, trainer, Trackers([]), recovery, Stopping(config, recovery)
        ).run()
    assert (
        "step 2 did not come to the end of its update, so nothing newer than step 0 is saved\n"
        in capfd.readouterr().err
    )
    assert not (tmp_path / "checkpoints").exists()


def test_a_failure_in_an_update_saves_nothing_newer(
    inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The roles hold half of it, and there are no snapshots."""
    config = inputs.config("ppo", tmp_path, "run.checkpoint_every=10")
    recovery = Recovery(Resumption(config))
    stopping = Stopping(config, recovery)
    with pytest.raises(RuntimeError, match="the new weights did not arrive"):
        Loop(config.run, Cursor(fails_in=4), Trackers([]), recovery, stopping).run()
    assert (recovery.finished_step, recovery.saved_step) == (3, None)
    said = "step 4 did not come to the end of its update, so nothing newer than step 0 is saved\n"
    assert capfd.readouterr().err == said
    assert not (tmp_path / "checkpoints").exists()


@dataclass
class Going(NoPersistence):
    """Notes what goes on while a checkpoint is waited for."""

    committed: list[int] = field(default_factory=list)
    waited: list[object] = field(default_factory=list)

    def references(self) -> list[Any]:
        return []

    def advance(self) -> None: ...

    def commit(
        self, number: int, _: Trainable, unrecorded: Mapping[str, float] | None = None
    ) -> None:
        self.committed.append(number)

    def finish_save(self, background: Background | None = None) -> None:
        self.waited.append(background)


def test_what_goes_on_between_steps_goes_on_in_evaluations_and_saves(
    inputs: Inputs, tmp_path: Path
) -> None:
    changes = ("run.evaluate_every=2", "run.total_steps=4", "run.save_at_end=false")
    run = inputs.config("ppo", tmp_path, *changes).run
    going, drawn = Going(), []

    class Drawing(Cursor):
        def draw_ahead(self) -> None:
            drawn.append((list(going.committed), list(self.evaluated)))

    trainer = Drawing(background=going)
    Loop(run, trainer, Trackers([]), going, UnguardedSteps()).run()
    assert going.waited == [going] * 4
    # Each time once a step is committed, before it is evaluated.
    assert drawn == [
        ([1], [0]), ([1, 2], [0]), ([1, 2, 3], [0, 16]), ([1, 2, 3, 4], [0, 16])
    ]  # fmt: skip


class SavedAtStop(NoPersistence):
    is_saved = False

    def save_finished_step(self, *_: object) -> None:
        self.is_saved = True


@pytest.mark.usefixtures("stoppable")
def test_a_step_by_hand_heeds_the_signal_that_came_in_it(
    inputs: Inputs, tmp_path: Path
) -> None:
    run = inputs.config("ppo", tmp_path).run
    persistence, trainer = SavedAtStop(), Cursor(stopped_in=2)
    loop = Loop(run, trainer, Trackers([]), persistence, UnguardedSteps())
    with deferring_signals():
        assert loop.step()["actor/loss"] == 0.1
        assert (loop.finished_step, loop.has_ended) == (1, False)
        assert loop.evaluate() == {"val-core/sums/acc/mean@1": 8 / 64}
        with pytest.raises(Interrupted):
            loop.step()
    assert (loop.finished_step, loop.has_ended, persistence.is_saved) == (2, True, True)


class SignalledWhileRescuing(NoPersistence):
    finished_is_saved = False

    def rescue_save(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def save_finished_step(self, *_: object) -> None:
        self.finished_is_saved = True


@pytest.mark.usefixtures("stoppable")
def test_a_signal_after_a_failure_saves_what_it_tells(
    inputs: Inputs, tmp_path: Path
) -> None:
    """It is answered with the step that is saved, also while the loop waits for the
    checkpoint before.
    """
    config = inputs.config(
        "ppo", tmp_path, "run.checkpoint_every=1", "run.total_steps=6"
    )
    persistence = SignalledWhileRescuing()
    with (
        pytest.raises(RuntimeError, match="the new weights did not arrive"),
        deferring_signals(),
    ):
        Loop(
            config.run, Cursor(fails_in=2), Trackers([]), persistence, UnguardedSteps()
        ).run()
    assert persistence.finished_is_saved


def test_nothing_kept_runs_to_its_end(inputs: Inputs, tmp_path: Path) -> None:
    every = ["run.checkpoint_every=1", "run.evaluate_every=2", "run.total_steps=3"]
    config, trainer = inputs.config("ppo", tmp_path, *every), Cursor()
    Loop(config.run, trainer, Trackers([]), NoPersistence(), UnguardedSteps()).run()
    assert (trainer.drawn, trainer.evaluated) == (24, [0, 16, 24])
    assert not list(tmp_path.iterdir())


def test_a_run_without_checkpoints_says_what_it_loses(
    inputs: Inputs, tmp_path: Path, capfd: Any
) -> None:
    config = inputs.config("ppo", tmp_path)
    recovery = Recovery(Resumption(config))
    recovery.save_finished_step(Cursor(), Trackers([]))
    assert capfd.readouterr().err == ""  # no step is finished
    recovery.commit(3, Cursor())
    assert (
        Stopping(config, recovery).outlook().next
        == "stopping; nothing is saved (run.checkpoint_every=0)"
    )
    recovery.save_finished_step(Cursor(), Trackers([]))
    assert (
        "nothing is saved (run.checkpoint_every=0): the 3 finished steps are lost"
        in capfd.readouterr().err
    )


def test_a_stop_tells_where_its_step_is_saved(
    inputs: Inputs, tmp_path: Path, capfd: Any
) -> None:
    """A run that goes on from another folder, and comes to no step of its own, even if
    it were to write nothing.
    """
    store = write_checkpoints(inputs.config("ppo", tmp_path / "first"), 3)
    config = inputs.config(
        "ppo", tmp_path / "second", f"run.resume={store.root / 'step_00000003'}"
    )
    recovery = Recovery(Resumption(config))
    recovery.save_finished_step(Cursor(), Trackers([]))
    assert capfd.readouterr().err == f"step 3 is saved in {store.root}\n"
    recovery.commit(5, Cursor())
    recovery.save_finished_step(Cursor(), Trackers([]))
    assert (
        "(run.checkpoint_every=0): the 2 finished steps are lost"
        in capfd.readouterr().err
    )


# -------------------------------------------------------------------------- real phases

BEFORE = "before the step"


class Watched(Timers):
    """Timers that say which phase begins."""

    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self._at = at

    def __call__(self, name: str) -> AbstractContextManager[None]:
        self._at(name)
        return super().__call__(name)


def processes(group: WorkerGroup[Any]) -> list[psutil.Process]:
    return [
        psutil.Process(member.process_info.pid)
        for member in group.members()
        if member.process_info is not None
    ]


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("stoppable")
def test_every_wait_before_the_update_is_given_up(trainer: MakeTrainer) -> None:
    """Those that a phase waits for are held, so that the driver is in that wait when
    the signal comes.
    """
    run = trainer("ppo", "actor.mini_batch_size=16")
    run.publish(0)
    rollout, reward, actor = (
        run.replicas.available[0],
        run.system.graders["reward"],
        run.system.actor,
    )
    # Who is held from the beginning of which phase, and in which phase the signal
    # comes. Responses are generated, and may be scored, before the wait for them
    # begins, so their processes are held before the step.
    waits = (
        (BEFORE, rollout, "gen"),
        (BEFORE, reward, "reward"),
        ("reward", actor, "old_log_prob"),
        ("adv", actor, "adv"),
    )
    for held_from, group, phase in waits:
        before, held = run.supply._admission.state(), processes(group)
        coming: list[threading.Timer] = []

        def at(
            begins: str,
            coming: list[threading.Timer] = coming,
            held_from: str = held_from,
            held: Any = held,
            phase: str = phase,
        ) -> None:
            if begins == held_from:
                for process in held:
                    process.suspend()
            if begins == phase:
                soon = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
                coming.append(soon)
                soon.start()

        timed_by(run, Watched(at))
        at(BEFORE)
        try:
            with (
                deferring_signals(),
                pytest.raises(Interrupted, match="stopped by SIGINT"),
                all_or_nothing() as work,
            ):
                run.step(1)
        finally:
            for process in held:
                # Who was lost shows in what the step did, and not here.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            # A phase may begin twice, and no signal of this round may come in the next.
            for timer in coming:
                timer.cancel()
                timer.join()
        assert work.committed_at is None
        run.supply._admission.load_state(before)
        forget()
    timed_by(run, Timers())
    assert run.step(1)["training/epoch"] == 0  # nothing is broken by what was given up


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("stoppable")
def test_an_update_that_has_begun_is_published(trainer: MakeTrainer) -> None:
    run = trainer("ppo", "actor.mini_batch_size=16")
    run.publish(0)
    timed_by(
        run,
        Watched(
            lambda begins: (
                os.kill(os.getpid(), signal.SIGINT)
                if begins == "update_critic"
                else None
            )
        ),
    )
    with deferring_signals(), all_or_nothing():
        metrics = run.step(1)
    assert run.policy_version == 1 and "actor/loss" in metrics
    with pytest.raises(Interrupted):
        heed_signals()
