"""Which versions of torch and vLLM go together: the one table of them.

Invariant: `pyproject.toml`, the tables of the documents, `verl-ray check` and the rollout engine say what stands here;
a test compares them. Each vLLM names its torch exactly, in the metadata of its wheels, from which these rows are.
Deliberately not here: what differs between versions (`ops/installed_torch.py`, `rollout/vllm_core.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """A version of torch, and the first and the last vLLM that is built for it."""

    torch: str
    first_vllm: str
    last_vllm: str

    def has_vllm(self, version: str) -> bool:
        """Whether this vLLM is one of them, whatever its patch."""
        return minor(self.first_vllm) <= minor(version) <= minor(self.last_vllm)


RELEASES = (
    Release("2.11.0", "0.22.0", "0.26.0"),
    Release("2.13.0", "0.27.0", "0.32.0"),
)
"""The oldest first."""


def minor(version: str) -> tuple[int, int]:
    """Its first two numbers."""
    first, second = re.findall(r"\d+", version)[:2]
    return int(first), int(second)


def problem_of(torch: str, vllm: str | None) -> tuple[str, str] | None:
    """What is wrong with these installed versions (`vllm`: None where there is none), and what would be right."""
    release = next((one for one in RELEASES if minor(one.torch) == minor(torch)), None)
    if release is None:
        known = " or ".join(one.torch for one in RELEASES)
        return f"torch {torch} is not supported", f"Install torch {known}"
    if vllm is not None and not release.has_vllm(vllm):
        return (
            f"vLLM {vllm} does not go with torch {torch}",
            f"Install vLLM {release.first_vllm} to {release.last_vllm}, or the torch that this vLLM is built for",
        )
    return None
