"""Reinforcement learning: `train --config-name ppo | grpo | quickstart`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.config.paths import RewardFunction
from verl_ray.config.preparation import PrepareConfig
from verl_ray.config.reward import HELD_OUT_GRADER, FunctionReward, Reward, SingleReward
from verl_ray.config.roles import ModelRole, OptimizerConfig, ReferenceRole, TrainedRole
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.rules.rl import RL_RULES
from verl_ray.config.section import (
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Temperature,
)


class EvaluationConfig(Section):
    """The evaluation on held-out problems."""

    num_prompts: Positive | None
    """The first N held-out problems; null = all."""
    group_size: Positive
    """Responses per problem; the metric is acc/mean@N or reward/mean@N."""
    temperature: Temperature
    """Temperature of the sampling; 0 = greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Sample from the likeliest tokens of this probability together; 1 = from all."""
    top_k: Annotated[int, Field(ge=-1)]
    """Sample from this many likeliest tokens; -1 or 0 = from all."""
    samples: NonNegative
    """Rollouts of each evaluation written to samples/ and the tracker's table."""
    functions: (
        Annotated[dict[str, RewardFunction], Field(examples=["{default: exact_match}"])]
        | None
    )
    """Grade held-out responses by these functions instead of the reward; null = by the
    reward."""
    deadline_s: PositiveFloat
    """Longest time to grade one held-out response by evaluation.functions."""


class RLConfig(RolloutTaskConfig):
    """A run of reinforcement learning from scored rollouts."""

    critic: TrainedRole
    reference: ReferenceRole
    reward: Reward
    evaluation: EvaluationConfig
    algorithm: AlgorithmConfig
    prepare: PrepareConfig | None

    own_rules = (*RolloutTaskConfig.own_rules, *RL_RULES)

    # --------------------------------------------------------------------------- models

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        roles: dict[str, ModelRole] = {"actor": self.actor}

        if self.has_critic:
            roles["critic"] = self.critic
        if self.has_reference:
            roles["reference"] = self.reference

        # Some graders are models on a training backend.
        for name, grader in self.graders.items():
            model_role = grader.as_model_role
            if model_role is not None:
                roles[name] = model_role

        return roles

    def head_of(self, role: str) -> Literal["policy", "value"]:
        if role == "critic" or role in self.graders:
            return "value"
        return "policy"

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
        """Whether the actor without its adapter is the reference.

        If so, no process holds a second copy of the model.
        """
        same_model = self.reference.model == self.actor.model
        has_adapter = self.actor.lora.rank > 0
        needs_reference = self.algorithm.kl.place != "none"
        return needs_reference and has_adapter and same_model

    def needs_old_log_probs(self, *, corrects: bool) -> bool:
        """Return whether the actor computes log-probs before it learns.

        With one update per batch they equal the present policy's log-probs, which the
        update computes anyway. In the two-policy form of the rollout correction the
        sampler's log-probs take their place. A KL penalty in the reward needs them in
        any case, unless tokens are sampled over an old cache: no version of the policy
        has the log-probs of those.

        Args:
            corrects: Whether algorithm.correction applies now.
        """
        if self.rollout.kv == "keep":
            return False
        if self.algorithm.kl.place == "reward" or self.algorithm.chooses_tokens:
            return True
        if corrects and self.algorithm.correction.normalise:
            return True
        if ADVANTAGES[self.algorithm.advantage].reads_probabilities:
            return True

        rows = self.rows_per_step
        mini_batch_size = self.actor.mini_batch_size or rows

        # From the second update on the policy is no longer the one that the batch
        # began with.
        several_updates = self.actor.epochs > 1 or mini_batch_size < rows
        has_two_policies = self.algorithm.correction.form == "two_policy"
        sampler_replaces_old = corrects and has_two_policies
        return several_updates and not sampler_replaces_old

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Every optimizer that has settings, also of a critic that is not created."""
        optimizers = {
            "actor.optimizer": self.actor.optimizer,
            "critic.optimizer": self.critic.optimizer,
        }

        if self.prepare is not None:
            warm_start = self.prepare.warm_start
            optimizers["prepare.warm_start.optimizer"] = warm_start.optimizer

        return optimizers

    def learning_steps(self, role: str) -> int:
        if role == "actor":
            # The critic learns alone in the first steps.
            return self.run.steps - self.algorithm.critic_warmup_steps
        return self.run.steps

    @property
    def oldest_age(self) -> int:
        """Policy versions that a token may be old when it is learned from."""
        return max(self.rollout.staleness, self.algorithm.replay_age or 0)

    @property
    def main_metric(self) -> str:
        # The accuracy or the mean reward of every data source.
        return f"val-core/*/mean@{self.evaluation.group_size}"

    @property
    def corrects_mismatch(self) -> bool:
        return self.algorithm.correction.form != "none"

    @property
    def responses_per_evaluation(self) -> int | None:
        evaluation = self.evaluation
        prompts = evaluation.num_prompts
        if prompts is None and self.prepare is not None:
            prompts = self.prepare.num_validation
        return None if prompts is None else prompts * evaluation.group_size

    # --------------------------------------------------------------- inputs and graders

    @property
    def preparation(self) -> PrepareConfig | None:
        return self.prepare

    @property
    def graders(self) -> dict[str, SingleReward]:
        return self.reward.sources_by_key("reward")

    def active_graders(self, *, learns: bool) -> dict[str, SingleReward]:
        """Return the reward's sources, and the grader of held-out problems.

        A single evaluation needs only the latter, if held-out problems have a grader of
        their own (`HELD_OUT_GRADER`).
        """
        evaluation = self.evaluation
        if evaluation.functions is None:
            return self.graders

        # Only the functions and their deadline are settings.
        held_out = FunctionReward(
            kind="function",
            num_ranks=1,
            processes_per_rank=1,
            deadline_s=evaluation.deadline_s,
            functions=evaluation.functions,
            normalise="none",
            clip=None,
            max_failed_fraction=1.0,
        )
        sources = self.graders if learns else {}
        return sources | {HELD_OUT_GRADER: held_out}
