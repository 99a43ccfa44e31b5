"""Rules of the inputs that a run makes for itself (`prepare`): problems, a model, its warm start.

Invariant: what is asked for can be made, and leaves the run something to gain. Deliberately not here: making it
(`controllers/run/preparation.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.config.rules.rollout import ATTENTION_HEAD_SIZES
from verl_ray.config.rules.rule import Overridden, ignored
from verl_ray.config.suggest import either, nearest_divisors
from verl_ray.errors import Problem

if TYPE_CHECKING:  # which name these rules
    from verl_ray.config.tasks.rl import RLConfig


def inputs_are_made_or_given(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    """A run that makes its inputs uses them."""
    if config.prepare is None:
        return
    for key in ("model.path", "data.train_path", "data.validation_path"):
        fix = f"Leave {key} out, or set prepare=null to bring inputs of your own."
        yield from ignored(overridden.under(key), config, "prepare makes this input itself", fix)


def prepared_data_exists(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    if config.prepare is None:
        return
    pairs = (config.prepare.max_operand + 1) ** 2
    wanted = config.prepare.num_train + config.prepare.num_validation
    if wanted > pairs:
        yield Problem(
            "prepare.max_operand",
            config.prepare.max_operand,
            f"there are {pairs} problems with operands up to that, and prepare.num_train + prepare.num_validation "
            f"asks for {wanted} different ones",
            f"Use at least {_operand_for(wanted)}, or fewer problems.",
        )
    asked, made = config.evaluation.num_prompts, config.prepare.num_validation
    if asked is not None and asked > made:
        rule = f"prepare.num_validation={made} makes fewer held-out problems"
        yield Problem("evaluation.num_prompts", asked, rule, f"Use at most {made}, or null for all.")


def prepared_model_is_possible(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    if config.prepare is None:
        return
    model = config.prepare.model
    if model.num_heads % model.num_kv_heads:
        nearest = nearest_divisors(model.num_heads, model.num_kv_heads)
        rule = f"it must divide prepare.model.num_heads={model.num_heads}"
        yield Problem("prepare.model.num_kv_heads", model.num_kv_heads, rule, f"The nearest are {either(nearest)}.")
    parallel = config.rollout.tensor_parallel
    if model.num_heads % parallel:
        nearest = nearest_divisors(model.num_heads, parallel)
        rule = f"it must divide prepare.model.num_heads={model.num_heads}"
        yield Problem("rollout.tensor_parallel", parallel, rule, f"The nearest that do are {either(nearest)}.")
    if model.head_size not in ATTENTION_HEAD_SIZES:
        nearest = sorted(sorted(ATTENTION_HEAD_SIZES, key=lambda size: abs(size - model.head_size))[:2])
        rule = "the rollout engine's attention does not take this size on a CPU"
        yield Problem("prepare.model.head_size", model.head_size, rule, f"The nearest are {either(nearest)}.")


def warm_start_leaves_room(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if config.prepare is None or overridden.evaluates:
        return
    warm, gain = config.prepare.warm_start, config.prepare.min_gain
    if warm.accuracy_low >= warm.accuracy_high:
        rule = f"the range ends at prepare.warm_start.accuracy_high={warm.accuracy_high}"
        fix = "Set accuracy_low below accuracy_high."
        yield Problem("prepare.warm_start.accuracy_low", warm.accuracy_low, rule, fix)
    if warm.accuracy_high + gain > 1:
        rule = f"accuracy cannot rise by that much from prepare.warm_start.accuracy_high={warm.accuracy_high}"
        yield Problem("prepare.min_gain", gain, rule, f"Use at most {1 - warm.accuracy_high:g}.")
    if gain and config.run.evaluate_every == 0:
        rule = "a gain is measured by evaluating, and run.evaluate_every=0 turns that off"
        yield Problem("prepare.min_gain", gain, rule, "Use 0, or evaluate.")
    if gain and config.reward.kind != "function" and config.evaluation.functions is None:
        rule = f"the gain is one of accuracy, which reward={config.reward.kind} does not measure"
        yield Problem("prepare.min_gain", gain, rule, "Use 0, or evaluation.functions={default: exact_match}.")
    if gain and config.evaluation.temperature:
        rule = "the gain is one of greedy accuracy"
        yield Problem("evaluation.temperature", config.evaluation.temperature, rule, "Use 0, or prepare.min_gain=0.")


def _operand_for(problems: int) -> int:
    """The smallest largest operand with at least that many pairs."""
    operand = 0
    while (operand + 1) ** 2 < problems:
        operand += 1
    return operand
