"""One rollout replica: an engine in a process of its own, driven through the rollout contract.

Invariant: responses are handed on as soon as enough of them are finished, whole and in no particular order; which
tokens a response has depends on its seed, not on what ran beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from verl_ray.cluster.context import WorkerContext
from verl_ray.config.rollout import RolloutConfig, RolloutEngineConfig
from verl_ray.data.batch import Ragged, offsets_of
from verl_ray.data.stages import Finish, Prompts, Rollouts
from verl_ray.rollout.base import Chunk, Part, Request, RolloutEngine, Sampling
from verl_ray.rollout.seeds import row_seeds
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import Address


@dataclass(frozen=True)
class RolloutSpec:
    """The engine of one replica. Its weights come by weight sync."""

    model_path: str
    config: RolloutConfig
    max_model_len: int
    seed: int


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
    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        self.engine = start_engine(
            context, spec.model_path, spec.config, max_model_len=spec.max_model_len, seed=spec.seed,
            sleeps=spec.config.sleep != "never",
        )  # fmt: skip

    def generate(self, prompts: Prompts, generation: Generation) -> Iterator[Rollouts]:
        """`group_size` responses to each prompt, as they finish. The row id of response j of a group is
        group_id * group_size + j."""
        size = generation.group_size
        row_id = np.repeat(prompts.group_id * size, size) + np.tile(np.arange(size), prompts.num_rows)
        prompt_of = dict(zip(row_id.tolist(), np.repeat(np.arange(prompts.num_rows), size).tolist(), strict=True))
        seeds = row_seeds(generation.run_seed, generation.purpose, row_id).tolist()
        tokens = np.split(prompts.tokens, prompts.offsets[1:-1])
        requests = [
            Request(number, tokens[prompt], generation.sampling, seed, session=str(prompt))
            for (number, prompt), seed in zip(prompt_of.items(), seeds, strict=True)
        ]
        self.engine.submit(requests)
        finished: list[Chunk] = []
        while self.engine.unfinished:
            finished += self.engine.step()
            if len(finished) >= generation.stream_rows or (finished and not self.engine.unfinished):
                yield _rollouts(prompts, prompt_of, finished)
                finished = []

    def abort(self) -> None:
        """End all requests in flight early; they come back as far as they got."""
        self.engine.abort()

    # ------------------------------------------------------------------------------------- memory and weights

    def sleep(self, part: Part) -> None:
        self.engine.sleep(part)

    def wake(self, part: Part) -> None:
        self.engine.wake(part)

    def begin_update(self, manifest: Manifest, version: int) -> None:
        self.engine.begin_update(manifest, version)

    def receive(self, bucket: Bucket, address: Address) -> None:
        self.engine.receive(bucket, address)

    def commit(self, expected: Mapping[str, Fingerprint]) -> None:
        """Accept the version if what arrived is what was sent."""
        self.engine.commit(expected)

    def abort_update(self) -> None:
        self.engine.abort_update()

    def memory_bytes(self) -> int:
        return self.engine.memory_bytes

    def close(self) -> None:
        self.engine.close(process_ends=True)


def start_engine(
    context: WorkerContext,
    model_path: str,
    config: RolloutEngineConfig,
    *,
    max_model_len: int,
    seed: int,
    initial_version: int | None = None,
    sleeps: bool = False,
) -> RolloutEngine:
    """vLLM in this process, which must not have imported it yet."""
    from verl_ray.rollout.vllm_engine import VllmEngine, environment

    device = context.device.partition(":")[0]
    os.environ.update(environment(device, context.threads, config.tensor_parallel))
    return VllmEngine(
        model_path, config, max_model_len=max_model_len, seed=seed, device=device, initial_version=initial_version,
        sleeps=sleeps,
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
    spans = np.stack([prompt_length, [chunk.policy_version for chunk in chunks]], axis=1).astype(np.int64)
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
        version_spans=Ragged(spans, np.arange(len(chunks) + 1)),
        messages=asked.messages,
        data_source=asked.data_source,
        answer=asked.answer,
        extra=asked.extra,
    )
