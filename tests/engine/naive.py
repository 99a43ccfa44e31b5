"""The reference of the contract tests: plain transformers and formulas as published.

Everything is in float64, row by row, without padding or packing.
"""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.engine import inputs


def reference_model(
    folder: Path, name: str, head: str = "policy", value_head: Tensor | None = None
) -> torch.nn.Module:
    family: Any = (
        AutoModelForCausalLM if head == "policy" else AutoModelForSequenceClassification
    )
    more = {} if head == "policy" else {"num_labels": 1}
    model = family.from_pretrained(
        folder / name,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
        **more,
    )
    if value_head is not None:
        with torch.no_grad():
            model.score.weight.copy_(value_head)
    return model.double()


def with_adapter(
    folder: Path, head: str, adapter: str, where: str = "engine_1"
) -> torch.nn.Module:
    """Load an adapter as peft does. A new head is in the adapter's file, too."""
    base = reference_model(folder, "qwen3", head)
    model = PeftModel.from_pretrained(
        base, folder / f"adapter_{where}" / adapter, is_trainable=True
    )
    return model.double().base_model.model


def naive_logits(model: Any, tokens: np.ndarray) -> Tensor:
    """Return the logits of one row, [tokens, vocabulary] in float64."""
    return model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]


def naive_values(model: Any, tokens: np.ndarray) -> Tensor:
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model.score(model.model(input_ids=ids).last_hidden_state)[0, :, 0]


def by_row(rows: Any) -> Iterator[tuple[slice, Tensor]]:
    """Yield each row's tokens, and the indices within the row that the loss reads."""
    for start, end in zip(rows.offsets, rows.offsets[1:], strict=False):
        yield (
            slice(start, end),
            torch.from_numpy(np.flatnonzero(rows.response_mask[start:end])),
        )


def naive_policy_loss(model: Any, rows: Any, *, corrected: bool = False) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, (row, read) in enumerate(by_row(rows)):
        logits = naive_logits(model, rows.tokens[row])[read - 1] / inputs.TEMPERATURE
        log_p = torch.log_softmax(logits, -1)
        chosen = log_p.gather(
            1, torch.from_numpy(rows.tokens[row].astype(np.int64))[read, None]
        )[:, 0]
        old, ref, advantage, sampler = (
            torch.tensor(column[row], dtype=torch.float64)[read]
            for column in (
                rows.old_log_probs,
                rows.ref_log_probs,
                rows.advantages,
                rows.rollout_log_probs,
            )
        )
        ratio = (chosen - old).exp()
        clipped = ratio.clamp(1 - inputs.CLIP, 1 + inputs.CLIP)
        loss = torch.maximum(-advantage * ratio, -advantage * clipped)
        loss = torch.where(
            advantage < 0, torch.minimum(loss, -inputs.DUAL * advantage), loss
        )
        if corrected:
            weight = float((chosen - sampler).mean().exp().detach())
            if weight > inputs.UPPER:
                continue  # the whole row is left out
            loss = -weight * advantage * chosen
        loss = loss - inputs.ENTROPY * -(log_p.exp() * log_p).sum(-1)
        divergence = (ref - chosen).exp() - 1 - (ref - chosen)
        loss = loss + inputs.KL * divergence.clamp(max=10)
        if not corrected:
            loss = loss + inputs.DISTILLED * naive_jsd(log_p, rows, row, read)
        total = total + float(rows.loss_weight[i]) * loss.sum()
    return total


def naive_jsd(log_p: Tensor, rows: Any, row: slice, read: Tensor) -> Tensor:
    """Return GKD's divergence of a teacher's three tokens and of all others together.

    Args:
        log_p: float64 [read, vocabulary].
        rows: All rows.
        row: The tokens of one.
        read: Which of these are learned from.
    """
    candidates = torch.from_numpy(rows.candidates[row].astype(np.int64))[read]
    student = log_p.gather(1, candidates).exp()
    teacher = torch.from_numpy(rows.teacher_log_probs[row]).double()[read].exp()
    student, teacher = (
        torch.cat([p, 1 - p.sum(1, keepdim=True)], 1) for p in (student, teacher)
    )
    mixture = inputs.MIXED * teacher + (1 - inputs.MIXED) * student
    from_teacher = (teacher * (teacher / mixture).log()).sum(1)
    from_student = (student * (student / mixture).log()).sum(1)
    return inputs.MIXED * from_teacher + (1 - inputs.MIXED) * from_student


def naive_experts_loss(
    model: Any, rows: Any, loss_of: Callable[[Any, Any], Tensor] = naive_policy_loss
) -> Tensor:
    """Add transformers' own balance loss of each row and layer to another loss.

    It is weighted as the row's tokens are, or half as the row's pair is.
    """
    total = loss_of(model, rows)
    for i, (row, read) in enumerate(by_row(rows)):
        ids = torch.from_numpy(rows.tokens[row].astype(np.int64))[None]
        said = model.model(input_ids=ids, output_router_logits=True).router_logits
        balance = torch.stack(
            [load_balancing_loss_func((layer,), 4, 2) for layer in said]
        ).mean()
        losses = len(read) if rows.unit is None else 0.5
        total = total + inputs.BALANCE * float(rows.loss_weight[i]) * losses * balance
    return total


def naive_replayed_loss(model: Any, rows: Any) -> Tensor:
    """Return the loss with the experts that rows have.

    The last token of a row has none: its router chooses the best two.
    """
    experts = [rows.routed_experts[row] for row, _ in by_row(rows)]
    current: list[np.ndarray] = []

    def route(gate: Any, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if layer == 0:
            current[:] = [experts.pop(0)]
        scores = (hidden.flatten(0, -2) @ gate.weight.T).softmax(-1)
        best = scores[-1:].topk(2, -1).indices
        recorded = torch.tensor(current[0][:-1, layer].astype(np.int64))
        chosen = torch.cat([recorded, best])
        weights = scores.gather(1, chosen)
        return scores, weights / weights.sum(1, keepdim=True), chosen

    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.forward = functools.partial(route, block.mlp.gate, layer)
    return naive_policy_loss(model, rows)


def naive_value_loss(model: Any, rows: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, (row, read) in enumerate(by_row(rows)):
        values = naive_values(model, rows.tokens[row])[read - 1]
        old, returns = (
            torch.tensor(c[row], dtype=torch.float64)[read]
            for c in (rows.old_values, rows.returns)
        )
        held = old + (values - old).clamp(-inputs.VALUE_CLIP, inputs.VALUE_CLIP)
        worse = torch.maximum((values - returns) ** 2, (held - returns) ** 2)
        total = total + float(rows.loss_weight[i]) * 0.5 * worse.sum()
    return total


def naive_preference_loss(model: Any, rows: Any) -> Tensor:
    scores = torch.stack(
        [naive_values(model, rows.tokens[row])[-1] for row, _ in by_row(rows)]
    )
    d, margin = (
        scores[0::2] - scores[1::2],
        torch.tensor(rows.margin[0::2], dtype=torch.float64),
    )
    right, flipped = torch.sigmoid(d - margin).log(), torch.sigmoid(-d - margin).log()
    loss = -(1 - inputs.SMOOTHING) * right - inputs.SMOOTHING * flipped
    return (torch.tensor(rows.loss_weight[0::2], dtype=torch.float64) * loss).sum()


def naive_responses_loss(model: Any, rows: Any) -> Tensor:
    """Return DPO's loss of each pair, with RPO's likelihood of its first response."""
    sums, lengths = _log_probs_of_responses(model, rows)
    ratio = sums - torch.tensor(rows.ref_log_prob)
    margin = ratio[0::2] - ratio[1::2]
    likelihood = sums[0::2] / lengths[0::2]
    loss = -torch.sigmoid(inputs.BETA * margin).log() - inputs.RPO * likelihood
    return (torch.tensor(rows.loss_weight[0::2], dtype=torch.float64) * loss).sum()


def naive_labels_loss(model: Any, rows: Any) -> Tensor:
    """Return KTO's loss of each response."""
    sums, _ = _log_probs_of_responses(model, rows)
    ratio = sums - torch.tensor(rows.ref_log_prob)
    sign = torch.where(torch.tensor(rows.desirable), 1.0, -1.0)
    value = torch.sigmoid(inputs.BETA * sign * (ratio - inputs.DIVERGENCE))
    weight = torch.where(sign > 0, 1.0, inputs.UNDESIRABLE)
    weight = weight * torch.tensor(rows.loss_weight, dtype=torch.float64)
    return (weight * (1 - value)).sum()


def _log_probs_of_responses(model: Any, rows: Any) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each response, and the number of its tokens."""
    sums, lengths = [], []
    for row, read in by_row(rows):
        log_p = naive_logits(model, rows.tokens[row])[read - 1].log_softmax(-1)
        target = torch.tensor(rows.tokens[row], dtype=torch.int64)[read]
        sums.append(log_p.gather(1, target[:, None]).sum())
        lengths.append(len(read))
    return torch.stack(sums), torch.tensor(lengths)


def rate_of(step: int) -> float:
    """Return a rate: two warm-up steps, then a cosine from 2e-3 to 2e-4 at step 10."""
    if step < 2:
        return 1e-3 * (step + 1)
    return 2e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 8)))


def naive_training(
    model: Any, rows: Any, loss_of: Callable[[Any, Any], Tensor], steps: int = 3
) -> dict[str, list[float]]:
    config = inputs.OPTIMIZER
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in parameters if p.dim() > 1],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ],
        betas=config.betas,
        eps=config.eps,
        foreach=False,
    )
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, rows)
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters))  # type: ignore[arg-type]
        for p in parameters:
            p.grad *= min(1.0, config.max_grad_norm / (float(norm) + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return {"loss": losses, "norm": norms}
