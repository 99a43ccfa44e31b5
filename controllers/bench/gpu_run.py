"""The part `grpo` of `verl-ray bench gpu`: a whole run, and what it has recorded.

Invariant: the run is that of `verl-ray train`, with colocated roles. Deliberately not
here: speed compared with a floor (`step.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from controllers.bench.inputs import run_with_inputs
from verl_ray.shell import override_of

_STEPS = 3


def main(task: dict[str, Any]) -> int:
    """Run GRPO for three steps and print its figures; return the exit code of the run.

    Args:
        task: The "device", and the "folder" to write into.
    """
    on_gpu = task["device"] == "cuda"
    model, dtype = ("0.5b", "bfloat16") if on_gpu else ("1m", "float32")
    folder = Path(task["folder"]) / "grpo"
    config = run_with_inputs(model, folder)

    inputs = Path(config.run.dir) / "inputs"
    run_dir = folder / "run"
    overrides = (
        override_of("model.path", f"{inputs}/model"),
        override_of("data.train_path", f"{inputs}/train.jsonl"),
        "data.validation_path=null",
        "data.max_prompt_tokens=16",
        "data.prompts_per_step=16",
        "rollout.group_size=8",
        "rollout.max_response_tokens=32",
        f"rollout.kv_cache_gib={config.rollout.kv_cache_gib}",
        f"backend.dtype={dtype}",
        f"rollout.dtype={dtype}",
        override_of("run.dir", str(run_dir)),
        f"run.total_steps={_STEPS}",
        "run.evaluate_every=0",
        "run.checkpoint_every=0",
        "tracking.wandb.mode=disabled",
    )
    command = [sys.executable, "-m", "controllers", "train", "--config-name", "grpo"]
    ended = subprocess.run([*command, *overrides])
    if ended.returncode:
        return ended.returncode

    lines = Path(run_dir, "metrics.jsonl").read_text().splitlines()
    print(json.dumps(_figures([json.loads(line) for line in lines])))
    return 0


def _figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the steps' seconds, and memory and mismatch of the last step."""
    steps = [record for record in records if "timing_s/step" in record]
    last = steps[-1]
    shown = ("memory/", "rollout_corr/", "weight_sync/")
    return {
        "steps": len(steps),
        "step_s": [round(record["timing_s/step"], 3) for record in steps],
        "last": {key: value for key, value in last.items() if key.startswith(shown)},
    }


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
