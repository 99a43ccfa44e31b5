"""A run with all that it needs: claimed, checked against its folder, and started.

Invariant: one run at a time writes to a folder, and what it writes to is known before
anything starts. Whatever is started, its cluster and its trackers too, ends with the
block, the trackers then know whether the run failed, and the report is made.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from controllers.run.checkpoint_check import CheckpointCheck
from controllers.run.conclusion import Conclusion
from controllers.run.driver_snapshots import LeftSnapshots
from controllers.run.faults import Cure, FaultPolicy
from controllers.run.finished import claim, finished_step, show_finished
from controllers.run.loop import Loop
from controllers.run.next_driver import (
    allow_other_drivers,
    ask_for_another_driver,
    supervisor_of_run,
)
from controllers.run.preparation import prepare
from controllers.run.recovery import Recovery
from controllers.run.resumption import Resumption
from controllers.run.snapshots import Snapshots, owner_of_snapshots
from controllers.supervisor import reports
from controllers.system.build import System, restart_lost, start
from controllers.system.plan import ClusterShape, facts_on
from controllers.trainers.base import Task, Trainable, read_data, task_of
from verl_ray.cluster.launch import Groups
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import (
    AtomicWork,
    Outlook,
    all_or_nothing,
    announcing,
    deferring_signals,
    heed_signals,
    raising_signals,
    stop_on_signals,
)
from verl_ray.cluster.whereabouts import keeping_status
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config, rule_violations
from verl_ray.errors import (
    ClusterError,
    ConfigError,
    Interrupted,
    Problem,
)
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.resolve import (
    resolution_of_steps,
    resolutions,
    resolve,
    with_total_steps,
)
from verl_ray.preflight.tables import memory_table, print_resolutions, print_tables
from verl_ray.profiling.phases import blocking
from verl_ray.profiling.trace import MOST_BYTES, SPANS, TRACE, TraceFile
from verl_ray.report.findings import FAILED_SCORES, PATIENCE, learns_nothing
from verl_ray.report.lines import Line
from verl_ray.tracking import Sample, Tracker, Trackers, open_trackers
from verl_ray.tracking.block import live_block
from verl_ray.tracking.jsonl import METRICS, read_metrics


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

        print(f"{config.run.name}: writing to {config.run.dir}", flush=True)
        inherited = _inherited(resumption)
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
    config = _with_counted_steps(config, data)
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
    shape = ClusterShape.of(session)
    facts = facts_on(requested, shape, checkpoint=resumption.path)
    config = resolve(requested, facts)
    resumption.settle(config)
    resumption.report_other_device(on_gpus=shape.gpus > 0)
    _write_config(config, requested.run.resume)

    print_resolutions(resolutions(requested, facts))
    print_tables(memory_table(memory_plan(config, on_gpus=shape.gpus > 0)))

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
        healing = RunHealing(config, task, data, system, recovery, policy)
        loop = Loop(config.run, trainer, trackers, recovery, stopping, healing)
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


# --------------------------------------------------------------------- what a run heals

# A run that goes on after processes of it are lost.
#
# Invariant: what follows is what follows from a resume: lost processes are new, the
# trainer is new, and its state is that of a snapshot or checkpoint, or of the
# beginning where there is none. So the steps that are made again have the same bits.


class RunHealing:
    """Restores one run after failures of its processes."""

    def __init__(
        self,
        config: Config,
        task: Task[Any, Any],
        data: Any,
        system: System,
        recovery: Recovery,
        policy: FaultPolicy,
    ) -> None:
        """Take what a trainer is made of.

        Args:
            config: Resolved configuration of the run.
            task: Its task.
            data: What the task has read.
            system: The processes.
            recovery: The checkpoints.
            policy: Decides about failures, as the system asks it about its graders and
                reference.
        """
        self._config = config
        self._task = task
        self._data = data
        self._system = system
        self._recovery = recovery
        self._policy = policy

    def note_finished(self, step: int) -> None:
        """Note that a step is finished, for the first time or again."""
        self._policy.note_finished(step)
        reports().finished(step)

    def may_cure(self, failure: BaseException, step: int) -> bool:
        """Return whether this driver goes on after a failure in this step; say so."""
        cure = self._policy.cure_of(failure, step)
        if cure is Cure.START_AGAIN:
            reports().retry(str(failure).partition("\n")[0])
        return cure is Cure.GO_BACK

    def heal(self, trainer: Trainable) -> Trainable:
        """Start lost processes again; return a new trainer without any state."""
        restart_lost(self._config, self._system)
        healed = self._task.make_trainer(self._data, self._system)
        if not self._recovery.finds_state(healed):
            # Those that learned have to forget it.
            restart_lost(self._config, self._system, list(trainer.groups))
            healed = self._task.make_trainer(self._data, self._system)
        return healed


# ----------------------------------------------------------------------------- stopping

# The effect of a stop on a run: which step it finishes or gives up, and what is
# saved.
#
# Invariant: a step whose update has begun is finished, and one whose update has not
# begun is given up. After a stop the newest checkpoint is that of the newest finished
# step, unless the run writes none at all (`run.checkpoint_every=0`).


class Stopping:
    """Follows the steps of a run and announces at any moment what a signal would do."""

    def __init__(self, config: Config, recovery: Recovery) -> None:
        self._saves = config.run.checkpoint_every > 0
        self._recovery = recovery
        self._work = AtomicWork()

        # Number of the current step; None between steps.
        self._step: int | None = None

        # Seconds from the start of the update to the end of the last finished step.
        self._closing_s: float | None = None

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """Answer the signals that arrive in this block with their effect on the run."""
        with announcing(self.outlook):
            yield

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run a step in this block, up to its commit.

        The evaluation of the step comes after the block. A stop leaves it to the
        resumed run.
        """
        heed_signals()

        with all_or_nothing() as work:
            self._work = work
            self._step = number
            work.can_be_redone = lambda: self._recovery.can_come_back
            try:
                yield
            except BaseException:
                # The update has begun and was not committed, so the roles may hold
                # half of it.
                update_begun = work.committed_at is not None
                if update_begun and self._recovery.finished_step != number:
                    self._recovery.spoiled_step = number
                raise
            finally:
                self._step = None

        if work.committed_at is not None:
            self._closing_s = time.monotonic() - work.committed_at

    def outlook(self) -> Outlook:
        """Return the effect of a signal now, and the steps that a second one loses.

        This may be called from any thread.
        """
        # Another thread may change these at any moment, so each is read once.
        step = self._step
        since = self._work.committed_at
        finished_step = self._recovery.finished_step

        if step is not None and since is not None:
            then = ", then saved" if self._saves else ""
            remaining = self._describe_remaining(since)
            return Outlook(
                f"step {step} is finished first ({remaining}){then}",
                self._unsaved_steps(step),
            )

        if step is not None:
            given_up = f"step {step} is given up, its update has not begun"
        elif self._recovery.unrecorded is not None and self._saves:
            given_up = (
                f"the evaluation of step {finished_step}, if it is not done by then, is"
                " made when the run goes on"
            )
        else:
            given_up = "stopping"

        saved = self._describe_saving(finished_step)
        return Outlook(f"{given_up}; {saved}", self._unsaved_steps(finished_step))

    def _describe_saving(self, finished_step: int | None) -> str:
        """Return how the last finished step is saved if a signal arrives now."""
        if finished_step is None:
            return "no step is finished yet, so there is nothing to save"
        if finished_step == self._recovery.writing_step:
            return f"the checkpoint of step {finished_step} is written first"
        if finished_step == self._recovery.saved_step:
            return f"step {finished_step} is saved already"
        if self._saves:
            return f"step {finished_step} is saved first"
        return "nothing is saved (run.checkpoint_every=0)"

    def _unsaved_steps(self, last: int | None) -> str:
        """Return the steps up to `last` that no checkpoint holds, as text.

        `last` is a finished step, or one that a stop would finish. The text is empty if
        there are none.
        """
        first = (self._recovery.saved_step or 0) + 1
        if last is None or last < first:
            return ""
        if first == last:
            return f"step {last}"
        return f"steps {first} to {last}"

    def _describe_remaining(self, since: float) -> str:
        """Return how long the rest of the step will take, judging by the last step.

        Where there was no such step, or it took less time, return how long the update
        has taken so far. `since` is the start of the update on the monotonic clock.
        """
        elapsed_s = time.monotonic() - since
        expected_s = self._closing_s

        if expected_s is None or elapsed_s > expected_s:
            return f"it has taken {elapsed_s:.0f} s since its update began"

        remaining_s = max(1.0, expected_s - elapsed_s)
        return f"about {remaining_s:.0f} s left"


# ----------------------------------------------------------------- cluster and trackers


def open_session(config: Config) -> Session:
    """Open the cluster to run on, and make the run's folder.

    The processes of the cluster keep their logs in this folder. Signals are handled
    from here on.
    """
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with (
        announcing(lambda: Outlook("stopping as soon as Ray has started", "")),
        blocking("starting Ray"),
    ):
        session = Session.open(
            config.ray.address,
            log_dir=Path(config.run.dir) / "logs",
            stall_s=config.run.stall_s,
        )

    # `ray.init` has installed a signal handler of its own, which this call replaces.
    stop_on_signals()
    return session


@contextlib.contextmanager
def recording(config: Config, recovery: Recovery, system: System) -> Iterator[Trackers]:
    """Yield the trackers of the run, and close them as failed if the block raises."""
    trackers = Trackers([])
    try:
        # W&B may wait for its server, and knows nothing of signals.
        with raising_signals(), blocking("opening the record (tracking)"):
            trackers = open_trackers(
                config.tracking,
                config.run,
                to_tree(config),
                committed_step=recovery.recorded_step,
                state=recovery.tracker_state,
                follows=reports().restarts > 0,
            )
        # The record is repaired by now, and so are its last lines.
        recorded = read_metrics(Path(config.run.dir) / METRICS)
        trackers.add(LearningWatch(config, recorded))
        if config.run.trace == "steps":
            continues = recovery.recorded_step is not None
            trackers.add(
                TraceTracker(Path(config.run.dir), system.groups, continues=continues)
            )
        yield trackers
    except BaseException:
        trackers.close(failed=True)
        raise
    trackers.close(failed=False)


# ------------------------------------------------------ trackers that look at the run

_DRIVER = "driver"
"""Name of the driver's track in a trace."""

_SOON_S = 2.0
"""Seconds that a step gives processes for their spans."""

_LAST_S = 30.0
"""Seconds that the end of a run gives them."""


class LearningWatch(Tracker):
    """Prints a warning when the newest steps have a cause to learn nothing.

    What is printed follows from recorded lines and the configuration alone, so a
    resumed run prints the same as one that never stopped.
    """

    def __init__(self, config: Config, recorded: Sequence[Line]) -> None:
        """Take the configuration and the lines of the steps before.

        Args:
            config: Configuration of the run.
            recorded: Lines of metrics.jsonl that a resumed run continues.
        """
        self._config = to_tree(config)
        self._lines: deque[Line] = deque(recorded, maxlen=PATIENCE)
        self._printed: set[str] = set()

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the causes that the newest steps show and that were not printed."""
        self._lines.append(metrics)
        for cause in learns_nothing(list(self._lines), self._config):
            # Failed scores are in the line of each step, and were reported before.
            is_new = cause.kind not in self._printed | {FAILED_SCORES}
            if is_new and cause.last_step == step:
                self._printed.add(cause.kind)
                print(f"warning: {cause}", file=sys.stderr, flush=True)

    def close(self, failed: bool) -> None: ...

    def outputs(self) -> dict[str, str]:
        return {}


class TraceTracker(Tracker):
    """Appends what the processes did since the last step to trace.json.

    No step waits for a process that is busy, and hardly for one that hangs: processes
    reply in their control group, and one that was late is not waited for again before
    it has replied. What it noted is not lost but for what its buffer cannot hold.
    """

    def __init__(self, run_dir: Path, groups: Groups, *, continues: bool) -> None:
        """Begin to gather spans.

        Args:
            run_dir: Folder of the run.
            groups: The processes of the run.
            continues: Whether the run goes on from a checkpoint in this folder.

        Raises:
            OSError: The file cannot be read or written.
        """
        self._path = run_dir / TRACE
        self._groups = groups
        self._file = TraceFile(self._path, continues=continues)
        self._warned: set[str] = set()

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Do nothing: samples take no time."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._gather()

    def close(self, failed: bool) -> None:
        # Processes of a run that has failed may be lost, and no reply of them comes.
        if failed:
            self._file.append([SPANS.take(_DRIVER)])
            return
        # A process whose last reply was late is asked only the second time.
        deadline = time.monotonic() + _LAST_S
        for _ in range(2):
            self._gather(max(0.0, deadline - time.monotonic()), waits_for_late=True)

    def outputs(self) -> dict[str, str]:
        return {"trace": str(self._path)}

    def _gather(
        self, within_s: float = _SOON_S, *, waits_for_late: bool = False
    ) -> None:
        """Write the spans of all processes that ended since the last time."""
        if self._file.is_full:
            self._warn_once(
                "full",
                f"{self._path} has {MOST_BYTES >> 20} MiB, and nothing more is written"
                " to it",
            )
            return
        processes = [SPANS.take(_DRIVER)]
        # A stop is heeded by the loop, which has a line to write first.
        with contextlib.suppress(Interrupted):
            try:
                processes += self._groups.take_spans(
                    within_s, waits_for_late=waits_for_late
                )
            except ClusterError as error:
                self._warn_once(
                    "cluster",
                    f"{self._path} lacks what processes did in this step, and they are"
                    f" asked again after the next: {error}",
                )
        self._file.append(processes)

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            print(f"warning: {text}", file=sys.stderr, flush=True)
