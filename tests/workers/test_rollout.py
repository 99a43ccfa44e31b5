"""One replica between prompts and rows, around an engine whose responses are written
down.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from scripts.bench.scripted_engine import ScriptedEngine
from verl_ray.columns.batch import Ragged, offsets_of
from verl_ray.columns.seeds import row_seeds
from verl_ray.columns.stages import (
    UNFINISHED,
    Finish,
    Prompts,
    Requests,
    Responses,
    Rollouts,
)
from verl_ray.errors import CannotGenerate, EngineFailed, RolloutError
from verl_ray.rollout.requests import Chunk, EngineLoad, GenerationRequest, Sampling
from verl_ray.rollout.server import RolloutServer
from workers.generation import Generation
from workers.rollout import (
    RolloutWorker,
    whole_rollouts,
)

LENGTHS = {6: 3, 7: 1, 10: 5, 11: 2}  # of the response to each request
LIMIT = 4
ROW_OF_SEED = dict(
    zip(row_seeds(4, "train", np.array(list(LENGTHS))).tolist(), LENGTHS, strict=True)
)


class ScriptedWorker(RolloutWorker):
    """A replica whose engine does what it is told."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.endpoint = None
        self.server = RolloutServer(
            lambda: ScriptedEngine(self.script, initial_version=9)
        )

    def script(self, request: GenerationRequest) -> list[tuple[int, float]]:
        self.requests.append(request)
        row = ROW_OF_SEED[request.seed]
        return [(100 * row + t, -0.5 - t) for t in range(LENGTHS[row])]


def prompts() -> Prompts:
    return Prompts(
        offsets=offsets_of([2, 3]), group_id=np.array([3, 5]), tokens=np.array([1, 2, 3, 4, 5], np.int32),
        has_answer=np.array([False, True]),
        messages=Ragged.of_texts(['"p"', '"q"']), data_source=Ragged.of_texts(["a", "b"]),
        answer=Ragged.of_texts(["", "yy"]),
        extra=Ragged.of_texts(["{}", '{"k": 1}']),
    )  # fmt: skip


def generate(stream_rows: int) -> tuple[ScriptedWorker, list[Rollouts]]:
    worker = ScriptedWorker()
    what = Generation(
        "train", 2, Sampling(1.0, 1.0, -1, LIMIT), run_seed=4, stream_rows=stream_rows
    )
    return worker, list(worker.generate(prompts(), what))


def test_two_checkpoints_are_asked_with_the_same_seeds() -> None:
    """So their responses to a prompt differ by the policy alone, and can be paired."""
    seeds = row_seeds(4, "evaluate", np.array([6, 7, 10, 11]))
    what = Generation("evaluate", 2, Sampling(1.0, 0.9, -1, LIMIT), 4, stream_rows=1)
    asked = []
    for version in (0, 20):
        requests: list[GenerationRequest] = []

        def script(
            request: GenerationRequest, kept: list[GenerationRequest] = requests
        ) -> list[tuple[int, float]]:
            kept.append(request)
            return [(1, -0.5)]

        worker = ScriptedWorker()
        worker.server = RolloutServer(
            lambda script=script, version=version: ScriptedEngine(
                script, initial_version=version
            )
        )
        pieces = list(worker.generate(prompts(), what))
        versions = {span[1] for piece in pieces for span in piece.version_spans.values}
        assert versions == {version}
        asked.append([(request.tokens.tolist(), request.seed) for request in requests])
    tokens = [[1, 2], [1, 2], [3, 4, 5], [3, 4, 5]]
    assert asked[0] == asked[1] == list(zip(tokens, seeds.tolist(), strict=True))


def test_rows_are_whole_however_they_finish() -> None:
    _, pieces = generate(stream_rows=2)
    assert [piece.row_id.tolist() for piece in pieces] == [
        [7, 11],
        [6, 10],
    ]  # the shortest ones first
    rows = Rollouts.concat(pieces).select([2, 0, 3, 1])  # in the order of their ids
    assert rows.row_id.tolist() == rows.trajectory_id.tolist() == [6, 7, 10, 11]
    assert rows.group_id.tolist() == [3, 3, 5, 5]
    assert rows.lengths.tolist() == [5, 3, 7, 5]
    assert rows.tokens.tolist() == [
        *[1, 2, 600, 601, 602], *[1, 2, 700], *[3, 4, 5, 1000, 1001, 1002, 1003], *[3, 4, 5, 1100, 1101],
    ]  # fmt: skip
    assert rows.response_mask.tolist() == (rows.tokens >= 600).tolist()
    expected = np.where(rows.tokens >= 600, -0.5 - rows.tokens % 100, 0)
    assert rows.rollout_log_probs.tolist() == expected.tolist()
    assert (rows.prompt_length.tolist(), rows.response_length.tolist()) == (
        [2, 2, 3, 3],
        [3, 1, 4, 2],
    )
    assert rows.finish.tolist() == [
        Finish.STOP,
        Finish.STOP,
        Finish.LENGTH,
        Finish.STOP,
    ]
    assert rows.version_spans.values.tolist() == [[2, 9], [2, 9], [3, 9], [3, 9]]
    assert (rows.answer.texts(), rows.data_source.texts()) == (
        ["", "", "yy", "yy"],
        ["a", "a", "b", "b"],
    )
    assert rows.has_answer.tolist() == [False, False, True, True]


def test_rows_have_the_experts_of_all_tokens_but_the_last() -> None:
    def chunk(row: int, num_tokens: int, experts: list[int] | None) -> Chunk:
        recorded = None
        if experts is not None:
            recorded = np.array(experts, np.int16).reshape(-1, 1, 1)
        tokens = np.arange(num_tokens, dtype=np.int32)
        finish = Finish.LENGTH if num_tokens else Finish.ABORTED
        spans = ((0, 9),) if num_tokens else ()
        log_probs = np.zeros(num_tokens, np.float32)
        return Chunk(row, tokens, log_probs, finish, 0, spans, routed_experts=recorded)

    # Prompts of two and three tokens; the second was aborted before its first token.
    prompt_of = {6: 0, 10: 1}
    chunks = [chunk(6, 2, [5, 6, 7]), chunk(10, 0, None)]
    rows = whole_rollouts(prompts(), prompt_of, chunks, (1, 1))
    assert rows.routed_experts is not None
    assert rows.routed_experts.ravel().tolist() == [5, 6, 7, 0, 0, 0, 0]
    assert whole_rollouts(prompts(), prompt_of, chunks).routed_experts is None
    for experts, what in (([5], "1 positions"), (None, "no positions")):
        with pytest.raises(RolloutError, match=f"of {what} of a row of 4 tokens"):
            whole_rollouts(prompts(), prompt_of, [chunk(6, 2, experts)], (1, 1))


def test_what_is_left_at_the_end_is_handed_on_together() -> None:
    assert [piece.num_rows for piece in generate(stream_rows=3)[1]] == [3, 1]
    assert [piece.num_rows for piece in generate(stream_rows=99)[1]] == [4]


def test_a_finished_response_does_not_wait_for_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.rollout.HELD_S", 0.05)
    handed_on = threading.Event()

    class Slow(ScriptedEngine):
        """An engine that makes its second step once something was handed on."""

        def step(self) -> list[Chunk]:
            if self.steps == 1:
                assert handed_on.wait(60)
            return super().step()

    worker = ScriptedWorker()
    worker.server = RolloutServer(lambda: Slow(worker.script, initial_version=9))
    what = Generation(
        "train", 2, Sampling(1.0, 1.0, -1, LIMIT), run_seed=4, stream_rows=99
    )
    pieces = []
    for piece in worker.generate(prompts(), what):
        pieces.append(piece.row_id.tolist())
        handed_on.set()
    # Only row 7 ends with the first step.
    assert pieces[0] == [7]
    assert sorted(row for piece in pieces for row in piece) == [6, 7, 10, 11]


def test_a_request_is_what_its_row_asks_for() -> None:
    worker, _ = generate(stream_rows=1)
    assert [request.seed for request in worker.requests] == row_seeds(
        4, "train", np.array([6, 7, 10, 11])
    ).tolist()
    assert [request.tokens.tolist() for request in worker.requests] == [
        [1, 2],
        [1, 2],
        [3, 4, 5],
        [3, 4, 5],
    ]
    assert len({request.session for request in worker.requests}) == 2


def test_of_a_group_only_what_is_wanted_is_drawn() -> None:
    worker = ScriptedWorker()
    what = Generation(
        "train", 2, Sampling(1.0, 1.0, -1, LIMIT), run_seed=4, stream_rows=9
    )
    (piece,) = worker.generate(prompts(), what, np.array([7, 10, 11]))
    assert sorted(piece.row_id.tolist()) == [7, 10, 11]
    assert [request.seed for request in worker.requests] == row_seeds(
        4, "train", np.array([7, 10, 11])
    ).tolist()


class Lossy(ScriptedEngine):
    """An engine that forgets the log-probs of what it drew."""

    def step(self) -> list[Chunk]:
        return [
            replace(chunk, log_probs=chunk.log_probs[:0]) for chunk in super().step()
        ]


def test_unusable_answers_are_a_lost_replica() -> None:
    what = Generation(
        "train", 2, Sampling(1.0, 1.0, -1, LIMIT), run_seed=4, stream_rows=9
    )
    worker = ScriptedWorker()
    worker.server = RolloutServer(lambda: Lossy(worker.script, initial_version=9))
    with pytest.raises(EngineFailed, match="its replies cannot be used: ValueError"):
        list(worker.generate(prompts(), what))
    asleep = ScriptedWorker()
    asleep.sleep("weights")
    with pytest.raises(
        CannotGenerate
    ):  # what the engine refuses is refused by every replica
        list(asleep.generate(prompts(), what))


def test_token_sequences_are_continued_as_they_are_drawn() -> None:
    worker = ScriptedWorker()
    asked = Requests(
        offsets=offsets_of([2, 1]), request_id=np.array([50, 40]), seed=row_seeds(4, "train", np.array([6, 7])),
        session=np.array([1, 1]), tokens=np.array([8, 9, 8], np.int32),
    )  # fmt: skip
    parts = list(worker.respond(asked, Sampling(1.0, 1.0, -1, LIMIT)))
    assert [part.request_id.tolist() for part in parts] == [[50, 40], [50], [50]]
    whole = Responses.concat(parts)
    assert whole.tokens.tolist() == [600, 700, 601, 602]
    assert whole.first_token.tolist() == [0, 0, 1, 2]
    assert whole.finish.tolist() == [UNFINISHED, Finish.STOP, UNFINISHED, Finish.STOP]
    assert whole.version_spans.values.tolist() == [[0, 9], [0, 9], [1, 9], [2, 9]]


def test_aborted_responses_come_back_as_far_as_they_got() -> None:
    worker = ScriptedWorker()
    worker.server.run(lambda engine: engine.pause())
    stream = worker.generate(
        prompts(),
        Generation("train", 2, Sampling(1.0, 1.0, -1, LIMIT), 4, stream_rows=1),
    )
    with ThreadPoolExecutor(1) as pool:
        pieces = pool.submit(list, stream)
        while worker.health().in_flight < 4:
            time.sleep(0.01)
        worker.abort()
        rows = Rollouts.concat(pieces.result(10))
    assert sorted(rows.row_id.tolist()) == [6, 7, 10, 11]
    assert set(rows.finish.tolist()) == {Finish.ABORTED}
    assert (
        rows.response_length.tolist() == [0] * 4 and len(rows.version_spans.values) == 0
    )


def test_open_rows_stay_while_the_replica_sleeps_and_new_ones_wait() -> None:
    worker = ScriptedWorker()
    what = Generation(
        "train", 2, Sampling(1.0, 1.0, -1, LIMIT), run_seed=4, stream_rows=4
    )
    worker.server.run(lambda engine: engine.pause())
    with ThreadPoolExecutor(2) as pool:
        opened = pool.submit(list, worker.generate(prompts(), what))
        while worker.health().in_flight < 4:
            time.sleep(0.01)
        worker.pause("recompute")
        later = pool.submit(list, worker.generate(prompts(), what))
        worker.sleep("kv_cache")
        assert worker.health().load == EngineLoad(waiting=4)
        worker.wake("kv_cache")
        assert not opened.done() and not later.done()
        worker.resume()
        for rows in (*opened.result(10), *later.result(10)):
            assert sorted(rows.row_id.tolist()) == [6, 7, 10, 11]
            assert Finish.ABORTED not in rows.finish
