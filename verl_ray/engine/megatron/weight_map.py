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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from verl_ray.backends.megatron_families import Family
from verl_ray.engine.megatron.layout import Axis, ParallelLayout
from verl_ray.errors import EngineError, ModelError
from verl_ray.models.names import Box


def padded_vocabulary(words: int, ranks: int) -> int:
    """Return the vocabulary size that `ranks` ranks can share equally.

    The words that pad it come last, and are never computed.
    """
    return -(-words // ranks) * ranks


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
_QUERIES_KEYS_VALUES = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_WORDS = "model.embed_tokens.weight"

_OUTSIDE_LAYERS = {
    "decoder.final_layernorm.weight": "model.norm.weight",
    "value_head.weight": "score.weight",
}
"""Parameters outside of layers that every tensor-parallel rank holds whole."""


@dataclass(frozen=True)
class Counterparts:
    """The parameters of a layer in transformers that one of megatron-core's holds.

    Attributes:
        names: Their names in the layer. This rank's rows of them follow each other.
        cut: The dimension that tensor-parallel ranks share; None if each has all.
    """

    names: tuple[str, ...]
    cut: int | None = None


_ROWS, _COLUMNS = 0, 1

_IN_LAYERS = {
    "input_layernorm.weight": Counterparts(("input_layernorm.weight",)),
    # Queries, keys and values are one matrix, or latent.
    "self_attention.linear_q_proj.weight": Counterparts(
        ("self_attn.q_proj.weight",), _ROWS
    ),
    "self_attention.linear_q_down_proj.weight": Counterparts(
        ("self_attn.q_a_proj.weight",)
    ),
    "self_attention.linear_q_up_proj.weight": Counterparts(
        ("self_attn.q_b_proj.weight",), _ROWS
    ),
    "self_attention.linear_kv_down_proj.weight": Counterparts(
        ("self_attn.kv_a_proj_with_mqa.weight",)
    ),
    "self_attention.kv_layernorm.weight": Counterparts(
        ("self_attn.kv_a_layernorm.weight",)
    ),
    "self_attention.linear_kv_up_proj.weight": Counterparts(
        ("self_attn.kv_b_proj.weight",), _ROWS
    ),
    "self_attention.k_layernorm.weight": Counterparts(("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": Counterparts(
        ("self_attn.o_proj.weight",), _COLUMNS
    ),
    "mlp.linear_fc1.weight": Counterparts(
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"), _ROWS
    ),
    "mlp.linear_fc2.weight": Counterparts(("mlp.down_proj.weight",), _COLUMNS),
    "mlp.router.weight": Counterparts(("mlp.gate.weight",)),
    "mlp.router.selection_bias": Counterparts(("mlp.gate.e_score_correction_bias",)),
}
"""The parameters of a layer that are no matrices of single experts, by their names in
megatron-core, as far as the names mean the same in every family."""


def _names_of(family: Family) -> dict[str, Counterparts]:
    """Return the parameters whose names depend on the family."""
    query_norm = "q_a_layernorm" if family.latent else "q_norm"
    whole = {"self_attention.q_layernorm.weight": f"self_attn.{query_norm}.weight"}
    if family.norms_after:
        whole |= {
            "self_attn_bda.norm.weight": "post_attention_layernorm.weight",
            "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
            "mlp_bda.norm.weight": "post_feedforward_layernorm.weight",
        }
    else:
        whole["pre_mlp_layernorm.weight"] = "post_attention_layernorm.weight"

    names: dict[str, Counterparts] = {}
    if family.experts is not None and family.experts.shared is not None:
        shared, core = f"mlp.{family.experts.shared}", "mlp.shared_experts"
        whole[f"{core}.gate_weight"] = f"{shared}_gate.weight"
        names[f"{core}.linear_fc1.weight"] = Counterparts(
            (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"), _ROWS
        )
        names[f"{core}.linear_fc2.weight"] = Counterparts(
            (f"{shared}.down_proj.weight",), _COLUMNS
        )
    return names | {core: Counterparts((name,)) for core, name in whole.items()}


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


ParameterMap = dict[Tensor, MappedParameter]
"""The parameters of this rank's chunks, or their buffers that a checkpoint has, and
their meaning."""


class WeightMap:
    """The map of the parameters of this rank's model chunks.

    Args:
        shapes: The shapes of the model's parameters and saved buffers in transformers.
        family: The family of the model.
        layout: The layout of the model.
        head_size: The size of a head whose queries, keys and values are one matrix.
        tied: Whether the head of a policy is the transposed embedding.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        family: Family,
        layout: ParallelLayout,
        *,
        head_size: int,
        tied: bool,
    ) -> None:
        self._shapes = shapes
        self._names = _IN_LAYERS | _names_of(family)
        self._layout = layout
        self._head_size = head_size
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

        if name in _OUTSIDE_LAYERS:
            return self._shared(Counterparts((_OUTSIDE_LAYERS[name],)), "")
        return None

    def _words(self, name: str) -> Region:
        """Return this rank's rows of words.

        The words that pad the last rank's part are not part of the model.
        """
        words, hidden = self._shapes[name]
        axis = self._layout.tp
        own = share(padded_vocabulary(words, axis.size), axis)
        stop = max(own.start, min(own.stop, words))
        return Region(name, (slice(own.start, stop), slice(0, hidden)), 0)

    # ------------------------------------------------------------------------ in layers

    def _in_layer(self, prefix: str, name: str) -> MappedParameter | None:
        """Return the meaning of a parameter of a layer.

        Args:
            prefix: The beginning of the names of the layer's parameters in the model.
            name: The parameter's name within megatron-core's layer.
        """
        if name in self._names:
            return self._shared(self._names[name], prefix)

        joint = _QUERIES_KEYS_VALUES.fullmatch(name)
        if joint is not None:
            regions = self._queries_keys_values(f"{prefix}self_attn.", joint.group(1))
            return MappedParameter(tuple(regions))

        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            local_number = int(expert.group(1))
            return self._expert(f"{prefix}mlp.experts.", local_number, expert.group(2))
        return None

    def _shared(self, counterparts: Counterparts, prefix: str) -> MappedParameter:
        """Return a parameter of which each tensor-parallel rank has a part, or all."""
        regions: list[Region] = []
        first_row = 0
        for name in counterparts.names:
            shape = self._shapes[prefix + name]
            box = [slice(0, side) for side in shape]
            if counterparts.cut is not None:
                cut = counterparts.cut
                box[cut] = share(shape[cut], self._layout.tp)
            region = Region(prefix + name, tuple(box), first_row)
            first_row += region.shape[0]
            regions.append(region)

        is_whole = counterparts.cut is None
        return MappedParameter(
            tuple(regions),
            owned=not is_whole or self._layout.tp.rank == 0,
            replicated=is_whole,
        )

    def _expert(self, prefix: str, local_number: int, kind: str) -> MappedParameter:
        """Return a matrix of an expert; transformers has one tensor for all experts.

        Args:
            prefix: The beginning of the names of the experts' tensors.
            local_number: Number of the expert among those of this rank.
            kind: `linear_fc1` for gate and up projection, `linear_fc2` for down.
        """
        experts, hidden_size, inner = self._shapes[f"{prefix}down_proj"]
        number = share(experts, self._layout.ep).start + local_number
        expert = slice(number, number + 1)
        own = share(inner, self._layout.etp)
        hidden = slice(0, hidden_size)

        if kind == "linear_fc2":
            down = Region(f"{prefix}down_proj", (expert, hidden, own), 0)
            return MappedParameter((down,), expert=True)

        # In transformers' tensor, all rows of the up projection follow those of the
        # gate; in megatron-core's, this rank's rows of both follow each other.
        up_rows = slice(own.start + inner, own.stop + inner)
        name = f"{prefix}gate_up_proj"
        gate = Region(name, (expert, own, hidden), 0)
        up = Region(name, (expert, up_rows, hidden), own.stop - own.start)
        return MappedParameter((gate, up), expert=True)

    def _queries_keys_values(self, prefix: str, kind: str) -> Iterator[Region]:
        """Yield the regions of megatron-core's joint tensor.

        For each key-value head it has the query heads of its group, the key and the
        value.

        Args:
            prefix: The beginning of the names of the attention's parameters.
            kind: `weight` or `bias`.
        """
        queries, keys = (
            self._shapes[f"{prefix}{letter}_proj.{kind}"][0] for letter in "qk"
        )
        key_heads = keys // self._head_size
        queries_per_key = queries // keys
        own_heads = share(key_heads, self._layout.tp)
        first_row = 0

        for key_head in range(own_heads.start, own_heads.stop):
            for letter, heads in (("q", queries_per_key), ("k", 1), ("v", 1)):
                name = f"{prefix}{letter}_proj.{kind}"
                num_rows = heads * self._head_size
                rows = slice(key_head * num_rows, (key_head + 1) * num_rows)
                columns = (slice(0, side) for side in self._shapes[name][1:])
                yield Region(name, (rows, *columns), first_row)
                first_row += num_rows


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
