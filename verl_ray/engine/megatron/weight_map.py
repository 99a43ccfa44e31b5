"""The map from megatron-core's parameters to those of the model in transformers.

Invariant: the regions of a parameter are runs of its rows; together they are all of it,
except for the rows of words that only pad the vocabulary. Each region is a box of one
parameter of the model as transformers has it. Over the ranks of one copy of the model,
the regions that ranks own cover every parameter once. So reading a checkpoint, sending
weights and saving state are the same operation: copies between boxes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from verl_ray.engine.megatron.layout import Axis, ParallelLayout
from verl_ray.errors import EngineError, ModelError
from verl_ray.models.names import Box


def shape_of_box(box: Box) -> tuple[int, ...]:
    """Return the lengths of a box's sides."""
    return tuple(side.stop - side.start for side in box)


def is_empty_box(box: Box) -> bool:
    """Return whether a side of the box has no length."""
    return any(side.start >= side.stop for side in box)


_LAYER = re.compile(r"decoder\.layers\.\d+\.(.*)")
_EXPERT = re.compile(
    r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc1|linear_fc2)\.weight"
)
_ROUTER = "mlp.router.weight"
_WORDS = "model.embed_tokens.weight"

_REPLICATED = {
    "decoder.final_layernorm.weight": "model.norm.weight",
    "value_head.weight": "score.weight",
}
"""Parameters outside of layers that every tensor-parallel rank holds whole."""

_REPLICATED_IN_LAYERS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    _ROUTER: "mlp.gate.weight",
}
"""Parameters of a layer that every tensor-parallel rank holds whole."""


@dataclass(frozen=True)
class Region:
    """Rows of one of megatron-core's parameters, and the box that they correspond to.

    Attributes:
        name: A parameter of the model as transformers has it.
        box: The box of that parameter.
        first_row: The first row in megatron-core's parameter, which has all columns of
            the box.
    """

    name: str
    box: Box
    first_row: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows in megatron-core's parameter.

        A box of an expert has three sides; the first, of length 1, is its number.
        """
        sides = shape_of_box(self.box)
        if len(sides) == 3:
            return sides[1:]
        return sides

    @property
    def rows(self) -> slice:
        """The rows in megatron-core's parameter."""
        return slice(self.first_row, self.first_row + self.shape[0])

    @property
    def width(self) -> int:
        """Number of elements per row."""
        return math.prod(self.shape[1:])

    def parts_of_run(self, start: int, stop: int) -> Iterator[tuple[Box, slice]]:
        """Yield the boxes that a run of elements has in common with this region.

        The run is `start` to `stop` of the flattened megatron-core parameter. There are
        at most three boxes: the end of a row, whole rows, and the beginning of a row.

        Yields:
            A box of the model's parameter, and the position of its elements within the
            run.
        """
        width = self.width
        # All positions below count from the beginning of the region.
        offset = self.first_row * width
        low = max(start - offset, 0)
        high = min(stop - offset, self.shape[0] * width)

        while low < high:
            row, column = divmod(low, width)
            is_part_of_row = column > 0 or high - low < width
            if is_part_of_row:
                end = min(high, (row + 1) * width)
                rows = slice(row, row + 1)
                columns = slice(column, column + end - low)
            else:
                last_row = high // width
                end = last_row * width
                rows = slice(row, last_row)
                columns = slice(0, width)

            elements = slice(low + offset - start, end + offset - start)
            yield self._part(rows, columns), elements
            low = end

    def _part(self, rows: slice, columns: slice) -> Box:
        """Return the part of the box with these of its rows and columns."""
        parts = (rows, columns)[: len(self.shape)]
        num_leading = len(self.box) - len(parts)
        leading = self.box[:num_leading]
        inner = [
            slice(side.start + part.start, side.start + part.stop)
            for side, part in zip(self.box[num_leading:], parts, strict=True)
        ]
        return (*leading, *inner)


@dataclass(frozen=True)
class MappedParameter:
    """The meaning of one of megatron-core's parameters.

    Attributes:
        regions: Its rows, and the boxes that they correspond to.
        owned: True if this rank is the one that provides the parameter, among the ranks
            of one copy of the model that hold the same values.
        replicated: True if all tensor-parallel ranks hold the same values.
        expert: True if the parameter belongs to an expert. Copies of experts are on
            other ranks than copies of the other parameters.
    """

    regions: tuple[Region, ...]
    owned: bool = True
    replicated: bool = False
    expert: bool = False


ParameterMap = dict[nn.Parameter, MappedParameter]
"""The parameters of this rank's chunks, and their meaning."""


@dataclass(frozen=True)
class MapSizes:
    """The sizes of a model that determine the map."""

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
        """Return the sizes of a configuration of transformers."""
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
    """The map of the parameters of this rank's model chunks."""

    def __init__(self, sizes: MapSizes, layout: ParallelLayout, *, tied: bool) -> None:
        self._sizes = sizes
        self._layout = layout
        self._tied = tied

    def of(self, name: str, layer: int | None) -> MappedParameter:
        """Return the meaning of a parameter of a chunk.

        Args:
            name: Name of the parameter in megatron-core's model.
            layer: Index, in the whole model, of the layer that has the parameter; None
                outside of layers.

        Raises:
            ModelError: The supported models have no such parameter.
        """
        in_layer = _LAYER.fullmatch(name)
        if in_layer is None:
            mapped = self._outside_layers(name)
        elif layer is None:
            mapped = None
        else:
            mapped = self._in_layer(f"model.layers.{layer}.", in_layer.group(1))

        if mapped is None:
            raise ModelError(
                f"megatron's parameter {name} has no counterpart in the supported"
                " models"
            )
        return mapped

    # ---------------------------------------------------------------- outside of layers

    def _outside_layers(self, name: str) -> MappedParameter | None:
        if name == "embedding.word_embeddings.weight":
            return MappedParameter((self._words(_WORDS),))

        if name == "output_layer.weight":
            if self._tied:
                # The last stage has a copy of the embedding, which the first one owns.
                return MappedParameter((self._words(_WORDS),), owned=False)
            return MappedParameter((self._words("lm_head.weight"),))

        if name in _REPLICATED:
            shape: tuple[int, ...] = (self._sizes.hidden,)
            if name == "value_head.weight":
                shape = (1, *shape)
            return self._replicated(_REPLICATED[name], shape)

        return None

    def _words(self, name: str) -> Region:
        """Return this rank's rows of words.

        The words that pad the last rank's part are not part of the model.
        """
        own = share(self._sizes.padded_vocabulary, self._layout.tp)
        stop = max(own.start, min(own.stop, self._sizes.vocabulary))
        box = (slice(own.start, stop), slice(0, self._sizes.hidden))
        return Region(name, box, 0)

    def _replicated(self, name: str, shape: tuple[int, ...]) -> MappedParameter:
        """Return a parameter that is whole on all tensor-parallel ranks."""
        box = tuple(slice(0, side) for side in shape)
        return MappedParameter(
            (Region(name, box, 0),),
            owned=self._layout.tp.rank == 0,
            replicated=True,
        )

    # ------------------------------------------------------------------------ in layers

    def _in_layer(self, prefix: str, name: str) -> MappedParameter | None:
        """Return the meaning of a parameter of a layer.

        Args:
            prefix: The beginning of the names of the layer's parameters in the model.
            name: The parameter's name within megatron-core's layer.
        """
        if name in _REPLICATED_IN_LAYERS:
            shape: tuple[int, ...] = (self._sizes.hidden,)
            if "self_attention" in name:
                shape = (self._sizes.head_size,)
            elif name == _ROUTER:
                shape = (self._sizes.experts, self._sizes.hidden)
            return self._replicated(prefix + _REPLICATED_IN_LAYERS[name], shape)

        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            local_number = int(expert.group(1))
            return self._expert(f"{prefix}mlp.experts.", local_number, expert.group(2))

        if name.startswith("self_attention."):
            return self._attention(f"{prefix}self_attn.", name)
        return self._feed_forward(f"{prefix}mlp.", name)

    def _expert(self, prefix: str, local_number: int, kind: str) -> MappedParameter:
        """Return a matrix of an expert; transformers has one tensor for all experts.

        Args:
            prefix: The beginning of the names of the experts' tensors.
            local_number: Number of the expert among those of this rank.
            kind: `linear_fc1` for gate and up projection, `linear_fc2` for down.
        """
        sizes = self._sizes
        number = share(sizes.experts, self._layout.ep).start + local_number
        expert = slice(number, number + 1)
        own = share(sizes.expert_intermediate, self._layout.etp)
        hidden = slice(0, sizes.hidden)

        if kind == "linear_fc2":
            down = Region(f"{prefix}down_proj", (expert, hidden, own), 0)
            return MappedParameter((down,), expert=True)

        # In transformers' tensor, all rows of the up projection follow those of the
        # gate; in megatron-core's, this rank's rows of both follow each other.
        up_rows = slice(
            own.start + sizes.expert_intermediate, own.stop + sizes.expert_intermediate
        )
        name = f"{prefix}gate_up_proj"
        gate = Region(name, (expert, own, hidden), 0)
        up = Region(name, (expert, up_rows, hidden), own.stop - own.start)
        return MappedParameter((gate, up), expert=True)

    def _attention(self, prefix: str, name: str) -> MappedParameter | None:
        sizes = self._sizes

        if name == "self_attention.linear_qkv.weight":
            return MappedParameter(tuple(self._queries_keys_values(prefix, "weight")))
        if name == "self_attention.linear_qkv.bias":
            return MappedParameter(tuple(self._queries_keys_values(prefix, "bias")))
        if name == "self_attention.linear_proj.weight":
            columns = share(sizes.heads * sizes.head_size, self._layout.tp)
            box = (slice(0, sizes.hidden), columns)
            return MappedParameter((Region(f"{prefix}o_proj.weight", box, 0),))
        return None

    def _queries_keys_values(self, prefix: str, kind: str) -> Iterator[Region]:
        """Yield the regions of megatron-core's joint tensor.

        For each key-value head it has the query heads of its group, the key and the
        value.

        Args:
            prefix: The beginning of the names of the attention's parameters.
            kind: `weight` or `bias`.
        """
        sizes = self._sizes
        queries_per_key = sizes.heads // sizes.key_heads
        own_heads = share(sizes.key_heads, self._layout.tp)
        first_row = 0

        for key_head in range(own_heads.start, own_heads.stop):
            for letter, heads in (("q", queries_per_key), ("k", 1), ("v", 1)):
                num_rows = heads * sizes.head_size
                rows = slice(key_head * num_rows, (key_head + 1) * num_rows)
                box: Box = (rows,)
                if kind == "weight":
                    box = (rows, slice(0, sizes.hidden))
                yield Region(f"{prefix}{letter}_proj.{kind}", box, first_row)
                first_row += num_rows

    def _feed_forward(self, prefix: str, name: str) -> MappedParameter | None:
        hidden = slice(0, self._sizes.hidden)
        own = share(self._sizes.intermediate, self._layout.tp)

        if name == "mlp.linear_fc2.weight":
            box = (hidden, own)
            return MappedParameter((Region(f"{prefix}down_proj.weight", box, 0),))
        if name == "mlp.linear_fc1.weight":
            box = (own, hidden)
            gate = Region(f"{prefix}gate_proj.weight", box, 0)
            up = Region(f"{prefix}up_proj.weight", box, own.stop - own.start)
            return MappedParameter((gate, up))
        return None


def share(total: int, axis: Axis) -> slice:
    """Return this rank's part of `total` things.

    Raises:
        EngineError: They cannot be shared evenly along the axis.
    """
    if total % axis.size:
        raise EngineError(
            f"{total} heads, rows or layers cannot be shared out evenly over"
            f" {axis.size} ranks"
        )
    per_rank = total // axis.size
    return slice(axis.rank * per_rank, (axis.rank + 1) * per_rank)
