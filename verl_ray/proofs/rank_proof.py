"""The proof that ranks which share a model compute it as its family's own code does.

Invariant: the ranks are those of a run: processes with a group, each with rows of its
own, whose engine reads a directory, learns and writes one. They run in processes of
their own, since megatron-core changes the state of torch.

Gradients are read off the weights after one step: AdamW with an `eps` that is far above
every gradient steps by the gradient itself, so each backend shows them as it writes its
weights, and nothing has to know how it holds them.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.backends import BACKENDS
from verl_ray.backends.base import BackendSettings, ModelFacts
from verl_ray.config.versions import missing_packages
from verl_ray.errors import ModelError
from verl_ray.models.state_kernels import hide_kernels
from verl_ray.processes.trial import Tell, run_trial, try_in_child
from verl_ray.proofs.claims import Claim

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from verl_ray.engine.base import Engine
    from verl_ray.proofs.engine_proof import RowByRow

DEADLINE_S = 300.0
"""Longest time of ranks, which takes 10 s for most families."""

COLLECTIVE_S = 120.0
"""Longest time that a rank waits for another one."""

MICRO_BATCH = 34
"""Tokens of a micro-batch: of the longest row."""

SHARES = {1: ((0, 1, 2, 3),), 2: ((0, 2, 3), (1,))}
"""The rows of each rank, by how many have rows of their own. One has two micro-batches,
and the other one has to fill up with a micro-batch of no rows."""

RATE = 1e6
"""Learning rate. A step changes a weight by the gradient, relative to the largest."""

_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class RankClaims:
    """The claims about ranks of a backend that share a model."""

    backend: str

    claims: Sequence[Claim]

    no_place: str
    """Why the backend has no place for the model on these ranks, or on more of them;
    empty where it has one."""

    @property
    def agrees(self) -> bool:
        """Whether it has a place for the model, and every claim holds."""
        return not self.no_place and all(claim.holds for claim in self.claims)


@dataclass(frozen=True)
class Expected:
    """The results that ranks have to compute, and the directory that they read.

    Args:
        folder: The directory of the cut model.
        stepped: The directory of the model after a step.
        log_probs: float32 [tokens - 1] of each row.
        settings: The contents of the cut model's config.json.
        largest_gradient: The largest element of a gradient.
        packs_rows: Whether rows are packed.
        has_experts: Whether the model has experts.
    """

    folder: Path
    stepped: Path
    log_probs: Sequence[Tensor]
    settings: Mapping[str, object]
    largest_gradient: float
    packs_rows: bool
    has_experts: bool


def expect(
    reference: PreTrainedModel,
    row_by_row: RowByRow,
    folder: Path,
    *,
    packs_rows: bool,
    has_experts: bool,
) -> Expected:
    """Let the reference take a step, and write it beside its directory.

    Args:
        reference: The cut model, whose weights change.
        row_by_row: Its log-probs and gradients.
        folder: Its directory.
        packs_rows: Whether the engine packs rows.
        has_experts: Whether the model has experts.
    """
    import torch

    gradients = row_by_row.gradients
    largest = max(float(value.abs().max()) for value in gradients.values())
    with torch.no_grad():
        for name, value in reference.named_parameters():
            if name in gradients:
                value.sub_(gradients[name], alpha=1 / largest)
    stepped = folder.with_name(folder.name + "_stepped")
    reference.save_pretrained(stepped)
    return Expected(
        folder=folder,
        stepped=stepped,
        log_probs=row_by_row.log_probs,
        settings=reference.config.to_dict(),
        largest_gradient=largest,
        packs_rows=packs_rows,
        has_experts=has_experts,
    )


def prove_ranks(expected: Expected) -> list[RankClaims]:
    """Compare ranks of each backend that shares models with transformers."""
    proven = []
    for kind, backend in BACKENDS.items():
        claims: list[Claim] = []
        no_place = ""
        layouts = backend.in_proofs(MICRO_BATCH, has_experts=expected.has_experts)
        for ranks, settings in layouts:
            count = "1 rank" if ranks == 1 else f"{ranks} ranks"
            try:
                _require_place(expected, ranks, settings)
                claims += _claims_of(expected, f"{count} of {kind}", ranks, settings)
            except ModelError as error:
                no_place = str(error)
                break
        if claims or no_place:
            proven.append(RankClaims(kind, claims, no_place))
    return proven


def _require_place(expected: Expected, ranks: int, backend: BackendSettings) -> None:
    """Raise ModelError where files tell that a backend cannot compute the model."""
    missing = missing_packages(backend.packages)
    if missing:
        raise ModelError(f"{' and '.join(missing)} is not installed")
    facts = ModelFacts("the model", expected.settings, {}, has_value_head=False)
    for problem in backend.model_problems("actor", ranks, facts):
        setting = problem.key.rpartition(".")[2]
        raise ModelError(f"{setting}={problem.value}: {problem.rule}")


# ----------------------------------------------------------------------- the comparison


def _claims_of(
    expected: Expected, name: str, ranks: int, backend: BackendSettings
) -> list[Claim]:
    """Let ranks compute, and compare what they tell and write.

    Raises:
        ModelError: The engine has no place for the model.
    """
    from verl_ray.proofs.engine_proof import (
        GRADIENT_TOLERANCE,
        TOLERANCE,
        difference_of_directories,
    )
    from verl_ray.proofs.trace import largest

    root = expected.folder.parent
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=root) as folder:
        log_probs, failure = _run(expected, Path(folder), ranks, backend)
        if failure:
            return [Claim(f"log-probs on {name}", None, TOLERANCE, failure)]
        written = difference_of_directories(expected.folder, Path(folder, "written"))
        stepped = difference_of_directories(expected.stepped, Path(folder, "stepped"))

    worst = max(
        (largest(expected_row - expected_row.new_tensor(log_probs[row])), f"row {row}")
        for row, expected_row in enumerate(expected.log_probs)
    )
    differences = {
        "tensors": (*written, 0.0),
        "log-probs": (*worst, TOLERANCE),
        "gradients": (*stepped, GRADIENT_TOLERANCE),
    }
    return [
        Claim(f"{what} on {name}", number, most, where if number > most else "")
        for what, (number, where, most) in differences.items()
    ]


def _run(
    expected: Expected, folder: Path, ranks: int, backend: BackendSettings
) -> tuple[dict[int, list[float]], str]:
    """Let ranks read the model, compute, take a step, and write into a folder.

    Returns:
        The log-probs of each row, and how the rank that failed first did, if one did.

    Raises:
        ModelError: The engine has no place for the model.
    """
    fields = {
        "model": str(expected.folder),
        "folder": str(folder),
        "ranks": ranks,
        "backend": backend.model_dump(),
        "eps": RATE * expected.largest_gradient,
        "packs_rows": expected.packs_rows,
        "has_experts": expected.has_experts,
    }
    log_probs: dict[int, list[float]] = {}
    failure = ""
    with ThreadPoolExecutor(ranks) as pool:
        trials = [
            pool.submit(try_in_child, __name__, fields | {"rank": rank}, DEADLINE_S)
            for rank in range(ranks)
        ]
        # The others fail because of the one that ends first.
        for trial in as_completed(trials):
            messages, cause = trial.result()
            for message in messages:
                if message.kind == "refused":
                    raise ModelError(message.fields["refusal"])
                if message.kind == "failed":
                    cause = message.fields["failure"]
                if message.kind == "row":
                    log_probs[message.fields["row"]] = message.fields["log_probs"]
            failure = failure or cause
    return log_probs, failure


# ----------------------------------------------------------------------- the process


def main(connection: socket.socket) -> None:
    """Be a rank in this process, for the one at the other end."""
    hide_kernels()
    run_trial(connection, be_rank)


def be_rank(fields: dict[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Compute what a rank computes, and tell it, or how it failed."""
    from verl_ray.proofs.trace import described

    try:
        _compute(fields, tell)
    except ModelError as error:
        tell("refused", {"refusal": str(error)})
    except Exception as error:  # whatever a family's code raises
        tell("failed", {"failure": described(error)})
    return {}


def _compute(fields: dict[str, Any], tell: Tell) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from verl_ray.learning.objectives import SupervisedObjective
    from verl_ray.ops.outputs import RequestedOutputs
    from verl_ray.proofs.rows import LENGTHS, batch_of, random_rows
    from verl_ray.rendezvous import choose_interfaces

    torch.set_num_threads(1)
    folder = Path(fields["folder"])
    choose_interfaces(_ADDRESS)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=fields["rank"],
        world_size=fields["ranks"],
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    engine = _engine(fields)
    place = engine.topology
    rows = random_rows()
    own = SHARES[place.dp_size][place.dp_rank]
    batch = batch_of([rows[row] for row in own])

    engine.export(str(folder / "written"))
    log_probs = engine.forward(batch, RequestedOutputs(log_probs=True)).log_probs
    engine.forward_backward(batch, SupervisedObjective())
    engine.optimizer_step()
    engine.export(str(folder / "stepped"))
    if not place.returns_results:
        return
    assert log_probs is not None
    ends = batch.offsets[1:]
    for row, end in zip(own, ends, strict=True):
        values = log_probs[end - LENGTHS[row] + 1 : end].tolist()
        tell("row", {"row": row, "log_probs": values})


def _engine(fields: Mapping[str, Any]) -> Engine:
    import torch

    from verl_ray.config.optimizers import AdamWConfig
    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine

    optimizer = AdamWConfig(
        kind="adamw",
        lr=RATE,
        betas=(0.9, 0.95),
        eps=fields["eps"],
        weight_decay=0.0,
        max_grad_norm=None,
        schedule="constant",
        warmup_steps=0,
        decay_fraction=0.1,
        min_lr_fraction=0.0,
    )
    settings = fields["backend"]
    spec = EngineSpec(
        "actor",
        fields["model"],
        "policy",
        BACKENDS[settings["kind"]](**settings),
        optimizer,
        1,
        seed=0,
        packs_rows=fields["packs_rows"],
        # The proof wrote the directory, with code only where it was trusted.
        trusts_code=True,
        expert_balance=0.0 if fields["has_experts"] else None,
    )
    return build_engine(
        spec,
        device=torch.device("cpu"),
        rank=fields["rank"],
        world_size=fields["ranks"],
    )
