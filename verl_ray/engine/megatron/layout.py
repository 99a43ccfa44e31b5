"""Which rank does what: megatron-core's process groups for one way to share a model out.

Invariant: megatron-core keeps its groups in globals of a module; here each layout has its own, made once per process
and put in place while it is used, so engines of different layouts live in one process. Ranks are numbered as
megatron-core does: tensor innermost, then context, then data (which experts are shared out over), pipeline outermost.
Deliberately not here: which layouts are possible (`verl_ray/backends/layouts.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from verl_ray.backends.megatron import MegatronBackend
from verl_ray.parallel.topology import Topology

_UNSET = {name: value for name, value in vars(parallel_state).items() if name[0] == "_" and name[1].isupper()}
"""megatron-core's globals as they are before any layout."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a layout: how many ranks it has, and which of them this one is."""

    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Axis:
        return cls(dist.get_world_size(group), dist.get_rank(group))


class Layout:
    """The groups of one layout, and this rank's place in them."""

    def __init__(self, backend: MegatronBackend) -> None:
        self.chunks = backend.virtual_stages
        self._globals = dict(_UNSET)
        with self.entered(), torch.random.fork_rng(devices=[]):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=backend.tensor_parallel,
                pipeline_model_parallel_size=backend.pipeline_parallel,
                virtual_pipeline_model_parallel_size=self.chunks if self.chunks > 1 else None,
                context_parallel_size=backend.context_parallel,
                expert_model_parallel_size=backend.expert_parallel,
                expert_tensor_parallel_size=backend.expert_tensor_parallel,
                create_gloo_process_groups=False,
                # else half an hour, whatever the run gives its collective operations
                distributed_timeout_minutes=_timeout_s() / 60,
            )
            # nothing here is random; but what is computed again asks for these streams
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            self.groups = groups = ProcessGroupCollection.use_mpu_process_groups()
        self.tp, self.cp, self.dp, self.pp = map(Axis.of, (groups.tp, groups.cp, groups.dp, groups.pp))
        self.ep, self.etp, self.expert_dp = map(Axis.of, (groups.ep, groups.expt_tp, groups.expt_dp))

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1

    @property
    def topology(self) -> Topology:
        """Ranks along the data axis have rows of their own; outputs are on the last stage, alike on its peers."""
        answers = self.is_last_stage and self.tp.rank == 0 and self.cp.rank == 0
        return Topology(self.dp.rank, self.dp.size, answers)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, megatron-core's globals are those of this layout."""
        before = _taken()
        vars(parallel_state).update(self._globals)
        try:
            yield
        finally:
            self._globals = _taken()
            vars(parallel_state).update(before)


def _timeout_s() -> float:
    """Of the group of all ranks, whose half on the host every run has."""
    assert dist.group.WORLD is not None
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    seconds: float = backend.options._timeout.total_seconds()
    return seconds


def _taken() -> dict[str, Any]:
    return {name: vars(parallel_state)[name] for name in _UNSET}


_LAYOUTS: dict[tuple[object, ...], Layout] = {}


def layout_of(backend: MegatronBackend) -> Layout:
    """The layout that a backend asks for, over all ranks of the process group. Collective where it is new."""
    sizes = backend.model_dump(exclude={"dtype", "micro_batch_tokens_per_rank", "sequence_parallel", "recompute"})
    key = (id(dist.group.WORLD), *sizes.values())
    if key not in _LAYOUTS:
        _LAYOUTS[key] = Layout(backend)
    return _LAYOUTS[key]
