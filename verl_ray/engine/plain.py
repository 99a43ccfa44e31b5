"""The `engine` backend: plain PyTorch, DDP when there is more than one rank. The oracle of all other backends."""

# no postponed annotations here: DDP reads those of its hook
import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.models.role_model import RoleModel


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
        if self.world_size == 1 or self.spec.optimizer is None:
            return model
        # a gradient that is a view of its bucket is not copied into it and back
        ddp = DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)
        ddp.register_comm_hook(None, _sum)
        return ddp

    def summing(self, last: bool) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)
