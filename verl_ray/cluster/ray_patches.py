"""Changes to Ray's own behaviour for which Ray has no settings.

Invariant: signals are the driver's business, and nothing of Ray's is printed on
stdout. The second holds from the import of this module. Deliberately not here: what
signals do (`signals.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import ray
from ray._private import services

from verl_ray.cluster.signals import deferring_signals, heed_signals

_WORKER_ENDED = "A worker died or was killed"


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


def _print_on_stderr(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Print Ray's messages on stderr, as that its memory monitor killed a worker.

    Ray prints them on stdout, in the middle of a command's own output. The message
    about the end of a worker is left out. Where the end was not intended, an error
    names the worker, its call and its output, and at the end of a run all workers end.
    """
    if any(line.startswith(_WORKER_ENDED) for line in data["lines"]):
        return
    _print(data | {"is_err": True}, *args, **kwargs)


_print = ray._private.worker.print_to_stdstream
ray._private.worker.print_to_stdstream = _print_on_stderr
