"""The findings of four ranks as one group of four, then as two groups of two.

`main` is a rank of test_ulysses.py. It leaves its findings in a file, which that
checks.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.models.loading import load_role_model
from verl_ray.columns.batch import offsets_of
from verl_ray.models.attention import plan_layout
from verl_ray.models.role_model import HeadKind, PackedRows, RoleModel
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs
from verl_ray.parallel.sharding import PackedTokens, ShardingManager
from verl_ray.parallel.ulysses import UlyssesManager

Given = tuple[int, ...]

DEADLINE_S = 240
WORLD = 4
CPU = torch.device("cpu")
LENGTHS = (5, 9, 2, 13, 17, 1)
ALL = tuple(range(len(LENGTHS)))
ROWS = {2: ((0, 1, 5, 2, 3), (4,)), 4: ((2, 0, 1), (4,), (), (5, 3))}
"""The rows that each rank is given where they are its own, by the size of the group."""
WANTED: dict[HeadKind, RequestedOutputs] = {
    "policy": RequestedOutputs(log_probs=True, entropy=True, greedy=True),
    "value": RequestedOutputs(values=True, scores=True),
}


def packed(rows: Given) -> PackedTokens:
    """Pack some of the rows; without any, one token that is not selected.

    The last token of a row and every third one are selected, never the first.
    """
    if not rows:
        nothing, token = np.empty(0, np.int64), np.zeros(1, np.int64)
        return PackedTokens(token, token, nothing, nothing, nothing, offsets_of([1]))
    tokens = [(np.arange(LENGTHS[row]) * 5 + row * 3) % 14 for row in rows]
    offsets = offsets_of([LENGTHS[row] for row in rows])
    flat, positions = (
        np.concatenate(tokens),
        np.concatenate([np.arange(LENGTHS[row]) for row in rows]),
    )
    read = np.isin(np.arange(len(flat)), offsets[1:] - 1) | (positions % 3 == 2)
    read = np.flatnonzero(read & (positions > 0))
    return PackedTokens(flat, positions, read - 1, flat[read], offsets[1:] - 1, offsets)


def weights(rows: PackedTokens, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight of each selected token and each row.

    It follows from the token's place in its row, and from the row.
    """
    at = np.searchsorted(rows.last_tokens, rows.predecessors)
    place = rows.predecessors - rows.offsets[at] + 7.0 * np.array(given, np.int64)[at]
    token_weights = torch.from_numpy(np.cos(place)).float()
    return token_weights, torch.from_numpy(np.sin(1.0 + np.array(given))).float()


def compute(model: RoleModel, manager: ShardingManager, given: Given) -> TokenOutputs:
    rows = packed(given)
    own = manager.preprocess(rows)
    inputs = PackedRows(
        torch.from_numpy(own.tokens)[None],
        torch.from_numpy(own.positions)[None],
        plan_layout(own.offsets, CPU, torch.float32, manager.exchange),
        *(
            torch.from_numpy(part)
            for part in (own.offsets, own.predecessors, own.targets, own.last_tokens)
        ),
    )
    outputs: TokenOutputs = model(inputs, WANTED[model.kind])
    return manager.postprocess(outputs)


def loss_of(outputs: TokenOutputs, given: Given) -> torch.Tensor:
    token_weights, row_weights = weights(packed(given), given)
    total = torch.zeros(())
    for name in ("log_probs", "entropy", "values", "scores"):
        value, weight = (
            getattr(outputs, name),
            row_weights if name == "scores" else token_weights,
        )
        if value is not None:
            total = total + (weight * value * (1 + value)).sum()
    return total


def learn(
    folder: Path,
    head: HeadKind,
    manager: ShardingManager,
    given: Given,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return this rank's outputs and loss, and the group's summed gradients."""
    model = load_role_model(str(folder / "model"), head, seed=3, device=CPU)
    with manager:
        found = compute(model, manager, given)
        loss = loss_of(found, given)
        loss.backward()
    gradients = {name: p.grad for name, p in model.hf.named_parameters()}
    for gradient in gradients.values() if group else ():
        dist.all_reduce(gradient, group=group)
    outputs = {
        name: value.detach() for name, value in vars(found).items() if value is not None
    }
    return {"outputs": outputs, "loss": loss.detach(), "gradients": gradients}


def nested(
    folder: Path, manager: UlyssesManager, given: Given, others: Given
) -> dict[str, Any]:
    """Run rows of other sizes in an inner block while the outer ones are in flight.

    One inner block ends with an exception.
    """
    model = load_role_model(str(folder / "model"), "policy", seed=3, device=CPU)
    found: dict[str, Any] = {}

    class Between(ShardingManager):
        def preprocess(self, rows: PackedTokens) -> PackedTokens:
            return manager.preprocess(rows)

        def postprocess(self, outputs: TokenOutputs) -> TokenOutputs:
            with manager:
                inside = compute(model, manager, others).log_probs
            assert inside is not None
            found["inside"] = inside
            try:
                with manager:
                    manager.preprocess(packed(others))
                    raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            return manager.postprocess(outputs)

        @property
        def exchange(self) -> Any:
            return manager.exchange

    with torch.no_grad(), manager:
        outside = compute(model, Between(), given).log_probs
    assert outside is not None
    return {**found, "outside": outside, "exchange left": manager.exchange}


def find(folder: Path, group: dist.ProcessGroup) -> dict[str, Any]:
    rows, rank = ROWS[dist.get_world_size(group)], dist.get_rank(group)
    found: dict[str, Any] = {}
    apart, together = UlyssesManager(group, same_rows=False), UlyssesManager(group)
    for head in WANTED:
        found[f"{head}, own rows"] = learn(folder, head, apart, rows[rank], group)
        found[f"{head}, same rows"] = learn(folder, head, together, ALL, group)
    found["nested"] = nested(folder, apart, rows[rank], rows[rank - 1])
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=DEADLINE_S),
    )  # fmt: skip
    four = dist.group.WORLD
    two, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    assert four is not None and two is not None
    torch.save(
        {4: find(folder, four), 2: find(folder, two)}, folder / f"found_{rank}.pt"
    )
    dist.barrier()
    dist.destroy_process_group()
