"""Who holds what in which phase, and what that makes of a device and of a host."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.preflight.configs import (
    NO_GAIN,
    distilling,
    planned,
    ppo,
    settled,
    with_judge,
)
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.preflight.footprints import wire_bytes
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import (
    PROCESS_BYTES,
    RESIDENT_BYTES,
    MemoryPlan,
    memory_plan,
)
from verl_ray.preflight.role_memory import Phase
from verl_ray.preflight.tables import memory_table, print_tables


def made(*overrides: str, on_gpus: bool = True) -> MemoryPlan:
    """Of a run that makes its model, of 789,888 parameters: 256 rows of at most 16 + 8
    tokens.
    """
    return planned(compose("quickstart", list(overrides)), on_gpus=on_gpus)


MODELS = Path(__file__).parents[1] / "model_configs"
PARAMETERS = 4 * (2 * 128 * 192 + 64 + 3 * 128 * 384 + 256) + 128 + 14 * 128
CACHE = GIB // 16


def held(found: MemoryPlan, role: str) -> dict[Phase, int]:
    return {
        phase: sum(found.by_role[role][phase].persistent.values())
        for phase in found.phases
    }


def test_roles_that_share_gpus_take_turns_with_the_rollout_engine() -> None:
    found, weights = made(), 4 * PARAMETERS
    assert held(found, "actor") == {
        "generate": 0,
        "measure": 3 * weights,
        "learn": 3 * weights,
        "publish": weights,
    }
    assert (
        sum(found.by_role["actor"]["publish"].on_host.values()) == 2 * weights
    )  # the sync does not read the optimizer
    assert held(found, "critic")["publish"] == held(found, "reference")["publish"] == 0
    assert sum(found.by_role["actor"]["generate"].on_host.values()) == 3 * weights
    assert held(found, "rollout") == {
        "generate": weights + CACHE,
        "measure": 0,
        "learn": 0,
        "publish": weights,
    }


def test_what_leaves_a_shared_gpu_is_what_the_configuration_says() -> None:
    weights = 4 * PARAMETERS
    for offload, stays in (("all", 0), ("optimizer", weights), ("none", 3 * weights)):
        found = made(f"placement.offload={offload}")
        generate = found.by_role["actor"]["generate"]
        assert (
            sum(generate.persistent.values()) == stays
            and sum(generate.on_host.values()) == 3 * weights - stays
        )
        assert held(found, "actor")["learn"] == 3 * weights
        assert sum(found.by_role["reference"]["generate"].persistent.values()) == (
            0 if offload == "all" else weights
        )
        sent = found.by_role["actor"]["publish"]
        assert sum(sent.persistent.values()) == (
            3 * weights if offload == "none" else weights
        )
        assert held(found, "critic")["publish"] == stays


def test_what_sleeps_is_what_the_configuration_says() -> None:
    weights = 4 * PARAMETERS
    for sleep, in_learn, in_publish in (
        ("never", weights + CACHE, weights + CACHE), ("kv_cache", weights, weights), ("weights", 0, weights)
    ):  # fmt: skip
        phases = held(made(f"rollout.sleep={sleep}"), "rollout")
        assert (phases["learn"], phases["publish"]) == (in_learn, in_publish)
    apart = made("placement=separate")
    assert (
        held(apart, "rollout")["learn"] == weights + CACHE
    )  # its devices are its own: it never sleeps
    assert held(apart, "actor")["generate"] == 3 * weights


def test_ddps_buckets_leave_but_host_parameters_stay() -> None:
    in_ddp = made("actor.num_ranks=2")
    assert (
        held(in_ddp, "actor")["learn"] == 16 * PARAMETERS
    )  # weights, two moments, gradients in buckets
    assert (
        held(in_ddp, "actor")["generate"] == 0
        and in_ddp.by_role["actor"]["generate"].on_host.get("gradients", 0) == 0
    )
    assert held(in_ddp, "actor")["publish"] == 4 * PARAMETERS  # the weights alone
    megatron = made("backend=megatron", "placement.offload=optimizer")
    assert (
        held(megatron, "actor")["generate"]
        == held(megatron, "actor")["publish"]
        == 4 * PARAMETERS
    )
    package = made("backend=megatron_fsdp", "backend.sharding=none")
    assert (
        held(package, "actor")["publish"] == 8 * PARAMETERS
    )  # with its buffers of gradients
    found = made("backend=fsdp", "backend.host_parameters=true")
    assert set(held(found, "actor").values()) == {0}
    assert (
        sum(found.by_role["actor"]["learn"].on_host.values()) == 16 * PARAMETERS
    )  # gradients, too


def test_a_device_holds_all_that_share_it_and_roles_of_one_process_compute_in_turn() -> (
    None
):
    found = made()
    uses = {
        role: found.by_role[role]["learn"] for role in ("actor", "critic", "reference")
    }
    working = [sum(use.working.values()) for use in uses.values()]
    together = sum(sum(use.persistent.values()) for use in uses.values()) + max(working)
    assert found.predicted("actor", "learn") == together - max(working) + working[0]
    assert found.device_bytes("learn") == together + 2 * (
        GIB // 2
    )  # and a context of each of two processes
    # 3 x 4 bytes of the actor and the critic each, 4 of the reference, and gradients of
    # one of them
    assert found.device_bytes("learn", certain=True) == (12 + 12 + 4 + 4) * PARAMETERS
    apart = made("placement=separate")
    assert (
        apart.device_bytes("learn", certain=True) == CACHE + 4 * PARAMETERS
    )  # the cache is more than the actor's 16


def test_on_a_cpu_everything_is_the_hosts_on_all_ranks() -> None:
    found = made("actor.num_ranks=2", on_gpus=False)
    assert found.device_bytes("learn") == 0
    processes = (
        2 * PROCESS_BYTES["trainer"]
        + PROCESS_BYTES["rollout"]
        + PROCESS_BYTES["reward"]
    )
    # With two ranks each holds gradients of the actor and the critic, in buckets that
    # stay.
    state = 2 * (16 + 16 + 4) * PARAMETERS + 4 * PARAMETERS + CACHE
    assert (
        found.host_bytes("learn", certain=True)
        == found.host_bytes("measure", certain=True)
        == processes + state
    )
    assert found.host_bytes("learn") > processes + state
    # What was needed for an update is kept; and the actor has the wire open.
    kept = max(
        sum(use.working.values())
        for role in ("actor", "critic")
        for use in found.by_role[role].values()
    )
    every = RESIDENT_BYTES["trainer"] + (16 + 16 + 4 + 4) * PARAMETERS + kept
    assert (
        found.predicted("reference", "publish")
        == found.predicted("actor", "learn")
        == every
    )


def test_the_wire_is_open_where_weights_are_written_and_read() -> None:
    config = settled(compose("quickstart"))
    assert isinstance(config, RLConfig)
    assert wire_bytes(config) == 2 * (2 << 20)  # a half of 3 MiB, rounded up
    whole = settled(compose("quickstart", ["rollout.sync.bucket_mib=16"]))
    assert isinstance(whole, RLConfig) and wire_bytes(whole) == 2 * 4 * PARAMETERS
    apart = settled(compose("quickstart", ["rollout.sync.transport=broadcast"]))
    assert isinstance(apart, RLConfig) and wire_bytes(apart) == 0
    # Half of the model fills a part of each slot; of buckets of 1 MiB, two are full;
    # what was sent last is kept beside them.
    small, changes = (
        "rollout.sync.bucket_mib=1",
        ("rollout.sync.transport=broadcast", "rollout.sync.delta=true"),
    )
    cases = (
        ((), 4 * PARAMETERS),
        ((small,), 2 << 20),
        ((small, *changes), (2 << 20) + 4 * PARAMETERS),
    )
    for overrides, mapped in cases:
        found = made(*overrides, on_gpus=False)
        assert {
            found.by_role["actor"][phase].of("buffers") for phase in found.phases
        } == {mapped}
        assert (
            found.by_role["rollout"]["learn"].of("buffers") == mapped + 4 * 14 * 128
        )  # and the head, packed

    # On a root the slices of other ranks arrive beside the slots.
    two = ("actor.num_ranks=2", small)
    for wire, buckets in (("shared_memory", 2), ("broadcast", 3)):
        found = made(*two, f"rollout.sync.transport={wire}", on_gpus=False)
        assert found.by_role["actor"]["learn"].of("buffers") == buckets << 20


def test_what_was_published_is_kept_on_the_host_while_replicas_may_restart() -> None:
    """Beside the wire, in float32 as it was sent, a share on each rank."""

    def buffers(*overrides: str) -> set[int]:
        found = made("placement=separate", *overrides, on_gpus=False)
        return {found.by_role["actor"][phase].of("buffers") for phase in found.phases}

    assert buffers() == {4 * PARAMETERS}
    assert buffers("schedule=one_step_off") == {2 * 4 * PARAMETERS}
    two = ("schedule=asynchronous", "actor.num_ranks=2")
    assert buffers(*two) == {4 * PARAMETERS + 2 * PARAMETERS}


def test_a_wire_between_devices_takes_their_memory() -> None:
    weights, bucket = 4 * PARAMETERS, "rollout.sync.bucket_mib=1"
    shared = made("rollout.sync.transport=cuda_ipc", bucket)
    assert held(shared, "actor") == {
        "generate": 2 << 20, "measure": 3 * weights + (2 << 20), "learn": 3 * weights + (2 << 20),
        "publish": weights + (2 << 20),
    }  # fmt: skip
    assert (
        held(shared, "rollout")["publish"] == weights
    )  # the actor's memory is read where it is
    apart = made("rollout.sync.transport=broadcast", bucket, "placement=separate")
    assert held(apart, "actor")["generate"] == 3 * weights + (2 << 20)
    assert held(apart, "rollout")["publish"] == weights + CACHE + (2 << 20)
    through_hosts = made("rollout.sync.transport=broadcast", bucket)
    assert held(through_hosts, "actor")["publish"] == weights


def test_32b_is_published_on_gpus_of_80_gb(tmp_path: Path) -> None:
    path = tmp_path / "32b"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (path / "tokenizer.json").write_text("{}")
    tensors = {
        f"model.layers.{i}.weight": {"dtype": "BF16", "shape": [500_000_000]}
        for i in range(64)
    }
    header = json.dumps(
        {name: {**one, "data_offsets": [0, 0]} for name, one in tensors.items()}
    ).encode()
    (path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header
    )  # 32 billion, without the numbers

    ranks = ("actor.num_ranks=8", "rollout.num_replicas=8")
    settings = [
        "backend=fsdp",
        *ranks,
        "rollout.dtype=bfloat16",
        "rollout.kv_cache_gib=8",
    ]
    config = ppo(path, tmp_path, *settings)
    assert isinstance(config, RLConfig) and config.has_critic and config.has_reference

    # A rank has an eighth of the weights, 16 GB in float32, and twice as much of
    # moments; an engine all, in bfloat16.
    shard, engine = 16 * 10**9, 64 * 10**9
    found = planned(config, on_gpus=True)
    assert found.device_bytes("publish", certain=True) == shard + engine
    assert found.device_bytes("generate", certain=True) == engine + 8 * GIB
    moved = sum(
        found.by_role[role]["publish"].of("optimizer") for role in ("actor", "critic")
    )
    assert moved == 4 * shard and found.host_bytes("publish") > 8 * (
        moved + 2 * shard
    )  # on the host, of eight ranks
    group = planned(ppo(path, tmp_path, "algorithm=grpo", *settings), on_gpus=True)
    assert (
        group.fullest(on_device=True, certain=True)[1] == shard + engine
    )  # before, it was 128 GB


def test_graders_that_are_models_work_while_rollouts_are_drawn(
    model: Path, data: Path
) -> None:
    found = planned(
        with_judge(model, data, model, "reward.engine.kv_cache_gib=3"), on_gpus=True
    )
    assert held(found, "reward") == dict.fromkeys(found.phases, 3 * GIB + 4 * 120)
    scored = planned(
        ppo(model, data, "reward=model", f"reward.model.path={model}"), on_gpus=True
    )
    assert held(scored, "reward")["generate"] == 480  # its weights stay on the device
    assert (
        not scored.is_measured("reward", "generate")
        or scored.predicted("reward", "generate") > 0
    )


def test_an_endpoint_needs_memory_for_prompts_that_are_scored() -> None:
    def generating(*overrides: str) -> int:
        lengths = ["data.max_prompt_tokens=3000", f"model.path={MODELS}/Qwen3-8B"]
        inputs = ["data.train_path=/t", "data.validation_path=/v", *lengths]
        engine = "rollout.vllm_args={max_num_batched_tokens: 8192, max_num_seqs: 8}"
        config = compose("grpo", [*inputs, engine, *overrides])
        plan = memory_plan(settled(config, gpus=8), on_gpus=True)
        return plan.by_role["rollout"]["generate"].of("activations")

    # Beside 8 requests, 2048 tokens and not all of the prompt.
    scored = generating("rollout.endpoint.enabled=true")
    assert scored == 3 * 4 * (8 + 2048) * 151_936
    assert generating() < scored


def test_a_supervised_run_has_two_phases(model: Path, data: Path) -> None:
    found = planned(
        compose("sft", [f"model.path={model}", f"data.train_path={data}/train.jsonl", "data.validation_path=null",
                        "run.evaluate_every=0"]),
        on_gpus=False,
    )  # fmt: skip
    assert found.phases == ("measure", "learn")
    assert found.fullest(on_device=False, certain=True) == (
        "learn",
        PROCESS_BYTES["trainer"] + 16 * 120,
    )


def test_an_evaluation_holds_what_it_starts_and_learns_nothing(
    model: Path, data: Path
) -> None:
    weights = 4 * PARAMETERS

    def evaluation(config: Config) -> MemoryPlan:
        return memory_plan(settled(config, gpus=8), on_gpus=True, learns=False)

    found = evaluation(compose("quickstart", ["placement.offload=none"]))
    assert found.phases == ("generate", "publish")
    assert found.by_role.keys() == {"actor", "rollout"}
    assert held(found, "actor") == {"generate": weights, "publish": weights}
    assert held(found, "rollout") == {"generate": weights + CACHE, "publish": weights}
    assert found.device_bytes("generate", certain=True) == 2 * weights + CACHE
    # DDP's buckets, and what megatron keeps of gradients and main weights, are not made.
    for backend in ("actor.num_ranks=2", "backend=megatron", "backend=fsdp"):
        parts = evaluation(compose("quickstart", [backend])).by_role["actor"]
        assert {parts["publish"].of(part) for part in ("gradients", "optimizer")} == {0}

    # A judge works unless held-out problems have graders of their own.
    judge, own = model.parent / "tiny", "evaluation.functions={default: exact_match}"
    judged = evaluation(with_judge(model, data, judge))
    assert judged.by_role.keys() == {"actor", "rollout", "reward"}
    graded = evaluation(with_judge(model, data, judge, own))
    assert graded.by_role.keys() == {"actor", "rollout"}
    assert {group.kind for group in graded.processes} == {
        "trainer",
        "rollout",
        "reward",
    }


def test_an_evaluation_of_a_supervised_model_is_a_forward_pass() -> None:
    def supervised(rows: int) -> SFTConfig:
        inputs = ["data.train_path=/t", "data.validation_path=/v", "sft.max_tokens=32"]
        model = f"model.path={MODELS}/Qwen3-8B"
        config = compose("sft", [model, *inputs, f"sft.batch_size={rows}"])
        assert isinstance(config, SFTConfig)
        return settled(config)

    # 256 rows of 32 tokens fill a micro-batch; held-out rows may do so in any case.
    many, few = supervised(256), supervised(4)
    found = memory_plan(many, on_gpus=False, learns=False)
    assert found == memory_plan(few, on_gpus=False, learns=False)
    assert found.phases == ("measure",)
    (memory,) = found.by_role["actor"].values()
    assert memory.persistent["weights"] == 4 * 8_190_735_360
    assert memory.of("optimizer") == memory.of("gradients") == 0
    learning = memory_plan(many, on_gpus=False).by_role["actor"]
    assert memory.working == learning["measure"].working


def test_what_a_process_cannot_tell_is_not_asked() -> None:
    assert made(on_gpus=False).is_measured("rollout", "publish")
    assert not made().is_measured("rollout", "publish") and made().is_measured(
        "rollout", "generate"
    )
    assert not made("rollout.tensor_parallel=2", on_gpus=False).is_measured(
        "rollout", "generate"
    )
    assert not made("reward=http", "reward.url=http://h/s", NO_GAIN).is_measured(
        "reward", "generate"
    )


def test_the_table_names_the_fullest_phase(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(memory_table(made(on_gpus=False)))
    out = capsys.readouterr().out
    # Of a node 0.8 GiB besides the processes.
    assert "predicted: the machine is fullest in the phase generate, 2.2" in out
    (row,) = [
        line.split() for line in out.splitlines() if line.split()[:1] == ["reference"]
    ]
    assert row[1:5] == ["3.01", "-", "-", "-"] and row[-1] == row[-2] == "3.01"


def working(found: MemoryPlan, role: str, phase: Phase) -> int:
    return sum(found.by_role[role][phase].working.values())


def test_an_average_of_the_policy_is_offloaded_and_saved_as_moments_are() -> None:
    average = made(*distilling("average", "0.9"), "run.recovery.snapshot_every=1")
    weights = 4 * PARAMETERS
    assert "reference" not in average.by_role
    assert held(average, "actor") == {
        "generate": 0,
        "measure": 4 * weights,
        "learn": 4 * weights,
        "publish": weights,
    }
    # Two moments and the average, and two snapshots of everything.
    on_host = average.by_role["actor"]["generate"].on_host
    assert on_host["optimizer"] == 3 * weights
    assert on_host["snapshots"] == 2 * 4 * weights


def test_candidates_of_a_teacher_are_counted_where_they_are() -> None:
    """Of 8 more in each place of 256 responses of 8 tokens, 20 bytes each."""

    def taught(top_k: int, longest: int = 9) -> MemoryPlan:
        return made(*distilling(top_k=top_k, longest=longest))

    few, more = taught(4), taught(12)
    grown = working(more, "reference", "measure") - working(few, "reference", "measure")
    assert grown == pytest.approx(8 * 20 * 256 * 8, rel=0.01)
    assert working(more, "actor", "measure") == working(few, "actor", "measure")
    # The actor learns from its own rows, however long those of the teacher are.
    longer = working(taught(4, 100), "actor", "learn")
    assert longer >= working(few, "actor", "learn")
