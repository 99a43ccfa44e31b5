"""Log-probs, entropy and gradients against naive float64, and the bound on memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from scripts.bench.peaks import peak_bytes
from tests.ops.naive import Watch, naive, naive_log_p
from verl_ray.errors import EngineError
from verl_ray.ops import log_probs as module
from verl_ray.ops.log_probs import head_log_probs
from verl_ray.ops.outputs import RequestedOutputs, TopTokens

T, H, V = 23, 8, 37


@pytest.fixture(params=["kept", "recomputed"])
def path(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Take both paths: logits kept for the backward pass, and recomputed by chunk."""
    monkeypatch.setattr(module, "KEPT_LOGITS", 2**40 if request.param == "kept" else 0)
    yield request.param


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((T, H), (V, H), (V,))
    )
    targets = torch.randint(V, (T,), generator=generator)
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        bias.requires_grad_(),
        targets,
    )


def test_numbers_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [3.0, 0.0]]).log1p()  # odds 1 : 1 and 4 : 1
    targets = torch.tensor([0, 1])
    colder = head_log_probs(
        logits, torch.eye(2), targets, requested=RequestedOutputs(temperature=0.5)
    )
    assert colder.log_probs.exp().tolist() == pytest.approx([1 / 2, 1 / 17])  # 16 : 1
    outputs = head_log_probs(logits, torch.eye(2), targets, requested=RequestedOutputs(entropy=True, greedy=True, squared_probs=True))  # fmt: skip
    assert outputs.log_probs.exp().tolist() == pytest.approx([1 / 2, 1 / 5])
    assert outputs.entropy is not None and outputs.greedy is not None
    # 1/4 + 1/4 and 16/25 + 1/25
    assert outputs.squared_probs is not None
    assert outputs.squared_probs.tolist() == pytest.approx([0.5, 0.68])
    assert not outputs.squared_probs.requires_grad
    # H(4/5, 1/5) = log 5 - 0.8 log 4
    assert outputs.entropy.tolist() == pytest.approx([0.693147, 0.500402], abs=1e-6)
    assert outputs.greedy.tolist() == [
        True,
        False,
    ]  # the first of equals is the greedy one


@pytest.mark.parametrize("chunk", [1, 5, 23, 64, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_head_equals_the_naive_float64_computation(
    path: str, chunk: int | None, temperature: float, with_entropy: bool
) -> None:
    hidden, weight, bias, targets = inputs()
    slopes = torch.randn(2, T, generator=torch.Generator().manual_seed(1))

    expected, expected_entropy = naive(hidden, weight, bias, targets, temperature)
    loss = (expected * slopes[0]).sum() + (
        (expected_entropy * slopes[1]).sum() if with_entropy else 0
    )
    # The target itself is among the candidates, and twice at some places.
    candidates = torch.stack([targets, torch.arange(T) % V, targets * 0 + 3], dim=1)
    log_p = naive_log_p(hidden, weight, bias, temperature)
    loss = loss + (log_p.gather(1, candidates) * slopes[1, :, None]).sum()
    expected_grads = torch.autograd.grad(loss, (hidden, weight, bias))

    outputs = head_log_probs(
        hidden,
        weight,
        targets,
        bias=bias,
        candidates=candidates,
        chunk_tokens=chunk,
        requested=RequestedOutputs(
            temperature=temperature, entropy=with_entropy, top=TopTokens(4, V - 2)
        ),
    )
    loss = (outputs.log_probs * slopes[0]).sum()
    assert outputs.candidate_log_probs is not None and outputs.top_tokens is not None
    loss = loss + (outputs.candidate_log_probs * slopes[1, :, None]).sum()
    top = log_p[:, : V - 2].topk(4, dim=1)
    assert torch.equal(outputs.top_tokens, top.indices)
    assert outputs.top_log_probs is not None
    assert not outputs.top_log_probs.requires_grad
    torch.testing.assert_close(
        outputs.top_log_probs.double(), top.values, rtol=1e-5, atol=1e-5
    )
    assert (outputs.entropy is not None) == with_entropy and outputs.greedy is None
    if outputs.entropy is not None:
        assert outputs.entropy.dtype == torch.float32
        torch.testing.assert_close(
            outputs.entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5
        )
        loss = loss + (outputs.entropy * slopes[1]).sum()
    assert outputs.log_probs.dtype == torch.float32
    torch.testing.assert_close(
        outputs.log_probs.double(), expected, rtol=1e-5, atol=1e-5
    )
    for grad, expected_grad in zip(
        torch.autograd.grad(loss, (hidden, weight, bias)), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_equal_the_naive_float64_computation(
    chunk: int | None, temperature: float, softcap: float | None
) -> None:
    logits = (
        torch.randn(T, V, generator=torch.Generator().manual_seed(2))
        .mul(5)
        .requires_grad_()
    )
    targets, slopes = torch.arange(T) % V, torch.linspace(-1, 1, T)
    capped = logits.double()
    if softcap is not None:
        capped = softcap * (capped / softcap).tanh()
    expected, _ = naive(capped, torch.eye(V), None, targets, temperature)
    (expected_grad,) = torch.autograd.grad((expected * slopes).sum(), logits)
    kept = logits.detach().clone()
    found = head_log_probs(logits, torch.eye(V), targets, chunk_tokens=chunk, softcap=softcap, requested=RequestedOutputs(temperature=temperature)).log_probs  # fmt: skip
    (grad,) = torch.autograd.grad((found * slopes).sum(), logits)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, kept)


def test_entropy_alone_has_a_gradient(path: str) -> None:
    hidden, weight, _, targets = inputs()
    _, expected = naive(hidden, weight, None, targets, 1.0)
    (expected_grad,) = torch.autograd.grad(expected.sum(), hidden)
    entropy = head_log_probs(
        hidden, weight, targets, requested=RequestedOutputs(entropy=True)
    ).entropy
    assert entropy is not None
    (grad,) = torch.autograd.grad(entropy.sum(), hidden)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_softmaxed_in_float32(path: str) -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    logits = (hidden @ weight.T).detach()
    expected, expected_entropy = naive(logits, torch.eye(V), None, targets, 1.0)
    outputs = head_log_probs(
        hidden,
        weight,
        targets,
        chunk_tokens=5,
        requested=RequestedOutputs(entropy=True),
    )
    assert outputs.entropy is not None
    torch.testing.assert_close(
        outputs.log_probs.double(), expected, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        outputs.entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5
    )
    outputs.log_probs.sum().backward()
    exact, _ = naive(hidden, weight, None, targets, 1.0)
    expected_grad = torch.autograd.grad(exact.sum(), weight)[0]
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad, expected_grad, rtol=0.05, atol=0.05)


def test_weight_gradient_does_not_lose_late_chunks_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are 600 tokens with the same gradient, one chunk each.

    A bfloat16 sum stops growing at 256 of them.
    """
    monkeypatch.setattr(module, "KEPT_LOGITS", 0)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(600, 1, dtype=torch.bfloat16)
    head_log_probs(
        hidden, weight, torch.zeros(600, dtype=torch.int64), chunk_tokens=1
    ).log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([300, -300], rel=0.01)


def test_autocast_gives_forward_and_backward_the_same_logits(path: str) -> None:
    hidden, weight, _, targets = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = head_log_probs(
            hidden, weight, targets, requested=RequestedOutputs(entropy=True)
        )
    expected = head_log_probs(
        hidden.bfloat16(),
        weight.bfloat16(),
        targets,
        requested=RequestedOutputs(entropy=True),
    )
    assert found.entropy is not None and expected.entropy is not None
    assert torch.equal(found.log_probs, expected.log_probs) and torch.equal(
        found.entropy, expected.entropy
    )
    grads = torch.autograd.grad(
        found.log_probs.sum() + found.entropy.sum(), (hidden, weight)
    )
    expected_grads = torch.autograd.grad(
        expected.log_probs.sum() + expected.entropy.sum(), (hidden, weight)
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))


def test_a_frozen_head_or_frozen_hidden_states(path: str) -> None:
    hidden, weight, _, targets = inputs()
    head_log_probs(hidden, weight.detach(), targets).log_probs.sum().backward()
    head_log_probs(hidden.detach(), weight, targets).log_probs.sum().backward()
    expected, _ = naive(hidden, weight, None, targets, 1.0)
    for tensor, grad in zip(
        (hidden, weight),
        torch.autograd.grad(expected.sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-5, atol=1e-5)


def test_no_tokens(path: str) -> None:
    _, weight, _, _ = inputs()
    outputs = head_log_probs(
        torch.empty(0, H),
        weight,
        torch.empty(0, dtype=torch.int64),
        requested=RequestedOutputs(entropy=True, greedy=True),
    )
    outputs.log_probs.sum().backward()
    assert (
        outputs.log_probs.shape == (0,)
        and weight.grad is not None
        and not weight.grad.any()
    )


def test_no_float32_copy_of_all_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bfloat16 inputs, the largest float32 tensor is one chunk.

    This holds on both paths of the head and for given logits. If logits are recomputed,
    no tensor of any type is larger.
    """
    hidden, weight, targets = (
        torch.randn(64, 4).bfloat16(),
        torch.randn(50, 4).bfloat16(),
        torch.zeros(64).long(),
    )
    for kept in (0, 2**40):
        monkeypatch.setattr(module, "KEPT_LOGITS", kept)
        with Watch() as seen:
            outputs = head_log_probs(hidden.requires_grad_(), weight.requires_grad_(), targets, chunk_tokens=6, requested=RequestedOutputs(temperature=0.5, entropy=True, greedy=True, squared_probs=True))  # fmt: skip
            assert outputs.entropy is not None
            (outputs.log_probs.sum() + outputs.entropy.sum()).backward()
        assert seen.numel_float32 == 6 * 50
        assert seen.numel == (64 * 50 if kept else 6 * 50)


def test_a_chunk_is_released_before_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of four chunks of 128 tokens and 1000 words, one exists at a time.

    That is two tensors without gradients, and three with them.
    """
    monkeypatch.setattr(module, "KEPT_LOGITS", 0)
    hidden, weight = (torch.randn(size, 16, requires_grad=True) for size in (512, 1000))
    targets = torch.zeros(512).long()
    beside = 4 * (weight.numel() + hidden.numel() + 10 * len(targets))

    def update() -> None:
        outputs = head_log_probs(
            hidden,
            weight,
            targets,
            chunk_tokens=128,
            requested=RequestedOutputs(temperature=0.8, entropy=True),
        )
        assert outputs.entropy is not None
        loss = outputs.log_probs.sum() + outputs.entropy.sum()
        torch.autograd.grad(loss, (hidden, weight))

    def forward() -> None:
        with torch.no_grad():
            head_log_probs(hidden, weight, targets, chunk_tokens=128, requested=RequestedOutputs(temperature=0.8, entropy=True, greedy=True, squared_probs=True))  # fmt: skip

    chunk = 4 * 128 * 1000
    assert 2 * chunk <= peak_bytes(forward) <= 2 * chunk + beside
    assert 3 * chunk <= peak_bytes(update) <= 3 * chunk + beside


def test_nothing_makes_the_host_wait_for_the_device(path: str) -> None:
    """On the meta device any `.item()` or branch on a value raises."""
    hidden, weight, bias, targets = (tensor.detach().to("meta") for tensor in inputs())
    outputs = head_log_probs(hidden.requires_grad_(), weight, targets, bias=bias, requested=RequestedOutputs(temperature=0.5, entropy=True, greedy=True, squared_probs=True))  # fmt: skip
    assert outputs.entropy is not None
    (outputs.log_probs.sum() + outputs.entropy.sum()).backward()


def test_misuse_is_named() -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(
        EngineError,
        match=r"width 8 per target; found rows of shape \(23, 8\) and targets of shape \(22,",
    ):
        head_log_probs(hidden, weight, targets[1:])
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(EngineError, match=r"must be > 0 \(rollout.temperature\)"):
            head_log_probs(
                hidden,
                weight,
                targets,
                requested=RequestedOutputs(temperature=temperature),
            )
