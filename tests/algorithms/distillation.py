"""The section `distill` by hand."""

from __future__ import annotations

from verl_ray.config.distill import DistillConfig


def distill_config(
    divergence: str, weight: float, top_k: int, beta: float | None
) -> DistillConfig:
    """Return the section of a run whose teacher is the reference role."""
    return DistillConfig(
        teacher=None,
        average_decay=None,
        teacher_prompt=None,
        max_prompt_tokens=1,
        divergence=divergence,
        weight=weight,
        top_k=top_k,
        beta=beta,
    )
