"""The manifest of a model: the tensors that leave it, and where they come from.

Invariant: the manifest is the same on every rank, and over all ranks the owned parts
cover each tensor exactly once.

Deliberately not here: the names of tensors (`models/names.py`), and sending them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_ray.models.lora import adapter_name
from verl_ray.models.names import (
    Box,
    CheckpointTensor,
    checkpoint_tensors,
    is_adapter,
)
from verl_ray.models.role_model import RoleModel
from verl_ray.models.weights import is_first_copy, own_box
from verl_ray.weight_sync.manifest import Manifest, Parameter, Slice


@dataclass(frozen=True)
class TensorOrigin:
    """Where a tensor of the manifest is in the model."""

    parameter: str
    """The name of the module's parameter."""

    tensor: CheckpointTensor
    """The tensor's box in the parameter."""


def build_manifest(model: RoleModel) -> tuple[Manifest, dict[str, TensorOrigin]]:
    """List the tensors of a model, with the origin of each.

    Parameters of an adapter are not in the manifest, but they have an origin.
    """
    # The first name of each parameter; a tied parameter has several.
    first_name: dict[int, str] = {}
    parameters = []
    origins = {}

    for name, value in model.hf.named_parameters(remove_duplicate=False):
        for tensor in checkpoint_tensors(name, value.shape):
            tied_to = None
            if tensor.shape == value.shape:
                holder = first_name.setdefault(id(value), tensor.name)
                if holder != tensor.name:
                    tied_to = holder
            parameters.append(
                describe_parameter(tensor.name, value, tensor.shape, tied_to)
            )
            origins[tensor.name] = TensorOrigin(name, tensor)

        if is_adapter(name):
            shape = tuple(value.shape)
            tensor = CheckpointTensor(
                adapter_name(name), (0,) * len(shape), sides=shape, shape=shape
            )
            origins[tensor.name] = TensorOrigin(name, tensor)

    return Manifest(tuple(parameters)), origins


def describe_parameter(
    name: str,
    value: Tensor,
    shape: Sequence[int] | None = None,
    tied_to: str | None = None,
    *,
    adapter: bool = False,
) -> Parameter:
    """Return the manifest's entry for a tensor.

    Args:
        name: The name of the tensor.
        value: The parameter that the tensor is in.
        shape: The shape of the tensor; None if it is the whole parameter.
        tied_to: The name of the tensor that it is identical to.
        adapter: Whether the tensor belongs to an adapter.
    """
    if shape is None:
        shape = value.shape
    dtype = str(value.dtype).removeprefix("torch.")
    return Parameter(name, tuple(shape), dtype, tied_to, adapter)


def owned_part(
    value: Tensor, tensor: CheckpointTensor, rank: int
) -> tuple[Box, Slice] | None:
    """Return the part of a tensor that this rank owns, or None if it owns nothing.

    Args:
        value: The parameter, which may be sharded.
        tensor: The tensor within the parameter.
        rank: This rank.

    Returns:
        The owned part's box within this rank's part of the parameter, and its slice of
        the tensor.
    """
    # Of ranks with equal data, the first one is the owner.
    if isinstance(value, DTensor):
        is_owner = is_first_copy(value)
    else:
        is_owner = rank == 0

    within_rank, within_tensor = tensor.overlap(own_box(value))
    start = tuple(side.start for side in within_tensor)
    shape = tuple(side.stop - side.start for side in within_tensor)
    if not is_owner or not all(shape):
        return None
    return within_rank, Slice(tensor.name, start, shape)
