"""Who draws what: groups are dealt to the replicas, and what each still owes is kept.

Invariant: every response is drawn once and handed on once, with the same tokens whichever replica draws it; what a
lost replica owes is dealt to the others. Deliberately not here: whether a replica is lost (`restarts.py`), and whether
it has the weights (`replicas.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controllers.rollouts.restarts import Replica
from verl_ray.cluster.lanes import LANES, SERVING
from verl_ray.cluster.store import put
from verl_ray.cluster.streams import Stream, next_stream
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Prompts, Rollouts
from verl_ray.errors import RolloutError, WorkerError
from verl_ray.rollout.balancer import Balancer, Item
from workers.rollout import Generation, RolloutWorker

Server = tuple[Replica, int]
"""A replica in one of its incarnations."""

STREAMS = LANES[SERVING] // 2
"""Calls under way of one replica; what it has room for beyond them comes in one call when the next of them ends."""


@dataclass(frozen=True, eq=False)
class Group:
    """What some responses share: their prompt. Known by itself, since drawings may be of the same prompts."""

    drawing: Drawing
    ordinal: int


class Drawing:
    """Responses to some prompts: those that are finished, and how many are still to come."""

    def __init__(self, prompts: Prompts, generation: Generation) -> None:
        self.generation = generation
        self.finished: deque[Sharded[Rollouts]] = deque()
        """In pieces, as they came; whoever asked for them takes them."""
        size = generation.group_size
        self.owed = prompts.num_rows * size
        """Responses that are not finished."""
        self._prompts = put(prompts)
        self._position = {ordinal: row for row, ordinal in enumerate(prompts.group_id.tolist())}
        self._groups = {ordinal: Group(self, ordinal) for ordinal in self._position}
        self._rows = {ordinal: set(range(ordinal * size, (ordinal + 1) * size)) for ordinal in self._position}

    @property
    def items(self) -> list[Item[Group]]:
        """Every group that is not being drawn, as something to deal."""
        return [Item(self._groups[ordinal], len(rows)) for ordinal, rows in self._rows.items()]

    def give(self, server: Server, groups: Sequence[Group]) -> _Draw:
        """Ask a replica for what these groups lack."""
        replica, _ = server
        owed = set[int]().union(*(self._rows[group.ordinal] for group in groups))
        prompts = self._prompts.select(np.array([self._position[group.ordinal] for group in groups]))
        stream = replica.open_stream(RolloutWorker.generate, prompts, self.generation, np.array(sorted(owed)))
        for group in groups:
            del self._rows[group.ordinal]
        return _Draw(self, server, stream, owed)

    def take_back(self, owed: set[int]) -> list[Item[Group]]:
        """Rows that a lost replica owes, as groups to deal again."""
        by_group: dict[int, set[int]] = {}
        for row in owed:
            by_group.setdefault(row // self.generation.group_size, set()).add(row)
        self._rows.update(by_group)
        return [Item(self._groups[ordinal], len(rows)) for ordinal, rows in sorted(by_group.items())]


@dataclass(eq=False)
class _Draw:
    """What one call of one replica still owes."""

    drawing: Drawing
    server: Server
    stream: Stream[Rollouts]
    owed: set[int]


class Dealer:
    """All drawings that are open."""

    def __init__(self, in_flight: int) -> None:
        """`in_flight`: responses that a replica draws at a time."""
        self._in_flight = in_flight
        self._balancer: Balancer[Server, Group] = Balancer((), in_flight)
        self._draws: list[_Draw] = []
        self._reissued = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is owed."""
        return not self._draws and not self._balancer.waiting

    def take_count(self) -> int:
        """Responses dealt again since the last call, because a replica was lost."""
        count, self._reissued = self._reissued, 0
        return count

    def open(self, drawing: Drawing) -> None:
        """Its groups are dealt, behind those that wait."""
        if self.is_idle:
            self._balancer.forget()
        self._balancer.add(drawing.items)

    def close(self) -> None:
        """Nobody waits for anything any more."""
        for draw in self._draws:
            draw.stream.end()
        self._draws = []
        self._balancer = Balancer((), self._in_flight)

    def serve(self, servers: Sequence[Server]) -> None:
        """These are there and hold the present weights, and no others; what others owe is dealt again."""
        known = self._balancer.servers
        for gone in [one for one in known if one not in servers]:
            self._take_back(gone)
        for new in [one for one in servers if one not in known]:
            self._balancer.join(new)

    def references(self) -> list[Any]:
        """What the next pieces come from."""
        return [draw.stream.flight.payload for draw in self._draws]

    def deal(self) -> None:
        """Ask replicas for what they have room for.

        Raises:
            WorkerError: a replica takes no calls.
        """
        held = Counter(draw.server for draw in self._draws)
        busy = {server for server, count in held.items() if count >= STREAMS}
        refused: WorkerError | None = None
        for server, items in self._balancer.assign(busy).items():
            by_drawing: dict[Drawing, list[Item[Group]]] = {}
            for item in items:
                by_drawing.setdefault(item.session.drawing, []).append(item)
            for drawing, its in by_drawing.items():
                try:
                    self._draws.append(drawing.give(server, [item.session for item in its]))
                except WorkerError as error:
                    refused = refused or error
                    self._balancer.add(its, first=True)  # others draw them
        if refused is not None:
            raise refused

    def take(self, timeout_s: float) -> None:
        """Take the pieces that are there; waits for the first one up to `timeout_s` seconds.

        Raises:
            VerlRayError: a replica failed or makes no progress.
            RolloutError: a replica's answers end, and are not all.
        """
        while self._draws:
            ready = next_stream([draw.stream for draw in self._draws], timeout_s)
            if ready is None:
                return
            draw = next(draw for draw in self._draws if draw.stream is ready)
            self._note(draw, ready.take())
            timeout_s = 0.0

    def _note(self, draw: _Draw, piece: Sharded[Rollouts] | None) -> None:
        if piece is None:
            self._draws.remove(draw)
            if draw.owed:
                raise RolloutError(f"a replica ended its answers and owes the rows {sorted(draw.owed)}")
            return
        draw.owed.difference_update(piece.row("row_id").tolist())
        draw.drawing.owed -= len(piece)
        draw.drawing.finished.append(piece)
        self._balancer.done(draw.server, len(piece))

    def _take_back(self, server: Server) -> None:
        self._balancer.leave(server)
        for draw in [draw for draw in self._draws if draw.server == server]:
            self._draws.remove(draw)
            self._reissued += len(draw.owed)
            self._balancer.add(draw.drawing.take_back(draw.owed), first=True)
