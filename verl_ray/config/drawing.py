"""What every task has that draws rollouts from the policy that it trains: the actor, its engines, and who sits where.

Deliberately not here: what is learned from the rollouts (`tasks`).
"""

from __future__ import annotations

from typing import Literal

from verl_ray.config.data import DataConfig
from verl_ray.config.roles import TrainedRole
from verl_ray.config.rollout import RolloutConfig, ServedModel
from verl_ray.config.rules.drawing import DRAWING_RULES
from verl_ray.config.schema import Config
from verl_ray.config.section import Auto, Section, resolved

Offloaded = Literal["all", "optimizer", "none"]


class PlacementConfig(Section):
    kind: Literal["colocated", "separate"]
    """Whether actor, critic, reference and rollout share bundles (and devices), or have their own."""
    offload: Offloaded | Auto
    """What actor, critic and reference keep on the host while rollouts are drawn on the GPUs that they share: their
    whole state, their optimizers' alone, or nothing. auto = all, and nothing where they share none."""


class DrawingConfig(Config):
    """A run that learns from rollouts of its own policy, which is the actor. A subclass adds its rules to these."""

    data: DataConfig
    rollout: RolloutConfig
    actor: TrainedRole
    placement: PlacementConfig

    own_rules = DRAWING_RULES

    @property
    def drawing(self) -> DrawingConfig:
        return self

    @property
    def drawn_per_step(self) -> int:
        """Prompts."""
        return self.data.prompts_per_step

    @property
    def rows_per_step(self) -> int:
        return self.data.prompts_per_step * self.rollout.group_size

    @property
    def step_in_words(self) -> str:
        return f"{self.data.prompts_per_step} prompts x {self.rollout.group_size} = {self.rows_per_step} rows"

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
    def sends_adapter_alone(self) -> bool:
        """Whether the replicas are sent the model once, and then the actor's adapter only."""
        return resolved(self.rollout.sync.adapter) == "alone"

    @property
    def engines(self) -> dict[str, ServedModel]:
        """Those of the policy before the judges'."""
        key = "model.path" if self.actor.model.path == self.model.path else "actor.model.path"
        policy = ServedModel(self.rollout, "rollout", key, self.actor.model.path, self.data.max_prompt_tokens)
        return {"rollout": policy} | super().engines
