"""The configuration of a run, whatever its task: the sections that all have, and what others ask of it. No defaults.

Invariant: YAML under `configs/` holds every value; a field absent there is an error, and so is a key absent here. What
sets one task apart is in its own type (`tasks`, or the file of its trainer), which answers the questions here; nobody
asks which type that is. The sections are beside this module, by noun (`run`, `data`, `roles`, ...); types, rules of
single fields and one-line meanings stand with the fields. Deliberately not here: rules over several fields (`rules`),
reading YAML (`load`), and anything about the machine the run will use (`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal

from verl_ray.config.data import DataFilesConfig
from verl_ray.config.preparation import PrepareConfig
from verl_ray.config.reward import JudgeReward, SingleReward
from verl_ray.config.roles import ModelConfig, ModelRole, OptimizerConfig, SupervisedRole
from verl_ray.config.rollout import ServedModel
from verl_ray.config.run import RayConfig, RunConfig, TrackingConfig
from verl_ray.config.section import Section

if TYPE_CHECKING:  # which import this module
    from verl_ray.config.drawing import DrawingConfig
    from verl_ray.config.rules.rule import TaskRule


class Config(Section):
    """One run, whatever its task: the sections that all have, and what others ask of it."""

    task: str
    """The name of the task, which leads to the file that declares it (`controllers/tasks.py`)."""
    run: RunConfig
    ray: RayConfig
    model: ModelConfig
    data: DataFilesConfig
    tracking: TrackingConfig

    own_rules: ClassVar[tuple[TaskRule, ...]] = ()
    """Rules over several settings that not every task has, beside those of all (`rules`); each takes the configuration
    and what the user set (`rules/rule.py`)."""

    # ------------------------------------------------------------------------------------------------- its models

    @property
    @abstractmethod
    def model_roles(self) -> dict[str, ModelRole]:
        """The roles that run a model on a backend and are created, by name; the one that answers comes first."""

    @property
    def learners(self) -> dict[str, SupervisedRole]:
        """Of these the ones that learn."""
        return {name: role.learning for name, role in self.model_roles.items() if role.learning is not None}

    @property
    def answers(self) -> str:
        """The role that an evaluation asks."""
        return next(iter(self.model_roles))

    def head_of(self, role: str) -> Literal["policy", "value"]:
        """Whether a role's model has a language head, or one that gives a number."""
        return "policy"

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Every optimizer that has settings, by the key of its section."""
        return {f"{name}.optimizer": role.optimizer for name, role in self.learners.items()}

    @property
    def shares_processes(self) -> bool:
        """Whether roles on one backend share a process per rank, and rollout engines the devices of these."""
        return True

    def learning_steps(self, role: str) -> int:
        """Training steps in which a role learns."""
        return self.run.total_steps

    # --------------------------------------------------------------------------------------------------- its rows

    @property
    @abstractmethod
    def drawn_per_step(self) -> int:
        """By how much a step moves the data cursor."""

    @property
    def rows_per_step(self) -> int:
        """Rows that a step learns from."""
        return self.drawn_per_step

    @property
    def step_in_words(self) -> str:
        """What a step is made of."""
        return f"{self.rows_per_step} rows"

    @property
    def rows_per_unit(self) -> int:
        """Rows that a loss compares, and that stay together in a micro-batch."""
        return 1

    @property
    @abstractmethod
    def longest_row(self) -> tuple[int, str]:
        """In tokens, and the keys that set it."""

    @property
    def length_key(self) -> str:
        """The key to lower where rows are too long."""
        return self.longest_row[1]

    @property
    def longest_response(self) -> int:
        """In tokens, of which log-probs or values are read."""
        return self.longest_row[0]

    # ------------------------------------------------------------------------------ what else it has, if it has any

    @property
    def drawing(self) -> DrawingConfig | None:
        """The configuration itself where the run draws rollouts; None where it reads all of its rows."""
        return None

    @property
    def graders(self) -> dict[str, SingleReward]:
        """Where scores come from, by the key of its section, which is also the name of the role."""
        return {}

    def graders_at_work(self, *, learns: bool) -> dict[str, SingleReward]:
        """Those, and whoever grades held-out problems; `learns`: False = for one evaluation alone."""
        return self.graders

    @property
    def judges(self) -> dict[str, JudgeReward]:
        """The graders that are language models."""
        return {name: one.served for name, one in self.graders.items() if one.served is not None}

    @property
    def engines(self) -> dict[str, ServedModel]:
        """What vLLM serves, by role."""
        return {
            name: ServedModel(one.engine, f"{name}.engine", f"{name}.model.path", one.model.path, one.max_prompt_tokens)
            for name, one in self.judges.items()
        }

    @property
    def preparation(self) -> PrepareConfig | None:
        """The inputs that the run makes itself."""
        return None

    @property
    def why_no_evaluation(self) -> tuple[str, str] | None:
        """Why there is none without training, and what to do instead; None = there is one: of a model, or of a
        checkpoint."""
        return None
