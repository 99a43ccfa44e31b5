"""A machine in words is read whole or refused, and a run is checked against all of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.preflight.configs import ppo, problems_by_key
from tests.preflight.published import published
from verl_ray.errors import ConfigError
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.findings import preflight
from verl_ray.preflight.machine import (
    GIB,
    Machine,
    machine_in_words,
    parse_machine,
)

H100 = "gpus=8,gpu=H100-80G"


def test_every_part_is_read() -> None:
    machine = parse_machine(
        "nodes=2, gpus=8, gpu=H100-80G, cores=128, memory=1.5T, shm=256G"
    )
    assert machine == Machine(
        cores=128,
        gpus=8,
        memory_bytes=1536 * GIB,
        shm_free_bytes=256 * GIB,
        gpu_memory_bytes=79 * GIB,
        nodes=2,
        gpu="H100-80G",
        assumed=(),
    )
    assert machine.is_described and machine.total_gpus == 16
    assert machine_in_words(machine) == (
        "machine: 2 nodes of 8 H100-80G (described), each with 128 cores, 1536 GiB"
        " memory, 256 GiB in /dev/shm"
    )


@pytest.mark.parametrize(
    ("text", "assumed"),
    [
        # 12 cores and 128 GiB for each of 4 GPUs.
        ("gpus=4,gpu=L40S-48G", ("cores=48", "memory=512G", "shm=256G")),
        ("gpus=4,gpu=L40S-48G,memory=1T", ("cores=48", "shm=512G")),
        ("gpus=0,cores=64", ("memory=128G", "shm=64G")),
        ("nodes=3,gpus=0,memory=1T,shm=8G", ("cores=12",)),
    ],
)
def test_what_is_left_out_is_assumed_and_named(
    text: str, assumed: tuple[str, ...]
) -> None:
    machine = parse_machine(text)
    assert machine.assumed == assumed and machine.is_described
    words = machine_in_words(machine)
    assert words.endswith(f"assumed is: {', '.join(assumed)}")
    # The whole description makes the same machine, with nothing assumed.
    whole = parse_machine(",".join([text, *assumed]))
    assert whole.assumed in ((), None) and words.startswith(machine_in_words(whole))


@pytest.mark.parametrize(
    ("text", "part", "words"),
    [
        ("", "", "Write nodes=2,"),
        ("8xH100", "8xH100", "by parts such as gpus=8"),
        (f"{H100},", "", "by parts such as gpus=8"),
        (f"{H100},mem=2T", "mem=2T", "Did you mean memory?"),
        (f"{H100},gpus=4", "gpus=4", "gpus is there twice"),
        (f"node=2,{H100}", "node=2", "Did you mean nodes?"),
        ("gpus=8,gpu=H100", "gpu=H100", "Did you mean H100-80G?"),
        ("gpus=8,gpu=h100-80g", "gpu=h100-80g", "Did you mean H100-80G?"),
        ("gpus=8,gpu=TPU", "gpu=TPU", "There is A100-40G,"),
        ("gpus=8", "gpus=8", "Add gpu=NAME. There is A100-40G,"),
        ("nodes=8,gpu=H100-80G", "nodes=8,gpu=H100-80G", "Add gpus=8"),
        ("gpus=0,gpu=H100-80G", "gpu=H100-80G", "no GPUs (gpus=0)"),
        (f"nodes=0,{H100}", "nodes=0", "from 1 to 10000"),
        (f"nodes=1e9,{H100}", "nodes=1e9", "from 1 to 10000"),
        (f"nodes=99999,{H100}", "nodes=99999", "from 1 to 10000"),
        ("gpus=-1,gpu=H100-80G", "gpus=-1", "from 0 to 128"),
        (f"{H100},memory=512", "memory=512", "memory=512G or memory=2T"),
        (f"{H100},memory=0G", "memory=0G", "above 0"),
        (f"{H100},memory=2TB", "memory=2TB", "GiB (G) or TiB (T) per node"),
        (
            f"{H100},link=50GB",
            "link=50GB",
            "There is cores, gpu, gpus, memory, nodes, shm",
        ),
        (f"{H100},memory=1T,shm=2T", "shm=2T", "memory, which is 1024G"),
        ("gpus=0,shm=1T", "shm=1T", "memory, which is 128G"),
    ],
)
def test_each_mistake_names_its_part(text: str, part: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_machine(text)
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("--machine", part)
    assert words in f"{problem.rule}. {problem.fix}"


def test_mistakes_come_together() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_machine("gpus=x,gpu=H100,memory=4,speed=9")
    parts = [problem.value for problem in refused.value.problems]
    assert parts == ["speed=9", "gpus=x", "memory=4", "gpu=H100"]
    assert "on the command line" in str(refused.value)


# --------------------------------------------------------------------- a run against it


def test_auto_counts_all_nodes(data: Path) -> None:
    config = ppo(Path(published("Qwen3-8B")), data)
    facts = facts_here(config, parse_machine(f"nodes=64,{H100},cores=100"))
    assert (facts.nodes, facts.cores, facts.gpus) == (64, 100, 512)
    # From config.json alone.
    assert facts.sent_parameters == 8_190_735_360


def test_gpus_of_all_nodes_are_counted(data: Path) -> None:
    small = ppo(
        Path(published("Qwen2.5-0.5B")),
        data,
        "backend=fsdp",
        "placement=separate",
        "actor.num_ranks=8",
        "critic.num_ranks=4",
        "reference.num_ranks=1",
        "rollout.num_replicas=4",
    )
    message = problems_by_key(preflight(small, parse_machine(f"nodes=2,{H100}")))
    assert message == {
        "actor.num_ranks": "the run needs 17 GPUs (actor 8 + critic 4 + reference 1 +"
        " rollout 4), and the machine has 16 | Lower it by 1, choose"
        " placement=colocated, or describe a larger machine."
    }
    assert preflight(small, parse_machine(f"nodes=3,{H100}")).problems == []


def test_an_engine_stays_on_a_node(data: Path) -> None:
    wide = ppo(
        Path(published("Llama-3.1-70B")),
        data,
        "placement=separate",
        "rollout.tensor_parallel=16",
        "rollout.num_replicas=1",
    )
    message = problems_by_key(
        preflight(wide, parse_machine("nodes=16,gpus=8,gpu=B200-180G"))
    )
    assert message["rollout.tensor_parallel"] == (
        "the ranks of an engine share a node, which has 8 GPUs, and this one needs 16"
        " | Use at most 8."
    )


def test_engines_are_not_cut_across_nodes(data: Path) -> None:
    # Of 6 GPUs an engine of 4 leaves 2, where no other one fits: 5 engines and three
    # trainers would need 23 of 24 GPUs.
    config = ppo(
        Path(published("Qwen2.5-1.5B")),
        data,
        "placement=separate",
        "rollout.tensor_parallel=4",
        "rollout.num_replicas=5",
    )
    messages = {
        nodes: problems_by_key(
            preflight(config, parse_machine(f"nodes={nodes},gpus=6,gpu=A100-80G"))
        )
        for nodes in (4, 5)
    }
    assert messages == {
        4: {
            "rollout.num_replicas": "the ranks of an engine share a node, which has 6"
            " GPUs: 4 nodes hold 4 engines of 4 ranks | Use at most 4."
        },
        5: {},
    }


def test_memory_of_the_hosts_is_that_of_all_nodes(data: Path) -> None:
    # In float32 four models take 122 GiB, the moments of two of them as much again, and
    # gradients half of that.
    sizes = ["backend=fsdp", "actor.num_ranks=8", "rollout.kv_cache_gib=4"]
    config = ppo(Path(published("Qwen3-8B")), data, *sizes)
    found = {
        nodes: problems_by_key(
            preflight(config, parse_machine(f"nodes={nodes},gpus=0,memory=256G"))
        )
        for nodes in (1, 2)
    }
    assert found[1].keys() == {"model.path"} and found[2] == {}
    assert "The machine has 256.0 GiB" in found[1]["model.path"]


def test_nodes_share_out_the_rows_of_a_step(data: Path) -> None:
    # 4096 prompts x 1 row x 12,288 tokens x 32 bytes are 1.5 GiB.
    rows = ["data.prompts_per_step=4096", "rollout.group_size=1"]
    tokens = ["data.max_prompt_tokens=4096", "rollout.max_response_tokens=8192"]
    longer = ["backend.micro_batch_tokens_per_rank=12288", "rollout.kv_cache_gib=8"]
    model = Path(published("Qwen2.5-0.5B"))
    config = ppo(model, data, *rows, *tokens, *longer)
    for nodes, keys in ((1, {"/dev/shm"}), (2, set())):
        machine = parse_machine(f"nodes={nodes},gpus=8,gpu=H200-141G,shm=1G")
        assert problems_by_key(preflight(config, machine)).keys() == keys


def test_what_concerns_this_machine_alone_is_left_out(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    # As Python marks what is not there.
    monkeypatch.setitem(sys.modules, "megatron", None)
    config = ppo(
        Path(published("Qwen2.5-0.5B")),
        data,
        "run.dir=/proc/none",
        "run.resume=/no/checkpoint",
        "tracking.wandb.mode=online",
        "backend=megatron",
        "rollout.endpoint.enabled=true",
        "rollout.endpoint.port=1",
        "rollout.endpoint.token_env=NO_SUCH_TOKEN",
    )
    described = parse_machine("gpus=8,gpu=H200-141G")
    assert problems_by_key(preflight(config, described)) == {}
    here = problems_by_key(preflight(config, Machine(8, 8, GIB * 999, GIB * 999)))
    assert here.keys() > {
        "actor.backend",
        "run.dir",
        "run.resume",
        "rollout.endpoint.token_env",
    }


def test_data_must_be_here_unless_they_are_left_out(tmp_path: Path) -> None:
    config = ppo(Path(published("Qwen2.5-0.5B")), tmp_path)
    machine = parse_machine("gpus=8,gpu=H200-141G")
    message = problems_by_key(preflight(config, machine))
    assert message.keys() == {"data.train_path", "data.validation_path"}
    assert preflight(config, machine, reads_data=False).problems == []
    # A run here needs them in any case.
    here = problems_by_key(preflight(config, None, reads_data=False))
    assert here.keys() >= {"data.train_path", "data.validation_path"}
