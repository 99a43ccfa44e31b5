"""The value of every `auto`, by the facts about a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from scripts.configuration import compose
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config, rule_violations
from verl_ray.config.tasks.reward_model import RewardModelConfig
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.preflight.facts import ClusterFacts
from verl_ray.preflight.resolve import (
    AUTO_KEYS,
    may_be_auto,
    resolution_of_steps,
    resolutions,
    resolve,
    with_total_steps,
)
from verl_ray.settings.section import resolved

MIB = 2**20
INPUTS = ("model.path=/m", "data.train_path=/t.jsonl", "data.validation_path=/v.jsonl")
LAPTOP = ClusterFacts(
    nodes=1,
    cores=4,
    gpus=0,
    has_chat_template=False,
    sent_parameters=3 * MIB // 4,
    checkpoint=None,
)
NODE = ClusterFacts(
    nodes=1,
    cores=64,
    gpus=8,
    has_chat_template=True,
    sent_parameters=300 * MIB,
    checkpoint=None,
)
TWO_NODES = replace(NODE, nodes=2, cores=32, gpus=16, sent_parameters=7500 * MIB)
EIGHT = ("actor.num_ranks=8",)
ROLES = ("actor", "critic", "reference")
FLOAT32 = ("backend.dtype=float32", "rollout.dtype=float32")
LORA = ("actor.lora.rank=8",)

ON_LAPTOP: dict[str, object] = {
    "run.resume": "none",
    # Nothing is known of the memory of the hosts.
    "run.recovery.snapshot_every": 0,
    "run.recovery.snapshot_copies": 1,
    "run.threads_per_rank": {"trainers": 4, "engines": 4, "graders": 1},
    "data.apply_chat_template": False,
    "data.template_day": None,
    "agent.reasoning_parser": None,
    "placement.offload": "none",
    "rollout.sleep": "never",
    "rollout.sync.transport": "shared_memory",
    "rollout.sync.bucket_mib": 2,
    "rollout.sync.adapter": "merged",
    "rollout.sync.probe_every": 1,
    "rollout.sync.probe_tolerance": 0.001,
    **{f"{role}.backend.dtype": "float32" for role in ROLES},
    **{f"{role}.backend.micro_batch_tokens_per_rank": 8192 for role in ROLES},
    **{f"{role}.backend.activation_checkpointing": False for role in ROLES},
    "rollout.dtype": "float32",
    "rollout.num_replicas": 1,
    "rollout.kv_cache_gib": 2.0,
    "rollout.concurrency": 512,
}
ON_NODE = ON_LAPTOP | {
    "run.threads_per_rank": {"trainers": 8, "engines": 8, "graders": 1},
    "data.apply_chat_template": True,
    "placement.offload": "all",
    "rollout.sleep": "weights",
    "rollout.sync.bucket_mib": 50,
    "rollout.sync.probe_every": 10,
    "rollout.sync.probe_tolerance": "measured",
    **{f"{role}.backend.dtype": "bfloat16" for role in ROLES},
    # The memory of these GPUs is not known, so everything saves memory.
    **{f"{role}.backend.micro_batch_tokens_per_rank": 2048 for role in ROLES},
    "actor.backend.activation_checkpointing": True,
    "critic.backend.activation_checkpointing": True,
    "rollout.dtype": "bfloat16",
    "rollout.num_replicas": 8,
    "rollout.kv_cache_gib": 8.0,
}
APART = ON_NODE | {
    # 16 GPUs without 8 of the actor, 2 of the critic and 2 of the reference.
    "rollout.num_replicas": 4,
    "run.threads_per_rank": {"trainers": 2, "engines": 8, "graders": 1},
    "placement.offload": "none",
    "rollout.sleep": "never",
    "rollout.sync.transport": "host_broadcast",
    "rollout.sync.bucket_mib": 512,
}


def without(key: str, values: Mapping[str, object] = ON_NODE) -> dict[str, object]:
    return {other: value for other, value in values.items() if other != key}


def exact(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a run whose types are set."""
    return {key: value for key, value in values.items() if not key.endswith("dtype")}


def configured(*changes: str, root: str = "ppo") -> Config:
    return compose(root, [*INPUTS, *changes])


def values(config: Config, facts: ClusterFacts) -> dict[str, object]:
    return {item.key: item.value for item in resolutions(config, facts)}


@pytest.mark.parametrize(
    ("changes", "facts", "expected"),
    [
        pytest.param((), LAPTOP, ON_LAPTOP, id="a CPU laptop"),
        pytest.param(
            ("schedule=one_step_off", "placement=separate"), LAPTOP,
            # Three ranks of trainers and an engine compute at the same time.
            ON_LAPTOP | {
                "rollout.concurrency": "adaptive",
                "run.threads_per_rank": {"trainers": 1, "engines": 1, "graders": 1},
            },
            id="a CPU laptop, overlapping",
        ),
        pytest.param(EIGHT, NODE, ON_NODE, id="one node of 8 GPUs, colocated"),
        pytest.param(
            (*EIGHT, "placement=separate", "critic.num_ranks=2", "reference.num_ranks=2"), TWO_NODES, APART,
            id="two nodes, separate",
        ),
        pytest.param(
            (*EIGHT, *FLOAT32), NODE, exact(ON_NODE | {"rollout.sync.bucket_mib": 100, "rollout.sync.probe_tolerance": 0.001}),
            id="float32 on GPUs",
        ),
        pytest.param(
            ("rollout.dtype=bfloat16",), LAPTOP,
            without("rollout.dtype", ON_LAPTOP) | {"rollout.sync.bucket_mib": 1, "rollout.sync.probe_tolerance": "measured"},
            id="the rollout engine alone rounds",
        ),
        pytest.param(LORA, LAPTOP, ON_LAPTOP | {"rollout.sync.adapter": "alone"}, id="LoRA, engines keep the model"),
        pytest.param((*EIGHT, *LORA), NODE, ON_NODE, id="LoRA, engines free the model"),
        pytest.param(
            (*EIGHT, *LORA, "rollout.sleep=kv_cache"), NODE,
            without("rollout.sleep") | {"rollout.sync.adapter": "alone"},
            id="LoRA, engines keep the model by choice",
        ),
        pytest.param(
            (*EIGHT, *LORA, "rollout.sync.adapter=alone"), NODE,
            without("rollout.sync.adapter") | {"rollout.sleep": "kv_cache"},
            id="LoRA, the adapter is sent alone by choice",
        ),
        pytest.param((*LORA, "actor.lora.targets=[lm_head]"), LAPTOP, ON_LAPTOP, id="LoRA on the head"),
        pytest.param(("actor.lora.rank=1024",), LAPTOP, ON_LAPTOP, id="LoRA of too high a rank"),
        pytest.param(
            (), replace(LAPTOP, checkpoint="/runs/a/checkpoints/step_00000004"),
            ON_LAPTOP | {"run.resume": "/runs/a/checkpoints/step_00000004"},
            id="a run that has a checkpoint",
        ),
    ],
)  # fmt: skip
def test_what_auto_stands_for(
    changes: tuple[str, ...], facts: ClusterFacts, expected: dict[str, object]
) -> None:
    config = configured(*changes)
    # An adapter's reference is the model without it.
    roles = {key for key in expected if key.startswith("reference.")}
    if "reference" not in config.model_roles:
        expected = {key: expected[key] for key in expected.keys() - roles}
    assert values(config, facts) == expected
    settled = resolve(config, facts)
    assert values(settled, TWO_NODES) == {} and "'auto'" not in str(to_tree(settled))
    assert resolve(settled, TWO_NODES) == settled
    assert list(rule_violations(settled, set(), evaluates=False)) == []


def test_a_supervised_run_has_fewer_settings() -> None:
    for root in ("sft", "reward_model"):
        config = configured(
            "actor.num_ranks=2" if root == "sft" else "reward.num_ranks=2", root=root
        )
        # Two rows of 1536 tokens are compared by a reward model.
        role, tokens = ("actor", 2048) if root == "sft" else ("reward", 3072)
        assert values(config, NODE) == {
            f"{role}.backend.dtype": "bfloat16",
            f"{role}.backend.micro_batch_tokens_per_rank": tokens,
            f"{role}.backend.activation_checkpointing": True,
            "run.resume": "none",
            "run.recovery.snapshot_every": 0,
            "run.recovery.snapshot_copies": 1,
            "run.threads_per_rank": {"trainers": 32, "engines": 64, "graders": 1},
            "data.apply_chat_template": True,
            "data.template_day": None,
        }


@pytest.mark.parametrize(
    ("changes", "learns", "trainers", "engines"),
    [
        (("actor.num_ranks=4",), True, 2, 8),
        (("rollout.num_replicas=2", "rollout.tensor_parallel=2"), True, 8, 2),
        (("backend@critic.backend=fsdp",), True, 4, 8),
        (("placement=separate",), True, 2, 8),
        # An evaluation starts neither critic nor reference
        (("placement=separate",), False, 8, 8),
        (("reward=model", "reward.model.path=/r", "placement=separate"), False, 4, 8),
        (("reward=judge", "reward.model.path=/j", "reward.engine.num_replicas=3"), True, 8, 2),
        (
            ("reward=judge", "reward.model.path=/j", "evaluation.functions={default: exact_match}"), False, 8, 8,
        ),
        (("actor.num_ranks=64",), True, 1, 8),
    ],
)  # fmt: skip
def test_threads_stay_within_the_cores(
    changes: tuple[str, ...], learns: bool, trainers: int, engines: int
) -> None:
    settled = resolve(configured(*changes), replace(LAPTOP, cores=8, learns=learns))
    assert settled.run.threads == {
        "trainers": trainers,
        "engines": engines,
        "graders": 1,
    }


def test_what_the_user_has_set_stays() -> None:
    overrides = (
        "run.threads_per_rank=3", "run.resume=none", "data.apply_chat_template=false", "data.template_day=null", "rollout.sleep=never",
        "placement.offload=optimizer", "rollout.sync.transport=disk", "rollout.sync.bucket_mib=7",
        "rollout.sync.adapter=merged", "rollout.sync.probe_every=3", "rollout.sync.probe_tolerance=0.5", *LORA,
        "backend.dtype=float32", "backend.micro_batch_tokens_per_rank=4096", "backend.activation_checkpointing=false",
        "rollout.dtype=float32", "rollout.num_replicas=1", "rollout.kv_cache_gib=3.0", "rollout.concurrency=64",
        "run.recovery.snapshot_every=5", "run.recovery.snapshot_copies=2",
        "agent.environments.default=number_guessing", "agent.reasoning_parser=null",
    )  # fmt: skip
    config = configured(*overrides)
    assert values(config, NODE) == {} and resolve(config, NODE) == config
    assert config.run.threads == {"trainers": 3, "engines": 3, "graders": 3}


@pytest.mark.parametrize(
    ("parser", "value", "because"),
    [
        ("gemma4", "gemma4", "the marks of thoughts that the chat template writes"),
        (
            None, "qwen3",
            "the chat template writes no marks of thoughts that are known; the usual"
            " ones are <think> and </think>",
        ),
    ],
)  # fmt: skip
def test_thoughts_have_the_marks_that_the_template_writes(
    parser: str | None, value: str, because: str
) -> None:
    config = configured("agent.environments.default=number_guessing")
    facts = replace(LAPTOP, reasoning_parser=parser)
    (item,) = (
        each
        for each in resolutions(config, facts)
        if each.key == "agent.reasoning_parser"
    )
    assert (item.value, item.because) == (value, because)


def test_a_setting_is_not_read_before_it_is_resolved() -> None:
    config = configured()
    assert isinstance(config, RLConfig)
    with pytest.raises(AssertionError, match="before the configuration is resolved"):
        resolved(config.rollout.sleep)
    with pytest.raises(AssertionError, match="before the configuration is resolved"):
        config.run.threads  # noqa: B018  # a property


def test_every_setting_that_may_be_auto_has_a_rule() -> None:
    kinds: tuple[type[BaseModel], ...] = (RLConfig, SFTConfig, RewardModelConfig)
    named = {key for kind in kinds for key in _may_be_auto(kind)}
    named.add("run.resume")  # which may also be any path
    assert all(may_be_auto(key) for key in named)
    for pattern in AUTO_KEYS:
        assert any(fnmatchcase(key, pattern) for key in named), pattern


def _may_be_auto(annotation: Any, key: str = "") -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from _may_be_auto(field.annotation, f"{key}.{name}" if key else name)
    elif annotation == "auto":
        yield key
    else:
        for argument in get_args(annotation):
            yield from _may_be_auto(argument, key)


@pytest.mark.parametrize(
    ("examples", "epochs", "steps", "because"),
    [
        (64, 3, 24, "run.total_epochs=3 x 64 examples / 8 per step"),
        (9, 2, 3, "/ 8 per step is 2.2, rounded up so that each is used at least 2 times"),
        (3, 1, 1, "/ 8 per step is 0.4, rounded up so that each is used at least once"),
    ],
)  # fmt: skip
def test_epochs_become_steps_that_use_every_example(
    examples: int, epochs: int, steps: int, because: str
) -> None:
    changes = ("run.total_steps=null", f"run.total_epochs={epochs}")
    config = compose("ppo", [*INPUTS, *changes, "data.prompts_per_step=8"])
    resolution = resolution_of_steps(config, examples)
    assert resolution is not None and resolution.because.endswith(because)

    counted = with_total_steps(config, examples)
    assert (counted.run.total_steps, counted.run.total_epochs) == (steps, None)
    # The cursor has drawn every row `epochs` times only now.
    assert (steps - 1) * 8 < epochs * examples <= steps * 8
    assert counted.learning_steps("actor") == steps
    assert rule_violations(counted) == []
    assert resolution_of_steps(counted, examples) is None
    assert with_total_steps(counted, 7 * examples) == counted


def test_engines_are_not_cut_across_nodes() -> None:
    # 4 nodes of 6 GPUs: 2 of the trainers leave 22, and a node holds an engine of 4.
    config = configured(
        "algorithm=dr_grpo", "placement=separate", "actor.num_ranks=2",
        "rollout.tensor_parallel=4", root="grpo",
    )  # fmt: skip
    facts = replace(NODE, nodes=4, gpus=24)
    assert values(config, facts)["rollout.num_replicas"] == 4
    # Engines of 2 fit three to a node, and 22 GPUs hold 11 of them.
    narrow = configured(
        "algorithm=dr_grpo", "placement=separate", "actor.num_ranks=2",
        "rollout.tensor_parallel=2", root="grpo",
    )  # fmt: skip
    assert values(narrow, facts)["rollout.num_replicas"] == 11
