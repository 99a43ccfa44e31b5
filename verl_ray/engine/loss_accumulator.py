"""The accumulator for losses and metrics over the micro-batches of a pass.

Invariant: numbers stay on the device until the last micro-batch is added; then they
reach the host in one transfer. Rows that are excluded from the loss are excluded from
its metrics too, whether they are NaN or not.

Deliberately not here: sums over ranks (`LossReport`).
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from verl_ray.algorithms.aggregation import weighted_sum
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.engine.base import LossReport


class LossAccumulator:
    """Sums and maxima over one rank's response tokens, and the load of its experts."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._terms: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._expert_load: Tensor | None = None

    def add(
        self,
        loss: Tensor,
        token_loss: TokenLoss,
        weight: Tensor,
        expert_load: Tensor | None,
    ) -> None:
        """Add one micro-batch.

        Args:
            loss: Its aggregated loss, a scalar.
            token_loss: Its losses and metrics per token, [tokens].
            weight: The weight of each token in the loss, [tokens]. A token of weight 0
                does not count, whatever its values are.
            expert_load: Tokens routed to each expert, [layers, experts].
        """
        counted = weight != 0

        def total(values: Tensor) -> Tensor:
            return values.detach().float().where(counted, 0.0).sum()

        sums = {"loss": loss.detach(), "tokens": counted.float().sum()}
        for name, values in token_loss.metrics.items():
            sums[name] = total(values)
        _add_to(self._sums, sums)

        terms = {
            name: weighted_sum(values.detach().float(), weight)
            for name, values in token_loss.terms.items()
        }
        _add_to(self._terms, terms)

        # An empty micro-batch has no maximum.
        if len(counted):
            self._add_maxima(token_loss.maxima, counted)

        if expert_load is not None:
            if self._expert_load is None:
                self._expert_load = expert_load
            else:
                self._expert_load = self._expert_load + expert_load

    def _add_maxima(self, maxima: dict[str, Tensor], counted: Tensor) -> None:
        for name, values in maxima.items():
            largest = values.detach().float().where(counted, 0.0).amax()
            if name in self._maxima:
                largest = torch.maximum(self._maxima[name], largest)
            self._maxima[name] = largest

    def report(self) -> LossReport:
        """Transfer the totals to the host and return them.

        The report is empty if no micro-batch was added, which is the case on pipeline
        stages before the last.
        """
        if not self._sums:
            return LossReport()

        scalars = chain(
            self._sums.values(), self._terms.values(), self._maxima.values()
        )
        columns = [torch.stack(list(scalars))]
        if self._expert_load is not None:
            columns.append(self._expert_load.flatten())

        # The only transfer from the device. The numbers are consumed in the order in
        # which they were concatenated.
        numbers = iter(torch.cat(columns).tolist())
        sums = {name: next(numbers) for name in self._sums}
        terms = {name: next(numbers) for name in self._terms}
        maxima = {name: next(numbers) for name in self._maxima}
        expert_load = None
        if self._expert_load is not None:
            expert_load = np.array(list(numbers)).reshape(self._expert_load.shape)

        return LossReport(
            tokens=round(sums.pop("tokens")),
            loss=sums.pop("loss"),
            sums=sums,
            maxima=maxima,
            expert_load=expert_load,
            terms=terms,
        )


def _add_to(totals: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Add each value to the total of the same name, in place."""
    for name, value in values.items():
        if name in totals:
            totals[name] = totals[name] + value
        else:
            totals[name] = value
