"""Steps under each schedule, with real engines: ages, rows over an update, restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from controllers.trainers.rl import Trainer
from controllers.watch.measures import Metrics
from tests.columns.test_batch_files import bits
from tests.controllers.conftest import MakeTrainer
from tests.controllers.held_replica import HeldReplica
from tests.controllers.runs import Inputs, produced
from verl_ray.cluster.calls import wait_all
from verl_ray.cluster.waiting import TICK_S, read, wait
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Rollouts
from verl_ray.data.buffer import Experience
from verl_ray.data.ledger import Event
from verl_ray.data.token_versions import versions_of_tokens
from verl_ray.errors import DataError
from workers.actor import ActorWorker
from workers.rollout import RolloutWorker

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]

OFF = ("schedule=one_step_off", "placement=separate")
ASYNCHRONOUS = ("schedule=asynchronous", "placement=separate", "rollout.concurrency=4")


def begun(run: Trainer) -> Trainer:
    # An earlier test may have left rows open, which no weights may meet.
    for replica in run.replicas.available:
        replica.broadcast(RolloutWorker.pause, "abort").result()
        replica.broadcast(RolloutWorker.resume).result()
    run.begin(0)
    return run


def watched(run: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[Experience]:
    """What the steps of this trainer learn from, from now on."""
    taken: list[Experience] = []
    produce = run.produce

    def watching() -> Experience:
        taken.append(produce())
        return taken[-1]

    monkeypatch.setattr(run, "produce", watching)
    return taken


@contextmanager
def held_in_updates(run: Trainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each update meets open rows, which have tokens: of the last batch that is drawn.

    The trainers wait for that where the replicas would be paused.
    """
    (replica,) = run.replicas.available
    rollout = run.config.rollout

    def hold_after(version: int) -> None:
        first = 32 * (version + rollout.staleness)
        replica.broadcast(HeldReplica.hold, first, rollout.kv).result()

    takes_turns = rollout.schedule == "carry_over"
    name = "free_devices" if takes_turns else "sync_weights"
    go_on = getattr(run.replicas, name)

    def wait_and_go_on(*arguments: int) -> object:
        call = replica.broadcast(HeldReplica.wait_until_held)
        assert wait_all([call], None, run.background) == [[True]]
        # Before the rows of the next one can begin.
        hold_after(run.policy_version + 1)
        return go_on(*arguments)

    hold_after(run.policy_version)
    with monkeypatch.context() as patched:
        patched.setattr(run.replicas, name, wait_and_go_on)
        try:
            yield
        finally:
            replica.broadcast(HeldReplica.let_go).result()


def shares(metrics: Metrics) -> float:
    """What must add up to the whole step."""
    idle = metrics["perf/trainers_idle"] + metrics["perf/rollouts_idle"]
    return idle - metrics["perf/both_idle"] + metrics["perf/overlap"]


@pytest.mark.parametrize(
    ("algorithm", "staleness"), [("grpo", 1), ("grpo", 2), ("online_dpo", 1)]
)
def test_one_step_off_learns_from_the_version_that_the_ordinal_names(
    trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    staleness: int,
) -> None:
    """With several optimizer steps a training step."""
    run = begun(
        trainer(
            "grpo", *OFF, f"rollout.staleness={staleness}", "actor.mini_batch_size=16",
            f"algorithm={algorithm}",
        )
    )  # fmt: skip
    taken = watched(run, monkeypatch)
    for step in range(1, 5):
        metrics = run.step(step)
        rollouts = read(taken[-1].rollouts, 60)
        assert rollouts.row_id.tolist() == list(range(32 * step - 32, 32 * step))
        version = max(0, step - 1 - staleness)
        assert set(versions_of_tokens(rollouts).tolist()) == {version}
        age = step - 1 - version
        assert metrics["staleness/age_mean"] == metrics["staleness/age_max"] == age
        # Two updates per step, of which the second sees its tokens one older.
        assert metrics["staleness/optimizer_steps_max"] == 2 * age + 1
        assert metrics[f"staleness/share_of_age_{age}"] == 1
        assert metrics["staleness/rows_of_several_versions"] == 0
        # The newest batch has just been drawn, the others are whole but at first.
        least = 8 * (staleness - 1) if step > 1 else 0
        assert least <= metrics["staleness/groups_waiting"] <= 8 * staleness
        assert shares(metrics) == pytest.approx(1)
        # The mismatch of fresh tokens is that of two programs.
        assert ("staleness/fresh_kl" in metrics) == (age == 0)
        if not age:
            assert metrics["staleness/fresh_probs_diff_mean"] < 1e-5


def test_a_resumed_run_learns_from_the_groups_of_the_checkpoint(
    trainer: MakeTrainer,
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = begun(trainer("grpo", *OFF, f"run.dir={tmp_path}"))
    taken = watched(run, monkeypatch)
    for step in (1, 2):
        run.step(step)
    # Of the batch that is drawn between the steps, some groups are finished.
    run.draw_ahead()
    end = time.monotonic() + 120
    while len(run.supply.buffer.whole_groups) == 8:
        run.background.advance()
        assert time.monotonic() < end
    state, checkpoint = run.state(), tmp_path / "checkpoint"
    run.files(2).write(checkpoint)
    for step in (3, 4):
        run.step(step)

    resumed = trainer("grpo", *OFF, f"run.dir={tmp_path}")
    resumed.load_state(state)
    resumed.load_files(checkpoint)
    resumed.begin(2)
    again = watched(resumed, monkeypatch)
    assert len(resumed.supply.buffer.whole_groups) > 8
    for step in (3, 4):
        resumed.step(step)
    for was, now in zip(taken[2:], again, strict=True):
        assert bits(read(now.rollouts, 60)) == bits(read(was.rollouts, 60))
        for name, scores in was.scores.items():
            assert bits(read(now.scores[name], 60)) == bits(read(scores, 60))


FILLED = (
    "algorithm.dynamic_sampling=20", "rollout.group_size=2", "actor.mini_batch_size=null",
)  # fmt: skip


def spreads(experience: Experience) -> list[bool]:
    """Whether the two responses of each group have different scores."""
    score = experience.scores["reward"].row("score").reshape(-1, 2)
    return (score[:, 0] != score[:, 1]).tolist()


def test_a_filled_batch_has_the_same_bits_whatever_is_finished_first(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    batches = []
    for concurrency in (3, 8):
        changes = (
            f"rollout.concurrency={concurrency}",
            f"run.dir={tmp_path}/{concurrency}",
        )
        run = begun(trainer("grpo", *FILLED, *changes))
        for step in (1, 2):
            taken = run.produce()
            assert spreads(taken) == [True] * 8
            run.supply.note_trained(step, taken.rollouts.row("group_id"))
            batches.append(bits(read(taken.rollouts, 60)))
        assert run.supply.take_metrics()["dynamic_sampling/rejected"] > 0
    # The policy is the same in both runs.
    assert batches[:2] == batches[2:] and batches[0] != batches[1]


def test_batches_are_filled_while_a_step_learns(
    trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(trainer("grpo", *FILLED, *ASYNCHRONOUS, f"run.dir={tmp_path}"))
    taken = watched(run, monkeypatch)
    drawn = 0.0
    for step in range(1, 5):
        metrics = run.step(step)
        drawn += 8 + metrics["dynamic_sampling/rejected"]
        assert metrics["staleness/age_max"] <= 2
        assert spreads(taken[-1]) == [True] * 8
        run.draw_ahead()
    ordinals = np.concatenate([each.rollouts.row("group_id")[::2] for each in taken])
    assert (np.diff(ordinals) > 0).all() and drawn > len(ordinals) == 32
    # All before the last one are trained or rejected.
    settled = run.supply.ledger.last_events(np.arange(ordinals[-1] + 1))
    assert (settled == Event.TRAINED).all()


def log_probs_under(model: Path, rollouts: Rollouts) -> np.ndarray:
    """Log-probs of the response tokens by another program, float32 [tokens]."""
    policy = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    found = []
    for row in range(rollouts.num_rows):
        begin, end = rollouts.offsets[row : row + 2]
        tokens = torch.tensor(rollouts.tokens[begin:end], dtype=torch.int64)[None]
        with torch.no_grad():
            log_probs = policy(tokens).logits[0, :-1].log_softmax(-1)
        found.append(log_probs.gather(-1, tokens[0, 1:, None])[:, 0].numpy())
        # The first token has none.
        found[-1] = np.concatenate([[0], found[-1]])
    return np.concatenate(found)[rollouts.response_mask]


@pytest.mark.parametrize(
    "settings",
    [ASYNCHRONOUS, (*ASYNCHRONOUS, "rollout.kv=keep"), ("schedule=carry_over", "rollout.concurrency=4")],
    ids=["recompute", "keep", "carry_over"],
)  # fmt: skip
def test_a_row_over_several_versions_has_each_tokens_own(
    trainer: MakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
) -> None:
    """A token's log-prob is that of its version, given all tokens before it.

    Over a cache that stays, that holds up to the first change of the weights.
    """
    run = begun(trainer("grpo", *settings))
    taken = watched(run, monkeypatch)
    staleness = run.config.rollout.staleness
    over_updates: list[Rollouts] = []
    with held_in_updates(run, monkeypatch):
        for step in range(1, staleness + 3):
            model = str(tmp_path / f"version {step - 1}")
            run.system.actor.broadcast(ActorWorker.export, model).result()
            metrics = run.step(step)
            rollouts = read(taken[-1].rollouts, 60)
            changed = check_versions(rollouts, step, staleness, metrics)
            # Those that were held in the first update come after as many steps.
            assert len(changed) if step > staleness else not len(changed)
            if len(changed):
                over_updates.append(rollouts.select(changed))

    apart: list[float] = []
    for rollouts in over_updates:
        versions = versions_of_tokens(rollouts)
        sampled = rollouts.rollout_log_probs[rollouts.response_mask]
        row = rollouts.row_of_token[rollouts.response_mask]
        for version in np.unique(versions).tolist():
            expected = log_probs_under(tmp_path / f"version {version}", rollouts)
            difference = np.abs(expected - sampled)
            is_own = versions == version
            apart.append(float(difference[~is_own].max()))
            if run.config.rollout.kv == "keep":
                is_own &= rollouts.oldest_version[row] == version
            assert difference[is_own].max(initial=0) < 1e-4
    # Another version has other log-probs.
    assert max(apart) > 1e-3

    # An evaluation comes between open rows, and sees one version.
    evaluated = produced(run, 8, run.producer.evaluation_generation())
    spans = read(evaluated.rollouts, 60).version_spans
    assert np.diff(spans.offsets).tolist() == [1] * len(spans)
    assert set(spans.values[:, 1].tolist()) == {step}


def test_paused_replicas_hand_over_what_they_had_finished(
    trainer: MakeTrainer,
) -> None:
    """Otherwise the wait for the trainers would find it ready for ever."""
    settings = ("schedule=carry_over", "rollout.concurrency=4", "rollout.stream_rows=1")
    run = begun(trainer("grpo", *settings))
    replicas = run.replicas
    generation = run.producer.training_generation()
    job = replicas.scheduler.open(run.prompts.all(8), generation)
    replicas.advance()
    assert wait(replicas.references(), 1, 60)

    replicas.free_devices()
    replicas.device_sharing.switch_to("training")
    end = time.monotonic() + 60
    while wait(replicas.references(), 1, 0.2):
        replicas.advance()
        assert time.monotonic() < end
    assert 0 < job.num_pending < 32

    replicas.sync_weights(1)
    while job.num_pending:
        replicas.advance(TICK_S)
    assert sum(map(len, job.finished)) == 32


def test_rollouts_go_on_between_steps(trainer: MakeTrainer) -> None:
    """While a step is evaluated and saved, the next batches are generated."""
    run = begun(trainer("grpo", *ASYNCHRONOUS, "rollout.staleness=1"))
    run.step(1)
    run.draw_ahead()
    end = time.monotonic() + 120
    while len(run.supply.buffer.whole_groups) < 16:
        run.background.advance()
        wait(run.background.references(), 1, TICK_S)
        assert time.monotonic() < end
    assert run.supply.buffer.whole_groups.tolist() == list(range(8, 24))

    # A synchronous run has nothing to do then.
    run = begun(trainer("grpo"))
    metrics = run.step(1)
    run.draw_ahead()
    # Streams whose last responses the step has may have to be read to their ends.
    end = time.monotonic() + 60
    while references := run.background.references():
        wait(references, 1, TICK_S)
        run.background.advance()
        assert time.monotonic() < end
    assert not len(run.supply.buffer.whole_groups)
    # Both pools work for a part of the step; test_occupancy.py checks the shares.
    shares = [metrics[f"perf/{name}"] for name in ("trainers_idle", "rollouts_idle")]
    assert all(0 < share < 1 for share in shares)
    both = metrics["perf/both_idle"] - metrics["perf/overlap"]
    assert sum(shares) == pytest.approx(1 + both)
    assert metrics["timing_s/rollouts"] > 0


def test_a_failure_between_steps_is_the_next_ones(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is written meanwhile does not fail."""

    def fail(*_: object) -> None:
        raise DataError("the file has changed")

    run = begun(trainer("grpo", *OFF))
    run.step(1)
    with monkeypatch.context() as patched:
        patched.setattr(run.prompts, "next_batch", fail)
        run.draw_ahead()
    with pytest.raises(DataError, match="the file has changed"):
        run.step(2)

    run = begun(trainer("grpo", *OFF))
    run.step(1)
    with monkeypatch.context() as patched:
        patched.setattr(run.replicas, "advance", fail)
        run.background.advance()
        patched.setattr(run.replicas, "advance", pytest.fail)
        run.background.advance()
        assert not run.background.references()
    with pytest.raises(DataError, match="the file has changed"):
        run.step(2)


def check_versions(
    rollouts: Rollouts, step: int, staleness: int, metrics: Metrics
) -> Int64:
    """Return the rows over which the weights changed."""
    assert rollouts.row_id.tolist() == list(range(32 * step - 32, 32 * step))
    versions = versions_of_tokens(rollouts)
    assert step - 1 - staleness <= versions.min() <= versions.max() <= step - 1

    # Spans partition the responses, each with another version than the one before.
    spans = rollouts.version_spans
    assert (
        spans.values[spans.offsets[:-1], 0].tolist() == rollouts.prompt_length.tolist()
    )
    row_of_span = np.repeat(np.arange(rollouts.num_rows), np.diff(spans.offsets))
    within = np.diff(row_of_span) == 0
    assert (np.diff(spans.values[:, 0])[within] > 0).all()
    assert (np.diff(spans.values[:, 1])[within] > 0).all()
    assert (spans.values[:, 0] < rollouts.lengths[row_of_span]).all()

    changed = np.flatnonzero(rollouts.oldest_version != rollouts.newest_version)
    assert metrics["staleness/rows_of_several_versions"] == len(changed) / 32
    ages = np.bincount(step - 1 - versions, minlength=staleness + 1) / len(versions)
    for age, share in enumerate(ages.tolist()):
        assert metrics[f"staleness/share_of_age_{age}"] == pytest.approx(share)
    assert metrics["staleness/age_max"] == step - 1 - versions.min()
    assert shares(metrics) == pytest.approx(1)
    return changed
