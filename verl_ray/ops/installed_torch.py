"""What differs between the supported versions of torch (`config/versions.py`), asked of the installed one.

Invariant: a feature is looked for in the signature of the function that has it, here alone, so no other module compares
version numbers. Deliberately not here: what the project does without a feature.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from torch.utils import _pytree

FORWARD_SYNC_BUFFERS = "forward_sync_buffers"


def varlen_attn_groups_heads() -> bool:
    """Whether `varlen_attn` takes fewer heads of keys and values than of queries. torch 2.11 does not."""
    from torch.nn.attention import varlen

    return "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def ddp_without_buffers() -> dict[str, Any]:
    """What tells DistributedDataParallel to leave buffers alone in a forward pass. torch 2.11 has one setting for that
    and for the start; in 2.13 it is deprecated, and they have one each."""
    from torch.nn.parallel import DistributedDataParallel

    parameters = inspect.signature(DistributedDataParallel).parameters
    return {FORWARD_SYNC_BUFFERS if FORWARD_SYNC_BUFFERS in parameters else "broadcast_buffers": False}


def with_tensors_found(cls: type[Any]) -> type[Any]:
    """Class decorator: let torch find the tensors in this dataclass.

    FSDP2 hangs its pre-backward hook on the tensors of a module's output. torch 2.11 looks for them in pytrees alone,
    and would gather no parameters of a module that returns any other class.
    """
    _pytree.register_dataclass(cls, field_names=[field.name for field in fields(cls)])
    return cls
