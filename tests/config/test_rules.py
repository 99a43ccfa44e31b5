"""Every rule over several fields: the key and the message it gives, and that nothing else complains."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from controllers.composition import compose, examine
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.config.rules import (
    DISCOUNTED,
    GROUP_BASELINES,
    RL_RULES,
    RULES,
    TEMPLATE_FIELDS,
    VLLM_ARGS_FIXED,
    VLLM_ARGS_FIXED_ON_A_CPU,
    VLLM_ARGS_OF_OTHER_KEYS,
)
from verl_ray.config.schema import RLConfig
from verl_ray.config.vllm_arguments import VLLM_ARGUMENTS
from verl_ray.rewards.process import ScoreRequest
from verl_ray.rollout.vllm_engine import fixed_arguments

INPUTS = ["model.path=/m", "data.train_path=t.jsonl", "data.validation_path=v.jsonl"]


class Case(NamedTuple):
    rule: str
    overrides: str
    key: str
    says: str
    fix: str
    root: str = "quickstart"


MIXED = "reward=mixed reward.components.model.model.path=/rm"
JUDGE = "reward=judge reward.model.path=/judge"
FUNCTION = (
    "{kind: function, num_ranks: 1, processes_per_rank: 1, deadline_s: 1.0, functions: {default: exact_match}, "
    "normalise: none, clip: null, max_failed_fraction: 0.1}"
)

CASES = [
    Case("run_has_a_name", "run.name=a/b run.dir=x", "run.name", "also the name of its folder", "run.dir takes a path"),
    Case("run_has_a_name", "run.name=.. run.dir=x", "run.name", "also the name of its folder", "dots, - and _"),
    Case("run_has_a_name", "'run.name=a b' run.dir=x", "run.name", "also the name of its folder", "letters, digits"),
    Case("run_has_a_name", "\"run.dir=' '\"", "run.dir", "needs a folder", "outputs/NAME"),
    Case("resume_is_a_choice_or_a_path", "run.resume=Auto", "run.resume", "no such choice", "auto, none, or the path"),
    Case(
        "evaluation_has_data",
        "model.path=/m data.train_path=t data.validation_path=null",
        "data.validation_path",
        "run.evaluate_every=10 needs held-out problems",
        "run.evaluate_every=0",
        "ppo",
    ),
    Case(
        "evaluation_is_used",
        "prepare.min_gain=0 run.evaluate_every=0 evaluation.samples=3",
        "evaluation.samples",
        "run.evaluate_every=0 turns evaluation off",
        "Leave it out",
    ),
    Case(
        "stopping_is_measured",
        "model.path=/m data.train_path=t data.validation_path=v sft.stop_at_accuracy=0.5 run.evaluate_every=0",
        "sft.stop_at_accuracy",
        "run.evaluate_every=0 turns that off",
        "Use null",
        "sft",
    ),
    Case(
        "checkpoints_are_kept",
        "run.checkpoint_every=0 run.keep_checkpoints=9",
        "run.keep_checkpoints",
        "writes no checkpoints",
        "Leave it out",
    ),
    Case(
        "wandb_settings_are_used",
        "tracking.wandb.mode=disabled tracking.wandb.project=mine",
        "tracking.wandb.project",
        "mode=disabled writes nothing",
        "Leave it out",
    ),
    Case(
        "schedule_settings_are_used",
        "critic.optimizer.min_lr_fraction=0.1",
        "critic.optimizer.min_lr_fraction",
        "critic.optimizer.schedule=constant has no end",
        "Leave it out",
    ),
    Case(
        "micro_batch_holds_the_longest_row",
        "actor.backend.micro_batch_tokens_per_rank=20",
        "actor.backend.micro_batch_tokens_per_rank",
        "a row may have 24 tokens (data.max_prompt_tokens + rollout.max_response_tokens)",
        "nearest value that works is 24",
    ),
    Case(
        "micro_batch_holds_the_longest_row",
        "model.path=/m data.train_path=t data.validation_path=v sft.max_tokens=9000",
        "actor.backend.micro_batch_tokens_per_rank",
        "9000 tokens (sft.max_tokens)",
        "9000",
        "sft",
    ),
    Case(
        "mini_batches_divide_the_rows",
        "actor.mini_batch_size=100",
        "actor.mini_batch_size",
        "must divide the 256 rows of a step, data.prompts_per_step=32 x rollout.group_size=8",
        "64 or 128",
    ),
    Case(
        "group_baseline_has_a_group",
        "algorithm=grpo rollout.group_size=1 actor.mini_batch_size=null",
        "rollout.group_size",
        "algorithm.advantage=grpo compares the responses",
        "at least 2",
    ),
    Case(
        "shared_processes_have_equal_ranks",
        "critic.num_ranks=2",
        "critic.num_ranks",
        "share a process per rank, and actor.num_ranks=1",
        "critic.num_ranks=1, actor.num_ranks=2, placement=separate",
    ),
    Case("advantage_has_its_settings", "algorithm.lam=null", "algorithm.lam", "gae needs it", "0.95 is usual"),
    Case(
        "advantage_has_its_settings",
        "algorithm=grpo algorithm.gamma=1.0",
        "algorithm.gamma",
        "algorithm.advantage=grpo does not use it",
        "null",
    ),
    Case("gae_has_a_critic", "algorithm.value_loss=null", "algorithm.value_loss", "gae needs a critic", "clip: 0.2"),
    Case(
        "gae_has_a_critic",
        "'algorithm=grpo' 'algorithm.value_loss={clip: null, aggregation: token_mean}'",
        "algorithm.value_loss",
        "grpo uses no critic",
        "algorithm.value_loss=null",
    ),
    Case(
        "critic_settings_are_used",
        "algorithm=grpo critic.optimizer.lr=0.1",
        "critic.optimizer.lr",
        "algorithm=grpo makes no critic",
        "Leave it out",
    ),
    Case(
        "critic_settings_are_used",
        "algorithm=grpo backend@critic.backend=fsdp",
        "critic.backend",
        "algorithm=grpo makes no critic",
        "Leave it out",
    ),
    Case(
        "critic_settings_are_used",
        "algorithm=grpo algorithm.critic_warmup_steps=3",
        "algorithm.critic_warmup_steps",
        "makes no critic",
        "algorithm=ppo",
    ),
    Case(
        "critic_settings_are_used",
        "algorithm.critic_warmup_steps=200",
        "algorithm.critic_warmup_steps",
        "the actor would never learn",
        "at most 199",
    ),
    Case(
        "reference_settings_are_used",
        "algorithm=dr_grpo reference.num_ranks=1",
        "reference.num_ranks",
        "algorithm.kl.place=none makes no reference",
        "Leave it out",
    ),
    Case(
        "kl_in_the_loss_has_a_gradient",
        "algorithm=grpo algorithm.kl.estimator=k1",
        "algorithm.kl.estimator",
        "the expected gradient of k1 is zero",
        "k2 or k3",
    ),
    Case("reinforce_updates_once", "algorithm=rloo actor.epochs=2", "actor.epochs", "no ratio", "ppo_clip"),
    Case(
        "reinforce_updates_once",
        "algorithm=rloo actor.mini_batch_size=128",
        "actor.mini_batch_size",
        "no ratio",
        "null or 256",
    ),
    Case("kl_is_complete", "algorithm.kl.estimator=null", "algorithm.kl.estimator", "place=reward needs it", "k3"),
    Case(
        "kl_is_complete",
        "algorithm=dr_grpo algorithm.kl.coefficient=0.1",
        "algorithm.kl.coefficient",
        "algorithm.kl.place=none does not use it",
        "null",
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
    Case("clipping_belongs_to_ppo", "algorithm.clip_low=null", "algorithm.clip_low", "ppo_clip needs it", "0.2"),
    Case(
        "clipping_belongs_to_ppo",
        "algorithm=rloo algorithm.dual_clip=3.0",
        "algorithm.dual_clip",
        "algorithm.policy_loss=reinforce does not use it",
        "null",
    ),
    Case(
        "horizon_belongs_to_its_aggregation",
        "algorithm.aggregation=seq_mean_token_sum_norm",
        "algorithm.aggregation_horizon",
        "seq_mean_token_sum_norm needs it",
        "8 is usual",
    ),
    Case(
        "horizon_belongs_to_its_aggregation",
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
    Case("algorithm_name_is_its_group", "algorithm.name=grpo", "algorithm.name", "changes nothing", "algorithm=grpo"),
    Case("sampling_is_what_the_trainer_sees", "rollout.temperature=0", "rollout.temperature", "sampled", "Use 1.0"),
    Case("sampling_is_what_the_trainer_sees", "rollout.top_p=0.9", "rollout.top_p", "whole vocabulary", "Use 1.0"),
    Case("sampling_is_what_the_trainer_sees", "rollout.top_k=50", "rollout.top_k", "whole vocabulary", "Use -1"),
    Case("temperature_is_not_too_low", "rollout.temperature=0.001", "rollout.temperature", "of 0.01", "at least 0.01."),
    Case(
        "temperature_is_not_too_low",
        "prepare.min_gain=0 evaluation.temperature=0.001",
        "evaluation.temperature",
        "vLLM samples from a temperature of 0.01",
        "or 0 for greedy",
    ),
    Case(
        "greedy_evaluation_needs_one_response",
        "evaluation.group_size=4",
        "evaluation.group_size",
        "all responses to a problem are the same",
        "Use 1",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.seed=1",
        "rollout.vllm_args.seed",
        "run.seed sets this argument",
        "set run.seed",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.logprobs_mode=raw_logprobs",
        "rollout.vllm_args.logprobs_mode",
        "may not change: the trainer compares",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.blok_size=32",
        "rollout.vllm_args.blok_size",
        "no such engine argument",
        "Did you mean block_size",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.zzz=32",
        "rollout.vllm_args.zzz",
        "no such engine argument",
        "vLLM's EngineArgs",
    ),
    Case(
        "rewards_have_a_function",
        "~reward.functions.default ~reward.functions.gsm8k",
        "reward.functions",
        "no data source has a reward function",
        "default: exact_match",
    ),
    Case(
        "rewards_have_a_function",
        "evaluation.functions={}",
        "evaluation.functions",
        "no data source has a reward function",
        "Set evaluation.functions={default: exact_match}",
    ),
    Case(
        "held_out_deadline_is_used",
        "evaluation.deadline_s=3.0",
        "evaluation.deadline_s",
        "evaluation.functions=null leaves grading to the reward",
        "Leave it out",
    ),
    Case(
        "normalised_scores_matter",
        "algorithm=grpo reward.normalise=batch",
        "reward.normalise",
        "divides by its deviation, which undoes this",
        "Set it to none, or give reward.clip",
    ),
    Case(
        "mixed_rewards_have_weights",
        f"{MIXED} reward.weights.modl=1.0",
        "reward.weights.modl",
        "there is no component modl",
        "Did you mean model?",
    ),
    Case(
        "mixed_rewards_have_weights", f"{MIXED} ~reward.weights.model", "reward.weights.model", "has no weight", "=1.0"
    ),
    Case(
        "mixed_rewards_have_weights",
        f"{MIXED} reward.weights.model=0",
        "reward.weights.model",
        "computed and then ignored",
        "leave the component out",
    ),
    Case("judges_can_be_asked", f"{JUDGE} reward.lowest=11", "reward.highest", "above reward.lowest", "above 11.0"),
    Case("judges_can_be_asked", f"{JUDGE} 'reward.verdict=\"a(\"'", "reward.verdict", "no regular", "one group"),
    Case("judges_can_be_asked", f"{JUDGE} 'reward.verdict=\"abc\"'", "reward.verdict", "and has 0", "one group"),
    Case("judges_can_be_asked", f"{JUDGE} 'reward.verdict=\"(a*)\"'", "reward.verdict", "empty answer", "one group"),
    Case("judges_can_be_asked", f"{JUDGE} reward.template=Grade", "reward.template", "not see", "{{ response }}"),
    Case(
        "judges_can_be_asked",
        f"{JUDGE} 'reward.template=\"{{{{ response }}}} {{% if %}}\"'",
        "reward.template",
        "this is no template (Expected an expression",
        "prompt, response, answer, data_source or extra can be shown",
    ),
    Case(
        "judges_can_be_asked",
        f"{JUDGE} 'reward.template=\"{{{{ respones | upper }}}}\"'",
        "reward.template",
        "there is no respones to show (did you mean response?)",
        "{{ response }}",
    ),
    Case(
        "judges_can_be_asked",
        f"{JUDGE} 'reward.template=\"{{{{ response | uper }}}}\"'",
        "reward.template",
        "this is no template (No filter named 'uper'",
        "{{ response }}",
    ),
    Case("judges_can_be_asked", f"{JUDGE} reward.temperature=0.001", "reward.temperature", "0.01", "0 for greedy"),
    Case(
        "vllm_args_are_free",
        f"{JUDGE} reward.engine.vllm_args.dtype=float16",
        "reward.engine.vllm_args.dtype",
        "reward.engine.dtype sets this argument",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        f"{JUDGE} reward.engine.vllm_args.max_model_len=64",
        "reward.engine.vllm_args.max_model_len",
        "reward.max_prompt_tokens sets this argument",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        f"{JUDGE} reward.engine.vllm_args.enable_sleep_mode=true",
        "reward.engine.vllm_args.enable_sleep_mode",
        "may not change: a judge shares its devices with nobody",
        "Leave it out",
    ),
    Case(
        "requests_end_before_their_batch",
        "reward=http reward.url=http://h/s reward.request_timeout_s=200",
        "reward.request_timeout_s",
        "reward.deadline_s=120.0 bounds a batch",
        "at most 120.0",
    ),
    Case(
        "micro_batch_holds_the_longest_row",
        f"{' '.join(INPUTS)} preference.max_tokens=5000",
        "reward.backend.micro_batch_tokens_per_rank",
        "10000 tokens (2 x preference.max_tokens: the rows of a pair stay together)",
        "10000",
        "reward_model",
    ),
    Case(
        "peers_divide_the_ranks",
        "backend=fsdp actor.num_ranks=6 actor.backend.sequence_parallel=4",
        "actor.backend.sequence_parallel",
        "actor.num_ranks=6 ranks are cut into groups of this size",
        "Use 1, 2, 3 or 6.",
    ),
    Case(
        "micro_batch_holds_the_longest_row",
        f"{' '.join(INPUTS)} backend=fsdp backend.micro_batch_tokens_per_rank=700 backend.sequence_parallel=2 "
        "actor.num_ranks=2",
        "actor.backend.micro_batch_tokens_per_rank",
        "1536 tokens (data.max_prompt_tokens + rollout.max_response_tokens) and must fit into one micro-batch, which 2",
        "The nearest value that works is 768",
        "ppo",
    ),
    Case(
        "shards_divide_the_ranks",
        "backend=fsdp backend.sharding=hybrid actor.num_ranks=8 backend.shard_size=3",
        "actor.backend.shard_size",
        "actor.num_ranks=8 ranks are cut into groups of this size",
        "Use 2 or 4.",
    ),
    Case(
        "shards_divide_the_ranks",
        "backend=fsdp backend.sharding=hybrid backend.shard_size=2 actor.num_ranks=3",
        "actor.backend.sharding",
        "cannot be cut into equal groups",
        "such as 4",
    ),
    Case(
        "shards_divide_the_ranks",
        "backend=fsdp backend.shard_size=2",
        "critic.backend.shard_size",
        "critic.backend.sharding=full has no groups",
        "Set it to null",
    ),
    Case(
        "warm_start_leaves_room",
        JUDGE,
        "prepare.min_gain",
        "the gain is one of accuracy, which reward=judge does not measure",
        "Use 0, or evaluation.functions={default: exact_match}",
    ),
    Case(
        "graders_keep_the_deadline_of_calls",
        "run.call_deadline_s=60 reward.deadline_s=100",
        "reward.deadline_s",
        "run.call_deadline_s=60.0 ends the run before",
        "at most 60.0",
    ),
    Case(
        "frozen_models_keep_no_activations",
        "reference.backend.activation_checkpointing=true",
        "reference.backend.activation_checkpointing",
        "does not learn",
        "Leave it out",
    ),
    Case("inputs_are_made_or_given", "model.path=/m", "model.path", "prepare makes this input", "prepare=null"),
    Case("prepared_data_exists", "prepare.max_operand=9", "prepare.max_operand", "there are 100 problems", "least 96"),
    Case(
        "prepared_data_exists",
        "evaluation.num_prompts=501",
        "evaluation.num_prompts",
        "prepare.num_validation=500 makes fewer",
        "at most 500",
    ),
    Case(
        "prepared_model_is_possible",
        "rollout.tensor_parallel=3",
        "rollout.tensor_parallel",
        "must divide prepare.model.num_heads=4",
        "2 or 4",
    ),
    Case(
        "prepared_model_is_possible",
        "prepare.model.num_kv_heads=3",
        "prepare.model.num_kv_heads",
        "must divide prepare.model.num_heads=4",
        "2 or 4",
    ),
    Case(
        "prepared_model_is_possible",
        "prepare.model.head_size=16",
        "prepare.model.head_size",
        "does not take this size on a CPU",
        "32 or 48",
    ),
    Case(
        "warm_start_leaves_room",
        "prepare.warm_start.accuracy_low=0.5",
        "prepare.warm_start.accuracy_low",
        "accuracy_high=0.45",
        "below accuracy_high",
    ),
    Case("warm_start_leaves_room", "prepare.min_gain=0.6", "prepare.min_gain", "cannot rise", "at most 0.5"),
    Case("warm_start_leaves_room", "run.evaluate_every=0", "prepare.min_gain", "turns that off", "Use 0"),
    Case("warm_start_leaves_room", "evaluation.temperature=1.0", "evaluation.temperature", "greedy", "Use 0"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.key}")
def test_message(case: Case) -> None:
    problems = examine(case.root, shlex.split(case.overrides)).problems
    assert [problem.key for problem in problems if problem.key == case.key] == [case.key]
    (problem,) = (problem for problem in problems if problem.key == case.key)
    assert case.says in problem.rule
    assert case.fix in problem.fix


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.__name__ for rule in (*RULES, *RL_RULES)}


def test_every_rule_runs_and_all_are_reported_at_once() -> None:
    overrides = ["rollout.top_p=0.5", "actor.mini_batch_size=100", "critic.num_ranks=3", "algorithm.lam=null"]
    keys = {problem.key for problem in examine("quickstart", overrides).problems}
    assert keys == {"rollout.top_p", "actor.mini_batch_size", "critic.num_ranks", "algorithm.lam"}


@pytest.mark.parametrize(
    "algorithm", ["ppo", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
@pytest.mark.parametrize("root", ["quickstart", "ppo", "grpo"])
def test_every_algorithm_goes_with_every_root(root: str, algorithm: str) -> None:
    config = compose(root, [f"algorithm={algorithm}", *([] if root == "quickstart" else INPUTS)])
    assert isinstance(config, RLConfig)
    assert config.algorithm.name == algorithm
    assert config.has_critic == (algorithm == "ppo")


def test_ranks_may_differ_where_no_process_is_shared() -> None:
    compose("quickstart", ["critic.num_ranks=2", "placement=separate"])
    compose("quickstart", ["critic.num_ranks=2", "backend@critic.backend=fsdp"])
    compose("quickstart", ["algorithm=grpo", "actor.num_ranks=2"])


def test_the_name_of_a_component_goes_into_keys(tmp_path: Path) -> None:
    """With another character in it, a path below it would not be made absolute; with a dot, its weight not be found."""
    (tmp_path / "reward").mkdir()
    for name, right in (("style_2", True), ("my-style", False), ("a.b", False)):
        mixture = f"kind: mixed\ncomponents:\n  {name}: {FUNCTION}\nweights: {{{name}: 1.0}}\n"
        (tmp_path / "reward" / "mine.yaml").write_text(mixture)
        problems = examine("quickstart", ["reward=mine", "prepare.min_gain=0"], str(tmp_path)).problems
        assert [(problem.key, problem.fix) for problem in problems] == (
            [] if right else [(f"reward.components.{name}", "Use letters, digits and _.")]
        )


def test_the_rules_know_the_advantages_that_exist() -> None:
    assert {name for name, advantage in ADVANTAGES.items() if advantage.needs_group} == GROUP_BASELINES
    assert {name for name, advantage in ADVANTAGES.items() if advantage.level == "token"} == DISCOUNTED


def test_the_rules_know_what_a_judge_can_be_shown() -> None:
    assert {field.name for field in dataclasses.fields(ScoreRequest)} == set(TEMPLATE_FIELDS)


def test_an_engine_argument_is_listed_once_and_exists() -> None:
    listed = [*VLLM_ARGS_OF_OTHER_KEYS, *VLLM_ARGS_FIXED, *VLLM_ARGS_FIXED_ON_A_CPU]
    assert len(set(listed)) == len(listed)
    assert set(listed) <= set(VLLM_ARGUMENTS)


def test_the_rules_know_the_arguments_that_the_engine_fixes() -> None:
    config = compose("quickstart")
    assert isinstance(config, RLConfig)
    cpu, gpu = (
        fixed_arguments("/m", config.rollout, 24, 0, device, without_weights=True, sleeps=True).keys()
        for device in ("cpu", "cuda")
    )
    everywhere = VLLM_ARGS_OF_OTHER_KEYS.keys() | VLLM_ARGS_FIXED.keys()
    assert cpu - everywhere == VLLM_ARGS_FIXED_ON_A_CPU.keys()
    assert gpu <= everywhere


@pytest.mark.vllm
def test_the_names_of_the_engine_arguments_are_current() -> None:
    from vllm.engine.arg_utils import EngineArgs

    names = [field.name for field in dataclasses.fields(EngineArgs)]
    assert list(VLLM_ARGUMENTS) == [name for name in names if not name.startswith("_")]


def test_an_evaluation_looks_at_its_settings_whenever_training_would() -> None:
    settings = ["run.evaluate_every=0", "evaluation.temperature=1.0", "evaluation.group_size=2"]
    assert {problem.key for problem in examine("quickstart", settings).problems} == {
        "evaluation.temperature", "evaluation.group_size", "prepare.min_gain",
    }  # fmt: skip
    assert examine("quickstart", settings, evaluates=True).problems == []
    without = ["model.path=/m", "data.train_path=t", "data.validation_path=null", "run.evaluate_every=0"]
    (problem,) = examine("ppo", without, evaluates=True).problems
    assert (problem.key, problem.rule) == ("data.validation_path", "an evaluation needs held-out problems")
