"""Whole steps with roles on megatron and on other backends.

Each step has the metrics of the plain engine, and vLLM gets the weights with which
transformers computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.controllers.publishing.test_publisher import drawn, largest_difference
from tests.controllers.runs import Inputs, Samplers, lasting, training

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]

SETTINGS = ["actor.mini_batch_size=16", "actor.epochs=2"]
LAYOUTS = {
    "actor on tp2, critic on fsdp": [
        "backend@actor.backend=megatron", "actor.num_ranks=2", "actor.backend.tensor_parallel=2",
        "actor.backend.sequence_parallel=true", "actor.backend.recompute=full",
        "backend@critic.backend=fsdp", "critic.num_ranks=2",
    ],
    "actor and critic on megatron_fsdp, layers and optimizer shared out": [
        "backend=megatron_fsdp", "actor.num_ranks=2", "critic.num_ranks=2", "critic.backend.sharding=optimizer",
        "reference.num_ranks=2", "backend.bucket_size=1000",
    ],
    "actor and critic on pp2": [
        "backend=megatron", "actor.num_ranks=2", "actor.backend.pipeline_parallel=2", "critic.num_ranks=2",
        "critic.backend.pipeline_parallel=2", "reference.num_ranks=2",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(
    inputs: Inputs, samplers: Samplers, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, float]]:
    """Metrics of two steps on the plain engine."""
    config = inputs.config("ppo", tmp_path_factory.mktemp("plain"), *SETTINGS)
    with training(config, samplers) as run:
        run.publish(0)
        return [run.step(number) for number in (1, 2)]


@pytest.mark.parametrize(
    "layout",
    [
        name if number == 0 else pytest.param(name, marks=pytest.mark.slow)
        for number, name in enumerate(LAYOUTS)
    ],
)
def test_two_steps_are_those_of_the_plain_engine(
    inputs: Inputs,
    samplers: Samplers,
    tmp_path: Path,
    expected: list[dict[str, float]],
    layout: str,
) -> None:
    config = inputs.config("ppo", tmp_path, *SETTINGS, *LAYOUTS[layout])
    with training(config, samplers) as run:
        run.publish(0)
        found = [run.step(number) for number in (1, 2)]
        assert largest_difference(run, drawn(run), tmp_path / "exported") < 1e-4
    assert (
        expected[1]["actor/grad_norm"] > 1e-3 and expected[1]["critic/grad_norm"] > 1e-3
    )
    for step, plain in zip(found, expected, strict=True):
        assert lasting(step) == pytest.approx(
            lasting(plain), rel=1e-3, abs=1e-5, nan_ok=True
        )
