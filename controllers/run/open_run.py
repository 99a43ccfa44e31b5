"""A run with all that it needs: claimed, checked against its folder, and started.

Invariant: one run at a time writes to a folder, and what it writes to is known before
anything starts. Whatever is started ends with the block, and the report is made.
Deliberately not here: the order of the steps (`loop.py`), and what each task does
(`controllers/trainers`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from controllers.run.checkpoint_check import CheckpointCheck
from controllers.run.claim import claim
from controllers.run.conclusion import Conclusion
from controllers.run.faults import FaultPolicy
from controllers.run.finished import finished_step, show_finished
from controllers.run.healing import RunHealing
from controllers.run.loop import Loop
from controllers.run.preparation import prepare
from controllers.run.recovery import Recovery
from controllers.run.resumption import Resumption
from controllers.run.session import open_session, recording
from controllers.run.snapshots import Snapshots
from controllers.run.stopping import Stopping
from controllers.supervisor import reports
from controllers.system.build import start
from controllers.system.plan import ClusterShape, facts_on
from controllers.trainers.base import read_data, task_of
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import deferring_signals
from verl_ray.cluster.status_keeping import keeping_status
from verl_ray.config.load import to_tree
from verl_ray.config.rules import rule_violations
from verl_ray.config.run import RunConfig
from verl_ray.config.schema import Config
from verl_ray.errors import ClusterError, ClusterLost, ConfigError, Problem, WorkerDied
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.memory_table import memory_table, print_tables
from verl_ray.preflight.resolve import resolutions, resolve
from verl_ray.preflight.resolved_table import print_resolutions
from verl_ray.preflight.total_steps import resolution_of_steps, with_total_steps
from verl_ray.shell import override_of


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
def open_run(config: Config) -> Iterator[OpenRun | None]:
    """Start a run for the block, from its newest checkpoint or from the beginning.

    The report follows the block. A block that raises is a run that was stopped or has
    failed; any other block makes all of the steps.

    Yields:
        The run; None where it has nothing left to do, which is printed.
    """
    begun_s = time.time()
    with claim(config.run.dir):
        # The checkpoint is looked for first, so that a refusal changes nothing. Its
        # contents are compared while processes start.
        resumption = Resumption(config, verify=False)
        resumption.refuse_fewer_steps(config.run.total_steps)

        # A mistake in the data is reported before any process starts. Data that the
        # run makes for itself are not there yet.
        data = None
        if config.preparation is None:
            data = read_data(config)
            config = _with_counted_steps(config, data)
            resumption.refuse_fewer_steps(config.run.total_steps)

            # The number of steps of run.total_epochs is known only now.
            finished = finished_step(config)
            if finished is not None:
                show_finished(config, finished)
                yield None
                return

        print(f"{config.run.name}: writing to {config.run.dir}", flush=True)
        resumption.set_aside_old_record()

        _allow_other_drivers(config.run)
        check = CheckpointCheck(resumption)
        conclusion = Conclusion(config, resumption.step or 0, begun_s)
        is_in_loop = False
        try:
            with (
                open_session(config) as session,
                keeping_status(Path(config.run.dir)),
                _started(config, session, resumption, check, conclusion, data) as run,
            ):
                is_in_loop = True
                yield run
                is_in_loop = False
        except BaseException as failure:
            # What is done about a failure in the loop is decided there.
            if not is_in_loop:
                _ask_for_another_driver(failure)
            conclusion.break_off(failure)
            raise
        run.exit_code = conclusion.finish()


def _allow_other_drivers(run: RunConfig) -> None:
    """Let another driver follow this one from now on if it is killed."""
    if run.recovery.enabled:
        same_run = [
            override_of("run.name", run.name),
            override_of("run.dir", run.dir),
        ]
        reports().limit(run.recovery.max_restarts, same_run)


def _ask_for_another_driver(failure: BaseException) -> None:
    """Ask for one after a failure before the loop, or behind it, that it may not have.

    A process or a cluster that dies again as it starts does so for a reason.
    """
    reason = str(failure).partition("\n")[0]
    if isinstance(failure, WorkerDied | ClusterLost):
        reports().retry(reason, once=True)
    # A driver that follows another one meets what that one left: it may have to wait
    # for a cluster or for its resources.
    elif reports().restarts and isinstance(failure, ClusterError):
        reports().retry(reason)


@contextlib.contextmanager
def _started(
    requested: Config,
    session: Session,
    resumption: Resumption,
    check: CheckpointCheck,
    conclusion: Conclusion,
    data: Any,
) -> Iterator[OpenRun]:
    """Start a run on an open cluster, and let its task conclude what the block made.

    Args:
        requested: the configuration as the user gave it, which may hold `auto`.
        session: the cluster.
        resumption: the checkpoint that the run continues from, if any.
        check: the comparison of its contents, which has begun.
        conclusion: receives the task and its record, once they exist.
        data: what the run's task has read; None if the run makes its data.
    """
    shape = ClusterShape.of(session)
    facts = facts_on(requested, shape, checkpoint=resumption.path)
    config = resolve(requested, facts)
    resumption.settle(config)
    resumption.report_other_device(on_gpus=shape.gpus > 0)
    _write_config(config, requested.run.resume)

    print_resolutions(resolutions(requested, facts))
    planned_memory = memory_plan(config, on_gpus=shape.gpus > 0)
    print_tables(memory_table(planned_memory))

    task = task_of(config)
    if data is None:
        begun_s = time.monotonic()
        prepare(config, session)
        conclusion.prepared(time.monotonic() - begun_s)
        data = task.read()
        config = _with_counted_steps(config, data)
        resumption.settle(config)
        _write_config(config, requested.run.resume)
        task = task_of(config)

    snapshots = Snapshots.of(config.run)
    recovery = Recovery(resumption, snapshots)
    stopping = Stopping(config, recovery)
    policy = FaultPolicy(config.run.recovery, Path(config.run.dir))
    with (
        stopping.announcing(),
        deferring_signals(),
        start(config, session, task.workers, may_restart=policy.may_restart) as system,
        contextlib.closing(snapshots),
        _finished(check),
        recording(config, resumption) as trackers,
    ):
        conclusion.record(task, trackers)
        trainer = task.make_trainer(data, system)
        healing = RunHealing(config, task, data, system, recovery, policy)
        loop = Loop(config.run, trainer, trackers, recovery, stopping, healing)
        yield OpenRun(loop)
        task.conclude(loop.trainer)


@contextlib.contextmanager
def _finished(check: CheckpointCheck) -> Iterator[None]:
    """Refuse a checkpoint whose contents have changed, before anything uses it."""
    check.finish()
    yield


def _with_counted_steps(config: Config, data: Any) -> Config:
    """Return the configuration with the steps that run.total_epochs stands for.

    Args:
        config: the configuration, which may have run.total_steps already.
        data: what the run's task has read.

    Raises:
        ConfigError: The number of steps breaks a rule, or the task does not count its
            examples.
    """
    if config.run.total_steps is not None:
        return config

    num_examples = task_of(config).num_examples(data)
    if num_examples is None:
        rule = f"the task {config.task} does not say how many examples it learns from"
        fix = "Use run.total_steps, or give the task a method num_examples."
        raise ConfigError(
            [Problem("run.total_epochs", config.run.total_epochs, rule, fix)]
        )

    resolution = resolution_of_steps(config, num_examples)
    assert resolution is not None, "the rules ask for a number of steps or of epochs"
    print(f"{resolution.key} = {resolution.value}: {resolution.because}", flush=True)

    # The rules that compare the number of steps could not do so before.
    counted = with_total_steps(config, num_examples)
    problems = rule_violations(counted)
    if problems:
        raise ConfigError(problems)
    return counted


def _write_config(config: Config, resume: str) -> None:
    """Write the resolved configuration to the folder of the run.

    Args:
        config: the configuration.
        resume: the user's run.resume. It stays as it is, so that a command with this
            file goes on from whatever is the newest checkpoint then.
    """
    run = config.run.model_copy(update={"resume": resume})
    tree = to_tree(config.model_copy(update={"run": run}))
    text = yaml.safe_dump(tree, sort_keys=False)
    path = Path(config.run.dir) / "config.yaml"
    path.write_text(text)
