"""A run that is stepped by hand, open from its first call to `close`.

Invariant: while a method works, signals are borrowed; between two calls the process is
its owner's, apart from the processes of the run. A method that fails has closed the
run. Deliberately not here: the moves of a step (`controllers/run/loop.py`).
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from pathlib import Path

from controllers.python_api.calls import checked
from controllers.python_api.foreign_process import in_foreign_process
from controllers.python_api.results import result_of
from controllers.run.finished import finished_step, show_finished
from controllers.run.loop import Loop
from controllers.run.open_run import OpenRun, open_run
from controllers.watch.measures import Metrics
from verl_ray.api_types import Result, RunRequest
from verl_ray.checkpoint.store import checkpoint_name
from verl_ray.cluster.signals import heed_signals
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Interrupted, Problem


class SteppedRun:
    """The run behind `verl_ray.api.Run`."""

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._config: Config | None = None
        # What ends with the run; None before it is opened, and once it is closed.
        self._resources: contextlib.ExitStack | None = None
        self._run: OpenRun | None = None

    def open(self) -> None:
        """Check the settings and start the processes, unless that was done."""
        if self._config is not None:
            return

        with in_foreign_process() as process:
            config = checked(self._request)
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

    def close(self) -> None:
        """Save the last finished step if a step remains, and end all processes."""
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

    def step(self) -> Metrics:
        """Train for one step."""
        loop = self._loop()
        if loop is None or loop.has_ended:
            rule = "all of its steps are made"
            fix = "Raise it, and open a run with the same run_dir."
            raise ConfigError([Problem("run.total_steps", self.global_step, rule, fix)])
        with self._ending_with_failures():
            return loop.step()

    def evaluate(self) -> Metrics:
        """Measure the model as it is."""
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

    def save(self) -> Path:
        """Write a checkpoint of the last finished step."""
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
        """Whether no step remains."""
        self.open()
        return self._run is None or self._run.loop.has_ended

    @property
    def global_step(self) -> int:
        """Number of finished steps."""
        if self._run is not None:
            return self._run.loop.finished_step
        return 0 if self._config is None else self.result.steps

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        self.open()
        assert self._config is not None
        return Path(self._config.run.dir)

    @property
    def result(self) -> Result:
        """The run as its record shows it."""
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
