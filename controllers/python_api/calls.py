"""The commands of `verl-ray` as Python functions, and a run that is stepped by hand.

    import verl_ray

    def length(response, answer, *, prompt, data_source, extra):
        return -abs(len(response) - 20)

    result = verl_ray.train("grpo", model="models/qwen", data=rows, reward=length)
    print(result.final)

Invariant: a call composes, checks, runs and records exactly as the command of the same
name. It needs nothing but the main process, and leaves it as it was: no process of
Ray's, no signal handler, no changed environment. Between two calls of a run that is
stepped by hand, only the processes of the run remain. What does the work is imported
when it is called: a file that names a call, or a type of an argument or result, may
also be imported for its rewards.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar

from controllers.python_api.contract import (
    CheckRequest,
    Measurement,
    Metrics,
    Result,
    RunRequest,
    Stopped,
)
from verl_ray.errors import ConfigError, Interrupted, Problem, VerlRayError

if TYPE_CHECKING:
    from controllers.run.loop import Loop
    from controllers.run.open_run import OpenRun
    from verl_ray.config.schema import Config

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=RunRequest)
S = TypeVar("S")


def _without_internals(call: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose errors show no way through this program."""

    @functools.wraps(call)
    def shortened(*arguments: P.args, **settings: P.kwargs) -> T:
        try:
            return call(*arguments, **settings)
        except (VerlRayError, Stopped) as error:
            raise error.with_traceback(None) from None

    return shortened


def _called_with(
    request: Callable[P, R],
) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """Let a function of a request be called with the arguments of one."""

    def decorate(function: Callable[[R], T]) -> Callable[P, T]:
        signature = inspect.signature(request)

        @_without_internals
        @functools.wraps(function)
        def call(*arguments: P.args, **settings: P.kwargs) -> T:
            _require_fit(function.__name__, signature, arguments, settings)
            return function(request(*arguments, **settings))

        returned = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            return_annotation=returned
        )
        return call

    return decorate


def _begun_with(
    request: Callable[P, R],
) -> Callable[[Callable[[S, R], None]], Callable[Concatenate[S, P], None]]:
    """Let an object of a request be made with the arguments of one."""

    def decorate(begin: Callable[[S, R], None]) -> Callable[Concatenate[S, P], None]:
        signature = inspect.signature(request)

        @functools.wraps(begin)
        def call(this: S, /, *arguments: P.args, **settings: P.kwargs) -> None:
            _require_fit(type(this).__name__, signature, arguments, settings)
            begin(this, request(*arguments, **settings))

        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[itself, *signature.parameters.values()]
        )
        return call

    return decorate


def _require_fit(
    name: str,
    signature: inspect.Signature,
    arguments: tuple[object, ...],
    settings: dict[str, object],
) -> None:
    """Raise TypeError, in the name of a call, where it does not take the arguments."""
    try:
        signature.bind(*arguments, **settings)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None


@_called_with(RunRequest)
def train(request: RunRequest) -> Result:
    """Train a model, as `verl-ray train` does, and return the finished run.

    A call with the `run_dir` of an earlier one goes on from its newest checkpoint. The
    first Ctrl-C finishes the step if its update has begun, and saves; a second one
    gives up at once.

    Args:
        config_name: A root config: `grpo`, `ppo`, `sft`, `reward_model`, `dpo`,
            `quickstart`, or the path of a YAML file.
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
    from controllers.commands.train import train as train_command
    from controllers.python_api.foreign_process import in_foreign_process, result_of
    from controllers.run.finished import finished_step, show_finished

    with in_foreign_process() as process:
        config = _checked(request)
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


@_called_with(CheckRequest)
def check(request: CheckRequest) -> None:
    """Print what a run would need and do, as `verl-ray check`; start nothing.

    The other arguments are those of `train`.

    Args:
        machine: Another machine to check for, such as `nodes=2,gpus=8,gpu=H100-80G`;
            this one if it is None.

    Raises:
        ConfigError: All problems together.
    """
    from controllers.commands.check import check as check_command
    from controllers.python_api.arguments import command_of
    from controllers.python_api.foreign_process import in_foreign_process
    from verl_ray.preflight.machine import parse_machine

    machine = request.machine
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


@_called_with(RunRequest)
def evaluate(request: RunRequest) -> Measurement:
    """Measure a model, or the checkpoint of run.resume, as `verl-ray evaluate` does.

    The arguments are those of `train`; an evaluation needs no `data`.

    Raises:
        ConfigError: The settings, the data or the reward cannot work.
        VerlRayError: The evaluation failed.
        Stopped: The evaluation was interrupted.
    """
    from controllers.commands.evaluate import evaluation_of, show_evaluated
    from controllers.python_api.foreign_process import in_foreign_process
    from controllers.run.best import held_out_metrics

    with in_foreign_process():
        config = _checked(request, evaluates=True)
        evaluated = evaluation_of(config)
        show_evaluated(config, evaluated)
        metrics = held_out_metrics(evaluated.evaluation.metrics)
        return Measurement(evaluated.step, metrics, evaluated.folder)


def _checked(request: RunRequest, *, evaluates: bool = False) -> Config:
    """Return the configuration of a call, and print the warnings about it.

    Raises:
        ConfigError: All problems together.
    """
    from controllers.commands.check import checked_config, print_warnings
    from controllers.python_api.arguments import command_of

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

    @_begun_with(RunRequest)
    def __init__(self, request: RunRequest) -> None:
        """Describe the run by the arguments of `train`; nothing is started yet."""
        self._request = request
        self._config: Config | None = None
        # What ends with the run; None before it is opened, and once it is closed.
        self._resources: contextlib.ExitStack | None = None
        self._run: OpenRun | None = None

    @_without_internals
    def open(self) -> None:
        """Check the settings and start the processes, unless that was done.

        Raises:
            VerlRayError: As `train`.
            Stopped: The start was interrupted.
        """
        from controllers.python_api.foreign_process import in_foreign_process
        from controllers.run.finished import finished_step, show_finished
        from controllers.run.open_run import open_run
        from verl_ray.cluster.signals import heed_signals

        if self._config is not None:
            return

        with in_foreign_process() as process:
            config = _checked(self._request)
            process.run_dir = config.run.dir

            finished = finished_step(config)
            run = None
            with contextlib.ExitStack() as resources:
                if finished is not None:
                    show_finished(config, finished)
                else:
                    run = resources.enter_context(open_run(config))
                if run is not None:
                    run.loop.begin()
                    heed_signals()
                # A run that fails to open can be opened again.
                self._resources = resources.pop_all()
            self._run = run
            self._config = config
            # A process that ends without `close` leaves nothing behind.
            atexit.register(self.close)

    @_without_internals
    def close(self) -> None:
        """Save the last finished step, and end all processes."""
        from controllers.python_api.foreign_process import in_foreign_process

        resources = self._resources
        if resources is None:
            return

        atexit.unregister(self.close)
        run = self._run
        with in_foreign_process(starts=False) as process:
            process.run_dir = str(self.folder)
            self._resources = None
            if run is None or run.loop.has_ended:
                resources.close()
                return

            early = Interrupted("closed before its last step")
            try:
                run.loop.leave()
            finally:
                _end(resources, early)

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
        loop = self._loop()
        if loop is None or loop.has_ended:
            rule = "all of its steps are made"
            fix = "Raise it, and open a run with the same run_dir."
            raise ConfigError([Problem("run.total_steps", self.global_step, rule, fix)])
        with self._ending_with_failures():
            return loop.step()

    def __iter__(self) -> Iterator[Metrics]:
        """Make all remaining steps, and yield the metrics of each."""
        while not self.has_ended:
            yield self.step()

    @_without_internals
    def evaluate(self) -> Metrics:
        """Measure the model as it is, and return the held-out metrics.

        They are not recorded. Needs validation data, and run.evaluate_every > 0.
        """
        loop = self._loop()
        if loop is None:
            return self.result.final

        assert self._config is not None
        if not self._config.run.evaluate_every:
            rule = "without evaluations no held-out data are read"
            fix = "Set it above 0, such as to the number of all steps."
            raise ConfigError([Problem("run.evaluate_every", 0, rule, fix)])
        with self._ending_with_failures():
            return loop.evaluate()

    @_without_internals
    def save(self) -> Path:
        """Write a checkpoint of the last finished step, and return its folder."""
        from verl_ray.checkpoint.store import checkpoint_name

        loop = self._loop()
        step = self.global_step
        if step == 0:
            rule = "no step is finished, so there is nothing to save"
            raise ConfigError([Problem("global_step", 0, rule, "Make a step first.")])

        if loop is not None:
            with self._ending_with_failures():
                loop.save()
        return self.folder / "checkpoints" / checkpoint_name(step)

    @property
    def has_ended(self) -> bool:
        """Whether no step remains. Opens the run."""
        self.open()
        return self._run is None or self._run.loop.has_ended

    @property
    def global_step(self) -> int:
        """Number of finished steps, those before a resume included."""
        if self._run is not None:
            return self._run.loop.finished_step
        return 0 if self._config is None else self.result.steps

    @property
    def folder(self) -> Path:
        """The run's folder. Opens the run."""
        self.open()
        assert self._config is not None
        return Path(self._config.run.dir)

    @property
    def result(self) -> Result:
        """The run as its record shows it so far."""
        from controllers.python_api.foreign_process import result_of

        exit_code = 0 if self._run is None else self._run.exit_code
        result = result_of(str(self.folder), exit_code)
        assert result is not None, "a run that was opened has a record"
        return result

    def _loop(self) -> Loop | None:
        """Return the loop of the open run; None for one that was finished before."""
        self.open()
        if self._resources is None:
            rule = "this run is closed"
            fix = "Make another verl_ray.Run with this run_dir; it goes on from there."
            raise ConfigError([Problem("run.dir", str(self.folder), rule, fix)])
        return None if self._run is None else self._run.loop

    @contextlib.contextmanager
    def _ending_with_failures(self) -> Iterator[None]:
        """Close the run where the block fails or is interrupted."""
        from controllers.python_api.foreign_process import in_foreign_process
        from verl_ray.cluster.signals import heed_signals

        with in_foreign_process(starts=False) as process:
            process.run_dir = str(self.folder)
            try:
                yield
                heed_signals()
            except BaseException as failure:
                resources, self._resources = self._resources, None
                atexit.unregister(self.close)
                assert resources is not None
                _end(resources, failure)
                raise


def _end(resources: contextlib.ExitStack, failure: BaseException) -> None:
    """End a run because of a failure, which its parts raise again."""
    with contextlib.suppress(type(failure)):
        resources.__exit__(type(failure), failure, failure.__traceback__)
