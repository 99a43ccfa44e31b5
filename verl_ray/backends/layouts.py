"""Ways to partition a model over ranks: which are feasible, and the nearest of them.

Invariant: pure arithmetic over a layout's settings, a number of ranks and the sizes of
a model. If the model is unknown, only the conditions that hold for every model are
checked. For every layout that is refused, `nearest_layout` has a feasible one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from verl_ray.backends.base import BackendSettings
from verl_ray.settings.section import Positive

_MODEL_FACTORS = ("tensor_parallel", "pipeline_parallel", "context_parallel")
"""The settings whose product is the number of ranks of one copy of the model."""

_EXPERT_FACTORS = ("pipeline_parallel", "expert_tensor_parallel", "expert_parallel")
"""The settings whose product is the number of ranks of one copy of the experts."""


class Layout(BackendSettings):
    """The base of backends that partition layers, matrices, tokens and experts."""

    tensor_parallel: Positive
    """Ranks that share each layer's matrices and heads, and the vocabulary."""
    sequence_parallel: bool
    """Between the matrices, each of the tensor_parallel ranks holds a slice of the
    tokens instead of all of them."""
    pipeline_parallel: Positive
    """Ranks that share the layers; micro-batches pass through them in turn (1F1B)."""
    virtual_stages: Positive
    """Runs of layers per pipeline rank (interleaved 1F1B): smaller bubbles for more
    messages; 1 = one run."""
    context_parallel: Positive
    """Ranks that share the tokens of each row; within attention they share its
    heads."""
    expert_parallel: Positive
    """Data-parallel ranks that share the experts of each layer."""
    expert_tensor_parallel: Positive
    """Ranks that share each expert's matrices."""

    token_slices_key: ClassVar[str | None] = "context_parallel"

    @property
    def peers(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def token_slices(self) -> int:
        return self.context_parallel

    @property
    def has_stages(self) -> bool:
        return self.pipeline_parallel > 1

    def matrix_sharing(self, ranks: int) -> Mapping[str, object]:
        if self.tensor_parallel >= ranks:
            return {}
        return {"tensor_parallel": ranks, "sequence_parallel": True}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that decide which layouts are feasible.

    Attributes:
        layers: Number of layers.
        heads: Number of attention heads.
        key_heads: Number of key-value heads.
        vocabulary: Number of words.
        intermediate: Inner size of the layers without experts; None if every layer has
            experts.
        experts: Number of experts per layer that has them; 0 in a model without.
        expert_intermediate: Inner size of an expert.
        shared_intermediate: Inner size of the layers beside the experts that every
            token goes through; 0 in a model without.
        latent: Whether attention is multi-head latent attention (MLA).
    """

    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    intermediate: int | None
    experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    latent: bool = False


@dataclass(frozen=True)
class Obstacle:
    """The reason why a layout is not feasible.

    Attributes:
        key: The setting of the backend that should change.
        rule: The rule that the setting breaks.
    """

    key: str
    rule: str


class _Option(NamedTuple):
    """A value that a setting may take, and its distance from the present value."""

    distance: float
    value: int


def can_exchange(heads: int, key_heads: int, ranks: int) -> bool:
    """Return whether `ranks` slices of the tokens can be exchanged for heads.

    Within attention every rank has an equal number of heads. It has an equal number of
    key-value heads as well, or shares a key-value head with other ranks.
    """
    even_heads = heads % ranks == 0
    even_key_heads = key_heads % ranks == 0 or ranks % key_heads == 0
    return even_heads and even_key_heads


# ---------------------------------------------------------------------------- obstacles


def obstacles(
    layout: Layout, num_ranks: int, sizes: ModelSizes | None
) -> Iterator[Obstacle]:
    """Yield every obstacle to a layout; `sizes` are the model's, if it is known."""
    yield from rank_obstacles(layout, num_ranks)
    if sizes is not None:
        yield from model_obstacles(layout, sizes)


def rank_obstacles(layout: Layout, num_ranks: int) -> Iterator[Obstacle]:
    """Yield the obstacles that do not depend on a model.

    These are ranks that do not divide, and settings that have no effect without
    another.
    """
    yield from _indivisible(layout, _MODEL_FACTORS, num_ranks, "the model")
    # If the pipeline stages alone do not divide, that is reported already.
    if num_ranks % layout.pipeline_parallel == 0:
        yield from _indivisible(layout, _EXPERT_FACTORS, num_ranks, "the experts")

    if layout.sequence_parallel and layout.tensor_parallel == 1:
        yield Obstacle(
            "sequence_parallel",
            "this setting would be ignored: tensor_parallel=1 shares no tokens out",
        )
    if layout.virtual_stages > 1 and layout.pipeline_parallel == 1:
        yield Obstacle(
            "virtual_stages",
            "this setting would be ignored: pipeline_parallel=1 has one stage",
        )


def model_obstacles(layout: Layout, sizes: ModelSizes) -> Iterator[Obstacle]:
    """Yield the obstacles that a model of these sizes adds."""
    uneven = _unevenly_cut_sizes(sizes, layout.tensor_parallel)

    yield from _tensor_obstacles(layout, sizes, uneven)
    yield from _slice_obstacles(layout, sizes)
    yield from _context_obstacles(layout, sizes, heads_divide=not uneven)
    yield from _pipeline_obstacles(layout, sizes)
    yield from _expert_obstacles(layout, sizes)


def _unevenly_cut_sizes(sizes: ModelSizes, ranks: int) -> list[str]:
    """Return the sizes that `ranks` tensor-parallel ranks cannot share evenly."""
    # Layers without experts that do not exist have size 0, which divides evenly.
    named_sizes = {
        f"{sizes.heads} attention heads": sizes.heads,
        f"{sizes.key_heads} key-value heads": sizes.key_heads,
        f"intermediate_size of {sizes.intermediate}": sizes.intermediate or 0,
        f"{sizes.shared_intermediate} numbers inside shared experts": (
            sizes.shared_intermediate
        ),
    }
    return [name for name, size in named_sizes.items() if size % ranks]


def _tensor_obstacles(
    layout: Layout, sizes: ModelSizes, uneven: Sequence[str]
) -> Iterator[Obstacle]:
    ranks = layout.tensor_parallel
    words_per_rank = math.ceil(sizes.vocabulary / ranks)

    if uneven:
        rule = f"it must divide the model's {' and '.join(uneven)}"
        yield Obstacle("tensor_parallel", rule)
    # Equal parts are rounded up, so the last rank has the remainder.
    elif sizes.vocabulary <= (ranks - 1) * words_per_rank:
        yield Obstacle(
            "tensor_parallel",
            f"cut into {ranks} equal parts, the model's {sizes.vocabulary} words leave"
            " the last part without any",
        )


def _slice_obstacles(layout: Layout, sizes: ModelSizes) -> Iterator[Obstacle]:
    users = "experts" if sizes.experts else "latent attention"
    needs_slices = bool(sizes.experts) or sizes.latent
    if needs_slices and layout.tensor_parallel > 1 and not layout.sequence_parallel:
        yield Obstacle(
            "sequence_parallel",
            f"with tensor_parallel={layout.tensor_parallel}, megatron-core gives"
            f" {users} slices of the tokens alone",
        )


def _context_obstacles(
    layout: Layout, sizes: ModelSizes, *, heads_divide: bool
) -> Iterator[Obstacle]:
    if sizes.experts and layout.context_parallel > 1:
        yield Obstacle(
            "context_parallel",
            "the model has experts, whose balance is that of whole rows: rows cannot be"
            " cut",
        )
        return

    # Without whole heads per tensor-parallel rank there is nothing to exchange.
    if not heads_divide:
        return

    tensor = layout.tensor_parallel
    heads = sizes.heads // tensor
    key_heads = sizes.key_heads // tensor
    if can_exchange(heads, key_heads, layout.context_parallel):
        return

    owner = " of the model"
    if tensor > 1:
        owner = f" that each of tensor_parallel={tensor} ranks has"
    yield Obstacle(
        "context_parallel",
        f"these ranks share out the {heads} attention heads and {key_heads} key-value"
        f" heads{owner}",
    )


def _pipeline_obstacles(layout: Layout, sizes: ModelSizes) -> Iterator[Obstacle]:
    ranks = layout.pipeline_parallel
    stages = ranks * layout.virtual_stages

    if sizes.layers % ranks:
        rule = f"it must divide the model's {sizes.layers} layers"
        yield Obstacle("pipeline_parallel", rule)
    elif sizes.layers % stages:
        yield Obstacle(
            "virtual_stages",
            f"pipeline_parallel={ranks} times this must divide the model's"
            f" {sizes.layers} layers",
        )


def _expert_obstacles(layout: Layout, sizes: ModelSizes) -> Iterator[Obstacle]:
    if not sizes.experts:
        rule = "this setting would be ignored: the model has no experts"
        for key in ("expert_parallel", "expert_tensor_parallel"):
            if getattr(layout, key) > 1:
                yield Obstacle(key, rule)
        return

    if sizes.experts % layout.expert_parallel:
        rule = f"it must divide the model's {sizes.experts} experts per layer"
        yield Obstacle("expert_parallel", rule)
    if sizes.expert_intermediate % layout.expert_tensor_parallel:
        inner = sizes.expert_intermediate
        rule = f"it must divide the {inner} numbers inside an expert"
        yield Obstacle("expert_tensor_parallel", rule)


def _indivisible(
    layout: Layout, factors: Sequence[str], num_ranks: int, whole: str
) -> Iterator[Obstacle]:
    """Yield an obstacle if the product of the factors does not divide `num_ranks`.

    The obstacle names the first factor with which the product stops dividing.
    """
    sizes = {name: getattr(layout, name) for name in factors}
    product = 1

    for name, size in sizes.items():
        product *= size
        if num_ranks % product == 0:
            continue

        names = " x ".join(key for key in sizes if sizes[key] > 1)
        ranks = math.prod(sizes.values())
        yield Obstacle(
            name,
            f"one copy of {whole} takes {names} = {ranks} ranks, which must divide"
            f" num_ranks={num_ranks}",
        )
        return


# --------------------------------------------------------------------- feasible layouts


def nearest_layout(
    layout: Layout, num_ranks: int, sizes: ModelSizes | None
) -> dict[str, int]:
    """Return the smallest change of settings that makes the layout feasible.

    The change keeps the number of ranks, and leaves a feasible layout as it is. Its
    distance is the sum of the distances of the changed settings (`_options`). Among
    equal distances, settings that are obstacles change first.

    Returns:
        The settings to change, with their new values; empty for a feasible layout.
    """
    obstructing = {obstacle.key for obstacle in obstacles(layout, num_ranks, sizes)}
    options = _options(layout, num_ranks, sizes)
    # Among equal distances the search raises the last settings first.
    names = sorted(options, key=lambda name: name in obstructing)

    # A candidate is an index into the options of every setting. The queue yields
    # candidates in the order of their distances, beginning with no change. The search
    # ends at the latest with the candidate whose sizes are all 1, which is feasible.
    # The last entry is the first index that successors may raise: as each candidate is
    # only raised from there on, none is reached twice.
    queue = [(0.0, (0,) * len(names), 0)]
    while True:
        distance, indices, first_raised = heapq.heappop(queue)
        change = {
            name: options[name][index].value
            for name, index in zip(names, indices, strict=True)
            if index > 0
        }
        candidate = layout.model_copy(update=change)
        if not any(obstacles(candidate, num_ranks, sizes)):
            return change

        for raised in range(first_raised, len(names)):
            setting_options = options[names[raised]]
            index = indices[raised]
            if index + 1 == len(setting_options):
                continue

            successor = (*indices[:raised], index + 1, *indices[raised + 1 :])
            increase = (
                setting_options[index + 1].distance - setting_options[index].distance
            )
            heapq.heappush(queue, (distance + increase, successor, raised))


def _options(
    layout: Layout, num_ranks: int, sizes: ModelSizes | None
) -> dict[str, list[_Option]]:
    """Return the values that each setting may take, nearest first.

    The distance of a size is the difference of the binary logarithms, so that a factor
    of 2 is at distance 1. To turn sequence parallelism on or off is at distance 0.1. A
    size of 1 has no alternatives, since lowering the others is always sufficient.
    """
    multiples = dict.fromkeys((*_MODEL_FACTORS, *_EXPERT_FACTORS), num_ranks)
    multiples["virtual_stages"] = 1 if sizes is None else sizes.layers

    options: dict[str, list[_Option]] = {}
    for name, multiple in multiples.items():
        size: int = getattr(layout, name)
        if size == 1:
            continue

        values = {size, *_divisors(multiple)}
        options[name] = sorted(
            _Option(abs(math.log2(value / size)), value) for value in values
        )

    sliced = layout.sequence_parallel
    options["sequence_parallel"] = [_Option(0.0, sliced), _Option(0.1, not sliced)]
    return options


def _divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def other_ranks(layout: Layout, num_ranks: int) -> list[int]:
    """Return the nearest numbers of ranks, at most two, that this layout divides."""
    model_ranks = _product(layout, _MODEL_FACTORS)
    expert_ranks = _product(layout, _EXPERT_FACTORS)
    # Copies of the model and copies of the experts must both fit.
    unit = math.lcm(model_ranks, expert_ranks)

    next_lower = num_ranks // unit * unit
    next_higher = -(-num_ranks // unit) * unit
    return sorted({count for count in (next_lower, next_higher) if count})


def _product(layout: Layout, factors: Sequence[str]) -> int:
    """Return the product of the named settings."""
    return math.prod(getattr(layout, name) for name in factors)


def layout_description(layout: Layout, num_ranks: int) -> str:
    """Return a layout in short: its sizes above 1, and the data-parallel size."""
    sizes: Mapping[str, int] = {
        "tp": layout.tensor_parallel,
        "pp": layout.pipeline_parallel,
        "vp": layout.virtual_stages,
        "cp": layout.context_parallel,
        "ep": layout.expert_parallel,
        "etp": layout.expert_tensor_parallel,
    }
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    if layout.sequence_parallel:
        # Sequence parallelism requires tensor parallelism, which is the first part.
        parts.insert(1, "sp")

    return " ".join([*parts, f"dp{num_ranks // layout.peers}"])
