"""Which part of the model each of megatron-core's parameters is.

Invariant: the regions of a parameter are runs of its rows; together they are all of it but the rows of words that do
not exist, and each is a box of one parameter of the model as transformers has it. Over the ranks of one copy of the
model, the regions that ranks own cover every parameter once. So reading a checkpoint, sending weights and saving state
are one thing: copies between boxes. Deliberately not here: moving anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from verl_ray.engine.megatron.layout import Axis, Layout
from verl_ray.errors import EngineError, ModelError
from verl_ray.models.names import Box

_LAYER = re.compile(r"decoder\.layers\.\d+\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc1|linear_fc2)\.weight")
_WHOLE = {
    "decoder.final_layernorm.weight": "model.norm.weight",
    "value_head.weight": "score.weight",
}
_WHOLE_IN_LAYERS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""What every tensor-parallel rank holds whole."""


@dataclass(frozen=True)
class Region:
    """Rows of one of megatron-core's parameters, and what they are."""

    name: str  # a parameter of the model as transformers has it
    box: Box  # in it
    first_row: int  # in megatron-core's, which has all columns of the box

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows: the box without leading sides of 1, which number experts."""
        sides = [side.stop - side.start for side in self.box]
        return tuple(sides[1:] if len(sides) == 3 else sides)

    @property
    def width(self) -> int:
        """Elements per row."""
        return math.prod(self.shape[1:])

    def run(self, start: int, stop: int) -> Iterator[tuple[Box, slice]]:
        """What elements `start` to `stop` of the flattened parameter are of this region: boxes, and where each stands
        among these elements. At most three: the end of a row, whole rows, the beginning of a row."""
        rows, width = self.shape[0], self.width
        begin = self.first_row * width
        low, high = max(start, begin) - begin, min(stop, begin + rows * width) - begin
        while low < high:
            row, column = divmod(low, width)
            if column or high - low < width:
                end = min(high, (row + 1) * width)
                box = self._part(slice(row, row + 1), slice(column, column + end - low))
            else:
                last = high // width
                end = last * width
                box = self._part(slice(row, last), slice(0, width))
            yield box, slice(low + begin - start, end + begin - start)
            low = end

    def _part(self, rows: slice, columns: slice) -> Box:
        """Of the box: these of its rows and columns."""
        wanted = (rows,) if len(self.shape) == 1 else (rows, columns)
        sides = self.box[len(self.box) - len(wanted) :]
        inner = (
            slice(side.start + part.start, side.start + part.stop) for side, part in zip(sides, wanted, strict=True)
        )
        return (*self.box[: len(self.box) - len(wanted)], *inner)


@dataclass(frozen=True)
class Mapped:
    """What one of megatron-core's parameters is."""

    regions: tuple[Region, ...]
    owned: bool = True
    """Whether this rank answers for it, of those of one copy of the model that hold the same."""
    replicated: bool = False
    """Whether all tensor-parallel ranks hold the same."""
    expert: bool = False
    """Whether it belongs to an expert: copies of it are elsewhere than those of the rest."""


@dataclass(frozen=True)
class Sizes:
    """What the map must know of a model."""

    hidden: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    padded_vocabulary: int
    intermediate: int
    experts: int
    expert_intermediate: int

    @classmethod
    def of(cls, hf: Any, *, head_size: int, padded_vocabulary: int) -> Self:
        """Those of a configuration of transformers."""
        return cls(
            hidden=hf.hidden_size,
            heads=hf.num_attention_heads,
            key_heads=hf.num_key_value_heads,
            head_size=head_size,
            vocabulary=hf.vocab_size,
            padded_vocabulary=padded_vocabulary,
            intermediate=hf.intermediate_size,
            experts=getattr(hf, "num_experts", 0),
            expert_intermediate=getattr(hf, "moe_intermediate_size", 0),
        )


class WeightMap:
    """Maps the parameters of this rank's chunks of the model."""

    def __init__(self, sizes: Sizes, layout: Layout, *, tied: bool) -> None:
        self._sizes, self._layout, self._tied = sizes, layout, tied

    def of(self, name: str, layer: int | None) -> Mapped:
        """The parameter `name` of a chunk; `layer`: the number, in the model, of the layer that it is in."""
        sizes, first = self._sizes, self._layout.tp.rank == 0
        if name == "embedding.word_embeddings.weight":
            return Mapped((self._words("model.embed_tokens.weight"),))
        if name == "output_layer.weight":  # of tied ones, the copy on the last stage
            of = "model.embed_tokens.weight" if self._tied else "lm_head.weight"
            return Mapped((self._words(of),), owned=not self._tied)
        if name in _WHOLE:
            shape = (1, sizes.hidden) if name.startswith("value") else (sizes.hidden,)
            return Mapped((_whole(_WHOLE[name], *shape),), owned=first, replicated=True)
        match = _LAYER.fullmatch(name)
        found: Mapped | None = None
        if match is not None and layer is not None:
            prefix, inside = f"model.layers.{layer}.", match.group(1)
            if inside in _WHOLE_IN_LAYERS:
                shape = (sizes.head_size,) if "self_attention" in inside else (sizes.hidden,)
                shape = (sizes.experts, sizes.hidden) if inside == "mlp.router.weight" else shape
                found = Mapped((_whole(prefix + _WHOLE_IN_LAYERS[inside], *shape),), owned=first, replicated=True)
            elif expert := _EXPERT.fullmatch(inside):
                found = self._expert(f"{prefix}mlp.experts.", int(expert.group(1)), expert.group(2))
            else:
                found = self._matrix(prefix, inside)
        if found is None:
            raise ModelError(f"megatron's parameter {name} has no counterpart in the supported models")
        return found

    def _words(self, name: str) -> Region:
        """Rows of words; those that only fill up the last rank's part are no part of the model."""
        own = share(self._sizes.padded_vocabulary, self._layout.tp)
        words = slice(own.start, max(own.start, min(own.stop, self._sizes.vocabulary)))
        return Region(name, (words, slice(0, self._sizes.hidden)), 0)

    def _expert(self, prefix: str, local: int, kind: str) -> Mapped:
        sizes, layout = self._sizes, self._layout
        number = share(sizes.experts, layout.ep).start + local
        expert, own = slice(number, number + 1), share(sizes.expert_intermediate, layout.etp)
        columns = slice(0, sizes.hidden)
        if kind == "linear_fc2":
            return Mapped((Region(f"{prefix}down_proj", (expert, columns, own), 0),), expert=True)
        rows = own.stop - own.start
        shifted = slice(own.start + sizes.expert_intermediate, own.stop + sizes.expert_intermediate)
        return Mapped(
            tuple(
                Region(f"{prefix}gate_up_proj", (expert, part, columns), i * rows)
                for i, part in enumerate((own, shifted))
            ),
            expert=True,
        )

    def _matrix(self, prefix: str, inside: str) -> Mapped | None:
        sizes, tp = self._sizes, self._layout.tp
        columns = slice(0, sizes.hidden)
        if inside in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            kind = inside.rpartition(".")[2]
            return Mapped(tuple(self._queries_keys_values(f"{prefix}self_attn.", kind)))
        if inside == "self_attention.linear_proj.weight":
            own = share(sizes.heads * sizes.head_size, tp)
            return Mapped((Region(f"{prefix}self_attn.o_proj.weight", (columns, own), 0),))
        own = share(sizes.intermediate, tp)
        if inside == "mlp.linear_fc2.weight":
            return Mapped((Region(f"{prefix}mlp.down_proj.weight", (columns, own), 0),))
        if inside == "mlp.linear_fc1.weight":
            parts = ("gate_proj", "up_proj")
            rows = own.stop - own.start
            return Mapped(
                tuple(Region(f"{prefix}mlp.{p}.weight", (own, columns), i * rows) for i, p in enumerate(parts))
            )
        return None

    def _queries_keys_values(self, prefix: str, kind: str) -> Iterator[Region]:
        """One tensor of all: for each key head its queries, the key and the value, one behind the other."""
        sizes = self._sizes
        queries = sizes.heads // sizes.key_heads
        row = 0
        for group in range(*_bounds(share(sizes.key_heads, self._layout.tp))):
            for name, heads in (("q", queries), ("k", 1), ("v", 1)):
                rows = slice(group * heads * sizes.head_size, (group + 1) * heads * sizes.head_size)
                box = (rows, slice(0, sizes.hidden)) if kind == "weight" else (rows,)
                yield Region(f"{prefix}{name}_proj.{kind}", box, row)
                row += rows.stop - rows.start


def _whole(name: str, *shape: int) -> Region:
    return Region(name, tuple(slice(0, side) for side in shape), 0)


def share(total: int, axis: Axis) -> slice:
    """This rank's part of so many things. Raises EngineError where they do not divide."""
    if total % axis.size:
        raise EngineError(f"{total} heads, rows or layers cannot be shared out evenly over {axis.size} ranks")
    share = total // axis.size
    return slice(axis.rank * share, (axis.rank + 1) * share)


def _bounds(part: slice) -> tuple[int, int]:
    return part.start, part.stop
