"""The command `train`, which makes a finished run of a checked configuration."""

from __future__ import annotations

from controllers.run.open_run import open_run
from verl_ray.config.schema import Config


def train(config: Config, command: str = "") -> int:
    """Run the job and return its exit code.

    The code is 0, or 1 if the run promised a gain (prepare.min_gain) and did not reach
    it.

    Args:
        config: The checked configuration.
        command: The command that was typed, for the record of the run.
    """
    with open_run(config, command) as run:
        if run is not None:
            run.loop.run()
    return 0 if run is None else run.exit_code
