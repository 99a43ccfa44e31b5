"""Watch of an event loop: which code of a user holds it without `await`.

A step is what a task does from one `await` to the next. Nothing else runs on the loop
meanwhile, so a thread of its own looks at steps that take long.
"""

from __future__ import annotations

import asyncio
import json
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from verl_ray.agents import environments
from verl_ray.agents.deadlines import as_exception

METHOD_REMEDY = (
    "Make the method synchronous (def without async), which then runs in a thread, or"
    " await what takes long"
)
AGENT_REMEDY = (
    "Ask by AsyncOpenAI or AsyncAnthropic, await what takes long, or run the agent as a"
    " command"
)
IMPORT_REMEDY = (
    "Import at the top of the file what is imported here, which is before any episode"
)

remedy: ContextVar[str] = ContextVar("remedy", default=METHOD_REMEDY)
"""What to do about code of the current task that holds the event loop."""

LONG_S = 5.0
"""Seconds after which code is named that still holds the event loop. An agent that asks
by a client without async would hold it for good."""

_LOOKS = 4
"""Looks within the time from which on a step is slow."""

_PACKAGE = str(Path(__file__).parents[1])
_ENVIRONMENTS = str(Path(environments.__file__).parent)
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_CALLERS = tuple(
    str(Path(__file__).with_name(name))
    for name in (
        "deadlines.py",
        "episode.py",
        "tools.py",
        "plain_environments.py",
        "threads.py",
        "loop_watch.py",
    )
)
"""Our files that call users' code."""


class CodePlace(NamedTuple):
    """A line of a user's function, and what to do if it holds the event loop."""

    path: str
    line: int
    function: str
    remedy: str

    def __str__(self) -> str:
        """Return it as tracebacks write it."""
        return f"{self.path}, line {self.line}, in {self.function}"


class LoopWatch:
    """Looks at the steps of all tasks that a loop begins from now on."""

    def __init__(
        self,
        slow_s: float,
        when_held: Callable[[CodePlace, float], None],
        *,
        after_step: Callable[[], None] = lambda: None,
        while_held: Callable[[CodePlace], None] = lambda _: None,
        note: Path | None = None,
    ) -> None:
        """Begin to look at the running loop, until the process ends.

        Args:
            slow_s: Seconds from which on a step is slow.
            when_held: Called on the loop after a slow step of a user's code, with the
                line that ran, and the seconds of the step.
            after_step: Called on the loop after each step.
            while_held: Called in another thread with the line that runs, once a step
                has taken `LONG_S`; the step does not end meanwhile.
            note: File with the place while a user's code holds the loop, as
                `place_in_note` reads it; there is none at other times.
        """
        self._slow_s = slow_s
        self._when_held = when_held
        self._after_step = after_step
        self._while_held = while_held
        self._note = note
        self._begun_s: float | None = None
        self._remedy = METHOD_REMEDY
        self._is_named = False
        self._place: CodePlace | None = None
        self._changing = threading.Lock()
        self._loop_thread = threading.get_ident()
        asyncio.get_running_loop().set_task_factory(self._task)
        threading.Thread(target=self._look, name="loop watch", daemon=True).start()

    def _task(
        self, loop: asyncio.AbstractEventLoop, work: Any, **named: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_Watched(work, self), loop=loop, **named)

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._remedy = remedy.get()
        self._begun_s = time.monotonic()

    def end_step(self) -> None:
        """Note that a step has ended, and say whose it was if it was slow."""
        assert self._begun_s is not None
        seconds = time.monotonic() - self._begun_s
        with self._changing:
            place, self._place, self._begun_s = self._place, None, None
            self._is_named = False
            if place is not None and self._note is not None:
                self._note.unlink(missing_ok=True)
        if place is not None:
            self._when_held(place, seconds)
        self._after_step()

    def _look(self) -> None:
        # Ends with the process.
        while True:
            time.sleep(self._slow_s / _LOOKS)
            begun_s, remedy = self._begun_s, self._remedy
            if begun_s is None or time.monotonic() - begun_s < self._slow_s:
                continue
            frame = sys._current_frames().get(self._loop_thread)
            place = None if frame is None else users_place(frame, remedy)
            with self._changing:
                if place is None or self._begun_s != begun_s:
                    continue
                # Nothing is written while the same line goes on.
                if place != self._place:
                    self._write_note(place)
                    self._place = place
                if not self._is_named and time.monotonic() - begun_s >= LONG_S:
                    self._is_named = True
                    self._while_held(place)

    def _write_note(self, place: CodePlace) -> None:
        if self._note is not None:
            # The pool may read it at any time, and sees all of it or none.
            whole = self._note.with_suffix(".new")
            whole.write_text(json.dumps(place._asdict()))
            whole.replace(self._note)


def place_in_note(note: Path) -> CodePlace | None:
    """Return the place that the file of a watch names; None where there is none."""
    try:
        return CodePlace(**json.loads(note.read_text()))
    except FileNotFoundError:
        return None


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are watched."""

    def __init__(self, work: Any, watch: LoopWatch) -> None:
        self._work = work
        self._watch = watch

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._work.throw, *error)

    def _step(self, resume: Callable[..., Any], *arguments: Any) -> Any:
        self._watch.begin_step()
        try:
            return resume(*arguments)
        # A task that raises one of these ends the loop, and all other tasks.
        except (SystemExit, KeyboardInterrupt) as error:
            raise as_exception(error) from error
        finally:
            self._watch.end_step()

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:
        """Return what those ask for who look at the coroutine of a task."""
        return getattr(self._work, name)


def users_place(frame: FrameType, remedy: str = METHOD_REMEDY) -> CodePlace | None:
    """Return the innermost line of a user's code; None if our own code runs.

    Of a library that we call it is the outermost one.

    Args:
        frame: The innermost frame of a thread.
        remedy: What to do about this code.
    """
    library: FrameType | None = None
    each: FrameType | None = frame
    while each is not None:
        path = each.f_code.co_filename
        if path.startswith("<frozen importlib") or each.f_code.co_name == "<module>":
            remedy = IMPORT_REMEDY
        is_ours = path.startswith(_PACKAGE) and not path.startswith(_ENVIRONMENTS)
        if is_ours:
            if library is None or not path.startswith(_CALLERS):
                return None
            return _place(library, remedy)
        if not path.startswith((*_LIBRARIES, "<frozen")):
            return _place(each, remedy)
        library = each
        each = each.f_back
    return None


def _place(frame: FrameType, remedy: str) -> CodePlace:
    code = frame.f_code
    return CodePlace(code.co_filename, frame.f_lineno, code.co_qualname, remedy)
