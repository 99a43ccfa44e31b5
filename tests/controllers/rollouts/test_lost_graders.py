"""Graders that die, stop or run out of memory start again, and nothing else does.

Each row gets its score, the same one, whatever happens to what scores it.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from controllers.rollouts.producer import Producer
from controllers.run.faults import FAULTS, FaultPolicy
from controllers.trainers.rl import Trainer
from tests.cluster.crew import hasten, processes
from tests.controllers.conftest import MakeTrainer
from tests.controllers.rollouts.frail import SCORED, FrailGrader
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.processes import Role
from verl_ray.cluster.restarts import InPlaceRestarts
from verl_ray.cluster.session import Session
from verl_ray.config.run import RecoveryConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.errors import VerlRayError, WorkerDied, WorkerError
from verl_ray.profiling.phases import Timers
from workers.actor import ActorWorker
from workers.generation import Generation

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]

ROWS = 32
STALL_S = 2.0


@pytest.fixture(scope="module")
def run(trainer: MakeTrainer) -> Trainer:
    found = trainer("ppo", "rollout.stream_rows=3")
    found.publish(7)
    return found


@pytest.fixture(scope="module")
def frail(
    cluster: Session, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[WorkerGroup[FrailGrader], Path]]:
    """Two ranks, which live and die together, and the folder with their orders."""
    folder = tmp_path_factory.mktemp("frail")
    role = Role("reward", "reward", FrailGrader, (folder,))
    sets = [processes("reward", 2, cpus=0.1)]
    with start_groups(sets, [role], stall_s=60, log_dir=folder / "logs") as groups:
        yield groups[role], folder


class Scoring:
    """Batches that the frail grader scores."""

    def __init__(
        self, run: Trainer, group: WorkerGroup[FrailGrader], folder: Path
    ) -> None:
        self.group, self.folder = group, folder
        self._first = group.incarnation
        recovery = RecoveryConfig(
            enabled=True,
            max_restarts=2,
            max_wait_s=60,
            snapshot_every=0,
            snapshot_copies=1,
        )
        self.policy = FaultPolicy(recovery, folder)
        self.restarts = InPlaceRestarts(self._may_restart)
        self.restarts.own([group])
        self._run = run
        self.producer = Producer(
            run.config, run.replicas, {"reward": group}, self.restarts
        )

    def _may_restart(self, failure: VerlRayError, step: int) -> bool:
        return self.policy.may_restart(failure, step)

    def fails(self, row: int, how: str) -> None:
        (self.folder / str(row)).write_text(how)

    def hasten_calls_once_begun(
        self, row: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Let the first processes be late soon once they have come to a row."""
        check = self.restarts.check

        def hastened(calls: Sequence[Call[Any]], step: int) -> None:
            if not self.losses and not (self.folder / str(row)).exists():
                for call in calls:
                    hasten(call, STALL_S)
            check(calls, step)

        monkeypatch.setattr(self.restarts, "check", hastened)

    def experience(self, generation: Generation, step: int = 8) -> Experience:
        prompts = self._run.prompts.all(8)
        buffer = RolloutBuffer(generation.group_size, staleness=0)
        self.producer.begin(prompts, generation, buffer, step)
        return self.producer.take(prompts.group_id, buffer, 7, Timers())

    @property
    def losses(self) -> int:
        """How often the graders have started again."""
        return self.group.incarnation - self._first

    @property
    def begun(self) -> Counter[int]:
        """How often each row was given to a grader."""
        lines = (self.folder / SCORED).read_text().split()
        return Counter(int(line) for line in lines)

    @property
    def recorded(self) -> list[dict[str, object]]:
        record = self.folder / FAULTS
        lines = record.read_text().splitlines() if record.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture
def scoring(
    run: Trainer, frail: tuple[WorkerGroup[FrailGrader], Path]
) -> Iterator[Scoring]:
    group, folder = frail
    # What earlier tests have left.
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()
    if group.has_failed:
        group.restart().wait()

    found = Scoring(run, group, folder)
    yield found
    found.restarts.close()


@pytest.mark.parametrize(
    ("how", "kind"),
    [("kill", "died"), ("freeze", "stalled"), ("MemoryError", "exhausted")],
)
def test_pending_scores_of_a_lost_grader_are_asked_for_again(
    scoring: Scoring,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    kind: str,
) -> None:
    scoring.fails(13, how)
    if how == "freeze":
        scoring.hasten_calls_once_begun(13, monkeypatch)
    generation = scoring.producer.training_generation()
    experience = scoring.experience(generation)

    rows = experience.rollouts.row("row_id")
    assert rows.tolist() == list(range(ROWS))
    assert experience.scores["reward"].row("score").tolist() == (rows / 2).tolist()
    assert scoring.losses == 1
    assert scoring.restarts.is_available(scoring.group)
    # Nothing is asked for a third time.
    assert set(scoring.begun) == set(range(ROWS))
    assert max(scoring.begun.values()) == scoring.begun[13] == 2

    (fault,) = scoring.recorded
    assert (fault["role"], fault["kind"], fault["step"], fault["cure"]) == (
        "reward", kind, 8, "restart",
    )  # fmt: skip
    warned = capsys.readouterr().err
    assert re.search(
        r"warning: reward rank \d on .*It starts again, and its pending requests are"
        r" sent again \(failure 1 of at most 2 without a new step\)",
        warned,
    )
    assert "goes back" not in warned


def test_an_evaluation_and_a_later_step_lose_their_grader_too(
    scoring: Scoring,
) -> None:
    scoring.fails(5, "kill")
    scored = scoring.experience(scoring.producer.evaluation_generation(), step=7)
    assert scored.rollouts.row("row_id").tolist() == list(range(8))
    assert scored.scores["reward"].row("score").tolist() == [r / 2 for r in range(8)]
    (fault,) = scoring.recorded
    assert (fault["step"], fault["cure"]) == (7, "restart")

    # A later step has a new count, and another failure.
    scoring.policy.note_finished(8)
    scoring.fails(6, "kill")
    scoring.experience(scoring.producer.training_generation(), step=9)
    assert [fault["step"] for fault in scoring.recorded] == [7, 9]
    assert scoring.losses == 2


def test_a_grader_that_is_lost_before_it_is_needed_starts_again(
    scoring: Scoring, run: Trainer
) -> None:
    prompts = run.prompts.all(8)
    buffer = RolloutBuffer(4, staleness=0)
    generation = scoring.producer.training_generation()
    scoring.producer.begin(prompts, generation, buffer, 8)
    process_info = scoring.group.members()[1].process_info
    assert process_info is not None
    os.kill(process_info.pid, signal.SIGKILL)
    # Nothing is given to it, and whoever waits for others goes on.
    while not scoring.recorded:
        run.system.actor.broadcast(ActorWorker.probe, 8, 1.0).result()
        scoring.producer._check_graders()
    assert "while no call of it was waited for" in str(scoring.recorded[0]["cause"])
    experience = scoring.producer.take(prompts.group_id, buffer, 7, Timers())
    assert len(experience.rollouts) == ROWS and scoring.losses == 1


def test_rows_that_always_kill_their_grader_stop_the_run(scoring: Scoring) -> None:
    scoring.fails(13, "kill always")
    with pytest.raises(WorkerDied, match="the process died during score") as caught:
        scoring.experience(scoring.producer.training_generation())
    # They may come to another grader next, but to one of them a second time.
    ranks = [fault["rank"] for fault in scoring.recorded]
    assert ranks and len(set(ranks)) == len(ranks)
    assert {fault["cure"] for fault in scoring.recorded} == {"restart"}
    # The loop asks the same table what follows, which records it.
    assert scoring.policy.cure_of(caught.value, 8) == "stop"
    assert scoring.recorded[-1]["cure"] == "stop"
    assert scoring.recorded[-1]["rank"] in ranks
    assert "second time at step 8" in caught.value.__notes__[0]


def test_a_mistake_of_a_grader_is_not_tried_again(scoring: Scoring) -> None:
    scoring.fails(13, "mistake")
    with pytest.raises(WorkerError, match="score raised ValueError: mistake"):
        scoring.experience(scoring.producer.training_generation())
    assert scoring.losses == 0
    assert scoring.recorded == []
