"""Bytes that a rank of the `megatron_fsdp` backend holds, by what ranks share out: what a measurement stands beside.

Invariant: of a model whose every parameter learns, without activations, and without the padding of buckets, which is a
few rows each. `verl-ray bench megatron_fsdp_memory` measures the same. Deliberately not here: any torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_ray.config.backends import MegatronFsdpBackend

FLOAT32 = 4


@dataclass(frozen=True)
class Elements:
    """Parameters of a model."""

    layers: int
    layer: int  # of the largest one
    beside: int  # embeddings, the last norm, the head

    @property
    def whole(self) -> int:
        return self.layers + self.beside


@dataclass(frozen=True)
class Held:
    """Of one rank, in bytes."""

    weights: int  # that compute
    main_weights: int  # that the optimizer steps, where they are not the same
    gradients: int
    moments: int
    in_flight: int  # at most, while a step computes: gathered layers, and gradients on their way

    @property
    def between_steps(self) -> int:
        return self.weights + self.main_weights + self.gradients + self.moments


def held(model: Elements, backend: MegatronFsdpBackend, ranks: int) -> Held:
    """By one of `ranks` ranks."""
    inner = backend.shard_size or ranks
    stepped = ranks if backend.outer_sharding == "optimizer" else inner  # ranks that share out the optimizer's state
    shared, alone = backend.sharding, backend.sharding == "none"
    width = 2 if backend.dtype == "bfloat16" else FLOAT32
    weights, in_flight = width * model.whole, 0
    if shared == "all" and inner > 1:
        # beside the shard: what is no layer stays gathered once it was
        weights = width * model.whole // inner + width * model.beside
        ahead = math.ceil((backend.bucket_size or 10**9) / 2 / model.layer)
        in_flight += width * min(model.layers, (1 + ahead) * model.layer)
    if shared in ("optimizer_gradients", "all") and inner > 1:
        bucket = backend.bucket_size or 10**9  # as many wait to be summed, while the next ones are filled
        in_flight += FLOAT32 * min(model.whole, bucket + (model.layer if shared == "all" else bucket))
    gradients = FLOAT32 * model.whole // (inner if shared in ("optimizer_gradients", "all") else 1)
    optimizer = model.whole // (1 if alone else stepped)
    return Held(weights, FLOAT32 * optimizer if width == 2 else 0, gradients, 2 * FLOAT32 * optimizer, in_flight)
