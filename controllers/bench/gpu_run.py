"""Programs of two parts of `verl-ray bench gpu`: `devices` and `grpo`.

Invariant: a part prints a JSON object last, and exits with another code than 0 if
something is wrong. The run of `grpo` is that of `verl-ray train`, with colocated roles.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from controllers.bench.inputs import run_with_inputs
from controllers.bench.suite import shown_versions
from verl_ray.config.versions import missing_packages, problem_of
from verl_ray.ops.installed_torch import varlen_attn_groups_heads
from verl_ray.preflight.findings import inputs_folder
from verl_ray.preflight.machine import Machine
from verl_ray.shell import override_of

_STEPS = 3


def devices() -> int:
    """Print what is installed; return 1 if it does not fit together.

    It does not if torch finds no device that the machine has.
    """
    import torch

    versions = shown_versions()
    report = {
        "versions": versions,
        "problem": problem_of(str(versions["torch"]), versions["vllm"]),
        "cuda": torch.version.cuda,
        "devices": [
            torch.cuda.get_device_name(index)
            for index in range(torch.cuda.device_count())
        ],
        "has_triton": not missing_packages(["triton"]),
        "flash_groups_heads": varlen_attn_groups_heads(),
    }
    print(json.dumps(report))

    expected = Machine.here().gpus
    is_wrong = report["problem"] is not None or (expected and not report["devices"])
    return int(bool(is_wrong))


def grpo(task: dict[str, Any]) -> int:
    """Run GRPO for three steps and print its figures; return the exit code of the run.

    Args:
        task: The "device", and the "folder" to write into.
    """
    on_gpu = task["device"] == "cuda"
    model, dtype = ("0.5b", "bfloat16") if on_gpu else ("1m", "float32")
    folder = Path(task["folder"]) / "grpo"
    config = run_with_inputs(model, folder)

    inputs = inputs_folder(config)
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
    name, *tasks = sys.argv[1:]
    raise SystemExit(devices() if name == "devices" else grpo(json.loads(tasks[0])))
