"""Small workers for the tests of the cluster layer; a module of its own so that worker
processes can import it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from tests.waiting import PATIENCE_S
from verl_ray.checkpoint.manifest import FileRecord, file_record
from verl_ray.cluster.calls import Call
from verl_ray.cluster.context import (
    CONTROL,
    WorkerContext,
    concurrent,
    steering,
    when_abandoned,
)
from verl_ray.cluster.placement import ProcessSet
from verl_ray.columns.batch import offsets_of
from verl_ray.columns.packing import Topology
from verl_ray.columns.stages import LogProbs, Rows
from verl_ray.errors import CheckpointError, VerlRayError
from verl_ray.profiling.progress import reach

if TYPE_CHECKING:  # its workers need none
    from verl_ray.cluster.group import WorkerGroup


def rows_of(lengths: list[int]) -> Rows:
    """Rows of the given lengths; token t of row r is 1000 r + t."""
    offsets = offsets_of(lengths)
    tokens = np.concatenate(
        [1000 * r + np.arange(n) for r, n in enumerate(lengths)] or [np.empty(0)]
    ).astype(np.int32)
    return Rows(
        offsets=offsets, tokens=tokens, response_mask=np.ones(len(tokens), np.bool_)
    )


def processes(
    name: str,
    ranks: int,
    process_group: bool = False,
    bundle_group: str = "",
    cpus: float = 0.5,
) -> ProcessSet:
    return ProcessSet(name, ranks, cpus, 0, bundle_group or name, 1, process_group)


def hasten(call: Call[Any], stall_s: float) -> None:
    """Let a call be late soon that is known to make no progress any more.

    With so short a limit from the beginning, one might be late before it has begun.
    """
    call._rank_calls = tuple(
        replace(rank_call, stall_s=stall_s) for rank_call in call._rank_calls
    )


def answers(group: WorkerGroup[Any], method: str) -> list[Any]:
    """Results of a method of the control group, by rank."""
    controls = [getattr(member.actor, method) for member in group.members()]
    requests = [
        control.options(concurrency_group=CONTROL).remote() for control in controls
    ]
    return ray.get(requests, timeout=PATIENCE_S)


class Echo:
    """Returns what it was given."""

    def __init__(self, context: WorkerContext, *args: object) -> None:
        self.context, self.args = context, args
        self.calls: list[int] = []
        self.aborted = False
        self.gate = threading.Event()
        print(f"echo {context.rank} is here")

    def context_of(self) -> WorkerContext:
        return self.context

    def halve(self, rows: Rows) -> LogProbs:
        return LogProbs(
            offsets=rows.offsets, log_probs=rows.tokens.astype(np.float32) / 2
        )

    def sum_with(self, rows: Rows, other: LogProbs, factor: int) -> LogProbs:
        assert np.array_equal(rows.offsets, other.offsets)
        return LogProbs(
            offsets=rows.offsets,
            log_probs=rows.tokens.astype(np.float32) + factor * other.log_probs,
        )

    def make_long(self, rows: Rows) -> Rows:
        return rows_of([1_000_000] * rows.num_rows)

    def first_tokens(self, rows: Rows) -> list[int]:
        return rows.tokens[rows.offsets[:-1]].tolist()

    def count(self, rows: Rows) -> int:
        assert not rows.tokens.flags.writeable
        return rows.num_tokens

    def remember(self, number: int) -> None:
        self.calls.append(number)

    def remembered(self) -> list[int]:
        return self.calls

    def one_by_one(self, rows: Rows, pause_s: float) -> Iterator[LogProbs]:
        for index in range(rows.num_rows):
            time.sleep(pause_s * (self.context.rank + 1))
            yield self.halve(rows.select([index]))

    def one_then_fail(self, rows: Rows) -> Iterator[LogProbs]:
        yield self.halve(rows.select([0]))
        raise ValueError("no more rows")

    def one_then_die(self, rows: Rows) -> Iterator[LogProbs]:
        yield self.halve(rows.select([0]))
        self.gate.wait(20)  # until what was yielded has arrived
        os.kill(os.getpid(), signal.SIGKILL)

    @concurrent
    def wait_at_the_gate(self) -> bool:
        return self.gate.wait(PATIENCE_S)

    @concurrent
    def number_at_the_gate(self, rows: Rows) -> Iterator[LogProbs]:
        when_abandoned(self.gate.set)
        yield self.halve(rows)
        self.gate.wait(20)
        yield self.halve(rows)

    @steering
    def open_the_gate(self) -> None:
        self.gate.set()

    def abort(self) -> None:
        self.aborted = True

    def was_aborted(self) -> bool:
        return self.aborted

    def threads(self) -> tuple[int, str]:
        import torch

        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    def import_torch(self) -> None:
        import torch  # noqa: F401

    def pid(self) -> int:
        return os.getpid()

    def fail(self, rank: int) -> None:
        print(f"about to fail, says rank {self.context.rank}")
        if self.context.rank == rank:
            raise ValueError("the reason")

    def refuse(self, rank: int, error: VerlRayError) -> None:
        if self.context.rank == rank:
            raise error

    def fail_without_a_disk(self, error: Exception) -> None:
        # Like a full disk, this prevents that a file grows.
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        with contextlib.suppress(OSError):
            sys.stdout.write("this stays in memory")
        raise error

    def one_then_refuse(self, rows: Rows, error: VerlRayError) -> Iterator[LogProbs]:
        yield self.halve(rows.select([0]))
        raise error

    def die(self, rank: int) -> None:
        print(f"final output of rank {self.context.rank}")
        if self.context.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def sleep_for_long(self, rank: int) -> None:
        if self.context.rank == rank:
            time.sleep(60)

    def nap(self) -> None:
        time.sleep(3)

    def plod(self, steps: int) -> int:
        for done in range(steps):
            time.sleep(0.1)
            reach(done + 1, steps, "micro-batches")
        return steps

    def stick(self, after: int) -> None:
        for done in range(after):
            reach(done + 1, 16, "micro-batches")
        time.sleep(60)

    def hold_the_lock(self) -> None:
        ctypes.PyDLL(None).usleep(60_000_000)  # PyDLL keeps the interpreter lock

    def stop_itself(self) -> None:
        # A signal for the process is taken by its first thread, and this one would run
        # on until then.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def unpicklable(self) -> object:
        return (x for x in range(3))

    def close(self) -> None:
        if self.args:
            (
                Path(str(self.args[0]))
                / f"closed-{self.context.role}-{self.context.rank}"
            ).touch()


class Reducer:
    """Meets its peers in torch.distributed."""

    def __init__(self, context: WorkerContext) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.context = context
        self.groups = [
            dist.group.WORLD,
            dist.new_group(),
            init_device_mesh("cpu", (2, 1)).get_group(0),
        ]

    def timeouts_s(self) -> list[float]:
        import torch

        return [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in self.groups
        ]

    def total(self, number: float) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor([number * (self.context.rank + 1)])
        dist.all_reduce(value)
        return float(value)

    def total_but_one_dies(self) -> float:
        if self.context.rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.total(1.0)

    def total_but_one_is_stuck(self) -> float:
        if self.context.rank == 1:
            time.sleep(60)
        return self.total(1.0)

    def interface(self) -> str:
        return os.environ["GLOO_SOCKET_IFNAME"]


class Paired(Echo):
    """Ranks 2k and 2k+1 are peers with the same rows; the odd one returns results."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.topology = Topology(
            context.rank // 2, context.num_ranks // 2, context.rank % 2 == 1
        )


class Unbuildable:
    """Fails on rank 1."""

    def __init__(self, context: WorkerContext, error: Exception) -> None:
        if context.rank == 1:
            raise error


class Builds:
    """Records the build of the slow worker, which must precede that of the others."""

    def __init__(self, context: WorkerContext, folder: Path, *, slow: bool) -> None:
        if slow:
            time.sleep(1)
            (folder / "built").touch()
        else:
            assert (folder / "built").exists()


class NeverReady:
    """Takes longer to build than anybody waits."""

    def __init__(self, context: WorkerContext) -> None:
        time.sleep(60)


class HangsAgain(Echo):
    """Starts once, and hangs when it is started again."""

    def __init__(self, context: WorkerContext, *args: object) -> None:
        super().__init__(context, *args)
        if context.incarnation > 1:
            time.sleep(3600)


class Writer(Echo):
    """Writes its part of a checkpoint, at once or behind."""

    def save(self, path: str) -> dict[str, FileRecord]:
        try:
            Path(path).mkdir()
            (Path(path) / "shard").write_bytes(bytes(100))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written") from error
        return {"shard": file_record(Path(path) / "shard")}

    def begin_save(self, path: str) -> None:
        self.path = path

    def finish_save(self) -> dict[str, FileRecord]:
        return self.save(self.path)


class SlowWriter(Echo):
    """Writes its part of a checkpoint in the background, once a file exists."""

    def begin_save(self, path: str) -> None:
        step = Path(path).parent.name.removesuffix(".partial")
        self.gate_file = Path(str(self.args[0])) / step
        self.target = Path(path)

    @concurrent
    def finish_save(self) -> dict[str, FileRecord]:
        while not self.gate_file.exists():
            time.sleep(0.01)
        self.target.mkdir()
        (self.target / "shard").write_bytes(bytes(100))
        return {"shard": file_record(self.target / "shard")}

    def load(self, path: str) -> list[str]:
        assert (Path(path) / "shard").stat().st_size == 100
        return []
