"""The configuration of each task as a whole: `RLConfig`, `SFTConfig`, `RewardModelConfig`. No defaults.

Invariant: YAML under `configs/` holds every value; a field absent there is an error, and so is a key absent here.
The sections that tasks share are beside this module, by noun (`run`, `data`, `roles`, `backends`, ...); a section of
one task alone is here. Types, rules of single fields and one-line meanings stand with the fields. Deliberately not
here: rules over several fields (`rules`), reading YAML (`load`), and anything about the machine the run will use
(`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.config.data import DataConfig, DataFilesConfig, PreferenceDataConfig
from verl_ray.config.preparation import PrepareConfig
from verl_ray.config.reward import JudgeReward, MixedReward, ModelReward, Reward, SingleReward
from verl_ray.config.roles import ModelConfig, ModelRole, ReferenceRole, SupervisedRole, TrainedRole
from verl_ray.config.rollout import RolloutConfig
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


class RLConfig(Section):
    """One reinforcement-learning run: `train --config-name ppo | grpo | quickstart`."""

    task: Literal["rl"]
    run: RunConfig
    ray: RayConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    actor: TrainedRole
    critic: TrainedRole
    reference: ReferenceRole
    reward: Reward
    evaluation: EvaluationConfig
    algorithm: AlgorithmConfig
    placement: PlacementConfig
    tracking: TrackingConfig
    prepare: PrepareConfig | None

    @property
    def drawn_per_step(self) -> int:
        """By how much a step moves the data cursor: prompts."""
        return self.data.prompts_per_step

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
        """Where scores come from, by the key of its section, which is also the name of the role."""
        if isinstance(self.reward, MixedReward):
            return {f"reward.components.{name}": one for name, one in self.reward.components.items()}
        return {"reward": self.reward}

    @property
    def judges(self) -> dict[str, JudgeReward]:
        """The graders that are language models."""
        return {name: one for name, one in self.graders.items() if isinstance(one, JudgeReward)}

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        """The roles that run a model on a backend and are created, by name."""
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


class SFTConfig(Section):
    """One supervised run: `train --config-name sft`."""

    task: Literal["sft"]
    run: RunConfig
    ray: RayConfig
    model: ModelConfig
    data: DataFilesConfig
    actor: SupervisedRole
    sft: SupervisedConfig
    evaluation: SupervisedEvaluationConfig
    tracking: TrackingConfig

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        """The roles that run a model on a backend, by name."""
        return {"actor": self.actor}

    @property
    def learner(self) -> tuple[str, SupervisedRole]:
        """The one role, and its name."""
        return "actor", self.actor

    @property
    def drawn_per_step(self) -> int:
        """By how much a step moves the data cursor: rows."""
        return self.sft.batch_size

    @property
    def rows_per_step(self) -> int:
        return self.sft.batch_size

    @property
    def longest_row(self) -> tuple[int, str]:
        """In tokens, and the key that sets it."""
        return self.sft.max_tokens, "sft.max_tokens"


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


class RewardModelConfig(Section):
    """One reward model trained on preferences: `train --config-name reward_model`."""

    task: Literal["reward_model"]
    run: RunConfig
    ray: RayConfig
    model: ModelConfig
    data: PreferenceDataConfig
    reward: SupervisedRole
    preference: PreferenceConfig
    evaluation: PreferenceEvaluationConfig
    tracking: TrackingConfig

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        """The roles that run a model on a backend, by name."""
        return {"reward": self.reward}

    @property
    def learner(self) -> tuple[str, SupervisedRole]:
        """The one role, and its name."""
        return "reward", self.reward

    @property
    def drawn_per_step(self) -> int:
        """By how much a step moves the data cursor: pairs."""
        return self.preference.batch_size

    @property
    def rows_per_step(self) -> int:
        """Two per pair."""
        return 2 * self.preference.batch_size

    @property
    def longest_row(self) -> tuple[int, str]:
        """In tokens, and the key that sets it."""
        return self.preference.max_tokens, "preference.max_tokens"


SupervisedRun = SFTConfig | RewardModelConfig
"""Runs that learn from a data set alone."""

Config = RLConfig | SFTConfig | RewardModelConfig
