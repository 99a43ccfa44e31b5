"""Choices of other systems, or for other keys, that are made of a group of this one.

Invariant: an answer names a key or a choice that exists. Deliberately not here: keys of
other systems (`foreign.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

_LEARNING_RATE = (
    "The group schedule orders rollouts and training; the learning rate's schedule is"
    " actor.optimizer.schedule={choice} (critic.optimizer.schedule)."
)

# The optimizer has these two, each after actor.optimizer.warmup_steps.
_OF_LEARNING_RATE = {
    "constant": ("constant", "constant_with_warmup"),
    "cosine": (
        "cosine",
        "cosine_with_min_lr",
        "cosine_with_restarts",
        "inverse_sqrt",
        "linear",
        "polynomial",
        "warmup_stable_decay",
        "wsd",
    ),
}

FOREIGN_CHOICES: Mapping[tuple[str, str], str] = {
    **{
        ("schedule", name): _LEARNING_RATE.format(choice=choice)
        for choice, names in _OF_LEARNING_RATE.items()
        for name in names
    },
    ("schedule", "async"): "Write schedule=asynchronous.",
    ("schedule", "sync"): "Write schedule=synchronous.",
    ("schedule", "partial_rollout"): "Write schedule=carry_over.",
}
"""Sentences by group and choice."""


def foreign_choice(group: str, choice: str) -> str | None:
    """Return a sentence that leads to what was meant; None if it is not known."""
    return FOREIGN_CHOICES.get((group, choice))
