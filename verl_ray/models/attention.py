"""Attention over packed rows, the seam between a transformer's layers and the kernels.

Invariant: rows lie one behind the other in a model input of shape [1, tokens], without
padding, and a token attends to the tokens before it in its own row and to nothing else.

The layers call `attend`, which is registered with transformers under `NAME`. A
`PackedLayout` tells it where rows begin. In bfloat16 on a GPU a variable-length flash
kernel reads the packed rows directly (it has no float32). Elsewhere rows of similar
length form a bucket, and each bucket is one rectangular call, so that no row is padded
to far more than its own length. Where other ranks hold the other tokens, tokens are
exchanged for heads around the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl_ray.columns.batch import Int64
from verl_ray.ops.installed_torch import varlen_attn_groups_heads
from verl_ray.parallel.head_exchange import HeadExchange

NAME = "verl_ray"

BUCKET_LENGTH_RATIO = 0.5
"""Rows share a bucket if their lengths differ by less than this factor.

The shortest row has more than this fraction of the longest row's tokens. The padding
of attention is quadratic, and every bucket costs a kernel call per layer.
"""


@dataclass(frozen=True)
class LengthBucket:
    """Rows of similar length, as a padded rectangle of tokens."""

    shape: tuple[int, int]
    """Number of rows, and length of the longest."""

    source: Tensor
    """int64 [rows * longest]: packed index of the token at each place of the rectangle.
    Padding repeats the first token of the row."""

    places: Tensor
    """int64 [tokens]: the places of the rectangle that are not padding."""


@dataclass(frozen=True)
class PackedLayout:
    """Where rows begin in a packed input, in the form that the kernel needs."""

    cumulative: Tensor | None
    """int32 [rows + 1]: offsets of the rows for the flash kernel, else None."""

    longest: int
    """Number of tokens of the longest row."""

    buckets: tuple[LengthBucket, ...]
    """The rectangular calls, where there is no flash kernel."""

    restore: Tensor | None
    """int64 [tokens]: permutation of the tokens from the buckets' order to the packed
    order. None if they are in the packed order already."""

    exchange: HeadExchange | None = None
    """The exchange with the ranks that hold other tokens. None if all are here."""


def plan_layout(
    offsets: Int64,
    device: torch.device,
    dtype: torch.dtype,
    exchange: HeadExchange | None = None,
) -> PackedLayout:
    """Plan the attention over packed rows.

    Args:
        offsets: int64 [rows + 1], the index of each row's first token, then the total.
        device: The device of the computation.
        dtype: The type of the computation.
        exchange: The exchange with other ranks.
    """
    lengths = np.diff(offsets)
    longest = int(lengths.max())

    if device.type == "cuda" and dtype == torch.bfloat16:
        cumulative = torch.as_tensor(offsets, dtype=torch.int32)
        cumulative = cumulative.to(device, non_blocking=True)
        return PackedLayout(cumulative, longest, (), None, exchange)

    # Rows of one level have lengths within BUCKET_LENGTH_RATIO of each other.
    halvings = np.log(longest / lengths) / -np.log(BUCKET_LENGTH_RATIO)
    level = np.floor(halvings).astype(np.int64)

    buckets = []
    packed_indices = []
    for value in np.unique(level):
        rows = np.flatnonzero(level == value)
        column = np.arange(lengths[rows].max())
        is_token = column < lengths[rows, None]
        source = offsets[rows, None] + np.where(is_token, column, 0)
        source = source.reshape(-1)
        places = np.flatnonzero(is_token)

        packed_indices.append(source[places])
        bucket = LengthBucket(
            shape=(len(rows), len(column)),
            source=torch.from_numpy(source).to(device),
            places=torch.from_numpy(places).to(device),
        )
        buckets.append(bucket)

    if len(buckets) == 1:
        return PackedLayout(None, longest, tuple(buckets), None, exchange)

    order = np.concatenate(packed_indices)
    restore = np.empty_like(order)
    restore[order] = np.arange(len(order))
    restore_on_device = torch.from_numpy(restore).to(device)
    return PackedLayout(None, longest, tuple(buckets), restore_on_device, exchange)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: PackedLayout | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within each row, as transformers calls it.

    Args:
        module: The attention layer, which is not read.
        query: [1, heads, tokens, size].
        key: [1, key-value heads, tokens, size].
        value: [1, key-value heads, tokens, size].
        attention_mask: Not read, since the layout has the same information.
        scaling: Factor of the logits; None means 1 / sqrt(size).
        layout: The layout of the rows.
        kwargs: Not read.

    Returns:
        [1, tokens, heads, size], and None in place of attention weights.
    """
    if layout is None:
        raise RuntimeError("attention was called without the layout of its rows")

    query = query.squeeze(0).transpose(0, 1)
    key = key.squeeze(0).transpose(0, 1)
    value = value.squeeze(0).transpose(0, 1)
    return attend_packed(query, key, value, layout, scaling).unsqueeze(0), None


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float | None = None,
) -> Tensor:
    """Compute causal attention within each row.

    Args:
        query: [tokens, heads, size] of this rank's tokens.
        key: [tokens, key-value heads, size].
        value: [tokens, key-value heads, size].
        layout: The layout of the rows.
        scaling: Factor of the logits; None means 1 / sqrt(size).

    Returns:
        [tokens, heads, size] of this rank's tokens.
    """
    exchange = layout.exchange
    if exchange is None:
        return _attend(query, key, value, layout, scaling)

    query = exchange.to_heads(query)
    key = exchange.to_heads(key)
    value = exchange.to_heads(value)
    return exchange.to_tokens(_attend(query, key, value, layout, scaling))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float | None,
) -> Tensor:
    """Compute attention over all tokens, [tokens, heads, size] to the same shape."""
    grouped = key.shape[1] != query.shape[1]
    if layout.cumulative is not None:
        return _flash(
            query, key, value, layout.cumulative, layout.longest, scaling, grouped
        )

    if grouped and query.is_cuda:
        # Of CUDA's kernels, only flash attention (which has no float32) takes groups,
        # and the one without a kernel of its own, whose memory is quadratic.
        key, value = _repeat_heads(query, key, value)
        grouped = False

    results = []
    for bucket in layout.buckets:
        result = F.scaled_dot_product_attention(
            _rectangle(query, bucket),
            _rectangle(key, bucket),
            _rectangle(value, bucket),
            is_causal=True,
            scale=scaling,
            enable_gqa=grouped,
        )
        result = result.transpose(1, 2).flatten(0, 1)
        results.append(result.index_select(0, bucket.places))

    if layout.restore is None:
        return results[0]
    return torch.cat(results).index_select(0, layout.restore)


def _rectangle(x: Tensor, bucket: LengthBucket) -> Tensor:
    """Pad the bucket's rows, [tokens, heads, size] to [rows, heads, longest, size]."""
    padded = x.index_select(0, bucket.source).unflatten(0, bucket.shape)
    return padded.transpose(1, 2)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    grouped: bool,
) -> Tensor:
    """Compute attention with the variable-length flash kernel, in bfloat16."""
    from torch.nn.attention import varlen

    settings: dict[str, Any] = {}
    if grouped and varlen_attn_groups_heads():
        settings["enable_gqa"] = True
    elif grouped:
        key, value = _repeat_heads(query, key, value)

    result = varlen.varlen_attn(
        # Rotary embeddings leave queries and keys in float32 under autocast.
        query.bfloat16(),
        key.bfloat16(),
        value.bfloat16(),
        bounds,
        bounds,
        longest,
        longest,
        # Any number of tokens to the left and none to the right: causal.
        window_size=(-1, 0),
        scale=scaling,
        **settings,
    )
    # The kernel returns a pair only if the softmax normalizers are requested too.
    assert isinstance(result, Tensor)
    return result


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Give each head of queries its own keys and values, all [tokens, heads, size]."""
    queries_per_key = query.shape[1] // key.shape[1]
    return (
        key.repeat_interleave(queries_per_key, dim=1),
        value.repeat_interleave(queries_per_key, dim=1),
    )
