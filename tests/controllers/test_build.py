"""Which processes a job has, from its configuration alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.build import Plan, Shape, engine_spec, plan_processes, rollout_spec, updates_per_step
from controllers.composition import compose
from verl_ray.config.schema import RLConfig

INPUTS = ["model.path=/m", "data.train_path=/t.jsonl", "data.validation_path=/v.jsonl", "run.dir=/r"]
TWO = Shape(cores=(2,), gpus=0)
GPUS = Shape(cores=(16,) * 4, gpus=8)


def config(*changes: str) -> RLConfig:
    found = compose("ppo", [*INPUTS, *changes])
    assert isinstance(found, RLConfig)
    return found


def plan(*changes: str, shape: Shape = TWO) -> Plan:
    return plan_processes(config(*changes), shape)


def sets(found: Plan) -> dict[str, tuple[str, int]]:
    """Bundles and ranks by process set."""
    return {one.name: (one.bundle_group, one.num_ranks) for one in found.sets}


def homes(found: Plan) -> dict[str, str]:
    return {name: role.processes for name, role in found.roles.items()}


def test_colocated_roles_share_one_process_per_rank_and_sit_where_the_rollout_engine_sits() -> None:
    found = plan("actor.num_ranks=2")
    assert sets(found) == {"engine trainer": ("shared", 2), "rollout": ("shared", 1), "reward": ("reward", 1)}
    assert homes(found) == {
        "actor": "engine trainer", "critic": "engine trainer", "reference": "engine trainer", "rollout": "rollout",
        "reward": "reward",
    }  # fmt: skip
    assert [one.process_group for one in found.sets] == [True, False, False]


def test_different_backends_never_share_a_process() -> None:
    found = plan("backend@critic.backend=fsdp")
    assert homes(found)["critic"] == "fsdp trainer" and homes(found)["actor"] == "engine trainer"
    assert sets(found)["fsdp trainer"] == ("shared", 1)


def test_separate_roles_have_bundles_of_their_own() -> None:
    found = plan("placement=separate", "critic.num_ranks=2")
    assert sets(found) == {
        "actor": ("actor", 1), "critic": ("critic", 2), "reference": ("reference", 1), "rollout": ("rollout", 1),
        "reward": ("reward", 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "roles"),
    [
        ("ppo", {"actor", "critic", "reference"}),
        ("grpo", {"actor", "reference"}),
        ("dr_grpo", {"actor"}),
        ("rloo", {"actor", "reference"}),
        ("reinforce_plus_plus", {"actor", "reference"}),
    ],
)
def test_roles_that_the_algorithm_does_without_are_not_created(algorithm: str, roles: set[str]) -> None:
    assert plan(f"algorithm={algorithm}").roles.keys() == roles | {"rollout", "reward"}


def test_an_evaluation_starts_neither_critic_nor_reference() -> None:
    found = plan_processes(config("placement=separate"), TWO, learns=False)
    assert set(sets(found)) == found.roles.keys() == {"actor", "rollout", "reward"}


def test_a_supervised_run_is_an_actor_alone() -> None:
    found = plan_processes(compose("sft", INPUTS), TWO)
    assert (sets(found), homes(found)) == ({"engine trainer": ("shared", 1)}, {"actor": "engine trainer"})
    assert found.warnings == ()


def test_more_processes_than_cores_get_fractions_and_a_warning() -> None:
    found = plan()
    assert [one.cpus_per_rank for one in found.sets] == [0.66] * 3
    assert found.warnings == ("3 worker processes share 2 CPU cores; steps will be slower for it",)
    assert plan(shape=Shape((4,), 0)).warnings == ()
    assert [one.cpus_per_rank for one in plan("placement=separate", shape=Shape((2, 2), 0)).sets] == [0.66] * 5


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ([], {"engine trainer": 8, "rollout": 8, "reward": 1}),  # they take turns
        (["actor.num_ranks=4"], {"engine trainer": 2, "rollout": 8, "reward": 1}),
        (["rollout.num_replicas=2"], {"engine trainer": 8, "rollout": 4, "reward": 1}),
        (["backend@critic.backend=fsdp"], {"engine trainer": 4, "fsdp trainer": 4, "rollout": 8, "reward": 1}),
        (["run.threads_per_rank=3"], {"engine trainer": 3, "rollout": 3, "reward": 3}),
    ],
)
def test_threads_stay_within_the_cores(changes: list[str], threads: dict[str, int]) -> None:
    found = plan(*changes, shape=Shape((8,), 0))
    assert {one.name: one.threads_per_rank for one in found.sets} == threads


def test_on_gpus_trainers_and_rollout_have_devices_and_the_reward_has_none() -> None:
    found = plan("rollout.tensor_parallel=2", "placement=separate", shape=GPUS)
    assert {one.name: one.gpus_per_rank for one in found.sets} == {
        "actor": 1, "critic": 1, "reference": 1, "rollout": 2, "reward": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "updates"),
    [([], 1), (["actor.mini_batch_size=64"], 4), (["actor.mini_batch_size=128", "actor.epochs=2"], 4)],
)
def test_a_schedule_ends_with_the_last_update_of_the_run(changes: list[str], updates: int) -> None:
    found = config("run.total_steps=10", *changes)  # 32 prompts x 8 = 256 rows
    assert updates_per_step(found.actor, found) == updates
    assert engine_spec("actor", found.actor, found).schedule_steps == 10 * updates


def test_what_each_engine_is_built_with() -> None:
    found = config("critic.model.path=/c", "run.seed=5")
    assert [engine_spec(name, role, found).head for name, role in found.model_roles.items()] == [
        "policy", "value", "policy",
    ]  # fmt: skip
    critic = engine_spec("critic", found.critic, found)
    assert (critic.model_path, critic.seed, critic.optimizer) == ("/c", 5, found.critic.optimizer)
    reference = engine_spec("reference", found.reference, found)
    assert (reference.optimizer, reference.schedule_steps) == (None, 0)
    assert rollout_spec(found).max_model_len == 512 + 1024
    assert Path(rollout_spec(found).model_path) == Path("/m")
