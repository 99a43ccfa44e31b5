"""One rollout replica: an engine behind a server, in its own process.

Invariant: responses are yielded as soon as enough of them are finished, whole and in no
particular order; the tokens of a response depend on its seed, not on other requests of
the engine.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from verl_ray.agents.contract import Episode
from verl_ray.agents.tasks import environments_of
from verl_ray.agents.wire import EpisodeStart
from verl_ray.cluster.context import WorkerContext, concurrent, steering, when_abandoned
from verl_ray.columns.batch import Int64, Ragged, offsets_of
from verl_ray.columns.seeds import row_seeds
from verl_ray.columns.stages import (
    UNFINISHED,
    Finish,
    Int16,
    Prompts,
    Requests,
    Responses,
    Rollouts,
    prompt_columns,
    versions_of,
)
from verl_ray.config.agent import AgentConfig
from verl_ray.config.data import SpecialTokens
from verl_ray.config.roles import LoraConfig
from verl_ray.config.rollout import RolloutConfig, RolloutEngineConfig
from verl_ray.data.tokenizers import PRESENT_TIME, load_tokenizer
from verl_ray.errors import EngineFailed, RolloutError, VerlRayError
from verl_ray.ops.installed_torch import choose_vector_program
from verl_ray.profiling.progress import touch
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.engine_state import EngineMemoryPart
from verl_ray.rollout.episode_counts import EpisodeCounts
from verl_ray.rollout.episodes import EpisodePool
from verl_ray.rollout.probes import Probe
from verl_ray.rollout.requests import Chunk, GenerationRequest, Sampling
from verl_ray.rollout.server import PauseMode, RolloutServer, ServerHealth
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import Bucket, Experts, Manifest
from verl_ray.weight_sync.transport import SealedAddress, WireSpec
from workers.episodes import beside_episodes, episode_requests, episode_rollouts
from workers.generation import Generation

if TYPE_CHECKING:
    from verl_ray.rollout.endpoint import Endpoint


T = TypeVar("T")

HELD_S = 1.0
"""Longest time that a finished response waits for others to be yielded with it."""


@dataclass(frozen=True)
class RolloutSpec:
    """Engine of one replica. Its weights come by weight sync."""

    model_path: str
    config: RolloutConfig
    max_model_len: int
    seed: int
    name: str
    """Name of the policy for clients outside of the run."""
    lora: LoraConfig | None = None
    """The adapter, which is synced separately; the model is then synced only once."""
    asleep: EngineMemoryPart | None = None
    """Memory that the engine frees as soon as it has started. Other processes use it
    until the first weights come."""
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    """Variables of the chat template, for clients outside of the run."""
    chat_template: str | None = None
    """Text of the chat template that replaces the model's."""
    agent: AgentConfig | None = None
    """The environments of episodes; None where rollouts are single responses."""
    template_day: str | None = None
    """The day that the chat template writes; None if it writes none."""
    special_tokens: SpecialTokens = "escape"
    """What happens to special tokens that the texts of episodes spell."""
    trusts_code: bool = False
    """Whether the code in the model's directory may run."""


@dataclass(frozen=True)
class ReplicaHealth(ServerHealth):
    """State of a replica: of its server, and of its endpoint.

    Attributes:
        endpoint_port: Port for clients outside of the run; None while it is not open.
    """

    endpoint_port: int | None = None


class RolloutWorker:
    """Worker of one rollout replica.

    Requests are served concurrently. Calls about weights and memory run one after
    another.
    """

    episodes: EpisodePool | None = None
    agent: AgentConfig | None = None

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        # Runs on the server's thread, the only one that touches the engine.
        def start() -> RolloutEngine:
            return start_engine(
                context,
                spec.model_path,
                spec.config,
                max_model_len=spec.max_model_len,
                seed=spec.seed,
                sleeps=spec.config.freed_by_sleep is not None,
                lora=spec.lora,
                chat_template=spec.chat_template,
                trusts_code=spec.trusts_code,
                records_routing=spec.config.routing_replay,
            )

        self.server = RolloutServer(start)
        self._waits_for_sender = False
        if spec.asleep is not None:
            self.sleep(spec.asleep)
        if spec.agent is not None:
            self.episodes = start_episodes(self.server, spec, spec.agent)
        self.agent = spec.agent
        self.endpoint: Endpoint | None = None
        if spec.config.endpoint.enabled:
            self.endpoint = start_endpoint(self.server, context, spec)

    # ----------------------------------------------------------------------- generation

    @concurrent
    def generate(
        self,
        prompts: Prompts,
        generation: Generation,
        requested_rows: Int64 | None = None,
    ) -> Iterator[Rollouts]:
        """Yield `group_size` responses to each prompt, as they finish.

        The row id of response j of a group is group_id * group_size + j.

        Args:
            requested_rows: Only these row ids of the groups are generated, int64
                [rows]; None generates all.

        Raises:
            RolloutError: the engine cannot generate now.
            EngineFailed: the engine failed, or its replies cannot be used: this replica
                is lost.
        """
        try:
            if self.episodes is None:
                yield from self._generate(prompts, generation, requested_rows)
            else:
                yield from self._run_episodes(
                    self.episodes, prompts, generation, requested_rows
                )
        except VerlRayError:
            raise
        # A defect of this process, which another one may not have.
        except Exception as error:
            raise EngineFailed(
                f"rollout engine: its replies cannot be used: {error!r}"
            ) from error

    def _generate(
        self, prompts: Prompts, generation: Generation, requested_rows: Int64 | None
    ) -> Iterator[Rollouts]:
        prompt_of = _prompt_of_rows(prompts, generation.group_size, requested_rows)
        requests = _requests(prompts, generation, prompt_of)

        shape = self.server.routing_shape if generation.keeps_routing else None
        stream = self.server.respond(requests)
        # Nobody would read the responses of an abandoned call: its requests are aborted
        when_abandoned(stream.close)
        for chunks in _batches(stream, generation.stream_rows):
            yield whole_rollouts(prompts, prompt_of, chunks, shape)

    def _run_episodes(
        self,
        episodes: EpisodePool,
        prompts: Prompts,
        generation: Generation,
        requested_rows: Int64 | None,
    ) -> Iterator[Rollouts]:
        assert self.agent is not None
        prompt_of = _prompt_of_rows(prompts, generation.group_size, requested_rows)
        names = environments_of(prompts, self.agent.environments)
        single_requests = {
            row: prompt for row, prompt in prompt_of.items() if names[prompt] is None
        }
        episode_prompts = {
            row: prompt
            for row, prompt in prompt_of.items()
            if row not in single_requests
        }
        stream = episodes.run(
            episode_requests(prompts, generation, episode_prompts),
            _requests(prompts, generation, single_requests),
        )
        when_abandoned(stream.close)
        for ended in _batches(stream, generation.stream_rows):
            whole = [(row, each) for row, each in ended if isinstance(each, Episode)]
            chunks = [each for _, each in ended if isinstance(each, Chunk)]
            shape = self.server.routing_shape if generation.keeps_routing else None
            if whole:
                treatments = self.agent.treatments
                yield episode_rollouts(prompts, prompt_of, whole, treatments, shape)
            if chunks:
                singles = whole_rollouts(prompts, prompt_of, chunks, shape)
                yield beside_episodes(singles)

    @concurrent
    def respond(
        self, requests: Requests, sampling: Sampling, stream: bool = True
    ) -> Iterator[Responses]:
        """Continue token sequences; many callers may do so at once.

        Args:
            stream: Whether to yield tokens as they are sampled, or each response as it
                ends.
        """
        tokens = np.split(requests.tokens, requests.offsets[1:-1])
        columns = zip(
            requests.request_id.tolist(),
            tokens,
            requests.seed.tolist(),
            requests.session,
            strict=True,
        )
        generation_requests = [
            GenerationRequest(number, row, sampling, seed, stream, session=str(session))
            for number, row, seed, session in columns
        ]

        chunk_stream = self.server.respond(generation_requests, abortable_by_id=True)
        when_abandoned(chunk_stream.close)
        # Waits for the next chunks, and ends with the last response.
        for chunks in chunk_stream:
            yield response_parts(chunks)

    @steering
    def pause(self, mode: PauseMode) -> None:
        """Stop generating; see `RolloutServer.pause`."""
        if self.episodes is not None:
            self.episodes.pause()
        self.server.pause(mode)

    @steering
    def resume(self) -> None:
        """Generate again."""
        # A pause as long as a training step is no stall.
        touch()
        self.server.resume()
        if self.episodes is not None:
            self.episodes.resume()

    @steering
    def abort_requests(self, request_ids: tuple[int, ...]) -> None:
        """Abort requests of `respond`; each caller gets the tokens so far."""
        self.server.abort(request_ids)

    def abort(self) -> None:
        """Abort all requests of the run; their callers get the tokens so far."""
        self.server.abort()

    def health(self) -> ReplicaHealth:
        """State of the engine, its requests and the endpoint."""
        port = self.endpoint_port()
        return ReplicaHealth(**vars(self.server.health()), endpoint_port=port)

    @steering
    def take_episode_counts(self) -> EpisodeCounts:
        """Return what happened to episodes and their processes since the last call."""
        if self.episodes is None:
            return EpisodeCounts()
        return self.episodes.take_counts()

    def endpoint_port(self) -> int | None:
        """Port for clients outside of the run; None while there is none open."""
        if self.endpoint is None:
            return None
        return self.endpoint.port

    # --------------------------------------------------------------- memory and weights

    def sleep(self, part: EngineMemoryPart) -> None:
        """Free this part of the device memory."""
        self.server.run(lambda engine: engine.sleep(part))

    def wake(self, part: EngineMemoryPart) -> None:
        """Allocate this part of the device memory again."""
        self.server.run(lambda engine: engine.wake(part))

    def experts(self) -> list[Experts]:
        """Return the experts that each rank of the engine takes weights for."""
        return self.server.run(lambda engine: engine.experts)

    def connect(
        self, sealed_address: SealedAddress, wire_spec: WireSpec, first_receiver: int
    ) -> None:
        """Connect to the actor, whose ranks connect at the same time."""
        address = sealed_address.unsealed()
        self._waits_for_sender = address.waits_for_peers
        self.server.run(
            lambda engine: engine.connect(address, wire_spec, first_receiver),
            waits_for_others=self._waits_for_sender,
        )

    def begin_update(self, manifest: Manifest, version: int) -> None:
        """Begin to receive a policy version."""
        self.server.run(lambda engine: engine.begin_update(manifest, version))

    def receive(self, buckets: tuple[Bucket, ...]) -> None:
        """Receive and load buckets of weights, one after another."""

        def run(engine: RolloutEngine) -> None:
            for bucket in buckets:
                engine.receive(bucket)

        self.server.run(run, waits_for_others=self._waits_for_sender)

    def commit(
        self, sent: Mapping[str, Fingerprint], verification_follows: bool
    ) -> float:
        """Accept the version if the received weights are those that were sent.

        Returns:
            The seconds that the fingerprints took.
        """
        result = self.server.run(
            lambda engine: engine.commit(
                sent, verification_follows=verification_follows
            )
        )
        return result.seconds

    def verify(self, probe: Probe) -> float:
        """Accept the version if the engine computes the trainer's log-probs with it.

        Returns:
            The largest difference between their log-probs.
        """
        return self.server.run(lambda engine: engine.verify(probe))

    def abort_update(self) -> None:
        """Abort a weight sync that has begun."""
        self.server.run(lambda engine: engine.abort_update())

    def memory_bytes(self) -> int:
        """Device memory that the engine uses now."""
        return self.server.run(lambda engine: engine.memory_bytes)

    def close(self) -> None:
        """Close the endpoint, then the server; the process exits afterwards."""
        # Who makes requests comes first, so that no new ones arrive.
        if self.episodes is not None:
            self.episodes.close()
        if self.endpoint is not None:
            self.endpoint.close()
        self.server.close(process_exits=True)


class _Stream(Protocol[T]):
    """Results of a call that end one by one."""

    @property
    def has_ended(self) -> bool: ...

    def take(self, timeout_s: float | None = None) -> list[T]: ...


def _batches(stream: _Stream[T], num_enough: int) -> Iterator[list[T]]:
    """Yield what a stream has brought, once it is enough or has been held a while.

    What ends together is yielded together: other prompts take its place in the engine.
    """
    held: list[T] = []
    first_s = 0.0
    # The stream ends with the last response.
    while not stream.has_ended:
        timeout_s: float | None = None
        if held:
            timeout_s = max(0.0, first_s + HELD_S - time.monotonic())
        more = stream.take(timeout_s)
        if not held:
            first_s = time.monotonic()
        held += more

        is_enough = len(held) >= num_enough
        is_late = time.monotonic() >= first_s + HELD_S
        if held and (is_enough or is_late or stream.has_ended):
            yield held
            held = []


def _prompt_of_rows(
    prompts: Prompts, group_size: int, requested_rows: Int64 | None
) -> dict[int, int]:
    """Number of the prompt of each row to generate, by row id."""
    index_in_group = np.tile(np.arange(group_size), prompts.num_rows)
    row_ids = np.repeat(prompts.group_id * group_size, group_size) + index_in_group
    prompt_numbers = np.repeat(np.arange(prompts.num_rows), group_size)

    # The other rows of a group may be another replica's.
    if requested_rows is not None:
        is_requested = np.isin(row_ids, requested_rows)
        row_ids = row_ids[is_requested]
        prompt_numbers = prompt_numbers[is_requested]

    prompt_of = dict(zip(row_ids.tolist(), prompt_numbers.tolist(), strict=True))
    assert len(prompt_of) == len(row_ids), "two prompts have the same group id"
    return prompt_of


def _requests(
    prompts: Prompts, generation: Generation, prompt_of: Mapping[int, int]
) -> list[GenerationRequest]:
    """Requests for the rows of `prompt_of`, with their row ids as request ids."""
    row_ids = np.array(list(prompt_of), np.int64)
    seeds = row_seeds(generation.run_seed, generation.purpose, row_ids)
    tokens = np.split(prompts.tokens, prompts.offsets[1:-1])

    requests = []
    for (row_id, prompt), seed in zip(prompt_of.items(), seeds.tolist(), strict=True):
        request = GenerationRequest(
            row_id,
            tokens[prompt],
            generation.sampling_of(row_id),
            seed,
            # The responses to one prompt share its prefix.
            session=str(prompts.group_id[prompt]),
        )
        requests.append(request)
    return requests


def start_episodes(
    server: RolloutServer, spec: RolloutSpec, agent: AgentConfig
) -> EpisodePool:
    """Start the processes of episodes beside the server."""
    # Imported here, because only a run with tools needs vLLM's parsers of their calls.
    from verl_ray.rollout.tool_calls import ActionReader

    tokenizer = load_tokenizer(spec.model_path, spec.chat_template)
    start = EpisodeStart.of_run(
        agent,
        spec.model_path,
        context_tokens=spec.max_model_len,
        row_tokens=spec.config.max_response_tokens,
        chat_template=spec.chat_template,
        template_arguments={
            name: value
            for name, value in spec.template_arguments.items()
            if name != PRESENT_TIME
        },
        template_day=spec.template_day,
        special_tokens=spec.special_tokens,
        policy_name=spec.name,
    )
    return EpisodePool(
        server,
        start,
        ActionReader(
            tokenizer,
            agent.tool_parser,
            agent.reasoning_parser,
            spec.template_arguments,
        ),
        num_processes=agent.processes_per_replica,
        most_open=agent.episodes_per_process,
        max_retries=agent.max_retries,
        retried_ends=agent.retried_ends,
        memory_gib=agent.process_memory_gib,
        # A call that does not await holds up all others of its process.
        stall_s=agent.tool_timeout_s + 10.0,
    )


def start_endpoint(
    server: RolloutServer, context: WorkerContext, spec: RolloutSpec
) -> Endpoint:
    """Start the server's endpoint for clients outside of the run."""
    # Imported here, because only a run with an endpoint needs an HTTP server.
    from verl_ray.rollout.endpoint import Endpoint

    config = spec.config.endpoint
    # Port 0 lets the system choose; replicas on one machine need different ports.
    port = config.port and config.port + context.rank
    return Endpoint(
        server,
        load_tokenizer(spec.model_path, spec.chat_template),
        config,
        port=port,
        model=spec.name,
        max_model_len=spec.max_model_len,
        arguments=spec.template_arguments,
        # The port was free at the first start, so who has it now may go again.
        waits=context.incarnation > 1,
    )


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
    chat_template: str | None = None,
    trusts_code: bool = False,
    records_routing: bool = False,
) -> RolloutEngine:
    """Start vLLM in this process, which must not have imported it yet."""
    from verl_ray.rollout.vllm_engine import VllmEngine
    from verl_ray.rollout.vllm_environment import environment

    device = context.device.partition(":")[0]
    variables = environment(
        device, context.threads, config.ranks_per_replica, dtype=config.dtype
    )
    os.environ.update(variables)
    # The process has not imported torch before, and vLLM computes as it starts.
    choose_vector_program()
    return VllmEngine(
        model_path,
        config,
        max_model_len=max_model_len,
        seed=seed,
        device=device,
        initial_version=initial_version,
        sleeps=sleeps,
        lora=lora,
        chat_template=chat_template,
        trusts_code=trusts_code,
        records_routing=records_routing,
    )


# ------------------------------------------------------------------- rows from chunks

# Whole rollouts, or parts of responses: pure functions of prompts and chunks.


def whole_rollouts(
    prompts: Prompts,
    prompt_of: Mapping[int, int],
    chunks: list[Chunk],
    routing_shape: tuple[int, int] | None = None,
) -> Rollouts:
    """Rows of finished responses, each behind its prompt.

    Args:
        prompt_of: The number of each response's prompt, by row id.
        chunks: One whole response each, whose request id is the row id.
        routing_shape: As of a `RolloutEngine`.
    """
    row_id = np.array([chunk.request_id for chunk in chunks], np.int64)
    prompt_rows = prompts.select([prompt_of[chunk.request_id] for chunk in chunks])
    prompt_length = prompt_rows.lengths.astype(np.int32)
    response_length = np.array([len(chunk.tokens) for chunk in chunks], np.int32)

    # A token belongs to the response from the end of its row's prompt on.
    lengths = prompt_length + response_length
    offsets = offsets_of(lengths)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = position >= np.repeat(prompt_length, lengths)

    tokens = np.empty(len(mask), np.int32)
    tokens[~mask] = prompt_rows.tokens
    tokens[mask] = np.concatenate([chunk.tokens for chunk in chunks])
    log_probs = np.zeros(len(mask), np.float32)
    log_probs[mask] = np.concatenate([chunk.log_probs for chunk in chunks])
    # The engine counts from the first response token, a rollout from its first token.
    spans = _version_spans(chunks, prompt_length)

    return Rollouts(
        offsets=offsets,
        tokens=tokens,
        response_mask=mask,
        row_id=row_id,
        trajectory_id=row_id,
        prompt_length=prompt_length,
        response_length=response_length,
        finish=_finishes(chunks, unfinished=Finish.ABORTED),
        rollout_log_probs=log_probs,
        version_spans=spans,
        **versions_of(spans),
        **prompt_columns(prompt_rows),
        routed_experts=None
        if routing_shape is None
        else _routed_experts(chunks, offsets, routing_shape),
    )


def _routed_experts(
    chunks: list[Chunk], offsets: Int64, shape: tuple[int, int]
) -> Int16:
    """Return the experts of whole rows, int16 [tokens, layers, k].

    Args:
        chunks: The responses.
        offsets: Of the rows, int64 [rows + 1].
        shape: As of a `RolloutEngine`.
    """
    experts = np.zeros((offsets[-1], *shape), np.int16)
    bounds = itertools.pairwise(offsets.tolist())
    for chunk, (first, end) in zip(chunks, bounds, strict=True):
        # One that was aborted before its first token has none.
        if not len(chunk.tokens):
            continue
        recorded = chunk.routed_experts
        if recorded is None or len(recorded) != end - 1 - first:
            positions = "no" if recorded is None else len(recorded)
            raise RolloutError(
                f"the engine has recorded the experts of {positions} positions of a row"
                f" of {end - first} tokens, expected all but the last"
            )
        experts[first : end - 1] = recorded
    return experts


def response_parts(chunks: list[Chunk]) -> Responses:
    """Rows of parts of responses, without their prompts."""
    no_shift = np.zeros(len(chunks), np.int32)
    return Responses(
        offsets=offsets_of(np.array([len(chunk.tokens) for chunk in chunks])),
        request_id=np.array([chunk.request_id for chunk in chunks], np.int64),
        first_token=np.array([chunk.first_token for chunk in chunks], np.int32),
        finish=_finishes(chunks, unfinished=UNFINISHED),
        tokens=np.concatenate([chunk.tokens for chunk in chunks]),
        log_probs=np.concatenate([chunk.log_probs for chunk in chunks]),
        version_spans=_version_spans(chunks, no_shift),
    )


def _finishes(chunks: list[Chunk], unfinished: int) -> npt.NDArray[np.int8]:
    """The `finish` of each chunk, int8 [chunks], with a number for None."""
    finishes = []
    for chunk in chunks:
        finishes.append(unfinished if chunk.finish is None else chunk.finish)
    return np.array(finishes, np.int8)


def _version_spans(chunks: list[Chunk], shift: npt.NDArray[np.int32]) -> Ragged:
    """Version spans of each chunk, int64 [spans, 2].

    Args:
        shift: Tokens to add to the position of each chunk's spans, int32 [chunks].
    """
    counts = np.array([len(chunk.version_spans) for chunk in chunks])
    pairs = [span for chunk in chunks for span in chunk.version_spans]
    # The shape of an array from an empty list has to be given.
    spans = np.array(pairs, np.int64).reshape(-1, 2)
    spans[:, 0] += np.repeat(shift, counts)
    return Ragged(spans, offsets_of(counts))
