"""A published policy is the one that generates, and a sync that went wrong is not published."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from controllers.ledger import WIRE_BUCKET_BYTES
from controllers.ppo import Trainer
from tests.controllers.conftest import MakeTrainer
from tests.controllers.runs import Samplers
from verl_ray.cluster.store import read
from verl_ray.data.stages import Rollouts
from verl_ray.errors import WeightSyncError, WorkerError
from verl_ray.profiling.timers import Timers
from verl_ray.weight_sync.buckets import plan_buckets
from workers.actor import ActorWorker
from workers.rollout import RolloutWorker

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]


def drawn(run: Trainer) -> Rollouts:
    prompts = run.prompts.all(8)
    return read(run.producer.produce(prompts, run.policy_version, Timers(), run.producer.training()).rollouts, 60)


def largest_difference(run: Trainer, rollouts: Rollouts, folder: Path) -> float:
    """Between the log-probs that came with the rollouts and those of transformers on the exported actor."""
    run.system.actor.broadcast(ActorWorker.export, str(folder)).result()
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    worst = 0.0
    for start, end, prompt in zip(rollouts.offsets, rollouts.offsets[1:], rollouts.prompt_length, strict=False):
        tokens = torch.from_numpy(rollouts.tokens[start:end].astype(np.int64))[None]
        with torch.no_grad():
            log_probs = model(tokens).logits[0, :-1].log_softmax(-1)
        found = log_probs.gather(-1, tokens[0, 1:, None])[prompt - 1 :, 0].numpy()
        worst = max(worst, float(np.abs(found - rollouts.rollout_log_probs[start + prompt : end]).max()))
    return worst


def test_after_each_sync_the_rollouts_are_of_the_new_weights(trainer: MakeTrainer, tmp_path: Path) -> None:
    run = trainer("ppo")
    run.publish(0)
    before = drawn(run)
    assert largest_difference(run, before, tmp_path / "0") < 1e-4
    run.step(1)
    after = drawn(run)
    assert largest_difference(run, after, tmp_path / "1") < 1e-4
    assert largest_difference(run, before, tmp_path / "again") > 1e-3  # the weights did change
    assert before.version_spans.values.tolist() == [[length, 0] for length in before.prompt_length]
    assert after.version_spans.values.tolist() == [[length, 1] for length in after.prompt_length]


@pytest.mark.parametrize("part", ["kv_cache", "weights"])
def test_an_engine_that_slept_wakes_to_the_new_weights(
    trainer: MakeTrainer, samplers: Samplers, tmp_path: Path, part: str
) -> None:
    run = trainer("ppo", f"rollout.sleep={part}")
    run.publish(0)
    (replica,) = samplers.rollout.replicas
    awake = replica.rank_zero(RolloutWorker.memory_bytes).result()
    run.publisher.hand_back()
    assert awake - replica.rank_zero(RolloutWorker.memory_bytes).result() > 16 << 20  # of 32 MiB of cache
    run.publish(1)
    assert largest_difference(run, drawn(run), tmp_path) < 1e-4
    metrics = run.step(2)
    assert metrics["training/rollout_probs_diff_mean"] < 1e-5


def test_a_byte_that_changed_on_the_wire_is_found_and_nothing_generates(
    trainer: MakeTrainer, samplers: Samplers, tmp_path: Path
) -> None:
    run = trainer("ppo")
    run.publish(0)
    actor, (rollout,) = run.system.actor, samplers.rollout.replicas
    manifest = actor.rank_zero(ActorWorker.manifest).result()
    (bucket,) = plan_buckets(manifest, WIRE_BUCKET_BYTES)
    address = actor.rank_zero(ActorWorker.open_wire, "tampered", bucket.nbytes).result()
    (sent,) = actor.broadcast(ActorWorker.write_bucket, bucket, address).result()
    victim = bucket.entries[3]
    name = re.escape(victim.parameter.name)
    with Path(address.paths[0]).open("r+b") as wire:
        wire.seek(victim.offset)
        byte = wire.read(1)
        wire.seek(victim.offset)
        wire.write(bytes([byte[0] ^ 1]))  # the last bit of one mantissa
    try:
        rollout.broadcast(RolloutWorker.begin_update, manifest, 1).result()
        rollout.broadcast(RolloutWorker.receive, bucket, address).result()
        with pytest.raises(WorkerError, match=rf"sent and received differ in \['{name}'\]") as caught:
            rollout.broadcast(RolloutWorker.commit, sent, False).result()
        assert isinstance(caught.value.__cause__, WeightSyncError)
        with pytest.raises(WorkerError, match=rf"failed earlier and was not restarted.*{name}"):
            run.step(1)
    finally:
        rollout.restart(240)
    renewed = trainer("ppo")
    renewed.publish(1)
    assert largest_difference(renewed, drawn(renewed), tmp_path) < 1e-4
