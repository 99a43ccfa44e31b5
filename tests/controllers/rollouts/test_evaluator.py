"""Names of the main metrics of an evaluation."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from controllers.rollouts.evaluator import Evaluator
from scripts.configuration import compose
from verl_ray.columns.batch import Ragged
from verl_ray.columns.stages import Prompts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.rewards.shaping import ResponseScores

FORM = "{function: format, tags: [answer]}"
INPUTS = ("model.path=/m", "data.train_path=t", "data.validation_path=v")


@pytest.mark.parametrize(
    ("functions", "kinds"),
    [
        ("{default: gsm8k}", ["acc", "acc"]),
        ("{default: by_data_source}", ["acc", "acc"]),
        ("{default: f1}", ["reward", "reward"]),
        (f"{{a: {FORM}, default: math}}", ["reward", "acc"]),
        ("{a: own.py:f, b: {function: rouge, stem: true}}", ["reward", "reward"]),
    ],
)
def test_only_what_is_right_or_wrong_is_an_accuracy(
    functions: str, kinds: list[str]
) -> None:
    config = compose("grpo", [*INPUTS, f"reward.functions={functions}"])
    assert isinstance(config, RLConfig)
    one = Ragged.of_texts(["1", "1"])
    prompts = Prompts(
        offsets=np.arange(3),
        group_id=np.arange(2),
        has_answer=np.ones(2, np.bool_),
        tokens=np.arange(2, dtype=np.int32),
        messages=one,
        data_source=Ragged.of_texts(["a", "b"]),
        answer=one,
        extra=one,
    )
    scores = ResponseScores(np.float32([0.5, np.nan]), np.array([0, 1], np.int8))
    evaluator = Evaluator(config, PreTrainedTokenizerBase(), prompts)
    core = evaluator._core_scores(scores, {"reward": scores}, [{}, {}])
    assert core.metrics == [
        f"val-core/{source}/{kind}/mean@1"
        for source, kind in zip("ab", kinds, strict=True)
    ]
    # A failed score is wrong in an accuracy, and left out of a mean reward.
    assert np.array_equal(
        core.values, [0.5, 0.0 if kinds[1] == "acc" else np.nan], equal_nan=True
    )
