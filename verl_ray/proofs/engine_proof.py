"""The proof that an engine computes a model as the family's own code does.

Invariant: the computation under test is that of a run: an engine that reads a
directory, packs rows, learns and writes. What it is compared with is transformers
alone, one row at a time, with attention as the family's code writes it out.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from verl_ray.config.roles import LoraConfig
from verl_ray.engine.plain import PlainEngine
from verl_ray.engine.single import plain_engine
from verl_ray.learning.objectives import SupervisedObjective
from verl_ray.models.conversions import checkpoint_names
from verl_ray.models.parts import backbone_of, blocks_of
from verl_ray.models.role_model import HeadKind
from verl_ray.models.routing import RouterWatch
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.proofs.claims import Claim
from verl_ray.proofs.rows import LENGTHS, batch_of, random_rows
from verl_ray.proofs.trace import (
    ModuleCall,
    described,
    first_difference,
    joined_calls,
    largest,
    traced,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1))

TOLERANCE = 5e-5
"""Of log-probs in nats, and of values. Correct families differ by 2e-5 at most, wrong
ones by 0.1 at least."""

GRADIENT_TOLERANCE = 2e-4
"""Of gradients, relative to the largest one. Correct families differ by 9e-5."""

RANK = 4
"""Of the adapter."""


Difference = Callable[[], tuple[float, str]]
"""Computes the largest difference, and says where it is."""


@dataclass(frozen=True)
class RowByRow:
    """The results of transformers for each row alone."""

    log_probs: list[Tensor]
    """float32 [tokens - 1] of each row: of the tokens after the first."""

    hidden: list[Tensor]
    """float32 [tokens, hidden] of each row: what the head reads."""

    gradients: dict[str, Tensor]
    """Of the sum of all log-probs, negated, by the parameter's name."""


@dataclass(frozen=True)
class EngineClaims:
    """The claims about a model on an engine, and what follows from them."""

    claims: Sequence[Claim]

    packs_rows: bool
    """Whether rows may lie one behind the other."""

    failure: str | None
    """The claim for which the model is not trained; None if it is, packed or not."""

    has_values: bool = False
    """Whether it can be a critic or a reward model."""

    has_adapters: bool = False
    """Whether it can learn by an adapter."""

    def with_needed(self, claim: Claim) -> EngineClaims:
        """Add a claim that must hold for the model to be trained."""
        failure = self.failure or (None if claim.holds else str(claim))
        return replace(self, claims=[*self.claims, claim], failure=failure)

    @property
    def trains(self) -> bool:
        return self.failure is None


class EngineProof:
    """The proof of one cut model on the plain engine.

    Args:
        reference: The cut model.
        folder: The directory with its tensors; what the engine writes goes beside it.
    """

    def __init__(self, reference: PreTrainedModel, folder: Path) -> None:
        self._reference = reference
        self._folder = folder
        self._rows = random_rows()
        self.row_by_row = row_by_row(reference, self._rows)
        """What transformers computes."""
        self._balance = 0.0 if RouterWatch(backbone_of(reference)).routers else None

    def examine(self) -> EngineClaims:
        """Compute the number of every claim."""
        claims = self._claims_of_packed_rows()
        packs_rows = all(claim.holds for claim in claims)
        if not packs_rows:
            first = next(claim for claim in claims if not claim.holds)
            alone = self._claims_of_equal_rows()
            claims += alone
            if not all(claim.holds for claim in alone):
                return EngineClaims(claims, packs_rows, str(first))

        checkpointed = _claim(
            "gradients with checkpointed layers",
            GRADIENT_TOLERANCE,
            lambda: self._gradients(packs_rows=packs_rows, checkpointing=True),
        )
        written = _claim("tensors written are those read", 0.0, self._tensors)
        values = _claim(
            "values", TOLERANCE, lambda: self._values(packs_rows=packs_rows)
        )
        adapter = _claim(
            "an adapter", TOLERANCE, lambda: self._adapter(packs_rows=packs_rows)
        )
        needed = [claim for claim in (checkpointed, written) if not claim.holds]
        return EngineClaims(
            claims=[*claims, checkpointed, written, values, adapter],
            packs_rows=packs_rows,
            failure=str(needed[0]) if needed else None,
            has_values=values.holds,
            has_adapters=adapter.holds,
        )

    # ------------------------------------------------------------------------- claims

    def _claims_of_packed_rows(self) -> list[Claim]:
        return [
            _claim("log-probs of packed rows", TOLERANCE, self._log_probs),
            _claim("gradients of packed rows", GRADIENT_TOLERANCE, self._gradients),
            _claim("no row sees another row", TOLERANCE, self._neighbours),
        ]

    def _claims_of_equal_rows(self) -> list[Claim]:
        return [
            _claim(
                "log-probs of rows of one length",
                TOLERANCE,
                lambda: self._log_probs(packs_rows=False),
            ),
            _claim(
                "gradients of rows of one length",
                GRADIENT_TOLERANCE,
                lambda: self._gradients(packs_rows=False),
            ),
        ]

    def _log_probs(self, *, packs_rows: bool = True) -> tuple[float, str]:
        engine = self._engine(packs_rows=packs_rows)
        worst = self._worst_log_prob(engine)
        if worst <= TOLERANCE:
            return worst, ""
        return worst, self._where_rows_differ(engine) if packs_rows else ""

    def _worst_log_prob(self, engine: PlainEngine, *, base: bool = False) -> float:
        worst = 0.0
        for order in ORDERS:
            batch = batch_of([self._rows[place] for place in order])
            outputs = engine.forward(batch, RequestedOutputs(log_probs=True, base=base))
            assert outputs.log_probs is not None
            expected = torch.cat([self.row_by_row.log_probs[place] for place in order])
            actual = torch.from_numpy(outputs.log_probs[batch.response_mask])
            worst = max(worst, largest(actual - expected))
        return worst

    def _gradients(
        self, *, packs_rows: bool = True, checkpointing: bool = False
    ) -> tuple[float, str]:
        engine = self._engine(packs_rows=packs_rows, checkpointing=checkpointing)
        engine.forward_backward(batch_of(self._rows), SupervisedObjective())
        expected = self.row_by_row.gradients
        scale = max(float(value.abs().max()) for value in expected.values())
        differences = []
        for name, parameter in engine.model.hf.named_parameters():
            zero = torch.zeros_like(parameter)
            actual = zero if parameter.grad is None else parameter.grad
            difference = largest(actual - expected.get(name, zero))
            differences.append((difference / scale, name))
        return max(differences)

    def _neighbours(self) -> tuple[float, str]:
        """Change a row, and look at the others."""
        engine = self._engine()
        changed = [self._rows[0] ^ 1, *self._rows[1:]]
        tokens = sum(LENGTHS)
        calls, others = (
            _calls_of(engine, self._rows),
            _calls_of(engine, changed),
        )
        places = torch.arange(LENGTHS[0], tokens)
        worst = largest((calls[-1].outputs - others[-1].outputs)[places])
        if worst <= TOLERANCE:
            return worst, ""
        return worst, first_difference(calls, others, TOLERANCE, places) or ""

    def _tensors(self) -> tuple[float, str]:
        """Compare a directory that the engine writes with the one that it read."""
        again = self._folder.with_name(self._folder.name + "_written")
        self._engine().export(str(again))
        difference = difference_of_directories(self._folder, again)
        shutil.rmtree(again)
        return difference

    def _values(self, *, packs_rows: bool) -> tuple[float, str]:
        engine = self._engine("value", packs_rows=packs_rows)
        batch = batch_of(self._rows)
        values = engine.forward(batch, RequestedOutputs(values=True)).values
        assert values is not None
        score = engine.model.hf.score.weight[0].detach()
        expected = torch.cat([hidden[:-1] @ score for hidden in self.row_by_row.hidden])
        actual = torch.from_numpy(values[batch.response_mask])
        return largest(actual - expected), "score"

    def _adapter(self, *, packs_rows: bool) -> tuple[float, str]:
        """Compare a model with its adapter and the model with the adapter merged."""
        engine = self._engine(packs_rows=packs_rows, adapter=self._adapter_config())
        new = self._worst_log_prob(engine)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, value in engine.model.hf.named_parameters():
                if ".lora_B." in name:
                    value.normal_(0, 0.05, generator=generator)
        without = self._worst_log_prob(engine, base=True)

        merged = self._folder.with_name(self._folder.name + "_merged")
        engine.export(str(merged))
        other = self._engine(packs_rows=packs_rows, folder=merged)
        shutil.rmtree(merged)
        batch = batch_of(self._rows)
        adapted, plain = (
            each.forward(batch, RequestedOutputs(log_probs=True)).log_probs
            for each in (engine, other)
        )
        assert adapted is not None and plain is not None
        number, where = max(
            (new, "a new adapter changes the model"),
            (without, "the model without its adapter"),
            (largest(torch.from_numpy(adapted - plain)), "the merged adapter"),
        )
        if number > TOLERANCE and where == "the merged adapter":
            calls, others = (_calls_of(each, self._rows) for each in (engine, other))
            places = torch.arange(sum(LENGTHS))
            where += f", {first_difference(calls, others, TOLERANCE, places)}"
        return number, where

    # ------------------------------------------------------------------------ engines

    def _engine(
        self, head: HeadKind = "policy", *, folder: Path | None = None, **settings: Any
    ) -> PlainEngine:
        return plain_engine(
            folder or self._folder,
            head,
            tokens=sum(LENGTHS),
            balance=self._balance,
            **settings,
        )

    def _adapter_config(self) -> LoraConfig:
        """Return an adapter of linear layers, but not of experts or layers with states.

        peft does not adapt these, or adapts slices of a tensor.
        """
        targets = {
            name
            for module in blocks_of(backbone_of(self._reference)).modules()
            if not any(isinstance(child, nn.Conv1d) for child in module.children())
            for name, child in module.named_children()
            if type(child) is nn.Linear
        }
        targets -= {
            part
            for tensors in checkpoint_names(self._reference).parts.values()
            for tensor in tensors
            for part in tensor.name.split(".")
        }
        return LoraConfig(rank=RANK, alpha=2 * RANK, targets=tuple(sorted(targets)))

    def _calls_alone(self, row: Tensor) -> list[ModuleCall]:
        """Return the calls of the reference's modules for a single row."""
        model = self._reference
        return traced(
            backbone_of(model),
            len(row),
            lambda: model(input_ids=row[None], use_cache=False),
        )

    def _where_rows_differ(self, engine: PlainEngine) -> str:
        """Return the module in which packed rows and single rows part."""
        tokens = sum(LENGTHS)
        calls = _calls_of(engine, self._rows)
        alone = [self._calls_alone(row) for row in self._rows]
        joined = [joined_calls(parts) for parts in zip(*alone, strict=True)]
        places = torch.arange(tokens)
        return first_difference(calls, joined, TOLERANCE, places) or ""


def _claim(statement: str, tolerance: float, difference: Difference) -> Claim:
    try:
        number, where = difference()
    except Exception as error:  # whatever a family's code raises
        return Claim(statement, None, tolerance, described(error))
    return Claim(statement, number, tolerance, where if number > tolerance else "")


def _calls_of(engine: PlainEngine, rows: Sequence[Tensor]) -> list[ModuleCall]:
    """Return the calls of the modules of an engine's model for packed rows."""
    tokens = sum(map(len, rows))
    return traced(engine.model.backbone, tokens, lambda: _forward(engine, rows))


def row_by_row(reference: PreTrainedModel, rows: Sequence[Tensor]) -> RowByRow:
    """Compute each row alone with transformers."""
    reference.zero_grad()
    log_probs, hidden = [], []
    for row in rows:
        logits = reference(input_ids=row[None], use_cache=False).logits[0].float()
        chosen = logits[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
        (-chosen.sum()).backward()
        log_probs.append(chosen.detach())
        with torch.no_grad():
            outputs = backbone_of(reference)(input_ids=row[None], use_cache=False)
        hidden.append(outputs.last_hidden_state[0])
    gradients = {
        name: value.grad
        for name, value in reference.named_parameters()
        if value.grad is not None
    }
    # As much memory as the model takes.
    reference.zero_grad(set_to_none=True)
    return RowByRow(log_probs, hidden, gradients)


def _forward(engine: PlainEngine, rows: Sequence[Tensor]) -> None:
    """Pass rows through the engine's model in one micro-batch."""
    engine.forward(batch_of(rows), RequestedOutputs(log_probs=True))


def difference_of_directories(folder: Path, other: Path) -> tuple[float, str]:
    """Return the largest difference of tensors of one name, and the name.

    It is infinite where the names are not the same.
    """
    before, after = _all_tensors(folder), _all_tensors(other)
    different = sorted(before.keys() ^ after.keys())
    if different:
        return math.inf, f"names differ: {', '.join(different[:3])}"
    return max(
        (largest(before[name].float() - after[name].float()), name) for name in before
    )


def _all_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
