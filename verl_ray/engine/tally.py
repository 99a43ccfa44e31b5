"""What the micro-batches of a pass add up to.

Invariant: numbers stay on the device until all are there; then they come to the host in one transfer. Rows that are
kept out of the loss are kept out of its metrics. Deliberately not here: sums over ranks (`LossReport`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verl_ray.algorithms.losses import TokenLoss
from verl_ray.engine.base import LossReport


class Tally:
    """Sums and maxima over the response tokens of one rank, and the load of its experts."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._load: Tensor | None = None

    def add(self, loss: Tensor, found: TokenLoss, counted: Tensor, load: Tensor | None) -> None:
        """One micro-batch: its loss, what its tokens say, which of them count (1 or 0) [tokens], and the load of its
        experts [layers, experts]."""
        for name, values in {"loss": None, "tokens": counted, **found.metrics}.items():
            total = loss.detach() if values is None else (values.detach().float() * counted).sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        for name, values in found.maxima.items() if len(counted) else ():
            peak = (values.detach().float() * counted).amax()
            self._maxima[name] = torch.maximum(self._maxima[name], peak) if name in self._maxima else peak
        if load is not None:
            self._load = load if self._load is None else self._load + load

    def report(self) -> LossReport:
        """All of it, on the host. Nothing where there was no micro-batch, as on stages before the loss."""
        if not self._sums:
            return LossReport()
        columns = [torch.stack([*self._sums.values(), *self._maxima.values()])]
        if self._load is not None:
            columns.append(self._load.flatten())
        told = torch.cat(columns).tolist()  # the one transfer
        sums = dict(zip(self._sums, told, strict=False))
        maxima = dict(zip(self._maxima, told[len(sums) :], strict=False))
        load = None if self._load is None else np.array(told[len(sums) + len(maxima) :]).reshape(self._load.shape)
        return LossReport(round(sums.pop("tokens")), sums.pop("loss"), sums, maxima, load)
