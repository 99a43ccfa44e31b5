"""The proof that vLLM computes what the trainer computes, load after load.

Invariant: the weights come over a wire, loaded as in a run. vLLM runs in a process of
its own, since some of its models change classes of transformers. A difference in
bfloat16 is judged by how far the family's own code is off in bfloat16.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from verl_ray.models.state_kernels import hide_kernels
from verl_ray.processes.trial import Tell, run_trial, try_in_child
from verl_ray.proofs.claims import Claim

if TYPE_CHECKING:
    from torch import Tensor

    from verl_ray.config.rollout import RolloutEngineConfig
    from verl_ray.engine.plain import PlainEngine
    from verl_ray.rollout.probes import Probe
    from verl_ray.rollout.requests import Chunk, Float32, Tokens
    from verl_ray.rollout.vllm_engine import VllmEngine
    from verl_ray.weight_sync.fingerprint import Fingerprint
    from verl_ray.weight_sync.manifest import Manifest, Slice

DEADLINE_S = 300.0
"""Longest time of a proof, most of which is the import of vLLM."""

TOLERANCE = 3e-4
"""Of log-probs in nats, float32 on both sides."""

ROUNDING = 3.0
"""How much further than transformers in bfloat16 vLLM may be from float32, on average.

It is 0.9 to 1.6 times as far. The largest difference would tell less: where rounding
makes a router choose another expert, a token may differ by 3 nats.
"""

LOADS = 3
"""The first load is vLLM's own, the second is recorded, the third goes by a plan."""

NOISE = 0.04
"""Standard deviation of the change of each weight before a further load."""

BUCKET_BYTES = 1 << 20
MAX_MODEL_LEN = 96
KV_CACHE_GIB = 0.03125

RESPONSE_TOKENS = 48
"""Tokens of each response whose time is measured."""


@dataclass(frozen=True)
class RolloutClaims:
    """The claims about vLLM with one implementation of a model and one type."""

    claims: Sequence[Claim]

    tokens_per_s: float | None
    """With which it has generated; None where a load failed."""

    @property
    def hold(self) -> bool:
        """Whether vLLM agrees after every load."""
        return all(claim.holds for claim in self.claims)

    @property
    def are_computed(self) -> bool:
        """Whether vLLM has computed anything."""
        return self.claims[0].number is not None


def prove_rollouts(
    folder: Path,
    *,
    packs_rows: bool,
    has_experts: bool,
    implementation: str,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> RolloutClaims:
    """Compare the log-probs of vLLM with the trainer's, after each of several loads.

    Args:
        folder: The directory of the cut model, with a tokenizer.
        packs_rows: Whether the trainer packs rows.
        has_experts: Whether the model has experts.
        implementation: `model_impl` of vLLM: its own classes ("auto"), or those of
            "transformers".
        dtype: In which vLLM computes. The trainer computes in float32.
    """
    fields = {
        "folder": str(folder),
        "packs_rows": packs_rows,
        "has_experts": has_experts,
        "implementation": implementation,
        "dtype": dtype,
    }
    messages, cause = try_in_child(__name__, fields, DEADLINE_S)
    loads = [message.fields for message in messages if message.kind == "load"]
    claims = [
        Claim(
            _statement(number, implementation, dtype),
            load["difference"],
            load["tolerance"],
            load["where"],
        )
        for number, load in enumerate(loads)
    ]
    if len(claims) < LOADS:
        failure = next(
            (each.fields["failure"] for each in messages if each.kind == "failed"),
            cause,
        )
        statement = _statement(len(claims), implementation, dtype)
        claims.append(Claim(statement, None, TOLERANCE, str(failure)))
    rates = [
        each.fields["tokens_per_s"] for each in messages if each.kind == "generated"
    ]
    return RolloutClaims(claims, rates[0] if rates else None)


def _statement(number: int, implementation: str, dtype: str) -> str:
    by = "" if implementation == "auto" else f", model_impl={implementation}"
    rounded = "" if dtype == "float32" else ", the mean difference in bfloat16"
    return f"log-probs of vLLM after load {number + 1}{by}{rounded}"


# ---------------------------------------------------------------------- the process


def main(connection: socket.socket) -> None:
    """Compute the differences in this process, for the one at the other end."""
    hide_kernels()
    run_trial(connection, compare)


def compare(fields: dict[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Tell the difference after each load, or how vLLM failed."""
    try:
        _load_and_compare(fields, tell)
    except Exception as error:  # whatever vLLM raises is what the proof shows
        tell("failed", {"failure": f"{type(error).__name__}: {error}"})
    return {}


def _load_and_compare(fields: dict[str, Any], tell: Tell) -> None:
    from verl_ray.rollout.vllm_environment import environment

    os.environ.update(environment("cpu", threads=1))
    from torch._dynamo import config as dynamo

    from verl_ray.engine.single import plain_engine
    from verl_ray.proofs.rows import LENGTHS
    from verl_ray.rollout.vllm_engine import VllmEngine

    # The environment says it too late where torch is imported already.
    dynamo.disable = True
    folder = Path(fields["folder"])
    # vLLM may change the classes of transformers, so the trainer comes first.
    trainer = plain_engine(
        folder,
        tokens=sum(LENGTHS),
        balance=0.0 if fields["has_experts"] else None,
        packs_rows=fields["packs_rows"],
    )
    publications = [
        _publication(trainer, folder, version, rounded=fields["dtype"] == "bfloat16")
        for version in range(LOADS)
    ]

    engine = VllmEngine(
        str(folder),
        _engine_config(fields),
        max_model_len=MAX_MODEL_LEN,
        seed=0,
        device="cpu",
        # The proof wrote the directory, with code only where it was trusted.
        trusts_code=True,
    )
    manifest = trainer.manifest()
    agreed = False
    for version, publication in enumerate(publications):
        largest, mean = _differences(engine, manifest, version, publication)
        if publication.rounding is None:
            difference, tolerance = largest, TOLERANCE
        else:
            difference, tolerance = mean, ROUNDING * publication.rounding
        agrees = difference <= tolerance
        where = ""
        # What rounds differs from every set of weights that could explain it.
        if agreed and not agrees and publication.rounding is None:
            where = _stale_weights(engine, trainer, version, publication.probe.rows)
        tell("load", {"difference": difference, "tolerance": tolerance, "where": where})
        agreed = agrees
    tell("generated", {"tokens_per_s": _tokens_per_s(engine, publications[-1].probe)})


def _engine_config(fields: dict[str, Any]) -> RolloutEngineConfig:
    from verl_ray.config.rollout import RolloutEngineConfig

    return RolloutEngineConfig(
        num_replicas=1,
        tensor_parallel=1,
        pipeline_parallel=1,
        expert_parallel=False,
        dtype=fields["dtype"],
        quantization=None,
        kv_cache_gib=KV_CACHE_GIB,
        vllm_args={"model_impl": fields["implementation"]},
    )


@dataclass(frozen=True)
class _Publication:
    """The weights of a version, and the log-probs that the trainer computes with it."""

    tensors: Mapping[str, tuple[Slice, Tensor]]
    probe: Probe

    rounding: float | None
    """How far the log-probs of transformers in bfloat16 are from these, on average;
    None where nobody computes in it."""


def _publication(
    trainer: PlainEngine, folder: Path, version: int, *, rounded: bool
) -> _Publication:
    """Change the weights, but for version 0, and return them."""
    from verl_ray.proofs.rows import random_rows
    from verl_ray.rollout.probes import Probe

    if version:
        for name, parameter in trainer.model.hf.named_parameters():
            _change(name, parameter, version)

    names = [parameter.name for parameter in trainer.manifest().sent]
    tensors = {
        part.name: (part, values.clone()) for part, values in trainer.shards(names)
    }
    rows = tuple(row.numpy().astype("int32") for row in random_rows())
    probe = Probe(rows, _log_probs(trainer, rows), math.inf)
    rounding = None
    if rounded:
        differences = map(
            np.subtract, _in_bfloat16(trainer, folder, rows), probe.log_probs
        )
        rounding = float(np.abs(np.concatenate(list(differences))).mean())
    return _Publication(tensors, probe, rounding)


def _change(name: str, parameter: Tensor, version: int, sign: float = 1) -> None:
    """Add to a parameter what a version adds to it, or take that away."""
    import torch

    seed = zlib.crc32(f"{version}:{name}".encode())
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(parameter.shape, generator=generator)
    with torch.no_grad():
        parameter.add_(noise, alpha=sign * NOISE)


def _log_probs(trainer: PlainEngine, rows: Sequence[Tokens]) -> tuple[Float32, ...]:
    """Return what the trainer computes of each row's tokens after the first."""
    import torch

    from verl_ray.ops.outputs import RequestedOutputs
    from verl_ray.proofs.rows import batch_of

    batch = batch_of([torch.from_numpy(row) for row in rows])
    log_probs = trainer.forward(batch, RequestedOutputs(log_probs=True)).log_probs
    assert log_probs is not None
    starts, ends = batch.offsets[:-1], batch.offsets[1:]
    return tuple(
        log_probs[start + 1 : end] for start, end in zip(starts, ends, strict=True)
    )


def _in_bfloat16(
    trainer: PlainEngine, folder: Path, rows: Sequence[Tokens]
) -> list[Float32]:
    """Return what transformers computes in bfloat16 with the trainer's weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    model.load_state_dict(trainer.model.hf.state_dict())

    log_probs = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.from_numpy(row).long()
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
            chosen = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            log_probs.append(chosen.numpy())
    return log_probs


def _differences(
    engine: VllmEngine, manifest: Manifest, version: int, publication: _Publication
) -> tuple[float, float]:
    """Send weights to vLLM, and compare its log-probs of fixed rows.

    Returns:
        The largest difference and the mean one.
    """
    from verl_ray.weight_sync.manifest import plan_buckets
    from verl_ray.weight_sync.shared_memory import create, map_slots, remove
    from verl_ray.weight_sync.transport import WireSpec

    buckets = plan_buckets(manifest, BUCKET_BYTES)
    address = create("proof", max(bucket.nbytes for bucket in buckets))
    try:
        transport = map_slots(address)
        sent: dict[str, Fingerprint] = {}
        engine.connect(address, WireSpec(buckets, receivers=1, patience_s=60), 0)
        engine.begin_update(manifest, version)
        for bucket in buckets:
            shards = [
                publication.tensors[entry.parameter.name] for entry in bucket.entries
            ]
            sent |= transport.fill(bucket, shards).by_name
            engine.receive(bucket)
    finally:
        remove(address)
    engine.commit(sent, verification_follows=True)
    largest = engine.verify(publication.probe)

    probe = publication.probe
    differences = map(np.subtract, _log_probs_of(engine, probe.rows), probe.log_probs)
    mean = np.abs(np.concatenate(list(differences))).mean()
    return largest, float(mean)


def _tokens_per_s(engine: VllmEngine, probe: Probe) -> float:
    """Return how fast vLLM continues the rows of a probe, at best."""
    seconds = []
    for _ in range(3):
        started_s = time.monotonic()
        _continued(engine, probe.rows, RESPONSE_TOKENS)
        seconds.append(time.monotonic() - started_s)
    return len(probe.rows) * RESPONSE_TOKENS / min(seconds)


def _log_probs_of(engine: VllmEngine, rows: Sequence[Tokens]) -> list[Float32]:
    """Return what vLLM computes of each row's tokens after the first."""
    chunks = {chunk.request_id: chunk for chunk in _continued(engine, rows, 1)}
    prompts = [chunks[number].prompt for number in range(len(rows))]
    return [prompt.log_probs for prompt in prompts if prompt is not None]


def _continued(
    engine: VllmEngine, rows: Sequence[Tokens], num_tokens: int
) -> list[Chunk]:
    """Let vLLM continue rows, and return what it says about them."""
    from verl_ray.rollout.requests import GenerationRequest, Sampling

    sampling = Sampling(0.0, 1.0, -1, num_tokens, stop_token_ids=())
    engine.submit(
        [
            GenerationRequest(number, row, sampling, seed=0, scores_prompt=True)
            for number, row in enumerate(rows)
        ]
    )
    chunks: list[Chunk] = []
    while engine.unfinished:
        chunks += engine.step()
    return chunks


# ------------------------------------------------------------------- stale weights


def _stale_weights(
    engine: VllmEngine, trainer: PlainEngine, version: int, rows: Sequence[Tokens]
) -> str:
    """Return which weights of load 1 vLLM still computes with.

    They are all that begin with a module's name, in one layer or in each. It is empty
    if none of them explain what vLLM computes.
    """
    actual = _log_probs_of(engine, rows)
    parameters = dict(trainer.model.hf.named_parameters())

    def change(names: Iterable[str], versions: range, sign: int) -> None:
        for name, each in itertools.product(names, versions):
            _change(name, parameters[name], each, sign)

    stale = ""
    # The trainer has the weights of the last load.
    change(parameters, range(version + 1, LOADS), -1)
    for pattern, names in _suspects(parameters):
        change(names, range(1, version + 1), -1)
        expected = _log_probs(trainer, rows)
        change(names, range(1, version + 1), 1)
        differences = map(np.subtract, actual, expected)
        if max(np.abs(each).max() for each in differences) <= TOLERANCE:
            stale = f"vLLM keeps {pattern} of load 1"
            break
    change(parameters, range(version + 1, LOADS), 1)
    return stale


def _suspects(names: Iterable[str]) -> list[tuple[str, set[str]]]:
    """Return patterns of names with the names that have them, the fewest first."""
    suspects: dict[str, set[str]] = defaultdict(set)
    for name in names:
        parts = name.split(".")
        in_each_layer = ["*" if part.isdigit() else part for part in parts]
        for spelling in (parts, in_each_layer):
            suspects[".".join(spelling)].add(name)
            for depth in range(1, len(parts)):
                suspects[".".join([*spelling[:depth], "*"])].add(name)
    return sorted(suspects.items(), key=lambda suspect: len(suspect[1]))
