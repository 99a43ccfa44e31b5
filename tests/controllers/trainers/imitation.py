"""A task in one file, as a user may write one: imitation of every token.

Tokens of the prompt are included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from controllers.system.build import System
from controllers.trainers.supervised import Examples, SupervisedTask, SupervisedTrainer
from controllers.watch.held_out_measures import Evaluation
from verl_ray.cluster.calls import Call
from verl_ray.cluster.waiting import put
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.data import DataSet
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.schema import Config
from verl_ray.data.conversations import SupervisedSource
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import Problem
from verl_ray.learning.objectives import SupervisedObjective
from verl_ray.settings.section import OverriddenKeys, Positive, PositiveFloat, Section
from workers.model_worker import ModelWorker, UpdateReport


class ImitationSection(Section):
    batch_size: Positive
    max_tokens: Positive
    weight: PositiveFloat
    """Weight of every row."""


class ImitationConfig(Config):
    student: SupervisedRole
    imitation: ImitationSection

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        return {"student": self.student}

    @property
    def examples_per_step(self) -> int:
        return self.imitation.batch_size

    @property
    def examples_key(self) -> str:
        return "imitation.batch_size"

    @property
    def longest_row(self) -> tuple[int, str]:
        return self.imitation.max_tokens, "imitation.max_tokens"

    def problems(self, overridden: OverriddenKeys) -> Iterator[Problem]:
        """Yield the problems of any task, and of a weight that is too large."""
        yield from super().problems(overridden)

        weight = self.imitation.weight
        if weight > self.imitation.batch_size:
            yield Problem("imitation.weight", weight, "this is no weight", "Use 1.0.")


class StudentWorker(ModelWorker):
    def imitate(self, rows: TrainingBatch, weight: float) -> UpdateReport:
        """Run one optimizer step on all tokens but the first of each row."""
        mask = rows.response_mask | True
        mask[rows.offsets[:-1]] = False
        weighted = rows.replace(
            response_mask=mask, loss_weight=weight * rows.loss_weight
        )
        return self.learn(weighted, SupervisedObjective())


class ImitationTrainer(SupervisedTrainer[StudentWorker]):
    weight: float

    def update(self, rows: TrainingBatch) -> Call[list[UpdateReport]]:
        return self.group.scatter(StudentWorker.imitate, put(rows), self.weight)

    def measure(self) -> Evaluation:
        return Evaluation({"val-core/held_out/rows": float(len(self.held_out))})


class ImitationTask(SupervisedTask[ImitationConfig]):
    workers: ClassVar = {"student": StudentWorker}
    num_held_out = 4

    def source(
        self, data_sets: Sequence[DataSet], *, may_stream: bool
    ) -> SupervisedSource:
        config = self.config
        return SupervisedSource(
            data_sets,
            load_tokenizer(config.student.model.path),
            config.data,
            max_tokens=config.imitation.max_tokens,
            seed=config.run.seed,
        )

    def make_trainer(self, data: Examples, system: System) -> ImitationTrainer:
        student = system.models["student"]
        batch_size = self.config.imitation.batch_size
        trainer = ImitationTrainer(
            "student", student, SupervisedObjective(), data, batch_size, 5
        )
        trainer.weight = self.config.imitation.weight
        return trainer
