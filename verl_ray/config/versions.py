"""Packages that a run needs: which versions of torch and vLLM go together, and others.

Invariant: `pyproject.toml`, the tables of the documents, `verl-ray check` and the
rollout engine agree with this table; a test compares them. Each vLLM names its torch
exactly in the metadata of its wheels, and the rows are taken from there. Looking for a
package imports neither the package nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Release:
    """A version of torch, and the first and the last vLLM that is built for it."""

    torch: str
    first_vllm: str
    last_vllm: str

    def has_vllm(self, version: str) -> bool:
        """Return whether a vLLM is built for this torch, whatever its patch number."""
        return minor(self.first_vllm) <= minor(version) <= minor(self.last_vllm)


RELEASES = (
    Release("2.11.0", "0.22.0", "0.26.0"),
    Release("2.13.0", "0.27.0", "0.32.0"),
)
"""The supported releases, the oldest first."""


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    # A local build such as 2.11.0+cu128 has further numbers.
    first, second = re.findall(r"\d+", version)[:2]
    return int(first), int(second)


def problem_of(torch: str, vllm: str | None) -> tuple[str, str] | None:
    """Return what is wrong with the installed versions, and what would be right.

    None if they are supported.

    Args:
        torch: the installed version.
        vllm: the installed version; None if vLLM is not installed, which supervised
            training does not need.
    """
    release = _release_of(torch)
    if release is None:
        supported = " or ".join(release.torch for release in RELEASES)
        return f"torch {torch} is not supported", f"Install torch {supported}"

    if vllm is None or release.has_vllm(vllm):
        return None

    fix = (
        f"Install vLLM {release.first_vllm} to {release.last_vllm}, or the torch that"
        " this vLLM is built for"
    )
    return f"vLLM {vllm} does not go with torch {torch}", fix


def _release_of(torch: str) -> Release | None:
    """Return the release of a torch version, whatever its patch number."""
    for release in RELEASES:
        if minor(release.torch) == minor(torch):
            return release
    return None


# -------------------------------------------------------------------- optional packages


def install_command(extra: str) -> str:
    """Return the command that installs this project with one of its extras."""
    return f"pip install 'verl_ray[{extra}]'"


def missing_packages(needed: Iterable[str]) -> list[str]:
    """Return the packages that are not installed for this Python."""
    return [name for name in needed if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # `find_spec` imports the parents of a dotted name; one of them is missing.
        return False
