"""The proof that vLLM computes what the trainer computes, load after load.

Invariant: the weights come over a wire, loaded as in a run. vLLM runs in a process of
its own, since some of its models change classes of transformers.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.processes.trial import Tell, run_trial, try_in_child
from verl_ray.proofs.claims import Claim

if TYPE_CHECKING:
    from torch import Tensor

    from verl_ray.engine.plain import PlainEngine
    from verl_ray.rollout.probes import Probe
    from verl_ray.rollout.vllm_engine import VllmEngine
    from verl_ray.weight_sync.fingerprint import Fingerprint
    from verl_ray.weight_sync.manifest import Manifest, Slice

DEADLINE_S = 300.0
"""Longest time of a proof, most of which is the import of vLLM."""

TOLERANCE = 3e-4
"""Of log-probs in nats, float32 on both sides."""

LOADS = 3
"""The first load is vLLM's own, the second is recorded, the third goes by a plan."""

NOISE = 0.04
"""Standard deviation of the change of each weight before a further load."""

BUCKET_BYTES = 1 << 20
MAX_MODEL_LEN = 96
KV_CACHE_GIB = 0.03125


def prove_rollouts(
    folder: Path, *, packs_rows: bool, has_experts: bool, implementation: str
) -> list[Claim]:
    """Compare the log-probs of vLLM with the trainer's, after each of several loads.

    Args:
        folder: The directory of the cut model, with a tokenizer.
        packs_rows: Whether the trainer packs rows.
        has_experts: Whether the model has experts.
        implementation: `model_impl` of vLLM: its own classes ("auto"), or those of
            "transformers".
    """
    fields = {
        "folder": str(folder),
        "packs_rows": packs_rows,
        "has_experts": has_experts,
        "implementation": implementation,
    }
    messages, cause = try_in_child(__name__, fields, DEADLINE_S)
    differences = [
        message.fields["difference"] for message in messages if message.kind == "load"
    ]
    claims = [
        Claim(_statement(number, implementation), difference, TOLERANCE)
        for number, difference in enumerate(differences)
    ]
    if len(claims) < LOADS:
        failure = next(
            (each.fields["failure"] for each in messages if each.kind == "failed"),
            cause,
        )
        statement = _statement(len(claims), implementation)
        claims.append(Claim(statement, None, TOLERANCE, str(failure)))
    return claims


def _statement(number: int, implementation: str) -> str:
    by = "" if implementation == "auto" else f", model_impl={implementation}"
    return f"log-probs of vLLM after load {number + 1}{by}"


# ---------------------------------------------------------------------- the process


def main(connection: socket.socket) -> None:
    """Compute the differences in this process, for the one at the other end."""
    run_trial(connection, _compare)


def _compare(fields: dict[str, Any], tell: Tell) -> Mapping[str, Any]:
    try:
        _load_and_compare(fields, tell)
    except Exception as error:  # whatever vLLM raises is what the proof shows
        tell("failed", {"failure": f"{type(error).__name__}: {error}"})
    return {}


def _load_and_compare(fields: dict[str, Any], tell: Tell) -> None:
    from verl_ray.rollout.vllm_environment import environment

    os.environ.update(environment("cpu", threads=1))
    from torch._dynamo import config as dynamo

    from verl_ray.config.rollout import RolloutEngineConfig
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
    publications = [_publication(trainer, version) for version in range(LOADS)]

    config = RolloutEngineConfig(
        num_replicas=1,
        tensor_parallel=1,
        dtype="float32",
        kv_cache_gib=KV_CACHE_GIB,
        vllm_args={"model_impl": fields["implementation"]},
    )
    engine = VllmEngine(
        str(folder), config, max_model_len=MAX_MODEL_LEN, seed=0, device="cpu"
    )
    manifest = trainer.manifest()
    for version, publication in enumerate(publications):
        difference = _difference(engine, manifest, version, publication)
        tell("load", {"difference": difference})


@dataclass(frozen=True)
class _Publication:
    """The weights of a version, and the log-probs that the trainer computes with it."""

    tensors: Mapping[str, tuple[Slice, Tensor]]
    probe: Probe


def _publication(trainer: PlainEngine, version: int) -> _Publication:
    """Change the weights, but for version 0, and return them."""
    import torch

    from verl_ray.ops.outputs import RequestedOutputs
    from verl_ray.proofs.rows import batch_of, random_rows
    from verl_ray.rollout.probes import Probe

    if version:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(NOISE * noise)

    names = [parameter.name for parameter in trainer.manifest().sent]
    tensors = {
        part.name: (part, values.clone()) for part, values in trainer.shards(names)
    }
    rows = random_rows()
    batch = batch_of(rows)
    log_probs = trainer.forward(batch, RequestedOutputs(log_probs=True)).log_probs
    assert log_probs is not None
    starts, ends = batch.offsets[:-1], batch.offsets[1:]
    probe = Probe(
        tuple(row.numpy().astype("int32") for row in rows),
        tuple(
            log_probs[start + 1 : end] for start, end in zip(starts, ends, strict=True)
        ),
        math.inf,
    )
    return _Publication(tensors, probe)


def _difference(
    engine: VllmEngine, manifest: Manifest, version: int, publication: _Publication
) -> float:
    """Send weights to vLLM, and compare its log-probs of fixed rows."""
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
    return engine.verify(publication.probe)
