"""A process of two ranks that checks the calls of CUDA, for test_shim.py."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from verl_ray.engine.megatron import shim


def main(rank: int, folder: Path) -> None:
    shim.install()
    shim.install()  # once is enough
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    device()
    uneven(rank)
    together(rank)
    random_numbers(rank)
    dist.barrier()
    dist.destroy_process_group()


def device() -> None:
    """Check a device, its type, and pinned memory."""
    made = torch.zeros(2, device="cuda", pin_memory=True)
    assert (
        made.device.type == "cpu"
        and made.cuda() is made
        and made.type() == "torch.cuda.FloatTensor"
    )
    assert (
        made.to("cuda:0").device
        == made.to(torch.device("cuda"), torch.float64).device
        == torch.device("cpu")
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        assert (
            torch.cuda.Event().elapsed_time(torch.cuda.current_stream().record_event())
            == 0.0
        )


def uneven(rank: int) -> None:
    """Check collectives over lists of tensors of different sizes."""
    parts = [torch.empty(1), torch.empty(2)]
    dist.all_gather(parts, torch.arange(rank + 1.0))
    assert parts[0].tolist() == [0.0] and parts[1].tolist() == [0.0, 1.0]
    summed = torch.empty(rank + 1)
    dist.reduce_scatter(summed, [torch.ones(1), torch.full((2,), 3.0)])
    assert summed.tolist() == [[2.0], [6.0, 6.0]][rank]


def together(rank: int) -> None:
    """Coalesced collectives are complete when the context ends, each by itself."""
    gathered, pair = torch.empty(2), torch.empty(4)
    pair[2 * rank : 2 * rank + 2] = 3.0 + rank
    with dist._coalescing_manager(async_ops=True) as manager:
        time.sleep(0.5 * rank)
        dist.all_gather_into_tensor(gathered, torch.tensor([1.0 + rank]), async_op=True)
        # As megatron gathers: what is sent is a part of what is received.
        dist.all_gather_into_tensor(pair, pair[2 * rank : 2 * rank + 2], async_op=True)
    assert gathered.tolist() == [1.0, 2.0] and pair.tolist() == [3.0, 3.0, 4.0, 4.0]
    manager.wait()

    scattered, summed = torch.tensor([1.0, 2.0]), torch.tensor([5.0 + rank])
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(scattered[rank : rank + 1], scattered)
        dist.reduce_scatter_tensor(
            summed, torch.tensor([1.0, 2.0]) + rank, op=dist.ReduceOp.MAX
        )
    assert scattered[rank] == [2.0, 4.0][rank] and summed.tolist() == [2.0 + rank]

    reduced = torch.tensor([1.0 + rank])
    with dist._coalescing_manager():
        dist.all_reduce(reduced)
    assert reduced.tolist() == [3.0]


def random_numbers(rank: int) -> None:
    """Ranks share the default random stream and differ in the model-parallel one."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(
        7, tp_rank=rank, ep_rank=0, etp_rank=0
    )
    shared = torch.rand(1)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        apart = torch.rand(1)
    later = torch.rand(1)
    found = [torch.empty(3), torch.empty(3)]
    dist.all_gather(found, torch.cat([shared, apart, later]))
    assert (
        found[0][0] == found[1][0]
        and found[0][2] == found[1][2]
        and found[0][1] != found[1][1]
    )
    assert found[0][0] != found[0][2]
