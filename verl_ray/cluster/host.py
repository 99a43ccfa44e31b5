"""One worker process: hosts the workers of one or several roles that share it.

Invariant: calls run one at a time, in the order they were sent, on the collective lane; calls of methods marked
`concurrent` or `steering` run beside them and beside each other; the control lane has a thread of its own and answers
while the others are busy or stuck. A call that raises returns a `Failure`; it never ends the process. Deliberately not
here: what a worker does, and who calls it (`group.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray

from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.lanes import COLLECTIVE, SERVING, STEERING, Listening, this_thread
from verl_ray.cluster.messages import Facts, Failure, Reply, Request, Seat, Status, Value
from verl_ray.cluster.rendezvous import Meeting, join, listen, share_timeout
from verl_ray.cluster.store import read
from verl_ray.data.batch import Batch
from verl_ray.data.sharded import Receipt, Sharded
from verl_ray.errors import ClusterError, StaleIncarnation, VerlRayError
from verl_ray.parallel.topology import Topology
from verl_ray.profiling.allocator import trainer_environment
from verl_ray.profiling.memory import CallPeaks, PeakWatch
from verl_ray.profiling.progress import advance, begin, progress, touch, waiting_for_others

STACKS_SIGNAL = signal.SIGUSR2  # dumps all stacks into the log, also while the interpreter lock is held
_TAIL_BYTES = 4096


class WorkerHost:
    """The Ray actor. Every method runs on the lane that its caller names."""

    def __init__(self, seat: Seat) -> None:
        gc.disable()  # until workers are built: going through what imports leave behind took a fifth of vLLM's start
        os.environ.update(process_environment(seat, os.environ))
        self._seat = seat
        self._log_path = _keep_output(seat)
        self._workers: dict[str, Any] = {}
        self._running: tuple[str, str, float] | None = None
        self._streams: dict[str, Listening] = {}
        self._ended: deque[str] = deque(maxlen=1024)  # of which their callers may not know yet
        self._listener: socket.socket | None = None
        self._joined = not seat.process_group
        self._memory = PeakWatch(on_device=seat.device != "cpu")

    # ------------------------------------------------------------------------------------------- collective lane

    def join(self, meeting: Meeting, timeout_s: float) -> Failure | None:
        """Enter torch.distributed; returns when every rank has."""
        try:
            address = ray.util.get_node_ip_address()
            begin()
            with waiting_for_others():
                join(meeting, self._seat.rank, self._seat.device, address, self._listener, timeout_s)
            self._joined = True
        except Exception as error:
            return self._failure(error)
        return None

    def build(self, role: str, factory: Callable[..., Any], args: tuple[object, ...]) -> Topology | Failure:
        """Build this rank's worker of `role`: `factory(context, *args)`."""
        seat = self._seat
        context = WorkerContext(
            role,
            seat.rank,
            seat.num_ranks,
            seat.device,
            seat.process_group,
            seat.threads,
            self._log_path,
            seat.incarnation,
        )
        self._running = role, "build", time.monotonic()
        begin()
        try:
            if not self._joined:
                raise ClusterError(f"{role} rank {seat.rank} is not in its process group")
            self._set_threads()
            worker = self._workers[role] = factory(context, *args)
            if seat.process_group:
                share_timeout()
            self._set_threads()  # the factory may have imported torch
            told = getattr(worker, "topology", None)
            index = seat.rank % seat.num_ranks  # a replica is alone, whatever its number
            return Topology(index, seat.num_ranks, True) if told is None else told
        except Exception as error:
            return self._failure(error)
        finally:
            gc.freeze()  # what is there now stays: no collection looks at it again
            gc.enable()
            self._running = None
            touch()

    def call(self, request: Request) -> tuple[Batch | None, Reply]:
        """Run one method: its batch (stored by Ray) and the batch's receipt, or None and any other value."""
        with self._doing(request):
            try:
                answer = self._bound(request)(*self._arguments(request), **request.kwargs)
                if not self._answers(request):
                    return None, None
                return (answer, Receipt.of(answer)) if isinstance(answer, Batch) else (None, Value(answer))
            except Exception as error:
                return None, self._failure(error)

    def stream(self, request: Request, stream_id: str) -> Iterator[Batch | Reply]:
        """Run one generator method: each batch that it yields, followed by its receipt."""
        listening = self._streams.setdefault(stream_id, Listening(request.lane))
        this_thread.listening = listening
        with self._doing(request):
            try:
                for piece in self._bound(request)(*self._arguments(request), **request.kwargs):
                    if listening.gone:
                        break
                    advance(piece.num_rows, "rows")
                    if self._answers(request):
                        yield piece
                        yield Receipt.of(piece)
            except Exception as error:
                yield None
                yield self._failure(error)
            finally:
                this_thread.listening = None
                del self._streams[stream_id]
                self._ended.append(stream_id)

    def close(self) -> None:
        """Close the workers, the last one built first, and leave the process group."""
        for role in reversed(list(self._workers)):
            worker = self._workers.pop(role)
            if hasattr(worker, "close"):
                try:
                    worker.close()
                except Exception:
                    traceback.print_exc()
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    # ---------------------------------------------------------------------------------------------- control lane

    def listen(self) -> Meeting:
        """On rank 0: where the ranks of this set will meet."""
        meeting, self._listener = listen(ray.util.get_node_ip_address(), self._seat.num_ranks)
        return meeting

    def facts(self) -> Facts:
        """Where this process runs."""
        context, process = ray.get_runtime_context(), psutil.Process()
        address = ray.util.get_node_ip_address()
        log_path = str(self._log_path)
        node_id = context.get_node_id()
        return Facts(process.pid, process.create_time(), node_id, address, socket.gethostname(), log_path)

    def status(self) -> Status:
        """What the process is doing now."""
        running = self._running
        process = psutil.Process()
        since = running and (running[0], running[1], time.monotonic() - running[2])
        done = progress()
        done = replace(done, waits_for_others=done.waits_for_others or _in_a_collective())
        health = {role: worker.health() for role, worker in self._workers.items() if hasattr(worker, "health")}
        return Status(process.pid, process.memory_info().rss, since, done, health)

    def memory(self) -> CallPeaks:
        """What this process held at most in each call that ended since this was asked last."""
        return self._memory.take()

    def stacks(self) -> str:
        """The Python stacks of all threads but this one, the one that runs a worker's method first."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        own = threading.get_ident()
        texts = [
            (f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)))
            for ident, frame in sys._current_frames().items()
            if ident != own
        ]
        return "\n".join(sorted(texts, key=lambda text: f'"{__file__}"' not in text))

    def end_stream(self, role: str, stream_id: str) -> None:
        """Nobody listens to this stream any more: stop at its next piece, which the worker may bring about."""
        if stream_id in self._ended:
            return
        listening = self._streams.setdefault(stream_id, Listening(SERVING))  # it may begin yet
        listening.gone = True
        for act in listening.acts:
            act()
        worker: Any = self._workers.get(role)
        if listening.lane == COLLECTIVE and hasattr(worker, "abort"):
            worker.abort()

    # ------------------------------------------------------------------------------------------------- internals

    @contextlib.contextmanager
    def _doing(self, request: Request) -> Iterator[None]:
        """Note what the collective lane does, and the memory that it takes on any lane. A call that begins or ends is
        progress; one that only steers others is none."""
        if request.lane == COLLECTIVE:
            self._running = request.role, request.method, time.monotonic()
        if request.lane != STEERING:
            begin()
        try:
            with self._memory(request.role, request.method):
                yield
        finally:
            if request.lane != STEERING:
                touch()
            if request.lane == COLLECTIVE:
                self._running = None

    def _bound(self, request: Request) -> Callable[..., Any]:
        if request.incarnation != self._seat.incarnation:
            raise StaleIncarnation(
                f"{request.method} was called on incarnation {request.incarnation}, this is {self._seat.incarnation}",
                role=request.role,
                rank=self._seat.rank,
                node=socket.gethostname(),
            )
        method: Callable[..., Any] = getattr(self._workers[request.role], request.method)
        return method

    def _arguments(self, request: Request) -> list[object]:
        return [read(a, request.patience_s) if isinstance(a, Sharded) else a for a in request.args]

    def _answers(self, request: Request) -> bool:
        """Of ranks that compute the same rows one answers for them; of anything else each speaks for itself."""
        if not any(isinstance(argument, Sharded) for argument in request.args):
            return True
        told = getattr(self._workers[request.role], "topology", None)
        return told is None or bool(told.answers)

    def _set_threads(self) -> None:
        # The lane has a thread of its own, and torch keeps this number per thread.
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(self._seat.threads)

    def _failure(self, error: Exception) -> Failure:
        what, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        if isinstance(error, VerlRayError):
            print(trace, file=sys.stderr, flush=True)  # the log
            return Failure(what, "", "", error)
        sys.stdout.flush()
        return Failure(what, trace, tail(self._log_path), None)


def process_environment(seat: Seat, given: Mapping[str, str]) -> dict[str, str]:
    """What this process sets for itself, `given` what it was started with; before torch is imported."""
    trains = seat.process_group and seat.device != "cpu"
    return thread_environment(seat.threads) | (trainer_environment(given) if trains else {})


_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_INNERMOST = 3  # a collective's own frames: torch's operator, the function, its decorator


def _in_a_collective() -> bool:
    """Whether a thread is inside one of torch's collectives, as far as its Python frames tell: what runs on a device
    they do not show."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        for _ in range(_INNERMOST):
            if at is None:
                break
            if at.f_code.co_filename.endswith(_COLLECTIVES):
                return True
            at = at.f_back
    return False


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables of a process that computes with `threads` threads; torch reads them when it is imported.

    Idle OpenMP threads sleep instead of spinning: the processes of a node take turns on its cores, and a spinning
    thread keeps the core from the one that is waited for. Measured on two busy cores, the update of a small model with
    two threads took 0.10 s and 0.12 s of CPU time; with spinning threads 1.1 s and 0.97 s.
    """
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return {**counts, "OMP_WAIT_POLICY": "PASSIVE"}


def _keep_output(seat: Seat) -> Path:
    """Send this process's output to a file of its own, in the run's folder or, where that cannot be, in Ray's."""
    again = f".{seat.incarnation}" if seat.incarnation > 1 else ""
    name = f"{seat.processes}-{seat.rank}{again}.log"
    try:
        Path(seat.log_dir).mkdir(parents=True, exist_ok=True)
        path = Path(seat.log_dir) / name
        log = path.open("ab", buffering=0)
    except OSError as error:
        path = Path(ray._private.worker.global_worker.node.get_logs_dir_path()) / f"verl_ray-{os.getpid()}-{name}"
        print(f"{seat.log_dir} cannot be written here ({error}); output is kept in {path}")
        log = path.open("ab", buffering=0)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log.fileno(), descriptor)
    log.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=2)
    return path


def tail(path: str | Path, size: int = _TAIL_BYTES) -> str:
    """The last lines of a file, at most `size` bytes; empty when there is none."""
    try:
        with Path(path).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text if end <= size else text.partition("\n")[2]
