"""The list of all rules, and the message of each; cases are in a module per noun."""

from __future__ import annotations

import inspect
import re

import pytest

from controllers.compose.composition import examine
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
)
from tests.config.rules.cases import Case
from verl_ray.config.correction import correction_problems
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.reward_model import RewardModelConfig
from verl_ray.config.tasks.rl import RLConfig, _inputs_can_be_made
from verl_ray.config.tasks.sft import SFTConfig

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
    )
    for case in module.CASES
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_message(case: Case) -> None:
    problem = case.problem()
    assert case.says in problem.rule
    assert case.fix in problem.fix


def test_every_rule_has_a_case() -> None:
    tasks = (Config, RolloutTaskConfig, RLConfig, SFTConfig)
    callers = [task.problems for task in tasks]
    callers += [_inputs_can_be_made, correction_problems]
    code = "".join(map(inspect.getsource, callers))
    rules = set(re.findall(r"yield from ([a-z]\w+)\(", code))
    rules -= {"super", "correction_problems"}
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
