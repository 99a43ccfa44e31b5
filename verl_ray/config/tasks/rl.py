"""Reinforcement learning: `train --config-name ppo | grpo | quickstart`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.correction import CORRECTIONS
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.config.agent import AgentConfig, agent_problems
from verl_ray.config.algorithm import (
    USUAL_MISMATCH,
    AlgorithmConfig,
    algorithm_is_chosen_as_a_group,
    bootstrapping_needs_values,
    bounds_leave_a_range,
    critic_matches_the_advantage,
    entropy_control_is_complete,
    kl_controller_is_complete,
    kl_in_the_loss_has_a_gradient,
    kl_in_the_reward_has_no_gradient,
    kl_is_complete,
    length_rewards_have_a_group,
    own_shaping_reads_its_settings,
    sequences_are_weighted_as_such,
    settings_are_read,
    shared_bounds_are_of_the_loss,
    trajectories_are_judged,
    value_losses_have_no_horizon,
)
from verl_ray.config.correction import correction_problems
from verl_ray.config.data import curriculum_is_consistent
from verl_ray.config.distill import DistillConfig, divergence_settings_are_read
from verl_ray.config.optimizers import OptimizerConfig
from verl_ray.config.preference import PreferenceLossConfig, loss_settings_are_read
from verl_ray.config.preparation import (
    PrepareConfig,
    gain_is_measured,
    inputs_are_prepared_or_provided,
    prepared_data_exists,
    prepared_model_is_possible,
    warm_start_leaves_something_to_gain,
)
from verl_ray.config.reward import (
    HELD_OUT_GRADER,
    EvaluationConfig,
    Reward,
    SingleReward,
    greedy_evaluation_needs_one_response,
    greedy_evaluation_truncates_nothing,
    held_out_deadline_is_used,
    mixed_rewards_have_weights,
    sources_by_key,
)
from verl_ray.config.roles import (
    ModelRole,
    ReferenceRole,
    TrainedRole,
    reference_settings_are_used,
)
from verl_ray.config.rollout import temperature_is_not_too_low
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.run import RolloutTrackingConfig, rollout_bound_is_used
from verl_ray.errors import Problem
from verl_ray.settings.section import OverriddenKeys, RuleRow, set_exactly_when
from verl_ray.suggest import either

_CORRECTION = "algorithm.correction"
_REPLAY = "algorithm.replay"


class RLConfig(RolloutTaskConfig):
    """A run of reinforcement learning from scored rollouts."""

    critic: TrainedRole
    reference: ReferenceRole
    reward: Reward
    agent: AgentConfig
    evaluation: EvaluationConfig
    tracking: RolloutTrackingConfig
    algorithm: AlgorithmConfig
    distill: DistillConfig | None = None
    """What the actor learns from the reference role; null = nothing."""
    preference: PreferenceLossConfig | None = None
    """The loss of pairs, the best and the worst response of each group, in place of
    algorithm.policy_loss; null = none."""
    prepare: PrepareConfig | None

    # The accuracy or the mean reward of every data source.
    main_metrics: ClassVar[str] = "val-core/*/mean@*"

    @property
    def episodes(self) -> AgentConfig | None:
        return self.agent if self.agent.is_used else None

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
            if isinstance(grader, ModelRole):
                roles[name] = grader

        return roles

    def head_of(self, role: str) -> Literal["policy", "value"]:
        if role == "critic" or role in self.graders:
            return "value"
        return "policy"

    def replays_routing(self, role: str) -> bool:
        return role == "actor" and self.rollout.routing_replay

    def average_decay(self, role: str) -> float | None:
        if role != "actor" or self.distill is None:
            return None
        return self.distill.average_decay

    @property
    def has_critic(self) -> bool:
        """Whether a critic role is created."""
        return self.algorithm.value_loss is not None

    @property
    def has_reference(self) -> bool:
        """Whether a reference role is created."""
        return self.compares_with_reference and not self.reference_is_base

    @property
    def compares_with_reference(self) -> bool:
        """Whether the actor is compared with a frozen policy, or with a teacher."""
        if self.preference is not None and self.preference.declared.has_reference:
            return True
        teaches = self.distill is not None and self.distill.teacher is None
        return teaches or self.algorithm.kl.place != "none"

    @property
    def reference_is_base(self) -> bool:
        """Whether the actor without its adapter is the reference.

        If so, no process holds a second copy of the model.
        """
        same_model = self.reference.model.is_same(self.actor.model)
        has_adapter = self.actor.lora.rank > 0
        return self.compares_with_reference and has_adapter and same_model

    def needs_old_log_probs(self, *, corrects: bool) -> bool:
        """Return whether the actor computes log-probs before it learns.

        With one update per batch they equal the present policy's log-probs, which the
        update computes anyway. In the two-policy form of the rollout correction the
        sampler's log-probs take their place. A KL penalty in the reward needs them in
        any case, unless tokens are sampled over an old cache: no version of the policy
        has the log-probs of those. A loss of pairs compares with the reference alone.

        Args:
            corrects: Whether algorithm.correction applies now.
        """
        if self.rollout.kv == "keep" or self.preference is not None:
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
    def rows_per_unit(self) -> int:
        return 1 if self.preference is None else 2

    @property
    def longest_row(self) -> tuple[int, str]:
        longest, keys = super().longest_row
        distill = self.distill
        if distill is None or distill.teacher_prompt is None:
            return longest, keys
        # The teacher reads the same responses behind other prompts.
        read = distill.max_prompt_tokens + self.rollout.max_response_tokens
        if read <= longest:
            return longest, keys
        return read, "distill.max_prompt_tokens + rollout.max_response_tokens"

    @property
    def longest_own_row(self) -> int:
        return super().longest_row[0]

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
        return self.main_metrics.replace("@*", f"@{self.evaluation.group_size}")

    @property
    def num_top(self) -> int:
        return 0 if self.distill is None else self.distill.num_top

    @property
    def corrects_mismatch(self) -> bool:
        return self.algorithm.correction.form != "none"

    @property
    def compares_with_itself(self) -> bool:
        """Whether the old policy of the loss is the one that learns: ratios are 1."""
        algorithm = self.algorithm
        has_sampler = algorithm.correction.form == "two_policy"
        if has_sampler and not algorithm.corrects_later:
            return False
        return self.actor.updates_per_step(self.rows_per_step) <= 1

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
        return sources_by_key(self.reward, "reward")

    def active_graders(self, *, learns: bool) -> dict[str, SingleReward]:
        """Return the reward's sources, and the grader of held-out problems.

        A single evaluation needs only the latter, if held-out problems have a grader of
        their own (`HELD_OUT_GRADER`).
        """
        held_out = self.evaluation.grader
        if held_out is None:
            return self.graders

        sources = self.graders if learns else {}
        return sources | {HELD_OUT_GRADER: held_out}

    # ---------------------------------------------------------------------------- rules

    def problems(self, overridden: OverriddenKeys) -> Iterator[Problem]:
        """Yield the problems of rollouts, then of the algorithm, rewards and inputs."""
        yield from super().problems(overridden)

        algorithm = self.algorithm
        evaluation = self.evaluation
        staleness = self.rollout.staleness

        for rule in RULES:
            yield from rule.problems(self)
        yield from settings_are_read(algorithm, overridden)
        yield from shared_bounds_are_of_the_loss(algorithm, overridden)
        yield from bounds_leave_a_range(algorithm)
        yield from critic_matches_the_advantage(algorithm)
        yield from critic_settings_are_used(self, overridden)
        without = "algorithm.kl.place=none makes no reference"
        if self.distill is not None:
            without = "distill.teacher is the teacher"
        if self.preference is not None:
            without = f"preference.loss={self.preference.loss} has no reference"
            yield from _pairs_can_be_learned(self, self.preference, overridden)
        yield from reference_settings_are_used(self, without, overridden)
        # An evaluation alone has no teacher.
        if not overridden.evaluates:
            yield from distillation_is_possible(self)
            yield from teacher_settings_are_read(self, overridden)
        yield from kl_is_complete(algorithm.kl)
        yield from kl_in_the_loss_has_a_gradient(algorithm.kl)
        yield from kl_in_the_reward_has_no_gradient(algorithm.kl)
        yield from own_shaping_reads_its_settings(algorithm)
        yield from ratios_are_not_one(self)
        yield from length_rewards_have_a_group(algorithm, self.rollout.group_size)
        yield from curriculum_is_consistent(self.data.curriculum, overridden)
        yield from replay_is_possible(self)
        yield from entropy_control_is_complete(algorithm)
        yield from sequences_are_weighted_as_such(algorithm)
        yield from trajectories_are_judged(algorithm)
        yield from kl_controller_is_complete(algorithm.kl)
        if algorithm.value_loss is not None:
            yield from value_losses_have_no_horizon(algorithm.value_loss)
        yield from bootstrapping_needs_values(algorithm)
        yield from algorithm_is_chosen_as_a_group(algorithm, overridden)
        yield from correction_problems(algorithm, may_be_stale=staleness > 0)
        yield from normalised_weights_are_known(self)
        yield from stale_tokens_are_corrected(self)
        yield from temperature_is_not_too_low("rollout", self.rollout.temperature)
        yield from temperature_is_not_too_low("evaluation", evaluation.temperature)
        yield from greedy_evaluation_needs_one_response(evaluation)
        yield from greedy_evaluation_truncates_nothing(evaluation)
        yield from held_out_deadline_is_used(evaluation, overridden)
        yield from rollout_bound_is_used(self.tracking, overridden)
        yield from mixed_rewards_have_weights(self.reward)
        graders = self.active_graders(learns=True)
        row_tokens = self.rollout.max_response_tokens
        yield from agent_problems(
            self.agent, algorithm, graders, row_tokens, overridden
        )
        if self.prepare is not None:
            yield from _inputs_can_be_made(self, self.prepare, overridden)


# -------------------------------------------------------------------------------- rules


def _inputs_can_be_made(
    config: RLConfig, prepare: PrepareConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield the problems of the inputs that the run makes itself."""
    yield from inputs_are_prepared_or_provided(overridden)
    yield from prepared_data_exists(prepare, config.evaluation.num_prompts)
    yield from prepared_model_is_possible(prepare.model, config.rollout.tensor_parallel)

    # An evaluation alone makes no inputs.
    if not overridden.evaluates:
        yield from warm_start_leaves_something_to_gain(prepare)
        yield from gain_is_measured(
            prepare, config.evaluation, config.run, config.reward
        )


def _pairs_can_be_learned(
    config: RLConfig, preference: PreferenceLossConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield the problems of a run that learns from pairs of its own responses."""
    yield from loss_settings_are_read(preference)
    yield from groups_become_pairs(config, preference)
    yield from settings_of_pairs_are_read(config, overridden)


def groups_become_pairs(
    config: RLConfig, preference: PreferenceLossConfig
) -> Iterator[Problem]:
    """Yield a problem for each setting with which a run cannot learn from pairs."""
    if preference.declared.is_unpaired:
        rule = "it learns from single responses, and each group becomes a pair"
        fix = "Use a loss of pairs, such as sigmoid."
        yield Problem("preference.loss", preference.loss, rule, fix)
    algorithm = config.algorithm
    if not ADVANTAGES[algorithm.advantage].chooses_rows:
        rule = f"preference.loss={preference.loss} compares two responses of each group"
        fix = "Choose algorithm=online_dpo, or set preference=null."
        yield Problem("algorithm.advantage", algorithm.advantage, rule, fix)
    if algorithm.kl.place != "none":
        rule = "a loss of pairs has its own comparison with the reference, or none"
        fix = "Set algorithm.kl=none."
        yield Problem("algorithm.kl.place", algorithm.kl.place, rule, fix)
    if config.distill is not None:
        rule = "distill is a loss as well, and a run has one"
        fix = "Choose another algorithm, such as grpo, or --config-name grpo."
        yield Problem("preference.loss", preference.loss, rule, fix)
    if config.episodes is not None:
        rule = "the sides of a pair are rows, and an episode may have several"
        fix = "Leave it out, or choose another algorithm, such as grpo."
        environments = dict(config.agent.environments)
        yield Problem("agent.environments", environments, rule, fix)

    size, group_size = config.actor.mini_batch_size, config.rollout.group_size
    if size is not None and size % group_size:
        rule = f"the {group_size} responses of a group (rollout.group_size) make a pair"
        larger = size + group_size - size % group_size
        fix = f"Use a multiple of {group_size} such as {larger}, or null."
        yield Problem("actor.mini_batch_size", size, rule, fix)


_UNREAD_BY_PAIRS = (
    "policy_loss",
    "aggregation",
    "sequence",
    "whiten_advantages",
    "advantage_clip",
    "entropy_coefficient",
    "entropy_share",
    "entropy_target",
    "entropy_step",
    "entropy_max",
    "negative_drift",
    "positive_nll",
    "correction",
)
"""Settings of `algorithm` that a loss of pairs does not read."""


def settings_of_pairs_are_read(
    config: RLConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that a run with a loss of pairs ignores."""
    reason = "preference.loss takes the place of algorithm.policy_loss"
    for name in _UNREAD_BY_PAIRS:
        yield from overridden.ignored(overridden.under(f"algorithm.{name}"), reason)


def ratios_are_not_one(config: RLConfig) -> Iterator[Problem]:
    """Yield a problem if a loss of ratios compares the policy with itself."""
    loss = POLICY_LOSSES[config.algorithm.policy_loss]
    if not loss.needs_another_policy or not config.compares_with_itself:
        return

    quarter = max(config.rows_per_step // 4, 1)
    rule = (
        f"with one update per step the ratio of {loss.name} is 1 at every token, so it"
        " is the plain policy gradient"
    )
    fix = f"Make several updates, as its paper does: actor.mini_batch_size={quarter}."
    # The mean over a row is too close to 1 for the difference of two programs.
    if not loss.is_per_row:
        fix += f" Or compare with the sampler's policy: {_CORRECTION}.form=two_policy."
    yield Problem("algorithm.policy_loss", loss.name, rule, fix)


def distillation_is_possible(config: RLConfig) -> Iterator[Problem]:
    """Yield the problems of a run with a teacher, or without one."""
    if config.distill is None:
        if config.algorithm.advantage == "none":
            rule = "neither rewards nor a teacher would teach the policy anything"
            fix = "Choose another algorithm, such as grpo, or --config-name distill."
            yield Problem("algorithm.advantage", "none", rule, fix)
        return

    distill = config.distill
    has_context = distill.teacher_prompt is not None
    is_student = distill.teacher is None and config.reference.model.is_same(
        config.actor.model
    )
    if distill.teacher == "actor" and not has_context:
        rule = "the policy has nothing to learn from itself, as it reads the same"
        fix = "Give distill.teacher_prompt, or set it to null or average."
        yield Problem("distill.teacher", "actor", rule, fix)
    if is_student and not has_context:
        path = config.reference.model.path
        rule = "the reference is the teacher, and this is the model of the student"
        fix = (
            "Give the directory of another model with the same vocabulary,"
            " distill.teacher={url: http://HOST:PORT/v1}, or distill.teacher_prompt."
        )
        yield Problem("reference.model.path", path, rule, fix)
    if has_context and config.episodes is not None:
        rule = (
            "rows of episodes hold what environments have written, which no function"
            " of the record's prompt knows"
        )
        fix = "Set it to null, or leave out agent.environments."
        yield Problem("distill.teacher_prompt", distill.teacher_prompt, rule, fix)
    loss = POLICY_LOSSES[config.algorithm.policy_loss]
    if loss.selection is not None and not distill.num_top:
        rule = (
            "it chooses tokens by their advantages before the teacher's are known, and"
            " distill.divergence=sampled adds these"
        )
        fix = "Use ppo_clip, or another divergence."
        yield Problem("algorithm.policy_loss", loss.name, rule, fix)
    groups = config.algorithm.dynamic_sampling
    if groups is not None:
        rule = "groups whose scores are all equal are drawn again; a teacher uses them"
        yield Problem("algorithm.dynamic_sampling", groups, rule, "Set it to null.")
    place = config.algorithm.kl.place
    if place != "none":
        rule = "distill charges the divergence from the teacher, and a run charges one"
        yield Problem("algorithm.kl.place", place, rule, "Set algorithm.kl=none.")
    yield from _servers_are_possible(config, distill)


def _servers_are_possible(
    config: RLConfig, distill: DistillConfig
) -> Iterator[Problem]:
    """Yield the problems of a run with the servers of its teacher."""
    stall_s = config.run.stall_s
    for key, service in distill.services.items():
        # A server that hangs is told from a slow one by a second request.
        if 2 * service.timeout_s >= stall_s:
            rule = f"two such requests without a reply are a stall after {stall_s:g} s"
            fix = f"Use less than {stall_s / 2:g}, or raise run.stall_s."
            yield Problem(f"{key}.timeout_s", service.timeout_s, rule, fix)
    temperature = config.rollout.temperature
    if distill.services and temperature != 1:
        rule = "a server gives the log-probs of temperature 1 (distill.teacher)"
        fix = "Use 1, or the reference role as the teacher."
        yield Problem("rollout.temperature", temperature, rule, fix)


def average_can_teach(config: RLConfig, distill: DistillConfig) -> Iterator[Problem]:
    """Yield the problems of an average of the policy, or of its decay without one."""
    decay = distill.average_decay
    if distill.teacher != "average":
        if decay is not None:
            rule = "only distill.teacher=average has an average of the weights"
            fix = "Set it to null, or distill.teacher=average."
            yield Problem("distill.average_decay", decay, rule, fix)
        return

    if decay is None:
        rule = "distill.teacher=average follows the weights by it"
        yield Problem("distill.average_decay", None, rule, "Set it to 0.99.")
    if distill.teacher_prompt is None and config.algorithm.advantage == "none":
        rule = "it begins as the policy, which has nothing to learn from it as it is"
        fix = (
            "Give distill.teacher_prompt, or rewards: algorithm=grpo algorithm.kl=none."
        )
        yield Problem("distill.teacher", "average", rule, fix)


_REWARD_SETTINGS = (
    "whiten_advantages",
    "advantage_clip",
    "overlong_share",
    "brevity",
    "efficiency",
    "shaping",
    "replay",
)
"""Settings of `algorithm` that change the advantages of rewards."""
_LOSS_SETTINGS = (
    "policy_loss",
    "entropy_share",
    "negative_drift",
    *{setting.name: None for loss in POLICY_LOSSES.values() for setting in loss.reads},
)
"""Settings of `algorithm` that change what a loss makes of advantages."""


def teacher_settings_are_read(
    config: RLConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that a run with a teacher does not read."""
    distill = config.distill
    if distill is None:
        return
    yield from divergence_settings_are_read(distill, overridden)
    yield from average_can_teach(config, distill)
    if config.algorithm.advantage != "none":
        return

    reason = "with algorithm.advantage=none rewards teach nothing"
    unread = list(_REWARD_SETTINGS)
    if distill.num_top:
        unread += _LOSS_SETTINGS
        reason += f", and distill.divergence={distill.divergence} is a loss by itself"
    for name in unread:
        yield from overridden.ignored(overridden.under(f"algorithm.{name}"), reason)


def critic_settings_are_used(
    config: RLConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of a critic that the run does not have.

    Also refuse a warm-up of the critic that would leave the actor no step.
    """
    key = "algorithm.critic_warmup_steps"
    warmup_steps = config.algorithm.critic_warmup_steps
    total_steps = config.run.total_steps

    # A critic that exists uses its settings, so only its warm-up can be wrong.
    if config.has_critic:
        # The steps of run.total_epochs are known, and compared, when the data are read.
        if total_steps is not None and warmup_steps >= total_steps:
            rule = (
                f"the actor would never learn in the {total_steps} steps of"
                " run.total_steps"
            )
            fix = f"Use at most {total_steps - 1}."
            yield Problem(key, warmup_steps, rule, fix)
        return

    reason = f"algorithm={config.algorithm.name} makes no critic"
    yield from overridden.ignored(overridden.under("critic"), reason)

    if warmup_steps:
        fix = "Set it to 0, or choose algorithm=ppo."
        yield Problem(key, warmup_steps, reason, fix)


# ------------------------------------------------------------- tokens of other policies


_FIXES_OF_OLDER_TOKENS = {
    "tokens": "Use two_policy with algorithm.correction.kind=icepop level=token"
    " lower=0.5 upper=5.0, which the group schedule sets; or three_policy with"
    " kind=tis.",
    "rows": "Use three_policy with algorithm.correction.kind=icepop level=geometric"
    " lower=0.5 upper=5.0, which the group schedule sets for {loss}.",
    "itself": "Use two_policy: {loss} bounds the ratio to the sampler itself.",
}
"""What corrects for the age of tokens, by `PolicyLoss.corrected_as`."""


def normalised_weights_are_known(config: RLConfig) -> Iterator[Problem]:
    """Yield a problem if there are no weights to normalise, or no mean of them."""
    correction = config.algorithm.correction
    if not correction.normalise:
        return

    key = f"{_CORRECTION}.normalise"
    three_policy = f"{_CORRECTION}.form=three_policy"
    kind = correction.kind
    loss = POLICY_LOSSES[config.algorithm.policy_loss]
    if kind is None or not CORRECTIONS[kind].weights_by_ratio:
        rule = f"there are no weights: {_CORRECTION}.kind is {kind or 'null'}"
        weighing = [name for name, it in CORRECTIONS.items() if it.weights_by_ratio]
        fix = f"Set it to false, or {_CORRECTION}.kind={either(weighing)}."
        yield Problem(key, True, rule, fix)
    elif correction.form == "two_policy" and loss.has_ratio:
        rule = (
            f"in the two-policy form the ratio of {loss.name} is the weight, and the"
            " correction has none"
        )
        yield Problem(key, True, rule, f"Set it to false, or {three_policy}.")
    elif (
        correction.form == "two_policy"
        and config.actor.updates_per_step(config.rows_per_step) > 1
    ):
        rule = (
            "the weights of later updates are those of a policy that has learned by"
            " then, whose mean over the mini-batch would need another forward pass"
        )
        fix = f"Set it to false, make one update per step, or use {three_policy}."
        yield Problem(key, True, rule, fix)
    elif config.rollout.kv == "keep":
        rule = (
            "the mean is one of log-probs from before the step, and with"
            " rollout.kv=keep no policy has those of the tokens"
        )
        fix = "Set it to false, or rollout.kv=recompute."
        yield Problem(key, True, rule, fix)


def stale_tokens_are_corrected(config: RLConfig) -> Iterator[Problem]:
    """Yield a problem if older tokens would be taken for those of the policy."""
    rollout = config.rollout
    algorithm = config.algorithm
    # A loss of pairs has no ratio to the policy that sampled them.
    if config.preference is not None:
        return
    # A synchronous run with older tokens is refused already.
    staleness = 0 if rollout.schedule == "synchronous" else rollout.staleness
    replay_age = algorithm.replay_age or 0
    if not max(staleness, replay_age):
        return

    age, key = max(
        (staleness, "rollout.staleness"), (replay_age, "algorithm.replay_age")
    )
    rule = (
        f"tokens may be {age} policy versions old ({key}), and nothing corrects for it"
    )
    if algorithm.correction.form == "none":
        loss = POLICY_LOSSES[algorithm.policy_loss]
        fix = _FIXES_OF_OLDER_TOKENS[loss.corrected_as].format(loss=loss.name)
        yield Problem(f"{_CORRECTION}.form", "none", rule, fix)
    if algorithm.mismatch.then == "correct":
        fix = "Use stop, or set algorithm.mismatch.limit=null."
        rule += " until the mismatch exceeds its limit"
        yield Problem("algorithm.mismatch.then", "correct", rule, fix)

    # Tokens that are sampled over an old cache are of no version's policy.
    if rollout.kv == "keep" and algorithm.correction.form == "three_policy":
        rule = (
            "with rollout.kv=keep no version of the policy has the log-probs of later"
            " tokens, so none can be computed again"
        )
        fix = f"Use rollout.kv=recompute, or {_CORRECTION}.form=two_policy."
        yield Problem("rollout.kv", "keep", rule, fix)


# ------------------------------------------------------------------- groups and prompts


def replay_is_possible(config: RLConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that groups cannot be replayed with."""
    algorithm = config.algorithm
    replay = algorithm.replay
    because = "algorithm.replay=" + ("null" if replay is None else "...")
    key = "algorithm.replay_age"
    yield from set_exactly_when(
        replay is not None, key, algorithm.replay_age, because, 4
    )
    if replay is None:
        return

    besides = [*_rewards_beside_scores(config)]
    if besides:
        rule = (
            "a group whose scores are all equal teaches something with"
            f" {' and '.join(besides)}, and earlier groups would take its place"
        )
        yield Problem(_REPLAY, replay, rule, "Set it to null, or leave these out.")
    for key, grader in config.graders.items():
        if grader.normalise == "running":
            rule = "the scores of an earlier group would enter its moments again"
            fix = "Use batch or none, or set algorithm.replay=null."
            yield Problem(f"{key}.normalise", "running", rule, fix)


def _rewards_beside_scores(config: RLConfig) -> Iterator[str]:
    """Yield the settings that give responses with equal scores other rewards."""
    algorithm = config.algorithm
    for name in ("overlong_share", "brevity", "efficiency", "shaping"):
        if getattr(algorithm, name) is not None:
            yield f"algorithm.{name}"
    if algorithm.kl.place == "reward":
        yield "algorithm.kl.place=reward"
    if config.distill is not None:
        yield "distill"


# ------------------------------------------------------------- rules of one condition


def _compares_groups(config: RLConfig) -> bool:
    """Whether groups whose scores are all equal teach nothing."""
    return ADVANTAGES[config.algorithm.advantage].needs_group


def _has_no_ratio(config: RLConfig) -> bool:
    """Whether nothing corrects a second update on the same rollouts."""
    # Pairs need no correction, whichever policy sampled them.
    if config.preference is not None:
        return False
    has_ratio = POLICY_LOSSES[config.algorithm.policy_loss].has_ratio
    return not has_ratio and not config.algorithm.correction_weighs_updates


def _limits_fresh_tokens(config: RLConfig) -> bool:
    """Whether a metric is limited that compares the present policy's own tokens."""
    metric = config.algorithm.mismatch.metric or ""
    return metric.startswith("staleness/") and config.rollout.updates == "between"


def _normalises(config: RLConfig) -> bool:
    """Whether the scores of a single grader are normalised."""
    reward = config.graders.get("reward")
    return reward is not None and reward.normalise != "none"


_WITH_RATIO = either([loss.name for loss in POLICY_LOSSES.values() if loss.has_ratio])

_NO_SECOND_UPDATE = (
    "{algorithm.policy_loss} has no ratio that would correct a second update on the"
    " same rollouts"
)
_LEARNS_FROM_EQUAL = (
    "algorithm.advantage={algorithm.advantage} compares no responses of a group, so it"
    " also learns from groups whose scores are all equal"
)
_CHOSEN_BEFORE = (
    "tokens are chosen by what the policy before the step says of them, and with"
    " rollout.kv=keep nothing but the sampler's log-probs is known"
)
_ADVANTAGE_OF_GROUPS = "Set it to null, or choose an advantage of groups, such as grpo."

RULES: tuple[RuleRow[RLConfig], ...] = (
    RuleRow(
        name="group_baseline_has_a_group",
        key="rollout.group_size",
        is_broken=lambda config: (
            _compares_groups(config) and config.rollout.group_size < 2
        ),
        rule="algorithm.advantage={algorithm.advantage} compares the responses to one"
        " prompt with each other",
        fix="Use at least 2 (8 is usual), or algorithm=ppo or"
        " algorithm=reinforce_plus_plus.",
    ),
    # Further epochs and smaller mini-batches both make further updates.
    RuleRow(
        name="losses_without_a_ratio_update_once",
        key="actor.epochs",
        is_broken=lambda config: _has_no_ratio(config) and config.actor.epochs > 1,
        rule=_NO_SECOND_UPDATE,
        fix=f"Set it to 1, or use algorithm.policy_loss={_WITH_RATIO}.",
    ),
    RuleRow(
        name="losses_without_a_ratio_update_once",
        key="actor.mini_batch_size",
        is_broken=lambda config: (
            _has_no_ratio(config)
            and config.actor.mini_batch_size is not None
            and config.actor.mini_batch_size < config.rows_per_step
        ),
        rule=_NO_SECOND_UPDATE,
        fix="Set it to null or {config.rows_per_step}, or use"
        f" algorithm.policy_loss={_WITH_RATIO}.",
    ),
    RuleRow(
        name="selections_have_log_probs",
        key="algorithm.policy_loss",
        is_broken=lambda config: (
            config.rollout.kv == "keep"
            and config.algorithm.chooses_tokens
            and config.algorithm.entropy_share is None
        ),
        rule=_CHOSEN_BEFORE,
        fix="Use rollout.kv=recompute, or leave this out.",
    ),
    RuleRow(
        name="selections_have_log_probs",
        key="algorithm.entropy_share",
        is_broken=lambda config: (
            config.rollout.kv == "keep" and config.algorithm.entropy_share is not None
        ),
        rule=_CHOSEN_BEFORE,
        fix="Use rollout.kv=recompute, or leave this out.",
    ),
    RuleRow(
        name="estimators_have_probabilities",
        key="algorithm.advantage",
        is_broken=lambda config: (
            config.rollout.kv == "keep"
            and ADVANTAGES[config.algorithm.advantage].reads_probabilities
        ),
        rule="it reads probabilities of the policy before the step, and with"
        " rollout.kv=keep nothing but the sampler's log-probs is known",
        fix="Use rollout.kv=recompute, or another algorithm such as algorithm=rloo.",
    ),
    RuleRow(
        name="mismatch_is_measured",
        key="algorithm.mismatch.metric",
        is_broken=lambda config: (
            _limits_fresh_tokens(config) and config.rollout.staleness == 0
        ),
        rule="it is measured where some tokens are older: rollout.staleness is 0",
        fix=f"Use {USUAL_MISMATCH}.",
    ),
    RuleRow(
        name="mismatch_is_measured",
        key="algorithm.mismatch.metric",
        is_broken=lambda config: (
            _limits_fresh_tokens(config) and config.rollout.staleness > 0
        ),
        rule="it is of tokens that the present policy sampled, and there are none:"
        " rollout.updates is between",
        fix=f"Use {USUAL_MISMATCH}.",
    ),
    RuleRow(
        name="drawing_again_compares_groups",
        key="algorithm.dynamic_sampling",
        is_broken=lambda config: (
            config.algorithm.dynamic_sampling is not None
            and not _compares_groups(config)
        ),
        rule=_LEARNS_FROM_EQUAL,
        fix=_ADVANTAGE_OF_GROUPS,
    ),
    RuleRow(
        name="drawing_again_waits_for_scores",
        key="rollout.schedule",
        is_broken=lambda config: (
            config.algorithm.dynamic_sampling is not None
            and config.rollout.schedule == "one_step_off"
        ),
        rule="with algorithm.dynamic_sampling scores decide which prompts a batch"
        " holds, and with schedule=one_step_off their numbers alone do",
        fix="Choose schedule=asynchronous or schedule=synchronous, or set"
        " algorithm.dynamic_sampling=null.",
    ),
    RuleRow(
        name="replay_compares_groups",
        key=_REPLAY,
        is_broken=lambda config: (
            config.algorithm.replay is not None and not _compares_groups(config)
        ),
        rule=_LEARNS_FROM_EQUAL,
        fix=_ADVANTAGE_OF_GROUPS,
    ),
    RuleRow(
        name="replay_has_groups_to_replace",
        key=_REPLAY,
        is_broken=lambda config: (
            config.algorithm.replay is not None
            and config.algorithm.dynamic_sampling is not None
        ),
        rule="algorithm.dynamic_sampling leaves no group whose scores are all equal,"
        " and earlier groups would take the place of such ones",
        fix="Set one of the two to null.",
    ),
    RuleRow(
        name="curriculum_has_no_epochs",
        key="run.total_epochs",
        is_broken=lambda config: (
            config.data.curriculum.is_on and config.run.total_epochs is not None
        ),
        rule="with data.curriculum an epoch does not use each prompt",
        fix="Set run.total_epochs=null and run.total_steps to the number of steps.",
    ),
    RuleRow(
        name="curriculum_knows_the_batch",
        key="algorithm.dynamic_sampling",
        is_broken=lambda config: (
            config.data.curriculum.is_on
            and config.algorithm.dynamic_sampling is not None
            and config.rollout.staleness > 0
        ),
        rule="data.curriculum chooses prompts by the scores before them, and with"
        " rollout.staleness > 0 it depends on the order of completion which batch a"
        " group that is drawn again belongs to",
        fix="Choose schedule=synchronous, or set algorithm.dynamic_sampling=null, or"
        " both shares of data.curriculum to 1 and its solved_from to null.",
    ),
    RuleRow(
        name="normalised_scores_are_positive",
        key="reward.normalise",
        is_broken=lambda config: (
            _normalises(config)
            and ADVANTAGES[config.algorithm.advantage].needs_positive_scores
        ),
        rule="algorithm.advantage={algorithm.advantage} learns only from groups whose"
        " mean score is above 0, and normalised scores lie around 0",
        fix="Set it to none, or use another algorithm.advantage.",
    ),
    # Clipping depends on the scale, so that normalising changes something then.
    RuleRow(
        name="normalised_scores_matter",
        key="reward.normalise",
        is_broken=lambda config: (
            _normalises(config)
            and ADVANTAGES[config.algorithm.advantage].divides_by_spread
            and config.graders["reward"].clip is None
        ),
        rule="algorithm.advantage={algorithm.advantage} compares within a group,"
        " whatever the scale of scores, which undoes this",
        fix="Set it to none, or give reward.clip as well.",
    ),
)
"""The rules of a run as a whole that have one condition."""
