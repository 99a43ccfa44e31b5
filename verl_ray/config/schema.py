"""The configuration of a run of any task: the shared sections, and the task's answers.

Invariant: YAML under `configs/` holds every value, so there are no defaults here. A
field that is absent there is an error, and so is a key that is absent here.

What sets one task apart is in its own type (`tasks`, or the file of its trainer). That
type overrides the properties below, so other code never has to ask which task it has.
The sections are in modules of this package, by noun (`run`, `data`, `roles`, ...).
Types, ranges and the meaning of each setting stand with its field.

Deliberately not here: rules over several fields (`rules`), reading YAML (`load`), and
anything about the machine the run will use (`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from verl_ray.config.data import DataFilesConfig, RowFormat
from verl_ray.config.preparation import PrepareConfig
from verl_ray.config.reward import JudgeReward, SingleReward
from verl_ray.config.roles import (
    ModelConfig,
    ModelRole,
    OptimizerConfig,
    SupervisedRole,
)
from verl_ray.config.rollout import ServedModel
from verl_ray.config.run import RayConfig, RunConfig, TrackingConfig
from verl_ray.config.section import Section

if TYPE_CHECKING:  # they import this module
    from verl_ray.config.rollout_task import RolloutTaskConfig
    from verl_ray.config.rules.rule import TaskRule


class Config(Section):
    """One run of any task: the shared sections, and what other code needs to know."""

    task: str
    """Name of the task, which leads to its file (`controllers/tasks.py`)."""
    run: RunConfig
    ray: RayConfig
    model: ModelConfig
    data: DataFilesConfig
    tracking: TrackingConfig

    own_rules: ClassVar[tuple[TaskRule, ...]] = ()
    """Rules over several settings that only this task has, added to those of all tasks.

    Each rule takes the configuration and the keys that the user set (`rules/rule.py`).
    """

    # --------------------------------------------------------------------------- models

    @property
    @abstractmethod
    def model_roles(self) -> dict[str, ModelRole]:
        """The roles, by name, that run a model on a training backend.

        Only roles that the run creates are listed. The evaluated role comes first.
        """

    @property
    def learners(self) -> dict[str, SupervisedRole]:
        """The model roles that learn, by name."""
        learners = {}

        for name, role in self.model_roles.items():
            learner = role.as_learner
            if learner is not None:
                learners[name] = learner

        return learners

    @property
    def evaluated_role(self) -> str:
        """Name of the role whose model an evaluation measures."""
        return next(iter(self.model_roles))

    def head_of(self, role: str) -> Literal["policy", "value"]:
        """Return the kind of head on a role's model.

        A policy head gives logits over the vocabulary, a value head a single number.
        """
        return "policy"

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Every optimizer that has settings, by the key of its section."""
        return {
            f"{name}.optimizer": role.optimizer for name, role in self.learners.items()
        }

    @property
    def shares_processes(self) -> bool:
        """Whether roles on one backend share a process per rank.

        If they do, rollout engines also share the devices of these processes.
        """
        return True

    def learning_steps(self, role: str) -> int:
        """Return the number of training steps in which a role learns."""
        return self.run.steps

    @property
    def main_metric(self) -> str:
        """Name of the held-out metric that the best step is chosen by.

        * stands for anything; metrics with several matching names are averaged.
        """
        return "val-core/*"

    # ----------------------------------------------------------------------------- rows

    @property
    @abstractmethod
    def examples_per_step(self) -> int:
        """Number of examples by which one step moves the data cursor."""

    @property
    @abstractmethod
    def examples_key(self) -> str:
        """The key that sets `examples_per_step`."""

    @property
    def rows_per_step(self) -> int:
        """Number of rows that a step learns from."""
        return self.examples_per_step

    @property
    def step_in_words(self) -> str:
        """Size of a step in words, such as "32 prompts x 8 = 256 rows"."""
        return f"{self.rows_per_step} rows"

    @property
    def rows_per_unit(self) -> int:
        """Number of rows that a loss compares, which share a micro-batch."""
        return 1

    @property
    def row_format(self) -> RowFormat | None:
        """Format of the data files; None for a task that has a format of its own."""
        return None

    @property
    @abstractmethod
    def longest_row(self) -> tuple[int, str]:
        """Length of the longest possible row in tokens, and the keys that set it."""

    @property
    def length_key(self) -> str:
        """The key to lower where rows are too long."""
        return self.longest_row[1]

    @property
    def longest_response(self) -> int:
        """The most tokens of a row whose log-probs or values are read."""
        return self.longest_row[0]

    # ------------------------------------------------------------------- optional parts

    @property
    def rollout_task(self) -> RolloutTaskConfig | None:
        """The configuration itself if the run generates rollouts.

        None if it reads all of its rows.
        """
        return None

    @property
    def graders(self) -> dict[str, SingleReward]:
        """The sources of scores by role name, which is also the key of the section."""
        return {}

    def active_graders(self, *, learns: bool) -> dict[str, SingleReward]:
        """Return the graders that have processes, by role name.

        Args:
            learns: False for a single evaluation, which needs only the grader of
                held-out problems.
        """
        return self.graders

    def active_models(self, *, learns: bool) -> dict[str, ModelRole]:
        """Return the model roles that have processes, by name.

        Args:
            learns: False for a single evaluation, which needs only the evaluated role
                and a model that grades.
        """
        graders = self.active_graders(learns=learns)
        return {
            name: role
            for name, role in self.model_roles.items()
            if learns or name == self.evaluated_role or name in graders
        }

    def active_engines(self, *, learns: bool) -> dict[str, ServedModel]:
        """Return the models that vLLM serves in a job, by role name.

        Args:
            learns: False for a single evaluation, in which some judges are idle.
        """
        graders = self.active_graders(learns=learns)
        idle = self.judges.keys() - graders.keys()
        return {name: model for name, model in self.engines.items() if name not in idle}

    @property
    def judges(self) -> dict[str, JudgeReward]:
        """The graders that are language models, by role name."""
        judges = {}

        for name, grader in self.graders.items():
            judge = grader.as_judge
            if judge is not None:
                judges[name] = judge

        return judges

    @property
    def engines(self) -> dict[str, ServedModel]:
        """The models that vLLM serves, by role name."""
        return {
            name: ServedModel(
                config=judge.engine,
                section=f"{name}.engine",
                key=f"{name}.model.path",
                path=judge.model.folder,
                max_prompt_tokens=judge.max_prompt_tokens,
                max_response_tokens=judge.max_response_tokens,
            )
            for name, judge in self.judges.items()
        }

    @property
    def preparation(self) -> PrepareConfig | None:
        """Settings of the inputs that the run makes itself; None if it makes none."""
        return None

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the loss is corrected for the mismatch of sampler and trainer."""
        return False

    @property
    def responses_per_evaluation(self) -> int | None:
        """Number of responses that an evaluation generates.

        None if it generates none, or if only the held-out file tells how many.
        """
        return None
