"""The contract of rollout engines, tested on every engine.

The tests cover delivery, aborts, pauses, states and weight updates.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from scripts.bench.scripted_engine import ScriptedEngine
from tests.rollout.generation import drained, generate
from verl_ray.columns.stages import Finish
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import CannotGenerate, RolloutError, WeightSyncError
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.engine_state import EnginePause
from verl_ray.rollout.in_flight import InFlight
from verl_ray.rollout.probes import Probe
from verl_ray.rollout.requests import (
    Chunk,
    EngineLoad,
    GenerationProgress,
    GenerationRequest,
    Sampling,
)
from verl_ray.rollout.vllm_engine import VllmEngine
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import Manifest, Parameter, Slice, plan_buckets
from verl_ray.weight_sync.shared_memory import create, map_slots, remove
from verl_ray.weight_sync.transport import WireSpec

PROMPT = np.random.default_rng(3).integers(2, 15, 70).astype(np.int32)
"""Two blocks of 32 tokens that the prefix cache can hold, and some tokens more."""


def _request(request_id: int, max_tokens: int = 6, **kw: object) -> GenerationRequest:
    return GenerationRequest(
        request_id,
        np.array([3, 4, 5], np.int32),
        Sampling(1.0, 1.0, -1, max_tokens, ()),
        seed=7,
        **kw,
    )  # type: ignore[arg-type]


def _greedy(
    request_id: int, tokens: np.ndarray, max_tokens: int, **kw: bool
) -> GenerationRequest:
    sampling = Sampling(0.0, 1.0, -1, max_tokens, ())
    return GenerationRequest(request_id, tokens, sampling, seed=7, **kw)


def _join(
    chunks: list[Chunk], request_id: int
) -> tuple[list[int], list[float], list[Finish | None]]:
    own = [chunk for chunk in chunks if chunk.request_id == request_id]
    at = 0
    for chunk in own:
        assert chunk.first_token == at
        assert len(chunk.tokens) == len(chunk.log_probs)
        at += len(chunk.tokens)
    return (
        [int(token) for chunk in own for token in chunk.tokens],
        [float(value) for chunk in own for value in chunk.log_probs],
        [chunk.finish for chunk in own],
    )


def _steps_per_token(engine: RolloutEngine) -> int:
    """Return the stages of an engine, each of which computes in a step of its own."""
    if not isinstance(engine, VllmEngine):
        return 1
    return engine.core._core.vllm_config.parallel_config.pipeline_parallel_size


def _step_until(engine: RolloutEngine, request_id: int, tokens: int) -> list[Chunk]:
    """Step until a streamed request has delivered so many tokens.

    An engine with a step under way delivers nothing with the first, and one with stages
    a token with every second step.
    """
    chunks: list[Chunk] = []
    for _ in range(tokens * _steps_per_token(engine) + 1):
        chunks += engine.step()
        if len(_join(chunks, request_id)[0]) == tokens:
            return chunks
    raise AssertionError(f"request {request_id} has not {tokens} tokens: {chunks}")


@pytest.fixture(scope="module")
def model(
    make_model: Callable[..., Path], load_reference: Callable[[Path], PreTrainedModel]
) -> PreTrainedModel:
    return load_reference(make_model("qwen3", tie=False))


@pytest.fixture(scope="module")
def other(
    make_model: Callable[..., Path], load_reference: Callable[[Path], PreTrainedModel]
) -> PreTrainedModel:
    """A model with other weights."""
    return load_reference(make_model("qwen3", tie=False, seed=1))


@pytest.fixture(
    scope="module",
    params=[
        "scripted",
        pytest.param("vllm", marks=pytest.mark.vllm),
        # As on a GPU, where a step is under way while another is scheduled.
        pytest.param("vllm asynchronous", marks=pytest.mark.vllm),
        # Two processes, and again two batches at a time.
        pytest.param("vllm stages", marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
def shared(
    request: pytest.FixtureRequest, make_model: Callable[..., Path]
) -> RolloutEngine:
    if request.param == "scripted":
        # What follows depends on the tokens before it, as with a model.
        return ScriptedEngine(
            lambda asked: [(at, -0.01 * at) for at in range(len(asked.tokens), 1000)],
            tokenizer=load_tokenizer(make_model("qwen3", tie=False)),
        )
    is_asynchronous = request.param == "vllm asynchronous"  # vLLM's async_scheduling
    arguments = {"block_size": 32}
    if is_asynchronous:
        # Batches as small as they may be, so that the contract holds whatever they are.
        arguments |= {"max_num_seqs": 4, "max_num_batched_tokens": 96}
    return request.getfixturevalue("start_vllm")(
        make_model("qwen3", tie=False),
        asynchronous=is_asynchronous,
        pipeline_parallel=2 if request.param == "vllm stages" else 1,
        vllm_args=arguments,
    )


@pytest.fixture
def fresh(shared: RolloutEngine) -> Iterator[RolloutEngine]:
    """An engine that is awake and idle, without an open update.

    Whether a version is committed depends on the test before.
    """
    yield shared
    shared.abort_update()
    if shared.unfinished:
        shared.abort()
        shared.step()
    shared.wake("weights")
    shared.wake("kv_cache")
    shared.resume()


@pytest.fixture
def engine(
    fresh: RolloutEngine, model: PreTrainedModel, publish: Callable[..., object]
) -> RolloutEngine:
    """An engine at version 5."""
    if fresh.policy_version != 5:
        publish(fresh, model, 5)
    return fresh


def test_no_token_before_the_first_commit(fresh: RolloutEngine) -> None:
    assert fresh.policy_version is None
    with pytest.raises(
        RolloutError, match="no policy version is committed; send the weights"
    ):
        fresh.submit([_request(1)])


def test_one_chunk_at_the_end_or_many_with_the_same_content(
    engine: RolloutEngine,
) -> None:
    (whole,) = [chunk for step in generate(engine, [_request(1)]) for chunk in step]
    assert (
        whole.finish,
        whole.version_spans,
        whole.first_token,
        len(whole.tokens),
    ) == (Finish.LENGTH, ((0, 5),), 0, 6)
    assert whole.tokens.dtype == np.int32 and whole.log_probs.dtype == np.float32
    chunks = [
        chunk
        for step in generate(engine, [_request(1, stream=True), _request(2)])
        for chunk in step
    ]
    tokens, log_probs, finishes = _join(chunks, 1)
    assert tokens == whole.tokens.tolist()
    assert log_probs == pytest.approx(whole.log_probs.tolist(), abs=1e-6)
    assert finishes == [None] * 5 + [Finish.LENGTH]
    assert _join(chunks, 2)[0] == tokens
    assert engine.unfinished == 0


def test_a_text_ends_a_response(engine: RolloutEngine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    (whole,) = [chunk for step in generate(engine, [_request(1, 12)]) for chunk in step]
    pieces = [tokenizer.decode([token]) for token in whole.tokens]
    place = next(
        at
        for at in range(2, 11)
        if "".join(pieces[at - 1 : at + 1]) not in "".join(pieces[:at])
    )
    stop = ("never in it", pieces[place - 1] + pieces[place])

    stopping = replace(_request(2, 12).sampling, stop=stop)
    cut = replace(_request(2, 12), sampling=stopping)
    streamed = replace(cut, request_id=3, stream=True)
    engine.submit([_request(1, 12), cut, streamed])
    chunks = drained(engine)
    assert engine.unfinished == 0 and not engine.has_work
    for request_id in (2, 3):
        tokens, log_probs, finishes = _join(chunks, request_id)
        assert tokens == whole.tokens[: place + 1].tolist()
        assert log_probs == whole.log_probs[: place + 1].tolist()
        assert finishes[-1] is Finish.STOP and set(finishes[:-1]) <= {None}
    # The text may end with the last token that a response may have.
    shortest = replace(cut, sampling=replace(stopping, max_tokens=place + 1))
    (chunk,) = [chunk for step in generate(engine, [shortest]) for chunk in step]
    assert (len(chunk.tokens), chunk.finish) == (place + 1, Finish.STOP)
    # Others go on.
    assert _join(chunks, 1)[0] == whole.tokens.tolist()
    assert _join(chunks, 1)[2] == [Finish.LENGTH]


def test_tokens_behind_a_text_that_ends_a_response_are_none_of_it(
    make_model: Callable[..., Path],
) -> None:
    """A step may bring several tokens, and several steps may be recorded at once.

    The engine may end a response with tokens that are none of it.
    """
    tokenizer = load_tokenizer(make_model("qwen3", tie=False))
    pieces = [tokenizer.decode([token]) for token in (5, 6, 7)]
    sampling = replace(_request(1).sampling, stop=(pieces[0] + pieces[1],))
    three, one = [5, 6, 7], [8]
    for finishes, forgotten in (
        ([None], [1]),
        ([Finish.LENGTH], []),
        ([None, None], [1]),
        ([None, None, Finish.LENGTH], []),
    ):
        in_flight = InFlight()
        in_flight.add([replace(_request(1), sampling=sampling)], tokenizer)
        # Of a prompt of three tokens, and of one token after the other behind it.
        routed = [np.arange(5), np.array([5]), np.array([6])]
        steps = [
            GenerationProgress(
                1,
                tokens,
                [-0.5, -0.25, -0.125][: len(tokens)],
                finish,
                routed_experts=positions.astype(np.int16).reshape(-1, 1, 1),
            )
            for tokens, finish, positions in zip(
                [three, one, one], finishes, routed, strict=False
            )
        ]
        assert in_flight.record(steps, version=4) == forgotten
        (chunk,) = in_flight.take_chunks()
        assert (chunk.tokens.tolist(), chunk.log_probs.tolist()) == (
            [5, 6],
            [-0.5, -0.25],
        )
        assert chunk.finish is Finish.STOP and len(in_flight) == 0
        assert chunk.routed_experts is not None
        assert chunk.routed_experts.ravel().tolist() == [0, 1, 2, 3]


def test_an_abort_delivers_what_there_is(engine: RolloutEngine) -> None:
    engine.submit([_request(1, 20), _request(2, 20, stream=True), _request(3, 3)])
    chunks = _step_until(engine, 2, 2)
    engine.abort([1, 99])
    for _ in range(_steps_per_token(engine)):
        chunks += engine.step()
    assert len(_join(chunks, 1)[0]) == 2 and _join(chunks, 1)[2] == [Finish.ABORTED]
    assert _join(chunks, 3)[2] == [Finish.LENGTH]
    engine.abort()
    chunks += engine.step()
    tokens, _, finishes = _join(chunks, 2)
    assert len(tokens) == 3 and finishes[-1] is Finish.ABORTED
    assert engine.unfinished == 0 and engine.step() == []
    # An abort that finds nothing in flight does not hit what comes later.
    engine.abort()
    assert [
        chunk.finish for step in generate(engine, [_request(1)]) for chunk in step
    ] == [Finish.LENGTH]


def test_an_id_is_free_as_soon_as_its_request_has_ended(engine: RolloutEngine) -> None:
    (undisturbed,) = [
        chunk for step in generate(engine, [_request(1)]) for chunk in step
    ]
    engine.submit([_request(1, 20, stream=True)])
    _step_until(engine, 1, 3)
    engine.abort([1])
    assert [chunk.finish for chunk in engine.step()] == [Finish.ABORTED]
    # What the device still samples for the first is not taken for the second.
    (again,) = [chunk for step in generate(engine, [_request(1)]) for chunk in step]
    assert again.tokens.tolist() == undisturbed.tokens.tolist()


def test_a_pause_keeps_requests_where_they_are(engine: RolloutEngine) -> None:
    (undisturbed,) = [
        chunk for step in generate(engine, [_request(1)]) for chunk in step
    ]
    engine.submit([_request(1)])
    engine.step()
    engine.pause()
    assert not engine.has_work
    assert [engine.step() for _ in range(3)] == [[]] * 3
    engine.resume()
    chunks = []
    while engine.unfinished:
        chunks += engine.step()
    assert _join(chunks, 1)[0] == undisturbed.tokens.tolist()


def test_requests_that_cannot_be_served(engine: RolloutEngine) -> None:
    engine.submit([_request(1)])
    with pytest.raises(
        RolloutError, match=r"unique among those in flight, found again: \[1\]"
    ):
        engine.submit([_request(1)])
    bad = GenerationRequest(
        2, np.array([], np.int32), Sampling(1.0, 1.0, -1, 4), seed=0
    )
    with pytest.raises(
        RolloutError, match=r"request 2: expected a non-empty int32 vector"
    ):
        engine.submit([bad])
    assert engine.unfinished == 1


def test_sleep_and_wake(
    engine: RolloutEngine, model: PreTrainedModel, publish: Callable[..., object]
) -> None:
    before = [
        chunk.tokens.tolist()
        for step in generate(engine, [_request(1)])
        for chunk in step
    ]
    engine.sleep("kv_cache")
    engine.sleep("kv_cache")
    assert engine.policy_version == 5
    with pytest.raises(RolloutError, match=r'asleep; call wake\("kv_cache"\) first'):
        engine.submit([_request(1)])
    engine.wake("kv_cache")
    engine.wake("kv_cache")
    assert [
        chunk.tokens.tolist()
        for step in generate(engine, [_request(1)])
        for chunk in step
    ] == before

    engine.sleep("kv_cache")
    engine.sleep("weights")
    assert engine.policy_version is None
    with pytest.raises(
        RolloutError,
        match=r'asleep; call wake\("weights"\) and wake\("kv_cache"\) first',
    ):
        engine.step()
    with pytest.raises(
        RolloutError, match=r'the weights are asleep; call wake\("weights"\)'
    ):
        engine.begin_update(Manifest(()), 6)
    engine.wake("weights")
    with pytest.raises(RolloutError, match="asleep"):
        engine.submit([_request(1)])
    publish(
        engine, model, 6
    )  # while the KV cache still sleeps: the second phase of waking
    engine.wake("kv_cache")
    chunks = [chunk for step in generate(engine, [_request(1)]) for chunk in step]
    assert [chunk.tokens.tolist() for chunk in chunks] == before
    assert chunks[0].version_spans == ((0, 6),)

    engine.sleep("weights")
    engine.wake("weights")
    engine.wake("kv_cache")  # awake, and nothing was sent
    with pytest.raises(
        RolloutError, match="no policy version is committed; send the weights"
    ):
        engine.submit([_request(1)])


def test_nothing_moves_under_requests_in_flight(engine: RolloutEngine) -> None:
    engine.submit([_request(1), _request(2)])
    with pytest.raises(
        RolloutError,
        match=r"sleep: 2 requests are in flight; .* or pause with \"recompute\" first",
    ):
        engine.sleep("kv_cache")
    with pytest.raises(
        RolloutError,
        match="begin_update: 2 requests are in flight; let them end, abort them, or"
        ' pause with "keep" or "recompute" first',
    ):
        engine.begin_update(Manifest(()), 6)


def test_requests_that_give_way_end_where_they_are_once_no_others_are_in_flight(
    engine: RolloutEngine, model: PreTrainedModel, publish: Callable[..., object]
) -> None:
    guests = [
        _request(1, 20, preemptible=True),
        _request(2, 20, preemptible=True, stream=True),
    ]
    engine.submit([*guests, _request(3, 3)])
    chunks = engine.step()
    for refused in (
        lambda: engine.sleep("kv_cache"),
        lambda: engine.begin_update(Manifest(()), 6),
    ):
        with pytest.raises(RolloutError, match="1 requests are in flight"):
            refused()
    while not _join(chunks, 3)[2]:
        chunks += engine.step()
    assert _join(chunks, 3)[2] == [Finish.LENGTH] and engine.unfinished == 2
    publish(engine, model, 6)
    assert engine.unfinished == 2 and engine.has_work  # ended, and not delivered yet
    chunks += engine.step()
    assert (len(_join(chunks, 1)[0]), _join(chunks, 1)[2]) == (3, [Finish.ABORTED])
    assert (len(_join(chunks, 2)[0]), _join(chunks, 2)[2]) == (
        3,
        [None] * 3 + [Finish.ABORTED],
    )
    assert engine.unfinished == 0

    engine.submit(guests)
    engine.step()
    engine.pause()
    publish(engine, model, 7)  # paused, they stay
    assert engine.unfinished == 2
    engine.sleep("weights")
    # Also while it sleeps.
    finishes = [chunk.finish for chunk in engine.step() if chunk.finish is not None]
    assert finishes == [Finish.ABORTED] * 2


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_requests_live_through_a_weight_update(
    engine: RolloutEngine,
    model: PreTrainedModel,
    publish: Callable[..., object],
    mode: EnginePause,
) -> None:
    """They are sampled with seeds.

    vLLM's V1 runner has a generator for each request and keeps it when the request is
    computed again, so tokens go on as if nothing had happened. A fresh request with the
    tokens so far as its prompt would begin with the first number of its seed.
    """
    (undisturbed,) = [
        chunk for step in generate(engine, [_request(1, 20)]) for chunk in step
    ]
    engine.submit([_request(1, 20), _request(2, 20, stream=True)])
    chunks = _step_until(engine, 2, 5)
    # What is under way on the device is of the weights that it was started with.
    old = 5
    if isinstance(engine, VllmEngine):
        queue = engine.core._core.batch_queue or ()
        old += sum(batch.total_num_scheduled_tokens > 0 for _, batch, _ in queue)
    engine.pause(mode)
    publish(
        engine, model, 6
    )  # the same weights, so the tokens must be those of a request that was left alone
    if mode == "keep":
        with pytest.raises(RolloutError, match="sleep: 2 requests are in flight"):
            engine.sleep("kv_cache")
    engine.resume()
    while engine.unfinished:
        chunks += engine.step()
    assert _join(chunks, 1)[0] == _join(chunks, 2)[0] == undisturbed.tokens.tolist()
    (whole,) = (chunk for chunk in chunks if chunk.request_id == 1)
    assert whole.version_spans == ((0, 5), (old, 6))
    streamed = [chunk for chunk in chunks if chunk.request_id == 2]
    assert [chunk.version_spans for chunk in streamed[old - 1 : old + 1]] == [
        ((old - 1, 5),), ((old, 6),)
    ]  # fmt: skip
    assert all(len(chunk.version_spans) == 1 for chunk in streamed)


def _assert_equal(found: Chunk, fresh: Chunk, *, beginning_at: int = 0) -> None:
    assert found.tokens[beginning_at:].tolist() == fresh.tokens.tolist()
    rest = found.log_probs[beginning_at:]
    np.testing.assert_allclose(rest, fresh.log_probs, atol=1e-5)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_an_open_row_over_an_update_with_other_weights(
    engine: RolloutEngine,
    model: PreTrainedModel,
    other: PreTrainedModel,
    publish: Callable[..., object],
    mode: EnginePause,
) -> None:
    """Of two rows with one prompt one is open, and the other has not begun."""
    (before,) = generate(engine, [_greedy(1, PROMPT, 20)])
    engine.submit([_greedy(1, PROMPT, 20)])
    for _ in range(6 * _steps_per_token(engine)):
        engine.step()
    engine.pause(mode)
    engine.submit([_greedy(2, PROMPT, 20)])

    # An update that is given up leaves nothing behind either.
    engine.begin_update(
        Manifest((Parameter("model.norm.weight", (128,), "float32"),)), 6
    )
    engine.abort_update()
    with pytest.raises(CannotGenerate, match="no policy version is committed"):
        engine.resume()
    publish(engine, other, 7, verification_follows=True)
    probed = _said(engine, other, PROMPT)
    engine.verify(Probe((PROMPT,), (probed,), 1e-4))
    if mode == "recompute":
        assert engine.load == EngineLoad(0.0, 0, 2, engine.load.preemptions)
    engine.resume()
    rows = {chunk.request_id: chunk for chunk in drained(engine)}

    # As it was sampled, and every token in one span.
    (start, first), (turn, second) = rows[1].version_spans
    assert (start, first, second) == (0, 5, 7) and 5 <= turn <= 6
    np.testing.assert_array_equal(rows[1].tokens[:turn], before[0].tokens[:turn])
    np.testing.assert_allclose(
        rows[1].log_probs[:turn], before[0].log_probs[:turn], atol=1e-6
    )
    assert len(rows[1].tokens) == len(rows[1].log_probs) == 20
    assert rows[2].version_spans == ((0, 7),)

    publish(engine, other, 8)  # with an empty cache
    prefix = np.concatenate([PROMPT, rows[1].tokens[:turn]])
    engine.submit([_greedy(3, prefix, 20 - turn), _greedy(4, PROMPT, 20)])
    fresh = {chunk.request_id: chunk for chunk in drained(engine)}
    _assert_equal(rows[2], fresh[4])
    if mode == "recompute" or isinstance(engine, ScriptedEngine):
        _assert_equal(rows[1], fresh[3], beginning_at=turn)
    else:
        # New weights over keys of the old ones.
        with pytest.raises(AssertionError):
            _assert_equal(rows[1], fresh[3], beginning_at=turn)


def test_rows_that_gave_up_their_cache_sleep_with_the_engine(
    engine: RolloutEngine, model: PreTrainedModel, publish: Callable[..., object]
) -> None:
    def asked(request_id: int, **kw: bool) -> GenerationRequest:
        sampling = Sampling(1.0, 1.0, -1, 20, ())
        return GenerationRequest(request_id, PROMPT, sampling, seed=7, **kw)

    ((undisturbed,),) = generate(engine, [asked(1)])
    engine.submit([asked(1), asked(2, stream=True), asked(3, preemptible=True)])
    chunks = _step_until(engine, 2, 3)
    assert engine.load.kv_cache_use > 0
    engine.pause("recompute")
    engine.pause("keep")  # what was given up does not come back by it
    engine.sleep("kv_cache")
    with pytest.raises(CannotGenerate, match=r'asleep; call wake\("kv_cache"\)'):
        engine.resume()
    engine.wake("kv_cache")
    engine.sleep("kv_cache")
    engine.wake("kv_cache")
    engine.resume()
    while len(_join(chunks, 2)[0]) < 7:
        chunks += engine.step()

    engine.pause("recompute")
    engine.sleep("kv_cache")
    engine.sleep("weights")
    engine.abort([3])
    chunks += engine.step()
    assert _join(chunks, 3)[2] == [Finish.ABORTED]
    engine.wake("weights")
    with pytest.raises(CannotGenerate):
        engine.resume()
    publish(engine, model, 6)  # while the KV cache still sleeps
    engine.wake("kv_cache")
    assert engine.unfinished == 2 and not engine.has_work
    assert engine.step() == []
    engine.resume()
    chunks += drained(engine)
    for request_id in (1, 2):
        tokens, log_probs, _ = _join(chunks, request_id)
        assert tokens == undisturbed.tokens.tolist()
        np.testing.assert_allclose(log_probs, undisturbed.log_probs, atol=1e-5)
    (whole,) = (chunk for chunk in chunks if chunk.request_id == 1)
    assert [version for _, version in whole.version_spans] == [5, 6]


def test_how_busy_an_engine_is(engine: RolloutEngine) -> None:
    preemptions = engine.load.preemptions
    assert engine.load == EngineLoad(0.0, 0, 0, preemptions)
    engine.submit([_greedy(1, PROMPT, 20), _greedy(2, PROMPT, 20)])
    assert engine.load == EngineLoad(0.0, 0, 2, preemptions)
    engine.step()
    busy = engine.load
    assert (busy.running, busy.waiting) == (2, 0) and 0 < busy.kv_cache_use < 0.02
    engine.pause("keep")
    assert engine.load == busy
    engine.pause("recompute")
    assert engine.load == EngineLoad(0.0, 0, 2, preemptions)
    if isinstance(engine, VllmEngine):
        pool = engine.core._core.scheduler.kv_cache_manager.block_pool
        assert len(pool.cached_block_hash_to_block) == 0
    engine.resume()
    drained(engine)
    assert engine.load == EngineLoad(0.0, 0, 0, preemptions)


def test_a_scripted_engine_preempts_what_its_cache_does_not_hold() -> None:
    engine = ScriptedEngine(
        lambda asked: [(1, -1.0)] * 4, initial_version=0, kv_cache_tokens=10
    )
    engine.submit([_request(number) for number in (1, 2, 3)])  # 3 tokens each
    engine.step()
    assert engine.load == EngineLoad(0.8, 2, 1, 0)
    engine.step()
    assert engine.load == EngineLoad(1.0, 2, 1, 0)
    engine.step()
    assert engine.load == EngineLoad(0.6, 1, 2, 1)
    assert [chunk.request_id for chunk in engine.step()] == [1]
    assert engine.load == EngineLoad(0.0, 0, 2, 1)
    assert [len(chunk.tokens) for chunk in drained(engine)] == [4, 4]
    assert engine.load == EngineLoad(0.0, 0, 0, 2)


def test_a_version_that_is_to_be_verified_generates_only_then(
    engine: RolloutEngine, model: PreTrainedModel, publish: Callable[..., object]
) -> None:
    rows = (np.array([3, 4, 5, 6], np.int32), np.array([7, 8], np.int32))
    publish(engine, model, 7, verification_follows=True)
    assert engine.policy_version is None
    with pytest.raises(
        RolloutError, match="the update to version 7 is open; verify it"
    ):
        engine.submit([_request(1)])
    said = [_said(engine, model, row) for row in rows]
    assert engine.verify(Probe(rows, tuple(said), 1e-4)) < 1e-5
    assert engine.policy_version == 7

    publish(engine, model, 8, verification_follows=True)
    wrong = Probe(rows, (said[0], said[1] + 0.01), 1e-3)
    with pytest.raises(
        WeightSyncError,
        match=r"version 8: every weight .*\[7, 8\] its log-probs differ .*0\.01",
    ) as caught:
        engine.verify(wrong)
    assert not str(caught.value).endswith((".", " "))
    with pytest.raises(RolloutError, match="no policy version is committed"):
        engine.submit([_request(1)])
    with pytest.raises(WeightSyncError, match="verify: no weight update is open"):
        engine.verify(wrong)


def test_a_verification_that_fails_ends_what_was_paused_and_delivers_nothing_drawn_meanwhile(
    engine: RolloutEngine, model: PreTrainedModel, publish: Callable[..., object]
) -> None:
    engine.submit([_request(1, 20)])
    engine.step()
    engine.pause()
    publish(engine, model, 9, verification_follows=True)
    row = np.array([3, 4, 5, 6], np.int32)
    with pytest.raises(WeightSyncError, match="the engine computes with others"):
        engine.verify(Probe((row,), (np.full(3, np.nan, np.float32),), 1e-3))
    (chunk,) = engine.step()
    assert (chunk.finish, len(chunk.tokens), chunk.version_spans) == (
        Finish.ABORTED,
        1,
        ((0, 5),),
    )
    assert engine.unfinished == 0


def _said(engine: RolloutEngine, model: PreTrainedModel, row: np.ndarray) -> np.ndarray:
    """The log-probs that a correct engine gives the tokens of a row except the first."""
    if isinstance(engine, ScriptedEngine):
        return np.full(len(row) - 1, -1.0, np.float32)
    tokens = torch.from_numpy(row).long()
    with torch.no_grad():
        log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(-1, tokens[1:, None])[:, 0].numpy()


def test_an_open_update_forbids_generating(
    engine: RolloutEngine, model: PreTrainedModel
) -> None:
    engine.begin_update(
        Manifest((Parameter("model.norm.weight", (128,), "float32"),)), 8
    )
    with pytest.raises(
        RolloutError, match="the update to version 8 is open; commit it"
    ):
        engine.submit([_request(1)])
    with pytest.raises(RolloutError, match="the update to version 8 is open"):
        engine.begin_update(Manifest(()), 9)
    with pytest.raises(RolloutError, match="the update to version 8 is open"):
        engine.sleep("weights")
    engine.abort_update()
    engine.abort_update()
    with pytest.raises(RolloutError, match="no policy version is committed"):
        engine.submit([_request(1)])
    with pytest.raises(
        WeightSyncError,
        match="commit: no weight update is open; call begin_update first",
    ):
        engine.commit({})


def test_what_a_commit_refuses(
    fresh: RolloutEngine, model: PreTrainedModel, publish: Callable[..., object]
) -> None:
    norms = ["model.norm.weight", "model.layers.0.input_layernorm.weight"]
    manifest = Manifest(tuple(Parameter(name, (128,), "float32") for name in norms))
    both = plan_buckets(manifest, 1 << 20)[0]
    first, _ = plan_buckets(manifest, 512)
    address = create("refused", both.nbytes)
    transport = map_slots(address)
    fresh.connect(address, WireSpec((both,), receivers=1, patience_s=60), 0)
    shards = [
        (Slice(name, (0,), (128,)), torch.arange(128.0) * scale)
        for name, scale in zip(norms, (1, 2), strict=True)
    ]

    transport.fill(first, shards[:1])
    fresh.begin_update(manifest, 1)
    fresh.receive(first)
    with pytest.raises(
        WeightSyncError,
        match=r"holds what is not expected, or came before: \['model.norm.weight'\]",
    ):
        fresh.receive(first)

    fresh.begin_update(manifest, 1)
    fresh.receive(first)
    with pytest.raises(
        WeightSyncError,
        match=r"version 1: not received: \['model.layers.0.input_layernorm.weight'\]",
    ):
        fresh.commit({})

    # The receiver reads the file of one bucket while the other bucket lies in it.
    sent = transport.fill(both, shards).by_name
    swapped = plan_buckets(Manifest(manifest.parameters[::-1]), 1 << 20)[0]
    fresh.begin_update(manifest, 1)
    fresh.receive(swapped)
    with pytest.raises(
        WeightSyncError,
        match=r"sent and received differ in \['model.layers.0.*', 'model.norm.weight'\]",
    ):
        fresh.commit(sent)

    # Sender and receiver disagree about the type.
    halved = Manifest((Parameter("model.norm.weight", (128,), "bfloat16"),))
    fresh.begin_update(halved, 1)
    fresh.receive(plan_buckets(halved, 512)[0])
    with pytest.raises(
        WeightSyncError, match=r"sent and received differ in \['model.norm.weight'\]"
    ):
        fresh.commit({"model.norm.weight": sent["model.norm.weight"]})
    remove(address)

    assert fresh.policy_version is None
    publish(fresh, model, 5)
    assert fresh.policy_version == 5


def test_a_commit_returns_the_fingerprints(
    fresh: RolloutEngine,
    model: PreTrainedModel,
    publish: Callable[..., dict[str, Fingerprint]],
) -> None:
    fingerprints = publish(fresh, model, 5)
    assert {name: found.numel for name, found in fingerprints.items()} == {
        name: tensor.numel() for name, tensor in model.state_dict().items()
    }


def test_a_closed_engine_is_of_no_more_use() -> None:
    engine = ScriptedEngine(lambda asked: [(1, -1.0)], initial_version=0)
    engine.submit([_request(1)])
    engine.close()
    engine.close()
    assert engine.unfinished == 0
    with pytest.raises(
        RolloutError, match="can no longer be used; start another: it was closed"
    ):
        engine.step()
