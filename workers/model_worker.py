"""What every role with a model does, written once over the engine contract.

Invariant: no method knows which backend holds the model. Deliberately not here: what only one role does.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict

import torch

from verl_ray.checkpoint.sharded import load, save
from verl_ray.cluster.context import WorkerContext
from verl_ray.data.stages import LogProbs, Rows
from verl_ray.engine.base import EngineSpec
from verl_ray.engine.build import build_engine
from verl_ray.models.role_model import Outputs
from verl_ray.profiling.memory import device_memory, process_memory


class ModelWorker:
    """One rank of a role whose model an engine holds."""

    def __init__(self, context: WorkerContext, spec: EngineSpec) -> None:
        self.context = context
        device = torch.device(context.device)
        self.engine = build_engine(spec, device=device, rank=context.rank, world_size=context.num_ranks)
        self.topology = self.engine.topology

    def compute_log_probs(self, rows: Rows, temperature: float) -> LogProbs:
        """Log-probabilities of the response tokens at the temperature they were sampled with."""
        found = self.engine.forward(rows, Outputs(log_probs=True, temperature=temperature))
        assert found.log_probs is not None
        return LogProbs(offsets=rows.offsets, log_probs=found.log_probs)

    def save(self, path: str) -> None:
        """Write this rank's shards of the engine's state under `path`."""
        save(self.engine.state(), path)

    def load(self, path: str) -> None:
        """Take the engine's state from a checkpoint that any layout wrote."""
        state = self.engine.state()
        load(state, path)
        self.engine.load_state(state)

    def export(self, path: str) -> None:
        """Write a Hugging Face directory."""
        self.engine.export(path)

    def place(self, params: str, optimizer: str) -> None:
        """Move parameters and optimizer state to "device" or "host"."""
        self.engine.place(params=params, optimizer=optimizer)

    def memory(self) -> dict[str, float]:
        """What this process holds, in bytes by name."""
        device = device_memory()
        return {**asdict(process_memory()), **(asdict(device) if device is not None else {})}

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.engine.close()
