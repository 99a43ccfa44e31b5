"""The `engine` backend: plain PyTorch, with DDP when there are several ranks.

Invariant: nothing here is optimized beyond what torch does by itself, because this
engine is the reference that all other backends are compared with.
"""

# Annotations are not postponed in this file, because DDP reads those of its hook.
import contextlib
from typing import Any

import torch

# DDP would import this module late, and the reference cycle that its import leaves
# behind would keep the first DDP alive for good.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.models.role_model import RoleModel
from verl_ray.ops.installed_torch import ddp_without_buffers


def _sum_gradients(
    group: Any,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over ranks; DDP's default would average it.

    The weights of a loss already contain the global denominators.
    """
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


class PlainEngine(ModuleEngine):
    """An engine whose ranks hold the whole model each."""

    forward_is_collective = False

    def wrap(self, model: RoleModel) -> nn.Module:
        if not self._sums_gradients:
            return model
        return self._in_ddp(model, synchronize=True)

    @property
    def _sums_gradients(self) -> bool:
        return self.world_size > 1 and self.spec.optimizer is not None

    @staticmethod
    def _in_ddp(model: RoleModel, *, synchronize: bool) -> DistributedDataParallel:
        """Wrap the model in DDP.

        Args:
            model: The model.
            synchronize: Compare the shapes of all ranks, and take over the values of
                rank 0.
        """
        ddp = DistributedDataParallel(
            model,
            init_sync=synchronize,
            # A gradient that is a view of its bucket is not copied there and back.
            gradient_as_bucket_view=True,
            **ddp_without_buffers(),
        )
        ddp.register_comm_hook(None, _sum_gradients)
        return ddp

    def release_gradients(self) -> None:
        self.refuse_pending_gradients()
        # DDP keeps its buckets, which are as large as the model, while it lives.
        self.module = self.model

    def renew_gradients(self) -> None:
        if self._sums_gradients and self.module is self.model:
            self.module = self._in_ddp(self.model, synchronize=False)

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def computation_context(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16
        )
