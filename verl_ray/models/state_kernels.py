"""The packages whose kernels compute layers with states, and keep packed rows apart.

transformers takes them where they are installed, for tensors on any device; they
compute on GPUs alone, and some in bfloat16 alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from verl_ray.errors import EngineError

PACKAGES = ("mamba_ssm", "causal_conv1d", "fla")


def installed_kernels() -> tuple[str, ...]:
    """Return which of the packages are installed. Those that are hidden count, too."""
    return tuple(each for each in PACKAGES if PathFinder.find_spec(each))


def hide_kernels() -> None:
    """Let transformers compute layers with states by its own code in this process.

    It looks for the packages as it imports the code of a family.
    """
    for package in PACKAGES:
        sys.modules[package] = None  # type: ignore[assignment]


def require_kernels(packages: Sequence[str], *, device: str, path: str) -> None:
    """Raise EngineError where packed rows would see each other.

    Args:
        packages: Those with which the model's proof holds; none if it needs none.
        device: Type of the device that computes the model.
        path: The model's directory, for messages.
    """
    missing = sorted(set(packages) - set(installed_kernels()))
    if missing:
        raise EngineError(
            f"kernels of {', '.join(packages)} keep packed rows of {path} apart, and"
            f" {', '.join(missing)} is not installed here: install the same packages on"
            " every node, or remove them from the node of the driver"
        )
    if packages and device != "cuda":
        raise EngineError(
            f"kernels of {', '.join(packages)} keep packed rows of {path} apart, and"
            f" this rank computes on a {device}: give it a GPU, or remove the packages"
            " from the node of the driver"
        )
