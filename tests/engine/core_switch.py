"""One rank of four that trains megatron's model under `use_megatron_fsdp`.

That is megatron-core's own switch for Megatron-FSDP, over the copy of the package that
megatron-core contains. Each matrix is on two ranks. `main` is a rank of
test_core_switch.py, which checks the findings. No backend offers the switch: `megatron`
has a distributed optimizer, and `megatron_fsdp` the newer package.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine import inputs
from verl_ray.columns.packing import balance
from verl_ray.engine.optimizer import learning_rate
from verl_ray.learning.objectives import SupervisedObjective
from verl_ray.models.role_model import PackedRows
from verl_ray.ops.outputs import RequestedOutputs

WORLD, TENSOR_PARALLEL = 4, 2
STRATEGIES = ("optim_grads", "optim_grads_params")
"""Those that shard gradients. With the others megatron-core 0.16.1 counts copies of gradients in the norm, or takes a
gradient twice, as it also does on one data-parallel rank."""
STEPS = 3


def wrapped(engine: Any, strategy: str) -> tuple[Any, Any]:
    """Wrap the stage of an engine that does not learn, and build its optimizer."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if not isinstance(adapter.TELinear, type):
        # without TransformerEngine it is no class, and the adapter asks whether a
        # module is one of it
        adapter.TELinear = type("NoLinear", (), {})
    stage = engine._stages[0]
    for name, parameter in stage.named_parameters():
        if (
            parameter.tensor_model_parallel
        ):  # megatron-core says along which side only where it draws weights itself
            parameter.partition_dim = int(
                name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            )
    stage.forward = functools.partial(_log_probs, stage, stage.forward)
    sharded = adapter.FullyShardedDataParallel(
        engine._core_config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True, overlap_param_gather=True, gradient_reduce_div_fusion=False,
        ),
        stage,
        pg_collection=engine.layout.groups,
    )  # fmt: skip
    config = inputs.OPTIMIZER
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=config.lr, weight_decay=config.weight_decay, adam_beta1=config.betas[0],
            adam_beta2=config.betas[1], adam_eps=config.eps, params_dtype=torch.float32, use_distributed_optimizer=True,
            clip_grad=config.max_grad_norm or 0.0,
        ),
        [sharded],
        use_gloo_process_groups=False,
    )  # fmt: skip
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return sharded, optimizer


def _log_probs(stage: Any, hidden: Any, rows: PackedRows) -> Tensor:
    """Compute log-probs inside, so that the head's weight is gathered like the rest."""
    found: Tensor = stage.head(
        hidden(rows), rows, RequestedOutputs(log_probs=True)
    ).log_probs
    return found


def train(ranks: inputs.Ranks, strategy: str) -> dict[str, Any]:
    from megatron.core.distributed import finalize_model_grads

    engine: Any = ranks.engine(
        "megatron", optimizer=None, tensor_parallel=TENSOR_PARALLEL
    )
    place, rows = engine.topology, inputs.rows_of()
    index = balance(rows.lengths, place.dp_size)[place.dp_rank]
    losses, norms = [], []
    with engine.layout.installed():
        model, optimizer = wrapped(engine, strategy)
        for step in range(STEPS):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            with model.no_sync():
                pass  # what comes behind it is the last micro-batch
            batch = engine._make_micro_batch(rows, index)
            weight = torch.from_numpy(rows.loss_weight[index])[batch.row_of_token]
            loss = -(model(batch.packed) * weight).sum()
            loss.backward()
            finalize_model_grads([model])
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(inputs.OPTIMIZER, step, inputs.STEPS)
            norms.append(float(optimizer.step()[1]))
            losses.append(
                sum(
                    ranks.everyone(
                        float(loss.detach()) if place.returns_results else 0.0
                    )
                )
            )
    held = dict(model.param_and_grad_buffer.optimizer_named_parameters)
    return {
        "loss": losses,
        "norm": norms,
        "elements": sum(value.to_local().numel() for value in held.values()),
        "axes": {
            name: value.device_mesh.mesh_dim_names for name, value in held.items()
        },
    }


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = inputs.Ranks(rank, WORLD, folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=inputs.DEADLINE_S),
    )  # fmt: skip
    rows = inputs.rows_of()
    plain = ranks.engine("engine")
    found = {
        "plain": ranks.train(
            plain, rows.select(ranks.mine(rows)), SupervisedObjective(), STEPS
        )
    }
    for strategy in STRATEGIES:
        found[strategy] = train(ranks, strategy)
    torch.save(found, folder / f"found_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
