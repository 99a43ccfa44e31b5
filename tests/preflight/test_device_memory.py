"""Lower bounds of a GPU are refused, estimates above it are warnings: of Qwen3-8B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.preflight.configs import job_on
from tests.preflight.published import published
from verl_ray.backends.base import BytesPerPart
from verl_ray.preflight.device_memory import counted, least_device_bytes, least_of_a_row
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import Job, MemoryPlan, PlannedProcesses
from verl_ray.preflight.resources import memory_problems, memory_warnings
from verl_ray.preflight.role_memory import RoleMemory

NODE = "gpus=8,gpu=H100-80G"
FSDP = ("backend=fsdp", "actor.num_ranks=8")
PARAMETERS = 8_190_735_360
HEAD = 151_936 * 4096
ADAPTER = 16 * 36 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
"""Of rank 16 on the seven matrices of each layer."""
LONG = ("data.max_prompt_tokens=1024", "rollout.max_response_tokens=130048")


def on(job: Job, gib: float) -> Job:
    """Return the run on GPUs of another size."""
    return replace(job, machine=replace(job.machine, gpu_memory_bytes=int(gib * GIB)))


def needed_gib(job: Job) -> float:
    return job.memory.fullest(on_device=True)[1] / GIB


def test_an_estimate_above_the_gpu_warns_with_the_cheapest_change() -> None:
    job = job_on(
        NODE, *FSDP, "backend.accumulate=whole", "backend.micro_batch_tokens_per_rank=8192",
        "backend.activation_checkpointing=true", "rollout.kv_cache_gib=2",
    )  # fmt: skip
    small = on(job, needed_gib(job) - 20)
    assert list(memory_problems(small)) == []
    # Whole gradients in float32 are 30.5 GiB, and an eighth of it is enough.
    (warning,) = memory_warnings(small)
    assert "learn is estimated to need" in warning
    assert warning.endswith("fit is actor.backend.accumulate=sharded")
    assert list(memory_warnings(on(job, needed_gib(job)))) == []


def test_a_row_that_cannot_fit_is_refused_although_the_rest_is_estimated() -> None:
    # Activations of 131,072 tokens, recomputed: each layer keeps its input alone, of
    # 4096 numbers in bfloat16, 1 GiB per layer.
    job = job_on(NODE, *FSDP, *LONG)
    _, certain = job.memory.fullest(on_device=True, certain=True)
    kept = 36 * 131_072 * 4096 * 2
    assert job.memory.by_role["actor"]["learn"].of("activations") > kept

    (problem,) = memory_problems(on(job, (certain + kept // 3) / GIB))
    assert "one row of the greatest length take at least" in problem.rule
    # Half of what is estimated counts, and is what is told.
    estimated = job.memory.by_role["actor"]["learn"].of("activations") / GIB
    assert f"(learn: {estimated / 2:.1f} of it activations of actor)" in problem.rule
    assert "backend.sequence_parallel=" in problem.fix
    large = on(job, needed_gib(job))
    assert list(memory_problems(large)) == []
    assert list(memory_warnings(large)) == []


def test_what_is_refused_is_not_told_twice() -> None:
    job = job_on(NODE, *FSDP, *LONG)
    small = on(job, least_device_bytes(*least_of_a_row(job)) / GIB - 0.1)
    assert len(list(memory_problems(small))) == 1
    assert list(memory_warnings(small)) == []


def test_a_gpu_of_unknown_size_is_not_checked() -> None:
    job = job_on(NODE, *FSDP, *LONG)
    other = replace(job, machine=replace(job.machine, gpu_memory_bytes=None))
    assert list(memory_problems(other)) == []
    assert list(memory_warnings(other)) == []


# ----------------------------------------------------------------------- the lower bound


def test_gradients_of_one_role_are_not_there_with_activations_of_another() -> None:
    def memory(gradients: int, activations: int) -> RoleMemory:
        held: BytesPerPart = {"weights": 100, "optimizer": 200, "buffers": 7}
        working: BytesPerPart = {"gradients": gradients, "activations": activations}
        return RoleMemory(held, {**working, "buffers": 1000})

    roles = {"actor": memory(40, 20), "critic": memory(10, 60)}
    trainers = PlannedProcesses(
        "trainer", ("actor", "critic"), 1, device="shared", key="k", value=1
    )
    engine = PlannedProcesses(
        "rollout", ("rollout",), 1, device="shared", key="k", value=1
    )
    asleep = RoleMemory({"weights": 30}, {"activations": 5000})
    by_role = {name: {"learn": memory} for name, memory in roles.items()}
    plan = MemoryPlan(
        True, ("learn",), (trainers, engine), {**by_role, "rollout": {"learn": asleep}}
    )
    # Twice 300, and 40 + 20 / 2 rather than 10 + 60 / 2; of the engine its weights.
    assert least_device_bytes(counted(plan), "learn") == 600 + 50 + 30


@pytest.mark.parametrize(
    ("overrides", "root", "needed"),
    [
        # An eighth of 16 bytes that learn, and of 4 of the reference.
        ((), "grpo", (16 + 4) / 8 * PARAMETERS),
        # Gradients are those of one role at a time; a value head is nothing.
        ((), "ppo", (16 + 4) / 8 * PARAMETERS + 12 / 8 * (PARAMETERS - HEAD)),
        (
            ("reward=model", f"reward.model.path={published('Qwen3-8B')}"),
            "grpo",
            (16 + 4) / 8 * PARAMETERS + 4 / 8 * (PARAMETERS - HEAD),
        ),
        # Each rank has a copy of 2 + 4 bytes, and an eighth of 12 more.
        (("backend=megatron",), "grpo", (6 + 12 / 8 + 2) * PARAMETERS),
        # Weights, moments and DDP's gradients, with nothing shared.
        (("backend=engine",), "grpo", (16 + 4) * PARAMETERS),
        # The reference is the actor without its adapter.
        (("actor.lora.rank=16",), "grpo", 4 / 8 * PARAMETERS + 16 / 8 * ADAPTER),
        ((), "sft", 16 / 8 * PARAMETERS),
        (("reward.num_ranks=8",), "reward_model", 16 / 8 * (PARAMETERS - HEAD)),
    ],
)
def test_what_a_gpu_holds_of_each_role(
    overrides: tuple[str, ...], root: str, needed: float
) -> None:
    ranks = () if root == "reward_model" else ("actor.num_ranks=8",)
    job = job_on(NODE, "backend=fsdp", *ranks, *overrides, root=root)
    plan = replace(job.memory, by_role=without_activations(job.memory))
    assert least_device_bytes(counted(plan), "learn") == pytest.approx(needed, rel=1e-6)


def without_activations(plan: MemoryPlan) -> dict[str, dict[str, RoleMemory]]:
    """Return the memory of each role without its activations, and of no engine."""
    return {
        name: {
            phase: replace(memory, working={**memory.working, "activations": 0})
            for phase, memory in phases.items()
        }
        for name, phases in plan.by_role.items()
        if name != "rollout"
    }


# ------------------------------------------------------------------------------ in words


@pytest.mark.parametrize(
    ("overrides", "root", "words"),
    [
        # One GPU of eight: a backend that shares models out is chosen as a whole.
        ((), "grpo", "backend=fsdp actor.num_ranks=8 reference.num_ranks=8 shares out"),
        (
            ("actor.num_ranks=8",),
            "grpo",
            "backend=fsdp shares out models of which each",
        ),
        ((), "reward_model", "backend=fsdp reward.num_ranks=8 shares out models"),
        (
            ("backend=fsdp",),
            "sft",
            "cheapest change that would fit is actor.num_ranks=8",
        ),
    ],
)
def test_models_are_shared_out_over_idle_gpus(
    overrides: tuple[str, ...], root: str, words: str
) -> None:
    (problem,) = memory_problems(job_on(NODE, *overrides, root=root))
    assert words in problem.fix


def test_engines_that_share_gpus_share_a_model_out() -> None:
    (problem,) = memory_problems(
        job_on(
            "gpus=64,gpu=H100-80G",
            "backend=fsdp",
            "actor.num_ranks=64",
            model="Llama-3.1-70B",
        )
    )
    assert "131.4 of it weights of rollout" in problem.rule
    fits = "the cheapest change that would fit is rollout.tensor_parallel=2."
    assert problem.fix.endswith(fits)
    # Wherever most is needed, the engine's model alone is too large.
    worse, *_ = memory_problems(
        job_on(
            "gpus=8,gpu=H100-80G",
            "backend=fsdp",
            "actor.num_ranks=8",
            "rollout.max_response_tokens=130048",
            "rollout.kv_cache_gib=50",
            model="Llama-3.1-70B",
        )
    )
    assert "GiB of a GPU (learn: " in worse.rule
    assert "no setting that was tried is enough: take a smaller model" in worse.fix


def test_where_nothing_that_is_tried_fits_that_is_said() -> None:
    # Eight ranks that share matrices on shared GPUs would do.
    job = job_on(
        "gpus=8,gpu=L40S-48G,memory=2T", "backend=megatron", "placement=separate",
        "actor.num_ranks=2", "rollout.max_response_tokens=16384",
        "backend.tensor_parallel=2", root="ppo",
    )  # fmt: skip
    (problem,) = memory_problems(job)
    assert problem.fix.endswith(
        "no setting that was tried is enough: take a smaller model or a larger machine."
    )


def test_gpus_and_hosts_that_are_too_small_get_one_advice() -> None:
    job = job_on(
        "nodes=2,gpus=8,gpu=H100-80G,memory=100G", *FSDP, "placement.offload=all",
        "backend.activation_checkpointing=false",
        "backend.micro_batch_tokens_per_rank=65536",
    )  # fmt: skip
    told = [problem.fix for problem in memory_problems(job)]
    told += memory_warnings(job)
    advice = [text for text in told if "cheapest change" in text]
    assert len(told) == 2 and len(advice) == 1
    (other,) = set(told) - set(advice)
    assert other.rstrip(".").endswith("the same is needed here as for the hosts")
