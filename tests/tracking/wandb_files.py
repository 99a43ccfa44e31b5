"""What W&B has written to the folder of a run, read back with W&B's own reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def records(session: Path) -> list[dict[str, dict[str, object]]]:
    """Every record of one session, as `wandb leet inspect` prints them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(session)]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=200
    ).stdout
    return [json.loads(line) for line in printed.splitlines()]


def sessions(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("offline-run-*"))


def history(session: Path) -> list[dict[str, object]]:
    items = [
        record["history"]["item"]
        for record in records(session)
        if record["type"] == "history"
    ]
    return [
        {key: value for key, value in item.items() if not key.startswith("_")}
        for item in items
    ]


def steps_of(run_dir: Path) -> list[object]:
    """The steps of all sessions of the last run, in their order."""
    run_id = sessions(run_dir)[-1].name.rpartition("-")[2]
    return [
        line["training/global_step"]
        for session in sessions(run_dir)
        if session.name.endswith(run_id)
        for line in history(session)
    ]
