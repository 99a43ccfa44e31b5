"""The settings of every task that learns from rollouts of its own policy.

They are the actor, its rollout engines, and where the processes are placed.
Deliberately not here: what is learned from the rollouts (`tasks`).
"""

from __future__ import annotations

from typing import Literal

from verl_ray.config.data import DataConfig, RowFormat
from verl_ray.config.roles import TrainedRole
from verl_ray.config.rollout import RolloutConfig, ServedModel
from verl_ray.config.rules.rollout_task import ROLLOUT_TASK_RULES
from verl_ray.config.schema import Config
from verl_ray.config.section import Auto, Section, resolved

Offloaded = Literal["all", "optimizer", "none"]


class PlacementConfig(Section):
    """Placement of the processes of the roles."""

    kind: Literal["colocated", "separate"]
    """Whether actor, critic, reference and rollout share bundles (and devices), or each
    have their own."""
    offload: Offloaded | Auto
    """State of actor, critic and reference that moves to the host while rollouts are
    generated on shared GPUs: all of it, only that of the optimizers, or none.

    auto: what is fastest, by estimate, of what fits the GPU; none where no GPU is
    shared.
    """


class RolloutTaskConfig(Config):
    """A run that learns from rollouts of its own policy, which is the actor.

    A subclass adds its rules to these.
    """

    data: DataConfig
    rollout: RolloutConfig
    actor: TrainedRole
    placement: PlacementConfig

    own_rules = ROLLOUT_TASK_RULES

    @property
    def rollout_task(self) -> RolloutTaskConfig:
        return self

    @property
    def examples_per_step(self) -> int:
        """Number of prompts per step."""
        return self.data.prompts_per_step

    @property
    def examples_key(self) -> str:
        return "data.prompts_per_step"

    @property
    def rows_per_step(self) -> int:
        return self.data.prompts_per_step * self.rollout.group_size

    @property
    def most_open_rows(self) -> int:
        """Number of rows that may be generated at the same time."""
        return (1 + self.rollout.staleness) * self.rows_per_step

    @property
    def step_in_words(self) -> str:
        prompts = self.data.prompts_per_step
        group_size = self.rollout.group_size
        return f"{prompts} prompts x {group_size} = {self.rows_per_step} rows"

    @property
    def row_format(self) -> RowFormat:
        return RowFormat(
            "prompt", self.data.max_prompt_tokens, "data.max_prompt_tokens"
        )

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

    def needs_old_log_probs(self, *, corrects: bool) -> bool:
        """Return whether the actor computes log-probs before it learns.

        Args:
            corrects: Whether a correction of the mismatch applies now.
        """
        return False

    @property
    def sends_adapter_alone(self) -> bool:
        """Whether only the actor's adapter is sent to the replicas.

        If so, the whole model is sent once, at the first sync.
        """
        return resolved(self.rollout.sync.adapter) == "alone"

    @property
    def overlaps(self) -> bool:
        """Whether rollouts are generated while the trainers learn."""
        return self.rollout.schedule in ("one_step_off", "asynchronous")

    @property
    def keeps_published_version(self) -> bool:
        """Whether the actor keeps the weights that it has sent while it learns.

        A replica that starts again meanwhile gets them.
        """
        return self.overlaps

    @property
    def engines(self) -> dict[str, ServedModel]:
        """The engines of the policy, then those of the judges, by role name."""
        # Most runs set model.path, which actor.model.path refers to; a message names
        # the key that the user has to change.
        key = "actor.model.path"
        if self.actor.model.folder == self.model.folder:
            key = "model.path"

        policy = ServedModel(
            config=self.rollout,
            section="rollout",
            key=key,
            path=self.actor.model.folder,
            max_prompt_tokens=self.data.max_prompt_tokens,
            max_response_tokens=self.rollout.max_response_tokens,
        )
        return {"rollout": policy} | super().engines
