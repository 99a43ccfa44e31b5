"""One rollout replica: an engine behind a server, in a process of its own.

Invariant: responses are handed on as soon as enough of them are finished, whole and in no particular order; which
tokens a response has depends on its seed, not on what ran beside it. Deliberately not here: which replica draws what,
and what happens when one is lost (`controllers/rollouts`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.lanes import concurrent, steering, when_nobody_listens
from verl_ray.config.roles import LoraConfig
from verl_ray.config.rollout import RolloutConfig, RolloutEngineConfig
from verl_ray.data.batch import Int64, Ragged, offsets_of
from verl_ray.data.stages import UNFINISHED, Finish, Prompts, Requests, Responses, Rollouts, versions_of
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import EngineFailed, VerlRayError
from verl_ray.profiling.reads import counting_reads
from verl_ray.rollout.base import Part, RolloutEngine
from verl_ray.rollout.requests import Chunk, Request, Sampling
from verl_ray.rollout.seeds import row_seeds
from verl_ray.rollout.server import Health, PauseMode, RolloutServer
from verl_ray.rollout.update import Probe
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import Address, Route

if TYPE_CHECKING:
    from verl_ray.rollout.endpoint import Endpoint


@dataclass(frozen=True)
class RolloutSpec:
    """The engine of one replica. Its weights come by weight sync."""

    model_path: str
    config: RolloutConfig
    max_model_len: int
    seed: int
    name: str
    """What clients outside of the run call the policy."""
    lora: LoraConfig | None = None
    """The adapter that comes beside the model, which then comes only once."""
    asleep: Part | None = None
    """What the engine frees as soon as it has started: others have the memory until the first weights come."""


@dataclass(frozen=True)
class Generation:
    """What to draw for each prompt."""

    purpose: str
    """Part of every seed: rollouts for training and for evaluation never share a random stream."""
    group_size: int
    sampling: Sampling
    run_seed: int
    stream_rows: int
    """Responses are handed on once this many are finished."""


class RolloutWorker:
    """Requests are served beside each other and beside everything else; weights and memory one call after another."""

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        def start() -> RolloutEngine:
            return start_engine(
                context, spec.model_path, spec.config, max_model_len=spec.max_model_len, seed=spec.seed,
                sleeps=spec.config.frees is not None, lora=spec.lora,
            )  # fmt: skip

        self.server = RolloutServer(start)
        self._waits_for_sender = False
        if spec.asleep is not None:
            self.sleep(spec.asleep)
        self.endpoint = start_endpoint(self.server, context, spec) if spec.config.endpoint.enabled else None

    # ------------------------------------------------------------------------------------------------ generation

    @concurrent
    def generate(self, prompts: Prompts, generation: Generation, wanted: Int64 | None = None) -> Iterator[Rollouts]:
        """`group_size` responses to each prompt, as they finish. The row id of response j of a group is
        group_id * group_size + j.

        wanted: the row ids to draw, of those of these prompts, int64 [rows]; None = all.

        Raises:
            RolloutError: the engine refuses to draw them now.
            EngineFailed: the engine failed, or what it answered cannot be used: this replica is lost.
        """
        try:
            yield from self._generate(prompts, generation, wanted)
        except VerlRayError:
            raise
        except Exception as error:  # a defect of this process, which another one may not have
            raise EngineFailed(f"rollout engine: its answers cannot be used: {error!r}") from error

    def _generate(self, prompts: Prompts, generation: Generation, wanted: Int64 | None) -> Iterator[Rollouts]:
        size = generation.group_size
        row_id = np.repeat(prompts.group_id * size, size) + np.tile(np.arange(size), prompts.num_rows)
        prompt = np.repeat(np.arange(prompts.num_rows), size)
        if wanted is not None:
            kept = np.isin(row_id, wanted)
            row_id, prompt = row_id[kept], prompt[kept]
        prompt_of = dict(zip(row_id.tolist(), prompt.tolist(), strict=True))
        seeds = row_seeds(generation.run_seed, generation.purpose, row_id).tolist()
        tokens = np.split(prompts.tokens, prompts.offsets[1:-1])
        requests = [
            Request(number, tokens[of], generation.sampling, seed, session=str(prompts.group_id[of]))
            for (number, of), seed in zip(prompt_of.items(), seeds, strict=True)
        ]
        finished: list[Chunk] = []
        drawn = 0
        answers = self.server.respond(requests)
        when_nobody_listens(answers.close)
        for chunks in answers:
            finished += chunks
            if len(finished) >= generation.stream_rows or drawn + len(finished) == len(requests):
                yield _rollouts(prompts, prompt_of, finished)
                drawn += len(finished)
                finished = []

    @concurrent
    def respond(self, requests: Requests, sampling: Sampling, stream: bool = True) -> Iterator[Responses]:
        """Continue token sequences, many callers at once; tokens as they are drawn, or each response as it ends."""
        tokens = np.split(requests.tokens, requests.offsets[1:-1])
        columns = zip(requests.request_id.tolist(), tokens, requests.seed.tolist(), requests.session, strict=True)
        asked = [
            Request(number, row, sampling, seed, stream, session=str(session)) for number, row, seed, session in columns
        ]
        answers = self.server.respond(asked, by_name=True)
        when_nobody_listens(answers.close)
        for chunks in answers:
            yield _responses(chunks)

    @steering
    def pause(self, mode: PauseMode) -> None:
        """Stop drawing; see `RolloutServer.pause`."""
        self.server.pause(mode)

    @steering
    def resume(self) -> None:
        self.server.resume()

    @steering
    def abort_requests(self, request_ids: tuple[int, ...]) -> None:
        """End requests of `respond` early; each comes back to its caller as far as it got."""
        self.server.abort(request_ids)

    def abort(self) -> None:
        """End all requests of the run early; they come back as far as they got."""
        self.server.abort()

    def health(self) -> Health:
        return self.server.health()

    def endpoint_port(self) -> int | None:
        """Where clients outside of the run are listened to, if they are."""
        return None if self.endpoint is None else self.endpoint.port

    # ------------------------------------------------------------------------------------- memory and weights

    def sleep(self, part: Part) -> None:
        self.server.run(lambda engine: engine.sleep(part))

    def wake(self, part: Part) -> None:
        self.server.run(lambda engine: engine.wake(part))

    def connect(self, address: Address, route: Route, first_receiver: int) -> None:
        """Meet the actor, whose ranks connect at the same time."""
        self._waits_for_sender = address.ends_meet
        self.server.run(
            lambda engine: engine.connect(address, route, first_receiver), waits_for_others=self._waits_for_sender
        )

    def begin_update(self, manifest: Manifest, version: int) -> None:
        self.server.run(lambda engine: engine.begin_update(manifest, version))

    def receive(self, bucket: Bucket) -> None:
        self.server.run(lambda engine: engine.receive(bucket), waits_for_others=self._waits_for_sender)

    def commit(self, sent: Mapping[str, Fingerprint], proof_follows: bool) -> float:
        """Accept the version if what arrived is what was sent; the seconds that its fingerprints took."""
        return self.server.run(lambda engine: engine.commit(sent, proof_follows=proof_follows)).seconds

    def prove(self, probe: Probe) -> float:
        """Accept the version if the engine computes with it what the trainer does; the largest difference."""
        return self.server.run(lambda engine: engine.prove(probe))

    def abort_update(self) -> None:
        self.server.run(lambda engine: engine.abort_update())

    def memory_bytes(self) -> int:
        return self.server.run(lambda engine: engine.memory_bytes)

    def close(self) -> None:
        if self.endpoint is not None:
            self.endpoint.close()
        self.server.close(process_ends=True)


def start_endpoint(server: RolloutServer, context: WorkerContext, spec: RolloutSpec) -> Endpoint:
    """The server's own endpoint for clients outside of the run."""
    from verl_ray.rollout.endpoint import Endpoint  # here, because only a run that asks for it needs an HTTP server

    config = spec.config.endpoint
    return Endpoint(
        server, load_tokenizer(spec.model_path), config, port=config.port and config.port + context.rank,
        model=spec.name, max_model_len=spec.max_model_len,
    )  # fmt: skip


def start_engine(
    context: WorkerContext,
    model_path: str,
    config: RolloutEngineConfig,
    *,
    max_model_len: int,
    seed: int,
    initial_version: int | None = None,
    sleeps: bool = False,
    lora: LoraConfig | None = None,
) -> RolloutEngine:
    """vLLM in this process, which must not have imported it yet."""
    from verl_ray.rollout.vllm_engine import VllmEngine
    from verl_ray.rollout.vllm_setup import environment

    device = context.device.partition(":")[0]
    os.environ.update(environment(device, context.threads, config.tensor_parallel))
    with counting_reads():
        return VllmEngine(
            model_path, config, max_model_len=max_model_len, seed=seed, device=device, initial_version=initial_version,
            sleeps=sleeps, lora=lora,
        )  # fmt: skip


def _rollouts(prompts: Prompts, prompt_of: Mapping[int, int], chunks: list[Chunk]) -> Rollouts:
    """Finished responses behind their prompts, as rows."""
    row_id = np.array([chunk.request_id for chunk in chunks], np.int64)
    asked = prompts.select([prompt_of[chunk.request_id] for chunk in chunks])
    response_length = np.array([len(chunk.tokens) for chunk in chunks], np.int32)
    prompt_length = asked.lengths.astype(np.int32)
    offsets = offsets_of(prompt_length + response_length)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    mask = position >= np.repeat(prompt_length, np.diff(offsets))
    tokens = np.empty(len(mask), np.int32)
    tokens[~mask] = asked.tokens
    tokens[mask] = np.concatenate([chunk.tokens for chunk in chunks])
    log_probs = np.zeros(len(mask), np.float32)
    log_probs[mask] = np.concatenate([chunk.log_probs for chunk in chunks])
    spans = _spans(chunks, prompt_length)
    return Rollouts(
        offsets=offsets,
        tokens=tokens,
        response_mask=mask,
        row_id=row_id,
        trajectory_id=row_id,
        group_id=asked.group_id,
        prompt_length=prompt_length,
        response_length=response_length,
        finish=np.array([Finish.ABORTED if chunk.finish is None else chunk.finish for chunk in chunks], np.int8),
        rollout_log_probs=log_probs,
        version_spans=spans,
        **versions_of(spans),
        messages=asked.messages,
        data_source=asked.data_source,
        answer=asked.answer,
        extra=asked.extra,
    )


def _responses(chunks: list[Chunk]) -> Responses:
    """Parts of responses, as rows."""
    return Responses(
        offsets=offsets_of(np.array([len(chunk.tokens) for chunk in chunks])),
        request_id=np.array([chunk.request_id for chunk in chunks], np.int64),
        first_token=np.array([chunk.first_token for chunk in chunks], np.int32),
        finish=np.array([UNFINISHED if chunk.finish is None else chunk.finish for chunk in chunks], np.int8),
        tokens=np.concatenate([chunk.tokens for chunk in chunks]),
        log_probs=np.concatenate([chunk.log_probs for chunk in chunks]),
        version_spans=_spans(chunks, np.zeros(len(chunks), np.int32)),
    )


def _spans(chunks: list[Chunk], shift: npt.NDArray[np.int32]) -> Ragged:
    """Version spans of each chunk, counted from `shift` tokens earlier, int64 [spans, 2]."""
    counts = np.array([len(chunk.version_spans) for chunk in chunks])
    spans = np.array([span for chunk in chunks for span in chunk.version_spans], np.int64).reshape(-1, 2)
    spans[:, 0] += np.repeat(shift, counts)
    return Ragged(spans, offsets_of(counts))
