"""Episodes as rows of a batch, and what is asked of their ends."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from controllers.rollouts import score_failures
from controllers.watch import measures, rollout_record, score_entries
from controllers.watch.rollout_record import ends_of_rows
from scripts.configuration import compose
from tests.controllers.watch.test_measures import held
from tests.controllers.watch.test_rollout_record import INPUTS
from tests.learning.test_credit import algorithm, rewarded
from tests.rows import rewards_of, values_of
from tests.workers.test_rollout import prompts
from verl_ray.agents.contract import (
    TREATMENTS,
    End,
    Episode,
    EpisodeRow,
    Treatment,
)
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.columns.stages import NO_EPISODE, Finish, Rollouts, last_rows
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.learning.credit import token_credit
from verl_ray.rewards.arguments import GroupLog, group_values, response_values
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.remote import RequestBatch
from verl_ray.rewards.request import ScoreRequest
from verl_ray.rewards.shaping import failures, response_scores
from verl_ray.rewards.signatures import signature_of
from verl_ray.rollout.requests import Chunk
from verl_ray.tracking.block import failed_scores
from verl_ray.tracking.rollouts import recorded_rollouts
from workers.episodes import ROW_IDS, beside_episodes, episode_rollouts
from workers.reward import (
    requests_of,
    scores_of,
    scores_without_grader,
    with_recorded_metrics,
)
from workers.rollout import whole_rollouts


def row_of(context: int, sampled: int, *, reward: float, turn: int = 0) -> EpisodeRow:
    """A row of one turn."""
    count = context + sampled
    mask = [False] * context + [True] * sampled
    paid = [(count - 1, reward)]
    return EpisodeRow([1] * count, mask, [0.0] * count, [(context, 4)], paid, [turn])


def rows_of(*episodes: Episode) -> Rollouts:
    """The rows of episodes 6 and on, all about the first prompt."""
    numbered = list(enumerate(episodes, start=6))
    prompt_of = dict.fromkeys(range(6, 6 + len(episodes)), 0)
    return episode_rollouts(prompts(), prompt_of, numbered, TREATMENTS)


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "1+"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "ask"}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "right"},
]


def two_rows(end: End) -> Episode:
    """An episode of two rows, whose turns were cut by agent.max_turn_tokens."""
    rows = [
        row_of(2, 2, reward=0.5),
        row_of(3, 1, reward=0.5, turn=1),
    ]
    conversations = [MESSAGES]
    return Episode(
        rows, end, 1.0, num_turns=2, conversations=conversations, response="3"
    )


def test_an_episode_is_cut_by_what_ends_it_and_not_by_what_ends_a_turn() -> None:
    rows = rows_of(
        two_rows(End.MAX_TURNS), two_rows(End.COMPLETED), two_rows(End.TOOL_TIMEOUT)
    )
    assert rows.trajectory_id.tolist() == [6, 6, 7, 7, 8]
    assert rows.row_id.tolist() == [
        6 * ROW_IDS, 6 * ROW_IDS + 1, 7 * ROW_IDS, 7 * ROW_IDS + 1, 8 * ROW_IDS
    ]  # fmt: skip
    cut, stop = Finish.LENGTH, Finish.STOP
    assert rows.finish.tolist() == [cut, cut, stop, stop, Finish.ABORTED]
    assert rows.episode_score is not None
    assert rows.episode_score.tolist() == [0, 1, 0, 1, 1]

    # So does what is left out of the loss, and of the groups.
    score = [0.0, 4.0, 0.0, 2.0, float("nan")]
    for truncated, learned, advantage in (
        ("score", [1, 1, 1, 1, 0], [1, 1, -1, -1, 0]),
        ("mask", [0, 0, 1, 1, 0], [1, 1, -1, -1, 0]),
        ("drop", [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]),
    ):
        found = rewarded(algorithm("dr_grpo", truncated=truncated), rows, score)
        assert found.in_loss.tolist() == learned
        assert found.advantage.tolist() == advantage

    # The value behind the last row of what was cut is what the rest is worth.
    values = values_of(rows, [0.0] * 6, [8.0, 4.0, 8.0, 4.0, 8.0])
    bootstrapped = algorithm("gae", gamma=1.0, lam=1.0, truncated="bootstrap")
    paid = rewards_of([0.0, 1.0, 0.0, 1.0, 0.0])
    credit = token_credit(bootstrapped, 0.0, rows, paid, None, None, values)
    # Each turn pays 0.5.
    assert credit.advantages[rows.response_mask].tolist() == [5, 5, 4.5, 1, 1, 0.5]


def test_an_episode_that_is_dropped_by_choice_has_no_score() -> None:
    treatments = {**TREATMENTS, End.MAX_TURNS: Treatment.DROP}
    ends = (End.COMPLETED, End.MAX_TURNS, End.ABORTED, End.TOOL_TIMEOUT)
    numbered = list(enumerate(map(two_rows, ends), start=6))
    prompt_of = dict.fromkeys(range(6, 10), 0)
    rows = episode_rollouts(prompts(), prompt_of, numbered, treatments)
    assert rows.trajectory_id.tolist() == [6, 6, 7, 8, 9]

    known = scores_without_grader(rows)
    assert {row: score.health.name for row, score in known.items()} == {
        0: "OK", 2: "DROPPED", 3: "DROPPED", 4: "TIMEOUT",
    }  # fmt: skip
    assert math.isnan(known[2].value)
    # The row of the first episode has a grader.
    known[1] = Score(0.5, ScoreHealth.OK)
    scores = scores_of([known[row] for row in last_rows(rows.trajectory_id)])
    raw = response_scores({"a": held(scores), "b": held(scores)})

    aborted = rows.finish[last_rows(rows.trajectory_id)] == Finish.ABORTED
    found = score_entries.score_metrics(raw["a"], raw, aborted)
    counts = {
        name: count for name, count in found.items() if "health/" in name and count
    }
    assert counts == {
        "reward_health/ok": 1, "reward_health/dropped": 2, "reward_health/timeout": 1,
    }  # fmt: skip
    assert found["critic/score/mean"] == found["reward/a/mean"] == 0.5
    # Only the fault is a failure, and counts against max_failed_fraction.
    assert found["reward/a/failed"] == 1 and found["reward/a/none"] == 0
    failed = failures({role: scores.health for role, scores in raw.items()})
    assert failed["a"].tolist() == [False, False, False, True]
    assert failed_scores(found) == "50% of rewards failed (timeout 1)"


def test_environments_that_stop_a_run_are_named_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the frames of the most frequent failure, whatever its messages name."""
    for module in (score_failures, rollout_record):
        monkeypatch.setattr(module, "read", lambda rows, _: rows.read(lambda own: own))
    frames = [f'Traceback ...\n  File "{tmp_path}/maze.py", line {n}' for n in (3, 8)]
    failed = [
        Episode([], End.TOOL_TIMEOUT, 0.0, ""),
        *(
            Episode([], End.ENVIRONMENT_FAILED, 0.0, f"{frames[which]}\nKeyError: {n}")
            for n, which in enumerate((0, 1, 1))
        ),
    ]
    rows = rows_of(two_rows(End.COMPLETED), *failed)
    known = scores_without_grader(rows)
    known[1] = Score(0.5, ScoreHealth.OK)
    scores = scores_of([known[row] for row in range(rows.num_rows)])
    experience = Experience(stored(rows), {"reward": stored(scores)})

    history, environments = score_failures.FailureHistory(), ["default", "other"]
    watched = score_failures.ScoreFailures(
        {"reward": 0.5}, 7, history, 60, environments=environments
    )
    watched.add(experience.select(np.array([0, 1, 2, 3, 4])))
    with pytest.raises(score_failures.TooManyFailures) as stop:
        watched.add(experience.select(np.array([5])))
    words = str(stop.value)
    assert "4 of the first 5 scores failed (timeout 1, exception 3)" in words
    assert (
        " Episodes ended: 3 in agent.environments.default as environment_failed, 1 in"
        " agent.environments.default as tool_timeout. Correct the environment, or raise the"
        " limit. The most frequent failure (2 of 4): environment_failed: Traceback"
    ) in words
    assert words.endswith(f"{frames[1]}\nKeyError: 1")

    # Only a score that no environment is to blame for.
    own = [
        replace(
            known[1], health=ScoreHealth.EXCEPTION, detail="no number", value=math.nan
        )
    ]
    alone = experience.select(np.array([1]))
    alone = Experience(alone.rollouts, {"reward": stored(scores_of(own))})
    watched = score_failures.ScoreFailures(
        {"reward": 0.5}, 1, history, 60, environments=environments
    )
    with pytest.raises(
        score_failures.TooManyFailures, match=r"1 responses\. Correct what scores"
    ):
        watched.add(alone)

    # What has failed is kept, also where other steps are kept no longer.
    config = compose("grpo", [*INPUTS, f"run.dir={tmp_path}"])
    assert isinstance(config, RLConfig)
    record = rollout_record.RolloutRecord(
        config, character_tokenizer(tmp_path, "0123456789+=")
    )
    record._files.every = 2
    record.write_failed(1, stop.value.failed)
    lines = pyarrow.parquet.read_table(recorded_rollouts(tmp_path)[1]).to_pylist()
    assert [(line["step"], line["end"]) for line in lines] == [
        (1, "tool_timeout"), *[(1, "environment_failed")] * 3,
    ]  # fmt: skip
    assert all(
        frames[which] in lines[n]["failure"] for n, which in ((1, 0), (2, 1), (3, 1))
    )
    for line in lines:
        assert line["reward"] is line["advantage"] is None
        assert set(line["advantages"]) == {None}


def stored(batch: Any) -> Sharded[Any]:
    """A batch that is its own reference."""
    return Sharded.stored(batch, Receipt.of(batch))


def test_lengths_and_ends_are_those_of_episodes() -> None:
    rows = rows_of(two_rows(End.MAX_TURNS), two_rows(End.COMPLETED))
    found = measures.rollout_metrics(held(rows), 2, [np.arange(4)])
    assert found["response_length/mean"] == found["response_length/min"] == 3
    assert found["response_length/clip_ratio"] == 0.5
    # Other rows begin with what the environment said, too.
    assert found["prompt_length/max"] == 2
    assert found["episode/rows"] == 2 and found["num_turns/mean"] == 4


def test_what_environments_record_are_means_over_the_episodes_that_have_it() -> None:
    ends = (End.COMPLETED, End.MAX_TURNS, End.COMPLETED, End.TOOL_TIMEOUT)
    recorded = ({"doors": 1.0, "falls": 4.0}, {"doors": 2.0}, {}, {"doors": 64.0})
    episodes = [
        replace(two_rows(end), metrics=metrics)
        for end, metrics in zip(ends, recorded, strict=True)
    ]
    rows = rows_of(*episodes)
    assert rows.episode_metrics is not None
    texts = rows.episode_metrics.texts()
    # An episode that is dropped says nothing.
    assert [json.loads(text or "{}") for text in texts] == [
        {}, recorded[0], {}, recorded[1], {}, {}, {},
    ]  # fmt: skip

    scores = [Score(0.5, ScoreHealth.OK, entries='{"n": 3}') for _ in texts]
    row_scores = with_recorded_metrics(scores, rows)
    (source,) = set(rows.data_source.texts())
    name = "episode/world"
    entries = dict(enumerate(score.entries for score in row_scores))
    assert json.loads(entries[3]) == {"n": 3, f"{name}/{source}/doors": 2}
    means = {f"{name}/doors": 1.5, f"{name}/falls": 4.0}
    by_source = {f"{name}/{source}/doors": 1.5, f"{name}/{source}/falls": 4.0}
    alone = score_entries.merged_entries(7, {"reward": entries})
    assert score_entries.entry_metrics(alone) == {
        "reward/n/mean": 3.0,
        **means,
        **by_source,
    }
    assert score_entries.held_out_entry_metrics([source] * 7, alone, 2) == {
        f"val-aux/{source}/n/mean@2": 3.0,
        f"val-aux/{source}/{name}/doors/mean@2": 1.5,
        f"val-aux/{source}/{name}/falls/mean@2": 4.0,
    }
    # Each of several graders has them.
    names = ("reward.components.a", "reward.components.b")
    both = score_entries.merged_entries(7, dict.fromkeys(names, entries))
    assert score_entries.entry_metrics(both) == {
        "reward/a/n/mean": 3.0, "reward/b/n/mean": 3.0, **means, **by_source,
    }  # fmt: skip


def test_held_out_episodes_have_ends_and_turns_by_data_source() -> None:
    rows = rows_of(
        two_rows(End.MAX_TURNS), two_rows(End.COMPLETED), two_rows(End.COMPLETED)
    )
    lasts = held(rows).select([1, 3, 5])
    found = measures.held_out_episode_metrics(["a", "b", "a"], lasts)
    assert found["val-aux/a/num_turns/mean"] == found["val-aux/b/num_turns/mean"] == 4
    shares = {name: share for name, share in found.items() if "ends" in name and share}
    assert shares == {
        "val-aux/a/episode/ends/max_turns": 0.5,
        "val-aux/a/episode/ends/completed": 0.5,
        "val-aux/b/episode/ends/completed": 1.0,
    }
    assert len(found) == 2 * (1 + len(End))


def test_single_responses_beside_episodes_are_none() -> None:
    chunk = Chunk(
        request_id=2,
        tokens=np.array([7, 8, 9], np.int32),
        log_probs=np.array([-0.5, -1.5, -2.5], np.float32),
        finish=Finish.LENGTH,
        first_token=0,
        version_spans=[(0, 4)],
    )
    single = beside_episodes(whole_rollouts(prompts(), {2: 0}, [chunk]))
    rows = Rollouts.concat([single, rows_of(two_rows(End.MAX_TURNS))])
    assert rows.trajectory_id.tolist() == [2, 6, 6]
    assert ends_of_rows(rows) == ["", "max_turns", "max_turns"]

    found = measures.rollout_metrics(held(rows), 2, [np.arange(3)])
    # Lengths are those of all responses, and ends and turns those of episodes.
    assert found["response_length/mean"] == 3
    assert (found["episode/rows"], found["num_turns/mean"]) == (2, 4)
    assert found["episode/ends/max_turns"] == 1
    only_single = measures.rollout_metrics(held(single), 2, [np.arange(1)])
    assert only_single["episode/ends/max_turns"] == 0
    assert np.isnan(only_single["num_turns/mean"])

    held_out = measures.held_out_episode_metrics(["a", "b"], held(rows).select([0, 2]))
    assert {name.split("/")[1] for name in held_out} == {"b"}
    assert held_out["val-aux/b/num_turns/mean"] == 4

    # A grader sees it as in a run without episodes, and its reward stands at its end.
    assert set(scores_without_grader(rows)) == {1}
    credit = token_credit(
        algorithm("gae", gamma=1.0, lam=1.0), 0.0, rows, rewards_of([3.0, 0.0, 1.0]), None, None, values_of(rows, [0.0] * 6, [0.0] * 3),
    )  # fmt: skip
    assert credit.advantages[rows.response_mask].tolist() == [3, 3, 3, 1, 1, 0.5]


def test_graders_see_the_whole_conversation_of_an_episode(tmp_path: Path) -> None:
    character_tokenizer(tmp_path, "0123456789+=")
    turns = [
        row_of(2, 2, reward=0.0),
        EpisodeRow(
            tokens=[1, 2, 3, 4, 5, 6, 7],
            mask=[False, False, True, True, False, True, True],
            log_probs=[0.0] * 7,
            versions=[(2, 0)],
            rewards=[(3, 0.0), (6, 1.0)],
            turns=[1, 2],
        ),
    ]
    # The environment has the last word, in the role of an assistant.
    messages = [*MESSAGES[:-1], {"role": "assistant", "content": "right"}]
    draft = [{"role": "assistant", "content": "2"}]
    episode = Episode(
        turns,
        End.MAX_TURNS,
        1.0,
        conversations=[draft, messages],
        response="3",
        output="a\ud800 line",
    )
    rows = rows_of(episode, two_rows(End.ENVIRONMENT_FAILED))
    # An episode is scored once, on its last row; a failed one has no grader.
    known = scores_without_grader(rows)
    assert {row: score.health.name for row, score in known.items()} == {
        0: "OK", 2: "EXCEPTION",
    }  # fmt: skip
    assert known[0].value == 0
    # Each of its rewards may count while their sum does not.
    for earned, found in (
        (1e39, "inf"),
        (2.0**60, "1.152921504606847e+18, beyond 1e18"),
    ):
        rich = two_rows(End.COMPLETED)
        failed = scores_without_grader(rows_of(replace(rich, score=earned)))[1]
        assert failed.health is ScoreHealth.NONFINITE
        assert failed.detail == f"the rewards of the episode add up to {found}"

    tokenizer = load_tokenizer(str(tmp_path))
    single = rows.replace(end=np.full(rows.num_rows, NO_EPISODE, np.int8))
    assert scores_without_grader(single) == {}
    assert {each.episode_score for each in requests_of(single, 3, tokenizer)} == {None}
    seen = requests_of(rows, 3, tokenizer)[1]
    # The response is the last turn, and all turns have 2 + 2 + 2 tokens.
    assert (seen.response, seen.tokens, seen.num_tokens) == ("3", [6, 7], 6)
    assert (seen.finish_reason, seen.episode_end) == ("length", "max_turns")
    assert seen.episode_score == 1 and seen.episode_messages == messages
    assert seen.episode_conversations == [draft, messages]
    assert rollout_record.outputs_of_rows(rows) == ["", "a? line", ""]
    assert seen.episode_output == "a? line"
    assert (seen.prompt, seen.conversation) == ("p", "p")

    def ends(
        response: str,
        episode_messages: list[dict[str, str]],
        episode_conversations: list[list[dict[str, str]]],
        episode_output: str,
    ) -> str:
        first = episode_conversations[0]
        said = episode_messages[-1]["content"] + first[-1]["content"]
        return response + said + episode_output

    _, named = signature_of(ends).bind(response_values(seen))
    assert ends(**named) == "3right2a? line"  # type: ignore[arg-type]
    # Where prompts are messages, one of TRL's style gets those behind the prompt.
    continued = replace(seen, conversation=MESSAGES[:1])
    values = group_values([continued], GroupLog(1))
    assert values["completions"] == [messages[1:]]
    assert values["episode_end"] == ["max_turns"]
    assert values["episode_output"] == ["a? line"]
    sent = json.loads(RequestBatch.of([seen]).body)["items"]
    assert sent[0]["episode_messages"] == messages
    assert sent[0]["episode_conversations"] == [draft, messages]
    assert "episode_end" not in json.loads(
        RequestBatch.of([ScoreRequest("r", "a", "p", "s", {})]).body
    )["items"][0]  # fmt: skip
