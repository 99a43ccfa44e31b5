"""The configuration of a run as a whole: what all tasks share (`Config`), and the three that are here. No defaults.

Invariant: YAML under `configs/` holds every value; a field absent there is an error, and so is a key absent here.
The sections that tasks share are beside this module, by noun (`run`, `data`, `roles`, `backends`, ...); a section of
one task alone is here. Types, rules of single fields and one-line meanings stand with the fields. Deliberately not
here: rules over several fields (`rules`), reading YAML (`load`), and anything about the machine the run will use
(`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.config.data import DataConfig, DataFilesConfig, PreferenceDataConfig
from verl_ray.config.preparation import PrepareConfig
from verl_ray.config.reward import JudgeReward, ModelReward, Reward, SingleReward
from verl_ray.config.roles import ModelConfig, ModelRole, OptimizerConfig, ReferenceRole, SupervisedRole, TrainedRole
from verl_ray.config.rollout import RolloutConfig, ServedModel
from verl_ray.config.run import RayConfig, RunConfig, TrackingConfig
from verl_ray.config.section import (
    Auto,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Temperature,
    resolved,
)
from verl_ray.errors import Problem

Offloaded = Literal["all", "optimizer", "none"]


class EvaluationConfig(Section):
    num_prompts: Positive | None
    """The first N held-out problems; null = all."""
    group_size: Positive
    """Responses per problem; the metric is acc/mean@N."""
    temperature: Temperature
    """0 = greedy."""
    samples: NonNegative
    """Rollouts of each evaluation written to samples/ and the tracker's table."""
    functions: Annotated[dict[str, str], Field(examples=["{default: exact_match}"])] | None
    """Grade held-out responses by these functions instead of the reward; null = by the reward."""
    deadline_s: PositiveFloat
    """How long one held-out response may take to grade, where evaluation.functions does it."""


class PlacementConfig(Section):
    kind: Literal["colocated", "separate"]
    """Whether actor, critic, reference and rollout share bundles (and devices), or have their own."""
    offload: Offloaded | Auto
    """What actor, critic and reference keep on the host while rollouts are drawn on the GPUs that they share: their
    whole state, their optimizers' alone, or nothing. auto = all, and nothing where they share none."""


class Config(Section):
    """One run, whatever its task: the sections that all have, and what others ask of it."""

    task: str
    """Which file of `controllers/trainers` declares the run."""
    run: RunConfig
    ray: RayConfig
    model: ModelConfig
    data: DataFilesConfig
    tracking: TrackingConfig

    own_rules: ClassVar[tuple[Callable[..., Iterator[Problem]], ...]] = ()
    """Rules of this task alone, over several of its settings, as those in `rules`."""

    # ------------------------------------------------------------------------------------------------- its models

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        """The roles that run a model on a backend and are created, by name; the one that answers comes first."""
        raise NotImplementedError

    @property
    def learners(self) -> dict[str, SupervisedRole]:
        """Of these the ones that learn."""
        return {name: role.learning for name, role in self.model_roles.items() if role.learning is not None}

    @property
    def answers(self) -> str:
        """The role that an evaluation asks."""
        return next(iter(self.model_roles))

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
    def drawn_per_step(self) -> int:
        """By how much a step moves the data cursor."""
        raise NotImplementedError

    @property
    def prompts_per_step(self) -> int:
        """Of which each step makes `group_size` rows."""
        return self.drawn_per_step

    @property
    def group_size(self) -> int:
        return 1

    @property
    def rows_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def source_of_rows(self) -> str:
        """What the rows of a step are made of, in words."""
        return f"{self.prompts_per_step} prompts x {self.group_size}"

    @property
    def rows_per_unit(self) -> int:
        """Rows that a loss compares, and that stay together in a micro-batch."""
        return 1

    @property
    def longest_row(self) -> tuple[int, str]:
        """In tokens, and the keys that set it."""
        raise NotImplementedError

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
    def drawing(self) -> RLConfig | None:
        """The configuration itself where the run draws rollouts; None where it reads all of its rows."""
        return None

    @property
    def graders(self) -> dict[str, SingleReward]:
        """Where scores come from, by the key of its section, which is also the name of the role."""
        return {}

    @property
    def judges(self) -> dict[str, JudgeReward]:
        """The graders that are language models."""
        return {name: one.served for name, one in self.graders.items() if one.served is not None}

    @property
    def engines(self) -> dict[str, ServedModel]:
        """What vLLM serves, by the key of its section."""
        return {}

    @property
    def preparation(self) -> PrepareConfig | None:
        """The inputs that the run makes itself."""
        return None

    @property
    def evaluates_untrained(self) -> bool:
        """Whether one evaluation without training says something: of a model, or of a checkpoint."""
        return True


class RLConfig(Config):
    """One reinforcement-learning run: `train --config-name ppo | grpo | quickstart`."""

    task: Literal["rl"]
    data: DataConfig
    rollout: RolloutConfig
    actor: TrainedRole
    critic: TrainedRole
    reference: ReferenceRole
    reward: Reward
    evaluation: EvaluationConfig
    algorithm: AlgorithmConfig
    placement: PlacementConfig
    prepare: PrepareConfig | None

    @property
    def drawing(self) -> RLConfig | None:
        return self

    @property
    def preparation(self) -> PrepareConfig | None:
        return self.prepare

    @property
    def drawn_per_step(self) -> int:
        """Prompts."""
        return self.data.prompts_per_step

    @property
    def group_size(self) -> int:
        return self.rollout.group_size

    @property
    def longest_row(self) -> tuple[int, str]:
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        return longest, "data.max_prompt_tokens + rollout.max_response_tokens"

    @property
    def length_key(self) -> str:
        return "rollout.max_response_tokens"

    @property
    def longest_response(self) -> int:
        return self.rollout.max_response_tokens

    @property
    def shares_processes(self) -> bool:
        return self.placement.kind == "colocated"

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        found = {"actor.optimizer": self.actor.optimizer, "critic.optimizer": self.critic.optimizer}
        if self.prepare is not None:
            found["prepare.warm_start.optimizer"] = self.prepare.warm_start.optimizer
        return found

    def learning_steps(self, role: str) -> int:
        waits = self.algorithm.critic_warmup_steps if role == "actor" else 0
        return self.run.total_steps - waits

    @property
    def has_critic(self) -> bool:
        """Whether a critic role is created."""
        return self.algorithm.value_loss is not None

    @property
    def has_reference(self) -> bool:
        """Whether a reference role is created."""
        return self.algorithm.kl.place != "none" and not self.reference_is_base

    @property
    def reference_is_base(self) -> bool:
        """Whether the actor without its adapter is the reference, so that nobody holds a second copy of it."""
        adapted = self.actor.lora.rank > 0 and self.reference.model.path == self.actor.model.path
        return adapted and self.algorithm.kl.place != "none"

    @property
    def sends_adapter_alone(self) -> bool:
        """Whether the replicas are sent the model once, and then the actor's adapter only."""
        return resolved(self.rollout.sync.adapter) == "alone"

    @property
    def graders(self) -> dict[str, SingleReward]:
        return self.reward.by_key("reward")

    @property
    def engines(self) -> dict[str, ServedModel]:
        key = "model.path" if self.actor.model.path == self.model.path else "actor.model.path"
        policy = ServedModel(self.rollout, key, self.actor.model.path, self.data.max_prompt_tokens)
        return {"rollout": policy} | {
            f"{name}.engine": ServedModel(one.engine, f"{name}.model.path", one.model.path, one.max_prompt_tokens)
            for name, one in self.judges.items()
        }

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        roles: dict[str, ModelRole] = {"actor": self.actor}
        if self.has_critic:
            roles["critic"] = self.critic
        if self.has_reference:
            roles["reference"] = self.reference
        return roles | {name: one for name, one in self.graders.items() if isinstance(one, ModelReward)}


class SupervisedConfig(Section):
    batch_size: Positive
    """Rows per optimizer step, over all ranks."""
    max_tokens: Positive
    """The longest row, prompt and response together, in tokens."""
    stop_at_accuracy: Fraction | None
    """Stop once held-out greedy accuracy reaches this; null = train for run.total_steps."""


class SupervisedEvaluationConfig(Section):
    num_prompts: Positive | None
    """The first N held-out rows; null = all. Greedy accuracy and loss are read from one forward pass."""


class SFTConfig(Config):
    """One supervised run: `train --config-name sft`."""

    task: Literal["sft"]
    actor: SupervisedRole
    sft: SupervisedConfig
    evaluation: SupervisedEvaluationConfig

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        return {"actor": self.actor}

    @property
    def drawn_per_step(self) -> int:
        """Rows."""
        return self.sft.batch_size

    @property
    def longest_row(self) -> tuple[int, str]:
        return self.sft.max_tokens, "sft.max_tokens"

    @property
    def evaluates_untrained(self) -> bool:
        return False


class PreferenceConfig(Section):
    batch_size: Positive
    """Pairs per optimizer step, over all ranks."""
    max_tokens: Positive
    """The longest row, prompt and response together, in tokens."""
    margin: NonNegativeFloat | Literal["record"]
    """By how much the chosen response should score higher; record = each pair's own `margin`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
    """How often the preference is taken to be the wrong way round."""


class PreferenceEvaluationConfig(Section):
    num_pairs: Positive | None
    """The first N held-out pairs; null = all."""


class RewardModelConfig(Config):
    """One reward model trained on preferences: `train --config-name reward_model`."""

    task: Literal["reward_model"]
    data: PreferenceDataConfig
    reward: SupervisedRole
    preference: PreferenceConfig
    evaluation: PreferenceEvaluationConfig

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        return {"reward": self.reward}

    @property
    def drawn_per_step(self) -> int:
        """Pairs."""
        return self.preference.batch_size

    @property
    def prompts_per_step(self) -> int:
        """Two rows per pair."""
        return 2 * self.preference.batch_size

    @property
    def source_of_rows(self) -> str:
        return f"{self.preference.batch_size} pairs"

    @property
    def rows_per_unit(self) -> int:
        """The rows of a pair."""
        return 2

    @property
    def longest_row(self) -> tuple[int, str]:
        return self.preference.max_tokens, "preference.max_tokens"
