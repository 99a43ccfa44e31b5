"""Settings of an algorithm that need each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.compose.composition import examine
from controllers.compose.listing import groups
from scripts.configuration import compose
from tests.algorithms.choices import REWARDED, TAKES_SEVERAL_UPDATES
from tests.config.rules.cases import INPUTS, Case
from verl_ray.config.tasks.rl import RLConfig

ROOTS = ("ppo", "grpo")
STUDENT = " ".join(INPUTS)
TEACHER_PROMPT = f"{Path(__file__).with_name('teacher_prompt_file.py')}:hint"
OWN_FILE = Path(__file__).parents[2] / "algorithms" / "own_shaping_file.py"
CASES = [
    Case(
        "group_baseline_has_a_group",
        "algorithm=grpo rollout.group_size=1 actor.mini_batch_size=null",
        "rollout.group_size",
        "algorithm.advantage=grpo compares the responses",
        "at least 2",
    ),
    Case(
        "settings_are_read",
        "algorithm.lam=null",
        "algorithm.lam",
        "gae needs it",
        "0.95 is usual",
    ),
    Case(
        "settings_are_read",
        "algorithm=grpo algorithm.gamma=1.0",
        "algorithm.gamma",
        "algorithm.advantage=grpo does not use it",
        "null",
    ),
    Case(
        "critic_matches_the_advantage",
        "algorithm.value_loss=null",
        "algorithm.value_loss",
        "gae needs a critic",
        "clip: 0.2",
    ),
    Case(
        "critic_matches_the_advantage",
        "'algorithm=grpo' 'algorithm.value_loss={clip: null, aggregation: token_mean}'",
        "algorithm.value_loss",
        "grpo uses no critic",
        "algorithm.value_loss=null",
    ),
    Case(
        "kl_in_the_loss_has_a_gradient",
        "algorithm=grpo algorithm.kl.estimator=k1",
        "algorithm.kl.estimator",
        "the expected gradient of k1 is zero",
        "k2 or k3",
    ),
    Case(
        "losses_without_a_ratio_update_once",
        "algorithm=rloo actor.epochs=2",
        "actor.epochs",
        "no ratio",
        "ppo_clip",
    ),
    Case(
        "losses_without_a_ratio_update_once",
        "algorithm=rloo actor.mini_batch_size=128",
        "actor.mini_batch_size",
        "no ratio",
        "null or 256",
    ),
    Case(
        "kl_is_complete",
        "algorithm.kl.estimator=null",
        "algorithm.kl.estimator",
        "place=reward needs it",
        "k3",
    ),
    Case(
        "kl_is_complete",
        "algorithm=dr_grpo algorithm.kl.coefficient=0.1",
        "algorithm.kl.coefficient",
        "algorithm.kl.place=none does not use it",
        "null",
    ),
    Case(
        "kl_is_complete",
        "algorithm=grpo algorithm.kl.place=none",
        "algorithm.kl.estimator",
        "algorithm.kl.place=none does not use it",
        "as algorithm.kl=none does with all of them",
    ),
    Case(
        "kl_is_complete",
        "algorithm=grpo algorithm.kl.coefficient=0",
        "algorithm.kl.coefficient",
        "it charges nothing",
        "algorithm.kl=none",
    ),
    Case(
        "kl_controller_is_complete",
        "algorithm.kl.controller=adaptive algorithm.kl.horizon=100",
        "algorithm.kl.target",
        "algorithm.kl.controller=adaptive needs it",
        "6.0 is usual",
    ),
    Case(
        "kl_controller_is_complete",
        "algorithm.kl.target=6.0",
        "algorithm.kl.target",
        "algorithm.kl.controller=fixed does not use it",
        "null",
    ),
    Case(
        "kl_controller_is_complete",
        "algorithm=grpo algorithm.kl.controller=adaptive algorithm.kl.horizon=100 algorithm.kl.target=1.0",
        "algorithm.kl.controller",
        "steers a penalty in the reward",
        "algorithm.kl.place=reward",
    ),
    Case(
        "settings_are_read",
        "algorithm.clip_low=null",
        "algorithm.clip_low",
        "ppo_clip needs it",
        "0.2",
    ),
    Case(
        "settings_are_read",
        "algorithm=rloo algorithm.dual_clip=3.0",
        "algorithm.dual_clip",
        "algorithm.policy_loss=reinforce does not use it",
        "null",
    ),
    Case(
        "settings_are_read",
        "algorithm.aggregation=seq_mean_token_sum_norm",
        "algorithm.aggregation_horizon",
        "seq_mean_token_sum_norm needs it",
        "8 is usual",
    ),
    Case(
        "value_losses_have_no_horizon",
        "algorithm.value_loss.aggregation=seq_mean_token_sum_norm",
        "algorithm.value_loss.aggregation",
        "no horizon to normalise by",
        "token_mean",
    ),
    Case(
        "bootstrapping_needs_values",
        "algorithm=grpo algorithm.truncated=bootstrap",
        "algorithm.truncated",
        "algorithm.advantage=grpo has none",
        "score or mask",
    ),
    Case(
        "kl_in_the_reward_has_no_gradient",
        "algorithm.kl.estimator=k3_straight_through",
        "algorithm.kl.estimator",
        "place=reward has no gradient",
        "Use k3",
    ),
    Case(
        "kl_in_the_reward_has_no_gradient",
        "algorithm.kl.importance_weighted=true",
        "algorithm.kl.importance_weighted",
        "place=reward has no gradient",
        "algorithm.kl.place=loss",
    ),
    Case(
        "ratios_are_not_one",
        "algorithm=gspo actor.mini_batch_size=null",
        "algorithm.policy_loss",
        "the ratio of gspo is 1 at every token",
        "Make several updates, as its paper does: actor.mini_batch_size=64.",
    ),
    Case(
        "ratios_are_not_one",
        "algorithm=sapo actor.mini_batch_size=null",
        "algorithm.policy_loss",
        "the ratio of sapo is 1 at every token",
        "actor.mini_batch_size=64. Or compare with the sampler's policy:"
        " algorithm.correction.form=two_policy.",
    ),
    Case(
        "shared_bounds_are_of_the_loss",
        "algorithm=dr_grpo algorithm.policy_loss=gspo algorithm.clip_high=4e-4 actor.mini_batch_size=64"
        " algorithm.aggregation=seq_mean_token_mean algorithm.aggregation_horizon=null",
        "algorithm.clip_low",
        "it is what ppo_clip had, and algorithm.policy_loss=gspo reads it, too",
        "Set it; 0.0003 is usual for gspo (GSPO",
    ),
    Case(
        "shared_bounds_are_of_the_loss",
        "algorithm=dppo algorithm.policy_loss=dppo_kl algorithm.divergence_low=0.1",
        "algorithm.divergence_high",
        "it is what dppo_tv had",
        "0.05 is usual",
    ),
    Case(
        "shared_bounds_are_of_the_loss",
        "algorithm=dppo algorithm.policy_loss=cispo",
        "algorithm.ratio_max",
        "it is what dppo_tv had",
        "5.0 is usual",
    ),
    Case(
        "bounds_leave_a_range",
        "algorithm=cispo algorithm.ratio_min=8",
        "algorithm.ratio_min",
        "1 where the policies agree",
        "below 1, or null",
    ),
    Case(
        "bounds_leave_a_range",
        "algorithm=cispo algorithm.ratio_max=0.28",
        "algorithm.ratio_max",
        "1 where the policies agree",
        "0.28 as a distance from 1 is algorithm.ratio_max=1.28.",
    ),
    Case(
        "bounds_leave_a_range",
        "algorithm=clip_cov algorithm.cov_min=6",
        "algorithm.cov_min",
        "below algorithm.cov_max=5",
        "1.0 and 5.0 are usual",
    ),
    Case(
        "trajectories_are_judged",
        "algorithm=dapo algorithm.sequence=trajectory",
        "algorithm.sequence",
        "judge each token by itself",
        "Use row",
    ),
    Case(
        "estimators_have_probabilities",
        "algorithm=optimal_token_baseline schedule=asynchronous rollout.kv=keep",
        "algorithm.advantage",
        "reads probabilities of the policy before the step",
        "rollout.kv=recompute",
    ),
    Case(
        "length_rewards_have_a_group",
        "algorithm.brevity=0.1 rollout.group_size=1",
        "algorithm.brevity",
        "compares the lengths of responses to one prompt",
        "rollout.group_size=8",
    ),
    Case(
        "length_rewards_have_a_group",
        "algorithm.efficiency=0.1 rollout.group_size=1",
        "algorithm.efficiency",
        "compares the lengths of responses to one prompt",
        "rollout.group_size=8",
    ),
    Case(
        "own_shaping_reads_its_settings",
        f"algorithm.shaping={OWN_FILE}:shorter algorithm.overlong_share=0.2",
        "algorithm.brevity",
        "shorter needs it",
        "0.1",
    ),
    Case(
        "own_shaping_reads_its_settings",
        f"algorithm.shaping={OWN_FILE}:shorter algorithm.brevity=0.1 algorithm.efficiency=1.0",
        "algorithm.efficiency",
        "does not use it",
        "null",
    ),
    Case(
        "selections_have_log_probs",
        "algorithm=clip_cov schedule=carry_over rollout.kv=keep",
        "algorithm.policy_loss",
        "nothing but the sampler's log-probs is known",
        "rollout.kv=recompute",
    ),
    Case(
        "selections_have_log_probs",
        "algorithm.entropy_share=0.2 schedule=carry_over rollout.kv=keep",
        "algorithm.entropy_share",
        "nothing but the sampler's log-probs is known",
        "rollout.kv=recompute",
    ),
    Case(
        "entropy_control_is_complete",
        "algorithm.entropy_target=0.2 algorithm.entropy_max=1.0",
        "algorithm.entropy_step",
        "needs it",
        "0.005 is usual",
    ),
    Case(
        "sequences_are_weighted_as_such",
        "algorithm=gspo algorithm.correction.form=two_policy"
        " algorithm.aggregation=token_mean",
        "algorithm.aggregation",
        "token_mean would weight rows by their length",
        "seq_mean_token_mean",
    ),
    Case(
        "algorithm_is_chosen_as_a_group",
        "algorithm.name=grpo",
        "algorithm.name",
        "changes nothing",
        "algorithm=grpo",
    ),
    Case(
        "distillation_is_possible",
        "algorithm=grpo algorithm.advantage=none",
        "algorithm.advantage",
        "neither rewards nor a teacher would teach",
        "--config-name distill",
    ),
    Case(
        "distillation_is_possible",
        f"{STUDENT} reference.model.path=/m",
        "reference.model.path",
        "this is the model of the student",
        "another model with the same vocabulary",
        "distill",
    ),
    Case(
        "distillation_is_possible",
        f"{STUDENT} reference.model.path=/t algorithm=grpo",
        "algorithm.kl.place",
        "and a run charges one",
        "algorithm.kl=none",
        "distill",
    ),
    Case(
        "distillation_is_possible",
        f"{STUDENT} distill.teacher=actor",
        "distill.teacher",
        "nothing to learn from itself",
        "Give distill.teacher_prompt",
        "distill",
    ),
    Case(
        "average_can_teach",
        f"{STUDENT} distill.teacher=average distill.average_decay=0.9",
        "distill.teacher",
        "nothing to learn from it as it is",
        "or rewards: algorithm=grpo algorithm.kl=none",
        "distill",
    ),
    Case(
        "average_can_teach",
        f"{STUDENT} distill.teacher=average algorithm=grpo algorithm.kl=none",
        "distill.average_decay",
        "follows the weights by it",
        "Set it to 0.99",
        "distill",
    ),
    Case(
        "average_can_teach",
        f"{STUDENT} reference.model.path=/t distill.average_decay=0.9",
        "distill.average_decay",
        "only distill.teacher=average",
        "Set it to null",
        "distill",
    ),
    Case(
        "distillation_is_possible",
        f"{STUDENT} 'distill.teacher={{url: http://h:1/v1}}' rollout.temperature=0.7",
        "rollout.temperature",
        "gives the log-probs of temperature 1",
        "Use 1",
        "distill",
    ),
    Case(
        "distillation_is_possible",
        f"{STUDENT} 'distill.teacher={{url: http://h:1/v1, timeout_s: 300}}'",
        "distill.teacher.timeout_s",
        "are a stall after 600 s",
        "less than 300",
        "distill",
    ),
    Case(
        "distillation_is_possible",
        f"{STUDENT} 'distill.teacher={{gsm8k: {{url: http://h:1/v1, timeout_s: 300}},"
        " default: {url: http://h:2/v1}}'",
        "distill.teacher.gsm8k.timeout_s",
        "are a stall after 600 s",
        "less than 300",
        "distill",
    ),
    Case(
        "distillation_is_possible",
        f"{STUDENT} distill.teacher=actor distill.teacher_prompt={TEACHER_PROMPT}"
        " 'agent.environments={default: calculator}'",
        "distill.teacher_prompt",
        "which no function of the record's prompt knows",
        "leave out agent.environments",
        "distill",
    ),
    Case(
        "distillation_is_possible",
        f"{STUDENT} reference.model.path=/t algorithm=clip_cov algorithm.kl=none",
        "algorithm.policy_loss",
        "before the teacher's are known",
        "or another divergence",
        "distill",
    ),
    Case(
        "distillation_is_possible",
        f"{STUDENT} reference.model.path=/t algorithm=grpo algorithm.kl=none"
        " algorithm.dynamic_sampling=10",
        "algorithm.dynamic_sampling",
        "a teacher uses them",
        "null",
        "distill",
    ),
    Case(
        "teacher_settings_are_read",
        f"{STUDENT} reference.model.path=/t algorithm.brevity=0.5",
        "algorithm.brevity",
        "rewards teach nothing",
        "Leave it out",
        "distill",
    ),
    Case(
        "teacher_settings_are_read",
        f"{STUDENT} reference.model.path=/t distill.divergence=jsd algorithm.clip_low=0.1",
        "algorithm.clip_low",
        "distill.divergence=jsd is a loss by itself",
        "Leave it out",
        "distill",
    ),
    Case(
        "divergence_settings_are_read",
        f"{STUDENT} reference.model.path=/t distill.max_prompt_tokens=9",
        "distill.max_prompt_tokens",
        "distill.teacher_prompt is null",
        "Leave it out",
        "distill",
    ),
    Case(
        "divergence_settings_are_read",
        f"{STUDENT} reference.model.path=/t distill.top_k=8",
        "distill.top_k",
        "distill.divergence=sampled does not use it",
        "Leave it out",
        "distill",
    ),
    Case(
        "divergence_settings_are_read",
        f"{STUDENT} reference.model.path=/t distill.divergence=forward distill.beta=0.5",
        "distill.beta",
        "distill.divergence=forward does not use it",
        "or distill.divergence=jsd",
        "distill",
    ),
    Case(
        "groups_become_pairs",
        "algorithm=online_dpo algorithm.advantage=grpo",
        "algorithm.advantage",
        "preference.loss=sigmoid compares two responses of each group",
        "algorithm=online_dpo",
    ),
    Case(
        "groups_become_pairs",
        "algorithm=online_dpo preference.loss=kto",
        "preference.loss",
        "it learns from single responses",
        "such as sigmoid",
    ),
    Case(
        "groups_become_pairs",
        "algorithm=online_dpo algorithm.kl=loss",
        "algorithm.kl.place",
        "its own comparison with the reference",
        "algorithm.kl=none",
    ),
    Case(
        "groups_become_pairs",
        f"{STUDENT} reference.model.path=/t algorithm=online_dpo",
        "preference.loss",
        "distill is a loss as well",
        "--config-name grpo",
        "distill",
    ),
    Case(
        "groups_become_pairs",
        "algorithm=online_dpo 'agent.environments={default: calculator}'",
        "agent.environments",
        "the sides of a pair are rows",
        "another algorithm",
    ),
    Case(
        "groups_become_pairs",
        "algorithm=online_dpo actor.mini_batch_size=64 rollout.group_size=6"
        " data.prompts_per_step=64",
        "actor.mini_batch_size",
        "the 6 responses of a group (rollout.group_size) make a pair",
        "a multiple of 6 such as 66",
    ),
    Case(
        "settings_of_pairs_are_read",
        "algorithm=online_dpo algorithm.entropy_coefficient=0.01",
        "algorithm.entropy_coefficient",
        "preference.loss takes the place of algorithm.policy_loss",
        "Leave it out",
    ),
]


@pytest.mark.parametrize("algorithm", REWARDED)
@pytest.mark.parametrize(
    "root",
    ["quickstart", *(pytest.param(root, marks=pytest.mark.slow) for root in ROOTS)],
)
def test_every_algorithm_goes_with_every_root(root: str, algorithm: str) -> None:
    inputs = [] if root == "quickstart" else INPUTS
    config = compose(root, [f"algorithm={algorithm}", *inputs])
    assert isinstance(config, RLConfig)
    assert config.algorithm.name == algorithm
    updates = config.actor.updates_per_step(config.rows_per_step)
    assert updates == (4 if algorithm in TAKES_SEVERAL_UPDATES else 1)
    assert config.has_critic == (algorithm in ("ppo", "vapo"))


def test_a_ratio_of_rows_is_not_to_be_compared_with_the_sampler() -> None:
    """The mean over a row is nearer to 1 than two programs are to each other."""
    overrides = ["algorithm=gspo", "actor.mini_batch_size=null"]
    (problem,) = examine("quickstart", overrides).problems
    assert problem.fix.startswith("Make several updates")
    assert "two_policy" not in problem.fix


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm=dapo algorithm.policy_loss=ppo_clip",
        "algorithm=luspo algorithm.policy_loss=gspo actor.mini_batch_size=64",
        "algorithm=grpo algorithm.clip_low=0.1",
        "algorithm=dppo algorithm.policy_loss=dppo_kl algorithm.divergence_low=0.2 algorithm.divergence_high=0.05",
        "algorithm=cispo algorithm.ratio_min=0.5 algorithm.ratio_max=1.28",
    ],
)
def test_bounds_that_a_loss_has_or_was_given(overrides: str) -> None:
    assert compose("quickstart", overrides.split())


@pytest.mark.parametrize("name", groups()["algorithm.kl"])
@pytest.mark.parametrize(
    "algorithm",
    [
        "ppo",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "dr_grpo")),
    ],
)
def test_the_divergence_is_one_choice(algorithm: str, name: str) -> None:
    """The order of overrides does not matter, and its keys can still be set."""
    choice = [f"algorithm.kl={name}", f"algorithm={algorithm}"]
    config = compose("quickstart", choice)
    assert isinstance(config, RLConfig) and config == compose(
        "quickstart", [choice[1], f"algorithm/kl={name}", f"run.name={config.run.name}"]
    )
    assert config.algorithm.kl.place == name.partition("_")[0]
    assert config.has_reference == (name != "none")
    if name != "none":
        config = compose("quickstart", [*choice, "algorithm.kl.coefficient=0.1"])
        assert isinstance(config, RLConfig) and config.algorithm.kl.coefficient == 0.1


def test_a_divergence_that_there_is_not() -> None:
    (problem,) = examine("quickstart", ["algorithm.kl=off"]).problems
    assert (problem.key, problem.rule) == ("algorithm.kl", "there is no such choice")
    assert "loss, loss_k2, none" in problem.fix


@pytest.mark.parametrize(
    ("size", "prompts", "group"),
    [(64, 32, 8), (16, 16, 4), (3, 7, 3), (1, 1, 3), (1, 1, 2), (5, 10, 2)],
)
def test_several_updates_follow_the_rows_of_a_step(
    size: int, prompts: int, group: int
) -> None:
    rows = [f"data.prompts_per_step={prompts}", f"rollout.group_size={group}"]
    config = compose("quickstart", ["algorithm=gspo", *rows])
    assert isinstance(config, RLConfig) and config.actor.mini_batch_size == size


def test_a_size_of_the_users_own_comes_before_that_of_the_algorithm() -> None:
    own = "actor.mini_batch_size=32"
    config = compose("quickstart", ["algorithm=gspo", own])
    assert isinstance(config, RLConfig) and config.actor.mini_batch_size == 32
    config = compose("recipes/qwen3_8b", ["algorithm=gspo"])
    assert isinstance(config, RLConfig) and config.actor.mini_batch_size == 256
    (problem,) = examine(
        "quickstart", ["algorithm=gspo", "data.prompts_per_step=many"]
    ).problems
    assert problem.key == "data.prompts_per_step"


@pytest.mark.parametrize("algorithm", ["distill", "grpo", "rloo", "ppo"])
def test_a_teacher_goes_with_rewards_of_any_algorithm(algorithm: str) -> None:
    teacher = [f"algorithm={algorithm}", "reference.model.path=/t", "algorithm.kl=none"]
    config = compose("distill", [*INPUTS, *teacher])
    assert isinstance(config, RLConfig)
    assert config.has_reference and config.distill is not None
    # An adapter's base is the student, and not the teacher.
    config = compose("distill", [*INPUTS, *teacher, "actor.lora.rank=4"])
    assert isinstance(config, RLConfig) and config.has_reference


def test_an_evaluation_alone_needs_no_teacher() -> None:
    assert examine("distill", [*INPUTS], evaluates=True).problems == []
