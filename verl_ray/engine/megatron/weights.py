"""The weights of this rank: read from a checkpoint, and provided as its slices.

Invariant: reading and providing are copies between boxes of the model's parameters, as
`weight_map.py` maps them; no rank holds a whole parameter for it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_ray.engine.megatron.buffers import MegatronBuffers, is_freed
from verl_ray.engine.megatron.layout import ParallelLayout
from verl_ray.engine.megatron.model import Stage, has_tied_embeddings
from verl_ray.engine.megatron.model_config import family_of
from verl_ray.engine.megatron.optimizer import OptimizerShard
from verl_ray.engine.megatron.weight_map import (
    ParameterMap,
    Region,
    WeightMap,
    is_empty_box,
    shape_of_box,
)
from verl_ray.models.names import Box, CheckpointNames
from verl_ray.models.role_model import RoleModel
from verl_ray.models.tensor_sources import CheckpointReader
from verl_ray.models.weights import (
    check_fit,
    fill_box,
    saved_buffers,
    saved_tensors,
)
from verl_ray.weight_sync.manifest import Slice


def map_tensors(
    model: RoleModel, stages: Sequence[Stage], layout: ParallelLayout
) -> tuple[ParameterMap, ParameterMap]:
    """Return the meaning of every parameter and every saved buffer of this rank.

    Args:
        model: The model as transformers has it, without values.
        stages: This rank's chunks of the model.
        layout: The layout of the model.
    """
    attention: Any = model.layers[0].self_attn
    weight_map = WeightMap(
        tensor_shapes(model),
        family_of(model),
        layout,
        head_size=getattr(attention, "head_dim", 0),
        tied=has_tied_embeddings(model),
    )

    parameters: ParameterMap = {}
    buffers: ParameterMap = {}
    for stage in stages:
        # megatron-core numbers layers from 1, in the whole model.
        layers = [layer.layer_number - 1 for layer in stage.decoder.layers]
        for mapped, named in (
            (parameters, dict(stage.named_parameters())),
            (buffers, saved_buffers(stage)),
        ):
            for name, tensor in named.items():
                layer = None
                if name.startswith("decoder.layers."):
                    layer = layers[int(name.split(".")[2])]
                mapped[tensor] = weight_map.of(name, layer)
    return parameters, buffers


# ----------------------------------------------------------------------------- reading


class BoxReader:
    """A reader of boxes of the model's parameters from a checkpoint.

    Args:
        model: The model as transformers has it, without values.
        source: The checkpoint.
        seed: The seed of the values of a head that the checkpoint lacks.

    Raises:
        ModelError: The checkpoint's tensors are not those of the model.
    """

    def __init__(self, model: RoleModel, source: CheckpointReader, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._shapes = tensor_shapes(model)
        self._new, unused = model.head_differences
        self._names = model.names
        check_fit(model.hf, source, names=model.names, new=self._new, unused=unused)

    def read(self, target: Tensor, box: Box, name: str) -> None:
        """Copy a box of the parameter `name` into a tensor of the box's shape."""
        shape = self._shapes[name]
        fill_box(
            target,
            box,
            name,
            shape,
            self._source,
            names=self._names,
            new=self._new,
            seed=self._seed,
        )


def tensor_shapes(model: RoleModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's parameters and saved buffers by name."""
    return {name: tuple(value.shape) for name, value in saved_tensors(model.hf).items()}


@torch.no_grad()
def read_weights(mapped: ParameterMap, reader: BoxReader) -> None:
    """Fill this rank's parameters; no more than this rank's part is read."""
    for parameter, meaning in mapped.items():
        filled_rows = 0
        for region in meaning.regions:
            # A view, so reading it fills the parameter.
            rows = parameter.detach()[region.rows]
            target = rows.view(shape_of_box(region.box))
            reader.read(target, region.box, region.name)
            filled_rows += region.shape[0]

        # The words that pad the vocabulary.
        parameter[filled_rows:].zero_()


def read_main_weights(shards: Iterable[OptimizerShard], reader: BoxReader) -> None:
    """Fill the main weights, if they are separate from the weights that compute.

    megatron-core has made them from values that are rounded already.
    """
    for shard in shards:
        for name, box, elements in shard.parts():
            target = shard.main[elements].view(shape_of_box(box))
            reader.read(target, box, name)


# --------------------------------------------------------------------------- providing


class HeldBox(NamedTuple):
    """A box of one of the model's parameters that this rank provides.

    Attributes:
        name: The parameter.
        box: The box.
        values: Returns its values. It is called for each use, since memory may move.
    """

    name: str
    box: Box
    values: Callable[[], Tensor]


class HeldSlice(NamedTuple):
    """A slice of a tensor of the model that this rank provides.

    Attributes:
        slice: The slice.
        values: Returns the values of the box that contains it.
        within: The position of the slice within that box.
    """

    slice: Slice
    values: Callable[[], Tensor]
    within: Box


HeldSlices = dict[str, list[HeldSlice]]
"""The slices that this rank provides, by the tensor's name in a checkpoint."""


def computing_boxes(
    mapped: ParameterMap, layout: ParallelLayout, buffers: MegatronBuffers
) -> Iterator[HeldBox]:
    """Yield the weights that this rank sends, in the type that computes."""
    is_first_copy = layout.dp.rank == 0 and layout.cp.rank == 0
    is_first_expert_copy = layout.expert_dp.rank == 0

    for parameter, meaning in mapped.items():
        provides = is_first_expert_copy if meaning.expert else is_first_copy
        if not (meaning.owned and provides):
            continue

        for region in meaning.regions:
            values = functools.partial(_region_values, parameter, region, buffers)
            yield HeldBox(region.name, region.box, values)


def _region_values(
    parameter: Tensor, region: Region, buffers: MegatronBuffers
) -> Tensor:
    """Return a region's rows of a parameter, in the shape of the region's box.

    They are on the host while the parameter is offloaded.
    """
    values = parameter.detach()
    if is_freed(parameter):
        values = buffers.on_host(parameter)
    return values[region.rows].view(shape_of_box(region.box))


def main_boxes(shards: Iterable[OptimizerShard]) -> Iterator[HeldBox]:
    """Yield the weights that this rank exports, in float32, as they learn."""
    for shard in shards:
        if not shard.mapped.owned:
            continue
        # A box is a run of flat elements in the shape of the box.
        for name, box, elements in shard.parts():
            view = shard.main[elements].view
            yield HeldBox(name, box, functools.partial(view, shape_of_box(box)))


def slices_by_tensor(
    boxes: Iterable[HeldBox],
    shapes: Mapping[str, tuple[int, ...]],
    names: CheckpointNames,
) -> HeldSlices:
    """Return the slices of the checkpoint's tensors that the boxes consist of.

    Args:
        boxes: Boxes of the model's parameters.
        shapes: The shapes of the model's parameters, by name.
        names: The tensors that they are published as.
    """
    slices: HeldSlices = defaultdict(list)
    for held in boxes:
        for tensor in names.tensors(held.name, shapes[held.name], held.box):
            within_box, within_tensor = tensor.overlap(held.box)
            if is_empty_box(within_tensor):
                continue

            start = tuple(side.start for side in within_tensor)
            part = Slice(tensor.name, start, shape_of_box(within_tensor))
            slices[tensor.name].append(HeldSlice(part, held.values, within_box))
    return slices


def read_slices(
    slices: HeldSlices, names: Iterable[str]
) -> Iterator[tuple[Slice, Tensor]]:
    """Yield the slices of these tensors that this rank provides, with their values."""
    for name in names:
        for held in slices.get(name, ()):
            box_values = held.values()
            yield held.slice, box_values[held.within].view(held.slice.shape)
