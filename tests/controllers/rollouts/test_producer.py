"""Rollouts and their scores: in order, by seed alone, and scored by the user's function."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controllers.rollouts.producer import Producer
from controllers.rollouts.score_failures import FailureHistory, ScoreFailures
from controllers.system.plan import plan_processes, resolve_on
from controllers.trainers.rl import Trainer
from controllers.watch.score_entries import read_entries
from tests.controllers import grader
from tests.controllers.conftest import MakeTrainer
from tests.controllers.runs import GRADER, SHAPE, Inputs, produced
from tests.rows import rollouts_of
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.waiting import TICK_S, put, read
from verl_ray.columns.batch import Ragged
from verl_ray.columns.stages import Finish, Prompts, Rollouts
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import RewardError
from verl_ray.profiling.phases import Timers
from verl_ray.rewards.health import Score, ScoreHealth
from workers.actor import ActorWorker
from workers.generation import Generation
from workers.reward import scores_of

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]


def scored(run: Trainer, generation: Generation) -> tuple[Rollouts, list[float]]:
    timers = Timers()
    experience = produced(run, 8, generation, timers)
    assert {"timing_s/gen", "timing_s/reward"} <= timers.take().keys()
    return read(experience.rollouts, 60), experience.scores["reward"].row(
        "score"
    ).tolist()


@pytest.fixture
def run(trainer: MakeTrainer) -> Trainer:
    found = trainer("ppo", "rollout.stream_rows=3")
    found.publish(7)
    return found


def test_a_batch_has_one_limit_of_failed_scores_over_restarts(
    trainer: MakeTrainer,
) -> None:
    """A quarter of a group may fail where few of the whole batch do."""
    run = trainer("ppo", "reward.max_failed_fraction=0.2")
    run.publish(7)
    producer, generation = run.producer, run.producer.training_generation()
    prompts = run.prompts.all(8).replace(data_source=Ragged.of_texts(["sometimes"] * 8))

    def begun(rows: Prompts, *finished: Experience) -> Experience:
        """All groups, of which these rows are generated and the others are there."""
        buffer = RolloutBuffer(4, staleness=0)
        for experience in finished:
            buffer.restore(experience)
        failures = producer.failures_of_batch(32, buffer.whole())
        producer.begin(rows, generation, buffer, 8, failures)
        return producer.take(prompts.group_id, buffer, 7, Timers())

    whole = begun(prompts)
    groups = whole.rollouts.row("group_id")
    health = whole.scores["reward"].row("health")
    (failed, *_) = groups[health != ScoreHealth.OK].tolist()
    others = whole.select(np.flatnonzero(groups != failed))
    rest = prompts.select(np.flatnonzero(prompts.group_id == failed))
    again = begun(rest, others)
    assert again.scores["reward"].row("health").tolist() == health.tolist()

    # An episode of two rows is one response. One that has failed has no tokens, and
    # counts; that of a prompt that was given up had no grader.
    rows = rollouts_of([2, 1, 0, 0], groups=[2, 2, 2, 3])
    rows = rows.replace(trajectory_id=np.array([8, 8, 9, 12]))
    ok, wrong = Score(1.0, ScoreHealth.OK), Score(math.nan, ScoreHealth.EXCEPTION)
    scores = {"reward": put(scores_of([ok, ok, wrong, wrong]))}
    earlier = Experience(put(rows), scores).of_trajectories()
    failures = ScoreFailures({"reward": 0.5}, 3, FailureHistory(), 60)
    failures.add_earlier(earlier, given_up={3})
    with pytest.raises(RewardError, match=r"2 of the first 3 .* \(exception 2\)"):
        failures.add(earlier.select([1]))

    # What a component leaves to another is no failure of it, but what all leave is.
    none = Score(math.nan, ScoreHealth.NONE, "the function returned None")
    mixed = Experience(
        put(rollouts_of([1, 1])),
        {"math": put(scores_of([none, none])), "code": put(scores_of([ok, none]))},
    )
    strict = ScoreFailures({"math": 0.0, "code": 0.0}, 2, FailureHistory(), 60)
    strict.add(mixed.select([0]))
    with pytest.raises(RewardError, match=r"math: 1 of the first 2 .* \(none 1\)"):
        strict.add(mixed.select([1]))

    # By itself the group is above the limit.
    alone = RolloutBuffer(4, staleness=0)
    producer.begin(rest, generation, alone, 8)
    with pytest.raises(RewardError, match=r"\d of the first \d scores failed"):
        producer.take(rest.group_id, alone, 7, Timers())


def test_training_rows_whose_scores_fail_do_not_fail_an_evaluation(
    run: Trainer,
) -> None:
    producer, prompts, timers = run.producer, run.prompts.all(8), Timers()
    to_learn, held_out = RolloutBuffer(4, staleness=0), RolloutBuffer(1, staleness=0)
    broken = prompts.replace(data_source=Ragged.of_texts(["broken"] * 8))
    producer.begin(broken, producer.training_generation(), to_learn, 8)
    producer.begin(prompts, producer.evaluation_generation(), held_out, 7)
    evaluated = producer.take(prompts.group_id, held_out, 7, timers)
    assert len(evaluated.rollouts) == 8
    producer.finish()
    # No checkpoint has any of them, so that they are scored anew.
    assert not len(to_learn.whole_groups) and to_learn.whole() is None
    with pytest.raises(RewardError, match=r"of the first .* scores failed"):
        producer.take(prompts.group_id, to_learn, 7, timers)


def test_rows_are_whole_and_in_the_order_of_their_ids(run: Trainer) -> None:
    rollouts, _ = scored(run, run.producer.training_generation())
    prompts = run.prompts.all(8)
    assert (
        rollouts.row_id.tolist() == rollouts.trajectory_id.tolist() == list(range(32))
    )
    assert rollouts.group_id.tolist() == np.repeat(np.arange(8), 4).tolist()
    assert rollouts.answer.texts() == [
        answer for answer in prompts.answer.texts() for _ in range(4)
    ]
    asked = rollouts.select(np.arange(0, 32, 4))
    assert asked.tokens[~asked.response_mask].tolist() == prompts.tokens.tolist()
    lengths = rollouts.prompt_length + rollouts.response_length
    assert lengths.tolist() == rollouts.lengths.tolist()
    assert (
        np.bincount(rollouts.row_of_token[rollouts.response_mask]).tolist()
        == rollouts.response_length.tolist()
    )
    assert (rollouts.rollout_log_probs[rollouts.response_mask] < 0).all()
    assert (rollouts.rollout_log_probs[~rollouts.response_mask] == 0).all()
    assert set(rollouts.version_spans.values[:, 1].tolist()) == {7}


def test_a_response_ends_with_the_end_token_or_at_the_limit(run: Trainer) -> None:
    rollouts, _ = scored(run, run.producer.training_generation())
    end = load_tokenizer(run.config.model.path).eos_token_id
    last = rollouts.tokens[rollouts.offsets[1:] - 1]
    assert (rollouts.finish == Finish.STOP).tolist() == (last == end).tolist()
    cut = rollouts.response_length[rollouts.finish == Finish.LENGTH]
    assert cut.tolist() == [6] * len(cut)
    assert 0 < len(cut) < 32


def test_a_text_ends_a_response_of_training_and_of_an_evaluation(
    run: Trainer, trainer: MakeTrainer
) -> None:
    stopping = trainer("ppo", 'rollout.stop=["1"]')
    stopping.publish(7)
    one = load_tokenizer(run.config.model.path).encode("1", add_special_tokens=False)
    assert len(one) == 1
    for name in ("training_generation", "evaluation_generation"):
        whole, _ = scored(run, getattr(run.producer, name)())
        cut, _ = scored(stopping, getattr(stopping.producer, name)())
        num_stopped = 0
        for row in range(whole.num_rows):
            tokens, finish = response_of(whole, row), whole.finish[row]
            if one[0] in tokens:
                # Its token stays, and the response has ended by itself.
                tokens, finish = tokens[: tokens.index(one[0]) + 1], Finish.STOP
                num_stopped += 1
            assert (response_of(cut, row), cut.finish[row]) == (tokens, finish)
        assert 0 < num_stopped < whole.num_rows


def test_every_response_is_scored_by_its_own_text(run: Trainer) -> None:
    rollouts, scores = scored(run, run.producer.training_generation())
    tokenizer = load_tokenizer(run.config.model.path)
    pieces = np.split(
        rollouts.tokens[rollouts.response_mask],
        np.cumsum(rollouts.response_length)[:-1],
    )
    texts = tokenizer.batch_decode(pieces, skip_special_tokens=True)
    assert scores == pytest.approx([grader.ones(text, "") for text in texts])
    assert len(set(scores)) > 2


def test_tokens_depend_on_the_seed_and_not_on_how_they_are_handed_on(
    run: Trainer, trainer: MakeTrainer
) -> None:
    first, _ = scored(run, run.producer.training_generation())
    other = trainer("ppo", "rollout.stream_rows=32")
    other.publish(7)
    assert (
        scored(other, other.producer.training_generation())[0].tokens.tolist()
        == first.tokens.tolist()
    )
    reseeded = trainer("ppo", "run.seed=1")
    reseeded.publish(7)
    assert (
        scored(reseeded, reseeded.producer.training_generation())[0].tokens.tolist()
        != first.tokens.tolist()
    )


def test_evaluation_has_settings_and_random_streams_of_its_own(
    run: Trainer, trainer: MakeTrainer
) -> None:
    greedy, _ = scored(run, run.producer.evaluation_generation())
    assert greedy.num_rows == 8
    assert (
        scored(run, run.producer.evaluation_generation())[0].tokens.tolist()
        == greedy.tokens.tolist()
    )
    sampled = trainer(
        "ppo",
        "run.evaluate_every=1",
        "evaluation.temperature=1",
        "evaluation.group_size=4",
    )
    sampled.publish(7)
    evaluated, _ = scored(sampled, sampled.producer.evaluation_generation())
    trained, _ = scored(sampled, sampled.producer.training_generation())
    assert evaluated.num_rows == trained.num_rows == 32
    assert evaluated.tokens.tolist() != trained.tokens.tolist()
    # Of one token, or of hardly any probability, nothing but the likeliest remains.
    for truncated in ("evaluation.top_k=1", "evaluation.top_p=1e-6"):
        narrow = trainer(
            "ppo", "run.evaluate_every=1", "evaluation.temperature=1", truncated
        )
        narrow.publish(7)
        likeliest, _ = scored(narrow, narrow.producer.evaluation_generation())
        assert likeliest.tokens.tolist() == greedy.tokens.tolist()


def test_the_last_response_of_a_group_is_greedy_for_remax(
    run: Trainer, trainer: MakeTrainer
) -> None:
    greedy, _ = scored(run, run.producer.evaluation_generation())
    remax = trainer(
        "grpo", "algorithm=remax", "rollout.group_size=3", "actor.mini_batch_size=null"
    )
    remax.publish(7)
    drawn, _ = scored(remax, remax.producer.training_generation())
    rows = [response_of(drawn, row) for row in range(24)]
    likeliest = [response_of(greedy, row) for row in range(8)]
    assert rows[2::3] == likeliest
    assert rows[0::3] != likeliest != rows[1::3]


def response_of(rollouts: Rollouts, row: int) -> list[int]:
    part = slice(*rollouts.offsets[row : row + 2])
    tokens: list[int] = rollouts.tokens[part][rollouts.response_mask[part]].tolist()
    return tokens


def test_generation_goes_on_while_models_are_waited_for(run: Trainer) -> None:
    expected, scores = scored(run, run.producer.training_generation())
    asked, buffer = run.prompts.all(8), RolloutBuffer(4, staleness=0)
    run.producer.begin(asked, run.producer.training_generation(), buffer, 8)
    while buffer.missing(asked.group_id):  # nobody but the learner waits
        run.learner._wait([run.system.actor.broadcast(ActorWorker.probe, 8, 1.0)])
    taken = buffer.take(
        asked.group_id, run.policy_version, lambda: pytest.fail("all of them are there")
    )
    assert read(taken.rollouts, 60).tokens.tolist() == expected.tokens.tolist()
    assert taken.scores["reward"].row("score").tolist() == scores
    # Only the end of the reply may be missing.
    while run.producer.references():
        run.producer.advance(TICK_S)


def test_a_batched_function_scores_whole_groups(
    run: Trainer, inputs: Inputs, tmp_path: Path
) -> None:
    function = f"reward.functions={{default: {GRADER}:ranked}}"
    # Pieces of three rows cut groups of four.
    config = inputs.config("ppo", tmp_path, "rollout.stream_rows=3", function)
    plan = plan_processes(resolve_on(config, SHAPE), SHAPE)
    role = plan.roles["reward"]
    sets = [
        replace(process_set, cpus_per_rank=0.25)
        for process_set in plan.sets
        if process_set.name == "reward"
    ]
    prompts = run.prompts.all(8)
    levelled = prompts.replace(extra=Ragged.of_texts(['{"level": 5}'] * 8))

    with start_groups(sets, [role], stall_s=240, log_dir=tmp_path / "logs") as groups:
        producer = Producer(config, run.replicas, {"reward": groups[role]})
        generation = producer.training_generation()
        buffer = RolloutBuffer(4, staleness=0)
        producer.begin(levelled, generation, buffer, 8)
        taken = producer.take(levelled.group_id, buffer, 7, Timers())
        ranks = taken.scores["reward"].row("score").reshape(8, 4)
        assert np.sort(ranks).tolist() == [[0.0, 1.0, 2.0, 3.0]] * 8
        entries = read_entries(taken.scores, 60)
    assert entries == [{"step": 8.0, "size": 9.0}] * 32
