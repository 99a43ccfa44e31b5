"""The list of all rules, and the message of each; cases are in a module per noun."""

from __future__ import annotations

import inspect
import re

import pytest

from controllers.compose.composition import examine
from scripts.configuration import compose
from tests.config.rules import (
    test_algorithm,
    test_correction,
    test_data,
    test_megatron,
    test_megatron_fsdp,
    test_preparation,
    test_reward,
    test_roles,
    test_rollout,
    test_run,
    test_schedule,
    test_spread,
    test_vllm_args,
)
from tests.config.rules.cases import Case
from verl_ray.config.correction import correction_problems
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.dpo import DPOConfig
from verl_ray.config.tasks.reward_model import RewardModelConfig
from verl_ray.config.tasks.rl import (
    RULES,
    RLConfig,
    _inputs_can_be_made,
    _pairs_can_be_learned,
    teacher_settings_are_read,
)
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.errors import Problem
from verl_ray.settings.section import RuleRow

CASES = [
    case
    for module in (
        test_algorithm,
        test_correction,
        test_data,
        test_megatron,
        test_megatron_fsdp,
        test_preparation,
        test_reward,
        test_roles,
        test_rollout,
        test_run,
        test_schedule,
        test_spread,
        test_vllm_args,
    )
    for case in module.CASES
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_message(case: Case) -> None:
    problem = case.problem()
    assert case.says in problem.rule
    assert case.fix in problem.fix


def test_every_rule_has_a_case() -> None:
    tasks = (Config, RolloutTaskConfig, RLConfig, SFTConfig, DPOConfig)
    callers = [task.problems for task in tasks]
    callers += [
        _inputs_can_be_made,
        _pairs_can_be_learned,
        correction_problems,
        teacher_settings_are_read,
    ]
    code = "".join(map(inspect.getsource, callers))
    rules = set(re.findall(r"yield from ([a-z]\w+)\(", code))
    rules -= {"super", "correction_problems"}
    rules |= {rule.name for rule in RULES}
    assert "problems" not in vars(RewardModelConfig)
    assert {case.rule for case in CASES} == rules


def test_every_rule_runs_and_all_are_reported_at_once() -> None:
    overrides = [
        "rollout.top_p=0.5",
        "actor.mini_batch_size=100",
        "critic.num_ranks=3",
        "algorithm.lam=null",
    ]
    keys = {problem.key for problem in examine("quickstart", overrides).problems}
    assert keys == {
        "rollout.top_p",
        "actor.mini_batch_size",
        "critic.num_ranks",
        "algorithm.lam",
    }


def test_each_row_of_the_table_is_broken_by_a_case_and_kept_by_a_usual_run() -> None:
    """Rows may share a name, so that each is looked for by its own words."""
    problems = [case.problem() for case in CASES]
    for rule in RULES:
        plain = re.split(r"\{[^}]*\}", rule.rule)[-1]
        assert any(
            problem.key == rule.key and problem.rule.endswith(plain)
            for problem in problems
        ), rule

    usual = compose("quickstart", [])
    assert isinstance(usual, RLConfig)
    assert not [rule.name for rule in RULES if rule.is_broken(usual)]


def test_a_rule_names_values_of_the_configuration() -> None:
    config = compose("quickstart", ["data.prompts_per_step=4", "rollout.group_size=2"])
    assert isinstance(config, RLConfig)
    rule = RuleRow[RLConfig](
        name="example",
        key="rollout.group_size",
        is_broken=lambda config: config.rollout.group_size == 2,
        rule="{algorithm.advantage} makes {config.rows_per_step} rows",
        fix="Use {data.prompts_per_step}.",
    )
    expected = Problem("rollout.group_size", 2, "gae makes 8 rows", "Use 4.")
    assert [*rule.problems(config)] == [expected]
    others = compose("quickstart", ["rollout.group_size=4"])
    assert isinstance(others, RLConfig) and not [*rule.problems(others)]
