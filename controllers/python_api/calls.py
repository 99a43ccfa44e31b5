"""The commands as calls: the same checks, the same work, an exception for an exit.

Invariant: however a call ends, the process is as it was. Deliberately not here: a run
that is stepped by hand (`stepped_run.py`).
"""

from __future__ import annotations

import sys

from controllers.commands.check import check as check_command
from controllers.commands.check import checked_config, print_warnings
from controllers.commands.evaluate import evaluation_of, show_evaluated
from controllers.commands.train import train as train_command
from controllers.python_api.arguments import command_of
from controllers.python_api.foreign_process import in_foreign_process
from controllers.python_api.results import result_of
from controllers.run.best import held_out_metrics
from controllers.run.finished import finished_step, show_finished
from verl_ray.api_types import Measurement, Result, RunRequest
from verl_ray.config.schema import Config
from verl_ray.preflight.machine import parse_machine


def train(request: RunRequest) -> Result:
    """Train as `verl_ray.api.train` says."""
    with in_foreign_process() as process:
        config = checked(request)
        process.run_dir = config.run.dir

        exit_code = 0
        finished = finished_step(config)
        if finished is not None:
            show_finished(config, finished)
        else:
            exit_code = train_command(config)

        result = result_of(config.run.dir, exit_code)
        assert result is not None, "a run that has ended has a record"
        return result


def check(request: RunRequest, machine: str | None = None) -> None:
    """Print what `verl_ray.api.check` says."""
    described = None if machine is None else parse_machine(machine)
    with (
        in_foreign_process(starts=False),
        command_of(request, starts=False) as command,
    ):
        check_command(
            command.config_name,
            command.overrides,
            command.config_dir,
            described=described,
        )


def evaluate(request: RunRequest) -> Measurement:
    """Evaluate as `verl_ray.api.evaluate` says."""
    with in_foreign_process():
        config = checked(request, evaluates=True)
        evaluated = evaluation_of(config)
        show_evaluated(config, evaluated)
        metrics = held_out_metrics(evaluated.evaluation.metrics)
        return Measurement(evaluated.step, metrics, evaluated.folder)


def checked(request: RunRequest, *, evaluates: bool = False) -> Config:
    """Return the configuration of a call, and print the warnings about it.

    Raises:
        ConfigError: All problems together.
    """
    with command_of(request, evaluates=evaluates) as command:
        checked = checked_config(
            command.config_name,
            command.overrides,
            command.config_dir,
            evaluates=evaluates,
            trains=not evaluates,
        )
    print_warnings(checked.warnings, sys.stderr)
    return checked.config
