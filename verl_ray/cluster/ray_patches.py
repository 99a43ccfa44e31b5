"""Changes to Ray's own behaviour for which Ray has no settings.

Invariant: signals are the driver's business, and nothing of Ray's is printed on
stdout. The second holds from the import of this module. While Ray's messages are kept
in a file, nothing of Ray's is printed on stderr either. Deliberately not here: what
signals do (`signals.py`), and the output of worker processes (`output.py`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray._private import services

from verl_ray.cluster.signals import deferring_signals, heed_signals

_WORKER_ENDED = "A worker died or was killed"
_LOG_NAME = "ray.log"
_LOG_FORMAT = "%(asctime)s %(levelname)s %(filename)s:%(lineno)s: %(message)s"


@contextlib.contextmanager
def leaving_signals_to_driver() -> Iterator[None]:
    """Keep Ray from handling signals while it starts within the block.

    Ray sets no signal handler: its own for SIGTERM waits 60 s for a node to drain. The
    processes that Ray starts lead sessions of their own: a signal to the driver's
    process group (`timeout`, Slurm, Ctrl-C in a terminal) would otherwise end the
    cluster together with the driver, which still needs it to stop in order.

    A signal that arrives meanwhile is heeded at the end of the block. Ray would log its
    exception in the middle of the start, or lose it.
    """
    popen = services.ConsolePopen
    set_handler = ray._private.utils.set_sigterm_handler

    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    ray._private.utils.set_sigterm_handler = lambda handler: None
    try:
        with deferring_signals():
            yield
        heed_signals()
    finally:
        services.ConsolePopen = popen
        ray._private.utils.set_sigterm_handler = set_handler


class _Messages:
    """Where Ray's messages to the driver go: to a file, or to stderr without one."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._handler: logging.Handler | None = None
        self._replaced: list[logging.Handler] = []

    def keep_in(self, folder: Path) -> None:
        """Keep all messages in a file of this folder from now on."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _LOG_NAME

        # Python's side of Ray has a logger whose handler prints on stderr. The file is
        # made by the first message.
        self._handler = logging.FileHandler(self._path, delay=True)
        self._handler.setFormatter(logging.Formatter(_LOG_FORMAT))
        self._replaced = _RAY_LOGGER.handlers[:]
        _RAY_LOGGER.handlers[:] = [self._handler]

    def release(self) -> None:
        """Close the file; later messages go to stderr."""
        if self._handler is None:
            return
        _RAY_LOGGER.handlers[:] = self._replaced
        self._handler.close()
        self._handler = None
        self._path = None

    def show(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Handle messages of Ray's processes, as that its memory monitor killed one.

        Ray prints them on stdout, in the middle of a command's own output. They say
        that each worker which was killed died unexpectedly. Without a file this remark
        is left out: where the end was not intended, an error names the worker, its
        call and its output.
        """
        path = self._path
        if path is not None:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            lines = [f"{now} ({data['pid']}) {line}\n" for line in data["lines"]]
            # Where the disk is full, the run has worse to tell.
            with contextlib.suppress(OSError), path.open("a") as file:
                file.writelines(lines)
        elif not any(line.startswith(_WORKER_ENDED) for line in data["lines"]):
            _print(data | {"is_err": True}, *args, **kwargs)


_RAY_LOGGER = logging.getLogger("ray")
_print = ray._private.worker.print_to_stdstream
ray_messages = _Messages()
"""Ray's messages to this process, which has at most one session at a time."""
ray._private.worker.print_to_stdstream = ray_messages.show
