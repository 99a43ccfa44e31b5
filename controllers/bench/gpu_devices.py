"""The part `devices` of `verl-ray bench gpu`: versions, and what torch finds.

Invariant: it fails if torch finds no device that the machine has. Deliberately not
here: any computation.
"""

from __future__ import annotations

import json

from controllers.bench.step import shown_versions
from verl_ray.config.versions import problem_of
from verl_ray.engine.packages import missing_packages
from verl_ray.ops.installed_torch import varlen_attn_groups_heads
from verl_ray.preflight.machine import Machine


def main() -> int:
    """Print what is installed; return 1 if it does not fit together."""
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


if __name__ == "__main__":
    raise SystemExit(main())
