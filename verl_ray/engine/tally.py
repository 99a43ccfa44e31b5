"""What the micro-batches of a pass add up to.

Invariant: numbers stay on the device until all are there; then they come to the host in one transfer. Rows that are
kept out of the loss are kept out of its metrics, NaN or not. Deliberately not here: sums over ranks (`LossReport`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verl_ray.algorithms.aggregation import weighted_sum
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.engine.base import LossReport


class Tally:
    """Sums and maxima over the response tokens of one rank, and the load of its experts."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._terms: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._load: Tensor | None = None

    def add(self, loss: Tensor, found: TokenLoss, weight: Tensor, load: Tensor | None) -> None:
        """One micro-batch: its loss, what its tokens say, the weight of each of them in the loss [tokens] (0: it does
        not count, whatever it says), and the load of its experts [layers, experts]."""
        counted = weight != 0

        def total(values: Tensor) -> Tensor:
            return values.detach().float().where(counted, 0.0).sum()

        sums = {"loss": loss.detach(), "tokens": counted.float().sum()}
        sums |= {name: total(values) for name, values in found.metrics.items()}
        terms = {name: weighted_sum(values.detach().float(), weight) for name, values in found.terms.items()}
        for known, new in ((self._sums, sums), (self._terms, terms)):
            for name, value in new.items():
                known[name] = known[name] + value if name in known else value

        for name, values in found.maxima.items() if len(counted) else ():
            peak = values.detach().float().where(counted, 0.0).amax()
            self._maxima[name] = torch.maximum(self._maxima[name], peak) if name in self._maxima else peak

        if load is not None:
            self._load = load if self._load is None else self._load + load

    def report(self) -> LossReport:
        """All of it, on the host. Nothing where there was no micro-batch, as on stages before the loss."""
        if not self._sums:
            return LossReport()
        scalars = (self._sums, self._terms, self._maxima)
        columns = [torch.stack([value for one in scalars for value in one.values()])]
        if self._load is not None:
            columns.append(self._load.flatten())
        told = iter(torch.cat(columns).tolist())  # the one transfer

        sums, terms, maxima = ({name: next(told) for name in one} for one in scalars)
        load = None if self._load is None else np.array(list(told)).reshape(self._load.shape)
        return LossReport(round(sums.pop("tokens")), sums.pop("loss"), sums, maxima, load, terms)
