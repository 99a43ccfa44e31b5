"""Attention over packed rows, the seam between a transformer's layers and the kernels.

Invariant: rows lie one behind the other in a model input of shape [1, tokens], without
padding, and a token attends to the tokens before it in its own row and to nothing else.

The layers call `attend`, which is registered with transformers under `NAME`. A
`PackedLayout` tells it where rows begin. In bfloat16 on a GPU a variable-length flash
kernel reads the packed rows directly (it has no float32). Elsewhere rows of similar
length form a bucket, and each bucket is one rectangular call, so that no row is padded
to far more than its own length. Where other ranks hold the other tokens, tokens are
exchanged for heads around the kernel.

Families shape the scores of attention in four ways, which `AttentionScores` lists. A
layer that asks for anything else is refused, since a term that is left out gives other
numbers in silence. Masks that transformers makes are not read: what is in the mask
alone (a window of PhiMoE, a chunk of Llama 4) is missing here, and the proof of a model
finds that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl_ray.columns.batch import Int64
from verl_ray.errors import ModelError
from verl_ray.ops.installed_torch import varlen_attn_groups_heads
from verl_ray.parallel.head_exchange import HeadExchange

NAME = "verl_ray"

BUCKET_LENGTH_RATIO = 0.5
"""Rows share a bucket if their lengths differ by less than this factor.

The shortest row has more than this fraction of the longest row's tokens. The padding
of attention is quadratic, and every bucket costs a kernel call per layer.
"""


FLASH_HEAD_SIZE = 256
"""Largest size of a head that the flash kernel has."""

BORDERS = ("seq_idx", "cu_seq_lens_q")
"""Names by which layers with states take the borders of packed rows."""

_WITHOUT_EFFECT = frozenset(
    {"dropout", "position_ids", "cache_position", "output_attentions", "use_cache"}
).union(BORDERS)
"""Arguments of attention that change no number of a layer without dropout or cache, and
borders, which the layout has as well."""


@dataclass(frozen=True)
class AttentionScores:
    """How the products of queries and keys become weights.

    They are scaled, then capped, then masked; the sink takes its share of the softmax.
    """

    scaling: float | None = None
    """Factor of the products; None means 1 / sqrt(size of a head)."""

    window: int | None = None
    """Number of tokens that a token sees, itself included. None means all before it."""

    softcap: float | None = None
    """Largest magnitude of a score: softcap * tanh(score / softcap)."""

    sinks: Tensor | None = None
    """[heads]: a score of each head that is in the softmax and belongs to no token."""

    @property
    def are_plain(self) -> bool:
        """Whether the fused kernels of torch compute them, given a mask."""
        return self.softcap is None and self.sinks is None


PLAIN = AttentionScores()


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

    block_masks: dict[int | None, Any] = field(default_factory=dict, compare=False)
    """The masks of FlexAttention that layers have needed so far, by their window."""


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within each row, as transformers calls it.

    Args:
        module: The attention layer, which is not read.
        query: [rows, heads, tokens, size]: one row if rows are packed, else rows of
            equal length.
        key: [rows, key-value heads, tokens, size].
        value: [rows, key-value heads, tokens, value size].
        attention_mask: Not read, since the layout has the same information.
        scaling: As in `AttentionScores`.
        layout: The layout of the rows.
        sliding_window: `window` of `AttentionScores`.
        softcap: As in `AttentionScores`.
        s_aux: [heads], `sinks` of `AttentionScores`.
        others: Arguments without effect; any other that is set is refused.

    Returns:
        [rows, tokens, heads, value size], and None in place of attention weights.

    Raises:
        ModelError: The layer asks for something that is not computed here.
    """
    if layout is None:
        raise ModelError(
            f"{type(module).__name__} calls attention without the layout of its rows:"
            " it does not pass on its keyword arguments"
        )
    _refuse_others(module, others)

    shape = (query.shape[0], query.shape[2])
    # Views, if there is one row.
    query = query.transpose(1, 2).flatten(0, 1)
    key = key.transpose(1, 2).flatten(0, 1)
    value = value.transpose(1, 2).flatten(0, 1)
    scores = AttentionScores(scaling, sliding_window, softcap, s_aux)
    result = attend_packed(query, key, value, layout, scores)
    return result.unflatten(0, shape), None


def _refuse_others(module: torch.nn.Module, others: dict[str, object]) -> None:
    """Raise ModelError for an argument of attention that would be ignored."""
    if others.pop("is_causal", None) is False:
        raise ModelError(f"{type(module).__name__} sees the tokens after a token")

    unknown = sorted(
        name
        for name, value in others.items()
        if name not in _WITHOUT_EFFECT and value is not None and value is not False
    )
    if unknown:
        raise ModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to attention, which"
            " is not computed here"
        )


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scores: AttentionScores = PLAIN,
) -> Tensor:
    """Compute causal attention within each row.

    Args:
        query: [tokens, heads, size] of this rank's tokens.
        key: [tokens, key-value heads, size].
        value: [tokens, key-value heads, value size].
        layout: The layout of the rows.
        scores: How products of queries and keys become weights.

    Returns:
        [tokens, heads, value size] of this rank's tokens.
    """
    exchange = layout.exchange
    if exchange is None:
        return _attend(query, key, value, layout, scores)

    query = exchange.to_heads(query)
    key = exchange.to_heads(key)
    value = exchange.to_heads(value)
    if scores.sinks is not None:
        scores = replace(scores, sinks=exchange.own_heads(scores.sinks))
    return exchange.to_tokens(_attend(query, key, value, layout, scores))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scores: AttentionScores,
) -> Tensor:
    """Compute attention over all tokens, [tokens, heads, size] to the same shape."""
    grouped = key.shape[1] != query.shape[1]
    if layout.cumulative is not None:
        if scores.are_plain and query.shape[-1] <= FLASH_HEAD_SIZE:
            return _flash(query, key, value, layout, scores)
        return _flex(query, key, value, layout, scores)

    if grouped and (query.is_cuda or not scores.are_plain):
        # Of CUDA's kernels, only flash attention (which has no float32) takes groups,
        # and the one without a kernel of its own, whose memory is quadratic.
        key, value = _repeat_heads(query, key, value)
        grouped = False

    results = []
    for bucket in layout.buckets:
        rows = (
            _rectangle(query, bucket),
            _rectangle(key, bucket),
            _rectangle(value, bucket),
        )
        if scores.are_plain:
            result = _rectangular(*rows, scores, grouped)
        else:
            result = _by_definition(*rows, scores)
        result = result.transpose(1, 2).flatten(0, 1)
        results.append(result.index_select(0, bucket.places))

    if layout.restore is None:
        return results[0]
    return torch.cat(results).index_select(0, layout.restore)


def _rectangular(
    query: Tensor, key: Tensor, value: Tensor, scores: AttentionScores, grouped: bool
) -> Tensor:
    """Compute attention of [rows, heads, longest, size] with torch's kernels."""
    longest = query.shape[2]
    mask = None
    if scores.window is not None and scores.window < longest:
        mask = _visible(longest, scores.window, query.device)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scores.scaling,
        enable_gqa=grouped,
    )


def _by_definition(
    query: Tensor, key: Tensor, value: Tensor, scores: AttentionScores
) -> Tensor:
    """Compute attention of [rows, heads, longest, size] from its definition.

    The softmax is in float32. Its memory is quadratic in the longest row.
    """
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    products = (query @ key.transpose(-2, -1)) * scaling
    if scores.softcap is not None:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    visible = _visible(query.shape[2], scores.window, query.device)
    products = products.masked_fill(~visible, -torch.inf)

    if scores.sinks is not None:
        sinks = scores.sinks.to(products.dtype)[None, :, None, None]
        sinks = sinks.expand(*products.shape[:3], 1)
        products = torch.cat([products, sinks], -1)
    precise = torch.promote_types(products.dtype, torch.float32)
    weights = torch.softmax(products, -1, dtype=precise).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


def _visible(longest: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [longest, longest]: the token of a row sees that of a column."""
    index = torch.arange(longest, device=device)
    distance = index[:, None] - index
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _rectangle(x: Tensor, bucket: LengthBucket) -> Tensor:
    """Pad the bucket's rows, [tokens, heads, size] to [rows, heads, longest, size]."""
    padded = x.index_select(0, bucket.source).unflatten(0, bucket.shape)
    return padded.transpose(1, 2)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scores: AttentionScores,
) -> Tensor:
    """Compute attention with the variable-length flash kernel, in bfloat16."""
    from torch.nn.attention import varlen

    bounds = layout.cumulative
    assert bounds is not None, "rows are packed for this kernel"
    settings: dict[str, Any] = {}
    if key.shape[1] != query.shape[1]:
        if varlen_attn_groups_heads():
            settings["enable_gqa"] = True
        else:
            key, value = _repeat_heads(query, key, value)

    # The kernel has one size: further columns of 0 change no product and no sum.
    value_size = value.shape[-1]
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    size = max(query.shape[-1], value_size)
    if value_size != query.shape[-1]:
        query, key, value = (
            F.pad(x, (0, size - x.shape[-1])) for x in (query, key, value)
        )

    result = varlen.varlen_attn(
        # Rotary embeddings leave queries and keys in float32 under autocast.
        query.bfloat16(),
        key.bfloat16(),
        value.bfloat16(),
        bounds,
        bounds,
        layout.longest,
        layout.longest,
        # So many tokens to the left (-1: any number) and none to the right: causal.
        window_size=(-1 if scores.window is None else scores.window - 1, 0),
        scale=scaling,
        **settings,
    )
    # The kernel returns a pair only if the softmax normalizers are requested too.
    assert isinstance(result, Tensor)
    return result if value_size == size else result[..., :value_size]


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scores: AttentionScores,
) -> Tensor:
    """Compute attention with FlexAttention, which caps scores and has larger heads.

    The sink's share follows from the logarithm of the softmax's sum, through which
    gradients flow.
    """
    from torch.nn.attention import flex_attention as flex

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        if scores.softcap is None:
            return score
        return torch.tanh(score / scores.softcap) * scores.softcap

    dtype = torch.bfloat16 if query.is_cuda else query.dtype
    query, key, value = (
        x.to(dtype).transpose(0, 1).unsqueeze(0) for x in (query, key, value)
    )
    attention: Callable[..., Any] = flex.flex_attention
    if query.is_cuda:
        attention = _compiled(attention)
    result, log_sum = attention(
        query,
        key,
        value,
        score_mod=capped,
        block_mask=_block_mask(layout, scores.window, query.shape[2]),
        scale=scores.scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        return_lse=True,
    )
    if scores.sinks is not None:
        share = torch.sigmoid(log_sum - scores.sinks.float()[None, :, None])
        result = result * share.unsqueeze(-1).to(dtype)
    output: Tensor = result.squeeze(0).transpose(0, 1)
    return output


def _block_mask(layout: PackedLayout, window: int | None, tokens: int) -> Any:
    """Return which blocks of tokens see each other, made once for all layers."""
    from torch.nn.attention import flex_attention as flex

    if window in layout.block_masks:
        return layout.block_masks[window]

    bounds = layout.cumulative
    assert bounds is not None, "rows are packed as for the flash kernel"
    index = torch.arange(tokens, device=bounds.device)
    row = torch.bucketize(index, bounds[1:], right=True)

    def is_visible(_: Tensor, __: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = (row[q] == row[k]) & (q >= k)
        return visible if window is None else visible & (q - k < window)

    create: Callable[..., Any] = flex.create_block_mask
    if bounds.is_cuda:
        create = _compiled(create)
    mask = create(is_visible, None, None, tokens, tokens, bounds.device.type)
    layout.block_masks[window] = mask
    return mask


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Give each head of queries its own keys and values, all [tokens, heads, size]."""
    queries_per_key = query.shape[1] // key.shape[1]
    return (
        key.repeat_interleave(queries_per_key, dim=1),
        value.repeat_interleave(queries_per_key, dim=1),
    )
