"""What certainly does not fit a machine is a problem; what is only slow is a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.preflight.configs import (
    NO_GAIN,
    ppo,
    problems_by_key,
    settled,
    with_judge,
)
from verl_ray.config.schema import batch_algebra
from verl_ray.preflight.findings import preflight
from verl_ray.preflight.machine import GIB, MIB, Machine
from verl_ray.preflight.resources import resource_problems


def test_a_judge_needs_room_of_its_own(model: Path, data: Path) -> None:
    three = Machine(cores=8, gpus=3, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    message = problems_by_key(
        preflight(with_judge(model, data, model, "reward.engine.num_replicas=3"), three)
    )
    assert (
        "needs 4 GPUs (actor 1 + reward 3), and this machine has 3"
        in message["reward.engine.num_replicas"]
    )
    assert (
        preflight(
            with_judge(model, data, model, "reward.engine.num_replicas=2"), three
        ).problems
        == []
    )

    # Caches of 1 GiB for the rollout engine and 5 for the judge, and 1.2 GiB of
    # processes: trainer, rollout, judge.
    caches = ("rollout.kv_cache_gib=1.0", "reward.engine.kv_cache_gib=5.0")
    for memory, problems in ((7 * GIB, ["model.path"]), (8 * GIB, [])):
        small = Machine(cores=8, gpus=0, memory_bytes=memory, shm_free_bytes=8 * GIB)
        assert (
            list(
                problems_by_key(
                    preflight(with_judge(model, data, model, *caches), small)
                )
            )
            == problems
        )
    small = Machine(cores=64, gpus=0, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    replicas = [
        "reward=judge",
        "reward.model.path=${model.path}",
        "reward.engine.num_replicas=64",
    ]
    many = compose("quickstart", [*replicas, NO_GAIN])
    message = problems_by_key(preflight(many, small))["reward.engine.num_replicas"]
    assert "66 processes (trainer 1 + rollout 1 + judge 64)" in message


def test_a_model_that_is_not_the_policys_takes_no_room_in_its_engine(
    tmp_path: Path, model: Path, data: Path
) -> None:
    # 0.037 GiB as float32
    large = large_model(tmp_path / "large", model, "a", parameters=10**7)
    caches = "rollout.kv_cache_gib=0.0625"
    # Processes 1 GiB, cache 0.0625, reference 0.037; the rollout engine holds the
    # policy, which is small.
    small = Machine(
        cores=8, gpus=0, memory_bytes=int(1.12 * GIB), shm_free_bytes=8 * GIB
    )
    assert (
        preflight(
            ppo(model, data, f"reference.model.path={large}", caches), small
        ).problems
        == []
    )
    assert preflight(ppo(large, data, caches), small).problems != []


def test_more_threads_than_cores_is_a_warning_on_a_cpu(model: Path, data: Path) -> None:
    two = Machine(cores=2, gpus=0, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    assert preflight(ppo(model, data, "actor.num_ranks=2"), two).warnings == []
    (warning,) = preflight(ppo(model, data, "placement=separate"), two).warnings
    assert (
        "4 threads compute at once (actor 1 + critic 1 + reference 1 + rollout 1"
        in warning
    )


def test_buckets_lie_in_shared_memory(tmp_path: Path, model: Path, data: Path) -> None:
    # 381 MiB as float32
    large = large_model(tmp_path / "large", model, "a", parameters=10**8)

    def problems(*overrides: str, shm: int) -> list[str]:
        machine = Machine(cores=64, gpus=0, memory_bytes=512 * GIB, shm_free_bytes=shm)
        return list(problems_by_key(preflight(ppo(large, data, *overrides), machine)))

    # 128 MiB of rows, and two buckets, each a twelfth of the model
    assert problems(shm=200 * MIB) == []
    assert problems(shm=180 * MIB) == ["/dev/shm"]
    assert problems("rollout.sync.bucket_mib=128", shm=400 * MIB) == []
    assert problems("rollout.sync.bucket_mib=128", shm=370 * MIB) == ["/dev/shm"]
    assert problems("rollout.sync.transport=broadcast", shm=140 * MIB) == []


def test_rows_of_later_steps_lie_in_shared_memory_too() -> None:
    def problems(*overrides: str) -> list[str]:
        config = settled(
            compose("quickstart", ["data.prompts_per_step=262144", *overrides])
        )
        rows = batch_algebra(config)
        nbytes = 32 * rows.rows * rows.max_row_tokens
        # Twice what the rows of a step take; weights take little.
        shm = 2 * nbytes
        machine = Machine(cores=64, gpus=0, memory_bytes=512 * GIB, shm_free_bytes=shm)
        found = resource_problems(config, machine)
        return [problem.key for problem in found if problem.key == "/dev/shm"]

    later = ("schedule=one_step_off", "placement=separate", "rollout.staleness=2")
    assert problems() == []
    assert problems(*later) == ["/dev/shm"]


@pytest.mark.parametrize(
    ("override", "key", "processes"),
    [
        (
            "actor.num_ranks=64",
            "actor.num_ranks",
            "66 processes (trainer 64 + rollout 1 + reward 1)",
        ),
        (
            "reward.num_ranks=64",
            "reward.num_ranks",
            "66 processes (trainer 1 + rollout 1 + reward 64)",
        ),
        (
            "rollout.num_replicas=64",
            "rollout.num_replicas",
            "66 processes (trainer 1 + rollout 64 + reward 1)",
        ),
    ],
)
def test_processes_take_memory_of_their_own(
    override: str, key: str, processes: str
) -> None:
    small = Machine(cores=64, gpus=0, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    message = problems_by_key(preflight(compose("quickstart", [override]), small))[key]
    assert processes in message and "This machine has 8.0 GiB: use fewer" in message
    assert preflight(compose("quickstart"), small).problems == []


def test_the_model_that_a_run_will_make_is_counted(tmp_path: Path) -> None:
    small = Machine(cores=8, gpus=0, memory_bytes=8 * GIB, shm_free_bytes=64 * GIB)
    wide = [
        f"run.dir={tmp_path}/run",
        "prepare.model.hidden_size=4096",
        "prepare.model.intermediate_size=16384",
    ]
    assert (
        "at least"
        in problems_by_key(preflight(compose("quickstart", wide), small))["model.path"]
    )


def test_memory_that_cannot_be_enough_is_a_problem(model: Path, data: Path) -> None:
    small = Machine(cores=8, gpus=0, memory_bytes=GIB, shm_free_bytes=32 * 2**20)
    messages = problems_by_key(preflight(ppo(model, data), small))
    # 256 rows x 1536 tokens x 32 bytes are 12 MiB: Ray's floor of 128 MiB is what
    # counts.
    assert (
        "about 128 MiB" in messages["/dev/shm"] and "--shm-size" in messages["/dev/shm"]
    )
    assert (
        "at least 3.0 GiB" in messages["model.path"]
    )  # the key-value cache, and 1 GiB of three processes
    # A cluster is asked for its own.
    assert preflight(ppo(model, data), None).problems == []


def large_model(
    folder: Path, model: Path, *tensors: str, parameters: int = 60_000_000
) -> Path:
    """Parameters in each tensor, of which there are only headers."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    num_bytes = 4 * parameters
    weight = {
        "dtype": "F32",
        "shape": [parameters // 10_000, 10_000],
        "data_offsets": [0, num_bytes],
    }
    header = json.dumps(dict.fromkeys(tensors, weight)).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        # The file is as long as its header says, and has no blocks on the disk.
        file.truncate(8 + len(header) + num_bytes)
    return folder


def test_frozen_weights_need_neither_moments_nor_checkpoints(
    tmp_path: Path, model: Path, data: Path
) -> None:
    """60 million parameters: 16 bytes each where all learn, 4 where an adapter does."""
    large = large_model(
        tmp_path / "large", model, "model.layers.0.self_attn.q_proj.weight"
    )
    small = Machine(cores=64, gpus=0, memory_bytes=GIB, shm_free_bytes=64 * GIB)
    inputs = [
        f"model.path={large}",
        f"data.train_path={data}/train.jsonl",
        "data.validation_path=null",
    ]
    for more, problems in (
        ((), ["model.path"]),
        (("actor.lora.rank=4", "actor.lora.targets=[q_proj]"), []),
    ):
        config = compose("sft", [*inputs, "run.evaluate_every=0", *more])
        assert list(problems_by_key(preflight(config, small))) == problems


@pytest.mark.parametrize(
    ("overrides", "rest", "experts"),
    [
        ((), 16, 16),  # weight, gradient and two moments in float32
        (
            ("backend.dtype=bfloat16",),
            18,
            18,
        ),  # a weight of 2 bytes, beside the one that is stepped
        (("actor.num_ranks=4",), 40, 40),  # 4 x (weight + gradient) + moments
        (("actor.num_ranks=4", "backend.dtype=bfloat16"), 36, 36),  # 4 x (2 + 4) + 12
        (("actor.num_ranks=4", "backend.tensor_parallel=2"), 24, 40),
        (
            (
                "actor.num_ranks=4",
                "backend.tensor_parallel=2",
                "backend.pipeline_parallel=2",
            ),
            16,
            24,
        ),
        (
            (
                "actor.num_ranks=4",
                "backend.expert_parallel=2",
                "backend.expert_tensor_parallel=2",
            ),
            40,
            16,
        ),
    ],
)
def test_megatron_cuts_weights_by_layout_and_shares_moments_out(
    tmp_path: Path,
    model: Path,
    data: Path,
    overrides: tuple[str, ...],
    rest: int,
    experts: int,
) -> None:
    """Bytes over all ranks per parameter, of 60 million in experts and as many in the
    rest.
    """
    names = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
    )
    large = large_model(tmp_path / "large", model, *names)
    inputs = [
        f"model.path={large}",
        f"data.train_path={data}/train.jsonl",
        "data.validation_path=null",
    ]
    config = compose(
        "sft", [*inputs, "run.evaluate_every=0", "backend=megatron", *overrides]
    )
    needed = (
        60_000_000 * (rest + experts)
        + 0.3 * GIB * config.model_roles["actor"].num_ranks
    )
    for memory, problems in ((needed - MIB, ["model.path"]), (needed + MIB, [])):
        small = Machine(
            cores=64, gpus=0, memory_bytes=int(memory), shm_free_bytes=64 * GIB
        )
        assert list(problems_by_key(preflight(config, small))) == problems


def test_a_gpu_that_cannot_hold_a_role_is_a_problem(
    tmp_path: Path, model: Path, data: Path
) -> None:
    """120 million parameters: 8 caches apart, the actor's update needs 16 bytes each,
    beside the critic's 12 and the reference's 4.
    """
    names = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    )
    config = ppo(
        large_model(tmp_path / "large", model, *names), data, "rollout.kv_cache_gib=0.5"
    )
    needed = 120_000_000 * (16 + 12 + 4)
    for memory, problems in ((needed - MIB, ["model.path"]), (needed + MIB, [])):
        machine = Machine(8, 1, 64 * GIB, 64 * GIB, gpu_memory_bytes=memory)
        messages = problems_by_key(preflight(config, machine))
        assert list(messages) == problems
    assert (
        problems_by_key(preflight(config, Machine(8, 1, 64 * GIB, 64 * GIB))) == {}
    )  # nobody says how large it is
    small = problems_by_key(
        preflight(config, Machine(8, 1, 4 * GIB, 64 * GIB))
    )  # 28 bytes each wait on the host: 3.1 GiB
    assert "what models keep on the host (generate; 0.9 for" in small["model.path"]
