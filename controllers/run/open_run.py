"""A run with all that it needs: claimed, checked against its folder, and started.

Invariant: one run at a time writes to a folder, and what it writes to is known before
anything starts. Whatever is started, its cluster and its trackers too, ends with the
block, and the report is made.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controllers.run.checkpoint_check import CheckpointCheck
from controllers.run.conclusion import Conclusion
from controllers.run.driver_snapshots import LeftSnapshots
from controllers.run.faults import FaultPolicy
from controllers.run.finished import (
    claim,
    finished_step,
    refuse_other_end,
    show_finished,
)
from controllers.run.loop import Loop
from controllers.run.next_driver import (
    allow_other_drivers,
    ask_for_another_driver,
    supervisor_of_run,
)
from controllers.run.preparation import prepare
from controllers.run.record import recording
from controllers.run.recovery import Recovery
from controllers.run.restart import RunRestart
from controllers.run.resumption import Resumption
from controllers.run.run_config import settle, with_counted_steps, write_config
from controllers.run.session import open_session
from controllers.run.snapshots import Snapshots, owner_of_snapshots
from controllers.run.stopping import Stopping
from controllers.supervisor import reports
from controllers.system.build import System, start
from controllers.trainers.base import Task, Trainable, read_data, task_of
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import deferring_signals
from verl_ray.cluster.whereabouts import keeping_status
from verl_ray.config.schema import Config
from verl_ray.profiling.trace import SPANS
from verl_ray.tracking.block import live_block


@dataclass
class OpenRun:
    """A run whose processes are started.

    Attributes:
        loop: The loop that makes its steps.
        exit_code: After the block 0, or 1 if the run promised a gain
            (prepare.min_gain) and did not reach it.
    """

    loop: Loop
    exit_code: int = 0


@contextlib.contextmanager
def open_run(config: Config, command: str = "") -> Iterator[OpenRun | None]:
    """Start a run for the block, from its newest checkpoint or from the beginning.

    The report follows the block. A block that raises is a run that was stopped or has
    failed; any other block makes all of the steps.

    Args:
        config: The checked configuration.
        command: The command that was typed, for the record; empty where a program calls
            this.

    Yields:
        The run; None where it has nothing left to do, which is printed.
    """
    begun_s = time.time()
    with claim(config.run.dir):
        # The checkpoint is looked for first, so that a refusal changes nothing. Its
        # contents are compared while processes start.
        resumption = Resumption(config, verify=False)
        resumption.refuse_fewer_steps(config.run.total_steps)

        # Data that the run makes for itself are not there yet.
        data = None
        if config.preparation is None:
            config, data = _with_data(config, resumption)

            # The number of steps of run.total_epochs is known only now.
            if (finished := finished_step(config)) is not None:
                show_finished(config, finished)
                yield None
                return

        inherited = _inherited(resumption)
        print(f"{config.run.name}: writing to {config.run.dir}", flush=True)
        allow_other_drivers(config.run)
        check = CheckpointCheck(resumption)
        first_step = inherited.newest if inherited else resumption.step or 0
        conclusion = Conclusion(config, first_step, begun_s, command)
        is_in_loop = False
        try:
            with (
                SPANS.noted(config.run.trace == "steps"),
                _block_of(config),
                open_session(config) as session,
                keeping_status(Path(config.run.dir), supervisor_of_run()),
                _started(
                    config, session, resumption, inherited, check, conclusion, data
                ) as run,
            ):
                is_in_loop = True
                reports().begun()
                yield run
                is_in_loop = False
        except BaseException as failure:
            # What is done about a failure in the loop is decided there.
            if not is_in_loop:
                ask_for_another_driver(failure)
            conclusion.break_off(failure)
            raise
        run.exit_code = conclusion.finish()


def _with_data(config: Config, resumption: Resumption) -> tuple[Config, Any]:
    """Return the configuration with counted steps, and what the run's task has read.

    A mistake in the data is reported here, before any process starts.
    """
    with live_block(config.run.name, enabled=config.tracking.console):
        data = read_data(config)
    config = with_counted_steps(config, data)
    resumption.refuse_fewer_steps(config.run.total_steps)
    return config, data


def _block_of(config: Config) -> contextlib.AbstractContextManager[object]:
    """Return what shows on a terminal where the run is."""
    folder = Path(config.run.dir)
    return live_block(config.run.name, folder, enabled=config.tracking.console)


def _inherited(resumption: Resumption) -> LeftSnapshots | None:
    """Return what an earlier driver has left of later steps, if it has any."""
    inherited = resumption.left_snapshots(owner_of_snapshots())
    if inherited is None:
        if resumption.checkpoint is None:
            refuse_other_end(resumption.config)
        resumption.set_aside_old_record()
    return inherited


@contextlib.contextmanager
def _started(
    requested: Config,
    session: Session,
    resumption: Resumption,
    inherited: LeftSnapshots | None,
    check: CheckpointCheck,
    conclusion: Conclusion,
    data: Any,
) -> Iterator[OpenRun]:
    """Start a run on an open cluster, and let its task conclude what the block made.

    Args:
        requested: the configuration as the user gave it, which may hold `auto`.
        session: the cluster.
        resumption: the checkpoint that the run continues from, if any.
        inherited: the later snapshots of an earlier driver, if any.
        check: the comparison of its contents, which has begun.
        conclusion: receives the task and its record, once they exist.
        data: what the run's task has read; None if the run makes its data.
    """
    config = settle(requested, session, resumption)
    task = task_of(config)
    if data is None:
        begun_s = time.monotonic()
        prepare(config, session)
        conclusion.prepared(time.monotonic() - begun_s)
        data = task.read()
        config = with_counted_steps(config, data)
        resumption.settle(config)
        write_config(config, requested.run.resume)
        task = task_of(config)

    snapshots = Snapshots.of(config, inherited, on_own_cluster=session.owns_cluster)
    recovery = Recovery(resumption, snapshots)
    stopping = Stopping(config, recovery)
    policy = FaultPolicy(config.run.recovery, Path(config.run.dir))
    with (
        stopping.announcing(),
        deferring_signals(),
        start(config, session, task.workers, may_restart=policy.may_restart) as system,
        _kept_for_another(system, snapshots),
        contextlib.closing(snapshots),
        _finished(check, resumption),
        _restorable(task, data, system, recovery) as trainer,
        recording(config, recovery, system) as trackers,
    ):
        conclusion.record(task, trackers, recovery.finished_step or 0)
        restart = RunRestart(config, task, data, system, recovery, policy)
        loop = Loop(config.run, trainer, trackers, recovery, stopping, restart)
        yield OpenRun(loop)
        task.conclude(loop.trainer)


@contextlib.contextmanager
def _kept_for_another(system: System, snapshots: Snapshots) -> Iterator[None]:
    """Keep the snapshots if another driver may go on from them after the block.

    A rank that is closed removes its own, and one that is killed does not.
    """
    try:
        yield
    finally:
        if snapshots.are_for_another:
            system.groups.kill(list(system.models.values()))


@contextlib.contextmanager
def _restorable(
    task: Task[Any, Any], data: Any, system: System, recovery: Recovery
) -> Iterator[Trainable]:
    """Yield the trainer, once it is known which state it goes on from."""
    trainer = task.make_trainer(data, system)
    if not recovery.finds_state(trainer):
        recovery.begins_anew()
    yield trainer


@contextlib.contextmanager
def _finished(check: CheckpointCheck, resumption: Resumption) -> Iterator[None]:
    """Refuse a checkpoint whose contents have changed, before anything uses it."""
    check.finish()
    resumption.remove_surplus()
    yield
