"""The proof that kernels of layers with states keep packed rows apart, on a GPU.

A model is proven on the CPU without them (`models/state_kernels.py`), and here is what
they add: rows may be packed.

Invariant: both sides of a comparison are computed here, in the same type, so that
rounding is the only other difference. Means are compared, since rounding may send a
token to another expert; a state that leaks moves all tokens of a row.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.models.state_kernels import installed_kernels
from verl_ray.processes.trial import Tell, run_trial, try_in_child
from verl_ray.proofs.claims import Claim

if TYPE_CHECKING:
    from torch import Tensor

    from verl_ray.engine.plain import PlainEngine
    from verl_ray.proofs.engine_proof import EngineClaims

DEADLINE_S = 300.0
"""Longest time of a proof, in which kernels are compiled."""

STATEMENTS = {
    "neighbours": ("no row sees another row, by kernels on a GPU", 1e-3),
    "log_probs": ("log-probs of packed rows, by kernels on a GPU", 2e-2),
    "gradients": ("gradients of packed rows, by kernels on a GPU", 5e-2),
}
"""What is claimed of mean log-probs in nats, and of the norm of the difference of
gradients relative to their norm.

In bfloat16 on a CPU, with borders that are obeyed, the differences are 0, 2e-5 and
2e-3; with states that leak they are at least 0.08, 0.1 and 0.4.
"""


def prove_borders(
    folder: Path, engine: EngineClaims, *, has_experts: bool
) -> list[Claim]:
    """Compare packed rows with rows of one length on a GPU, by the kernels there.

    Args:
        folder: The directory of the cut model.
        engine: What holds on the CPU, without the kernels.
        has_experts: Whether the model has experts.

    Returns:
        The claims; none for a model that packs rows without kernels, or where there are
        none or no GPU.
    """
    if not installed_kernels() or engine.packs_rows or not engine.trains:
        return []
    fields = {"folder": str(folder), "has_experts": has_experts}
    messages, cause = try_in_child(__name__, fields, DEADLINE_S)
    result = next((each for each in messages if each.kind == "ready"), None)
    if result is not None and not result.fields["has_gpu"]:
        return []
    numbers = {} if result is None else result.fields["numbers"]
    failure = cause if result is None else result.fields["failure"]
    return [
        Claim(statement, numbers.get(name), tolerance, failure)
        for name, (statement, tolerance) in STATEMENTS.items()
    ]


# ------------------------------------------------------------------------- the process


def main(connection: socket.socket) -> None:
    """Compute the differences in this process, for the one at the other end."""
    run_trial(connection, _compare)


def _compare(fields: dict[str, Any], tell: Tell) -> Mapping[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"has_gpu": False}
    numbers, failure = {}, ""
    try:
        numbers = differences(
            Path(fields["folder"]), has_experts=fields["has_experts"], on_gpu=True
        )
    except Exception as error:  # whatever a kernel raises
        failure = f"{type(error).__name__}: {error}"
    return {"has_gpu": True, "numbers": numbers, "failure": failure}


def differences(folder: Path, *, has_experts: bool, on_gpu: bool) -> dict[str, float]:
    """Return the number of each of `STATEMENTS`."""
    import torch

    from verl_ray.engine.single import plain_engine
    from verl_ray.learning.objectives import SupervisedObjective
    from verl_ray.proofs.rows import LENGTHS, batch_of, random_rows

    packed, alone = (
        plain_engine(
            folder,
            tokens=sum(LENGTHS),
            balance=0.0 if has_experts else None,
            packs_rows=packs_rows,
            on_gpu=on_gpu,
        )
        for packs_rows in (True, False)
    )
    rows = random_rows()
    changed = [rows[0] ^ 1, *rows[1:]]
    ours = _log_probs(packed, rows)
    gradients = []
    for engine in (packed, alone):
        engine.forward_backward(batch_of(rows), SupervisedObjective())
        parts = [
            value.grad.float().flatten()
            for value in engine.model.parameters()
            if value.grad is not None
        ]
        gradients.append(torch.cat(parts))

    first = LENGTHS[0]
    unlike = gradients[0] - gradients[1]
    return {
        "neighbours": _mean(ours[first:] - _log_probs(packed, changed)[first:]),
        "log_probs": _mean(ours - _log_probs(alone, rows)),
        "gradients": float(unlike.norm() / gradients[1].norm()),
    }


def _log_probs(engine: PlainEngine, rows: list[Tensor]) -> Tensor:
    """Return the log-prob of each token, 0 for the first ones of rows."""
    import torch

    from verl_ray.ops.outputs import RequestedOutputs
    from verl_ray.proofs.rows import batch_of

    outputs = engine.forward(batch_of(rows), RequestedOutputs(log_probs=True))
    assert outputs.log_probs is not None
    return torch.from_numpy(outputs.log_probs)


def _mean(values: Tensor) -> float:
    return float(values.abs().mean())
