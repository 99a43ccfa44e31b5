"""Learning from a data set, one step after another: what supervised and preference training share.

Invariant: a step is one optimizer step on the next batch of the source, so the source's cursor, the model and the
optimizer are all that a resumed run needs. Deliberately not here: what is learned (`sft.py`, `reward_model.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from controllers.trainers.base import Evaluation, Task, Trainable
from controllers.watch import measures
from controllers.watch.gradients import GradientWatch
from controllers.watch.measures import Metrics
from controllers.watch.memory import MemoryRecord
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.signals import no_way_back
from verl_ray.cluster.store import put
from verl_ray.config.schema import Config
from verl_ray.data.cursor import CursorState
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import TrainingBatch
from verl_ray.profiling.timers import Timers
from workers.model_worker import ModelWorker, UpdateReport

W = TypeVar("W", bound=ModelWorker)


class Source(Protocol):
    """A data set, drawn batch by batch."""

    def next_batch(self, count: int, /) -> TrainingBatch: ...

    @property
    def epoch(self) -> int: ...

    def state(self) -> CursorState: ...

    def load_state(self, state: Mapping[str, int | str]) -> None: ...


R = TypeVar("R", bound=Config)


class SupervisedTrainer(ABC, Generic[W]):
    """One role, and the rows that it learns from."""

    def __init__(
        self,
        role: str,
        group: WorkerGroup[W],
        train: Source | None,
        held_out: TrainingBatch | None,
        batch_size: int,
        max_skipped_steps: int,
        memory: MemoryRecord | None = None,
    ) -> None:
        """`train`: None for a trainer that only evaluates. `memory`: recorded with each step, if given."""
        self.role, self.group = role, group
        self._source, self._batch_size = train, batch_size
        self._held_out = None if held_out is None else put(held_out)
        self.timers = Timers()
        self._gradients = GradientWatch(max_skipped_steps)
        self._memory = memory
        self.finished = False

    @abstractmethod
    def update(self, rows: Sharded[TrainingBatch]) -> Call[list[UpdateReport]]:
        """One optimizer step on these rows."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """The model on the held-out rows; may say that training is finished."""

    def begin(self, done: int) -> None:
        """The ranks hold all that there is."""

    def step(self, number: int) -> Metrics:
        """One optimizer step on the next batch."""
        if self._memory is not None:
            self._memory.ask()  # of the step before: answered while this one is computed
        with self.timers("step"):
            no_way_back()  # a stop waits for the end of the step
            rows = self._train.next_batch(self._batch_size)
            with self.timers(f"update_{self.role}"), self.timers.waiting():
                reports = self.update(put(rows)).result()
        self._gradients.see(self.role, [reports])
        timings = self.timers.take()
        return {
            **measures.of_updates(self.role, [reports]),
            **timings,
            "perf/total_num_tokens": float(rows.num_tokens),
            "perf/throughput": rows.num_tokens / timings["timing_s/step"] / self.group.num_ranks,
            "training/epoch": float(self._train.epoch),
            **(self._memory.metrics() if self._memory is not None else {}),
        }

    def export(self, path: str) -> None:
        """The trained model as a Hugging Face directory."""
        self.group.broadcast(ModelWorker.export, path).result()

    @property
    def _train(self) -> Source:
        assert self._source is not None, "there are rows to learn from wherever there is training"
        return self._source

    @property
    def held_out(self) -> Sharded[TrainingBatch]:
        assert self._held_out is not None, "there are held-out rows wherever there is an evaluation"
        return self._held_out

    # ----------------------------------------------------------------------------------------------- recovery

    @property
    def groups(self) -> dict[str, WorkerGroup[W]]:
        """The roles whose state a checkpoint holds."""
        return {self.role: self.group}

    def state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint, as JSON."""
        return {"cursor": self._train.state(), "finished": self.finished, "gradients": self._gradients.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._source is not None:
            self._source.load_state(state["cursor"])
        self.finished = state["finished"]
        self._gradients.load_state(state["gradients"])


class SupervisedTask(Task[R]):
    """A run that learns from a data set alone, and leaves a model directory."""

    @property
    def model_folder(self) -> Path:
        """What it leaves."""
        return self.folder / "model"

    def conclude(self, trainer: Trainable) -> None:
        assert isinstance(trainer, SupervisedTrainer)
        trainer.export(str(self.model_folder))
