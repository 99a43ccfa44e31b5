"""Groups that training steps learn from: drawn, generated, scored, and kept in order.

Invariant: step n gets the groups of batch n - 1, whichever were finished first, and
each group once, over all restarts of the run. A checkpoint holds what is finished and
not trained yet. With rollout.updates=between batch n is of version n minus
rollout.staleness, except what a restart has to draw anew, which it says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from controllers.rollouts.admission import Admission
from controllers.rollouts.dynamic_sampling import DynamicAdmission
from controllers.rollouts.given_up import ENDS_REPLICAS
from controllers.rollouts.producer import Producer
from controllers.rollouts.score_failures import ScoreFailures
from controllers.rollouts.stored_groups import (
    FOLDER,
    REPLAY_FOLDER,
    Exchange,
    Replay,
    read_groups,
    usable_groups,
    warn_of_unusable,
    write_groups,
)
from controllers.watch.measures import Metrics
from controllers.watch.token_ages import queue_metrics
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Bool, Prompts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.curriculum import Curriculum
from verl_ray.data.cursor import CursorState, drawn_rows
from verl_ray.data.ledger import LEDGER, NO_SPREAD, Event, Ledger
from verl_ray.data.prompts import PromptSource
from verl_ray.errors import DataError, Interrupted
from verl_ray.profiling.phases import Timers
from verl_ray.rewards.shaping import Shaping, response_scores
from verl_ray.tracking.evaluations import digest
from workers.generation import Generation

REPLACED = "all scores of the group are equal; another one is replayed in its place"
"""Why the ledger rejects a group that replay has replaced."""

NOTHING_TO_LEARN = "no response is in the loss: aborted, without a score, or masked"
"""Why the ledger rejects a group that a step was to learn from."""


@dataclass(frozen=True, eq=False)
class SupplyMemory:
    """Memory of a supply that belongs to a state of it, in the same driver."""

    bookmark: int
    """That of the ledger."""
    groups: Experience | None
    """Finished groups that are not trained yet."""
    curriculum: Curriculum | None
    """A copy of it."""
    replay: Experience | None
    """Groups of earlier steps that may be replayed."""


@dataclass(frozen=True, eq=False)
class SupplyFiles:
    """The files of a state of a supply, as they were when this was made."""

    step: int
    """The step that the state is of."""
    ledger: Ledger
    groups: Experience | None
    """Finished groups that are not trained yet."""
    curriculum: Curriculum | None
    """A copy of it."""
    replay: Experience | None
    """Groups of earlier steps that may be replayed."""
    config: RLConfig

    def write(self, checkpoint: Path) -> None:
        """Write them to the folder of a checkpoint, and the ledger beside it."""
        self._write(checkpoint)
        self.ledger.write(self.step)

    def keep(self, snapshot: Path) -> None:
        """Write them to the folder of a snapshot, with events of the ledger."""
        self._write(snapshot)
        self.ledger.keep(snapshot, self.step)

    def _write(self, folder: Path) -> None:
        if self.groups is not None:
            write_groups(folder / FOLDER, self.groups, self.config)
        if self.replay is not None:
            write_groups(folder / REPLAY_FOLDER, self.replay, self.config)
        if self.curriculum is not None:
            self.curriculum.write(folder)


class Supply:
    """The groups of a run, from their prompts to the step that learns from them.

    Attributes:
        producer: What generates and scores them.
        buffer: Those that are not trained yet.
        ledger: The history of each ordinal.
        digests: A digest of each prompt that is drawn and not trained, by its ordinal.
            A prompt that is drawn again has the same. Empty unless
            `tracking.rollouts=sampled`.
    """

    def __init__(
        self, config: RLConfig, prompts: PromptSource, producer: Producer
    ) -> None:
        """Begin at the place of the source, without groups."""
        self._config = config
        self.producer = producer
        rollout = config.rollout
        self.buffer = RolloutBuffer(rollout.group_size, rollout.staleness)
        self.ledger = Ledger(Path(config.run.dir) / LEDGER)
        self._curriculum: Curriculum | None = None
        if config.data.curriculum.is_on:
            self._curriculum = Curriculum(
                config.data.curriculum,
                prompts.mixture.num_rows,
                seed=config.run.seed,
                staleness=rollout.staleness,
            )
        prompts.curriculum = self._curriculum
        self._admission = Admission(prompts, config)
        if config.algorithm.dynamic_sampling is not None:
            self._admission = DynamicAdmission(prompts, config, self._is_settled)
        self._replay: Replay | None = None
        if config.algorithm.replay is not None:
            self._replay = Replay(config)
        self._exchange: Exchange | None = None
        """What the present step learns from, with groups of earlier ones."""
        self._shaping = Shaping(config)
        self._failures: dict[int, ScoreFailures] = {}
        """Failed scores of the last batches of ordinals that were begun, by number."""
        self._metrics: Metrics = {}
        self._taken: Experience | None = None
        """Groups that the present step learns from."""
        self.digests: dict[int, str] = {}
        self._has_drawn = False
        self.other_batches: list[int] = []
        """Batches that a restart has left with other versions than those named."""

    def begin(self, done: int) -> None:
        """Begin behind `done` finished steps."""
        self._admission.begin(done)
        self._has_drawn = False
        self.other_batches = []

    def draw_ahead(self) -> None:
        """Draw prompts of later steps, of which a synchronous run has none.

        The step before is committed.
        """
        self._taken = None
        if self._config.rollout.staleness:
            self.draw()

    def draw(self) -> None:
        """Draw the prompts that may be drawn now, and begin to generate their groups.

        The replicas hold the policy that the last trained batch led to.
        """
        self._decide()
        generation = self.producer.training_generation()
        for step, batch in self._admission.draw():
            # Only the choice of rollouts that are recorded reads them.
            if self._config.tracking.rollouts == "sampled":
                self._note_digests(batch)
            # A resumed run has the groups that were finished before.
            is_finished = np.isin(batch.group_id, self.buffer.whole_groups)
            finished: Experience | None = None
            if is_finished.any():
                finished = self.buffer.whole(batch.group_id)
            prompts = batch.select(np.flatnonzero(~is_finished))
            if not self._has_drawn:
                self._note_other(step - 1, finished, is_whole=not prompts.num_rows)
            if prompts.num_rows:
                self.ledger.draw(prompts.group_id, self._admission.num_trained)
                self._begin(prompts, generation, step)
        if not self._has_drawn:
            self._has_drawn = True
            self._warn_of_other()

    def _note_digests(self, prompts: Prompts) -> None:
        """Note the digest of each prompt."""
        columns = zip(
            prompts.group_id.tolist(),
            prompts.messages.texts(),
            prompts.answer.texts(),
            strict=True,
        )
        for ordinal, messages, answer in columns:
            self.digests[ordinal] = digest(messages.encode(), answer.encode())

    def _begin(self, prompts: Prompts, generation: Generation, step: int) -> None:
        """Begin to generate groups.

        Failed scores are counted for each data.prompts_per_step ordinals, whenever they
        are drawn: a few groups that are drawn again say nothing about a grader.
        """
        batches = prompts.group_id // self._config.data.prompts_per_step
        known = self._failures
        self._failures = {
            batch: known.get(batch) or self._failures_of(batch)
            for batch in np.unique(batches).tolist()
        }
        for batch, failures in self._failures.items():
            part = prompts.select(np.flatnonzero(batches == batch))
            self.producer.begin(part, generation, self.buffer, step, failures)

    def _failures_of(self, batch: int) -> ScoreFailures:
        """Return the failed scores of a batch of ordinals that is begun.

        A resumed run knows those of the groups that it still has: what is learned from.
        """
        size = self._config.data.prompts_per_step
        ordinals = np.arange(batch * size, (batch + 1) * size)
        return self.producer.failures_of_batch(
            size * self._config.rollout.group_size, self.buffer.whole(ordinals)
        )

    def _decide(self) -> None:
        """Accept or reject the groups that have become whole."""
        whole = np.intersect1d(self.buffer.whole_groups, self._admission.undecided)
        if not len(whole):
            return
        groups = self.buffer.whole(whole)
        assert groups is not None, "whole groups are in the buffer"
        responses = groups.of_trajectories()
        scores = self._shaping.weigh(response_scores(responses.scores))
        ordinals = responses.rollouts.row("group_id")
        finish = responses.rollouts.row("finish")
        rejected = self._admission.decide(ordinals, scores, finish)
        if len(rejected):
            self._note_finished()
            self._note_scores(
                responses.select(np.flatnonzero(np.isin(ordinals, rejected)))
            )
            self._reject(rejected, NO_SPREAD)
            self.buffer.discard(rejected)

    def _is_full(self) -> bool:
        """Draw what is missing; return whether the next batch is full."""
        self.draw()
        return self._admission.is_full

    def _first_undecided(self) -> Int64:
        """Return the ordinal that is decided next; later ones cannot fill the batch."""
        return self._admission.undecided[:1]

    def take(self, policy_version: int, timers: Timers) -> Experience:
        """Return the scored groups of this step.

        Args:
            policy_version: The version that learns from the groups.
            timers: See `Producer.take`.
        """
        self.draw()
        if not self._admission.is_full:
            self.producer.advance_until(
                self._is_full, self._first_undecided, self.buffer, timers
            )
        self._taken = self.producer.take(
            self._admission.oldest, self.buffer, policy_version, timers
        )
        self._note_finished()
        self._refuse_other(self._taken)
        return self._taken

    def with_replayed(self, groups: Experience, policy_version: int) -> Experience:
        """Return the groups of this step, some of them exchanged for earlier ones.

        Args:
            groups: What `take` returned.
            policy_version: The version that learns from the groups.
        """
        if self._replay is None:
            return groups
        self._exchange = self._replay.exchange(groups, policy_version)
        return self._exchange.groups

    def note_trained(self, step: int, learned: Int64) -> None:
        """Note that `step` has learned from its groups.

        Args:
            step: Number of the step.
            learned: Ordinal of each response in the loss, int64 [responses]. Groups
                without one are rejected.
        """
        ordinals = self._admission.oldest
        if self._curriculum is not None:
            assert self._taken is not None, "the step has learned from groups"
            self._note_scores(self._taken)
            self._curriculum.end_batch(self._admission.num_trained)
        if self._exchange is not None:
            replaced = self._exchange.replaced
            self._reject(replaced, REPLACED)
            ordinals = np.setdiff1d(ordinals, replaced)
            self.ledger.replay(self._exchange.replayed, step)
            self._metrics["replay/groups"] = float(len(replaced))
        is_learned = np.isin(ordinals, learned)
        self.ledger.train(ordinals[is_learned], step)
        self._reject(ordinals[~is_learned], NOTHING_TO_LEARN)
        last = self._admission.oldest.max()
        self.digests = {
            ordinal: prompt_digest
            for ordinal, prompt_digest in self.digests.items()
            if ordinal > last
        }
        self._metrics |= self._admission.note_trained()

    def _note_scores(self, groups: Experience) -> None:
        """Note for the curriculum how whole groups were scored."""
        if self._curriculum is not None:
            groups = groups.of_trajectories()
            scores = self._shaping.weigh(response_scores(groups.scores))
            self._curriculum.note_scores(
                groups.rollouts.row("group_id"), scores.score, scores.ok
            )

    def _reject(self, ordinals: Int64, reason: str) -> None:
        """Note that groups are not trained, int64 [groups]."""
        is_given_up = np.isin(ordinals, list(self.producer.given_up))
        self.ledger.reject(ordinals[is_given_up], ENDS_REPLICAS)
        self.ledger.reject(ordinals[~is_given_up], reason)

    def _is_settled(self, ordinals: Int64) -> Bool:
        """Return which groups were trained or rejected, bool [groups]."""
        is_settled: Bool = self.ledger.last_events(ordinals) >= Event.TRAINED
        return is_settled

    def take_metrics(self) -> Metrics:
        """Return how groups waited, and what was drawn, since the last call.

        The place in the data is that behind what is trained.
        """
        place = self.place
        metrics = self._metrics | {
            "training/epoch": float(place["epoch"]),
            "training/records_passed_over": float(place.get("passed", 0)),
        }
        self._metrics = {}
        if self._curriculum is not None:
            metrics |= self._curriculum.metrics()
        return metrics | queue_metrics(self.buffer, self._config.rollout.staleness)

    @property
    def place(self) -> CursorState:
        """The place in the data behind what is trained."""
        return self._admission.state()

    def _note_finished(self) -> None:
        """Note in the ledger which groups were finished since the last call."""
        finished = self.buffer.take_finished()
        self.ledger.finish(finished.ordinals, finished.oldest, finished.newest)

    # ------------------------------------------------------------------- named versions

    def _named_version(self, batch: int) -> int | None:
        """Return the version that a batch, from 0, is sampled from; None if any may be.

        Weights that change under open rows, and groups that replace others, have none.
        Without staleness the buffer takes the present version alone.
        """
        rollout = self._config.rollout
        is_named = rollout.updates == "between" and rollout.staleness > 0
        if not is_named or self._config.algorithm.dynamic_sampling is not None:
            return None
        return max(0, batch - rollout.staleness)

    def _note_other(
        self, batch: int, finished: Experience | None, *, is_whole: bool
    ) -> None:
        """Note whether a batch that a restart draws is of the version that it names.

        Args:
            batch: Number of the batch, from 0.
            finished: Its groups that are here already.
            is_whole: Whether these are all of them, so that nothing is drawn.
        """
        versions = set() if is_whole else {self._admission.num_trained}
        if finished is not None:
            versions |= _versions_of(finished)
        named = self._named_version(batch)
        if named is not None and versions - {named}:
            self.other_batches.append(batch)

    def _warn_of_other(self) -> None:
        """Say on standard error which steps have other versions, if any has."""
        if self.other_batches:
            first, last = self.other_batches[0] + 1, self.other_batches[-1] + 1
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            print(
                f"warning: {steps} learn from responses of newer policy versions than"
                " in a run without this restart, which had not drawn them, or whose"
                " responses are generated anew; the bits differ from here on",
                file=sys.stderr,
                flush=True,
            )

    def _refuse_other(self, taken: Experience) -> None:
        """Refuse the groups of a step that are not of the version that they name.

        Raises:
            DataError: They are not, and no restart explains it.
        """
        batch = self._admission.num_trained
        named = self._named_version(batch)
        if named is None or batch in self.other_batches:
            return
        others = _versions_of(taken) - {named}
        if others:
            raise DataError(
                f"step {batch + 1} would learn from responses of policy version"
                f" {min(others)}; with rollout.updates=between they are of {named}"
            )

    # ------------------------------------------------------------------------- recovery

    def state(self) -> dict[str, Any]:
        """Return the driver's part of a checkpoint, as JSON."""
        self._note_finished()
        given_up = np.array(sorted(self.producer.given_up), np.int64)
        is_open = self.ledger.last_events(given_up) < Event.TRAINED
        return {
            "cursor": self._admission.state(),
            "trained": self._admission.num_trained,
            "ledger": self.ledger.state(),
            "given_up": given_up[is_open].tolist(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        cursor = state["cursor"]
        self._admission.load_state(cursor)
        # Earlier versions trained each prompt that they had drawn.
        prompts = self._config.data.prompts_per_step
        self._admission.begin(state.get("trained", drawn_rows(cursor) // prompts))
        # Earlier versions had no ledger; what they drew, they trained.
        before = {
            "frontier": drawn_rows(cursor),
            "holes": [],
            "finished": [],
            "restarts": 0,
        }
        self.ledger.load_state(state.get("ledger", before))
        self.producer.given_up.update(state.get("given_up", ()))

    @property
    def supply_memory(self) -> SupplyMemory:
        """Memory that belongs to the last state, for `inherit`."""
        curriculum = self._curriculum
        copied = None if curriculum is None else curriculum.copy()
        replay = None if self._replay is None else self._replay.groups
        return SupplyMemory(self.ledger.bookmark, self.buffer.whole(), copied, replay)

    def inherit(self, former: Supply, supply_memory: SupplyMemory) -> None:
        """Take over the history that a former supply has of its ordinals, and groups.

        This one has loaded a state of the other, after a step. Groups are finished,
        not trained, and of versions up to that step, so that the next steps learn from
        the same tokens as if these had been drawn again.

        Args:
            former: The other supply.
            supply_memory: Those of the state.
        """
        self.ledger.inherit(former.ledger, supply_memory.bookmark)
        self.producer.given_up.update(former.producer.given_up)
        if self._curriculum is not None and supply_memory.curriculum is not None:
            self._curriculum.restore(supply_memory.curriculum)
        if self._replay is not None:
            self._replay.groups = supply_memory.replay
        version = self._admission.num_trained
        for groups in (supply_memory.groups, former._taken, former.buffer.whole()):
            if groups is not None:
                self._take_back(groups, version)

        finished = self.buffer.take_finished()
        if not len(finished.ordinals):
            return
        # The state knows those that were finished before the step was.
        is_new = self.ledger.last_events(finished.ordinals) < Event.FINISHED
        self.ledger.draw(finished.ordinals[is_new], version)
        self.ledger.finish(
            finished.ordinals[is_new], finished.oldest[is_new], finished.newest[is_new]
        )

    def _take_back(self, groups: Experience, version: int) -> None:
        """Take back whole groups that are not here, with versions up to this one.

        Those whose batch may be too late for their tokens are drawn again.
        """
        ordinals = groups.rollouts.row("group_id")
        oldest = groups.rollouts.row("oldest_version")
        # Where groups are rejected no longer, later ones move to the next batch.
        first_version = self._admission.batches_of(ordinals) - self.buffer.staleness
        is_other = (oldest >= 0) & (oldest < first_version)
        is_other |= groups.rollouts.row("newest_version") > version
        others = np.union1d(ordinals[is_other], self.buffer.whole_groups)
        usable = groups.select(np.flatnonzero(~np.isin(ordinals, others)))
        if len(usable.rollouts):
            self.buffer.restore(usable)

    def files(self, step: int) -> SupplyFiles:
        """Return the ledger, untrained finished groups, and scores of rows.

        Args:
            step: The step that the last `state` is of.
        """
        curriculum = self._curriculum.copy() if self._curriculum is not None else None
        replay = self._replay.groups if self._replay is not None else None
        return SupplyFiles(
            step, self.ledger, self.buffer.whole(), curriculum, replay, self._config
        )

    def take_back(self, snapshot: Path) -> None:
        """Take back what `SupplyFiles.keep` wrote to the folder of a snapshot."""
        self.load_files(snapshot)
        self.ledger.take_back(snapshot)

    def load_files(self, checkpoint: Path) -> None:
        """Take back what `SupplyFiles` wrote to the folder of a checkpoint."""
        if self._curriculum is not None:
            self._curriculum.read(checkpoint)
        if self._replay is not None:
            self._replay.read(checkpoint)

        stored = read_groups(checkpoint / FOLDER)
        if stored is not None:
            ordinals = stored.groups.rollouts.row("group_id")
            oldest = self._admission.batches_of(ordinals) - self.buffer.staleness
            usable = usable_groups(stored, self._config, oldest)
            warn_of_unusable(stored, usable, self._config, "are generated anew")
            if len(usable.rollouts):
                self.buffer.restore(usable)
        # The ledger knows them already.
        self.buffer.take_finished()


def _versions_of(groups: Experience) -> set[int]:
    """Return the oldest and newest versions of the rows, where they have tokens."""
    has_tokens = groups.rollouts.row("response_length") > 0
    columns = [groups.rollouts.row(f"{end}_version") for end in ("oldest", "newest")]
    return {version for column in columns for version in column[has_tokens].tolist()}


# ------------------------------------------------------------------ between the steps


class RolloutsBetweenSteps:
    """Background work (`Background`) after a step has been committed."""

    def __init__(self, supply: Supply) -> None:
        """Take the supply of groups to learn from."""
        self._supply = supply
        self._failure: Exception | None = None

    def references(self) -> Sequence[Any]:
        """Return the references of pending pieces; none after a failure."""
        if self._failure is not None:
            return ()
        return self._supply.producer.references()

    def draw(self) -> None:
        """Draw the prompts of later steps that may be drawn."""
        self._attempt(self._supply.draw_ahead)

    def advance(self) -> None:
        """Pass on what is finished, and begin what comes next."""
        self._attempt(self._supply.producer.advance)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do some work, unless some has failed; remember its failure."""
        if self._failure is not None:
            return
        try:
            work()
        except Interrupted:
            raise
        except Exception as failure:
            self._failure = failure

    def raise_failure(self) -> None:
        """Raise the failure since the last call, if there is one."""
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure
