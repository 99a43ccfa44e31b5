"""Engines of two ranks take turns with trainers, as they do on devices that they share."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.controllers.run.test_recovery import (
    finish,
    lines,
    process_behind,
    start,
    wait_for_step,
)
from tests.controllers.runs import Inputs, command_here
from verl_ray.cluster.session import Session

SETTINGS = (
    "placement=colocated", "rollout.sleep=weights", "run.total_steps=4", "actor.mini_batch_size=16",
    "run.checkpoint_every=4",
)  # fmt: skip
TRAINERS = {
    "two ranks of FSDP": ("backend=fsdp", "actor.num_ranks=2"),
    "four ranks of FSDP": ("backend=fsdp", "actor.num_ranks=4"),
    "Megatron": ("backend=megatron", "backend.tensor_parallel=2", "actor.num_ranks=2"),
}
COMPARED = ("actor/pg_loss", "actor/grad_norm", "critic/rewards/mean")


def rank_of_an_engine(run_dir: Path) -> psutil.Process:
    """Return the process of the engine's second rank."""
    engine = process_behind(run_dir / "logs" / "rollout-0.log")
    ranks = [each for each in engine.children(recursive=True) if "TP1" in each.name()]
    (second,) = ranks
    return second


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trainers", TRAINERS)
def test_a_wide_engine_samples_what_a_narrow_one_does_and_outlives_a_rank(
    cluster: Session, inputs: Inputs, tmp_path: Path, trainers: str
) -> None:
    found = {}
    for width in (1, 2):
        run_dir = tmp_path / str(width)
        arguments = (
            "train", "--config-name", "grpo", *inputs.rl(run_dir), *SETTINGS, *TRAINERS[trainers],
            f"rollout.tensor_parallel={width}",
        )  # fmt: skip
        if width == 1:
            command_here(cluster, *arguments)
        else:
            run = start(cluster, *arguments)
            wait_for_step(run, run_dir, 1)
            rank_of_an_engine(run_dir).send_signal(signal.SIGKILL)
            code, output = finish(run)
            assert code == 0, output
            assert "EngineFailed: rollout engine: a rank of it has exited" in output
            assert "rollout/restarts came to 1" in output
        found[width] = lines(run_dir)

    # A run goes on with engines of another width.
    again = tmp_path / "1"
    arguments = (
        "train", "--config-name", "grpo", *inputs.rl(again), *SETTINGS, *TRAINERS[trainers],
        "rollout.tensor_parallel=2", "run.total_steps=5",
    )  # fmt: skip
    command_here(cluster, *arguments)
    last = lines(again)[-1]
    assert last["training/global_step"] == 5
    assert last["training/rollout_probs_diff_mean"] < 1e-5

    for narrow, wide in zip(found[1], found[2], strict=True):
        assert wide["training/rollout_probs_diff_mean"] < 1e-5
        assert wide["weight_sync/probe_difference"] < 1e-4
        for name in COMPARED:
            assert wide[name] == pytest.approx(narrow[name], rel=1e-3, abs=1e-5), name
