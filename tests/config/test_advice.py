"""Advice for keys that do not exist: each leads to a setting that does."""

from __future__ import annotations

import re

import pytest

from controllers.compose.listing import groups
from controllers.tasks import config_type
from verl_ray.backends import BACKENDS
from verl_ray.config.advice import FOREIGN, advice_on, foreign_answer, keys_in
from verl_ray.config.load import known_keys, value_keys
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.config.tasks.sft import SFTConfig

KEYS = {
    key
    for task in ("rl", "sft", "reward_model")
    for key in known_keys(config_type(task))
}
BACKEND_KEYS = {
    f"backend.{name}" for kind in BACKENDS.values() for name in kind.model_fields
}
# Their keys are the user's own.
FREE = re.compile(r"(rollout\.vllm_args|reward\.functions|agent\.environments)\.\w+")
RL = value_keys(RLConfig)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_every_answer_names_settings_and_choices_that_exist(role: str) -> None:
    choices = groups()
    for name, answers in FOREIGN.items():
        for answer in (text.format(role=role) for text in answers):
            for key in keys_in(answer):
                exists = key in KEYS | BACKEND_KEYS or FREE.fullmatch(key)
                assert exists, f"{name} is answered with {key}"
            for group, choice in re.findall(r"\b([a-z]+)=([a-z_]+)", answer):
                if (
                    group in choices
                    and "." not in answer.partition(f"{group}=")[0][-1:]
                ):
                    assert choice in choices[group], f"{name}: {group}={choice}"


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("data.train_batch_size", "data.prompts_per_step"),
        ("rollout.n", "rollout.group_size"),
        ("data.apply_chat_template_kwargs", "data.chat_template_kwargs"),
        ("data.apply_chat_template_kwargs.budget", "data.chat_template_kwargs"),
        (
            "data.apply_chat_template_kwargs.enable_thinking",
            "data.chat_template_kwargs",
        ),
        ("enable_thinking", "data.chat_template_kwargs"),
        ("num_generations", "rollout.group_size"),
        ("actor_rollout_ref.actor.optim.lr", "actor.optimizer.lr"),
        ("critic.optim.lr", "critic.optimizer.lr"),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
        ("--learning-rate", "actor.optimizer.lr"),
        ("run.epochs", "run.total_epochs"),
        ("trainer.total_epochs", "run.total_epochs"),
        ("checkpointing.enabled", "run.checkpoint_every"),
        ("overlong_buffer.enable", "algorithm.overlong_share"),
        ("agent_func_path", "agent.environments.default"),
        ("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "agent.max_turns"),
        ("actor_rollout_ref.rollout.multi_turn.format", "agent.tool_parser"),
        ("algorithm.filter_groups.enable", "algorithm.dynamic_sampling"),
        ("use_dynamic_sampling", "algorithm.dynamic_sampling"),
        ("delta", "algorithm.dual_clip"),
        ("do_sample", "rollout.temperature"),
        ("checkpointing.keep_top_k", "run.best_metric"),
        ("critic_learning_rate", "critic.optimizer.lr"),
        ("weight_decay", "actor.optimizer.weight_decay"),
        ("optim", "actor.optimizer"),
        ("seed", "run.seed"),
        ("policy.generation.temperature", "rollout.temperature"),
        ("hydra.sweep.dir", "run.dir"),
        ("reward_model.reward_manager", "reward.functions.default"),
    ],
)
def test_keys_of_other_systems(typed: str, answer: str) -> None:
    assert next(keys_in(advice_on(typed, RL))) == answer


def test_units_that_differ_are_converted() -> None:
    assert "not prompts: multiply by rollout.group_size" in advice_on(
        "actor_rollout_ref.actor.ppo_mini_batch_size", RL
    )
    assert "in GiB" in advice_on("rollout.gpu_memory_utilization", RL)
    assert "algorithm.kl=loss for true" in advice_on("actor.use_kl_loss", RL)
    assert "0 is algorithm.kl=none" in advice_on("beta", RL)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("grpo.normalize_rewards", "algorithm.advantage=dr_grpo does not"),
        ("scale_rewards", "algorithm.advantage=dr_grpo does not"),
        ("norm_adv_by_std_in_grpo", "algorithm.advantage=dr_grpo does not"),
        ("loss_type", "algorithm=NAME chooses the loss: cispo, gspo, sapo"),
        ("loss_type", "algorithm.aggregation the sum"),
        ("epsilon_high", "algorithm.ratio_max, the bound of the ratio itself"),
        ("policy.dtensor_cfg.enabled", "Choose backend=fsdp."),
        ("load_best_model_at_end", "export RUN --best"),
        ("cliprange_value", "With a critic (algorithm=ppo)"),
        ("attn_implementation", "Nothing to set"),
        ("hydra/launcher", "--multirun come one after another"),
    ],
)
def test_what_other_systems_set_and_this_does_not(typed: str, words: str) -> None:
    assert words in advice_on(typed, RL)


def test_what_a_task_does_not_have_is_not_advised() -> None:
    sft = value_keys(SFTConfig)
    assert advice_on("train_batch_size", sft) == "Here it is sft.batch_size."
    assert foreign_answer("num_generations", sft) == (
        "A run of this task has nothing to set for it; leave it out."
    )


def test_a_wrong_letter_in_a_key_of_our_own_is_not_taken_for_a_foreign_word() -> None:
    assert advice_on("critc.epochs", RL).startswith("Did you mean critic.epochs")


def test_the_key_of_a_table_is_spelt_right_before_what_is_inside() -> None:
    for typed in ("agent.enviroments.x", "agent.environment.default"):
        assert advice_on(typed, RL) == "Did you mean agent.environments?"
    typed = "actor.optimiser.lr"
    assert advice_on(typed, RL) == "Did you mean actor.optimizer.lr?"
