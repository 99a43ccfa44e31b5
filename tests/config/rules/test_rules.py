"""The list of all rules."""

from __future__ import annotations

from pathlib import Path

from controllers.composition import examine
from verl_ray.config.rules import RL_RULES, RULES


def test_every_module_of_rules_has_cases() -> None:
    modules = {rule.__module__.rpartition(".")[2] for rule in (*RULES, *RL_RULES)}
    assert all(Path(__file__).with_name(f"test_{module}.py").exists() for module in modules)


def test_every_rule_runs_and_all_are_reported_at_once() -> None:
    overrides = ["rollout.top_p=0.5", "actor.mini_batch_size=100", "critic.num_ranks=3", "algorithm.lam=null"]
    keys = {problem.key for problem in examine("quickstart", overrides).problems}
    assert keys == {"rollout.top_p", "actor.mini_batch_size", "critic.num_ranks", "algorithm.lam"}
