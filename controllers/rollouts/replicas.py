"""The rollout replicas as one: who draws what, and what happens when one of them is lost.

Invariant: every response is drawn once and handed on once, with the same tokens whichever replica draws it; a replica
that is not at the present policy version gets no request. A replica that died, is stuck or cannot go on is fenced (its
process ends), what it owes goes to the others, and a new one takes its place once it has the weights. Deliberately not
here: weights (`publisher.py`) and scores (`producer.py`).
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from controllers.rollouts.endpoints import Endpoints
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.failures import Member, stalled
from verl_ray.cluster.group import Stream, WorkerGroup, next_stream
from verl_ray.cluster.host import LANES, SERVING, Status
from verl_ray.cluster.signals import heed_signals
from verl_ray.cluster.store import put
from verl_ray.config.rollout import RolloutConfig
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Prompts, Rollouts
from verl_ray.errors import DeadlineExceeded, EngineFailed, RolloutError, WorkerDied, WorkerError
from verl_ray.rollout.balancer import Balancer, Item
from workers.rollout import Generation, RolloutWorker

Replica = WorkerGroup[RolloutWorker]

_TICK_S = 0.5

STREAMS = LANES[SERVING] // 2
"""Calls under way of one replica; what it has room for beyond them comes in one call when the next of them ends."""


@dataclass(eq=False)
class _Draw:
    """What one call of one replica still owes."""

    replica: Replica
    stream: Stream[Rollouts]
    owed: set[int]


class RolloutServers:
    """The replicas of a run, of which at least one is there or on its way."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        config: RolloutConfig,
        endpoints: Endpoints | None = None,
    ) -> None:
        """`endpoints`: tells where clients outside of the run find each replica."""
        self._endpoints = endpoints
        if endpoints is not None:
            for replica in replicas:
                endpoints.tell(replica)
        self._config = config
        self._present = list(replicas)
        self._condemned: set[Replica] = set()  # seen not to answer: what they say later changes nothing
        self._restarts: dict[Replica, Future[None]] = {}
        self._closing = False
        self._lost_since_publish = 0
        self._counts = {"rollout/restarts": 0, "rollout/reissued": 0}
        self.room = threading.Event()
        """Whether a replica that starts finds memory; cleared by who fills the devices that replicas share."""
        self.room.set()
        self.bring_up: Callable[[Replica], None] | None = None
        """Gives a new replica the present weights; set by who publishes."""

    # ---------------------------------------------------------------------------------------------------- the whole

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Those that are there now."""
        return tuple(self._present)

    def members(self) -> list[Member]:
        """Their processes."""
        return [member for replica in self._present for member in replica.members()]

    def gather(self, *, all_of_them: bool = False) -> tuple[Replica, ...]:
        """Those that are there, with the new ones that have started meanwhile; waits until there is one, or all."""
        while self._restarts and (all_of_them or not self._present):
            self._return_started()
            heed_signals()
            time.sleep(_TICK_S / 10)
        self._return_started()
        return self.replicas

    @property
    def restarting(self) -> bool:
        """Whether some are on their way."""
        return bool(self._restarts)

    def published(self) -> None:
        """All that are there hold the same new version."""
        self._lost_since_publish = 0

    def take_counts(self) -> dict[str, float]:
        """Replicas restarted and responses drawn again since the last call."""
        counts = {name: float(count) for name, count in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0)
        return counts

    def close(self) -> None:
        """End the replicas that are being restarted, wherever they are on their way; the others are not ended here."""
        self._closing = True
        self.room.set()
        for replica, restart in self._restarts.items():
            while not restart.done():
                replica.kill()  # what the thread of the restart waits for fails, also what it has just begun
                wait([restart], timeout=_TICK_S)
        self._restarts.clear()
        if self._endpoints is not None:
            self._endpoints.close()

    # --------------------------------------------------------------------------------------------------- generation

    def generate(
        self, prompts: Prompts, generation: Generation, watch: Callable[[], None] | None = None
    ) -> Iterator[Sharded[Rollouts]]:
        """Responses to all prompts, in pieces as they finish, in any order. `watch` is called now and then meanwhile.

        Raises:
            WorkerError: a replica refused, or more were lost than rollout.health.max_restarts allows.
        """
        # Consumes the pieces of all draws; waits for the next of any, a restarted replica, or the time to ask how the
        # replicas are; ends when nothing is owed.
        size, stored = generation.group_size, put(prompts)
        position = {group: row for row, group in enumerate(prompts.group_id.tolist())}
        wanted = {group: set(range(group * size, (group + 1) * size)) for group in position}
        balancer = Balancer(self._present, self._config.in_flight)
        balancer.add(Item(group, size) for group in position)
        draws: list[_Draw] = []
        watched = time.monotonic()

        def take_back(replica: Replica) -> None:
            """What a lost replica owes is drawn next."""
            balancer.leave(replica)
            for draw in [draw for draw in draws if draw.replica is replica]:
                draws.remove(draw)
                by_group: dict[int, set[int]] = {}
                for row in draw.owed:
                    by_group.setdefault(row // size, set()).add(row)
                wanted.update(by_group)
                self._counts["rollout/reissued"] += len(draw.owed)
                balancer.add((Item(group, len(rows)) for group, rows in sorted(by_group.items())), first=True)

        try:
            while draws or balancer.waiting:
                heed_signals()
                for replica in self._see():
                    take_back(replica)
                for replica in self._return_started(bring_up=True):
                    balancer.join(replica)
                held = Counter(draw.replica for draw in draws)
                for replica, items in balancer.assign({one for one in held if held[one] >= STREAMS}).items():
                    owed = set().union(*(wanted.pop(item.session) for item in items))
                    rows = stored.select(np.array([position[item.session] for item in items]))
                    stream = replica.open_stream(RolloutWorker.generate, rows, generation, np.array(sorted(owed)))
                    draws.append(_Draw(replica, stream, owed))
                if not draws:
                    time.sleep(_TICK_S / 10)
                    continue
                if watch is not None and time.monotonic() - watched >= _TICK_S:
                    watched = time.monotonic()
                    watch()
                try:
                    ready = next_stream([draw.stream for draw in draws], _TICK_S)
                    if ready is None:
                        continue
                    piece = ready.take()
                except WorkerError as error:
                    take_back(self.lose(error))
                    continue
                draw = next(draw for draw in draws if draw.stream is ready)
                if piece is None:
                    draws.remove(draw)
                    if draw.owed:
                        raise RolloutError(f"a replica ended its answers and owes the rows {sorted(draw.owed)}")
                    continue
                draw.owed.difference_update(piece.row("row_id").tolist())
                balancer.done(draw.replica, len(piece))
                yield piece
        finally:
            for draw in draws:
                draw.stream.end()

    # ---------------------------------------------------------------------------------------------- lost and found

    def of_each(self, replicas: Sequence[Replica], verb: Callable[..., object], *args: object) -> None:
        """The same call of several replicas; one that is lost meanwhile does not keep the others from it."""
        calls: dict[Replica, Call[Any]] = {}
        for replica in replicas:
            try:
                calls[replica] = replica.broadcast(verb, *args)
            except WorkerError as error:  # it has failed before
                self.lose(error)
        while calls:
            try:
                wait_all(list(calls.values()), functools.partial(self.watch, list(calls)))
                return
            except WorkerError as error:
                del calls[self.lose(error)]

    def watch(self, replicas: Sequence[Replica]) -> None:
        """While their answers are waited for: ask how they are, and raise for one that does not say."""
        for replica in replicas:
            self._look_at(replica)

    def lose(self, error: WorkerError) -> Replica:
        """The replica that failed, which is fenced and started anew, beside everything else.

        Raises `error` if it is not about a replica, or says nothing against the process; or if too many were lost.
        """
        replica = next((one for one in self._present if one.owns(error)), None)
        if replica is None or not self._is_lost(replica, error):
            raise error
        self._fence(replica, error)
        return replica

    def _is_lost(self, replica: Replica, error: WorkerError) -> bool:
        if replica in self._condemned or isinstance(error, WorkerDied):
            return True
        if isinstance(error, DeadlineExceeded):  # one that waits for the other end of a wire may be as good as ever
            heartbeat = replica.members()[0].heartbeat
            answers = heartbeat.unanswered_s < self._config.health.deadline_s
            return not (answers and heartbeat.status is not None and heartbeat.status.progress.waits_for_others)
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, EngineFailed):
            cause = cause.__cause__
        return cause is not None

    def _see(self) -> list[Replica]:
        """Ask how the replicas are; those that were lost just now."""
        lost = []
        for replica in self.replicas:
            try:
                self._look_at(replica)
            except WorkerError as error:
                self._fence(replica, error)
                lost.append(replica)
        return lost

    def _look_at(self, replica: Replica) -> None:
        health = self._config.health
        try:
            limit = f"rollout.health.deadline_s = {health.deadline_s:g}"
            status = replica.beat(health.interval_s, health.deadline_s, limit)
            told = status.health.get(replica.role) if status is not None else None  # none while it was built
            if told is not None and told.failure is not None:
                (member,) = replica.members()
                what = f"its engine failed: {told.failure}"
                raise WorkerError(what, role=member.role, rank=member.rank, node=member.node)
            if status is not None and _stands_still(status, replica.stall_s):
                assert status.running is not None
                raise stalled(replica.members(), status.running[1], f"run.stall_s = {replica.stall_s:g}")
        except WorkerError as error:
            replica.fail(error)
            self._condemned.add(replica)
            raise

    def _fence(self, replica: Replica, error: WorkerError) -> None:
        health = self._config.health
        if replica in self._present:
            self._present.remove(replica)
        self._condemned.discard(replica)
        self._lost_since_publish += 1
        self._counts["rollout/restarts"] += 1
        if self._lost_since_publish > health.max_restarts:
            error.add_note(f"more than rollout.health.max_restarts = {health.max_restarts} replicas were lost in a row")
            raise error
        print(f"warning: {error.role} rank {error.rank} on {error.node} is lost and starts again: {error.what}",
              file=sys.stderr, flush=True)  # fmt: skip
        restart: Future[None] = Future()
        self._restarts[replica] = restart

        def start_again() -> None:
            self.room.wait()  # until the next rollouts, or the end, at the latest
            if self._closing:
                restart.set_result(None)
                return
            try:
                replica.restart()
                restart.set_result(None)
            except BaseException as failure:
                restart.set_exception(failure)

        threading.Thread(target=start_again, name=f"restart of rollout {error.rank}", daemon=True).start()

    def _return_started(self, *, bring_up: bool = False) -> list[Replica]:
        """Take in what has started again, with the present weights if asked; those that are there now, but were not."""
        returned = []
        for replica in [replica for replica, restart in self._restarts.items() if restart.done()]:
            try:
                self._restarts.pop(replica).result()
            except WorkerError as error:  # it did not come up: once more, while there are others
                self._fence(replica, error)
                continue
            self._present.append(replica)
            if bring_up and self.bring_up is None:
                raise RolloutError("a rollout replica has started again, and nobody can give it the weights")
            try:
                if self._endpoints is not None:
                    self._endpoints.tell(replica)
                if bring_up and self.bring_up is not None:
                    self.bring_up(replica)
            except WorkerError as error:
                self.lose(error)
                continue
            returned.append(replica)
        return returned


def _stands_still(status: Status, stall_s: float) -> bool:
    """Whether a process makes no progress with one of its calls, and does not wait for others."""
    if status.running is None or status.progress.waits_for_others:
        return False
    _, _, so_far_s = status.running
    return min(so_far_s, status.progress.idle_s) >= stall_s
