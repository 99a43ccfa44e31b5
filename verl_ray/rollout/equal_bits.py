"""The bits of a response do not depend on what else its process computes.

oneDNN multiplies a single row by another program than several. It sums in another
order where a row has more than 1,024 numbers: measured for float32 and bfloat16, up
to 8,192 numbers and 511 rows, on one thread and on two. So a single row is computed
as one of two equal ones.

Invariant: `compute_rows_alike` is called in each process of an engine before that
computes.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops

from verl_ray.ops.installed_torch import choose_vector_program

_onednn_mm = _custom_ops.onednn_mm


def product_of_rows(
    handler: _custom_ops.CPUDNNLGEMMHandler,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return vLLM's product of rows, [..., k] to [..., n], each as if beside others."""
    if rows.numel() != handler.k:
        return _onednn_mm(handler, rows, bias)
    pair = rows.reshape(1, -1).repeat(2, 1)
    return _onednn_mm(handler, pair, bias)[:1].reshape(*rows.shape[:-1], -1)


def compute_rows_alike() -> None:
    """Let this process compute each row of a product as it does beside others."""
    choose_vector_program()
    _custom_ops.onednn_mm = product_of_rows
