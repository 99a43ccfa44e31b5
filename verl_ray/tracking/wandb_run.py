"""The metrics and sample tables of a run in Weights & Biases, offline or online.

They are in `<run dir>/wandb/`.

Invariant: a resumed run continues the run id of the checkpoint, and
`training/global_step` is the axis of every chart. W&B's own step counter is not used:
it never goes back, so after a resume it would drop the steps that run again.

Deliberately not here: a copy of the console, of the code or of the machine's
statistics.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.config.run import WandbConfig
from verl_ray.errors import ConfigError, Problem, TrackingError
from verl_ray.paths import program
from verl_ray.tracking.base import GLOBAL_STEP, SAMPLES, Sample, Tracker

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


class WandbTracker(Tracker):
    """Writes to one W&B run."""

    def __init__(
        self,
        config: WandbConfig,
        run_dir: Path,
        name: str,
        tree: Mapping[str, object],
        state: Mapping[str, str],
    ) -> None:
        """Open a W&B run.

        Args:
            config: Settings with mode `offline` (no account, no network) or `online`.
            run_dir: Folder of the run, which holds `wandb/`.
            name: Name of the run.
            tree: Resolved configuration.
            state: State of the run to continue; empty for a new run.

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

        self._arguments: dict[str, Any] = {
            "project": config.project,
            "entity": config.entity,
            "group": config.group,
            "tags": config.tags,
            "name": name,
            "id": state.get(RUN_ID) or secrets.token_hex(4),
            "resume": "allow",
            "mode": config.mode,
            "force": self._online,
            "dir": str(run_dir),
            "config": dict(tree),
            "settings": _settings(),
        }
        # A caller of Python may have a run of its own in the same process of W&B's.
        self._starts_process = "WANDB_SERVICE" not in os.environ
        self._run = self._start()

        self._folder = run_dir / "wandb"
        self._table: dict[str, wandb.Table] = {}
        self._closed = False

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
        try:
            self._run.log(record)
        except Exception:
            # W&B's process may have exited: `ray job stop` signals all processes that
            # the driver has started.
            self._end_process()
            self._arguments["settings"].init_timeout = REOPEN_TIMEOUT_S
            self._run = self._start()
            self._run.log(record)

    def close(self, failed: bool) -> None:
        if self._closed:
            return

        self._closed = True
        try:
            self._run.finish(exit_code=int(failed))
        except Exception:
            self._end_process()
            raise
        else:
            if self._starts_process:
                self._end_process()
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
                commands.append(shlex.join([program("wandb"), "sync", str(folder)]))

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

        try:
            if self._online and not wandb.login(prompt=False):
                raise ConfigError([_no_credentials()])
            run: wandb.Run = wandb.init(**self._arguments)
        except ConfigError:
            raise
        except Exception as error:
            # W&B's service raises classes that have nothing in common.
            raise TrackingError(
                f"W&B did not start: {error}. tracking.wandb.mode=offline needs no"
                " server."
            ) from error

        run.define_metric(GLOBAL_STEP)
        run.define_metric("*", step_metric=GLOBAL_STEP)
        return run

    def _end_process(self) -> None:
        """Give up W&B's process, which does not reply.

        Otherwise W&B calls it once more when this process exits, and prints how that
        fails.
        """
        import wandb

        with contextlib.suppress(Exception):
            wandb.teardown(exit_code=1)
        os.environ.pop("WANDB_SERVICE", None)


def credentials_problem(config: WandbConfig) -> Problem | None:
    """Return a problem if W&B is online and there are no credentials here.

    W&B's server is not asked.
    """
    if config.mode != "online":
        return None

    # W&B takes half a second to import.
    import wandb

    # It prints where it looks for credentials.
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            if wandb.login(prompt=False, verify=False):
                return None
        except Exception as error:
            fix = "Correct WANDB_API_KEY, run `wandb login`, or choose offline."
            return Problem("tracking.wandb.mode", config.mode, f"W&B: {error}", fix)
    return _no_credentials()


def _no_credentials() -> Problem:
    """Return the problem of a W&B run without credentials."""
    return Problem(
        "tracking.wandb.mode",
        "online",
        "there are no W&B credentials here, or WANDB_MODE keeps W&B from using them",
        "Set WANDB_API_KEY, run `wandb login`, or choose offline.",
    )
