"""Reinforcement learning: `train --config-name ppo | grpo | quickstart`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.config.drawing import DrawingConfig
from verl_ray.config.preparation import PrepareConfig
from verl_ray.config.reward import HELD_OUT, FunctionReward, Reward, SingleReward
from verl_ray.config.roles import ModelRole, OptimizerConfig, ReferenceRole, TrainedRole
from verl_ray.config.rules.rl import RL_RULES
from verl_ray.config.section import NonNegative, Positive, PositiveFloat, Section, Temperature


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


class RLConfig(DrawingConfig):
    critic: TrainedRole
    reference: ReferenceRole
    reward: Reward
    evaluation: EvaluationConfig
    algorithm: AlgorithmConfig
    prepare: PrepareConfig | None

    own_rules = (*DrawingConfig.own_rules, *RL_RULES)

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        roles: dict[str, ModelRole] = {"actor": self.actor}
        if self.has_critic:
            roles["critic"] = self.critic
        if self.has_reference:
            roles["reference"] = self.reference
        return roles | {name: one.model_role for name, one in self.graders.items() if one.model_role is not None}

    def head_of(self, role: str) -> Literal["policy", "value"]:
        return "value" if role == "critic" or role in self.graders else "policy"

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
    def preparation(self) -> PrepareConfig | None:
        return self.prepare

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
    def graders(self) -> dict[str, SingleReward]:
        return self.reward.by_key("reward")

    def graders_at_work(self, *, learns: bool) -> dict[str, SingleReward]:
        """The reward's components, and HELD_OUT; without learning, only those that held-out problems need."""
        wanted = self.evaluation
        if wanted.functions is None:
            return self.graders
        held_out = FunctionReward(
            kind="function", num_ranks=1, processes_per_rank=1, deadline_s=wanted.deadline_s,
            functions=wanted.functions, normalise="none", clip=None, max_failed_fraction=1.0,
        )  # fmt: skip
        return (self.graders if learns else {}) | {HELD_OUT: held_out}
