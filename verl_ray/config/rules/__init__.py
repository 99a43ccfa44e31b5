"""The rules over several fields, a small function each, in a module per noun.

Invariant: every rule runs, and every problem is reported at once with its key, its
value, the rule and what would be right. A setting that another one makes meaningless is
refused, never ignored. The rules of every task are listed here; the type of a task's
configuration names further ones (`own_rules`). Deliberately not here: rules of a single
field (`verl_ray.config`), and what only the machine knows, such as files and memory
(`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

from collections.abc import Collection

from verl_ray.config.rules.backends import (
    adapters_have_a_backend,
    frozen_models_do_not_learn,
    ranks_fit_the_backend,
)
from verl_ray.config.rules.data import (
    columns_are_of_fields,
    template_settings_have_a_use,
)
from verl_ray.config.rules.reward import (
    graders_finish_within_the_stall_limit,
    judge_settings_work,
    requests_end_before_their_batch,
    rewards_have_a_function,
)
from verl_ray.config.rules.roles import (
    adapter_settings_are_used,
    micro_batch_holds_the_longest_row,
    revisions_are_of_the_hub,
    schedule_settings_are_used,
    shared_processes_have_equal_ranks,
)
from verl_ray.config.rules.rule import OverriddenKeys, Rule
from verl_ray.config.rules.run import (
    best_is_measured,
    checkpoints_are_kept,
    evaluation_has_data,
    evaluation_is_used,
    resume_is_a_choice_or_a_path,
    run_has_a_name,
    run_has_one_length,
    wandb_settings_are_used,
)
from verl_ray.config.schema import Config
from verl_ray.errors import Problem


def rule_violations(
    config: Config, overridden: Collection[str] = (), *, evaluates: bool = False
) -> list[Problem]:
    """Return the problems of every rule that `config` breaks.

    Args:
        config: the configuration of any task.
        overridden: the dotted keys that the user set on the command line.
        evaluates: whether the command is a single evaluation instead of training.
    """
    keys = OverriddenKeys(overridden, evaluates)
    problems: list[Problem] = []

    # No rule stops the others, so that all problems are reported at once.
    for rule in (*RULES, *config.own_rules):
        problems += rule(config, keys)

    return problems


RULES: tuple[Rule, ...] = (
    run_has_a_name,
    run_has_one_length,
    resume_is_a_choice_or_a_path,
    columns_are_of_fields,
    template_settings_have_a_use,
    evaluation_has_data,
    evaluation_is_used,
    best_is_measured,
    checkpoints_are_kept,
    wandb_settings_are_used,
    schedule_settings_are_used,
    micro_batch_holds_the_longest_row,
    revisions_are_of_the_hub,
    ranks_fit_the_backend,
    frozen_models_do_not_learn,
    adapter_settings_are_used,
    adapters_have_a_backend,
    shared_processes_have_equal_ranks,
    rewards_have_a_function,
    graders_finish_within_the_stall_limit,
    judge_settings_work,
    requests_end_before_their_batch,
)
"""The rules of every task."""
