"""Reading of a Hugging Face checkpoint into a module, tensor by tensor.

The directory is read by every rank, or by rank 0 alone.

Invariant: every parameter of the module is filled. Its values come from the checkpoint
or, for parameters that a checkpoint of another kind lacks (a new value head, an
adapter), from a seed that is derived from the parameter's name; so they depend neither
on the number of ranks nor on the order of loading. No rank holds more than its own
shard and one slice more, or one tensor where rank 0 reads for all. A checkpoint that
does not fit is a ModelError that names the tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_ray.errors import ModelError
from verl_ray.models.names import Box, CheckpointNames, matches
from verl_ray.models.tensor_sources import CheckpointReader, TensorSource


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules in the block whose parameters have no memory.

    Their buffers, which are computed, are real.
    """
    register = nn.Module.register_parameter

    def register_on_meta(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate the module's parameters, or this rank's shards of them.

    The parameters are not filled; buffers keep their values. Ties between parameters
    are undone: tie them again.
    """
    # `to_empty` allocates buffers anew as well, so their values are saved.
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def own_box(value: Tensor) -> Box:
    """Return the box of the whole tensor that this rank holds."""
    shape: Sequence[int] = tuple(value.shape)
    start: Sequence[int] = (0,) * value.dim()
    if isinstance(value, DTensor):
        # A tensor that is not sharded evenly, as torch does it, has its own chunk list.
        (chunk,) = value.__create_chunk_list__()
        shape = chunk.sizes
        start = chunk.offsets
    return tuple(
        slice(first, first + size) for first, size in zip(start, shape, strict=True)
    )


def is_first_copy(value: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same slice."""
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    return all(
        not placement.is_replicate() or index == 0
        for placement, index in zip(value.placements, coordinate, strict=True)
    )


def fill(
    module: nn.Module,
    checkpoint: TensorSource,
    *,
    names: CheckpointNames,
    new: Mapping[str, float],
    unused: frozenset[str],
    seed: int,
) -> None:
    """Copy a checkpoint into the parameters and persistent buffers of a module.

    Args:
        module: The module, whose parameters may be sharded.
        checkpoint: The source of the values.
        names: The tensors that the module's parameters are published as.
        new: Standard deviations of parameters that the checkpoint may lack, by name.
            They are sampled from N(0, std^2) with a seed derived from their name.
        unused: Names of the checkpoint that the module may lack.
        seed: The seed of new parameters.

    Raises:
        ModelError: Anything else is missing, unexpected or of another shape.
    """
    check_fit(module, checkpoint, names=names, new=new, unused=unused)
    for name, target in saved_tensors(module).items():
        local = target.to_local() if isinstance(target, DTensor) else target
        fill_box(
            local,
            own_box(target),
            name,
            target.shape,
            checkpoint,
            names=names,
            new=new,
            seed=seed,
        )


def check_fit(
    module: nn.Module,
    checkpoint: TensorSource,
    *,
    names: CheckpointNames,
    new: Mapping[str, float],
    unused: frozenset[str],
) -> None:
    """Raise ModelError if the module and the checkpoint have different names.

    `new` and `unused` are the exceptions, as in `fill`.
    """
    known, passed_over = expected_tensors(module, names)
    others = set(checkpoint) - known.keys() - unused
    unexpected = sorted(name for name in others if not matches(passed_over, name))
    missing = sorted(known.keys() - set(checkpoint) - new.keys())
    if missing or unexpected:
        raise ModelError(
            f"model.path: the checkpoint does not fit {type(module).__name__}: "
            f"missing {missing[:5] or 'none'}, unexpected {unexpected[:5] or 'none'}"
        )


def expected_tensors(
    module: nn.Module, names: CheckpointNames
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return the tensors of a checkpoint that a module reads.

    Returns:
        The shape of each by its name, and patterns for the names of those that the
        checkpoint may have beside them.
    """
    targets = saved_tensors(module)
    shapes = {
        tensor.name: tensor.shape
        for name, target in targets.items()
        for tensor in names.tensors(name, target.shape)
    }
    # The state dict also has the second names of tied parameters, and a checkpoint may
    # contain them.
    tied = [
        f"^{re.escape(tensor.name)}$"
        for name in module.state_dict().keys() - targets.keys()
        for tensor in names.tensors(name, ())
    ]
    # Layers that only predict several tokens at once are in no model of transformers.
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return shapes, [*sorted(tied), *patterns]


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers, tied ones under one name."""
    return dict(module.named_parameters()) | saved_buffers(module)


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint has, such as a bias of a router."""
    persistent = module.state_dict().keys()
    return {
        name: buffer for name, buffer in module.named_buffers() if name in persistent
    }


@torch.no_grad()
def fill_box(
    local: Tensor,
    box: Box,
    name: str,
    shape: Sequence[int],
    checkpoint: TensorSource,
    *,
    names: CheckpointNames,
    new: Mapping[str, float],
    seed: int,
) -> None:
    """Copy a box of one parameter into `local`, as `fill` does.

    Args:
        local: A tensor of the shape of the box.
        box: The box of the parameter.
        name: The parameter's name in the module.
        shape: The shape of the whole parameter.
        checkpoint: The source of the values.
        names: The tensors that parameters are published as.
        new: Standard deviations of parameters that the checkpoint may lack, by name.
        seed: The seed of new parameters.

    Raises:
        ModelError: The checkpoint has a tensor of another shape.
    """
    if name in new and name not in checkpoint:
        # The whole parameter is sampled, so its values do not depend on the box.
        whole = torch.empty(tuple(shape))
        whole.normal_(0, new[name], generator=_generator(seed, name))
        local.copy_(whole[box])
        return

    # From other sources all ranks read the same tensors together, those too of which
    # this rank needs nothing.
    reads_alone = isinstance(checkpoint, CheckpointReader)
    for tensor in names.tensors(name, shape, box if reads_alone else None):
        checkpoint_shape = checkpoint.shape(tensor.name)
        if checkpoint_shape != tensor.shape:
            raise ModelError(
                f"model.path: {tensor.name} has shape {checkpoint_shape}, expected"
                f" {tensor.shape}"
            )

        within_box, within_tensor = tensor.overlap(box)
        part = local[within_box]
        if part.numel() or not reads_alone:
            # Nothing may hold the tensor while the next one is read.
            part.copy_(checkpoint.read(tensor.name, within_tensor).view(part.shape))


def _generator(seed: int, name: str) -> torch.Generator:
    """Return a generator whose seed depends on the parameter's name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7]))
