"""Settings without a device are problems; devices with nothing to do are warnings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.preflight.configs import BIG, job_on, ppo, problems_by_key, with_judge
from tests.preflight.published import published
from verl_ray.preflight.devices import idle_gpus, ranks_on_idle_gpus
from verl_ray.preflight.findings import preflight
from verl_ray.preflight.machine import GIB, Machine

SMALL = "Qwen2.5-0.5B"
NODE = "gpus=8,gpu=H100-80G"
JUDGE = (
    "reward=judge",
    f"reward.model.path={published(SMALL)}",
    "reward.max_prompt_tokens=1024",
    "reward.max_response_tokens=512",
)


def test_ranks_without_rows_are_a_warning(model: Path, data: Path) -> None:
    overrides = ["actor.num_ranks=4", "actor.mini_batch_size=2"]
    warnings = preflight(ppo(model, data, *overrides), BIG).warnings
    assert warnings[0].startswith(
        "actor.num_ranks=4 share mini-batches of 2 rows: 2 ranks have nothing to do"
    )


def test_ranks_that_share_their_rows_idle_together(model: Path, data: Path) -> None:
    overrides = ["backend=fsdp", "actor.num_ranks=8", "backend.sequence_parallel=2"]
    idle = preflight(
        ppo(model, data, *overrides, "actor.mini_batch_size=2"), BIG
    ).warnings
    assert idle[0].startswith(
        "actor.num_ranks=8 share mini-batches of 2 rows: 4 ranks have nothing to do"
    )
    assert (
        preflight(ppo(model, data, *overrides, "actor.mini_batch_size=4"), BIG).warnings
        == []
    )


def test_more_gpus_than_there_are_is_a_problem(model: Path, data: Path) -> None:
    four = Machine(cores=8, gpus=4, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    assert preflight(ppo(model, data, "actor.num_ranks=4"), four).problems == []
    config = ppo(
        model,
        data,
        "placement=separate",
        "rollout.num_replicas=2",
        "rollout.tensor_parallel=2",
    )
    message = problems_by_key(preflight(config, four))["rollout.num_replicas"]
    assert (
        "needs 7 GPUs (actor 1 + critic 1 + reference 1 + rollout 4), and this machine has 4"
        in message
    )
    assert "Lower it by 3" in message


def test_tensor_parallel_engines_share_the_gpus_of_whole_groups_of_ranks(
    model: Path, data: Path
) -> None:
    eight = Machine(cores=8, gpus=8, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    two_ranks = ("rollout.tensor_parallel=2", "backend=fsdp")
    cases = {
        (): ("tensor_parallel", "do not divide 1 | The nearest that do are 1 in all;"),
        ("actor.num_ranks=3",): ("tensor_parallel", "its 2 ranks do not divide 3"),
        ("actor.num_ranks=4", "rollout.num_replicas=3"): (
            "num_replicas", "4 have those of 2 engines of 2 | Use at most 2, or auto.",
        ),
    }  # fmt: skip
    for changes, (key, words) in cases.items():
        found = preflight(ppo(model, data, *two_ranks, *changes), eight)
        assert words in problems_by_key(found)[f"rollout.{key}"]

    # Ranks 2 and 3 would be on two nodes.
    sixes = replace(eight, gpus=3, nodes=4)
    four = ppo(model, data, *two_ranks, "actor.num_ranks=4")
    found = problems_by_key(preflight(four, sixes))["rollout.tensor_parallel"]
    assert "has 3 GPUs | The nearest that divide them are 1 or 3." in found
    assert preflight(four, eight).problems == []
    assert (
        preflight(
            ppo(model, data, "rollout.tensor_parallel=2", "placement=separate"), eight
        ).problems
        == []
    )
    assert preflight(ppo(model, data, "rollout.tensor_parallel=2"), BIG).problems == []


def test_an_engine_argument_that_is_fixed_on_a_cpu(model: Path, data: Path) -> None:
    config = ppo(model, data, "rollout.vllm_args.enforce_eager=false")
    assert (
        "may not change on a CPU"
        in problems_by_key(preflight(config, BIG))["rollout.vllm_args.enforce_eager"]
    )
    on_gpu = Machine(cores=8, gpus=8, memory_bytes=2 * GIB, shm_free_bytes=GIB)
    assert preflight(config, on_gpu).problems == []


def test_device_memory_is_not_shared_without_devices(model: Path, data: Path) -> None:
    config = ppo(model, data, "rollout.sync.transport=cuda_ipc")
    assert (
        "this machine has none"
        in problems_by_key(preflight(config, BIG))["rollout.sync.transport"]
    )
    on_gpu = Machine(cores=8, gpus=8, memory_bytes=8 * GIB, shm_free_bytes=GIB)
    assert preflight(config, on_gpu).problems == []


def test_nothing_leaves_a_gpu_where_there_is_none(model: Path, data: Path) -> None:
    config = ppo(model, data, "placement.offload=optimizer")
    assert (
        "it frees GPUs, and this machine has none"
        in problems_by_key(preflight(config, BIG))["placement.offload"]
    )
    on_gpu = Machine(cores=8, gpus=8, memory_bytes=8 * GIB, shm_free_bytes=GIB)
    assert preflight(config, on_gpu).problems == []
    assert preflight(ppo(model, data, "placement.offload=none"), BIG).problems == []


def test_an_evaluation_needs_the_gpus_of_its_own_roles_alone(
    model: Path, data: Path
) -> None:
    # The actor has one of four GPUs, and engines on auto take what it leaves; critic
    # and reference have no processes.
    four = Machine(cores=8, gpus=4, memory_bytes=64 * GIB, shm_free_bytes=8 * GIB)
    config = ppo(model, data, "placement=separate")
    assert preflight(config, four, evaluates=True).problems == []
    # Nor has a judge of training where held-out problems have functions of their own.
    functions = "evaluation.functions={default: exact_match}"
    judge = with_judge(model, data, model, "reward.engine.num_replicas=9", functions)
    assert preflight(judge, four, evaluates=True).problems == []
    assert "reward.engine.num_replicas" in problems_by_key(preflight(judge, four))


# ----------------------------------------------------------------------------- idle GPUs


@pytest.mark.parametrize(
    ("machine", "overrides", "words"),
    [
        (
            f"nodes=2,{NODE}",
            ("actor.num_ranks=8", *JUDGE),
            "the machine has 16 GPUs, and the run uses 9 (actor 8 + reward 1): 7 are"
            " idle; use them with actor.num_ranks=15",
        ),
        # Engines of their own come first: 8 - 1 - 1 - 2 leave 4, two engines more.
        (
            NODE,
            (
                "placement=separate",
                "rollout.num_replicas=1",
                "rollout.tensor_parallel=2",
            ),
            "the run uses 4 (actor 1 + reference 1 + rollout 2): 4 are idle; use them"
            " with rollout.num_replicas=3",
        ),
        # Of 16 GPUs trainers have two, and two rows employ two engines.
        (
            f"nodes=2,{NODE}",
            (
                "placement=separate",
                "rollout.num_replicas=1",
                "data.prompts_per_step=1",
                "rollout.group_size=2",
            ),
            "13 are idle; use them with rollout.num_replicas=2",
        ),
        (
            f"nodes=2,{NODE}",
            (
                "placement=separate",
                "rollout.num_replicas=2",
                "data.prompts_per_step=1",
                "rollout.group_size=2",
            ),
            "12 are idle; each row has an engine already; if that is faster, use them"
            " with actor.num_ranks=2",
        ),
        # Two GPUs make no engine of four; auto takes no more than one.
        (
            NODE,
            ("placement=separate", "rollout.tensor_parallel=4"),
            "2 are idle; use them with actor.num_ranks=3",
        ),
    ],
)
def test_gpus_without_a_process_are_told_with_the_key_to_change(
    machine: str, overrides: tuple[str, ...], words: str
) -> None:
    (warning,) = idle_gpus(job_on(machine, *overrides, model=SMALL))
    assert words in warning


def test_no_gpu_is_idle_where_all_are_used_or_others_may_use_them(
    model: Path, data: Path
) -> None:
    for overrides in (("actor.num_ranks=8",), ("placement=separate",)):
        assert list(idle_gpus(job_on(NODE, *overrides, model=SMALL))) == []
    # Of a cluster nothing is known; an evaluation takes minutes.
    eight = Machine(cores=64, gpus=8, memory_bytes=GIB * 512, shm_free_bytes=GIB * 64)
    config = ppo(model, data)
    assert preflight(config, None).warnings == []
    assert preflight(config, eight, evaluates=True).warnings == []
    (warning,) = preflight(config, eight).warnings
    assert warning.startswith("this machine has 8 GPUs, and the run uses 1 (actor 1)")


def test_engines_without_a_row_are_told() -> None:
    few = ("placement=separate", "data.prompts_per_step=1", "rollout.group_size=2")
    job = job_on(NODE, *few, "rollout.num_replicas=6", model=SMALL)
    (warning,) = idle_gpus(job)
    assert warning == (
        "rollout.num_replicas=6 share at most 2 rows at a time (1 prompts x 2 = 2"
        " rows): 4 engines have nothing to do"
    )
    # Two batches are open at a time.
    ahead = job_on(
        NODE, *few, "rollout.num_replicas=6", "schedule=one_step_off", model=SMALL
    )
    (warning,) = idle_gpus(ahead)
    assert "at most 4 rows at a time" in warning and "2 engines have" in warning


def test_shared_gpus_without_an_engine_or_a_trainer() -> None:
    lone = job_on(NODE, "actor.num_ranks=8", "rollout.num_replicas=1", model=SMALL)
    (warning,) = idle_gpus(lone)
    assert warning.startswith("7 of 8 GPUs have no rollout engine, and are idle while")
    (warning,) = idle_gpus(job_on(NODE, "rollout.num_replicas=8", model=SMALL))
    assert warning.startswith("7 of 8 GPUs have an engine alone, and are idle while")


@pytest.mark.parametrize(
    ("overrides", "root", "ranks"),
    [
        # Roles on one backend have equal numbers of ranks.
        ((), "grpo", {"actor.num_ranks": 8, "reference.num_ranks": 8}),
        # A copy of the model takes two ranks, and the judge leaves seven GPUs.
        (
            (
                "backend=megatron",
                "backend.tensor_parallel=2",
                "actor.num_ranks=2",
                *JUDGE,
            ),
            "grpo",
            {"actor.num_ranks": 6, "reference.num_ranks": 6},
        ),
        # Each rank has a row of every update.
        (("sft.batch_size=4",), "sft", {"actor.num_ranks": 4}),
        (("sft.batch_size=1",), "sft", {}),
        # A pair has two rows.
        (("preference.batch_size=3",), "reward_model", {"reward.num_ranks": 6}),
        # Five are left by actor, reference and one engine.
        (
            ("placement=separate", "rollout.num_replicas=1"),
            "grpo",
            {"actor.num_ranks": 6},
        ),
    ],
)
def test_ranks_on_idle_gpus_are_those_that_backend_and_rows_allow(
    overrides: tuple[str, ...], root: str, ranks: dict[str, int]
) -> None:
    job = job_on(NODE, *overrides, root=root, model=SMALL)
    assert ranks_on_idle_gpus(job, [job.config.evaluated_role]) == ranks
