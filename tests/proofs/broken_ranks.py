"""A rank of a proof that does one thing wrong; `main` is the process of a test."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from verl_ray.processes import trial
from verl_ray.proofs import rank_proof


def averaged_gradients() -> None:
    """Average the gradients of layer 1 over ranks, which are to be summed."""
    from verl_ray.engine.fsdp import FsdpEngine

    shard = FsdpEngine.shard

    def averaging(self: Any, model: Any) -> None:
        shard(self, model)
        model.layers[1].set_gradient_divide_factor(2.0)

    FsdpEngine.shard = averaging  # type: ignore[method-assign]


def other_slice() -> None:
    """Let every rank read the first rows of a matrix."""
    from verl_ray.engine.megatron import weights as of_megatron
    from verl_ray.models import weights

    fill_box = weights.fill_box

    def first(local: Any, box: Any, name: str, *rest: Any, **others: Any) -> None:
        if name == "model.layers.1.self_attn.o_proj.weight":
            box = tuple(slice(0, side.stop - side.start) for side in box)
        fill_box(local, box, name, *rest, **others)

    weights.fill_box = first
    of_megatron.fill_box = first


def dead_rank() -> None:
    """Let rank 1 fail once rank 0 waits for it."""
    from verl_ray.engine.fsdp import FsdpEngine

    backward = FsdpEngine.forward_backward

    def failing(self: Any, *arguments: Any) -> Any:
        if self.rank == 1:
            raise RuntimeError("the rank has no more memory")
        return backward(self, *arguments)

    FsdpEngine.forward_backward = failing  # type: ignore[method-assign]


BROKEN: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (averaged_gradients, other_slice, dead_rank)
}


def main(connection: socket.socket) -> None:
    """Be a rank that is broken in the way that the first frame names."""

    def break_it(fields: dict[str, Any], tell: trial.Tell) -> Any:
        BROKEN[fields["broken"]]()
        return rank_proof.be_rank(fields, tell)

    trial.run_trial(connection, break_it)
