"""A published policy generates, and a sync that went wrong is not published."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from controllers.devices import DeviceSharing, SharingPlan
from controllers.publishing.publisher import Publisher
from controllers.publishing.wire import Receivers
from controllers.rollouts.replicas import Replicas
from controllers.trainers.rl import Trainer
from tests.controllers.conftest import MakeTrainer
from tests.controllers.runs import Samplers, produced
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.waiting import read
from verl_ray.columns.stages import Rollouts
from verl_ray.errors import WeightSyncError, WorkerError
from verl_ray.weight_sync.manifest import plan_buckets
from verl_ray.weight_sync.shared_memory import SharedMemoryAddress
from verl_ray.weight_sync.transport import WireSpec
from workers.actor import ActorWorker
from workers.rollout import RolloutWorker

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]


def drawn(run: Trainer) -> Rollouts:
    return read(produced(run, 8, run.producer.training_generation()).rollouts, 60)


def largest_difference(run: Trainer, rollouts: Rollouts, folder: Path) -> float:
    """The largest difference between log-probs of rollouts and of the exported actor.

    The exported actor is computed by transformers.
    """
    run.system.actor.broadcast(ActorWorker.export, str(folder)).result()
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    worst = 0.0
    for start, end, prompt in zip(
        rollouts.offsets, rollouts.offsets[1:], rollouts.prompt_length, strict=False
    ):
        tokens = torch.from_numpy(rollouts.tokens[start:end].astype(np.int64))[None]
        with torch.no_grad():
            log_probs = model(tokens).logits[0, :-1].log_softmax(-1)
        found = log_probs.gather(-1, tokens[0, 1:, None])[prompt - 1 :, 0].numpy()
        worst = max(
            worst,
            float(
                np.abs(found - rollouts.rollout_log_probs[start + prompt : end]).max()
            ),
        )
    return worst


def test_after_each_sync_the_rollouts_are_of_the_new_weights(
    trainer: MakeTrainer, tmp_path: Path
) -> None:
    run = trainer("ppo")
    run.publish(0)
    before = drawn(run)
    assert largest_difference(run, before, tmp_path / "0") < 1e-4
    run.step(1)
    after = drawn(run)
    assert largest_difference(run, after, tmp_path / "1") < 1e-4
    assert (
        largest_difference(run, before, tmp_path / "again") > 1e-3
    )  # the weights did change
    assert before.version_spans.values.tolist() == [
        [length, 0] for length in before.prompt_length
    ]
    assert after.version_spans.values.tolist() == [
        [length, 1] for length in after.prompt_length
    ]


@pytest.mark.parametrize("part", ["kv_cache", "weights"])
def test_an_engine_that_slept_wakes_to_the_new_weights(
    trainer: MakeTrainer, samplers: Samplers, tmp_path: Path, part: str
) -> None:
    run = trainer("ppo", f"rollout.sleep={part}")
    run.publish(0)
    (replica,) = samplers.rollout
    awake = replica.rank_zero(RolloutWorker.memory_bytes).result()
    run.replicas.free_devices()
    run.replicas.device_sharing.switch_to("training")
    assert (
        awake - replica.rank_zero(RolloutWorker.memory_bytes).result() > 16 << 20
    )  # of 32 MiB of cache
    run.publish(1)
    assert largest_difference(run, drawn(run), tmp_path) < 1e-4
    metrics = run.step(2)
    assert metrics["training/rollout_probs_diff_mean"] < 1e-5


def holding(what: str) -> dict[str, str]:
    """Every model, with this state on the device."""
    return dict.fromkeys(("actor", "critic", "reference"), what)


@pytest.mark.parametrize(
    ("offload", "while_sent", "while_drawn", "handed_back"),
    [
        (
            "all",
            holding("") | {"actor": "weights"},
            holding(""),
            holding("weights and optimizer"),
        ),
        (
            "optimizer",
            holding("weights"),
            holding("weights"),
            holding("weights and optimizer"),
        ),
        ("none", {}, {}, {}),  # nothing is ever moved
    ],
)
def test_engines_wake_when_trainers_have_made_room(
    trainer: MakeTrainer,
    samplers: Samplers,
    monkeypatch: pytest.MonkeyPatch,
    offload: str,
    while_sent: dict[str, str],
    while_drawn: dict[str, str],
    handed_back: dict[str, str],
) -> None:
    run = trainer("ppo", "rollout.sleep=weights", f"placement.offload={offload}")
    system, events = run.system, Events()
    models = [
        group
        for group in (system.actor, system.critic, system.reference)
        if group is not None
    ]
    trainers_offload = {"all": "all", "optimizer": "optimizer", "none": "nothing"}[
        offload
    ]
    device_sharing = DeviceSharing(
        SharingPlan(
            shares_devices=True,
            engines_free="weights",
            trainers_offload=trainers_offload,
        ),
        system.actor,
        models,
    )
    publisher = Publisher(system.actor, run.config, device_sharing, has_gpus=False)
    replicas = Replicas(samplers.rollout, publisher, device_sharing, run.config)
    events.watch(monkeypatch)
    replicas.sync_weights(1)
    sent = [(name, while_sent) for name in ("send", "wake weights", "probe", "commit")]
    drawn_from = [("wake kv_cache", while_drawn), ("verify", while_drawn)]
    in_order = [*sent, *drawn_from]
    assert events.take() == in_order

    # A replica that started anew while rollouts are drawn: the actor's weights are sent
    # from where they are.
    (replica,) = samplers.rollout
    publisher.catch_up(1, Receivers((replica,), lambda: None))
    again = [
        (name, while_drawn)
        for name in ("send", "wake weights", "commit", "wake kv_cache", "verify")
    ]
    assert events.take() == again

    replicas.free_devices()
    replicas.device_sharing.switch_to("training")
    assert events.take() == [("sleep weights", while_drawn)]
    assert events.on_device == handed_back
    replicas.sync_weights(2)
    assert events.take() == in_order


class Events:
    """The calls of a publisher, one after another, and what each model had on the
    device when they were made.
    """

    def __init__(self) -> None:
        self.on_device: dict[str, str] = {}
        self._moves: list[Call[Any]] = []
        self._seen: list[tuple[str, dict[str, str]]] = []

    def take(self) -> list[tuple[str, dict[str, str]]]:
        seen, self._seen = self._seen, []
        return seen

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        broadcast = WorkerGroup.broadcast

        def watched(
            group: WorkerGroup[Any], verb: Callable[..., Any], *args: Any, **limits: Any
        ) -> Call[Any]:
            call = broadcast(group, verb, *args, **limits)
            if verb.__name__ == "place":
                self._moves.append(call)
                held = {"weights": args[0], "optimizer": args[1]}
                self.on_device[group.role] = " and ".join(
                    part for part in held if held[part] == "device"
                )
            elif verb.__name__ in (
                "wake",
                "sleep",
                "send",
                "commit",
                "probe",
                "verify",
            ):
                assert all(move._result is not None for move in self._moves), (
                    "not waited for"
                )
                named = (
                    f"{verb.__name__} {args[0]}"
                    if verb.__name__ in ("wake", "sleep")
                    else verb.__name__
                )
                self._seen.append((named, dict(self.on_device)))
            return call

        monkeypatch.setattr(WorkerGroup, "broadcast", watched)


@pytest.mark.parametrize(("wire", "delta"), [("broadcast", "true"), ("disk", "false")])
def test_other_wires_bring_the_same(
    trainer: MakeTrainer, tmp_path: Path, wire: str, delta: str
) -> None:
    run = trainer(
        "ppo",
        f"rollout.sync.transport={wire}",
        f"rollout.sync.delta={delta}",
        "rollout.sync.bucket_mib=1",
    )
    first = run.publish(0)
    again = run.publish(1)  # nothing changed
    run.step(2)
    assert largest_difference(run, drawn(run), tmp_path) < 1e-4
    if delta == "true":
        assert (
            first["weight_sync/changed_fraction"],
            again["weight_sync/changed_fraction"],
        ) == (1.0, 0.0)
        assert again["weight_sync/bytes"] < first["weight_sync/bytes"] / 100
    else:
        assert "weight_sync/changed_fraction" not in first
        assert again["weight_sync/bytes"] == first["weight_sync/bytes"]


def test_a_probe_knows_how_much_rounding_does_from_the_first(
    trainer: MakeTrainer,
) -> None:
    run = trainer("ppo", "rollout.dtype=bfloat16")
    first = run.publish(0)["weight_sync/probe_difference"]
    assert 1e-4 < first < 0.5
    run.publish(1)
    kept = run.replicas._publisher._verification.probe_of(1)
    assert kept is not None and kept.tolerance == min(max(5 * first, 0.1), 1.0)


def test_a_byte_that_changed_on_the_wire_is_found_and_nothing_generates(
    trainer: MakeTrainer, samplers: Samplers, tmp_path: Path
) -> None:
    run = trainer("ppo", "rollout.sync.transport=broadcast", "rollout.sync.delta=true")
    run.publish(0)
    actor, (rollout,) = run.system.actor, samplers.rollout
    manifest = actor.rank_zero(ActorWorker.manifest).result()
    wire_spec = WireSpec(plan_buckets(manifest, 256 << 20), receivers=1, patience_s=60)
    (bucket,) = wire_spec.buckets
    (address,) = actor.broadcast(
        ActorWorker.open_wire, "shared_memory", wire_spec
    ).result()
    actor.broadcast(ActorWorker.connect_wire, address).result()
    (told,) = actor.broadcast(ActorWorker.send, [0], True, False).result()
    victim = bucket.entries[3]
    name = re.escape(victim.parameter.name)
    files = address.unsealed()
    assert isinstance(files, SharedMemoryAddress)
    with Path(files.paths[0]).open("r+b") as wire:
        wire.seek(victim.offset)
        byte = wire.read(1)
        wire.seek(victim.offset)
        wire.write(bytes([byte[0] ^ 1]))  # the last bit of one mantissa
    try:
        rollout.broadcast(RolloutWorker.connect, address, wire_spec, 0).result()
        rollout.broadcast(RolloutWorker.begin_update, manifest, 1).result()
        rollout.broadcast(RolloutWorker.receive, (bucket,)).result()
        with pytest.raises(
            WeightSyncError, match=rf"sent and received differ in \['{name}'\]"
        ) as caught:
            rollout.broadcast(
                RolloutWorker.commit, told.fingerprints.by_name, False
            ).result()
        assert (
            caught.value.origin is not None
            and "its stack is in" in caught.value.origin.detail
        )
        with pytest.raises(
            WorkerError, match=rf"failed earlier and was not restarted.*{name}"
        ):
            run.step(1)
    finally:
        rollout.restart().wait()
    assert (
        run.publish(1)["weight_sync/changed_fraction"] == 1
    )  # to a new engine, over a new wire, all of it
    assert largest_difference(run, drawn(run), tmp_path) < 1e-4
