"""Snapshots in the memory of hosts: their size, and what auto becomes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.preflight.configs import job_on
from verl_ray.config.load import with_changes
from verl_ray.preflight.device_defaults import (
    BYTES_PER_TOKEN_OF_A_ROW,
    SNAPSHOT_COPIES,
    SNAPSHOT_EVERY,
    shared_memory_bytes,
)
from verl_ray.preflight.facts import ClusterFacts, facts_here
from verl_ray.preflight.footprints import snapshot_bytes
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.resolve import resolutions
from verl_ray.preflight.resources import memory_problems

MACHINE = "gpus=8,gpu=H100-80G"
FSDP = ("backend=fsdp", "actor.num_ranks=8")
PARAMETERS = 8_190_735_360

# Each of eight ranks has an eighth of weights and two moments in float32, twice.
ACTOR_BYTES = 2 * 12 * PARAMETERS


def rhythm(
    facts: ClusterFacts, *overrides: str, key: str = SNAPSHOT_EVERY
) -> tuple[object, str]:
    """Return the value of auto, and why."""
    both = {SNAPSHOT_EVERY: "auto", SNAPSHOT_COPIES: "auto"}
    typed = with_changes(job_on(MACHINE, *FSDP, *overrides).config, both)
    (found,) = [each for each in resolutions(typed, facts) if each.key == key]
    return found.value, found.because


def facts(memory_gib: int = 1024, shm_gib: int = 512) -> ClusterFacts:
    job = job_on(MACHINE, *FSDP)
    known = facts_here(job.config, job.machine)
    return replace(known, memory_bytes=memory_gib * GIB, shm_free_bytes=shm_gib * GIB)


def test_two_snapshots_of_what_learns_are_counted_in_shared_memory() -> None:
    job = job_on(MACHINE, *FSDP, f"{SNAPSHOT_EVERY}=1")
    assert snapshot_bytes(job.config) == {
        "actor": pytest.approx(ACTOR_BYTES / 8, rel=1e-3)
    }
    without = with_changes(job.config, {SNAPSHOT_EVERY: 0})
    for nodes in (1, 2):
        more = shared_memory_bytes(job.config, nodes) - shared_memory_bytes(
            without, nodes
        )
        assert more == pytest.approx(ACTOR_BYTES / nodes, rel=1e-3)


def test_only_the_adapter_that_learns_is_copied() -> None:
    adapted = job_on(MACHINE, *FSDP, f"{SNAPSHOT_EVERY}=1", "actor.lora.rank=8")
    assert snapshot_bytes(adapted.config)["actor"] < ACTOR_BYTES / 8 / 100


def test_auto_takes_snapshots_where_hosts_have_room() -> None:
    value, because = rhythm(facts())
    assert value == "measured" and because.startswith("a host has 1024.0 GiB, and")


@pytest.mark.parametrize(
    ("known", "because"),
    [
        (facts(shm_gib=64), "/dev/shm has 64.0 GiB of"),
        (facts(memory_gib=192), "a host has 192.0 GiB, and"),
        (facts(memory_gib=0), "nothing is known of the memory of the hosts"),
        (replace(facts(), learns=False), "the run does not go back"),
    ],
)
def test_auto_takes_none_without_room(known: ClusterFacts, because: str) -> None:
    value, why = rhythm(known)
    assert value == 0 and why.startswith(because)


@pytest.mark.parametrize(
    ("known", "copies", "because"),
    [
        (facts(), 1, "there is one node"),
        (replace(facts(), nodes=2), 2, "a host has 1024.0 GiB, and"),
        # Each of two nodes has half of all ranks: 183 GiB, and as much of the others.
        (replace(facts(shm_gib=150), nodes=2), 1, "/dev/shm has 150.0 GiB of 18"),
        (replace(facts(), nodes=2, learns=False), 1, "the run takes no snapshots"),
    ],
)
def test_auto_takes_second_copies_where_other_nodes_have_room(
    known: ClusterFacts, copies: int, because: str
) -> None:
    value, why = rhythm(known, key=SNAPSHOT_COPIES)
    assert value == copies and why.startswith(because), why
    # The first copies have room all the same.
    if known.learns:
        assert rhythm(known)[0] == "measured"


def test_second_copies_are_counted_as_often_as_the_first() -> None:
    job = job_on(MACHINE, *FSDP, f"{SNAPSHOT_EVERY}=1")
    twice = with_changes(job.config, {SNAPSHOT_COPIES: 2})
    assert snapshot_bytes(twice)["actor"] == 2 * snapshot_bytes(job.config)["actor"]


def test_a_run_that_does_not_recover_takes_none() -> None:
    config = job_on(
        MACHINE, *FSDP, "run.recovery.enabled=false", f"{SNAPSHOT_EVERY}=1"
    ).config
    without = with_changes(config, {SNAPSHOT_EVERY: 0})
    assert shared_memory_bytes(config, 1) == shared_memory_bytes(without, 1)


def test_second_copies_go_before_snapshots_where_a_host_is_too_small() -> None:
    job = job_on(MACHINE, *FSDP, f"{SNAPSHOT_EVERY}=1", f"{SNAPSHOT_COPIES}=2")
    small = replace(job, machine=replace(job.machine, memory_bytes=360 * GIB))
    (problem,) = memory_problems(small)
    assert problem.fix.endswith(
        f"the cheapest change that would fit is {SNAPSHOT_COPIES}=1."
    )


def test_snapshots_are_the_first_to_go_where_a_host_is_too_small() -> None:
    job = job_on(MACHINE, *FSDP, f"{SNAPSHOT_EVERY}=1")
    small = replace(job, machine=replace(job.machine, memory_bytes=180 * GIB))
    (problem,) = memory_problems(small)
    assert problem.fix.endswith(
        f"the cheapest change that would fit is {SNAPSHOT_EVERY}=0."
    )


def test_a_token_has_all_that_a_step_may_add() -> None:
    """Of 4 bytes: the token, three log-probs, entropy, squared probabilities, value,
    advantage and return. Its mask has 1.
    """
    assert BYTES_PER_TOKEN_OF_A_ROW == 9 * 4 + 1


def test_recorded_experts_are_counted() -> None:
    """Of Qwen3-30B-A3B 8 in each of 48 layers, in two bytes each."""
    off, on = (
        job_on(MACHINE, *FSDP, "data.prompts_per_step=1024", f"rollout.routing_replay={replays}", model="Qwen3-30B-A3B")
        for replays in ("false", "true")
    )  # fmt: skip
    tokens = off.config.rows_per_step * 1536
    more = shared_memory_bytes(on.config, 1) - shared_memory_bytes(off.config, 1)
    assert more == tokens * 48 * 8 * 2
    # A micro-batch holds them on the device, too.
    activations = [
        job.memory.by_role["actor"]["learn"].working["activations"] for job in (off, on)
    ]
    assert activations[0] < activations[1]


def test_replayed_groups_are_counted() -> None:
    """Rows of 512 + 1024 tokens, and again in each of two snapshots.

    Each row of 4096 groups of 8 may keep 16 alive, but not more than there were in the
    steps since.
    """
    config = job_on(MACHINE, *FSDP, f"{SNAPSHOT_EVERY}=1").config
    short, long, endless = (
        shared_memory_bytes(
            with_changes(config, {"algorithm.replay": 4096, "algorithm.replay_age": age}), 1
        )
        for age in (999, 1999, 10**6)
    )  # fmt: skip
    row = 1536 * BYTES_PER_TOKEN_OF_A_ROW
    assert long - short == 3 * 1000 * config.rows_per_step * row
    assert endless - short == 3 * (4096 * 8 * 16 - 1000 * config.rows_per_step) * row
