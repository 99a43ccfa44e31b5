"""Trees of values to typed configurations and back."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import yaml

from controllers.compose.composition import examine
from controllers.tasks import typed_config
from scripts.configuration import compose
from verl_ray.config.load import known_keys, parse, to_tree, with_changes
from verl_ray.config.renamed import ADDED, RENAMED, migrated
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.errors import ConfigError, Problem
from verl_ray.settings.section import value_of

INPUTS = ["model.path=/m", "data.train_path=t.jsonl", "data.validation_path=v.jsonl"]


def tree(*overrides: str) -> dict[str, Any]:
    return to_tree(compose("quickstart", overrides))


def problems(values: dict[str, Any]) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        typed_config(values)
    return {problem.key: problem for problem in caught.value.problems}


@pytest.mark.parametrize("root", ["quickstart", "ppo", "grpo", "sft", "reward_model"])
def test_a_configuration_survives_yaml(root: str) -> None:
    config = compose(root, [] if root == "quickstart" else INPUTS)
    saved = yaml.safe_load(yaml.safe_dump(to_tree(config)))
    assert typed_config(saved) == config
    # Nothing is added to what this version saves.
    assert migrated(saved) == saved
    # An earlier version saved the last step where it wrote checkpoints on the way.
    del saved["run"]["save_at_end"]
    assert typed_config(migrated(saved)) == config
    saved["run"]["checkpoint_every"] = 0
    assert not typed_config(migrated(saved)).run.save_at_end
    saved["run"]["checkpoint_every"] = config.run.checkpoint_every
    if root == "reward_model":
        del saved["reward"]["expert_bias_update"]
        assert typed_config(migrated(saved)) == config


@pytest.mark.parametrize(
    "key",
    ["run.evaluate_every", "run.checkpoint_every", "run.recovery.snapshot_every",
     "actor.lora.rank"],
)  # fmt: skip
def test_null_is_off_where_0_is(key: str) -> None:
    # A name of its own would hold the time.
    named = [*INPUTS, "run.name=one"]
    off = compose("grpo", [*named, f"{key}=null"])
    assert off == compose("grpo", [*named, f"{key}=0"])
    assert value_of(off, key) == 0
    if key.endswith("_every"):
        for never in ("false", "-1"):
            assert off == compose("grpo", [*named, f"{key}={never}"])
        (problem,) = examine("quickstart", [f"{key}=no"]).problems
        assert problem.fix.startswith("Use 0 for never") and "number" in problem.fix


def test_a_message_says_whether_0_or_null_is_off() -> None:
    values = tree()
    values["rollout"]["staleness"] = None
    values["actor"]["optimizer"]["weight_decay"] = None
    values["run"] |= {"keep_checkpoints": None, "early_stop": 0, "max_skipped_steps": 0}
    fixes = {key: problem.fix for key, problem in problems(values).items()}
    assert fixes == {
        "rollout.staleness": "Use a whole number of at least 0.",
        "actor.optimizer.weight_decay": "Use a finite number of at least 0.",
        "run.keep_checkpoints": "Use a whole number.",
        "run.early_stop": "Use null or a number above 0; the nearest is 1.",
        "run.max_skipped_steps": "Use a number above 0; the nearest is 1.",
    }


def test_a_key_that_was_renamed_leads_to_the_new_one() -> None:
    values = tree()
    values["run"]["call_deadline_s"] = 60.0
    assert (
        problems(values)["run.call_deadline_s"].fix
        == "run.call_deadline_s is now run.stall_s."
    )
    (problem,) = examine("quickstart", ["rollout.health.stall_s=60"]).problems
    assert (problem.key, problem.fix) == (
        "rollout.health.stall_s",
        "rollout.health.stall_s is now run.stall_s.",
    )
    known = {*known_keys(RLConfig), *known_keys(SFTConfig)}
    assert {*RENAMED.values(), *ADDED} <= known and not set(RENAMED) & known


def test_an_earlier_configuration_is_renewed() -> None:
    saved = tree()
    del saved["run"]["stall_s"], saved["rollout"]["staleness"]
    saved["run"] |= {"call_deadline_s": 77.0, "start_deadline_s": 5.0}
    saved["rollout"]["health"]["stall_s"] = 6.0
    assert typed_config(migrated(saved)).run.stall_s == 77.0
    assert migrated(saved)["rollout"]["staleness"] == 0 and "rollout" not in migrated(
        {"run": {}}
    )
    assert saved["run"]["call_deadline_s"] == 77.0  # the saved tree has not changed
    assert migrated(tree()) == tree()

    saved = tree()
    warm_start = saved["prepare"]["warm_start"]
    for role in (saved["actor"], saved["critic"], warm_start):
        del role["optimizer"]["kind"], role["optimizer"]["decay_fraction"]
    assert migrated(saved) == tree()

    weights = {"desirable_weight": None, "undesirable_weight": None}
    policy_run = {"preference": {"loss": "sigmoid"}}
    assert migrated(policy_run) == {"preference": {"loss": "sigmoid", **weights}}
    reward_model_run = {"preference": {"margin": 0.0}}
    assert migrated(reward_model_run) == reward_model_run


def test_results_of_tools_stay_as_long_as_they_were() -> None:
    saved = tree()
    del saved["agent"]["max_result_tokens"]
    assert migrated(saved)["agent"]["max_result_tokens"] is None
    saved["agent"]["environments"] = {"default": "game.py:Game"}
    assert migrated(saved)["agent"]["max_result_tokens"] == 100_000


def test_tools_lose_the_limit_that_they_had_of_their_own() -> None:
    saved = tree()
    tools = {"function": "tools.py:TOOLS", "max_characters": 50}
    game = {"function": "game.py:Game", "max_characters": 50}
    saved["agent"]["environments"] = {
        "all": tools,
        "one": {
            "function": "tools.py:add",
            "max_characters": 50,
            "max_parse_errors": 2,
        },
        "game": game,
    }
    # A present run has said what it means.
    assert migrated(saved) == saved
    del saved["agent"]["max_result_tokens"]
    assert migrated(saved)["agent"]["environments"] == {
        "all": "tools.py:TOOLS",
        "one": {"function": "tools.py:add", "max_parse_errors": 2},
        "game": game,
    }


def test_a_service_that_had_a_circuit_is_waited_for() -> None:
    service = ["reward=http", "reward.url=http://h/s", "reward.max_outage_s=1800"]
    today = to_tree(compose("ppo", [*INPUTS, *service]))
    saved = copy.deepcopy(today)
    del saved["reward"]["max_outage_s"]
    saved["reward"] |= {"circuit_failures": 5, "circuit_reset_s": 10.0}
    mixed = copy.deepcopy(saved)
    mixed["reward"] = {"kind": "mixed", "components": {"own": saved["reward"]}}
    assert migrated(saved) == today
    assert migrated(mixed)["reward"]["components"] == {"own": today["reward"]}


def test_a_run_of_before_the_schedules_goes_on_as_a_synchronous_one() -> None:
    saved = tree()
    for name in ("schedule", "staleness", "updates", "kv", "concurrency"):
        del saved["rollout"][name]
    saved["rollout"]["in_flight"] = 48
    config = typed_config(migrated(saved))
    assert isinstance(config, RLConfig)
    rollout = config.rollout
    assert (rollout.schedule, rollout.staleness) == ("synchronous", 0)
    assert (rollout.updates, rollout.kv) == ("between", None)
    assert rollout.concurrency == 48

    # The key of today leads to where the key of yesterday is.
    (problem,) = examine("quickstart", ["rollout.in_flight=48"]).problems
    assert problem.fix == "rollout.in_flight is now rollout.concurrency."


def test_lists_become_tuples_except_in_free_sections() -> None:
    config = compose(
        "quickstart",
        [
            "rollout.vllm_args.cudagraph_capture_sizes=[1,2]",
            "tracking.wandb.tags=[a,b]",
        ],
    )
    assert isinstance(config, RLConfig)
    assert config.tracking.wandb.tags == ("a", "b")
    assert config.rollout.vllm_args == {"cudagraph_capture_sizes": [1, 2]}


def test_all_problems_come_at_once_with_their_keys() -> None:
    values = tree()
    values["rollout"]["group_size"] = 0
    values["rollout"]["grup_size"] = 4
    values["actor"]["backend"]["dtype"] = "float16"
    values["actor"]["optimizer"]["lr"] = "fast"
    values["run"]["threads_per_rank"] = -1
    del values["run"]["seed"]
    refused = problems(values)
    assert set(refused) == {
        "rollout.group_size",
        "rollout.grup_size",
        "actor.backend.dtype",
        "actor.optimizer.lr",
        "run.threads_per_rank",
        "run.seed",
    }
    assert "the nearest is 1" in refused["rollout.group_size"].fix
    assert "rollout.group_size" in refused["rollout.grup_size"].fix
    assert (
        refused["actor.backend.dtype"].fix
        == "Did you mean bfloat16? Use float32 or bfloat16 or auto."
    )
    assert "auto" in refused["run.threads_per_rank"].fix
    assert refused["run.seed"].rule == "this key has no value"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1e-3"])
def test_numbers_are_finite_and_not_coerced(value: object) -> None:
    values = tree()
    values["actor"]["optimizer"]["lr"] = value
    assert "actor.optimizer.lr" in problems(values)


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        (
            "actor.optimizer.betas=[0.9]",
            "actor.optimizer.betas",
            "Use a list of 2 numbers, e.g. [0.9,0.999].",
        ),
        (
            "actor.optimizer.betas=[]",
            "actor.optimizer.betas",
            "Use a list of 2 numbers, e.g. [0.9,0.999].",
        ),
        (
            "actor.optimizer.betas=[0.9,0.9,0.9]",
            "actor.optimizer.betas",
            "Use a list of 2 numbers, e.g. [0.9,0.999].",
        ),
        (
            "actor.optimizer.betas=0.9",
            "actor.optimizer.betas",
            "Use a list of 2 numbers, e.g. [0.9,0.999].",
        ),
        (
            "actor.optimizer.betas=[2,0.9]",
            "actor.optimizer.betas.0",
            "Use a number of at most 1.0.",
        ),
        (
            "tracking.wandb.tags=x",
            "tracking.wandb.tags",
            "Use a list, e.g. [first,second].",
        ),
        (
            "rollout.vllm_args=3",
            "rollout.vllm_args",
            "Use a section, e.g. 'rollout.vllm_args={block_size: 32}'.",
        ),
        (
            "algorithm.kl=3",
            "algorithm.kl",
            "Set the keys inside it, e.g. algorithm.kl.place=...",
        ),
        ("run.total_steps=1e3", "run.total_steps", "Use the whole number 1000."),
        ("run.total_steps=1.5", "run.total_steps", "Use a whole number."),
        ("run.total_steps=nan", "run.total_steps", "Use a whole number."),
        ("run.seed=4294967296", "run.seed", "Use a number of at most 4294967295."),
        (
            "rollout.temperature=2.5",
            "rollout.temperature",
            "Use a number of at most 2.0.",
        ),
        (
            "evaluation.temperature=2.5",
            "evaluation.temperature",
            "Use a number of at most 2.0.",
        ),
    ],
)
def test_a_value_of_the_wrong_shape_says_what_is_right(
    override: str, key: str, says: str
) -> None:
    (problem,) = examine("quickstart", [override]).problems
    assert (problem.key, problem.fix) == (key, says)


def test_a_number_that_is_not_finite_is_called_that() -> None:
    (problem,) = examine("quickstart", ["actor.optimizer.lr=nan"]).problems
    assert problem.rule == "this is not a finite number"


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("model=/tmp", "Did you mean model.path=/tmp?"),
        ("critic.model=/tmp", "Did you mean critic.model.path=/tmp?"),
        ("actor=null", "Set the keys inside it, e.g. actor.model.path=..."),
        ("run=x", "Set the keys inside it, e.g. run.name=..."),
        (
            "actor.backend=fsdp",
            "Choose it with backend@actor.backend=fsdp; there is engine, fsdp, megatron, megatron_fsdp.",
        ),
        (
            "actor.optimizer=muon",
            "Choose it with optimizer@actor.optimizer=muon; there is adafactor, adamw, muon, sgd.",
        ),
        (
            "critic.optimizer=AdamW",
            "Did you mean adamw? There is adafactor, adamw, muon, sgd. Choose with optimizer@critic.optimizer=...",
        ),
        ("actor.lora=qlora", "There is linear. Choose with lora@actor.lora=..."),
    ],
)
def test_a_bad_section_is_the_only_problem(override: str, fix: str) -> None:
    (problem,) = examine("quickstart", [override]).problems
    assert (problem.key, problem.fix) == (override.partition("=")[0], fix)


def test_an_unknown_backend_and_task_are_named() -> None:
    values = tree()
    values["critic"]["backend"]["kind"] = "deepspeed"
    assert "'engine', 'fsdp'" in problems(values)["critic.backend.kind"].fix
    own = "A module of your own is named with its dots."
    assert (
        problems({"task": "kto"})["task"].fix
        == f"There is dpo, reward_model, rl, sft. {own}"
    )
    assert (
        "declares one class over Config"
        in problems({"task": "json.decoder"})["task"].rule
    )


def test_known_keys_cover_every_choice() -> None:
    keys = set(known_keys(RLConfig))
    assert {"actor.backend.shard_size", "algorithm.value_loss.clip", "run.seed"} <= keys


def test_the_configuration_is_frozen() -> None:
    config = compose("quickstart")
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 3  # type: ignore[misc]


@pytest.mark.processes
def test_importing_it_imports_no_framework() -> None:
    code = (
        "import sys, verl_ray.config.load, verl_ray.config.tasks.rl, verl_ray.config.schema;"
        "print([name for name in ('torch', 'ray', 'vllm', 'hydra', 'omegaconf') if name in sys.modules])"
    )
    assert (
        subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
    )


def test_other_values_are_what_parsing_them_gives() -> None:
    config = compose("quickstart")
    changes = {
        "run.threads_per_rank": {"trainers": 4, "engines": 2, "graders": 1},
        "rollout.kv_cache_gib": 3,
        "actor.optimizer.betas": (0.9, 0.95),
        "reference.backend.micro_batch_tokens_per_rank": 4096,
    }
    changed = with_changes(config, changes)
    tree = to_tree(config)
    for key, value in changes.items():
        node: Any = tree
        *sections, name = key.split(".")
        for section in sections:
            node = node[section]
        node[name] = value
    assert changed == parse(tree, type(config)) != config
