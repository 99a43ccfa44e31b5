"""The `engine` backend: plain PyTorch, DDP when there is more than one rank. The oracle of all other backends."""

# no postponed annotations here: DDP reads those of its hook
import contextlib
from typing import Any

import torch
import torch._dynamo  # DDP would import it, and a cycle that importing leaves behind would keep the first DDP for good
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.models.role_model import RoleModel
from verl_ray.ops.installed_torch import ddp_without_buffers


def _sum(
    group: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Gradients are summed, not averaged: the weights of a loss already hold the global denominators."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


class PlainEngine(ModuleEngine):
    forward_is_collective = False

    def wrap(self, model: RoleModel) -> nn.Module:
        return self._in_ddp(model, agree=True) if self._sums else model

    @property
    def _sums(self) -> bool:
        """Whether there are gradients to sum over ranks."""
        return self.world_size > 1 and self.spec.optimizer is not None

    @staticmethod
    def _in_ddp(model: RoleModel, *, agree: bool) -> DistributedDataParallel:
        """`agree`: compare the shapes of all ranks, and take the values of rank 0."""
        # a gradient that is a view of its bucket is not copied into it and back
        ddp = DistributedDataParallel(model, init_sync=agree, gradient_as_bucket_view=True, **ddp_without_buffers())
        ddp.register_comm_hook(None, _sum)
        return ddp

    def release_gradients(self) -> None:
        self.refuse_pending_gradients()
        self.module = self.model  # DDP keeps its buckets, which are as large as the model, as long as it lives

    def renew_gradients(self) -> None:
        if self._sums and self.module is self.model:
            self.module = self._in_ddp(self.model, agree=False)

    def summing(self, last: bool) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)
