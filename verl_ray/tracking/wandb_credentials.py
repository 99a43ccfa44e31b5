"""The credentials of an online W&B run, and what is said where there are none."""

from __future__ import annotations

import contextlib
import io

from verl_ray.config.run import WandbConfig
from verl_ray.errors import Problem


def credentials_problem(config: WandbConfig) -> Problem | None:
    """Return a problem if W&B is online and there are no credentials here.

    W&B's server is not asked.
    """
    if config.mode != "online":
        return None

    # W&B takes half a second to import.
    import wandb

    # It prints where it looks for credentials.
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            if wandb.login(prompt=False, verify=False):
                return None
        except Exception as error:
            fix = "Correct WANDB_API_KEY, run `wandb login`, or choose offline."
            return Problem("tracking.wandb.mode", config.mode, f"W&B: {error}", fix)
    return no_credentials()


def no_credentials() -> Problem:
    """Return the problem of a W&B run without credentials."""
    return Problem(
        "tracking.wandb.mode",
        "online",
        "there are no W&B credentials here, or WANDB_MODE keeps W&B from using them",
        "Set WANDB_API_KEY, run `wandb login`, or choose offline.",
    )
