"""The restart of worker groups without state, in place, while the run goes on.

Graders are such groups, and a reference that is alone in its processes and on its
devices. A lost one is asked again for what was pending. One that is lost while nobody
waits for it starts again, too.

Invariant: a group that is starting again gets no call, and has no process of before.

Deliberately not here: rollout replicas, which need weights
(`controllers/rollouts/supervisor.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from verl_ray.cluster.calls import Call, check_progress, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.processes import Restart
from verl_ray.cluster.stalls import IdleProcesses
from verl_ray.cluster.waiting import TICK_S, Background
from verl_ray.errors import VerlRayError, WorkerError, worker_error_of
from verl_ray.profiling.phases import PHASES

T = TypeVar("T")

MayRestart = Callable[[VerlRayError, int], bool]
"""Decides about a failure in a step: whether its group starts again in place."""


def never(failure: VerlRayError, step: int) -> bool:
    """Let a failure end the work, as where nobody decides about failures."""
    return False


class InPlaceRestarts:
    """The groups that are starting again in place."""

    def __init__(self, may_restart: MayRestart = never) -> None:
        """Begin with none.

        Args:
            may_restart: Decides about each failure, and records it.
        """
        self._may_restart = may_restart
        self._restarts: dict[WorkerGroup[Any], tuple[Restart, int]] = {}
        """Each with the step in which its group was lost."""
        self._owned: list[WorkerGroup[Any]] = []
        self.num_started = 0
        """How many groups have started again so far."""
        self._idle = IdleProcesses(lambda: filter(self.is_available, self._owned))

    def own(self, groups: Iterable[WorkerGroup[Any]]) -> None:
        """Start these groups again where they are lost, from now on.

        Those that share processes with others are left out, and so are all of them
        where none starts again. Whoever waits has to `check` them.

        Args:
            groups: Groups that need no state.
        """
        if self._may_restart is never:
            return
        for group in groups:
            if not group.shares_processes:
                group.has_owner = True
                self._owned.append(group)

    def call(
        self, group: WorkerGroup[Any], request: Callable[[], Call[T]], step: int
    ) -> RepeatedCall[T]:
        """Make a call, which is made again where its group starts again.

        Args:
            group: The group that is called, owned or not.
            request: Makes the call.
            step: The step that the call is for.
        """
        return RepeatedCall(self, group, request, step)

    def check(self, calls: Iterable[Pending[Any]], step: int) -> None:
        """Start owned groups again that are lost or late; return at once.

        Groups that have started are asked again, and those without a call are looked
        at, too.

        Args:
            calls: Calls that have to make progress, on any groups.
            step: The step that is made.

        Raises:
            VerlRayError: A group is lost or late, and does not start again.
        """
        self.take_started()
        present = [
            call.present() if isinstance(call, RepeatedCall) else call for call in calls
        ]
        try:
            # Of processes that were killed there is nothing more to say.
            check_progress(
                [call for call in present if call is not None and not call.is_stale]
            )
            self._idle.raise_if_lost()
        except WorkerError as error:
            self.begin(error, step)

    def is_available(self, group: WorkerGroup[Any]) -> bool:
        """Return whether a group may be called: it is not starting again."""
        return group not in self._restarts

    def begin(self, error: VerlRayError, step: int) -> None:
        """Kill the owned group that an error is about, and begin to start it again.

        Nothing happens where it is starting already: the error is of the processes
        before. Its pending calls are stale from now on.

        Args:
            error: The failure of a call.
            step: The step that the call was for.

        Raises:
            VerlRayError: `error` itself. It is about none of the groups, or the failure
                is not tried again.
        """
        failure = worker_error_of(error)
        owners = [
            group
            for group in self._owned
            if failure is not None and group.owns(failure)
        ]
        if not owners:
            raise error

        (group,) = owners
        if self.is_available(group):
            self._restart(group, error, step)

    def take_started(self) -> None:
        """Advance all restarts; return at once.

        Raises:
            VerlRayError: A group failed as it started, which is not tried again.
        """
        for group, (restart, step) in list(self._restarts.items()):
            try:
                if restart.poll():
                    del self._restarts[group]
                    self.num_started += 1
            except VerlRayError as error:
                # Nothing of it runs any more.
                del self._restarts[group]
                self._restart(group, error, step)

    def close(self) -> None:
        """Kill the groups that are starting again; the others are stopped elsewhere."""
        for group in self._restarts:
            group.kill()
        self._restarts.clear()

    def _restart(self, group: WorkerGroup[Any], error: VerlRayError, step: int) -> None:
        """Begin to start a group again, or raise the error."""
        if not self._may_restart(error, step):
            raise error
        self._restarts[group] = (group.restart(), step)


class RepeatedCall(Generic[T]):
    """A call that is made again where its group starts again in place."""

    def __init__(
        self,
        restarts: InPlaceRestarts,
        group: WorkerGroup[Any],
        request: Callable[[], Call[T]],
        step: int,
    ) -> None:
        """Make the call, unless its group is starting again. See `InPlaceRestarts`."""
        self._restarts = restarts
        self._group = group
        self._request = request
        self._step = step
        self._call: Call[T] | None = None
        self.present()

    def present(self) -> Call[T] | None:
        """Return the call on the present processes, which is made if it was not yet.

        It is None while they are starting.
        """
        if self._call is not None and self._call.is_stale:
            self._call = None
        if self._call is None and self._restarts.is_available(self._group):
            self._call = self._request()
        return self._call

    def result(
        self,
        watch: Callable[[], None] | None = None,
        background: Background | None = None,
    ) -> T:
        """Wait for the result; `watch` and `background` are as in `wait_all`.

        Raises:
            VerlRayError: The call failed, and its group does not start again; or
                another failure of `watch` or `background`.
        """
        # Each round waits for the call, or a moment for the processes that are
        # starting. It ends with the result, or with a failure that is not tried again.
        while True:
            call = self.present()
            if call is None:
                self._wait_a_moment(watch, background)
                continue
            try:
                (result,) = wait_all([call], watch, background)
                return result
            except VerlRayError as error:
                # The watch or the background may have started the group again.
                if not (call.is_stale and self._is_about_group(error)):
                    self._restarts.begin(error, self._step)

    def _is_about_group(self, error: VerlRayError) -> bool:
        failure = worker_error_of(error)
        return failure is not None and self._group.owns(failure)

    def _wait_a_moment(
        self, watch: Callable[[], None] | None, background: Background | None
    ) -> None:
        """Let the group start, and all else go on."""
        with PHASES.detail(lambda: f"{self._group.role} is starting again"):
            time.sleep(TICK_S / 10)
            # This heeds signals, too.
            self._restarts.take_started()
            if watch is not None:
                watch()
            if background is not None:
                background.advance()


Pending = Call[T] | RepeatedCall[T]
"""A call whose result is waited for."""
