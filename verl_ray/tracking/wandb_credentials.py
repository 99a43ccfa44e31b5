"""The credentials of Weights & Biases.

Invariant: what is missing is told before anything starts, with the way to give it.
"""

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

    # It prints where it looks for credentials.
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            if log_in(verify=False):
                return None
        except Exception as error:
            fix = "Correct WANDB_API_KEY, run `wandb login`, or choose offline."
            return Problem("tracking.wandb.mode", config.mode, f"W&B: {error}", fix)
    return no_credentials()


def log_in(*, verify: bool) -> bool:
    """Return whether W&B has credentials here.

    Args:
        verify: Whether to ask the server about them.
    """
    # W&B takes half a second to import.
    import wandb

    # W&B says no where a run is open, which may be a lost one or the caller's own.
    if wandb.run is not None:
        return True
    return bool(wandb.login(prompt=False, verify=verify))


def no_credentials() -> Problem:
    """Return the problem of a W&B run without credentials."""
    return Problem(
        "tracking.wandb.mode",
        "online",
        "there are no W&B credentials here, or WANDB_MODE keeps W&B from using them",
        "Set WANDB_API_KEY, run `wandb login`, or choose offline.",
    )
