"""Processes of a benchmark: separate programs, forks of this process, and ranks.

Ranks of a training backend start without a cluster. They compute with the shipped
settings as `auto` is on a CPU, so a suite measures the same settings on every machine.

Invariant: no process outlives the call, and the first that fails ends the others, which
would wait for it. The calling process loads no torch, because its pages would count as
shared with the processes that are measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from scripts.configuration import compose
from verl_ray.cluster.process_setup import thread_environment
from verl_ray.columns.batch import offsets_of
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.schema import Config
from verl_ray.errors import VerlRayError
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.resolve import resolve
from verl_ray.shell import override_of

if TYPE_CHECKING:
    import torch

    from verl_ray.config.roles import SupervisedRole

PATIENCE_S = 500.0
_POLL_S = 0.05
_OUTPUT_S = 30.0
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

# Ranks are processes of one machine.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def run_processes(
    module: str,
    tasks: Sequence[Mapping[str, object]],
    threads: int,
    settings: Mapping[str, str] | None = None,
    *,
    patience_s: float = PATIENCE_S,
) -> list[dict[str, Any]]:
    """Run `python -m module TASK` for all tasks at the same time.

    Args:
        module: The module to run. It reads its task as JSON from its only argument and
            prints its result as JSON on the last line.
        tasks: One task per process.
        threads: OpenMP threads of each process.
        settings: Additional environment variables.
        patience_s: Seconds until processes that are still running are ended.

    Returns:
        The result of each process, in the order of the tasks.

    Raises:
        VerlRayError: A process failed, with its own messages on stderr, or did not end
            in time.
    """
    # Idle threads wait like those of the product's workers.
    environment = {
        **os.environ,
        **thread_environment(threads, os.environ),
        **_LOOPBACK,
        "HF_HUB_OFFLINE": "1",
        **(settings or {}),
    }
    deadline = time.monotonic() + patience_s

    with contextlib.ExitStack() as cleanup:
        processes = []
        for task in tasks:
            command = [sys.executable, "-m", module, json.dumps(task)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
            processes.append(cleanup.enter_context(process))
        for process in processes:
            cleanup.callback(process.kill)

        codes = _exit_codes(processes, deadline)
        if any(code != 0 for code in codes):
            raise VerlRayError(
                f"processes of {module} ended with {codes}; expected 0. None means that"
                f" a process was stopped, after {patience_s:g} s or because another"
                " one failed. Their messages are above. Their tasks:"
                f" {json.dumps(tasks)}"
            )
        last_lines = [_last_line(process) for process in processes]

    return [json.loads(line) for line in last_lines]


def _last_line(process: subprocess.Popen[bytes]) -> bytes:
    """Return the last line of a process that has ended."""
    try:
        return process.communicate(timeout=_OUTPUT_S)[0].splitlines()[-1]
    except subprocess.TimeoutExpired:
        raise VerlRayError(
            f"the output of process {process.pid} has no end, though the process has"
            " ended: a process that it started keeps it open"
        ) from None


def _exit_codes(
    processes: Sequence[subprocess.Popen[bytes]], deadline: float
) -> list[int | None]:
    """Wait until all processes ended, one failed, or the deadline passed.

    Nothing is read meanwhile, because the output of a process fits into a pipe.
    """
    codes = [process.poll() for process in processes]
    while None in codes:
        if any(codes) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
        codes = [process.poll() for process in processes]
    return codes


def fork(run: Callable[..., Any], tasks: Sequence[Sequence[Any]]) -> list[Any]:
    """Call `run(*task)` for all tasks at the same time, each in a fork of this process.

    Modules that this process imported are imported in the forks. This process may not
    have started a thread. Forks end with this process, whose caller limits its time.

    Returns:
        What the calls return, in the order of the tasks.

    Raises:
        VerlRayError: A fork failed; its own messages are on stderr.
    """
    forking = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as cleanup:
        # A file holds a result of any size, which nobody reads meanwhile.
        files = [cleanup.enter_context(tempfile.TemporaryFile()) for _ in tasks]
        forks = []
        for task, file in zip(tasks, files, strict=True):
            process = forking.Process(target=_run_fork, args=(run, task, file))
            process.start()
            cleanup.callback(process.kill)
            forks.append(process)

        running = {process.sentinel for process in forks}
        while running:
            running.difference_update(wait(list(running)))
            codes = [process.exitcode for process in forks]
            if any(codes):
                raise VerlRayError(
                    f"processes ended with {codes}; expected 0. None means that a"
                    f" process was still running. Their tasks: {tasks}"
                )
        for file in files:
            file.seek(0)
        return [pickle.load(file) for file in files]


def _run_fork(run: Callable[..., Any], task: Sequence[Any], result: IO[bytes]) -> None:
    # The fork ends with its parent, however the parent ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pickle.dump(run(*task), result)
    result.flush()


# ---------------------------------------------------------- ranks of a training backend

C = TypeVar("C", bound=Config)


def as_on_a_cpu(config: C) -> C:
    """Return the configuration with the values that `auto` has on a CPU."""
    return resolve(config, facts_here(config, None))


def learner(
    backend: str, model: str, max_tokens: int, overrides: Sequence[str]
) -> SupervisedRole:
    """Return a role of supervised training, with rows of at most `max_tokens`."""
    own = (
        f"backend={backend}",
        override_of("model.path", model),
        f"sft.max_tokens={max_tokens}",
        "run.dir=none",
        "run.evaluate_every=0",
        "data.train_path=none",
        "data.validation_path=null",
    )
    return as_on_a_cpu(compose("sft", (*own, *overrides))).learners["actor"]


@contextlib.contextmanager
def joined(
    rank: int, world: int, rendezvous: str, *, device: str = "cpu", threads: int = 1
) -> Iterator[torch.device]:
    """Join the process group of all ranks; yield the device of this one.

    Args:
        rank: The number of this rank.
        world: The number of ranks.
        rendezvous: A file through which the ranks find each other.
        device: "cpu" or "cuda", with one GPU per rank.
        threads: Threads that compute.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    on_gpu = device == "cuda"
    own_device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(own_device)

    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE_S),
        device_id=own_device if on_gpu else None,
    )
    yield own_device
    dist.destroy_process_group()


def training_rows(
    lengths: Sequence[int] | np.ndarray, vocab_size: int, prompt_tokens: int = 1
) -> TrainingBatch:
    """Return rows of random tokens; what follows their prompts is learned from."""
    offsets = offsets_of(lengths)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = place >= prompt_tokens
    tokens = np.random.default_rng(1).integers(0, vocab_size, len(mask))
    return TrainingBatch(
        offsets=offsets,
        tokens=tokens.astype(np.int32),
        response_mask=mask,
        loss_weight=np.full(len(lengths), 1 / mask.sum(), np.float32),
    )
