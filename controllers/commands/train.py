"""The command `train`: from a checked configuration to a finished run.

Invariant: one run at a time writes to a folder; what it writes to is known before anything starts. Deliberately not
here: the loop around a step (`controllers/run/loop.py`), and what a kind of run does (`controllers/trainers`).
"""

from __future__ import annotations

from pathlib import Path

import yaml

from controllers.run.claim import claim
from controllers.run.conclusion import conclude
from controllers.run.loop import Loop
from controllers.run.preparation import prepare
from controllers.run.recovery import Recovery
from controllers.run.resumption import Resumption
from controllers.run.session import open_session, recording
from controllers.run.stopping import Stopping
from controllers.system.build import Shape, resolve_on, start
from controllers.trainers.base import task_of
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import noting
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.memory_table import memory_table, print_tables


def train(config: Config) -> int:
    """Run the job. Returns 0, or 1 if a run that promised a gain (prepare.min_gain) did not reach it."""
    with claim(config.run.dir):
        found = Resumption(config)
        print(f"{config.run.name}: writing to {config.run.dir}", flush=True)
        found.refuse_fewer(config.run.total_steps)
        found.set_aside()
        with open_session(config) as session:
            return run(config, session, found)


def run(given: Config, session: Session, found: Resumption) -> int:
    """One job on an open cluster, from its newest checkpoint or from the beginning."""
    config = resolve_on(given, Shape.of(session), checkpoint=found.path)
    found.settle(config)
    (Path(config.run.dir) / "config.yaml").write_text(yaml.safe_dump(to_tree(config), sort_keys=False))
    print_tables(memory_table(memory_plan(config, on_gpus=Shape.of(session).gpus > 0)))
    task = task_of(config)
    prepare(config, session)
    make_trainer = task.read()
    recovery = Recovery(found)
    stopping = Stopping(config, recovery)
    with (
        stopping.told(),
        noting(),
        start(config, session, task.workers) as system,
        recording(config, found) as trackers,
    ):
        trainer = make_trainer(system)
        loop = Loop(config.run, trainer, trackers, recovery, stopping)
        loop.run()
        task.conclude(trainer)
    return conclude(task, trackers, loop.samples)
