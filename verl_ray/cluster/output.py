"""The output of a worker process, which goes to a log file of its own.

Invariant: once a process keeps its output, all that it and its libraries print is in
the log, and so are its stacks when it crashes. Deliberately not here: metrics and
samples (`verl_ray/tracking`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import ray

from verl_ray.cluster.messages import RankSpec

STACKS_SIGNAL = signal.SIGUSR2
"""Signal that makes a process write all stacks to its log.

Its handler also runs while a thread holds the interpreter lock.
"""

_TAIL_BYTES = 4096
_STDOUT = 1
_STDERR = 2


def keep_output(rank_spec: RankSpec) -> Path:
    """Send this process's output to a log file and return the file's path.

    The file is in the run's folder, or in Ray's folder of logs where the run's folder
    cannot be written.
    """
    log_dir = Path(rank_spec.log_dir)
    name = _log_name(rank_spec)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        path = log_dir / name
        log = path.open("ab", buffering=0)
    except OSError as error:
        ray_logs = ray._private.worker.global_worker.node.get_logs_dir_path()
        path = Path(ray_logs) / f"verl_ray-{os.getpid()}-{name}"
        print(f"{log_dir} cannot be written here ({error}); output is kept in {path}")
        log = path.open("ab", buffering=0)

    # Libraries in C write to the descriptors, so these are redirected and not only
    # Python's streams.
    for stream, descriptor in ((sys.stdout, _STDOUT), (sys.stderr, _STDERR)):
        stream.flush()
        os.dup2(log.fileno(), descriptor)
    log.close()

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=_STDERR)
    faulthandler.register(STACKS_SIGNAL, file=_STDERR)
    return path


def _log_name(rank_spec: RankSpec) -> str:
    # A name without blanks needs no quotes.
    name = f"{rank_spec.processes}-{rank_spec.rank}".replace(" ", "_")
    # A restarted process must not append to the log of the one before it.
    if rank_spec.incarnation > 1:
        name += f".{rank_spec.incarnation}"
    return f"{name}.log"


def tail(path: str | Path, size: int = _TAIL_BYTES) -> str:
    """The last lines of a file, at most `size` bytes; empty if there is no file."""
    try:
        with Path(path).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""

    if end <= size:
        return text
    # The first line is cut off in the middle.
    return text.partition("\n")[2]
