"""A run without processes, one event at a time, for checks of every order of events.

The real parts are those that decide which groups are drawn, learned from and settled:
`Supply` with its admission, buffer and ledger, `OptimizerSteps`, and the engines' rules
about open rows and updates (`ScriptedEngine`). A machine stands for the others: the
driver of a step (`controllers/trainers/rl.py`), the replicas and the graders.

Invariant: `events` names everything that can happen next, and `apply` checks after each
event what must hold in every state.
"""

from __future__ import annotations

import copy
import functools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from controllers.rollouts.supply import Supply, SupplyMemory
from scripts.bench.scripted_engine import ScriptedEngine
from scripts.configuration import compose
from verl_ray.columns.batch import Int64, Ragged
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.columns.stages import Prompts, Rollouts, Scores
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.cursor import drawn_rows
from verl_ray.data.token_versions import OptimizerSteps, versions_of_tokens
from verl_ray.profiling.phases import Timers
from verl_ray.rollout.requests import Chunk, GenerationRequest, Sampling
from verl_ray.weight_sync.manifest import Manifest
from workers.rollout import whole_rollouts

Event = tuple[str, int]
SAMPLING = Sampling(1.0, 1.0, -1, 99)
EVALUATED = 1 << 20  # row ids of an evaluation begin here

SCHEDULES = {
    "synchronous": ("schedule=synchronous",),
    "one_step_off": ("schedule=one_step_off", "placement=separate"),
    "asynchronous": ("schedule=asynchronous", "placement=separate"),
    "carry_over": ("schedule=carry_over",),
}


@dataclass(frozen=True)
class Scenario:
    """What a machine does.

    Attributes:
        length: Tokens of the responses to a prompt, by its ordinal.
        updates: Optimizer steps of a training step.
        kills: How often the driver may die or be stopped.
        crashes: How often a trainer may be lost, beside a driver that goes on.
        snapshot_every: Steps from one snapshot to the next.
        losses: How many replicas may be lost.
        evaluations: How many evaluations there may be.
    """

    schedule: str
    staleness: int
    steps: int = 3
    prompts: int = 1
    group_size: int = 2
    length: Callable[[int], int] = lambda ordinal: 1 + ordinal % 2
    updates: int = 1
    replicas: int = 1
    kills: int = 0
    crashes: int = 0
    snapshot_every: int = 1
    losses: int = 0
    evaluations: int = 0

    @functools.cached_property
    def config(self) -> RLConfig:
        return _config(
            self.schedule, self.staleness, self.steps, self.prompts, self.group_size
        )

    @property
    def overlaps(self) -> bool:
        return self.config.overlaps


@functools.cache
def _config(
    schedule: str, staleness: int, steps: int, prompts: int, group_size: int
) -> RLConfig:
    config = compose(
        "quickstart",
        [*SCHEDULES[schedule], f"rollout.staleness={staleness}", f"run.total_steps={steps}",
         f"data.prompts_per_step={prompts}", f"rollout.group_size={group_size}",
         "actor.mini_batch_size=null", "run.dir=/nowhere"],
    )  # fmt: skip
    assert isinstance(config, RLConfig)
    return config


# ------------------------------------------------------------------------------- inputs


class Source:
    """Prompts without end, as a `PromptSource` counts them."""

    def __init__(self) -> None:
        self.drawn = 0

    def next_batch(self, count: int) -> Prompts:
        ordinals = np.arange(self.drawn, self.drawn + count)
        self.drawn += count
        return prompts_of(ordinals)

    def state(self) -> dict[str, int | str]:
        epoch, position = divmod(self.drawn, 7)
        return {"rows": 7, "drawn": self.drawn, "epoch": epoch, "position": position}

    def load_state(self, state: Mapping[str, int | str]) -> None:
        self.drawn = drawn_rows(state)


def prompts_of(ordinals: Int64) -> Prompts:
    """Prompts of two tokens each."""
    count = len(ordinals)
    no_texts = Ragged(np.empty(0, np.uint8), np.zeros(count + 1, np.int64))
    return Prompts(
        offsets=2 * np.arange(count + 1),
        group_id=np.asarray(ordinals, np.int64),
        tokens=np.zeros(2 * count, np.int32),
        has_answer=np.ones(count, np.bool_),
        messages=no_texts,
        data_source=no_texts,
        answer=no_texts,
        extra=no_texts,
    )


def stored(batch: Any) -> Sharded[Any]:
    return Sharded.stored(batch, Receipt.of(batch))


class Waiting(Exception):
    """A step waits for rows of its groups."""


# --------------------------------------------------------------------------- generation


@dataclass
class _Piece:
    """A response that is generated and not scored."""

    chunk: Chunk
    buffer: RolloutBuffer | None
    """None for a row of an evaluation."""


class ScriptedProducer:
    """The place of `Producer`: replicas and graders that do what a test chooses.

    Attributes:
        sampled: Version of each token of each row, as the engines sampled them.
        paused: Whether open rows wait for new weights.
    """

    def __init__(self, scenario: Scenario, version: int) -> None:
        self._scenario = scenario
        self._version = version
        self.sampled: dict[int, list[int]] = {}
        self.paused = False
        self.pieces: list[_Piece] = []
        self._buffers: dict[int, RolloutBuffer | None] = {}
        self.given_up: set[int] = set()
        self._waiting: deque[int] = deque()
        self._replicas = [self._start() for _ in range(scenario.replicas)]
        self._open: list[set[int]] = [set() for _ in range(scenario.replicas)]

    def _start(self) -> ScriptedEngine:
        length, group_size = self._scenario.length, self._scenario.group_size

        def script(request: GenerationRequest) -> list[tuple[int, float]]:
            row = request.request_id
            tokens = 1 if row >= EVALUATED else length(row // group_size)
            return [(row % 97, -1.0)] * tokens

        return ScriptedEngine(script, initial_version=self._version)

    # What `Supply` calls.

    def training_generation(self) -> None: ...

    def begin(
        self,
        prompts: Prompts,
        _: None,
        buffer: RolloutBuffer,
        step: int,
        _failures: None,
    ) -> None:
        buffer.reserve(prompts.group_id)
        size = self._scenario.group_size
        for ordinal in prompts.group_id.tolist():
            # The step that learns from a batch is counted from 1.
            assert ordinal // self._scenario.prompts + 1 == step
            self._request(range(ordinal * size, (ordinal + 1) * size), buffer)

    def failures_of_batch(self, _: int, finished: Experience | None) -> None:
        assert finished is None or len(finished.rollouts)

    def take(
        self, ordinals: Int64, buffer: RolloutBuffer, version: int, _: Timers
    ) -> Experience:
        if buffer.missing(ordinals):
            raise Waiting
        return buffer.take(ordinals, version, self._never)

    @staticmethod
    def _never() -> None:
        raise AssertionError("nothing is missing")

    def evaluate(self) -> None:
        """Request two rows that are not learned from."""
        self._request(range(EVALUATED, EVALUATED + 2), None)

    def _request(self, rows: Sequence[int], buffer: RolloutBuffer | None) -> None:
        for row in rows:
            self._buffers[row] = buffer
            self._waiting.append(row)
        self.dispatch()

    @property
    def is_evaluating(self) -> bool:
        return any(row >= EVALUATED for row in self._buffers)

    @property
    def is_idle(self) -> bool:
        return not self._buffers

    # What replicas and graders do.

    def dispatch(self) -> None:
        """Give rows that wait to the replicas, which take none during a pause."""
        while self._waiting and not self.paused:
            row = self._waiting.popleft()
            place = row % len(self._replicas)
            tokens = np.array([0, 0], np.int32)
            self._replicas[place].submit([GenerationRequest(row, tokens, SAMPLING, 0)])
            self._open[place].add(row)
            self.sampled[row] = []

    @property
    def busy(self) -> list[int]:
        """Replicas that can go on."""
        return [
            place for place, rows in enumerate(self._open) if rows and not self.paused
        ]

    def advance_replica(self, place: int) -> None:
        """Sample one token of each of its rows."""
        engine = self._replicas[place]
        for row in self._open[place]:
            self.sampled[row].append(self._version)
        for chunk in engine.step():
            self._open[place].remove(chunk.request_id)
            self.pieces.append(_Piece(chunk, self._buffers[chunk.request_id]))

    def score(self, place: int) -> None:
        """Put a response into its buffer, where it is one to learn from."""
        piece = self.pieces.pop(place)
        row = piece.chunk.request_id
        del self._buffers[row]
        if piece.buffer is None:
            # An evaluation sees one version in each row.
            assert len(piece.chunk.version_spans) == 1
            assert set(self.sampled.pop(row)) == {self._version}
            return
        prompts = prompts_of(np.array([row // self._scenario.group_size]))
        rollouts = whole_rollouts(prompts, {row: 0}, [piece.chunk])
        scores = Scores.ok(np.array([row], np.float32))
        piece.buffer.put(Experience(stored(rollouts), {"reward": stored(scores)}))

    def lose(self, place: int) -> None:
        """Replace a replica; its open rows begin anew, before those that wait.

        The new one gets the version that the others have.
        """
        self._replicas[place] = self._start()
        self._waiting.extendleft(sorted(self._open[place], reverse=True))
        self._open[place] = set()
        self.dispatch()

    def pause(self, *, sleeps: bool = False) -> None:
        """Hold open rows where they are, if they may stay so."""
        mode = self._scenario.config.rollout.kv
        if mode is None:
            return
        self.paused = True
        for engine in self._replicas:
            engine.pause(mode)
            if sleeps:
                engine.sleep("kv_cache")

    def publish(self, version: int) -> None:
        """Bring a version to all replicas; they refuse it if a row is open and runs."""
        self.pause()
        for engine in self._replicas:
            engine.wake("kv_cache")
            engine.begin_update(Manifest(()), version)
            engine.commit({})
            engine.resume()
        self._version = version
        self.paused = False
        self.dispatch()

    # Comparison and copies.

    def key(self) -> object:
        """What the future depends on."""
        pieces = sorted(piece.chunk.request_id for piece in self.pieces)
        versions = sorted(
            (row, *self.sampled[row]) for row in self._buffers if row in self.sampled
        )
        opened = [sorted(rows) for rows in self._open]
        return repr((self.paused, pieces, versions, opened, list(self._waiting)))

    def shared(self) -> Iterator[object]:
        """What a copy need not have for itself."""
        for engine in self._replicas:
            yield engine._inbox
        for piece in self.pieces:
            yield piece.chunk


# ------------------------------------------------------------------------------ the run


@dataclass
class _Saved:
    """A finished step, as a checkpoint holds it, or a snapshot."""

    step: int
    state: str
    supply_memory: SupplyMemory
    groups: Experience | None
    sampled: dict[int, list[int]]
    trained: dict[int, object]


@dataclass
class Machine:
    """The driver of a run: a step, its publication and what comes between steps.

    Attributes:
        phase: take (a step waits for its groups), learn, drain (no row may be open),
            rest (between steps), evaluate, or end.
        step: Number of finished steps, which is the version of the policy.
        trained: Row ids and versions that each step learned from, over restarts.
        ever: The same for all processes of the run; steps that were made again must be
            equal where the schedule says so.
    """

    scenario: Scenario
    phase: str = "rest"
    step: int = 0
    kills: int = 0
    crashes: int = 0
    losses: int = 0
    evaluations: int = 0
    trained: dict[int, object] = field(default_factory=dict)
    ever: dict[int, object] = field(default_factory=dict)
    saved: _Saved | None = None
    committed: _Saved | None = None
    snapshot: _Saved | None = None
    supply: Supply = field(init=False)
    producer: ScriptedProducer = field(init=False)
    optimizer_steps: OptimizerSteps = field(init=False)
    taken: Experience | None = None

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Begin a process, from the checkpoint if there is one."""
        self._start(self.saved)
        if self.saved is not None and self.saved.groups is not None:
            self.supply.buffer.restore(self.saved.groups)
            self.supply.buffer.take_finished()
        self._go_on(self.saved)
        self.snapshot = None

    def _start(self, saved: _Saved | None) -> None:
        """Make everything that a process has, in the state after a step."""
        scenario = self.scenario
        self.step = 0 if saved is None else saved.step
        self.producer = ScriptedProducer(scenario, self.step)
        self.supply = Supply(
            scenario.config, cast(Any, Source()), cast(Any, self.producer)
        )
        self.optimizer_steps = OptimizerSteps(scenario.staleness, scenario.updates)
        self.trained = {}
        if saved is not None:
            state = json.loads(saved.state)
            self.supply.load_state(state["supply"])
            self.optimizer_steps.load_state(state["optimizer_steps"])
            self.producer.sampled = copy.deepcopy(saved.sampled)
            self.trained = dict(saved.trained)

    def _go_on(self, saved: _Saved | None) -> None:
        """Stand between two steps."""
        self.supply.begin(self.step)
        self.optimizer_steps.publish(self.step)
        self.committed = saved
        self.taken = None
        self.phase = "end" if self.step == self.scenario.steps else "rest"

    # Events.

    def events(self) -> list[Event]:
        """Return everything that can happen now; nothing at the end of the run."""
        if self.phase == "end":
            return []
        events = [("replica", place) for place in self.producer.busy]
        events += [("score", place) for place in range(len(self.producer.pieces))]
        if self.phase == "learn":
            events.append(("learned", 0))
        if self.phase == "rest":
            events.append(("next", 0))
            if self.committed is not self.saved:
                events.append(("save", 0))
            if self.evaluations < self.scenario.evaluations:
                events.append(("evaluate", 0))
        if self.losses < self.scenario.losses:
            events += [("lose", place) for place in range(self.scenario.replicas)]
        if self.crashes < self.scenario.crashes:
            events.append(("crash", 0))
        if self.kills < self.scenario.kills:
            events.append(("kill", 0))
            # An update that has begun is finished first.
            if self.phase not in ("learn", "drain"):
                events.append(("stop", 0))
        return events

    def apply(self, event: Event) -> None:
        """Let something happen, and what the driver then does at once."""
        name, place = event
        getattr(self, f"_{name}")(place)
        self._react()
        self._check()

    def _replica(self, place: int) -> None:
        self.producer.advance_replica(place)

    def _score(self, place: int) -> None:
        self.producer.score(place)

    def _lose(self, place: int) -> None:
        self.losses += 1
        self.producer.lose(place)

    def _next(self, _: int) -> None:
        self.phase = "take"

    def _evaluate(self, _: int) -> None:
        self.evaluations += 1
        self.supply.draw_ahead()
        self.producer.evaluate()
        self.phase = "evaluate"

    def _save(self, _: int) -> None:
        self.saved = self.committed
        self.supply.draw_ahead()

    def _kill(self, _: int) -> None:
        self.kills += 1
        self._begin()

    def _crash(self, _: int) -> None:
        """Go back to the snapshot, or else the checkpoint, in the same process."""
        self.crashes += 1
        snapshot = self.snapshot
        if snapshot is None:
            self._begin()
            return
        former, sampled = self.supply, self.producer.sampled
        self._start(snapshot)
        self.supply.inherit(former, snapshot.supply_memory)
        groups = self.supply.buffer.whole()
        if groups is not None:
            # Later versions are made again, and need not be the same policy.
            assert groups.rollouts.row("newest_version").max() <= snapshot.step
        # Rows of open groups are sampled again, from their first token.
        self.producer.sampled |= sampled
        self._go_on(snapshot)
        self._commit()

    def _stop(self, _: int) -> None:
        self.saved = self.committed
        self._kill(0)

    def _learned(self, _: int) -> None:
        """Learn from the groups: both bounds hold for every optimizer step."""
        assert self.taken is not None
        self._check_taken(self.taken)
        self.optimizer_steps.add(self.scenario.updates)
        self.step += 1
        self.supply.note_trained(self.step, self.supply._admission.oldest)
        self.taken = None
        self.phase = "drain"

    def _react(self) -> None:
        if self.phase == "take":
            try:
                self.taken = self.supply.take(self.step, Timers())
            except Waiting:
                return
            self.phase = "learn"
            if self.scenario.schedule == "carry_over":
                self.producer.pause(sleeps=True)
        is_between = self.scenario.config.rollout.updates == "between"
        if self.phase == "drain" and (self.producer.is_idle or not is_between):
            self._publish()
        if self.phase == "evaluate" and not self.producer.is_evaluating:
            self._commit()
            self.phase = "rest"

    def _publish(self) -> None:
        self.producer.publish(self.step)
        self.optimizer_steps.publish(self.step)
        self._commit()
        self.phase = "end" if self.step == self.scenario.steps else "rest"

    def _commit(self) -> None:
        if not self.step:
            return
        state = {
            "supply": self.supply.state(),
            "optimizer_steps": self.optimizer_steps.state(),
        }
        self.committed = _Saved(
            self.step,
            json.dumps(state),
            self.supply.supply_memory,
            self.supply.buffer.whole(),
            copy.deepcopy(self.producer.sampled),
            dict(self.trained),
        )
        if self.step % self.scenario.snapshot_every == 0:
            self.snapshot = self.committed

    # What must hold.

    def _check_taken(self, taken: Experience) -> None:
        scenario, batch = self.scenario, self.step
        rollouts = taken.rollouts.read(lambda parts: parts)
        assert isinstance(rollouts, Rollouts)
        first = batch * scenario.prompts * scenario.group_size
        rows = range(first, first + scenario.prompts * scenario.group_size)
        assert rollouts.row_id.tolist() == list(rows)

        # Spans say of each token what the engine sampled it with, over restarts too.
        versions = versions_of_tokens(rollouts)
        sampled = [version for row in rows for version in self.producer.sampled[row]]
        assert versions.tolist() == sampled
        assert batch - scenario.staleness <= versions.min() <= versions.max() <= batch
        is_named = batch not in self.supply.other_batches
        if scenario.config.rollout.updates == "between" and is_named:
            assert set(sampled) == {max(0, batch - scenario.staleness)}
            # What is learned again after a restart is the same.
            again = self.ever.setdefault(batch, sampled)
            assert sampled == again

        for update in range(scenario.updates):
            ages = self.optimizer_steps.ages(update)
            counts = ages.count(versions)
            assert sum(counts.values()) == len(sampled)
            oldest = max(ages.optimizer_steps[version] for version in counts)
            assert oldest == (batch - min(sampled)) * scenario.updates + update
            assert oldest <= scenario.staleness * scenario.updates + update
        assert batch + 1 not in self.trained
        self.trained[batch + 1] = list(rows)

    def _check(self) -> None:
        admission = self.supply._admission
        assert len(admission._open) <= self.scenario.staleness + 1
        assert sorted(self.trained) == list(range(1, self.step + 1))
        if self.phase != "end":
            assert self.events(), "nothing can happen, and the run has not ended"
            return
        if self.scenario.kills or self.scenario.crashes:
            assert not self.supply.other_batches
        ledger = self.supply.ledger.state()
        prompts = self.scenario.steps * self.scenario.prompts
        assert (ledger["frontier"], ledger["holes"], ledger["finished"]) == (
            prompts,
            [],
            [],
        )

    # Comparison and copies.

    def key(self) -> object:
        """What the future depends on; two machines with the same key have the same."""
        saved = self.saved and (self.saved.step, _key_of(self.saved.groups))
        committed = self.committed and (
            self.committed.step,
            _key_of(self.committed.groups),
        )
        snapshot = self.snapshot and self.snapshot.step
        taken = self.supply._taken
        ledger = self.supply.ledger.state()
        del ledger["restarts"]
        return repr(
            (self.phase, self.step, self.kills, self.crashes, self.losses, self.evaluations, saved,
             committed, snapshot, _key_of(taken), self.producer.key(), len(self.supply._admission._open),
             _key_of(self.supply.buffer.whole()), sorted(self.supply.buffer._missing.items()),
             sorted(self.supply.buffer._versions.items()), ledger)
        )  # fmt: skip

    def copy(self) -> Machine:
        """Return a machine that can go another way."""
        shared = [
            self.scenario,
            self.scenario.config,
            self.saved,
            self.committed,
            self.snapshot,
            self.taken,
            self.supply._taken,
        ]
        shared += [*self.supply.buffer._stored, *self.producer.shared()]
        return copy.deepcopy(self, {id(part): part for part in shared})


def _key_of(groups: Experience | None) -> object:
    if groups is None:
        return None
    columns = ("row_id", "oldest_version", "newest_version")
    return [groups.rollouts.row(name).tolist() for name in columns]


def explore(scenario: Scenario) -> int:
    """Go through every order of events, and return the number of states.

    A state is left out where one with the same future was there. From every state the
    end of the run can be reached.
    """
    first = Machine(scenario)
    states = {first.key(): 0}
    pending = deque([first])
    before: list[list[int]] = [[]]
    ends = []
    # Consumes one state per round, and adds those that follow from it. Ends when no
    # state is new.
    while pending:
        machine = pending.popleft()
        number = states[machine.key()]
        events = machine.events()
        if not events:
            ends.append(number)
        for event in events:
            following = machine.copy()
            following.apply(event)
            key = following.key()
            if key not in states:
                states[key] = len(before)
                before.append([])
                pending.append(following)
            before[states[key]].append(number)

    reaching = set(ends)
    while ends:
        for number in before[ends.pop()]:
            if number not in reaching:
                reaching.add(number)
                ends.append(number)
    assert len(reaching) == len(states), "some states never lead to the end of the run"
    return len(states)
