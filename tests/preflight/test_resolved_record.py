"""Settings that were `auto` in a run, on a machine of another kind."""

from __future__ import annotations

from scripts.configuration import compose
from tests.preflight.test_resolve import LAPTOP, NODE, configured
from verl_ray.config.load import resolved_elsewhere, with_auto_again
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.device_defaults import with_changes
from verl_ray.preflight.resolve import resolve


def begun(config: Config) -> Config:
    """The configuration of a run that has no checkpoint yet."""
    return with_changes(config, {"run.resume": "none"})


def test_what_was_auto_is_auto_again_and_nothing_else() -> None:
    own = ("rollout.kv_cache_gib=3", "actor.backend.dtype=bfloat16")
    given = begun(configured(*own, "run.threads_per_rank=3"))
    on_gpus = resolve(given, NODE)
    assert isinstance(on_gpus, RLConfig)
    assert on_gpus.placement.offload == "all" and on_gpus.rollout.num_replicas == 1
    assert with_auto_again(on_gpus) == given
    assert resolve(with_auto_again(on_gpus), LAPTOP) == resolve(given, LAPTOP)


def test_the_record_names_the_kind_of_device() -> None:
    given = begun(configured("run.threads_per_rank=3"))
    on_gpus, on_cpu = resolve(given, NODE), resolve(given, LAPTOP)
    record = on_gpus.run.resolved
    assert record.cpu == {} and on_cpu.run.resolved.gpu == {}
    assert record.gpu["placement.offload"] == "all"
    assert on_cpu.run.resolved.cpu["placement.offload"] == "none"
    assert record.gpu.keys() == on_cpu.run.resolved.cpu.keys()
    # Where a run goes on from, and what is set, is not what a device decided.
    assert not {"run.resume", "run.threads_per_rank"} & record.gpu.keys()

    # A resolved configuration resolves to itself, also on another kind of device.
    assert resolve(on_gpus, LAPTOP) == on_gpus
    assert resolved_elsewhere(on_gpus, on_gpus=False) == record.gpu
    assert resolved_elsewhere(on_gpus, on_gpus=True) == {}


def test_what_was_changed_by_hand_since_is_the_users_own() -> None:
    on_gpus = resolve(begun(configured()), NODE)
    changed = with_changes(on_gpus, {"actor.backend.dtype": "float32"})
    again = with_auto_again(changed)
    assert again.model_roles["actor"].backend.dtype == "float32"
    assert again.model_roles["critic"].backend.dtype == "auto"
    assert "actor.backend.dtype" not in resolved_elsewhere(changed, on_gpus=False)


def test_what_is_resolved_anew_counts_for_the_new_device_alone() -> None:
    on_gpus = resolve(begun(configured()), NODE)
    asked = with_changes(on_gpus, {"rollout.dtype": "auto"})
    record = resolve(asked, LAPTOP).run.resolved
    assert record.cpu == {"rollout.dtype": "float32"}
    assert record.gpu.keys() == on_gpus.run.resolved.gpu.keys() - {"rollout.dtype"}


def test_a_setting_of_a_section_that_is_gone_is_passed_over() -> None:
    # A warm start is a supervised job, which has an actor and no rollouts.
    record = {"gpu": {"rollout.dtype": "bfloat16", "actor.backend.dtype": "bfloat16"}}
    inputs = ("model.path=/m", "data.train_path=/t", "data.validation_path=/v")
    job = compose("sft", [*inputs, "backend.dtype=bfloat16"])
    recorded = with_changes(job, {"run.resolved": {"cpu": {}, **record}})
    assert with_auto_again(recorded) == with_changes(
        job, {"actor.backend.dtype": "auto"}
    )
