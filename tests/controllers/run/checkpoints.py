"""Checkpoints as a run leaves them, without a model."""

from __future__ import annotations

from pathlib import Path

from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.load import to_tree
from verl_ray.config.tasks.rl import RLConfig


def cursor(drawn: int, rows: int = 10) -> dict[str, int]:
    return {
        "rows": rows,
        "drawn": drawn,
        "epoch": drawn // rows,
        "position": drawn % rows,
    }


def write_checkpoints(
    config: RLConfig, *steps: int, examples_per_step: int = 8
) -> CheckpointStore:
    store = CheckpointStore(Path(config.run.dir) / "checkpoints", keep=5)
    for step in steps:
        state = {
            "trainer": {"cursor": cursor(step * examples_per_step)},
            "trackers": {"wandb_run_id": "abc", "recorded_steps": f"1-{step}"},
            "unrecorded": None,
        }
        with store.writing(step, state, to_tree(config), ["actor"]) as folder:
            (folder / "actor").mkdir()
            (folder / "actor" / "shard").write_bytes(bytes(100))
    return store
