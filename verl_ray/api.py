"""The commands of `verl-ray` as Python functions, and a run that is stepped by hand.

    import verl_ray

    def length(response, answer, *, prompt, data_source, extra):
        return -abs(len(response) - 20)

    result = verl_ray.train("grpo", model="models/qwen", data=rows, reward=length)
    print(result.final)

Invariant: a call composes, checks, runs and records exactly as the command of the same
name. It needs nothing but the main process, and leaves it as it was: no process of
Ray's, no signal handler, no changed environment. The work is in
`controllers/python_api`, which is imported when a function is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from verl_ray.api_types import (
    Data,
    Measurement,
    Metrics,
    Overrides,
    Result,
    Reward,
    RunRequest,
    Stopped,
)
from verl_ray.errors import VerlRayError

if TYPE_CHECKING:
    from controllers.python_api.stepped_run import SteppedRun

P = ParamSpec("P")
T = TypeVar("T")


def _without_internals(call: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose errors show no way through this program."""

    @functools.wraps(call)
    def shortened(*arguments: P.args, **settings: P.kwargs) -> T:
        try:
            return call(*arguments, **settings)
        except (VerlRayError, Stopped) as error:
            raise error.with_traceback(None) from None

    return shortened


@_without_internals
def train(
    config_name: str,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    validation_data: Data | None = None,
    reward: Reward | None = None,
    name: str | None = None,
    run_dir: str | Path | None = None,
    overrides: Overrides | None = None,
    config_dir: str | Path | None = None,
) -> Result:
    """Train a model, as `verl-ray train` does, and return the finished run.

    A call with the `run_dir` of an earlier one goes on from its newest checkpoint. The
    first Ctrl-C finishes the step if its update has begun, and saves; a second one
    gives up at once.

    Args:
        config_name: A root config: `grpo`, `ppo`, `sft`, `reward_model`, `quickstart`,
            or the path of a YAML file.
        model: model.path.
        data: data.train_path, or the rows themselves.
        validation_data: data.validation_path, or the rows themselves.
        reward: What scores a response: see `Reward`. Functions of a notebook, lambdas
            and closures work too.
        name: run.name, which the run's folder is named by.
        run_dir: run.dir, the run's folder; by default outputs/NAME.
        overrides: Further settings, such as `{"run.total_steps": 20, "actor":
            {"optimizer": {"lr": 1e-6}}, "backend": "fsdp"}`.
        config_dir: A folder with YAML files of your own.

    Raises:
        ConfigError: The settings, the data or the reward cannot work. Nothing was
            started.
        VerlRayError: The run failed; what it had saved is there.
        Stopped: The run was interrupted.
    """
    from controllers.python_api.calls import train

    request = RunRequest(
        config_name,
        model,
        data,
        validation_data,
        reward,
        name,
        run_dir,
        overrides,
        config_dir,
    )
    return train(request)


@_without_internals
def check(
    config_name: str,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    validation_data: Data | None = None,
    reward: Reward | None = None,
    name: str | None = None,
    run_dir: str | Path | None = None,
    overrides: Overrides | None = None,
    config_dir: str | Path | None = None,
    machine: str | None = None,
) -> None:
    """Print what a run would need and do, as `verl-ray check`; start nothing.

    The other arguments are those of `train`.

    Args:
        machine: Another machine to check for, such as `nodes=2,gpus=8,gpu=H100-80G`;
            this one if it is None.

    Raises:
        ConfigError: All problems together.
    """
    from controllers.python_api.calls import check

    request = RunRequest(
        config_name,
        model,
        data,
        validation_data,
        reward,
        name,
        run_dir,
        overrides,
        config_dir,
    )
    check(request, machine)


@_without_internals
def evaluate(
    config_name: str,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    validation_data: Data | None = None,
    reward: Reward | None = None,
    name: str | None = None,
    run_dir: str | Path | None = None,
    overrides: Overrides | None = None,
    config_dir: str | Path | None = None,
) -> Measurement:
    """Measure a model, or the checkpoint of run.resume, as `verl-ray evaluate` does.

    The arguments are those of `train`; an evaluation needs no `data`.

    Raises:
        ConfigError: The settings, the data or the reward cannot work.
        VerlRayError: The evaluation failed.
        Stopped: The evaluation was interrupted.
    """
    from controllers.python_api.calls import evaluate

    request = RunRequest(
        config_name,
        model,
        data,
        validation_data,
        reward,
        name,
        run_dir,
        overrides,
        config_dir,
    )
    return evaluate(request)


class Run:
    """A training run that is stepped by hand.

        with verl_ray.Run("sft", model=model, data=rows) as run:
            metrics = run.step()
            run.save()
            for metrics in run:
                print(run.global_step, metrics["train/loss"])

    Every step is the same, and is recorded the same, as in `train`: evaluations and
    checkpoints come when they are due. A run that is closed before its last step is
    saved, and goes on with the same `run_dir`. Without `with`, the first step opens the
    run, and `close` or the end of the process closes it. An error or an interrupt in a
    step ends the run.
    """

    def __init__(
        self,
        config_name: str,
        *,
        model: str | Path | None = None,
        data: Data | None = None,
        validation_data: Data | None = None,
        reward: Reward | None = None,
        name: str | None = None,
        run_dir: str | Path | None = None,
        overrides: Overrides | None = None,
        config_dir: str | Path | None = None,
    ) -> None:
        """Describe the run by the arguments of `train`; nothing is started yet."""
        from controllers.python_api.stepped_run import SteppedRun

        request = RunRequest(
            config_name,
            model,
            data,
            validation_data,
            reward,
            name,
            run_dir,
            overrides,
            config_dir,
        )
        self._run: SteppedRun = SteppedRun(request)

    @_without_internals
    def open(self) -> None:
        """Check the settings and start the processes, unless that was done.

        Raises:
            VerlRayError: As `train`.
            Stopped: The start was interrupted.
        """
        self._run.open()

    @_without_internals
    def close(self) -> None:
        """Save the last finished step, and end all processes."""
        self._run.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @_without_internals
    def step(self) -> Metrics:
        """Train for one step, and return its metrics.

        An evaluation and a checkpoint are part of it where they are due.

        Raises:
            ConfigError: All steps (run.total_steps) are made.
            VerlRayError: The step failed. The run is closed.
            Stopped: The step was interrupted. The run is saved and closed.
        """
        return self._run.step()

    def __iter__(self) -> Iterator[Metrics]:
        """Make all remaining steps, and yield the metrics of each."""
        while not self.has_ended:
            yield self.step()

    @_without_internals
    def evaluate(self) -> Metrics:
        """Measure the model as it is, and return the held-out metrics.

        They are not recorded. Needs validation data, and run.evaluate_every > 0.
        """
        return self._run.evaluate()

    @_without_internals
    def save(self) -> Path:
        """Write a checkpoint of the last finished step, and return its folder."""
        return self._run.save()

    @property
    def global_step(self) -> int:
        """Number of finished steps, those before a resume included."""
        return self._run.global_step

    @property
    def has_ended(self) -> bool:
        """Whether no step remains. Opens the run."""
        return self._run.has_ended

    @property
    def folder(self) -> Path:
        """The run's folder. Opens the run."""
        return self._run.folder

    @property
    def result(self) -> Result:
        """The run as its record shows it so far."""
        return self._run.result
