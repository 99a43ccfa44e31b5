"""The inputs that a run makes itself: problems, a tokenizer, and a tiny model.

Invariant: the requested inputs can be made, and leave the run something to gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from verl_ray.config.optimizers import Optimizer
from verl_ray.config.reward import EvaluationConfig, Reward
from verl_ray.config.rollout import ATTENTION_HEAD_SIZES
from verl_ray.config.run import RunConfig
from verl_ray.errors import Problem
from verl_ray.settings.section import (
    Fraction,
    NonNegative,
    OverriddenKeys,
    Positive,
    Section,
)
from verl_ray.suggest import either, nearest_divisors


class TinyModelConfig(Section):
    """A Qwen3-style model whose vocabulary is exactly the tokenizer's."""

    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_size: Positive
    intermediate_size: Positive
    tie_embeddings: bool


class WarmStartConfig(Section):
    """Supervised training of the new model before reinforcement learning.

    It stops at a held-out greedy accuracy within [accuracy_low, accuracy_high].
    """

    accuracy_low: Fraction
    accuracy_high: Fraction
    wrong_fraction: Fraction
    """Fraction of the demonstrations whose response is wrong, so that rewards have
    something to put right."""
    batch_size: Positive
    """Rows per optimizer step."""
    evaluate_every: Positive
    """Optimizer steps from one measurement of the accuracy to the next."""
    min_steps: NonNegative
    """Fewest steps, also when the accuracy is reached earlier: a policy that can do
    nothing else yet learns little from rewards."""
    max_steps: Positive
    """Most steps."""
    optimizer: Optimizer


class PrepareConfig(Section):
    """Inputs that the run makes under run.dir/inputs before it trains.

    They are problems, a tokenizer for them, and a model.
    """

    problems: Literal["sums", "word_problems", "calculator"]
    """sums = `27+10=`; word_problems = a question in words, whose response ends in
    `#### 37` as those of GSM8K do; calculator = `12*34+56`, answered over several turns
    with a tool."""
    max_operand: Positive
    """The largest operand of a problem."""
    num_train: Positive
    """Number of problems to train on."""
    num_validation: Positive
    """Number of held-out problems."""
    model: TinyModelConfig
    warm_start: WarmStartConfig
    min_gain: Fraction
    """The run fails unless held-out greedy accuracy rises by at least this much."""

    @property
    def wordings(self) -> int:
        """Number of training problems with the same numbers, in different words."""
        return 4 if self.problems == "word_problems" else 1


# -------------------------------------------------------------------------------- rules


def inputs_are_prepared_or_provided(overridden: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each input that the user names and the run makes itself."""
    data = ("data.train_path", "data.validation_path", "data.columns")
    for key in ("model.path", *data):
        keys = overridden.under(key)
        reason = "prepare makes this input itself"
        fix = f"Leave {key} out, or set prepare=null to bring inputs of your own."
        yield from overridden.ignored(keys, reason, fix)


def prepared_data_exists(
    prepare: PrepareConfig, evaluated: int | None
) -> Iterator[Problem]:
    """Yield a problem if the run needs more problems than exist or than it makes.

    Args:
        prepare: The settings.
        evaluated: Held-out problems of an evaluation; None for all.
    """
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
    model: TinyModelConfig, parallel: int
) -> Iterator[Problem]:
    """Yield a problem for each size of the new model that cannot be built or served.

    Args:
        model: The sizes.
        parallel: Ranks of a rollout engine that serves it.
    """
    must_divide = f"it must divide prepare.model.num_heads={model.num_heads}"

    # Each head of keys serves equally many heads of queries.
    kv_heads = model.num_kv_heads
    if model.num_heads % kv_heads:
        nearest = nearest_divisors(model.num_heads, kv_heads)
        fix = f"The nearest are {either(nearest)}."
        yield Problem("prepare.model.num_kv_heads", kv_heads, must_divide, fix)

    # Each rank of the rollout engine takes whole heads.
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


def warm_start_leaves_something_to_gain(prepare: PrepareConfig) -> Iterator[Problem]:
    """Yield a problem if the warm start's range is empty or the gain not possible."""
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


def gain_is_measured(
    prepare: PrepareConfig, evaluation: EvaluationConfig, run: RunConfig, reward: Reward
) -> Iterator[Problem]:
    """Yield a problem for each setting under which the gain would not be measured."""
    key = "prepare.min_gain"
    gain = prepare.min_gain
    if not gain:
        return

    if run.evaluate_every == 0:
        rule = (
            "a gain is measured by evaluating, and run.evaluate_every=0 turns that off"
        )
        yield Problem(key, gain, rule, "Use 0, or evaluate.")

    # Other rewards than functions give scores that are no accuracies.
    kind = reward.kind
    if kind != "function" and evaluation.functions is None:
        rule = f"the gain is one of accuracy, which reward={kind} does not measure"
        fix = "Use 0, or evaluation.functions={default: exact_match}."
        yield Problem(key, gain, rule, fix)

    if evaluation.temperature:
        rule = "the gain is one of greedy accuracy"
        fix = "Use 0, or prepare.min_gain=0."
        yield Problem("evaluation.temperature", evaluation.temperature, rule, fix)
