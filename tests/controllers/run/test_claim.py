"""One run at a time writes to a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from controllers.run.finished import claim
from tests.controllers.runs import ROOT
from verl_ray.errors import ConfigError

HOLD = """
import sys
from controllers.run.finished import claim
with claim(sys.argv[1]):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.mark.processes
def test_one_run_at_a_time_writes_to_a_folder_and_a_killed_one_lets_go(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "mine\n"
        with pytest.raises(
            ConfigError, match=f"another run is writing to it .process {other.pid} on "
        ):
            claim(str(tmp_path)).__enter__()
        other.kill()
    with claim(str(tmp_path)):
        pass
