"""Torch as it is installed: differences of its versions, and its threads.

The supported versions are in `config/versions.py`.

Invariant: a feature is looked up in the signature of the installed function that has
it, and only here, so no other module compares version numbers. Torch is imported when a
function is called, so a process can first set what torch reads once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

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
    from torch.utils import _pytree

    _pytree.register_dataclass(cls, field_names=[field.name for field in fields(cls)])
    return cls


def choose_vector_program() -> None:
    """Let the library choose its program, in this thread alone.

    The library behind torch's vector mathematics (exp, cos and so on) chooses it when a
    function is first called. Where several threads are the first callers, some may
    compute before the choice is made, with another program, whose last bits differ. Of
    4,532 processes whose first call was one of exp or cos with eight threads on two
    cores, three had other bits; of 8,289 that had called another function in one thread
    before, none. So every process calls this before it computes.
    """
    import torch

    # So few numbers are not shared out between threads.
    torch.zeros(1).exp()


@contextmanager
def leaving_a_core() -> Iterator[None]:
    """Compute the block with one thread less, beside another process of the node.

    Threads that must wait for each other would wait for that process, too. It has no
    effect in vLLM's processes, where vLLM makes `torch.set_num_threads` do nothing.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
