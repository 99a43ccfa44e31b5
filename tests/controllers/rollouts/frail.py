"""A grader that fails at chosen rows, and a replica that chosen prompts end; a module of
its own so that worker processes can import it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from verl_ray.cluster.context import WorkerContext, concurrent
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Prompts, Rollouts, Scores
from workers.generation import Generation
from workers.reward import Grader
from workers.rollout import (
    RolloutSpec,
    RolloutWorker,
)

SCORED = "scored.txt"
"""File with a line for each row that a rank has begun to score: its id."""


class FrailGrader(Grader):
    """Scores a row by its id.

    A file in `folder` that is named as a row makes it fail at this row as the file
    says: kill, freeze, or the name of an exception. The file is removed first, unless
    it says `always`, too.
    """

    def __init__(self, _: WorkerContext, folder: Path) -> None:
        self._folder = folder

    def score(self, rows: Rollouts, step: int, is_held_out: bool = False) -> Scores:
        for row in rows.row_id.tolist():
            with (self._folder / SCORED).open("a") as record:
                record.write(f"{row}\n")
            self._fail_at(self._folder / str(row))
        return Scores.ok(rows.row_id.astype(np.float32) / 2)

    def _fail_at(self, order: Path) -> None:
        if not order.exists():
            return
        how, *always = order.read_text().split()
        if not always:
            order.unlink()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "freeze":
            # A signal for the process leaves this thread time to reply.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif how == "MemoryError":
            raise MemoryError("of a grader")
        raise ValueError(how)


POISON = "poison.txt"
"""File beside the logs with the purposes and ordinals of prompts, a line for each."""


class PoisonedReplica(RolloutWorker):
    """Ends with a poisoned prompt, of whose responses it hands on the first of all."""

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        super().__init__(context, spec)
        self._poison = context.log_path.parent / POISON

    @concurrent
    def generate(
        self,
        prompts: Prompts,
        generation: Generation,
        requested_rows: Int64 | None = None,
    ) -> Iterator[Rollouts]:
        lines = self._poison.read_text().splitlines()
        texts = [line.split() for line in lines]
        poison = [int(text) for purpose, text in texts if purpose == generation.purpose]
        for rows in super().generate(prompts, generation, requested_rows):
            is_poisoned = np.isin(rows.group_id, poison)
            is_first = rows.row_id % generation.group_size == 0
            may_go = ~is_poisoned | (is_first & (generation.group_size > 1))
            if may_go.any():
                yield rows.select(np.flatnonzero(may_go))
            if not may_go.all():
                # Until what was yielded has arrived.
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
