"""The tables and lines of the command `plan`.

Invariant: each line says what is an estimate. Deliberately not here: the figures
(`verl_ray/planning`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table

from verl_ray.config.tasks.rl import RLConfig
from verl_ray.planning.search import Misfit, Plan
from verl_ray.preflight.machine import GIB, OPTION, Machine, as_described
from verl_ray.preflight.remaining_memory import USED_SHARE
from verl_ray.preflight.time_model import assumptions
from verl_ray.preflight.time_model.step_time import StepTime
from verl_ray.shell import for_shell

_WIDTH = 80

DATA = ("data.train_path=train.jsonl", "data.validation_path=validation.jsonl")
"""Names that stand for the data, which a plan does not read."""

_SLOW_SYNC_SHARE = 0.2
"""Share of a step from which on a slow weight sync is pointed out."""


def time_table(time: StepTime, machine: Machine) -> Table:
    """Return the seconds of each phase, and how long each pool is idle."""
    table = Table(
        title=f"a step takes about {_seconds(time.total_s)} s (estimate)",
        title_justify="left",
    )
    table.add_column("phase", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for phase, seconds in time.seconds.items():
        share = f"{100 * seconds / time.total_s:.0f} %"
        table.add_row(phase, _seconds(seconds), share)

    table.add_section()
    total = machine.total_gpus
    idle = {
        f"trainers idle ({time.trainer_gpus} GPUs)": time.idle_share_of_trainers,
        f"engines idle ({time.engine_gpus} GPUs)": time.idle_share_of_engines,
        f"all GPUs idle ({total} GPUs)": time.idle_share_of(total),
    }
    for name, share_of_step in idle.items():
        table.add_row(name, "", f"{100 * share_of_step:.0f} %")
    return table


def _seconds(seconds: float) -> str:
    """Return seconds with two digits, or whole ones."""
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def origin_lines(plan: Plan, machine: Machine) -> str:
    """Return where the figures come from, and what should be known of the proposal."""
    config = plan.config
    lines = [
        f"compared: {plan.tried} configurations; the fastest that fits is proposed",
        "measured: the memory of processes without their models, on a CPU; nothing of"
        " this plan on a GPU",
        "counted: weights, gradients, optimizer state, KV cache, FLOPs, bytes moved",
        "estimated: activations, buffers and all seconds, from the peaks of data"
        f" sheets with {100 * assumptions.TRAINING_EFFICIENCY:.0f} % of the FLOPs"
        f" (training), {100 * assumptions.DECODE_BANDWIDTH_SHARE:.0f} % of the memory"
        f" bandwidth (decoding) and {100 * assumptions.NETWORK_SHARE:.0f} % of the"
        " links; responses have half of the greatest length in the mean"
        " (docs/planning.md)",
    ]
    unused = machine.total_gpus - plan.time.used_gpus
    if unused:
        lines.append(
            f"unused: {unused} of {machine.total_gpus} GPUs; no configuration that was"
            " compared is clearly faster with more of them"
        )
    if config.actor.backend.packages:
        lines.append(f"needs: the packages of backend={config.actor.backend.kind}")
    publish_share = plan.time.seconds["publish"] / plan.time.total_s
    slow = config.rollout.sync.wire == "host_broadcast"
    if slow and publish_share > _SLOW_SYNC_SHARE:
        lines.append(
            "publish: weights travel over gloo between hosts, which is what"
            " rollout.sync.transport=auto chooses; with placement=separate,"
            " rollout.sync.transport=broadcast uses NCCL, and has not run on a GPU yet"
        )
    return "\n".join(lines)


def misfit_lines(misfit: Misfit) -> str:
    """Return what is short, and which machine would do."""
    shortage = misfit.shortage
    backend = misfit.config.actor.backend
    lines = [
        "nothing fits. Nearest comes"
        f" {backend.description(misfit.config.actor.num_ranks)} with"
        f" placement={misfit.config.placement.kind}, which in the phase"
        f" {shortage.phase} needs {shortage.needed / GIB:.1f} GiB of"
        f" {shortage.place}; a plan may fill {shortage.available / GIB:.1f} GiB"
        f" ({100 * USED_SHARE:.0f} %)",
    ]
    if misfit.larger is not None:
        lines.append(
            f"more memory of the hosts would do: {OPTION} {as_described(misfit.larger)}"
        )

    if misfit.smallest is None:
        lines.append("no listed machine would do")
    else:
        lines.append(
            "the smallest listed machine that would do:"
            f" {OPTION} {as_described(misfit.smallest)}"
        )
    return "\n".join(lines)


def plan_overrides(config: RLConfig, base: RLConfig) -> list[str]:
    """Return the overrides that turn a root config into a proposed configuration.

    Args:
        config: The proposed configuration.
        base: Composed configuration with the same backend.
    """
    backend = config.actor.backend
    overrides = [f"backend={backend.kind}"]
    usual = base.actor.backend.model_dump()
    for name, value in backend.model_dump().items():
        if value != usual[name]:
            overrides.append(f"backend.{name}={json.dumps(value).strip(chr(34))}")

    overrides.append(f"actor.num_ranks={config.actor.num_ranks}")
    if config.has_reference:
        reference = config.reference
        if reference.num_ranks != config.actor.num_ranks:
            overrides.append(f"reference.num_ranks={reference.num_ranks}")
        tokens = reference.backend.micro_batch_tokens_per_rank
        if tokens != backend.micro_batch_tokens_per_rank:
            key = "reference.backend.micro_batch_tokens_per_rank"
            overrides.append(f"{key}={tokens}")

    placement = config.placement
    overrides.append(f"placement={placement.kind}")
    if placement.kind == "colocated":
        overrides.append(f"placement.offload={placement.offload}")

    rollout = config.rollout
    return [
        *overrides,
        f"rollout.num_replicas={rollout.num_replicas}",
        f"rollout.tensor_parallel={rollout.tensor_parallel}",
        f"rollout.dtype={rollout.dtype}",
        f"rollout.kv_cache_gib={rollout.kv_cache_gib}",
    ]


def command_line(root: str, overrides: Sequence[str]) -> str:
    """Return the command that trains with overrides, in lines that can be copied."""
    lines = [f"verl-ray train --config-name {root}"]
    for word in [*overrides, *DATA]:
        text = for_shell([word])
        if len(lines[-1]) + len(text) + 3 > _WIDTH:
            lines.append("   ")
        lines[-1] += f" {text}"
    return "copy, with data of your own:\n  " + " \\\n  ".join(lines)
