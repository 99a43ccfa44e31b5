"""One worker process, which hosts the workers of one or several roles.

Invariant: calls in the collective group run one at a time in the order they were sent.
Calls of methods marked `concurrent` or `steering` run at the same time as those and as
each other. The control group has a thread of its own and replies while the others are
busy or stuck. A call that raises returns a `Failure`; it never ends the process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import ray

from verl_ray.cluster.collectives import collectives
from verl_ray.cluster.context import (
    COLLECTIVE,
    SERVING,
    STEERING,
    CallRequest,
    Failure,
    ProcessInfo,
    RankSpec,
    Reply,
    Status,
    StreamState,
    Value,
    Whereabouts,
    WorkerContext,
    this_thread,
)
from verl_ray.cluster.process_control import keep_output, tail
from verl_ray.cluster.process_setup import allow_open_files, process_environment
from verl_ray.cluster.waiting import read
from verl_ray.columns.batch import Batch
from verl_ray.columns.packing import Topology
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.errors import ClusterError, StaleIncarnation, VerlRayError
from verl_ray.ops.installed_torch import choose_vector_program
from verl_ray.ownership import Owner, remove_stale
from verl_ray.private_files import shared_folder
from verl_ray.profiling.machine_use import MachineUse, UseMeter
from verl_ray.profiling.memory import CallPeaks, PeakWatch
from verl_ray.profiling.progress import (
    advance,
    begin,
    counting_reads,
    own_line,
    progress_and_waits,
    thread_stacks,
    touch,
    waiting_for_others,
)
from verl_ray.profiling.trace import SPANS, ProcessSpans, span
from verl_ray.rendezvous import Rendezvous, join, listen, share_timeout

# Streams whose end their callers may not know yet.
_REMEMBERED_STREAMS = 1024


class WorkerHost:
    """The Ray actor; its callers name the concurrency group of each method call."""

    def __init__(self, rank_spec: RankSpec) -> None:
        # The collector is off until the workers are built: it took a fifth of vLLM's
        # start to go through what imports leave behind.
        gc.disable()
        os.environ.update(process_environment(rank_spec, os.environ))
        allow_open_files()

        # Neither imports nor vLLM count what they have done.
        self._starting = contextlib.ExitStack()
        self._starting.enter_context(counting_reads())

        self._rank_spec = rank_spec
        SPANS.is_on = rank_spec.notes_spans
        self._log_path = keep_output(rank_spec)
        self._workers: dict[str, Any] = {}
        # (role, method, start) of the call in the collective group.
        self._running: tuple[str, str, float] | None = None
        # The same of every call, by the identity of its thread.
        self._calls: dict[int, tuple[str, str, float]] = {}
        self._streams: dict[str, StreamState] = {}
        self._ended_streams: deque[str] = deque(maxlen=_REMEMBERED_STREAMS)
        self._listener: socket.socket | None = None
        self._joined = not rank_spec.process_group
        on_device = rank_spec.device != "cpu"
        self._memory = PeakWatch(on_device=on_device)
        self._use = UseMeter(rank_spec.processes.replace(" ", "_"), on_device=on_device)

        # On a node without a driver nobody else does it: neither for a run before, nor
        # for the process whose place this one takes.
        remove_stale(shared_folder())

    # ----------------------------------------------------------------- collective group

    def join(self, rendezvous: Rendezvous, timeout_s: float) -> Failure | None:
        """Enter the process group of torch.distributed; return when every rank has."""
        try:
            address = ray.util.get_node_ip_address()
            begin()
            with waiting_for_others():
                join(
                    rendezvous,
                    self._rank_spec.rank,
                    self._rank_spec.device,
                    address,
                    self._listener,
                    timeout_s,
                )
            self._joined = True
        except Exception as error:
            return self._failure(error)
        return None

    def build(
        self,
        role: str,
        factory: Callable[..., Any],
        args: tuple[object, ...],
        gpus: tuple[str, ...] = (),
    ) -> Topology | Failure:
        """Build this rank's worker of `role` with `factory(context, *args)`.

        Args:
            role: The role.
            factory: Function that builds the worker.
            args: Its arguments after the context.
            gpus: Ids of the GPUs of other ranks that this one computes on; none if it
                has GPUs of its own.
        """
        self._running = (role, "build", time.monotonic())
        self._calls[threading.get_ident()] = self._running
        begin()
        try:
            if not self._joined:
                rank = self._rank_spec.rank
                raise ClusterError(f"{role} rank {rank} is not in its process group")

            # CUDA reads the variable once. The ranks of an engine inherit it.
            if gpus:
                torch = sys.modules.get("torch")
                assert torch is None or not torch.cuda.is_initialized(), "too late"
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            self._set_threads()
            worker = factory(self._context(role), *args)
            self._workers[role] = worker

            # The factory may have made process groups, and it may have imported torch.
            if self._rank_spec.process_group:
                share_timeout()
            self._set_threads()
            return self._topology(worker)
        except Exception as error:
            return self._failure(error)
        finally:
            # Objects that exist now are permanent: no collection visits them again.
            gc.freeze()
            gc.enable()
            self._starting.close()
            self._running = None
            del self._calls[threading.get_ident()]
            touch()

    def call(self, request: CallRequest) -> tuple[Batch | None, Reply]:
        """Run one method.

        Returns:
            The batch that the method returned, which Ray stores, with its receipt; or
            None and any other value.
        """
        with self._recording(request):
            try:
                method = self._bound_method(request)
                result = method(*self._arguments(request), **request.kwargs)
                if not self._returns_results(request):
                    return None, None
                if isinstance(result, Batch):
                    return result, Receipt.of(result)
                return None, Value(result)
            except Exception as error:
                return None, self._failure(error)

    def stream(self, request: CallRequest, stream_id: str) -> Iterator[Batch | Reply]:
        """Run one generator method; yield each batch, followed by its receipt."""
        new_state = StreamState(request.concurrency_group)
        # The caller may have abandoned the stream before it began.
        state = self._streams.setdefault(stream_id, new_state)
        this_thread.stream_state = state

        with self._recording(request):
            try:
                method = self._bound_method(request)
                for batch in method(*self._arguments(request), **request.kwargs):
                    if state.abandoned:
                        break
                    advance(batch.num_rows, "rows")
                    if self._returns_results(request):
                        yield batch
                        yield Receipt.of(batch)
            except Exception as error:
                yield None
                yield self._failure(error)
            finally:
                this_thread.stream_state = None
                del self._streams[stream_id]
                self._ended_streams.append(stream_id)

    def close(self) -> None:
        """Close the workers, the last one built first, and leave the process group."""
        for role in reversed(list(self._workers)):
            worker = self._workers.pop(role)
            if hasattr(worker, "close"):
                try:
                    worker.close()
                except Exception:
                    # The other workers are closed all the same.
                    traceback.print_exc()

        # A process that never imported torch has no process group to leave.
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available():
            return
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    # -------------------------------------------------------------------- control group

    def listen(self) -> Rendezvous:
        """Open the rendezvous of this process set; called on rank 0."""
        address = ray.util.get_node_ip_address()
        rendezvous, self._listener = listen(address, self._rank_spec.num_ranks)
        return rendezvous

    def process_info(self) -> ProcessInfo:
        """Location of this process and of its log."""
        return ProcessInfo(
            owner=Owner.here(),
            node_id=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            host_name=socket.gethostname(),
            log_path=str(self._log_path),
            gpus=self._gpus(),
        )

    def _gpus(self) -> tuple[str, ...]:
        """Return the ids of the GPUs that Ray has given to this process."""
        if self._rank_spec.device == "cpu":
            return ()
        ids = ray.get_runtime_context().get_accelerator_ids()
        return tuple(map(str, ids.get("GPU", ())))

    def status(self) -> Status:
        """Present activity of this process."""
        # Another thread may replace the attribute meanwhile.
        running = self._running
        if running is not None:
            role, method, start = running
            running = (role, method, time.monotonic() - start)

        health = {
            role: worker.health()
            for role, worker in self._workers.items()
            if hasattr(worker, "health")
        }
        return Status(
            running=running,
            progress=progress_and_waits(),
            health=health,
        )

    def whereabouts(self) -> Whereabouts:
        """Where this process is in its work."""
        # Other threads may begin and end calls meanwhile.
        calls = sorted(self._calls.copy().items(), key=lambda item: item[1][2])
        collective = self._running
        for thread, call in calls:
            if collective in (call, None):
                role, method, start = call
                running = (role, method, time.monotonic() - start)
                line = own_line(thread, first_file=__file__)
                return Whereabouts(running, progress_and_waits(), line, *collectives())
        return Whereabouts(None, progress_and_waits(), "", *collectives())

    def usage(self) -> tuple[CallPeaks, MachineUse]:
        """Peak memory of each call that ended since the last call, and machine use."""
        return self._memory.take(), self._use.take()

    def spans(self) -> ProcessSpans:
        """Spans of this process since the last call of this method."""
        return SPANS.take(self._log_path.stem)

    def stacks(self) -> str:
        """Python stacks of all threads but this one, threads that run a call first."""
        return thread_stacks(first_file=__file__)

    def abandon_stream(self, role: str, stream_id: str) -> None:
        """Stop a stream that its caller no longer consumes, at its next batch.

        The worker may stop sooner: through its callbacks (`when_abandoned`), or through
        its `abort` where the stream runs in the collective group.
        """
        if stream_id in self._ended_streams:
            return

        # A stream that has not begun finds this state when it begins. It needs no
        # `abort`, which is for streams of the collective group.
        state = self._streams.setdefault(stream_id, StreamState(SERVING))
        state.abandoned = True
        for callback in state.callbacks:
            callback()

        worker: Any = self._workers.get(role)
        if state.concurrency_group == COLLECTIVE and hasattr(worker, "abort"):
            worker.abort()

    # ------------------------------------------------------------------------ internals

    @contextlib.contextmanager
    def _recording(self, request: CallRequest) -> Iterator[None]:
        """Record the call in the status, in the peaks of memory, and as progress.

        The start and the end of a call are progress. Those of a steering call are none,
        since the calls that it directs may be stuck all the same.
        """
        is_collective = request.concurrency_group == COLLECTIVE
        is_progress = request.concurrency_group != STEERING

        call = (request.role, request.method, time.monotonic())
        self._calls[threading.get_ident()] = call
        if is_collective:
            self._running = call
        if is_progress:
            begin()
        try:
            with (
                self._memory(request.role, request.method),
                span(f"{request.role}.{request.method}", "call", _details(request)),
            ):
                yield
        finally:
            if is_progress:
                touch()
            if is_collective:
                self._running = None
            del self._calls[threading.get_ident()]

    def _bound_method(self, request: CallRequest) -> Callable[..., Any]:
        own_incarnation = self._rank_spec.incarnation
        if request.incarnation != own_incarnation:
            raise StaleIncarnation(
                f"{request.method} was called on incarnation {request.incarnation},"
                f" this is {own_incarnation}",
                role=request.role,
                rank=self._rank_spec.rank,
                node=socket.gethostname(),
            )
        worker = self._workers[request.role]
        method: Callable[..., Any] = getattr(worker, request.method)
        return method

    def _arguments(self, request: CallRequest) -> list[object]:
        """Arguments of the method, with batches instead of references to rows."""
        arguments: list[object] = []
        for argument in request.args:
            if isinstance(argument, Sharded):
                with span(f"read {argument.stage.__name__}", "wait"):
                    argument = read(argument, request.patience_s)
            arguments.append(argument)
        return arguments

    def _returns_results(self, request: CallRequest) -> bool:
        """Whether this rank's result is the one that the driver reads.

        Of several ranks that compute the same rows, one returns their result. A call
        without rows has one result per rank.
        """
        has_rows = any(isinstance(argument, Sharded) for argument in request.args)
        if not has_rows:
            return True
        topology = getattr(self._workers[request.role], "topology", None)
        return topology is None or bool(topology.returns_results)

    def _context(self, role: str) -> WorkerContext:
        return WorkerContext(
            role=role,
            rank=self._rank_spec.rank,
            num_ranks=self._rank_spec.num_ranks,
            device=self._rank_spec.device,
            process_group=self._rank_spec.process_group,
            threads=self._rank_spec.threads,
            log_path=self._log_path,
            incarnation=self._rank_spec.incarnation,
        )

    def _topology(self, worker: Any) -> Topology:
        """The worker's topology; by default every rank has rows of its own."""
        topology: Topology | None = getattr(worker, "topology", None)
        if topology is not None:
            return topology

        num_ranks = self._rank_spec.num_ranks
        # A replica is the only rank of its processes, whatever its number in the set.
        dp_rank = self._rank_spec.rank % num_ranks
        return Topology(dp_rank, num_ranks, True)

    def _set_threads(self) -> None:
        # Torch keeps this number per thread, and the collective group has a thread of
        # its own.
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(self._rank_spec.threads)
            choose_vector_program()

    def _failure(self, error: Exception) -> Failure:
        message = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        # A log on a full disk takes nothing, and the reason may be this disk.
        if isinstance(error, VerlRayError):
            # The log keeps the stack; the driver shows the error without it.
            with contextlib.suppress(OSError):
                print(trace, file=sys.stderr, flush=True)
            return Failure(message, "", "", error)

        # What the process has printed last must be in the log that `tail` reads.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        return Failure(message, trace, tail(self._log_path), None)


def _details(request: CallRequest) -> dict[str, Any]:
    """Return what a trace says of a call: its rows, or its first bucket of weights."""
    details: dict[str, Any] = {}
    argument: Any
    for argument in request.args:
        if isinstance(argument, Sharded):
            details = {"rows": len(argument), "tokens": argument.num_tokens} | details
        # Buckets of weights, whose class is none of this layer's.
        elif isinstance(argument, tuple):
            buckets = [part for part in argument if hasattr(part, "entries")]
            if buckets:
                nbytes = sum(bucket.nbytes for bucket in buckets)
                details |= {"bucket": buckets[0].index, "bytes": nbytes}
    return details
