"""The reference: the policy as it was before training; it never learns."""

from __future__ import annotations

from workers.model_worker import ModelWorker


class ReferenceWorker(ModelWorker):
    """One rank of the reference: log-probabilities, as every model worker computes."""
