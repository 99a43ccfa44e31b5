"""What processes leave behind that were killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_DIES = """
import os, tempfile
from verl_ray.ownership import prefix
from verl_ray.private_files import shared_folder
folder = tempfile.mkdtemp(prefix=prefix("adapter"), dir=shared_folder())
open(f"{folder}/adapter_model.safetensors", "w").close()
file = f"{shared_folder()}/{prefix('weights')}dies-0"
open(file, "w").close()
print(folder, file, flush=True)
os.kill(os.getpid(), 9)
"""


def left_in_shared_memory() -> list[Path]:
    """A folder and a file in /dev/shm whose owner was killed."""
    died = subprocess.run([sys.executable, "-c", _DIES], capture_output=True, text=True)
    assert died.returncode == -9, died.stderr
    left = [Path(path) for path in died.stdout.split()]
    assert len(left) == 2 and all(path.exists() for path in left)
    return left
