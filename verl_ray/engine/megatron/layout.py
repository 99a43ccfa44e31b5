"""megatron-core's process groups for one way to partition a model over ranks.

Invariant: megatron-core keeps its groups in globals of a module. Here each layout has
its own groups, made once per process and installed while it is used, so engines with
different layouts live in one process. Ranks are numbered as in megatron-core: tensor
innermost, then context, then data (over which experts are distributed), pipeline
outermost.
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
from verl_ray.columns.packing import Topology

_UNSET = {
    name: value
    for name, value in vars(parallel_state).items()
    if name[0] == "_" and name[1].isupper()
}
"""megatron-core's globals before any layout exists."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a layout.

    Attributes:
        size: Number of ranks along it.
        rank: Position of this rank along it.
    """

    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Axis:
        """Return the axis whose ranks form a process group."""
        return cls(dist.get_world_size(group), dist.get_rank(group))


class ParallelLayout:
    """The process groups of one layout, and this rank's position in them.

    The axes are tensor (`tp`), context (`cp`), data (`dp`) and pipeline (`pp`). Experts
    have axes of their own: `ep` distributes them, `etp` partitions their matrices, and
    `expert_dp` holds copies of them.
    """

    def __init__(self, backend: MegatronBackend) -> None:
        """Create the process groups. Collective over all ranks."""
        self.chunks = backend.virtual_stages
        self._globals = dict(_UNSET)

        with self.installed(), torch.random.fork_rng(devices=[]):
            self._initialize(backend)
            self.groups = ProcessGroupCollection.use_mpu_process_groups()

        groups = self.groups
        self.tp = Axis.of(groups.tp)
        self.cp = Axis.of(groups.cp)
        self.dp = Axis.of(groups.dp)
        self.pp = Axis.of(groups.pp)
        self.ep = Axis.of(groups.ep)
        self.etp = Axis.of(groups.expt_tp)
        self.expert_dp = Axis.of(groups.expt_dp)

    def _initialize(self, backend: MegatronBackend) -> None:
        """Let megatron-core create its groups and its random streams."""
        virtual_size = self.chunks if self.chunks > 1 else None
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=backend.tensor_parallel,
            pipeline_model_parallel_size=backend.pipeline_parallel,
            virtual_pipeline_model_parallel_size=virtual_size,
            context_parallel_size=backend.context_parallel,
            expert_model_parallel_size=backend.expert_parallel,
            expert_tensor_parallel_size=backend.expert_tensor_parallel,
            create_gloo_process_groups=False,
            # The default is half an hour, whatever the run allows its collectives.
            distributed_timeout_minutes=_collective_timeout_s() / 60,
        )

        # Nothing here is random, but recomputation restores these streams.
        tensor_parallel.model_parallel_cuda_manual_seed(1)

    @property
    def is_last_stage(self) -> bool:
        """True if this rank has the last layers, and so the outputs."""
        return self.pp.rank == self.pp.size - 1

    @property
    def topology(self) -> Topology:
        """The rows of this rank, which is one of the ranks along the data axis.

        Outputs exist on the last stage, identical on all of its peers, so the first of
        those returns them.
        """
        is_first_peer = self.tp.rank == 0 and self.cp.rank == 0
        returns_results = self.is_last_stage and is_first_peer
        return Topology(self.dp.rank, self.dp.size, returns_results)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make megatron-core's globals those of this layout within the context."""
        previous = _current_globals()
        vars(parallel_state).update(self._globals)
        try:
            yield
        finally:
            self._globals = _current_globals()
            vars(parallel_state).update(previous)


def _collective_timeout_s() -> float:
    """Return the timeout of the group of all ranks.

    It is read from the group's backend for the host, which exists in every run.
    """
    assert dist.group.WORLD is not None
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    seconds: float = backend.options._timeout.total_seconds()
    return seconds


def _current_globals() -> dict[str, Any]:
    """Return megatron-core's globals as they are now."""
    return {name: vars(parallel_state)[name] for name in _UNSET}


_NOT_LAYOUT = {
    "dtype",
    "micro_batch_tokens_per_rank",
    "sequence_parallel",
    "recompute",
}
"""Settings of the backend that do not change the process groups."""

_LAYOUTS: dict[tuple[object, ...], ParallelLayout] = {}
"""The layouts of this process, by the group of all ranks and the sizes."""


def parallel_layout_of(backend: MegatronBackend) -> ParallelLayout:
    """Return the layout that a backend's settings describe, over all ranks.

    Collective if this process has no such layout yet.
    """
    sizes = backend.model_dump(exclude=_NOT_LAYOUT)
    key = (id(dist.group.WORLD), *sizes.values())
    if key not in _LAYOUTS:
        _LAYOUTS[key] = ParallelLayout(backend)
    return _LAYOUTS[key]
