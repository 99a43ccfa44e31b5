"""The rules over several fields, one small function each, in a module per noun; those of every task are listed here.

Invariant: every rule runs, and every problem is reported at once with its key, its value, the rule and what would be
right. A setting that another one makes meaningless is refused, never ignored. Further rules are named by the type of a
task's configuration (`own_rules`). Deliberately not here: rules of a single field (`verl_ray.config`), and what only
the machine knows, such as files and memory (`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

from collections.abc import Collection

from verl_ray.config.rules.backends import (
    adapters_have_a_backend,
    frozen_models_do_not_learn,
    ranks_can_share_models_out,
)
from verl_ray.config.rules.reward import (
    graders_keep_the_deadline_of_calls,
    judges_can_be_asked,
    requests_end_before_their_batch,
    rewards_have_a_function,
)
from verl_ray.config.rules.roles import (
    adapter_settings_are_used,
    micro_batch_holds_the_longest_row,
    schedule_settings_are_used,
    shared_processes_have_equal_ranks,
)
from verl_ray.config.rules.rule import Overridden, Rule
from verl_ray.config.rules.run import (
    checkpoints_are_kept,
    evaluation_has_data,
    evaluation_is_used,
    resume_is_a_choice_or_a_path,
    run_has_a_name,
    wandb_settings_are_used,
)
from verl_ray.config.schema import Config
from verl_ray.errors import Problem


def broken(config: Config, overridden: Collection[str] = (), *, evaluates: bool = False) -> list[Problem]:
    """Every rule that `config` breaks; `overridden` are the dotted keys set on the command line, and `evaluates` says
    that the command is one evaluation instead of training."""
    keys = Overridden(overridden, evaluates)
    return [problem for rule in (*RULES, *config.own_rules) for problem in rule(config, keys)]


RULES: tuple[Rule, ...] = (
    run_has_a_name,
    resume_is_a_choice_or_a_path,
    evaluation_has_data,
    evaluation_is_used,
    checkpoints_are_kept,
    wandb_settings_are_used,
    schedule_settings_are_used,
    micro_batch_holds_the_longest_row,
    ranks_can_share_models_out,
    frozen_models_do_not_learn,
    adapter_settings_are_used,
    adapters_have_a_backend,
    shared_processes_have_equal_ranks,
    rewards_have_a_function,
    graders_keep_the_deadline_of_calls,
    judges_can_be_asked,
    requests_end_before_their_batch,
)
