"""Arithmetic on boxes of parameters."""

from __future__ import annotations

from verl_ray.models.names import Box


def shape_of_box(box: Box) -> tuple[int, ...]:
    """Return the lengths of a box's sides."""
    return tuple(side.stop - side.start for side in box)


def is_empty_box(box: Box) -> bool:
    """Return whether a side of the box has no length."""
    return any(side.start >= side.stop for side in box)
