"""Log-probs of responses by a frozen policy, for tasks that learn from data alone.

Invariant: those of a row are computed once, when a step or an evaluation first needs
them, and stay in the run's folder. So a resumed run reads the bits of the run before,
and a model that is no longer asked costs no time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.waiting import put
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Float64, TeacherForcedEvaluation, TrainingBatch
from verl_ray.config.roles import ModelRole
from verl_ray.preflight.model_files import digest_of_weights
from workers.model_worker import ModelWorker

_RECORD = np.dtype([("row", "S16"), ("log_prob", "<f8")])
"""One row in the file: the digest of its tokens, and the log-prob of its response."""


class ReferenceLogProbs:
    """The reference of a run, and the log-probs that it has given so far."""

    def __init__(self, group: WorkerGroup[Any], folder: Path, role: ModelRole) -> None:
        """Take the group, and read what the run's folder has of this reference.

        Args:
            group: Workers of the reference, or of a policy with an adapter.
            folder: The folder of the run.
            role: Settings of these. A policy is the reference without its adapter.
        """
        self._group = group
        self._is_base = role.adapter is not None
        self._path = folder / f"reference_log_probs_{_key(role)}.bin"
        self._known: dict[bytes, float] = {}

        if self._path.is_file():
            records = _whole_records(self._path)
            rows = [bytes(row).ljust(16, b"\0") for row in records["row"]]
            self._known = dict(zip(rows, records["log_prob"].tolist(), strict=True))

    def log_probs(self, rows: TrainingBatch) -> Float64:
        """Return the log-prob of each response, float64 [rows]."""
        keys = _digests(rows)
        missing = {key: row for row, key in enumerate(keys) if key not in self._known}
        if missing:
            chosen = put(rows.select(np.array(list(missing.values()))))
            results = self.compute(chosen).result()
            self._keep(list(missing), results.row("log_prob"))
        return np.array([self._known[key] for key in keys], np.float64)

    def compute(
        self, rows: Sharded[TrainingBatch]
    ) -> Call[Sharded[TeacherForcedEvaluation]]:
        """Start to compute the log-probs of rows that do not come again."""
        method = ModelWorker.evaluate_teacher_forced
        return self._group.scatter(method, rows, self._is_base)

    def _keep(self, keys: Sequence[bytes], log_probs: npt.NDArray[np.float64]) -> None:
        records = np.empty(len(keys), _RECORD)
        records["row"] = keys
        records["log_prob"] = log_probs
        # An evaluation beside the run may write to the same file.
        with self._path.open("ab") as file:
            file.write(records.tobytes())
        self._known |= zip(keys, log_probs.tolist(), strict=True)


def _key(role: ModelRole) -> str:
    """Return a name of what the log-probs of the same tokens depend on."""
    weights = digest_of_weights(role.model.folder)
    backend = role.backend
    facts = repr((role.model.folder, weights, backend.kind, backend.compute_dtype))
    return hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()


def _whole_records(path: Path) -> npt.NDArray[np.void]:
    """Return the records of a file, and cut what a driver that was killed left half."""
    count, half = divmod(path.stat().st_size, _RECORD.itemsize)
    if half:
        os.truncate(path, count * _RECORD.itemsize)
    return np.fromfile(path, _RECORD, count)


def _digests(rows: TrainingBatch) -> list[bytes]:
    """Return the digest of each row's tokens, and of which are of the response."""
    cuts = rows.offsets[1:-1]
    pieces = zip(
        np.split(rows.tokens, cuts), np.split(rows.response_mask, cuts), strict=True
    )
    return [
        hashlib.blake2b(tokens.tobytes() + mask.tobytes(), digest_size=16).digest()
        for tokens, mask in pieces
    ]
