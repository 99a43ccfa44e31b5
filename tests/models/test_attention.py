"""Attention over packed rows against one call per row, forward and backward."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from verl_ray.columns.batch import offsets_of
from verl_ray.errors import ModelError
from verl_ray.models import attention
from verl_ray.models.attention import (
    BUCKET_LENGTH_RATIO,
    AttentionScores,
    LengthBucket,
    PackedLayout,
    attend,
    attend_packed,
    plan_layout,
)

HEADS, KV_HEADS, SIZE = 4, 2, 8
CPU = torch.device("cpu")


def projections(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(
            1,
            heads,
            tokens,
            SIZE,
            generator=generator,
            dtype=torch.float64,
            requires_grad=True,
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scores: AttentionScores,
) -> torch.Tensor:
    """Compute scores, mask, softmax and sum, row by row."""
    rows = []
    for q, k, v in zip(
        *(x[0].split(lengths, dim=1) for x in (query, key, value)), strict=True
    ):
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (k, v))
        products = (q @ k.mT) * scores.scaling
        if scores.softcap is not None:
            products = scores.softcap * (products / scores.softcap).tanh()
        place = np.arange(q.shape[1])
        is_hidden = place[:, None] < place
        if scores.window is not None:
            is_hidden |= place <= place[:, None] - scores.window
        exponentials = products.exp().masked_fill(torch.from_numpy(is_hidden), 0)
        total = exponentials.sum(-1, keepdim=True)
        if scores.sinks is not None:
            total = total + scores.sinks.exp()[:, None, None]
        rows.append(exponentials / total @ v)
    return torch.cat(rows, dim=1).transpose(0, 1)[None]


SHAPES = [
    AttentionScores(0.3),
    AttentionScores(0.3, window=4),
    AttentionScores(0.3, window=4, softcap=1.5),
    AttentionScores(0.3, sinks=torch.linspace(-1, 2, HEADS, dtype=torch.float64)),
]
"""Attention of most families, of Mistral, of Gemma 2, and of gpt-oss."""


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from(SHAPES))
@settings(max_examples=90, deadline=None)
def test_equals_one_row_at_a_time_with_gradients(
    lengths: list[int], scores: AttentionScores
) -> None:
    inputs = projections(sum(lengths))
    learning = [*inputs]
    if scores.sinks is not None:
        sinks = scores.sinks.clone().requires_grad_()
        scores = replace(scores, sinks=sinks)
        learning.append(sinks)
    layout = plan_layout(offsets_of(lengths), CPU, torch.float32)
    out, weights = attend(
        torch.nn.Module(), *inputs, None, scaling=scores.scaling, layout=layout,
        sliding_window=scores.window, softcap=scores.softcap, s_aux=scores.sinks,
    )  # fmt: skip
    expected = naive(*inputs, lengths, scores)
    assert weights is None and out.shape == (1, sum(lengths), HEADS, SIZE)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    cotangent = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    found = torch.autograd.grad(out, learning, cotangent)
    for one, other in zip(
        found, torch.autograd.grad(expected, learning, cotangent), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scores", SHAPES, ids=str)
def test_the_kernel_for_caps_and_sinks_computes_the_same(
    scores: AttentionScores,
) -> None:
    """On a GPU it is compiled; here it is what it is compiled from, without gradients."""
    lengths = [3, 30, 9]
    inputs = [x.detach().float() for x in projections(sum(lengths))]
    offsets = offsets_of(lengths)
    if scores.sinks is not None:
        scores = replace(scores, sinks=scores.sinks.float())
    packed = [x[0].transpose(0, 1) for x in inputs]
    expected = attend_packed(*packed, plan_layout(offsets, CPU, torch.float32), scores)
    layout = PackedLayout(torch.as_tensor(offsets, dtype=torch.int32), 30, (), None)
    actual = attention._flex(*packed, layout, scores)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


def test_values_may_have_another_size_and_rows_of_one_length_another_shape() -> None:
    query, key, value = (x.detach() for x in projections(12))
    value = value[..., :5]
    layout = plan_layout(offsets_of([6, 6]), CPU, torch.float32)
    packed, _ = attend(torch.nn.Module(), query, key, value, None, layout=layout)
    assert packed.shape == (1, 12, HEADS, 5)
    rows = [torch.cat(x.split(6, dim=2)) for x in (query, key, value)]
    apart, _ = attend(torch.nn.Module(), *rows, None, layout=layout)
    assert torch.equal(apart.flatten(0, 1)[None], packed)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "passes position_bias to attention"),
        ({"is_causal": False}, "sees the tokens after a token"),
    ],
)
def test_what_is_not_computed_is_refused(
    argument: dict[str, Any], message: str
) -> None:
    layout = plan_layout(offsets_of([3]), CPU, torch.float32)
    with pytest.raises(ModelError, match=message):
        attend(torch.nn.Module(), *projections(3), None, layout=layout, **argument)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30))
@settings(deadline=None)
def test_buckets_hold_every_token_once_and_rows_of_similar_length(
    lengths: list[int],
) -> None:
    offsets = offsets_of(lengths)
    layout = plan_layout(offsets, CPU, torch.float32)
    held = np.concatenate(
        [bucket.source[bucket.places].numpy() for bucket in layout.buckets]
    )
    assert sorted(held) == list(range(sum(lengths)))
    if layout.restore is not None:
        np.testing.assert_array_equal(
            held[layout.restore.numpy()], np.arange(sum(lengths))
        )
    for bucket in layout.buckets:
        assert (
            len(bucket.places)
            > bucket.shape[0] * bucket.shape[1] * BUCKET_LENGTH_RATIO - bucket.shape[0]
        )
    assert (
        len(layout.buckets) <= 9
    )  # log2(500): few kernel calls, whatever the number of rows


def test_rows_of_one_length_need_no_padding_and_no_reordering() -> None:
    layout = plan_layout(offsets_of([5, 5, 5]), CPU, torch.float32)
    (bucket,) = layout.buckets
    assert bucket.shape == (3, 5) and layout.restore is None
    assert bucket.source.tolist() == list(range(15))


def test_the_kernel_never_sees_another_row() -> None:
    """Changing the tokens of one row changes the outputs of no other row by a bit."""
    lengths = [3, 30, 4]
    layout = plan_layout(offsets_of(lengths), CPU, torch.float32)
    inputs = [x.detach().float() for x in projections(sum(lengths))]
    before, _ = attend(torch.nn.Module(), *inputs, None, layout=layout)
    for x in inputs:
        x[:, :, 3:33] += 1
    after, _ = attend(torch.nn.Module(), *inputs, None, layout=layout)
    assert torch.equal(before[:, :3], after[:, :3]) and torch.equal(
        before[:, 33:], after[:, 33:]
    )
    assert not torch.equal(before[:, 3:33], after[:, 3:33])


def test_without_scaling_it_is_the_usual_one() -> None:
    inputs = projections(6)
    out, _ = attend(
        torch.nn.Module(),
        *inputs,
        None,
        layout=plan_layout(offsets_of([6]), CPU, torch.float32),
    )
    expected = F.scaled_dot_product_attention(
        *inputs, is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_a_call_without_a_layout_is_refused() -> None:
    with pytest.raises(ModelError, match="without the layout"):
        attend(torch.nn.Module(), *projections(3), None)


def attention_of_2_11(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:  # fmt: skip
    """Stand in for torch 2.11's kernel.

    That kernel runs only on GPUs and refuses different numbers of heads.
    """
    assert (
        query.shape[1] == key.shape[1] == value.shape[1]
        and window_size == (-1, 0)
        and max_q == max_k
    )
    ends = cu_seq_k.tolist()
    rows = [
        x.transpose(0, 1)[None].split(np.diff(ends).tolist(), dim=2)
        for x in (query, key, value)
    ]
    row_outputs = [
        F.scaled_dot_product_attention(*row, is_causal=True, scale=scale)
        for row in zip(*rows, strict=True)
    ]
    return torch.cat(row_outputs, dim=2)[0].transpose(0, 1)


def test_a_kernel_without_groups_gets_repeated_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offsets = offsets_of([3, 9, 1])
    inputs = [x.detach().bfloat16().requires_grad_() for x in projections(13)]
    expected = attend(
        torch.nn.Module(), *inputs, None, 0.5, plan_layout(offsets, CPU, torch.bfloat16)
    )[0]
    (expected.float() ** 2).sum().backward()
    gradients = [x.grad.clone() for x in inputs if x.grad is not None]

    monkeypatch.setattr(varlen, "varlen_attn", attention_of_2_11)
    flash = PackedLayout(torch.as_tensor(offsets, dtype=torch.int32), 9, (), None)
    again = [x.detach().requires_grad_() for x in inputs]
    found = attend(torch.nn.Module(), *again, None, 0.5, flash)[0]
    (found.float() ** 2).sum().backward()
    assert torch.allclose(found, expected, atol=2e-2)
    for x, gradient in zip(again, gradients, strict=True):
        assert x.grad is not None
        assert (
            float((x.grad - gradient).norm() / gradient.norm()) < 0.02
        )  # bfloat16 rounds by 0.004


def test_the_kernel_of_this_torch_groups_heads_itself() -> None:
    """Shapes are checked on a pretended GPU.

    Fewer heads of keys go in, and as many heads as the queries have come out.
    """
    with FakeTensorMode():
        query, key, value = (
            torch.empty(13, heads, SIZE, device="cuda")
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        bounds = torch.empty(4, dtype=torch.int32, device="cuda")
        found = attend_packed(query, key, value, PackedLayout(bounds, 9, (), None))
    assert (
        found.shape == (13, HEADS, SIZE)
        and found.dtype == torch.bfloat16
        and found.device.type == "cuda"
    )


def test_float32_on_a_gpu_has_no_groups_which_would_take_quadratic_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads_of_calls = []
    attention = F.scaled_dot_product_attention

    def watched(*tensors: torch.Tensor, **settings: object) -> torch.Tensor:
        heads_of_calls.append([x.shape[1] for x in tensors])
        assert not settings["enable_gqa"]
        return attention(*tensors, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    with FakeTensorMode():
        device = torch.device("cuda")
        source, places = (
            torch.empty(count, dtype=torch.int64, device=device) for count in (18, 14)
        )
        bucket = LengthBucket((2, 9), source=source, places=places)
        layout = PackedLayout(None, 9, (bucket,), None)
        query, key, value = (
            torch.empty(14, heads, SIZE, device=device)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        out = attend_packed(query, key, value, layout)
    assert heads_of_calls == [[HEADS, HEADS, HEADS]]
    assert out.shape == (14, HEADS, SIZE)
