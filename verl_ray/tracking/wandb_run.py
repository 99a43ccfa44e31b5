"""The metrics and sample tables of a run in Weights & Biases, offline or online.

They are in `<run dir>/wandb/`.

Invariant: a resumed run continues the run id of the checkpoint, and
`training/global_step` is the axis of every chart. W&B's own step counter is not used:
it never goes back, so after a resume it would drop the steps that run again. Of a run
that goes on by itself W&B has each step once: what a killed process has lost is sent
again, from the run's own record.

Deliberately not here: a copy of the console, of the code or of the machine's
statistics.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.config.run import WandbConfig
from verl_ray.errors import ConfigError, TrackerAway, TrackingError
from verl_ray.ownership import prefix
from verl_ray.paths import program
from verl_ray.private_files import shared_folder
from verl_ray.shell import for_shell
from verl_ray.tracking.base import (
    GLOBAL_STEP,
    SAMPLES,
    Sample,
    Tracker,
    UnhurriedTracker,
)
from verl_ray.tracking.jsonl import METRICS, read_metrics
from verl_ray.tracking.wandb_credentials import log_in, no_credentials
from verl_ray.tracking.wandb_process import WandbProcess
from verl_ray.tracking.wandb_record import recorded_steps

if TYPE_CHECKING:
    import wandb

RUN_ID = "wandb_run_id"

FLUSH_INTERVAL_S = 1.0
"""Seconds of the record that a kill may cost.

W&B's default of 15 s loses whole short runs.
"""

FINISH_TIMEOUT_S = 60.0
"""Seconds that the end of a run waits for uploads.

The rest is on the disk, and `wandb sync` sends it.
"""

INIT_TIMEOUT_S = 60.0

REOPEN_TIMEOUT_S = 10.0
"""Seconds that reopening a run may take. A run that is stopping may not have longer."""

_START_FACTOR = 3
"""Limit of the whole start, as a multiple of that of the run's first reply.

Some of W&B's requests have a limit of their own, and others have none.
"""

_DATA_DIR = "WANDB_DATA_DIR"


def _settings() -> wandb.Settings:
    """Return W&B's settings of every run."""
    # Imported here because it takes half a second, which a run without W&B should not
    # pay.
    import wandb

    return wandb.Settings(
        console="off",
        silent=True,
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        x_disable_stats=True,
        x_transaction_log_flush_interval=FLUSH_INTERVAL_S,
    )


def _arguments(
    config: WandbConfig,
    run_dir: Path,
    name: str,
    tree: Mapping[str, object],
    run_id: str,
) -> dict[str, Any]:
    """Return the arguments of `wandb.init`."""
    return {
        "project": config.project,
        "entity": config.entity,
        "group": config.group,
        "tags": config.tags,
        "name": name,
        "id": run_id,
        "resume": "allow",
        "mode": config.mode,
        "force": config.mode == "online",
        "dir": str(run_dir),
        "config": dict(tree),
        "settings": _settings(),
    }


class WandbTracker(Tracker):
    """Writes to one W&B run."""

    def __init__(
        self,
        config: WandbConfig,
        run_dir: Path,
        name: str,
        tree: Mapping[str, object],
        state: Mapping[str, str],
        *,
        follows: bool = False,
        init_timeout_s: float | None = None,
    ) -> None:
        """Open a W&B run.

        Args:
            config: Settings with mode `offline` (no account, no network) or `online`.
            run_dir: Folder of the run, which holds `wandb/`.
            name: Name of the run.
            tree: Resolved configuration.
            state: State of the run to continue; empty for a new run.
            follows: Whether another driver was killed or failed just before this one,
                which makes the same steps again.
            init_timeout_s: Limit of the server's first reply, in seconds; None for
                that of a run.

        Raises:
            ConfigError: W&B is online and there are no credentials.
            TrackingError: W&B cannot start, for example because its server does not
                reply.
        """
        self._online = config.mode == "online"
        # W&B writes to /tmp instead if the folder is missing.
        run_dir.mkdir(parents=True, exist_ok=True)
        # Tables wait here for their upload. W&B's own choice is a folder in the home
        # directory, which grows for ever.
        self._sets_data_dir = _DATA_DIR not in os.environ
        os.environ.setdefault(_DATA_DIR, str(run_dir / "wandb"))

        run_id = state.get(RUN_ID) or secrets.token_hex(4)
        self._arguments = _arguments(config, run_dir, name, tree, run_id)
        if init_timeout_s is not None:
            self._arguments["settings"].init_timeout = init_timeout_s
        # A caller of Python may have a run of its own in the same process of W&B's.
        self._process = WandbProcess()
        try:
            self._run = self._start()
        except BaseException:
            self._process.kill()
            if self._process.is_own:
                self._process.end()
            raise

        self._record = run_dir / METRICS
        self._folder = run_dir / "wandb"
        self._table: dict[str, wandb.Table] = {}
        self._closed = False
        self._earlier_steps: set[int] = set()
        """Steps that W&B has of a driver before, and that are made again."""
        if follows and RUN_ID in state:
            self._earlier_steps = self._send_what_is_missing()

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Hold a table `val/generations` until the metrics of the step follow."""
        import wandb

        columns = [GLOBAL_STEP, *(field.name for field in fields(Sample))]
        # The entries differ from row to row, so a cell of the table is a text.
        data = [
            [step, *astuple(replace(row, entries={}))[:-1], json.dumps(row.entries)]
            for row in rows
        ]
        self._table = {SAMPLES: wandb.Table(columns=columns, data=data)}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {**self._table, **metrics}
        self._table = {}
        if step in self._earlier_steps:
            return
        try:
            self._run.log(record)
        except Exception:
            # W&B's process may have exited: `ray job stop` signals all processes that
            # the driver has started.
            self._start_again(before=step)
            self._run.log(record)

    def alert(self, title: str, text: str) -> None:
        """Send a message to those who subscribe to W&B's alerts.

        Args:
            title: Its title, of less than 64 characters.
            text: The message.
        """
        self._run.alert(title, text, level="WARN")

    def _start_again(self, before: float = math.inf) -> None:
        """Start another process of W&B's, which gets the lines that the last one lost.

        Args:
            before: Step that is sent next.
        """
        self._process.end()
        self._arguments["settings"].init_timeout = REOPEN_TIMEOUT_S
        self._run = self._start()
        self._send_what_is_missing(before)

    def _send_what_is_missing(self, before: float = math.inf) -> set[int]:
        """Send the steps of the run's record that W&B lacks.

        Args:
            before: Step that is sent next.

        Returns:
            The steps that W&B had.
        """
        try:
            recorded = recorded_steps(self._folder, self._run.id)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise TrackingError(
                f"what W&B has of the run cannot be read from {self._folder}: {error}"
            ) from error
        steps = {step for _, step in recorded}
        if self._online:
            # A process that was killed may have sent less than it has written, and the
            # one after it counts on from what was sent.
            num_sent = self._run.starting_step
            steps = {step for line, step in dict(recorded).items() if line < num_sent}
        for line in read_metrics(self._record) if self._record.exists() else ():
            step = int(line[GLOBAL_STEP])
            if step < before and step not in steps:
                self._run.log(line)
        return steps

    def close(self, failed: bool) -> None:
        if self._closed:
            return

        self._closed = True
        try:
            try:
                self._run.finish(exit_code=int(failed))
            except Exception:
                self._start_again()
                self._run.finish(exit_code=int(failed))
        except Exception:
            self._process.end()
            raise
        else:
            if self._process.is_own:
                self._process.end()
        finally:
            # The next run of this process has a folder of its own.
            if self._sets_data_dir:
                os.environ.pop(_DATA_DIR, None)

    def outputs(self) -> dict[str, str]:
        """Return the run's URL, or the commands that upload its folders, in order.

        Every process of an offline run has a folder, so a resumed run has several. Each
        was started with resume=allow, so `wandb sync` appends it to the run of its id.
        """
        if self._online and self._run.url:
            return {"W&B": self._run.url}

        commands = []
        for folder in sorted(self._folder.glob(f"offline-run-*-{self._run.id}")):
            # `wandb sync` leaves this marker, and passes over what has it.
            if not any(folder.glob("*.wandb.synced")):
                commands.append(for_shell([program("wandb"), "sync", str(folder)]))

        if len(commands) == 1:
            return {"W&B": commands[0]}
        return {
            f"W&B, part {number} of {len(commands)}": command
            for number, command in enumerate(commands, start=1)
        }

    def state(self) -> dict[str, str]:
        return {RUN_ID: self._run.id}

    def _start(self) -> wandb.Run:
        """Start the run in a process of W&B's, under its id.

        Raises:
            ConfigError: W&B is online and there are no credentials.
            TrackingError: W&B cannot start.
        """
        import wandb

        limit_s = _START_FACTOR * self._arguments["settings"].init_timeout
        try:
            with self._process.killed_after(limit_s):
                if self._online and not log_in(verify=True):
                    raise ConfigError([no_credentials()])
                run: wandb.Run = wandb.init(**self._arguments)
        except ConfigError:
            raise
        except Exception as error:
            # W&B's service raises classes that have nothing in common.
            raise TrackerAway(
                f"W&B did not start: {error}. tracking.wandb.mode=offline needs no"
                " server."
            ) from error

        run.define_metric(GLOBAL_STEP)
        run.define_metric("*", step_metric=GLOBAL_STEP)
        return run

    def kill_process(self) -> None:
        """Kill W&B's process, so that calls fail that wait for it.

        Any thread may call this.
        """
        self._process.kill()


class AbsentWandbRun(Tracker):
    """A W&B run that a driver could not reach, and that a later one continues."""

    def __init__(self, state: Mapping[str, str]) -> None:
        """Keep what a later driver needs.

        Args:
            state: State of the run.
        """
        self._state = {RUN_ID: state[RUN_ID]}

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...

    def outputs(self) -> dict[str, str]:
        return {}

    def state(self) -> dict[str, str]:
        return self._state


def open_wandb(
    config: WandbConfig,
    run_dir: Path,
    name: str,
    tree: Mapping[str, object],
    state: Mapping[str, str],
    *,
    follows: bool = False,
) -> Tracker:
    """Open a W&B run that never holds up the run; arguments as of `WandbTracker`.

    A run that continues goes on where W&B cannot start. A new run has nothing to lose
    yet, and more often a mistake in its settings.

    Raises:
        ConfigError: W&B is online and there are no credentials.
        TrackingError: W&B cannot start, and the run is new.
    """
    try:
        tracker = WandbTracker(config, run_dir, name, tree, state, follows=follows)
    except TrackingError as error:
        if RUN_ID not in state:
            raise
        with contextlib.suppress(OSError):
            print(f"warning: the run goes on without: {error}", file=sys.stderr)
        return AbsentWandbRun(state)
    return UnhurriedTracker(tracker, tracker.kill_process)


def send_alert(
    config: WandbConfig,
    run_dir: Path,
    name: str,
    tree: Mapping[str, object],
    text: str,
) -> bool:
    """Send an alert of a run that no process keeps open; return whether one was sent.

    It is sent by the W&B run that the folder has an online record of, which then counts
    as failed until a driver continues it.

    Args:
        config: Settings of W&B.
        run_dir: Folder of the run.
        name: Name of the run.
        tree: Resolved configuration.
        text: The message.

    Raises:
        ConfigError: There are no credentials.
        TrackingError: W&B cannot start.
        UnsafeFile: This user's folder in /dev/shm is not its own.
    """
    sessions = sorted((run_dir / "wandb").glob("run-*-*"))
    if config.mode != "online" or not sessions:
        return False
    state = {RUN_ID: sessions[-1].name.rpartition("-")[2]}

    # The disk of the run may be what is full.
    with tempfile.TemporaryDirectory(prefix=prefix("alert"), dir=shared_folder()) as at:
        tracker = WandbTracker(
            config, Path(at), name, tree, state, init_timeout_s=REOPEN_TIMEOUT_S
        )
        try:
            tracker.alert(f"{name:.40} waits", text)
        finally:
            tracker.close(failed=True)
    return True
