"""Learning rates, computed by hand."""

import pytest

from verl_ray.config.roles import OptimizerConfig
from verl_ray.engine.optimizer import learning_rate


def config(**settings: object) -> OptimizerConfig:
    values = {
        "lr": 1.0,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": None,
        "schedule": "cosine",
        "warmup_steps": 0,
        "min_lr_fraction": 0.0,
    }
    return OptimizerConfig(**values | settings)


def test_warm_up_then_constant() -> None:
    rates = [
        learning_rate(config(schedule="constant", warmup_steps=4), step, 100)
        for step in range(6)
    ]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_passes_one_half_in_the_middle_and_stays_at_its_end() -> None:
    rates = [learning_rate(config(), step, 4) for step in (0, 1, 2, 4, 9)]
    assert rates == pytest.approx([1.0, 0.8535534, 0.5, 0.0, 0.0])


def test_cosine_ends_at_its_floor_and_begins_after_the_warm_up() -> None:
    rates = [
        learning_rate(config(min_lr_fraction=0.2, warmup_steps=2), step, 6)
        for step in (0, 1, 2, 4, 6)
    ]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2])


def test_a_run_shorter_than_its_warm_up() -> None:
    assert learning_rate(config(warmup_steps=10), 3, 4) == pytest.approx(0.4)
    assert learning_rate(config(warmup_steps=10), 10, 4) == pytest.approx(1.0)
