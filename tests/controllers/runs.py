"""Small real runs: their inputs, configurations and commands, and trainers that share
one pair of sampling groups.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest

from controllers.command_line import main
from controllers.system.build import System, build_replicas
from controllers.system.plan import (
    WORKERS,
    ClusterShape,
    plan_processes,
    resolve_on,
)
from controllers.trainers.rl import Trainer
from scripts.configuration import compose
from tests.controllers.held_replica import HeldReplica
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import Groups, start_groups
from verl_ray.cluster.session import Session
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.data.arithmetic import ALPHABET, write_arithmetic
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.models.tiny import make_tiny_qwen3
from verl_ray.profiling.phases import Timers
from workers.generation import Generation
from workers.reward import RewardWorker
from workers.rollout import (
    RolloutWorker,
)

ROOT = Path(__file__).parents[2]
GRADER = Path(__file__).with_name("grader.py")
SAMPLING = ("rollout", "reward")
SHAPE = ClusterShape(cores=(4,), gpus_per_node=(0,))

# Metrics that say how fast something was, where it ran, or what the disk had of it; all
# others must be the same wherever a run runs.
MEASURED = (
    "timing_", "perf/", "memory", "weight_sync/bytes_per_s", "global_seqlen/", "staleness/groups_waiting",
    "episode/loop_lag_s", "rollouts/recorded_",
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    model: Path
    train: Path
    validation: Path

    def overrides(self, run_dir: Path) -> list[str]:
        """What makes any root config a run of seconds on these inputs."""
        return [
            f"run.dir={run_dir}",
            f"model.path={self.model}",
            f"data.train_path={self.train}",
            f"data.validation_path={self.validation}",
            "run.threads_per_rank=1",
            "run.evaluate_every=0",
            "run.checkpoint_every=0",
            "tracking.wandb.mode=disabled",
            "actor.optimizer.lr=1e-3",
        ]

    def rl(self, run_dir: Path) -> list[str]:
        return [
            *self.overrides(run_dir),
            "data.prompts_per_step=8",
            "data.max_prompt_tokens=8",
            "rollout.group_size=4",
            "rollout.max_response_tokens=6",
            "rollout.kv_cache_gib=0.03125",
            f"reward.functions.default={GRADER}:ones",
            f"reward.functions.sometimes={GRADER}:sometimes",
            f"reward.functions.broken={GRADER}:broken",
        ]

    def config(self, root: str, run_dir: Path, *changes: str) -> RLConfig:
        config = compose(root, [*self.rl(run_dir), *changes])
        assert isinstance(config, RLConfig)
        return config

    def supervised(self, run_dir: Path, *changes: str) -> SFTConfig:
        config = compose("sft", [*self.overrides(run_dir), *changes])
        assert isinstance(config, SFTConfig)
        return resolve_on(config, SHAPE)

    def graded_by(self, function: str, folder: Path) -> Path:
        """The training problems under another data source."""
        path = folder / f"{function}.jsonl"
        records = [json.loads(line) for line in self.train.read_text().splitlines()]
        path.write_text(
            "".join(
                json.dumps(record | {"data_source": function}) + "\n"
                for record in records
            )
        )
        return path


def make_inputs(folder: Path) -> Inputs:
    """Sums of two digits and an untrained model of two layers."""
    files = write_arithmetic(
        folder, max_operand=19, num_train=64, num_validation=16, seed=0
    )
    character_tokenizer(folder / "tokenizer", ALPHABET)
    shape = TinyModelConfig(
        hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=96,
        tie_embeddings=True,
    )  # fmt: skip
    model = make_tiny_qwen3(folder / "model", folder / "tokenizer", shape, seed=0)
    return Inputs(model, files.train.jsonl, files.validation.jsonl)


def command(
    cluster: Session | None, *arguments: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """`verl-ray ARGUMENTS` in a process of its own, as a user gives it, which must end
    with `code`. A run uses `cluster`, or where that is None the one that the arguments
    name, or one of its own.
    """
    where = [f"ray.address={cluster.address}"] if cluster else []
    ended = subprocess.run(
        [sys.executable, "-m", "controllers", *arguments, *where],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended


def command_here(
    cluster: Session, *arguments: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """`verl-ray ARGUMENTS` in the process of the tests, which has imported what the
    driver needs and is connected to `cluster` already. It must end with `code`. Only
    the driver is not new: every worker process is.
    """
    where = [] if arguments[0] == "export" else [f"ray.address={cluster.address}"]
    said = io.StringIO()
    announcing = io.StringIO()
    with (
        mock.patch.object(
            Session, "open", lambda *_, **__: contextlib.nullcontext(cluster)
        ),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(announcing),
    ):
        ended = main([*arguments, *where])
    assert ended == code, said.getvalue() + announcing.getvalue()
    return subprocess.CompletedProcess(
        arguments, ended, said.getvalue(), announcing.getvalue()
    )


@dataclass(frozen=True)
class Samplers:
    """Rollout replicas and a reward rank, which any number of trainers use one after
    another.
    """

    rollout: Sequence[WorkerGroup[RolloutWorker]]
    reward: WorkerGroup[RewardWorker]


def start_some(
    config: Config, folder: Path, *, sampling: bool
) -> tuple[Groups, dict[str, WorkerGroup]]:
    """Start only the sampling roles of a job, or only the others."""
    workers = {**WORKERS, "rollout": HeldReplica}
    plan = plan_processes(resolve_on(config, SHAPE), SHAPE, workers)
    sets = [
        replace(one, cpus_per_rank=0.25)
        for one in plan.sets
        if (one.name in SAMPLING) == sampling
    ]
    roles = {
        name: role
        for name, role in plan.roles.items()
        if (name in SAMPLING) == sampling
    }
    groups = start_groups(
        sets, list(roles.values()), stall_s=240, log_dir=folder / "logs"
    )
    return groups, {
        name: groups[role] for name, role in roles.items() if name != "rollout"
    }


def replicas_of(
    config: RLConfig, groups: Groups
) -> Sequence[WorkerGroup[RolloutWorker]]:
    """The rollout replicas that `start_some` started."""
    return groups.replicas(
        plan_processes(resolve_on(config, SHAPE), SHAPE).roles["rollout"]
    )


@contextmanager
def training(config: RLConfig, samplers: Samplers) -> Iterator[Trainer]:
    """The trainer of a job, its model roles started for it."""
    groups, roles = start_some(config, Path(config.run.dir), sampling=False)
    with groups:
        yield trainer_of(config, groups, roles, samplers)


def trainer_of(
    config: RLConfig, groups: Groups, roles: dict[str, WorkerGroup], samplers: Samplers
) -> Trainer:
    """A trainer on groups that run already: of `roles` those that the algorithm has use
    for.
    """
    config = resolve_on(config, SHAPE)
    used = {name: group for name, group in roles.items() if name in config.model_roles}
    replicas = build_replicas(
        config, samplers.rollout, used["actor"], list(used.values()), on_gpus=False
    )
    devices = used["actor"].num_ranks
    system = System(
        groups,
        used,
        replicas,
        {"reward": samplers.reward},
        has_gpus=False,
        devices=devices,
    )
    tokenizer = load_tokenizer(config.actor.model.path)
    prompts = PromptSource(
        config.data.train_path, tokenizer, config.data, config.run.seed
    )
    return Trainer(config, system, prompts, None)


def produced(
    run: Trainer, prompts: int, what: Generation, timers: Timers | None = None
) -> Experience:
    """Scored responses to the first so many prompts, drawn from the policy as it is."""
    asked, buffer = (
        run.prompts.all(prompts),
        RolloutBuffer(what.group_size, staleness=0),
    )
    run.producer.begin(asked, what, buffer, run.policy_version + 1)
    return run.producer.take(
        asked.group_id, buffer, run.policy_version, timers or Timers()
    )


def watched(run: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[Experience]:
    """A list that grows by what each step learns from."""
    taken: list[Experience] = []
    produce = run.produce

    def keep() -> Experience:
        taken.append(produce())
        return taken[-1]

    monkeypatch.setattr(run, "produce", keep)
    return taken


def timed_by(run: Trainer, timers: Timers) -> None:
    """The whole trainer uses these timers from now on."""
    run.timers = run.learner.timers = timers


def lasting(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that do not depend on speed or on the number of ranks."""
    return {
        name: value for name, value in metrics.items() if not name.startswith(MEASURED)
    }
