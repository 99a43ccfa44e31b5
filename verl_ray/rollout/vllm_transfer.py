"""The project's wires behind vLLM's own weight-transfer interface: vLLM drives it by start, update and finish.

Invariant: works with both forms of that interface: in newer ones the engine opens and closes the layerwise
reload itself, in 0.22 the worker does. Runs inside vLLM's worker processes. Deliberately not here: what vLLM's loading
leaves wrong or undone (`vllm_loader`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from verl_ray.rollout.vllm_core import TRANSFER
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.inbox import Inbox
from verl_ray.weight_sync.transport import Address, Seat


@dataclass
class Wire(WeightTransferInitInfo):
    address: Address
    seat: Seat


@dataclass
class Delivery(WeightTransferUpdateInfo):
    bucket: Bucket


class BucketTransferEngine(WeightTransferEngine[Wire, Delivery]):
    init_info_cls = Wire
    update_info_cls = Delivery

    def __init__(self, *given: object, **more: object) -> None:
        super().__init__(*given, **more)
        self.inbox = Inbox()

    def init_transfer_engine(self, init_info: Wire) -> None:
        self.inbox.connect(init_info.address, init_info.seat)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(
        self, update_info: Delivery, load_weights: Callable[[list[tuple[str, torch.Tensor]]], object] | None = None
    ) -> None:
        received = self.inbox.receive(update_info.bucket)
        (load_weights or self.model.load_weights)(list(received.items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.inbox.close()

    def trainer_send_weights(self, *_: object) -> None:
        """Never called: what sends is the actor."""
        raise NotImplementedError


WeightTransferEngineFactory.register_engine(TRANSFER, BucketTransferEngine)
