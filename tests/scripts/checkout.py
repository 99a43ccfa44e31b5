"""A checkout whose environment notes what it is asked to do: the scripts are real, pip
and the checks are not run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Notes the command; takes its time over an installation; exits as the test says; runs
# anything but the commands of the scripts for real.
NOTING = f"""#!/bin/sh
name=$(basename "$0")
case "$name $*" in
  "python -m pip"* | "python "*"-c import ray"* | "python -m controllers"* | "python -m pytest"* \
    | "python -m tests."* | "python -m scripts."* | [rml]*)
    echo "$name $*" >> "$NOTES"
    pwd >> "$NOTES.folders"
    case "$*" in *pip*) sleep 0.1 ;; esac
    case "$name $*" in *"$FAILS"*) exit 3 ;; esac
    exit 0 ;;
esac
exec {sys.executable} "$@"
"""


class Checkout:
    """A copy of the scripts with an environment that only takes notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self._notes = folder / "notes"
        self._elsewhere = folder / "elsewhere"
        self._elsewhere.mkdir()
        shutil.copytree(ROOT / "scripts", self.folder / "scripts")
        shutil.copytree(ROOT / ".ci", self.folder / ".ci")
        for name in ("pyproject.toml", "requirements-cpu.lock"):
            shutil.copy(ROOT / name, self.folder / name)
        bin_folder = self.folder / ".venv" / "bin"
        bin_folder.mkdir(parents=True)
        for name in ("python", "ruff", "mypy", "lint-imports"):
            (bin_folder / name).write_text(NOTING)
            (bin_folder / name).chmod(0o755)

    def start(
        self, script: str, *arguments: str, fails: str = "nothing", **variables: str
    ) -> subprocess.Popen[str]:
        """Start a script from another folder."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("VERL_RAY_")
        }
        return subprocess.Popen(
            [self.folder / script, *arguments],
            cwd=self._elsewhere,
            env={
                **inherited,
                "NOTES": str(self._notes),
                "FAILS": fails,
                "VERL_RAY_PYTHON": sys.executable,
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self, script: str, *arguments: str, fails: str = "nothing", **variables: str
    ) -> tuple[int, str]:
        """The exit code and the output of a script."""
        process = self.start(script, *arguments, fails=fails, **variables)
        output = process.communicate(timeout=200)[0]
        return process.returncode, output

    def notes(self) -> list[str]:
        """The commands since the last call of this."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        self._notes.unlink(missing_ok=True)
        return lines

    def folders(self) -> set[str]:
        """Where the noted commands ran."""
        return set(Path(f"{self._notes}.folders").read_text().splitlines())
