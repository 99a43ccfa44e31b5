"""Which ways of sharing a model out over ranks are possible, and which possible one is nearest.

Invariant: pure arithmetic over a backend's settings, a number of ranks and the sizes of a model; where the model is not
known, only what holds for every model is asked. For whatever is refused, `nearest_layout` has what is possible.
Deliberately not here: who holds what (`engine/megatron/layout.py`), and where sizes are read
(`megatron_models.py`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_ray.backends.megatron import MegatronBackend


_OF_MODEL = ("tensor_parallel", "pipeline_parallel", "context_parallel")
"""What one copy of the model is shared out by."""

_OF_EXPERTS = ("pipeline_parallel", "expert_tensor_parallel", "expert_parallel")
"""What one copy of the experts is shared out by."""


@dataclass(frozen=True)
class ModelSizes:
    """What a layout must know of a model."""

    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    intermediate: int | None
    """Inner size of the layers without experts; None where all have them."""
    experts: int = 0
    """Per layer that has them; 0 in a model without."""
    expert_intermediate: int = 0
    """Inner size of one."""


@dataclass(frozen=True)
class Obstacle:
    """Why a layout is not possible."""

    key: str
    """The setting of the backend that should change."""
    rule: str


def can_exchange(heads: int, key_heads: int, ranks: int) -> bool:
    """Whether so many ranks, each with a slice of the tokens, can share out the heads within attention: each gets as
    many, and of the key-value heads as many or the same one as others."""
    return heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)


def obstacles(backend: MegatronBackend, num_ranks: int, sizes: ModelSizes | None) -> Iterator[Obstacle]:
    """All that is in the way of a layout."""
    yield from rank_obstacles(backend, num_ranks)
    if sizes is not None:
        yield from model_obstacles(backend, sizes)


def rank_obstacles(backend: MegatronBackend, num_ranks: int) -> Iterator[Obstacle]:
    """What no model changes: how the ranks divide, and settings that mean nothing without another."""
    yield from _indivisible(backend, _OF_MODEL, num_ranks, "the model")
    if num_ranks % backend.pipeline_parallel == 0:  # else that is what is wrong, and is said
        yield from _indivisible(backend, _OF_EXPERTS, num_ranks, "the experts")
    if backend.sequence_parallel and backend.tensor_parallel == 1:
        yield Obstacle("sequence_parallel", "this setting would be ignored: tensor_parallel=1 shares no tokens out")
    if backend.virtual_stages > 1 and backend.pipeline_parallel == 1:
        yield Obstacle("virtual_stages", "this setting would be ignored: pipeline_parallel=1 has one stage")


def model_obstacles(backend: MegatronBackend, sizes: ModelSizes) -> Iterator[Obstacle]:
    """What does not fit a model of these sizes."""
    tensor, pipeline, context = backend.tensor_parallel, backend.pipeline_parallel, backend.context_parallel
    parts = {
        f"{sizes.heads} attention heads": sizes.heads,
        f"{sizes.key_heads} key-value heads": sizes.key_heads,
        f"intermediate_size of {sizes.intermediate}": sizes.intermediate or 0,
    }
    uneven = [name for name, size in parts.items() if size % tensor]
    if uneven:
        yield Obstacle("tensor_parallel", f"it must divide the model's {' and '.join(uneven)}")
    elif sizes.vocabulary <= (tensor - 1) * math.ceil(sizes.vocabulary / tensor):
        rule = f"cut into {tensor} equal parts, the model's {sizes.vocabulary} words leave the last part without any"
        yield Obstacle("tensor_parallel", rule)
    if sizes.experts and context > 1:
        yield Obstacle("context_parallel", "the model has experts, whose balance is that of whole rows: none is cut")
    elif not uneven and not can_exchange(sizes.heads // tensor, sizes.key_heads // tensor, context):
        each = f"{sizes.heads // tensor} attention heads and {sizes.key_heads // tensor} key-value heads"
        of = f" that each of tensor_parallel={tensor} ranks has" if tensor > 1 else " of the model"
        yield Obstacle("context_parallel", f"these ranks share out the {each}{of}")
    if sizes.layers % pipeline:
        yield Obstacle("pipeline_parallel", f"it must divide the model's {sizes.layers} layers")
    elif sizes.layers % (pipeline * backend.virtual_stages):
        rule = f"pipeline_parallel={pipeline} times this must divide the model's {sizes.layers} layers"
        yield Obstacle("virtual_stages", rule)
    yield from _expert_obstacles(backend, sizes)


def _expert_obstacles(backend: MegatronBackend, sizes: ModelSizes) -> Iterator[Obstacle]:
    if not sizes.experts:
        for key in ("expert_parallel", "expert_tensor_parallel"):
            if getattr(backend, key) > 1:
                yield Obstacle(key, "this setting would be ignored: the model has no experts")
        return
    if sizes.experts % backend.expert_parallel:
        yield Obstacle("expert_parallel", f"it must divide the model's {sizes.experts} experts per layer")
    if sizes.expert_intermediate % backend.expert_tensor_parallel:
        rule = f"it must divide the {sizes.expert_intermediate} numbers inside an expert"
        yield Obstacle("expert_tensor_parallel", rule)
    if backend.tensor_parallel > 1 and not backend.sequence_parallel:
        rule = f"with tensor_parallel={backend.tensor_parallel}, megatron-core gives experts slices of the tokens alone"
        yield Obstacle("sequence_parallel", rule)


def nearest_layout(backend: MegatronBackend, num_ranks: int, sizes: ModelSizes | None) -> dict[str, int]:
    """What makes the layout possible on as many ranks: the settings to change, with their new values, so that the
    product of all factors is as small as can be; of equal ones, what is in the way changes. What is whole stays whole.
    None for a layout that is possible."""
    wrong = {obstacle.key for obstacle in obstacles(backend, num_ranks, sizes)}
    options = _options(backend, num_ranks, sizes)
    names = sorted(options, key=lambda name: name in wrong)  # of equal sums, the last are raised first
    queue = [(0.0, (0,) * len(names), 0)]
    while True:
        distance, places, first = heapq.heappop(queue)
        chosen = {name: options[name][place] for name, place in zip(names, places, strict=True) if place}
        change = {name: size for name, (_, size) in chosen.items()}
        if not any(obstacles(backend.model_copy(update=change), num_ranks, sizes)):
            return change  # at the latest where every size is 1
        for i in range(first, len(names)):  # in the order of the names, so that none is met twice
            if places[i] + 1 < len(options[names[i]]):
                farther = options[names[i]][places[i] + 1][0] - options[names[i]][places[i]][0]
                heapq.heappush(queue, (distance + farther, (*places[:i], places[i] + 1, *places[i + 1 :]), i))


def other_ranks(backend: MegatronBackend, num_ranks: int) -> list[int]:
    """The nearest numbers of ranks that this layout divides."""
    unit = math.lcm(*(math.prod(getattr(backend, name) for name in names) for names in (_OF_MODEL, _OF_EXPERTS)))
    return sorted({count for count in (num_ranks // unit * unit, -(-num_ranks // unit) * unit) if count})


def described(backend: MegatronBackend, num_ranks: int) -> str:
    """The layout in short: its sizes above 1, and the ranks with rows of their own."""
    sizes = {
        "tp": backend.tensor_parallel, "pp": backend.pipeline_parallel, "vp": backend.virtual_stages,
        "cp": backend.context_parallel, "ep": backend.expert_parallel, "etp": backend.expert_tensor_parallel,
    }  # fmt: skip
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    if backend.sequence_parallel:
        parts.insert(1, "sp")
    return " ".join([*parts, f"dp{num_ranks // backend.peers}"])


def _indivisible(backend: MegatronBackend, names: Sequence[str], num_ranks: int, whole: str) -> Iterator[Obstacle]:
    """Named is the first setting with which the product divides no more."""
    sizes = {name: getattr(backend, name) for name in names}
    together = 1
    for name, size in sizes.items():
        together *= size
        if num_ranks % together:
            factors, ranks = " x ".join(key for key in sizes if sizes[key] > 1), math.prod(sizes.values())
            rule = f"one copy of {whole} takes {factors} = {ranks} ranks, which must divide num_ranks={num_ranks}"
            yield Obstacle(name, rule)
            return


def _options(backend: MegatronBackend, num_ranks: int, sizes: ModelSizes | None) -> dict[str, list[tuple[float, int]]]:
    """Values of each setting, nearest first, and how far they are from its own: a factor of 2 is 1, and turning
    something on or off is little. A size of 1 stays, since to lower the others is always enough."""
    totals = dict.fromkeys((*_OF_MODEL, *_OF_EXPERTS), num_ranks)
    totals["virtual_stages"] = 1 if sizes is None else sizes.layers
    asked = {name: size for name in totals if (size := getattr(backend, name)) > 1}
    options = {
        name: sorted((abs(math.log2(one / size)), one) for one in {size, *_divisors(totals[name])})
        for name, size in asked.items()
    }
    sliced = backend.sequence_parallel
    return options | {"sequence_parallel": [(0.0, sliced), (0.1, not sliced)]}


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
