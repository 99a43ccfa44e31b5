"""The reference: the policy as it was before training; it never learns."""

from __future__ import annotations

from workers.model_worker import ModelWorker


class ReferenceWorker(ModelWorker):
    """Log-probabilities only, which every model worker computes."""
