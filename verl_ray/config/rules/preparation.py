"""Rules of the inputs that a run makes itself: problems, a model, its warm start.

Invariant: the requested inputs can be made, and leave the run something to gain.
Deliberately not here: making them (`controllers/run/preparation.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.config.rules.rule import OverriddenKeys, ignored_settings
from verl_ray.config.suggest import either, nearest_divisors
from verl_ray.config.vllm_limits import ATTENTION_HEAD_SIZES
from verl_ray.errors import Problem

if TYPE_CHECKING:  # it imports this module
    from verl_ray.config.tasks.rl import RLConfig


def inputs_are_prepared_or_provided(
    config: RLConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each input that the user names and the run makes itself."""
    if config.prepare is None:
        return

    data = ("data.train_path", "data.validation_path", "data.columns")
    for key in ("model.path", *data):
        keys = overridden.under(key)
        reason = "prepare makes this input itself"
        fix = f"Leave {key} out, or set prepare=null to bring inputs of your own."
        yield from ignored_settings(keys, config, reason, fix)


def prepared_data_exists(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem if the run needs more problems than exist or than it makes."""
    prepare = config.prepare
    if prepare is None:
        return

    # Problems are about ordered pairs of operands from 0 to the largest.
    existing = (prepare.max_operand + 1) ** 2
    needed = -(-prepare.num_train // prepare.wordings) + prepare.num_validation
    if needed > existing:
        rule = (
            f"there are {existing} problems with operands up to that, and"
            f" prepare.num_train + prepare.num_validation asks for {needed} different"
            " ones"
        )
        fix = f"Use at least {_operand_for(needed)}, or fewer problems."
        yield Problem("prepare.max_operand", prepare.max_operand, rule, fix)

    evaluated = config.evaluation.num_prompts
    held_out = prepare.num_validation
    if evaluated is not None and evaluated > held_out:
        rule = f"prepare.num_validation={held_out} makes fewer held-out problems"
        fix = f"Use at most {held_out}, or null for all."
        yield Problem("evaluation.num_prompts", evaluated, rule, fix)


def _operand_for(problems: int) -> int:
    """Return the smallest largest operand that gives that many problems."""
    operand = 0
    while (operand + 1) ** 2 < problems:
        operand += 1
    return operand


def prepared_model_is_possible(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each size of the new model that cannot be built or served."""
    if config.prepare is None:
        return

    model = config.prepare.model
    must_divide = f"it must divide prepare.model.num_heads={model.num_heads}"

    # Each head of keys serves equally many heads of queries.
    kv_heads = model.num_kv_heads
    if model.num_heads % kv_heads:
        nearest = nearest_divisors(model.num_heads, kv_heads)
        fix = f"The nearest are {either(nearest)}."
        yield Problem("prepare.model.num_kv_heads", kv_heads, must_divide, fix)

    # Each rank of the rollout engine takes whole heads.
    parallel = config.rollout.tensor_parallel
    if model.num_heads % parallel:
        nearest = nearest_divisors(model.num_heads, parallel)
        fix = f"The nearest that do are {either(nearest)}."
        yield Problem("rollout.tensor_parallel", parallel, must_divide, fix)

    if model.head_size not in ATTENTION_HEAD_SIZES:
        rule = "the rollout engine's attention does not take this size on a CPU"
        fix = f"The nearest are {either(_nearest_head_sizes(model.head_size))}."
        yield Problem("prepare.model.head_size", model.head_size, rule, fix)


def _nearest_head_sizes(head_size: int) -> list[int]:
    """Return the two supported head sizes that are nearest, ascending."""
    by_distance = sorted(ATTENTION_HEAD_SIZES, key=lambda size: abs(size - head_size))
    return sorted(by_distance[:2])


def warm_start_leaves_something_to_gain(
    config: RLConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if the warm start's range is empty or the gain not possible."""
    prepare = config.prepare

    # An evaluation alone makes no inputs.
    if prepare is None or overridden.evaluates:
        return

    lowest = prepare.warm_start.accuracy_low
    highest = prepare.warm_start.accuracy_high
    range_end = f"prepare.warm_start.accuracy_high={highest}"

    if lowest >= highest:
        key = "prepare.warm_start.accuracy_low"
        fix = "Set accuracy_low below accuracy_high."
        yield Problem(key, lowest, f"the range ends at {range_end}", fix)

    if highest + prepare.min_gain > 1:
        rule = f"accuracy cannot rise by that much from {range_end}"
        fix = f"Use at most {1 - highest:g}."
        yield Problem("prepare.min_gain", prepare.min_gain, rule, fix)

    if prepare.min_gain:
        yield from _gain_is_measured(config, prepare.min_gain)


def _gain_is_measured(config: RLConfig, gain: float) -> Iterator[Problem]:
    """Yield a problem for each setting under which the gain would not be measured."""
    evaluation = config.evaluation
    key = "prepare.min_gain"

    if config.run.evaluate_every == 0:
        rule = (
            "a gain is measured by evaluating, and run.evaluate_every=0 turns that off"
        )
        yield Problem(key, gain, rule, "Use 0, or evaluate.")

    # Other rewards than functions give scores that are no accuracies.
    kind = config.reward.kind
    if kind != "function" and evaluation.functions is None:
        rule = f"the gain is one of accuracy, which reward={kind} does not measure"
        fix = "Use 0, or evaluation.functions={default: exact_match}."
        yield Problem(key, gain, rule, fix)

    if evaluation.temperature:
        rule = "the gain is one of greedy accuracy"
        fix = "Use 0, or prepare.min_gain=0."
        yield Problem("evaluation.temperature", evaluation.temperature, rule, fix)
