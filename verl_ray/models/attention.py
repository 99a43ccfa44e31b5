"""Attention over packed rows: the one seam between a transformer's layers and the kernels.

Invariant: rows lie one behind the other in a model input of shape [1, tokens], without padding, and a token attends to
the tokens before it in its own row and to nothing else. `attend` is what the layers call (registered with transformers
under `NAME`); a `Layout` tells it where rows begin. In bfloat16 on a GPU a variable-length flash kernel reads that
directly (it has no float32). Elsewhere rows of similar length form a bucket, and each bucket is one rectangular call,
so that no row is padded to far more than its own length. Where other ranks hold the other tokens, heads are exchanged
for them around the kernel. Deliberately not here: how (`parallel/exchange.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl_ray.data.batch import Int64
from verl_ray.ops.installed_torch import varlen_attn_groups_heads
from verl_ray.parallel.exchange import HeadExchange

NAME = "verl_ray"

# Rows share a bucket while the shortest has more than this fraction of the longest one's tokens: attention's padding
# is quadratic, and every bucket costs a kernel call per layer.
BUCKET_LENGTH_RATIO = 0.5


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length: where their tokens stand in the packed input and in the rectangle."""

    shape: tuple[int, int]  # rows, longest
    source: Tensor  # int64 [rows * longest]: packed position of each place; the row's first token behind its end
    places: Tensor  # int64 [tokens]: the places of the rectangle that hold a token


@dataclass(frozen=True)
class Layout:
    """Where rows begin in a packed input."""

    cumulative: Tensor | None  # for the flash kernel: int32 [rows + 1]
    longest: int
    buckets: tuple[Bucket, ...]  # for rectangular calls
    restore: Tensor | None  # int64 [tokens], from the buckets' tokens to the packed order; None where they are in it
    exchange: HeadExchange | None = None  # with the ranks that hold the other tokens; None where all are here


def plan_layout(
    offsets: Int64, device: torch.device, dtype: torch.dtype, exchange: HeadExchange | None = None
) -> Layout:
    """The layout of rows with these offsets, int64 [rows + 1], for the kernels of this device and type."""
    lengths = np.diff(offsets)
    longest = int(lengths.max())
    if device.type == "cuda" and dtype == torch.bfloat16:
        cumulative = torch.as_tensor(offsets, dtype=torch.int32).to(device, non_blocking=True)
        return Layout(cumulative, longest, (), None, exchange)
    level = np.floor(np.log(longest / lengths) / -np.log(BUCKET_LENGTH_RATIO)).astype(np.int64)
    buckets, tokens = [], []
    for value in np.unique(level):
        rows = np.flatnonzero(level == value)
        column = np.arange(lengths[rows].max())
        inside = column < lengths[rows, None]
        source = offsets[rows, None] + np.where(inside, column, 0)
        places = np.flatnonzero(inside)
        tokens.append(source.reshape(-1)[places])
        shape = (len(rows), len(column))
        index = (torch.from_numpy(part).to(device) for part in (source.reshape(-1), places))
        buckets.append(Bucket(shape, *index))
    if len(buckets) == 1:
        return Layout(None, longest, tuple(buckets), None, exchange)
    order = np.concatenate(tokens)
    restore = np.empty_like(order)
    restore[order] = np.arange(len(order))
    return Layout(None, longest, tuple(buckets), torch.from_numpy(restore).to(device), exchange)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention within each row: [1, heads, tokens, size] -> [1, tokens, heads, size]."""
    if layout is None:
        raise RuntimeError("attention was called without the layout of its rows")
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return attend_packed(query, key, value, layout, scaling).unsqueeze(0), None


def attend_packed(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None = None) -> Tensor:
    """The same of [tokens, heads, size] -> [tokens, heads, size]."""
    if layout.exchange is None:
        return _attend(query, key, value, layout, scaling)
    query, key, value = (layout.exchange.to_heads(x) for x in (query, key, value))
    return layout.exchange.to_tokens(_attend(query, key, value, layout, scaling))


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None) -> Tensor:
    """[tokens, heads, size] of all tokens -> the same shape."""
    grouped = key.shape[1] != query.shape[1]
    if layout.cumulative is not None:
        return _flash(query, key, value, layout.cumulative, layout.longest, scaling, grouped)
    pieces = []
    for bucket in layout.buckets:
        q, k, v = (
            x.index_select(0, bucket.source).unflatten(0, bucket.shape).transpose(1, 2) for x in (query, key, value)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        pieces.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.places))
    return pieces[0] if layout.restore is None else torch.cat(pieces).index_select(0, layout.restore)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None, grouped: bool
) -> Tensor:
    from torch.nn.attention import varlen

    settings: dict[str, Any] = {}
    if grouped and varlen_attn_groups_heads():
        settings["enable_gqa"] = True
    elif grouped:
        queries_per_key = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(queries_per_key, dim=1)
        value = value.repeat_interleave(queries_per_key, dim=1)

    # rotary embeddings leave queries and keys in float32 under autocast
    out = varlen.varlen_attn(
        query.bfloat16(), key.bfloat16(), value.bfloat16(), bounds, bounds, longest, longest,
        window_size=(-1, 0), scale=scaling, **settings,
    )  # fmt: skip
    assert isinstance(out, Tensor)  # a pair only where the normalizers are asked for too
    return out
