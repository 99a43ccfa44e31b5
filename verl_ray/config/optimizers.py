"""The optimizers of a role that learns, and the course of their learning rate.

Invariant: each optimizer is a class here and a file of `configs/optimizer`. The names
of the optimizers that a backend has are in its declaration (`verl_ray/backends`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from verl_ray.backends.base import FLOAT32, MOMENTS
from verl_ray.errors import Problem
from verl_ray.settings.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    OverriddenKeys,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
)

ENDING_SCHEDULES = ("cosine", "linear", "wsd")
"""Schedules whose last learning rate is `min_lr_fraction * lr`."""


class Pace(Section):
    """The pace of a role's schedule, whose steps have another number of updates by now.

    The schedule goes on to count in updates of the number that the run began with, so
    each training step moves it as far as before. An update that was left out, since no
    row of it was to be learned from, counts as one of the present number.
    """

    began_with: Positive
    """Updates of a step when the run began."""
    now: Positive
    """Updates of a step since the last change."""
    steps: NonNegative
    """Steps that the role had learned in at the last change."""
    updates: NonNegative
    """Updates of these steps."""

    def changed(self, now: int, steps: int) -> Pace:
        """Return the pace after `steps` steps, where each has `now` updates from then.

        Args:
            now: Updates of a step.
            steps: Steps that the role has learned in.
        """
        if now == self.now:
            return self
        updates = self.updates + (steps - self.steps) * self.now
        return Pace(began_with=self.began_with, now=now, steps=steps, updates=updates)

    def position(self, updates: int) -> float:
        """Return where the schedule is after `updates` updates in all.

        It is in updates of the number that the run began with.
        """
        steps = self.steps + (updates - self.updates) / self.now
        return max(steps * self.began_with, 0.0)


class OptimizerConfig(Section):
    """The base of all optimizers; weight decay spares norms and biases."""

    kind: str
    lr: NonNegativeFloat
    """Learning rate after the warm-up; that of adafactor is relative to the root mean
    square of each parameter, and at most one over the root of the number of steps."""
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat | None
    """Clip the global gradient norm to this; null = no clipping."""
    schedule: Literal["constant", "cosine", "linear", "wsd", "inverse_sqrt"]
    """Course of the learning rate after the warm-up: constant, along half a cosine, or
    along a line, to the last step; constant and then along a line (wsd:
    warmup-stable-decay); or with one over the root of the step."""
    warmup_steps: NonNegative
    """Optimizer steps over which the learning rate rises linearly from 0."""
    decay_fraction: PositiveFraction
    """Fraction of all optimizer steps, at their end, in which wsd decays."""
    min_lr_fraction: Fraction
    """End of a cosine, linear or wsd schedule, as a fraction of lr."""

    def decays(self, progress: float) -> bool:
        """Return whether the rate depends on the end of the run, after its warm-up.

        Args:
            progress: The part of the run that is done.
        """
        if self.schedule == "wsd":
            return progress > 1 - self.decay_fraction
        return self.schedule in ENDING_SCHEDULES

    @abstractmethod
    def state_bytes(self, in_blocks: int, elsewhere: int, factors: int) -> int:
        """Return the bytes of the state of all parameters that learn.

        Args:
            in_blocks: Number of them in transformer blocks.
            elsewhere: Number of the others.
            factors: Number of rows and columns of all matrices of the model.
        """


class AdamWConfig(OptimizerConfig):
    """AdamW (arXiv:1711.05101)."""

    kind: Literal["adamw"]
    betas: Annotated[tuple[Fraction, Fraction], Field(examples=["[0.9,0.999]"])]
    """Decay rates of the first and the second moment."""
    eps: PositiveFloat
    """Added to the root of the second moment."""

    def state_bytes(self, in_blocks: int, elsewhere: int, factors: int) -> int:
        return MOMENTS * (in_blocks + elsewhere)


class MuonConfig(OptimizerConfig):
    """Muon (arXiv:2502.16982) for matrices of transformer blocks; AdamW for the rest.

    Its updates are as large as those of AdamW, so both have one learning rate.
    """

    kind: Literal["muon"]
    momentum: Fraction
    """Decay rate of the mean gradient of a matrix."""
    betas: Annotated[tuple[Fraction, Fraction], Field(examples=["[0.9,0.999]"])]
    """Decay rates of the moments of AdamW."""
    eps: PositiveFloat
    """Added to the root of the second moment of AdamW."""

    def state_bytes(self, in_blocks: int, elsewhere: int, factors: int) -> int:
        # A step works on one matrix after the other, whole and in bfloat16, with three
        # copies. The backward pass has freed more than that, which the plan counts.
        return FLOAT32 * in_blocks + MOMENTS * elsewhere


class AdafactorConfig(OptimizerConfig):
    """Adafactor (arXiv:1804.04235): a second moment of rows and columns alone."""

    kind: Literal["adafactor"]

    def state_bytes(self, in_blocks: int, elsewhere: int, factors: int) -> int:
        return FLOAT32 * factors


class SgdConfig(OptimizerConfig):
    """Gradient descent; weight decay is added to the gradient."""

    kind: Literal["sgd"]
    momentum: Fraction
    """Decay rate of the sum of gradients; 0 = no momentum, and no state."""

    def state_bytes(self, in_blocks: int, elsewhere: int, factors: int) -> int:
        return FLOAT32 * (in_blocks + elsewhere) if self.momentum else 0


if TYPE_CHECKING:
    Optimizer = OptimizerConfig
else:
    Optimizer = Annotated[
        AdamWConfig | MuonConfig | AdafactorConfig | SgdConfig,
        Field(discriminator="kind"),
    ]

OPTIMIZERS: Mapping[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "muon": MuonConfig,
    "adafactor": AdafactorConfig,
    "sgd": SgdConfig,
}
"""The settings class of every choice of the group `optimizer`, by its name."""


# -------------------------------------------------------------------------------- rules


def schedule_settings_are_used(
    optimizers: Mapping[str, OptimizerConfig], overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that a schedule does not read, or lacks."""
    for section, optimizer in optimizers.items():
        chosen = f"{section}.schedule={optimizer.schedule}"
        if optimizer.schedule not in ENDING_SCHEDULES:
            keys = overridden.under(f"{section}.min_lr_fraction")
            yield from overridden.ignored(keys, f"{chosen} has no end to decay to")
        if optimizer.schedule != "wsd":
            keys = overridden.under(f"{section}.decay_fraction")
            fix = f"Leave it out, or set {section}.schedule=wsd."
            yield from overridden.ignored(keys, f"{chosen} is not wsd", fix)
        if optimizer.schedule == "inverse_sqrt" and not optimizer.warmup_steps:
            yield Problem(
                f"{section}.warmup_steps",
                0,
                f"with {chosen} the rate after W steps of warm-up is lr times the root"
                " of W / step",
                f"Set {section}.warmup_steps, or choose another {section}.schedule.",
            )
