"""The writing of a checkpoint by the ranks and the driver, one at a time.

Invariant: a checkpoint counts once all ranks have written their parts, and is removed
if one has not. With run.checkpoint_behind that is known later, when `finish` returns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controllers.trainers.base import StateFiles
from verl_ray.checkpoint.manifest import FileRecord
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.signals import finishing, print_error
from verl_ray.cluster.stalls import IDLE_PROCESSES
from verl_ray.cluster.waiting import Background
from workers.model_worker import ModelWorker


@dataclass(frozen=True)
class CheckpointContent:
    """The parts of a checkpoint.

    Attributes:
        step: Number of finished steps.
        state: The driver's state, a JSON object.
        config: The configuration of the run, a JSON object.
        groups: The roles whose ranks write their parts, by name.
        files: Writes further files of the driver; None if there are none.
        best: The step of the best evaluation, whose checkpoint stays.
    """

    step: int
    state: Mapping[str, Any]
    config: Mapping[str, Any]
    groups: Mapping[str, WorkerGroup[Any]]
    files: StateFiles | None
    best: int | None


class CheckpointWriting:
    """Writes one checkpoint at a time to a store."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        behind: bool,
        committed: Callable[[int, float], None],
    ) -> None:
        """Begin without a checkpoint.

        Args:
            store: The store.
            behind: Whether ranks write from a copy of their state while they go on.
            committed: Called for each checkpoint that counts with its step, and with
                the seconds for which the run waited for it.
        """
        self._store = store
        self._behind = behind
        self._committed = committed
        self._unfinished: contextlib.ExitStack | None = None
        self._unfinished_calls: dict[str, Call[Any]] = {}
        self._files: dict[str, FileRecord] = {}
        """Files of the checkpoint that is being written, by relative path."""

        self._waited_s = 0.0
        """Seconds for which the run waited until all ranks had begun to write behind
        it; 0 before that."""

        self._waiting_since = 0.0
        """Reading of the clock at which the run began to wait, again or first."""

        self.step: int | None = None
        """Step whose checkpoint is being written."""

    def write(self, content: CheckpointContent, background: Background | None) -> None:
        """Write a checkpoint, or begin to. A signal waits for that.

        Raises:
            CheckpointError: It cannot be written, or the one before it could not.
        """
        # Only one checkpoint is written at a time.
        self.finish(background)
        self._waited_s = 0.0
        self._waiting_since = time.perf_counter()
        method = ModelWorker.begin_save if self._behind else ModelWorker.save

        # The death of another process breaks off no checkpoint.
        unwatched = IDLE_PROCESSES.unwatched()
        with finishing(), unwatched, contextlib.ExitStack() as writing:
            folder = writing.enter_context(self._writing(content))
            saves = {
                name: group.broadcast(method, str(folder / name))
                for name, group in content.groups.items()
            }
            if content.files is not None:
                content.files.write(folder)
            wait_all(list(saves.values()), background=background)
            if not self._behind:
                self._note_files(saves)

            if self._behind:
                # The calls are made now, while all ranks live. If a rank dies later,
                # its reply still shows whether its part is whole.
                self._unfinished_calls = {
                    name: group.broadcast(ModelWorker.finish_save)
                    for name, group in content.groups.items()
                }
                # The manifest is written when `finish` closes this stack.
                self._unfinished = writing.pop_all()
                self._waited_s = time.perf_counter() - self._waiting_since

    def finish(self, background: Background | None = None) -> None:
        """Wait for the checkpoint that is being written, if any, and commit it.

        Raises:
            CheckpointError: It could not be written, and is removed.
        """
        # A second call must not close the stack again, even if the first one failed.
        unfinished = self._unfinished
        self._unfinished = None
        if unfinished is None:
            return

        self._waiting_since = time.perf_counter()
        with finishing(), IDLE_PROCESSES.unwatched(), unfinished:
            # Each is waited for, whatever happened to those that were made after it.
            for call in self._unfinished_calls.values():
                wait_all([call], background=background)
            self._note_files(self._unfinished_calls)

    def rescue(self) -> None:
        """Commit the unfinished checkpoint after a failure, if it is whole; say so."""
        if self._unfinished is None:
            return

        step = self.step
        try:
            self.finish()
        except Exception as failure:
            what = f"the checkpoint of step {step} is not whole and was removed"
            print_error(f"warning: {what}: {failure}")
        else:
            print_error(
                f"the checkpoint of step {step}, which was being written, is whole and"
                " counts"
            )

    @contextlib.contextmanager
    def _writing(self, content: CheckpointContent) -> Iterator[Path]:
        """Yield the folder for a checkpoint, and commit it at the end."""
        self.step = content.step
        self._files = {}
        try:
            with self._store.writing(
                content.step,
                content.state,
                content.config,
                content.groups,
                best=content.best,
                hashed=self._files,
            ) as folder:
                yield folder
            waited_s = self._waited_s + time.perf_counter() - self._waiting_since
            self._committed(content.step, waited_s)
        finally:
            self.step = None

    def _note_files(self, saves: Mapping[str, Call[Any]]) -> None:
        """Note what the ranks of each role say of the files that they have written."""
        for role, call in saves.items():
            for files in call.result():
                for name, record in files.items():
                    self._files[f"{role}/{name}"] = record
