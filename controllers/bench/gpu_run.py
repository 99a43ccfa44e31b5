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

from controllers.bench.step import MODELS, RUN, configuration, make_inputs

_STEPS = 3


def main(task: dict[str, Any]) -> int:
    """Run GRPO for three steps and print its figures; return the exit code of the run.

    Args:
        task: The "device", and the "folder" to write into.
    """
    on_gpu = task["device"] == "cuda"
    model = "0.5b" if on_gpu else "1m"
    overrides = [f"run.total_steps={_STEPS}", "run.resume=never"]
    if on_gpu:
        overrides += ["backend.dtype=bfloat16", "rollout.dtype=bfloat16"]
    config = configuration(model, "engine", Path(task["folder"]) / "grpo", overrides)
    make_inputs(config, warm_start=False)

    run = (f"run.dir={config.run.dir}", "run.name=bench-gpu", "backend=engine")
    command = [sys.executable, "-m", "controllers", "train", "quickstart"]
    ended = subprocess.run([*command, *RUN, *MODELS[model], *run, *overrides])
    if ended.returncode:
        return ended.returncode

    lines = Path(config.run.dir, "metrics.jsonl").read_text().splitlines()
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
