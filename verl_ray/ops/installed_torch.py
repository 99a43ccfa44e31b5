"""The differences between the supported versions of torch (`config/versions.py`).

Invariant: a feature is looked up in the signature of the installed function that has
it, and only here, so no other module compares version numbers.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from torch.utils import _pytree

FORWARD_SYNC_BUFFERS = "forward_sync_buffers"


def varlen_attn_groups_heads() -> bool:
    """Whether `varlen_attn` takes fewer heads of keys and values than of queries.

    It does not in torch 2.11.
    """
    from torch.nn.attention import varlen

    return "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def ddp_without_buffers() -> dict[str, Any]:
    """Return the argument that keeps DDP from synchronizing buffers in a forward pass.

    torch 2.11 has one setting for the forward pass and the start. In 2.13 it is
    deprecated, and there are two settings.
    """
    from torch.nn.parallel import DistributedDataParallel

    parameters = inspect.signature(DistributedDataParallel).parameters
    if FORWARD_SYNC_BUFFERS in parameters:
        return {FORWARD_SYNC_BUFFERS: False}
    return {"broadcast_buffers": False}


def with_tensors_found(cls: type[Any]) -> type[Any]:
    """Decorate a dataclass so that torch finds the tensors in it.

    FSDP2 attaches its pre-backward hook to the tensors of a module's output. torch 2.11
    looks for them only in pytrees, and would gather no parameters of a module that
    returns any other class.
    """
    _pytree.register_dataclass(cls, field_names=[field.name for field in fields(cls)])
    return cls
