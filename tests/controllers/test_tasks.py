"""Tasks by their names; a task of a user's own is a file and a YAML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from controllers.compose.composition import examine
from controllers.compose.listing import root_configs
from controllers.system.plan import plan_processes, resolve_on
from controllers.tasks import config_type, tasks
from controllers.trainers.base import task_of
from controllers.trainers.rl import ReinforcementTask
from tests.controllers.runs import SHAPE, Inputs, command_here
from tests.controllers.trainers.imitation import ImitationConfig
from verl_ray.cluster.session import Session
from verl_ray.config.load import parse, to_tree
from verl_ray.config.roles import ModelRole, ReferenceRole, SupervisedRole
from verl_ray.config.schema import Config, rule_violations
from verl_ray.config.tasks import declared_class, own_tasks
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError
from verl_ray.preflight.findings import preflight
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.tracking.jsonl import read_metrics
from workers.actor import ActorWorker
from workers.model_worker import ReferenceWorker

FOLDER = Path(__file__).parent / "trainers"
OWN = "tests.controllers.trainers.imitation"


def test_a_name_leads_to_a_file_and_its_declarations(
    inputs: Inputs, tmp_path: Path
) -> None:
    assert config_type("rl") is RLConfig and config_type(OWN) is ImitationConfig
    assert type(task_of(inputs.config("grpo", tmp_path))) is ReinforcementTask
    # The type of each is apart from its trainer.
    assert sorted(tasks()) == sorted(own_tasks())


@pytest.mark.parametrize(
    "task", ["slf", "sft.py", "tests.nowhere", "", "../sft", ".sft", "a b"]
)
def test_a_task_that_is_not_there_is_refused(task: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config_type(task)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value, problem.rule) == (
        "task",
        task,
        "there is no such task",
    )
    assert "reward_model" in problem.fix or "sft" in problem.fix
    assert "A module of your own is named with its dots" in problem.fix


def test_a_configuration_without_a_task_is_told_how_it_begins() -> None:
    with pytest.raises(ConfigError) as caught:
        config_type(None)
    (problem,) = caught.value.problems
    assert problem.key == "task" and "names no task" in problem.rule
    assert "`defaults: [grpo, _self_]`" in problem.fix


def test_a_file_that_is_no_task_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="declares one class over Config, and this one declares none"
    ):
        config_type("supervised")
    two = ModuleType("two")
    for name in ("One", "Two"):
        setattr(two, name, type(name, (Config,), {"__module__": "two"}))
    with pytest.raises(ConfigError, match="this one declares One, Two"):
        declared_class(two, Config)


def test_what_a_task_lacks_itself_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_task.py").write_text("import no_such_package\n")
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "task.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        config_type("lacking.task")


@pytest.mark.processes
def test_own_tasks_are_typed_without_a_trainer() -> None:
    code = (
        "import sys\nfrom controllers.compose.composition import examine\n"
        "heavy = ('torch', 'ray', 'vllm', 'transformers', 'controllers.trainers')\n"
        "for root in sys.argv[1:]:\n"
        "    assert examine(root).config is not None\n"
        "    print(root, [name for name in heavy if name in sys.modules])"
    )
    roots = sorted(root_configs())
    ended = subprocess.run(
        [sys.executable, "-c", code, *roots], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines() == [f"{root} []" for root in roots]


def test_the_rules_of_a_task_of_ones_own_are_checked() -> None:
    composition = examine("imitation", ["model.path=/m", "data.train_path=/t", "data.validation_path=null",
                                  "run.evaluate_every=0", "imitation.weight=9"], str(FOLDER))  # fmt: skip
    assert isinstance(composition.config, ImitationConfig)
    assert [problem.rule for problem in composition.problems] == ["this is no weight"]
    (long,) = examine("imitation", ["model.path=/m", "data.train_path=/t", "data.validation_path=/v",
                                    "backend.micro_batch_tokens_per_rank=8192",
                                    "imitation.max_tokens=100000"], str(FOLDER)).problems  # fmt: skip
    assert (
        long.key == "student.backend.micro_batch_tokens_per_rank"
        and "(imitation.max_tokens)" in long.rule
    )


class PairsConfig(ImitationConfig):
    """An actor that learns and a frozen reference.

    Learning from preferences without a reward model needs these two.
    """

    actor: SupervisedRole
    reference: ReferenceRole

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        return {"actor": self.actor, "reference": self.reference}


def test_a_frozen_reference_is_planned_and_checked(
    inputs: Inputs, tmp_path: Path
) -> None:
    config = resolve_on(inputs.supervised(tmp_path, "actor.num_ranks=2"), SHAPE)
    tree = to_tree(config) | {
        "imitation": {"batch_size": 8, "max_tokens": 16, "weight": 1.0}
    }
    student, reference = (
        tree["actor"],
        {key: tree["actor"][key] for key in ("model", "num_ranks", "backend")},
    )
    del tree["sft"], tree["evaluation"]
    del tree["tracking"]["rollouts"], tree["tracking"]["rollouts_max_mb"]
    pairs = parse(tree | {"student": student, "reference": reference}, PairsConfig)
    planned = plan_processes(pairs, SHAPE)
    assert {name: (role.factory, role.processes) for name, role in planned.roles.items()} == {
        "actor": (ActorWorker, "engine trainer"), "reference": (ReferenceWorker, "engine trainer"),
    }  # fmt: skip
    assert [
        (process_set.name, process_set.num_ranks) for process_set in planned.sets
    ] == [("engine trainer", 2)]
    assert rule_violations(pairs) == [] and preflight(pairs, None).problems == []
    plan = memory_plan(pairs, on_gpus=True)
    assert (
        plan.by_role["reference"]["learn"].working == {}
        and plan.by_role["actor"]["learn"].working != {}
    )
    alone = pairs.model_copy(
        update={"reference": pairs.reference.model_copy(update={"num_ranks": 1})}
    )
    assert [problem.key for problem in rule_violations(alone)] == [
        "reference.num_ranks"
    ]


@pytest.mark.slow
@pytest.mark.cluster
def test_a_task_of_ones_own_is_checked_and_trained(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    arguments = [
        "--config-name", "imitation", "--config-dir", str(FOLDER), f"run.dir={tmp_path}", f"model.path={inputs.model}",
        f"data.train_path={inputs.train}", f"data.validation_path={inputs.validation}", "run.threads_per_rank=1",
        "student.num_ranks=2", "run.total_steps=2", "run.evaluate_every=2", "run.checkpoint_every=1",
        "tracking.wandb.mode=disabled",
    ]  # fmt: skip
    output = command_here(cluster, "check", *arguments).stdout
    assert "one step: 8 rows, each of up to 16 tokens" in output and "student" in output
    command_here(cluster, "train", *arguments)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["training/global_step"] for line in lines] == [0, 1, 2]
    assert (
        lines[2]["train/loss"] < lines[1]["train/loss"]
        and lines[2]["val-core/held_out/rows"] == 4
    )
    command_here(
        cluster, "train", *arguments, "run.total_steps=3"
    )  # goes on from the checkpoint
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    exported = command_here(
        cluster,
        "export",
        str(tmp_path / "checkpoints/step_00000003"),
        str(tmp_path / "out"),
    )
    assert exported.stdout.startswith("student of step_00000003")
    assert (tmp_path / "model" / "config.json").exists()
