"""Learning rates, computed by hand."""

import pytest

from verl_ray.config.optimizers import AdamWConfig
from verl_ray.engine.optimizer import learning_rate


def config(**settings: object) -> AdamWConfig:
    values = {
        "kind": "adamw",
        "lr": 1.0,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": None,
        "schedule": "cosine",
        "warmup_steps": 0,
        "decay_fraction": 0.5,
        "min_lr_fraction": 0.0,
    }
    return AdamWConfig(**values | settings)


@pytest.mark.parametrize(
    ("settings", "total", "rates"),
    [
        ({"schedule": "constant"}, 9, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0}),
        ({"warmup_steps": 0}, 4, {0: 1.0, 1: 0.8535534, 2: 0.5, 4: 0.0, 9: 0.0}),
        (
            {"warmup_steps": 2, "min_lr_fraction": 0.2},
            6,
            {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.6, 6: 0.2},
        ),
        # Lines: 4 steps of warm-up, then 8 to the end, or half of the 12 steps.
        (
            {"schedule": "linear", "min_lr_fraction": 0.2},
            12,
            {3: 1.0, 4: 1.0, 6: 0.8, 8: 0.6, 12: 0.2, 15: 0.2},
        ),
        (
            {"schedule": "wsd", "min_lr_fraction": 0.4},
            12,
            {1: 0.5, 6: 1.0, 8: 0.8, 12: 0.4, 20: 0.4},
        ),
        # The whole of a run is shorter than its warm-up, or its decay begins in it.
        ({"warmup_steps": 10}, 4, {3: 0.4, 10: 1.0}),
        ({"schedule": "wsd"}, 6, {3: 1.0, 4: 1.0, 5: 0.5, 6: 0.0}),
        ({"schedule": "inverse_sqrt"}, 12, {3: 1.0, 4: 1.0, 9: 2 / 3, 16: 0.5}),
    ],
)
def test_a_rate_of_every_schedule(
    settings: dict[str, object], total: int, rates: dict[int, float]
) -> None:
    schedule = config(**{"warmup_steps": 4} | settings)
    computed = {step: learning_rate(schedule, step, total) for step in rates}
    assert computed == pytest.approx(rates)
