"""This project's wires behind vLLM's weight-transfer interface.

vLLM drives the interface by start, update and finish.

Invariant: it works with both forms of the interface. In newer versions the engine
opens and closes the layerwise reload itself; in 0.22 the worker does. It runs
inside of vLLM's worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from verl_ray.rollout.vllm_arguments import TRANSFER
from verl_ray.rollout.vllm_load_plan import LoadRecorder
from verl_ray.weight_sync.manifest import Bucket
from verl_ray.weight_sync.transport import Address, Inbox, WireEndpoint

_ONE_BY_ONE = "_try_load_streamed_expert"
"""A method of vLLM's models that take the tensors of experts one by one, too."""


@dataclass
class WireInitInfo(WeightTransferInitInfo):
    """The wire to open: the sender's address, and this worker's end of it."""

    address: Address
    endpoint: WireEndpoint


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """The bucket to receive next."""

    bucket: Bucket


class BucketTransferEngine(WeightTransferEngine[WireInitInfo, BucketUpdateInfo]):
    """A weight-transfer engine of vLLM that receives buckets.

    Attributes:
        inbox: The receiving end of the wire.
        recorder: What records the loading of an update, if anything does.
    """

    init_info_cls = WireInitInfo
    update_info_cls = BucketUpdateInfo

    def __init__(self, *arguments: object, **options: object) -> None:
        # The arguments differ between versions of vLLM.
        super().__init__(*arguments, **options)
        self.inbox = Inbox()
        self.recorder: LoadRecorder | None = None

    def init_transfer_engine(self, init_info: WireInitInfo) -> None:
        self.inbox.connect(init_info.address, init_info.endpoint)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(
        self,
        update_info: BucketUpdateInfo,
        load_weights: Callable[[list[tuple[str, torch.Tensor]]], object] | None = None,
    ) -> None:
        received = self.inbox.receive(update_info.bucket)
        # Other ranks hold its experts.
        if not received:
            return
        # Only vLLM 0.22 passes a function; newer versions leave loading to this engine.
        load = load_weights or self.model.load_weights
        recording: AbstractContextManager[None] = nullcontext()
        if self.recorder is not None:
            recording = self.recorder.recording(received)
        with recording:
            load(list(_as_loaded(self.model, received)))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.inbox.close()

    def trainer_send_weights(self, *_: object) -> None:
        """Refuse to send, which is the actor's work; vLLM never calls this."""
        raise NotImplementedError


def _as_loaded(
    model: torch.nn.Module, received: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as the loader of the model takes them during a reload.

    vLLM's gpt-oss (0.32) copies a tensor of all experts into its parameter without a
    loader, and a reload does not see that. It loads experts that come one by one.
    """
    one_by_one = any(hasattr(each, _ONE_BY_ONE) for each in model.modules())
    for name, tensor in received.items():
        path, experts, kind = name.rpartition(".mlp.experts.")
        if one_by_one and experts and "." not in kind:
            for number, expert in enumerate(tensor):
                yield f"{path}{experts}{number}.{kind}", expert
        else:
            yield name, tensor


WeightTransferEngineFactory.register_engine(TRANSFER, BucketTransferEngine)
