"""The argument RUN of commands: the folder of a run, or its name.

Invariant: a folder that exists comes before the name of a run.
"""

from __future__ import annotations

from pathlib import Path

from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import path_suggestion, typed_path

OUTPUTS = Path("outputs")
RUN_HELP = f"the folder of a run, or its name under {OUTPUTS}/"
RUN_HINT = f"Give the folder of a run ({OUTPUTS}/NAME), or its NAME."


def run_folder(run: str) -> Path:
    """Return the folder of a run.

    Args:
        run: The folder, or the name of the run.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = typed_path("RUN", run)
    in_outputs = OUTPUTS / run
    if not folder.is_dir() and in_outputs.is_dir():
        folder = in_outputs

    if not folder.is_dir():
        fix = path_suggestion(folder, RUN_HINT)
        raise ConfigError([Problem("RUN", run, "there is no such folder", fix)])
    return folder
