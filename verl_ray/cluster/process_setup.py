"""Preparation of a worker process for its work: its environment, and its output.

Invariant: environment variables are set before torch is imported, which reads them
once. Once a process keeps its output, all that it and its libraries print is in a log
file of its own, and so are its stacks when it crashes.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import ray

from verl_ray.cluster.messages import RankSpec
from verl_ray.profiling.allocator import trainer_environment

# Torch's flight recorder remembers this many collectives, which `host.py` reads.
# More than a rank has under way are of no use there.
_REMEMBERED_COLLECTIVES = "256"
_SIZES = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}


def process_environment(
    rank_spec: RankSpec, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Variables that the process of a rank sets for itself.

    Args:
        rank_spec: Identity and settings of the process.
        inherited: Variables that the process was started with.
    """
    variables = thread_environment(rank_spec.threads)
    if rank_spec.process_group and not _SIZES.intersection(inherited):
        variables["TORCH_FR_BUFFER_SIZE"] = _REMEMBERED_COLLECTIVES
    trains_on_gpu = rank_spec.process_group and rank_spec.device != "cpu"
    if trains_on_gpu:
        variables |= trainer_environment(inherited)
    return variables


def thread_environment(threads: int) -> dict[str, str]:
    """Variables of a process that computes with `threads` CPU threads.

    Idle OpenMP threads sleep instead of spinning. The processes of a node take turns on
    its cores, and a spinning thread keeps its core from the process that the others
    wait for. Measured on two busy cores, the update of a small model with two threads
    took 0.10 s and 0.12 s of CPU time; with spinning threads it took 1.1 s and 0.97 s.
    """
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
    }


# ------------------------------------------------------------------------------- output

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
