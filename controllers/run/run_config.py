"""The configuration that the steps of a run use: counted, resolved and written.

Invariant: the file in the run's folder is what the run uses. Only `run.resume` stays as
the user gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from controllers.run.resumption import Resumption
from controllers.run.step_sizes import with_paces
from controllers.system.plan import ClusterShape, facts_on
from controllers.trainers.base import task_of
from verl_ray.cluster.session import Session
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config, rule_violations
from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import shown_path
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.resolve import (
    Resolution,
    resolution_of_steps,
    resolutions,
    resolve,
    with_total_steps,
)
from verl_ray.preflight.tables import (
    auto_table,
    memory_in_words,
    memory_table,
    resolutions_in_words,
    text_of,
)


def settle(requested: Config, session: Session, resumption: Resumption) -> Config:
    """Resolve every `auto` on a cluster, and print and write what follows.

    Args:
        requested: the configuration as the user gave it.
        session: the cluster.
        resumption: the checkpoint that the run continues from, if any.
    """
    shape = ClusterShape.of(session)
    facts = facts_on(requested, shape, checkpoint=resumption.path)
    config = with_paces(resolve(requested, facts), resumption.checkpoint)
    on_gpus = shape.gpus > 0
    resumption.settle(config)
    resumption.report_other_device(on_gpus=on_gpus)
    write_config(config, requested.run.resume)

    _show_plan(config, resolutions(requested, facts), on_gpus=on_gpus)
    return config


PLAN = "plan.txt"
"""File in run.dir with what each `auto` became and the predicted memory."""


def _show_plan(
    config: Config, resolved: Sequence[Resolution], *, on_gpus: bool
) -> None:
    """Print in two lines what was resolved and predicted, and write all of it."""
    memory = memory_plan(config, on_gpus=on_gpus)
    tables = [auto_table(resolved)] if resolved else []
    path = Path(config.run.dir) / PLAN
    path.write_text(text_of(*tables, memory_table(memory)), "utf-8")

    if resolved:
        print(resolutions_in_words(resolved))
    print(
        f"memory, predicted: {memory_in_words(memory)}; all of this is in"
        f" {shown_path(path)}",
        flush=True,
    )


def with_counted_steps(config: Config, data: Any) -> Config:
    """Return the configuration with the steps that run.total_epochs stands for.

    Args:
        config: the configuration, which may have run.total_steps already.
        data: what the run's task has read.

    Raises:
        ConfigError: The number of steps breaks a rule, or the task does not count its
            examples.
    """
    if config.run.total_steps is not None:
        return config

    num_examples = task_of(config).num_examples(data)
    if num_examples is None:
        rule = f"the task {config.task} does not say how many examples it learns from"
        fix = "Use run.total_steps, or give the task a method num_examples."
        raise ConfigError(
            [Problem("run.total_epochs", config.run.total_epochs, rule, fix)]
        )

    resolution = resolution_of_steps(config, num_examples)
    assert resolution is not None, "the rules ask for a number of steps or of epochs"
    print(f"{resolution.key} = {resolution.value}: {resolution.because}", flush=True)

    # The rules that compare the number of steps could not do so before.
    counted = with_total_steps(config, num_examples)
    problems = rule_violations(counted)
    if problems:
        raise ConfigError(problems)
    return counted


def write_config(config: Config, resume: str) -> None:
    """Write the resolved configuration to the folder of the run.

    Args:
        config: the configuration.
        resume: the user's run.resume. It stays as it is, so that a command with this
            file goes on from whatever is the newest checkpoint then.
    """
    run = config.run.model_copy(update={"resume": resume})
    tree = to_tree(config.model_copy(update={"run": run}))
    text = yaml.safe_dump(tree, sort_keys=False)
    path = Path(config.run.dir) / "config.yaml"
    path.write_text(text)
