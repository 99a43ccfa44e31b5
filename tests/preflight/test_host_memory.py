"""Hosts of nodes: a lower bound is refused, an estimate warns. Qwen3-8B on 8 ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.preflight.configs import job_on
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import (
    NODE_BYTES,
    PROCESS_BYTES,
    Job,
    MemoryPlan,
    PlannedProcesses,
)
from verl_ray.preflight.resources import memory_problems, memory_warnings
from verl_ray.preflight.role_memory import RoleMemory

NODE = "gpus=8,gpu=H100-80G"
FSDP = ("backend=fsdp", "actor.num_ranks=8", "run.recovery.snapshot_every=0")
PARAMETERS = 8_190_735_360

PROCESSES = (
    8 * PROCESS_BYTES["trainer"]
    + 8 * PROCESS_BYTES["rollout"]
    + PROCESS_BYTES["reward"]
)
OFFLOADED = (12 + 4) * PARAMETERS + PROCESSES
"""Weights and moments of the actor, and weights of the reference, in float32."""

ON_THE_HOST = (16 + 4) * PARAMETERS + PROCESSES
"""Of parameters that stay there, the gradients as well."""


def on(job: Job, nbytes: int, nodes: int = 1) -> Job:
    """Return the run on nodes of another size."""
    return replace(job, machine=replace(job.machine, memory_bytes=nbytes, nodes=nodes))


def told(job: Job) -> tuple[int, int]:
    """Return the number of problems and of warnings."""
    return len(list(memory_problems(job))), len(list(memory_warnings(job)))


@pytest.mark.parametrize(
    ("overrides", "needed", "fix"),
    [
        (("placement.offload=all",), OFFLOADED, "placement.offload=none"),
        (
            ("backend.host_parameters=true",),
            ON_THE_HOST,
            "backend.host_parameters=false",
        ),
    ],
)
def test_what_is_counted_is_refused(
    overrides: tuple[str, ...], needed: int, fix: str
) -> None:
    job = job_on(NODE, *FSDP, *overrides)
    (problem,) = memory_problems(on(job, needed - GIB // 50))
    assert f"at least {needed / GIB:.1f} GiB" in problem.rule
    # An eighth of 8 bytes of each parameter.
    assert "; 7.6 for optimizer of each rank of actor)" in problem.rule
    assert problem.fix.endswith(f"{fix}.")
    # What a node needs besides is estimated.
    assert told(on(job, needed + GIB // 50)) == (0, 1)
    assert told(on(job, needed + NODE_BYTES)) == (0, 0)


def test_ranks_on_one_node_need_its_host_alone() -> None:
    # 16 GPUs, of which the run fills one node; without that node's cores it may not.
    enough = ON_THE_HOST + NODE_BYTES
    job = on(job_on(NODE, *FSDP, "backend.host_parameters=true"), enough, nodes=2)
    assert told(job) == (0, 0)
    (problem,) = memory_problems(on(job, 100 * GIB, nodes=2))
    assert problem.rule.endswith("of a node")
    assert "A node has 100.0 GiB" in problem.fix
    assert problem.fix.endswith("is actor.num_ranks=16 reference.num_ranks=16.")
    few = replace(job.machine, cores=8)
    spread = on(replace(job, machine=few), 100 * GIB, nodes=2)
    assert told(spread) == (0, 1)


def test_what_is_estimated_is_a_warning() -> None:
    # Each of 16 processes keeps what was sent last, in bfloat16, beside itself.
    delta = ("rollout.sync.transport=broadcast", "rollout.sync.delta=true")
    job = job_on(NODE, *FSDP, "placement.offload=none", *delta)
    estimated = PROCESSES + 16 * 2 * PARAMETERS + NODE_BYTES
    small = on(job, estimated - GIB // 50)
    assert list(memory_problems(small)) == []
    (warning,) = memory_warnings(small)
    assert f"estimated to need {estimated / GIB:.1f} of one" in warning
    assert warning.endswith("is rollout.sync.delta=false")
    assert told(on(job, estimated)) == (0, 0)


def test_too_many_processes_are_named() -> None:
    job = job_on(NODE, *FSDP, "reward.num_ranks=400", "placement.offload=none")
    (problem,) = memory_problems(on(job, 100 * GIB))
    assert problem.key == "reward.num_ranks"
    assert "416 processes (trainer 8 + rollout 8 + reward 400)" in problem.rule


def test_the_fullest_node_has_at_least_its_share_and_at_least_a_node_of_gpus() -> None:
    def processes(name: str, ranks: int) -> PlannedProcesses:
        return PlannedProcesses(
            "trainer", (name,), ranks, device=name, key="k", value=1
        )

    def memory(nbytes: int) -> dict[str, RoleMemory]:
        # A process is counted with each rank.
        return {
            "learn": RoleMemory(on_host={"weights": nbytes - PROCESS_BYTES["trainer"]})
        }

    plan = MemoryPlan(
        True,
        ("learn",),
        (processes("actor", 6), processes("reference", 2)),
        {"actor": memory(10 * GIB), "reference": memory(2 * GIB)},
    )
    machine = replace(job_on(NODE, *FSDP).machine, gpus=4)
    # 64 GiB on two nodes are 32 each; on four, two of which are idle, the four GPUs
    # with least have 2 + 2 + 10 + 10.
    shares = [
        plan.least_node_bytes("learn", replace(machine, nodes=nodes)) / GIB
        for nodes in (1, 2, 4)
    ]
    assert shares == [64, 32, 24]
    # At most, the four with most are on one node, which the driver may be on.
    assert plan.node_bytes("learn", 4) == 40 * GIB + NODE_BYTES
    assert plan.host_bytes("learn", nodes=2) == 64 * GIB + 2 * NODE_BYTES
