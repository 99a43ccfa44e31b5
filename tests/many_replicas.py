"""The driver of a large run on a small machine: 256 replicas that simulate an engine.

The driver, its messages and processes are those of a run. Only the engine is scripted,
and a process holds several replicas. The program prints the driver's share of time, its
memory, and how long it takes to react to finished rows::

    python -m tests.many_replicas [--replicas 256] [--steps 25] [OVERRIDE ...]

Deliberately not here: what an engine does (`python -m scripts.bench schedule`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil

from controllers.system.build import System, build_replicas
from controllers.system.plan import ROLLOUT, ClusterShape, plan_processes, resolve_on
from scripts.bench.inputs import run_with_inputs
from scripts.bench.schedule_run import (
    Lengths,
    RecordingWorker,
    ReplicaRecord,
    ScheduleTrainer,
    graded,
    percentiles,
)
from scripts.bench.scripted_engine import ScriptedEngine
from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.session import Session
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.requests import (
    EngineLoad,
    GenerationProgress,
    GenerationRequest,
    Tokens,
)
from verl_ray.rollout.server import RolloutServer
from workers.rollout import RolloutSpec

PER_PROCESS = 8
"""Replicas of a process."""

TOKEN_S = 0.1
"""Seconds that an engine takes for a token of all its rows."""

LENGTHS = Lengths("tail", 64)

SETTINGS = (
    "schedule=asynchronous",
    "placement=separate",
    "data.prompts_per_step=256",
    "rollout.group_size=16",
    f"rollout.max_response_tokens={LENGTHS.most}",
    "rollout.concurrency=64",
    "rollout.stream_rows=4",
    "rollout.sync.probe_tolerance=1e9",  # a script knows no log-probs
    "prepare.model.hidden_size=32",
    "prepare.model.num_layers=1",
    "prepare.model.num_heads=1",
    "prepare.model.num_kv_heads=1",
    "prepare.model.intermediate_size=32",
)


class PacedEngine(ScriptedEngine):
    """A scripted engine that takes its time."""

    def _step(self) -> Iterator[GenerationProgress]:
        time.sleep(TOKEN_S)
        yield from super()._step()

    @property
    def load(self) -> EngineLoad:
        """The load, which rows as short as these never raise."""
        return replace(super().load, kv_cache_use=0.5)


class SimulatedWorker(RecordingWorker):
    """A replica with a scripted engine."""

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        def start() -> RolloutEngine:
            return PacedEngine(digits, probe_log_probs=other_log_probs)

        self.server = RolloutServer(start)
        self._waits_for_sender = False
        self.endpoint = None
        self._record = ReplicaRecord([], [])


def digits(request: GenerationRequest) -> list[tuple[int, float]]:
    """Return a response of tokens that any model of these is likely to sample."""
    return [
        (3 + (request.seed + place) % 10, -2.5)
        for place in range(request.sampling.max_tokens)
    ]


def other_log_probs(tokens: Tokens) -> Sequence[float]:
    """Return log-probs that are never those of an older version."""
    log_probs: list[float] = np.random.default_rng().random(len(tokens) - 1).tolist()
    return log_probs


class ManyReplicasTrainer(ScheduleTrainer):
    """A trainer that reads the records of many replicas."""

    def records(self) -> list[ReplicaRecord]:
        """Return what each replica did since the last call."""
        calls = [one.rank_zero(RecordingWorker.take_record) for one in self.members]
        return [call.result() for call in calls]


@contextlib.contextmanager
def running(config: RLConfig, session: Session) -> Iterator[System]:
    """Start a run of which each rollout process holds `PER_PROCESS` replicas."""
    plan = plan_processes(config, ClusterShape.of(session))
    rollout = plan.roles[ROLLOUT]
    names = [f"{ROLLOUT}{number}" for number in range(PER_PROCESS)]
    simulated = [replace(rollout, name=name, factory=SimulatedWorker) for name in names]
    others = {name: role for name, role in plan.roles.items() if name != ROLLOUT}

    groups = start_groups(
        plan.sets,
        [*others.values(), *simulated],
        stall_s=config.run.stall_s,
        log_dir=Path(config.run.dir) / "logs",
    )
    members = [member for role in simulated for member in groups.replicas(role)]
    models = {name: groups[others[name]] for name in config.model_roles}
    graders = {name: groups[others[name]] for name in others.keys() - models.keys()}
    replicas = build_replicas(
        config, members, models["actor"], list(models.values()), on_gpus=False
    )
    system = System(groups, models, replicas, graders, False, plan.devices)
    with system:
        yield system


def main(arguments: Sequence[str]) -> None:
    """Make the steps and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.many_replicas")
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    options = parser.parse_args(arguments)
    processes = options.replicas // PER_PROCESS

    with tempfile.TemporaryDirectory() as folder:
        overrides = (
            *SETTINGS,
            f"rollout.num_replicas={processes}",
            *options.overrides,
        )
        config = run_with_inputs("1m", folder, overrides)
        with contextlib.redirect_stdout(sys.stderr):
            session = Session.open(None, cores=processes + 8)
            with session:
                config = resolve_on(config, ClusterShape.of(session))
                with running(config, session) as system:
                    figures = measure(config, system, options.steps)
    print(json.dumps({"replicas": PER_PROCESS * processes, **figures}, indent=2))


def measure(config: RLConfig, system: System, steps: int) -> dict[str, Any]:
    """Return the figures of so many steps."""
    driver = psutil.Process()
    trainer = ManyReplicasTrainer(config, system, LENGTHS)
    trainer.begin(0)
    before_bytes = driver.memory_info().rss

    began_s = time.perf_counter()
    cpu_began_s = time.process_time()
    metrics = []
    memory_bytes = []
    for number in range(1, steps + 1):
        metrics.append(trainer.step(number))
        memory_bytes.append(driver.memory_info().rss)
        print(f"step {number} of {steps}", flush=True)
    elapsed_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - cpu_began_s

    reactions = [
        reaction
        for record in trainer.records()
        for reaction in graded(record.ended, trainer.record)
    ]
    trainer.replicas.stop_generation()
    trainer.replicas.close()
    step_s = [step["timing_s/step"] for step in metrics]
    half = steps // 2
    return {
        "rows": steps * config.data.prompts_per_step * config.rollout.group_size,
        "pieces": len(reactions),
        "seconds": round(elapsed_s, 1),
        "step_s": round(median(step_s), 3),
        "driver_cpu_share": round(cpu_s / elapsed_s, 3),
        "controller_share": round(
            fmean(step["timing_s/controller"] for step in metrics) / fmean(step_s), 3
        ),
        "driver_mib": {
            "before": before_bytes >> 20,
            "half way": memory_bytes[half] >> 20,
            "at the end": memory_bytes[-1] >> 20,
            "most": max(memory_bytes) >> 20,
        },
        "graded_ms": percentiles(reactions),
        "cores": len(os.sched_getaffinity(0)),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
