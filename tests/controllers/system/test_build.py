"""Which processes a job has, from its configuration alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controllers.system.build import models_without_state
from controllers.system.plan import (
    ClusterShape,
    ProcessPlan,
    engine_spec,
    plan_processes,
    resolve_on,
    rollout_spec,
)
from scripts.configuration import compose
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.engine.base import EngineSpec
from workers.judge import JudgeWorker
from workers.reward import RewardWorker
from workers.reward_model import RewardModelGrader

INPUTS = [
    "model.path=/m",
    "data.train_path=/t.jsonl",
    "data.validation_path=/v.jsonl",
    "run.dir=/r",
]
TWO = ClusterShape(cores=(2,), gpus_per_node=(0,))
GPUS = ClusterShape(cores=(16,) * 4, gpus_per_node=(2,) * 4)


def config(*changes: str) -> RLConfig:
    found = compose("ppo", [*INPUTS, *changes])
    assert isinstance(found, RLConfig)
    return found


def plan(*changes: str, shape: ClusterShape = TWO) -> ProcessPlan:
    return resolved_plan(config(*changes), shape)


def resolved_plan(
    given: Config, shape: ClusterShape, *, learns: bool = True
) -> ProcessPlan:
    return plan_processes(resolve_on(given, shape, learns=learns), shape, learns=learns)


def sets(found: ProcessPlan) -> dict[str, tuple[str, int]]:
    """Bundles and ranks by process set."""
    return {one.name: (one.bundle_group, one.num_ranks) for one in found.sets}


def homes(found: ProcessPlan) -> dict[str, str]:
    return {name: role.processes for name, role in found.roles.items()}


def test_colocated_roles_share_one_process_per_rank_and_sit_where_the_rollout_engine_sits() -> (
    None
):
    found = plan("actor.num_ranks=2")
    assert sets(found) == {
        "engine trainer": ("shared", 2),
        "rollout": ("shared", 1),
        "reward": ("reward", 1),
    }
    assert homes(found) == {
        "actor": "engine trainer", "critic": "engine trainer", "reference": "engine trainer", "rollout": "rollout",
        "reward": "reward",
    }  # fmt: skip
    assert [one.process_group for one in found.sets] == [True, False, False]


def test_throughput_is_divided_by_the_devices_in_use() -> None:
    assert (
        plan("actor.num_ranks=2").devices == 2
    )  # two ranks of trainers, and a rollout engine beside the first
    assert plan("backend@critic.backend=fsdp").devices == 1
    assert (
        plan("placement=separate", "actor.num_ranks=2").devices == 3 * 2 + 1
    )  # three models, and the rollout engine
    assert plan("rollout.num_replicas=3", shape=GPUS).devices == 3
    tensor_parallel = [
        "placement=separate",
        "rollout.num_replicas=2",
        "rollout.tensor_parallel=2",
    ]
    assert plan(*tensor_parallel, shape=GPUS).devices == 3 + 4
    assert (
        plan("reward.num_ranks=2", shape=GPUS).devices == 1
    )  # functions compute on no device


def test_different_backends_never_share_a_process() -> None:
    found = plan("backend@critic.backend=fsdp")
    assert (
        homes(found)["critic"] == "fsdp trainer"
        and homes(found)["actor"] == "engine trainer"
    )
    assert sets(found)["fsdp trainer"] == ("shared", 1)


def test_layouts_of_one_backend_share_processes() -> None:
    layouts = [
        "actor.backend.tensor_parallel=2",
        "reference.backend.pipeline_parallel=2",
    ]
    found = plan(
        "backend=megatron", "backend@critic.backend=fsdp", "actor.num_ranks=2", *layouts
    )
    assert homes(found) | {"rollout": "", "reward": ""} == {
        "actor": "megatron trainer", "critic": "fsdp trainer", "reference": "megatron trainer", "rollout": "",
        "reward": "",
    }  # fmt: skip
    assert (
        sets(found)["megatron trainer"] == sets(found)["fsdp trainer"] == ("shared", 2)
    )


def test_separate_roles_have_bundles_of_their_own() -> None:
    found = plan("placement=separate", "critic.num_ranks=2")
    assert sets(found) == {
        "actor": ("actor", 1), "critic": ("critic", 2), "reference": ("reference", 1), "rollout": ("rollout", 1),
        "reward": ("reward", 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("placement", "on_gpus", "may_start"),
    [
        ("separate", True, True),
        ("separate", False, True),
        ("colocated", False, True),
        # An engine may be awake on its GPU.
        ("colocated", True, False),
    ],
)
def test_a_reference_may_start_at_any_time_where_no_engine_shares_its_device(
    placement: str, on_gpus: bool, may_start: bool
) -> None:
    shape = GPUS if on_gpus else TWO
    found = resolve_on(config(f"placement={placement}"), shape)
    groups: dict[str, Any] = {name: object() for name in found.model_roles}
    expected = [groups["reference"]] if may_start else []
    assert models_without_state(found, groups, on_gpus) == expected


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
def test_roles_that_the_algorithm_does_without_are_not_created(
    algorithm: str, roles: set[str]
) -> None:
    assert plan(f"algorithm={algorithm}").roles.keys() == roles | {"rollout", "reward"}


def test_an_evaluation_starts_neither_critic_nor_reference() -> None:
    found = resolved_plan(config("placement=separate"), TWO, learns=False)
    assert set(sets(found)) == found.roles.keys() == {"actor", "rollout", "reward"}


def test_an_evaluation_has_no_optimizer() -> None:
    learning, evaluated = (
        resolved_plan(config("actor.lora.rank=8"), TWO, learns=learns).roles["actor"]
        for learns in (True, False)
    )
    (spec,), (frozen,) = learning.args, evaluated.args
    assert isinstance(spec, EngineSpec) and spec.optimizer is not None
    assert frozen == replace(spec, optimizer=None)


def test_a_supervised_run_is_an_actor_alone() -> None:
    found = resolved_plan(compose("sft", INPUTS), TWO)
    assert (sets(found), homes(found)) == (
        {"engine trainer": ("shared", 1)},
        {"actor": "engine trainer"},
    )
    assert found.warnings == ()


def test_more_processes_than_cores_get_fractions_and_a_warning() -> None:
    found = plan()
    assert [one.cpus_per_rank for one in found.sets] == [0.66] * 3
    assert found.warnings == (
        "3 worker processes share 2 CPU cores; steps will be slower for it",
    )
    assert plan(shape=ClusterShape((4,), (0,))).warnings == ()
    assert [
        one.cpus_per_rank
        for one in plan("placement=separate", shape=ClusterShape((2, 2), (0, 0))).sets
    ] == [0.66] * 5


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ([], {"engine trainer": 8, "rollout": 8, "reward": 1}),  # they take turns
        (["actor.num_ranks=4"], {"engine trainer": 2, "rollout": 8, "reward": 1}),
        (["rollout.num_replicas=2"], {"engine trainer": 8, "rollout": 4, "reward": 1}),
        (
            ["backend@critic.backend=fsdp"],
            {"engine trainer": 4, "fsdp trainer": 4, "rollout": 8, "reward": 1},
        ),
        (["run.threads_per_rank=3"], {"engine trainer": 3, "rollout": 3, "reward": 3}),
    ],
)
def test_threads_stay_within_the_cores(
    changes: list[str], threads: dict[str, int]
) -> None:
    found = plan(*changes, shape=ClusterShape((8,), (0,)))
    assert {one.name: one.threads_per_rank for one in found.sets} == threads


def test_on_gpus_trainers_and_rollout_have_devices_and_the_reward_has_none() -> None:
    found = plan("rollout.tensor_parallel=2", "placement=separate", shape=GPUS)
    assert {one.name: one.gpus_per_rank for one in found.sets} == {
        "actor": 1, "critic": 1, "reference": 1, "rollout": 2, "reward": 0,
    }  # fmt: skip


def test_engines_of_two_gpus_span_the_bundles_of_trainers_or_of_holders() -> None:
    wide = config(
        "rollout.tensor_parallel=2", "actor.num_ranks=2", "backend@critic.backend=megatron", "critic.num_ranks=4",
        "rollout.num_replicas=2",
    )  # fmt: skip
    found = resolved_plan(wide, GPUS)
    spans = {each.name: (each.num_ranks, each.spans) for each in found.sets}
    assert spans["rollout"] == (2, 2) and spans["megatron trainer"] == (4, 1)
    assert "holder of GPUs" not in spans and found.devices == 4
    # An evaluation does without the critic, whose GPUs its engines share.
    evaluation = resolved_plan(wide, GPUS, learns=False)
    holder = next(each for each in evaluation.sets if each.name == "holder of GPUs")
    assert (holder.num_ranks, holder.bundle_group) == (4, "shared")
    assert evaluation.devices == 4


def test_engines_that_share_gpus_start_and_sleep_before_the_trainers_take_the_memory() -> (
    None
):
    def first(*changes: str, shape: ClusterShape) -> list[str]:
        return [one.name for one in plan(*changes, shape=shape).sets if one.built_first]

    assert first(shape=GPUS) == ["rollout"]
    assert (
        first("placement=separate", shape=GPUS)
        == first(shape=ClusterShape((8,), (0,)))
        == []
    )


# --------------------------------------------------------------------------- who scores


JUDGE = ("reward=judge", "reward.model.path=/j")


def test_a_judge_has_processes_of_its_own() -> None:
    found = plan(*JUDGE, "reward.engine.num_replicas=2", "run.seed=7")
    assert sets(found) == {
        "engine trainer": ("shared", 1),
        "rollout": ("shared", 1),
        "reward": ("reward", 2),
    }
    role = found.roles["reward"]
    assert (role.factory, role.processes) == (JudgeWorker, "reward")
    resolved = resolve_on(config(*JUDGE, "reward.engine.num_replicas=2"), TWO)
    assert role.args == (resolved.reward, "/m", 7, {}, False)
    assert [one.process_group for one in found.sets] == [True, False, False]


def test_a_judge_has_a_gpu_per_tensor_parallel_rank() -> None:
    found = plan(
        *JUDGE,
        "reward.engine.tensor_parallel=2",
        "reward.engine.num_replicas=3",
        shape=GPUS,
    )
    assert {one.name: (one.num_ranks, one.gpus_per_rank) for one in found.sets} == {
        "engine trainer": (1, 1), "rollout": (1, 1), "reward": (3, 2),
    }  # fmt: skip
    assert [one.gpus_per_rank for one in plan(*JUDGE).sets] == [0, 0, 0]


def test_a_judge_and_the_rollout_engine_divide_the_threads_as_they_work_at_the_same_time() -> (
    None
):
    def threads(found: ProcessPlan) -> dict[str, int]:
        return {one.name: one.threads_per_rank for one in found.sets}

    eight = ClusterShape((8,), (0,))
    assert threads(plan(*JUDGE, shape=eight)) == {
        "engine trainer": 8,
        "rollout": 4,
        "reward": 4,
    }
    some = plan(
        *JUDGE, "reward.engine.num_replicas=3", "rollout.num_replicas=1", shape=eight
    )
    assert threads(some) == {"engine trainer": 8, "rollout": 2, "reward": 2}
    # An evaluation that grades by functions starts no judge, so the rollout engine need
    # not leave it any.
    scored = config(*JUDGE, "evaluation.functions={default: exact_match}")
    alone = threads(resolved_plan(scored, eight, learns=False))
    assert alone == {"engine trainer": 8, "rollout": 8, "evaluation": 1}


def test_a_service_needs_no_device() -> None:
    found = plan(
        "reward=http",
        "reward.url=http://h/s",
        "reward.num_ranks=2",
        "placement=separate",
        shape=GPUS,
    )
    (one,) = (one for one in found.sets if one.name == "reward")
    assert (
        one.num_ranks,
        one.gpus_per_rank,
        one.threads_per_rank,
        one.bundle_group,
    ) == (2, 0, 1, "reward")
    assert found.roles["reward"].factory is RewardWorker


def test_a_reward_model_is_placed_as_the_other_models_are() -> None:
    together = plan("reward=model", "reward.model.path=/rm")
    assert sets(together) == {"engine trainer": ("shared", 1), "rollout": ("shared", 1)}
    assert homes(together)["reward"] == homes(together)["actor"] == "engine trainer"
    role = together.roles["reward"]
    spec, *policy = role.args
    assert (role.factory, policy) == (
        RewardModelGrader,
        ["/m", False, "refuse", None, {}],
    )
    assert (spec.role, spec.model_path, spec.head, spec.optimizer) == (
        "reward",
        "/rm",
        "value",
        None,
    )
    apart = plan(
        "reward=model",
        "reward.model.path=/rm",
        "reward.num_ranks=2",
        "placement=separate",
        shape=GPUS,
    )
    (one,) = (one for one in apart.sets if one.name == "reward")
    assert (one.num_ranks, one.gpus_per_rank, one.bundle_group, one.process_group) == (
        2,
        1,
        "reward",
        True,
    )
    other = plan("reward=model", "reward.model.path=/rm", "backend@reward.backend=fsdp")
    assert homes(other)["reward"] == "fsdp trainer"


MIXTURE = """
defaults:
  - function@components.function
  - model@components.model
  - judge@components.judge
  - _self_
kind: mixed
weights: {function: 1.0, model: 0.5, judge: 0.5}
"""


def test_the_roles_of_a_mixture_are_the_keys_of_its_components(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text(MIXTURE)
    models = [
        "reward.components.model.model.path=/rm",
        "reward.components.judge.model.path=/j",
    ]
    mixed = compose("ppo", [*INPUTS, "reward=mine", *models], str(tmp_path))
    found = resolved_plan(mixed, TWO)
    parts = (
        "reward.components.function",
        "reward.components.model",
        "reward.components.judge",
    )
    assert homes(found) == {
        **dict.fromkeys(("actor", "critic", "reference", parts[1]), "engine trainer"),
        "rollout": "rollout", parts[0]: parts[0], parts[2]: parts[2],
    }  # fmt: skip
    assert [found.roles[part].factory for part in parts] == [
        RewardWorker,
        RewardModelGrader,
        JudgeWorker,
    ]
    assert found.roles[parts[1]].args[0].head == "value"
    # An evaluation by functions of its own starts none of them.
    own = compose(
        "ppo",
        [*INPUTS, "reward=mine", *models, "evaluation.functions={default: gsm8k}"],
        str(tmp_path),
    )
    assert resolved_plan(own, TWO, learns=False).roles.keys() == {
        "actor",
        "rollout",
        "evaluation",
    }
    assert resolved_plan(own, TWO).roles.keys() == {*homes(found), "evaluation"}


# ---------------------------------------------------------- what engines are built with


@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        ([], 1),
        (["actor.mini_batch_size=64"], 4),
        (["actor.mini_batch_size=128", "actor.epochs=2"], 4),
    ],
)
def test_a_schedule_ends_with_the_last_update_of_the_run(
    changes: list[str], updates: int
) -> None:
    found = config("run.total_steps=10", *changes)  # 32 prompts x 8 = 256 rows
    assert found.actor.updates_per_step(found.rows_per_step) == updates
    assert engine_spec("actor", found.actor, found).schedule_steps == 10 * updates


def test_what_each_engine_is_built_with() -> None:
    found = config("critic.model.path=/c", "run.seed=5")
    assert [engine_spec(name, role, found).head for name, role in found.model_roles.items()] == [
        "policy", "value", "policy",
    ]  # fmt: skip
    critic = engine_spec("critic", found.critic, found)
    assert (critic.model_path, critic.seed, critic.optimizer) == (
        "/c",
        5,
        found.critic.optimizer,
    )
    reference = engine_spec("reference", found.reference, found)
    assert (reference.optimizer, reference.schedule_steps) == (None, 0)
    alone, beside = (rollout_spec(resolve_on(found, shape)) for shape in (TWO, GPUS))
    assert alone.max_model_len == 512 + 1024
    assert (alone.asleep, alone.lora, beside.asleep, beside.lora) == (
        None,
        None,
        "weights",
        None,
    )


def test_engines_that_keep_the_model_are_built_for_an_adapter() -> None:
    found = config("actor.lora.rank=8")
    alone, beside = (rollout_spec(resolve_on(found, shape)) for shape in (TWO, GPUS))
    assert (alone.asleep, alone.lora) == (None, found.actor.lora)
    assert (beside.asleep, beside.lora) == (
        "weights",
        None,
    )  # which frees the model: merged weights bring it again
    kept = rollout_spec(
        resolve_on(config("actor.lora.rank=8", "rollout.sync.adapter=alone"), GPUS)
    )
    assert (kept.asleep, kept.lora) == ("kv_cache", found.actor.lora)
    merged = rollout_spec(
        resolve_on(config("actor.lora.rank=8", "rollout.sync.adapter=merged"), TWO)
    )
    assert merged.lora is None
    assert Path(merged.model_path) == Path("/m")
