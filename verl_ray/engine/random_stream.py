"""The random stream of one engine on one rank.

Invariant: an engine draws random numbers only from its own stream, whatever shares its
process; and the stream is part of every checkpoint.

Deliberately not here: who draws numbers, and streams that a backend's package keeps for
itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_ray.checkpoint.sharded import random_key


class RandomStream:
    """The state of torch's generator for one device, kept apart from the process's own.

    Attributes:
        state: uint8 tensor, the state of the generator.
        key: The key of the state in a checkpoint. It differs between ranks and types of
            device, so every rank's stream is in the checkpoint.
    """

    def __init__(self, device: torch.device, rank: int, seed: int) -> None:
        self._device = device
        self._rank = rank
        self._seed = seed
        self.key = random_key(rank, device.type)
        self.state = self._initial_state(0)

    def restore(self, checkpoint: dict[str, Any], steps: int) -> None:
        """Continue the stream of a checkpoint that was taken after `steps` steps.

        A checkpoint that was written on another type of device has None under this
        stream's key. A new stream then begins, which depends on the seed, the rank and
        the step.
        """
        state = checkpoint.get(self.key, self.state)
        if state is None:
            state = self._initial_state(steps)
        self.state = state

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let torch draw from this stream inside the block."""
        with torch.random.fork_rng(devices=self._forked_devices()):
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self.state, self._device)
            else:
                torch.set_rng_state(self.state)

            try:
                yield
            finally:
                self.state = self._generator_state()

    def _initial_state(self, step: int) -> Tensor:
        """Return the state of a newly seeded generator."""
        with torch.random.fork_rng(devices=self._forked_devices()):
            # The primes keep the seeds of different (seed, rank, step) apart.
            seed = self._seed * 1_000_003 + self._rank + step * 1_000_000_007
            torch.manual_seed(seed % 2**63)
            return self._generator_state()

    def _generator_state(self) -> Tensor:
        """Return the present state of torch's generator for this device."""
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()

    def _forked_devices(self) -> Sequence[torch.device]:
        """Return the devices that `fork_rng` saves in addition to the CPU."""
        if self._device.type == "cuda":
            return [self._device]
        return []
