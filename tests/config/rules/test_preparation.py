"""Inputs that a run makes itself."""

from __future__ import annotations

from tests.config.rules.cases import JUDGE, Case

CASES = [
    Case(
        "gain_is_measured",
        JUDGE,
        "prepare.min_gain",
        "the gain is one of accuracy, which reward=judge does not measure",
        "Use 0, or evaluation.functions={default: exact_match}",
    ),
    Case(
        "inputs_are_prepared_or_provided",
        "model.path=/m",
        "model.path",
        "prepare makes this input",
        "prepare=null",
    ),
    Case(
        "prepared_data_exists",
        "prepare.max_operand=9",
        "prepare.max_operand",
        "there are 100 problems",
        "least 96",
    ),
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
        "warm_start_leaves_something_to_gain",
        "prepare.warm_start.accuracy_low=0.5",
        "prepare.warm_start.accuracy_low",
        "accuracy_high=0.45",
        "below accuracy_high",
    ),
    Case(
        "warm_start_leaves_something_to_gain",
        "prepare.min_gain=0.6",
        "prepare.min_gain",
        "cannot rise",
        "at most 0.5",
    ),
    Case(
        "gain_is_measured",
        "run.evaluate_every=0",
        "prepare.min_gain",
        "turns that off",
        "Use 0",
    ),
    Case(
        "gain_is_measured",
        "evaluation.temperature=1.0",
        "evaluation.temperature",
        "greedy",
        "Use 0",
    ),
]
