"""One body over every wire that runs without a GPU: what arrives is what was sent, and every fault is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.weight_sync.ends import BUCKETS, CPU, MANIFEST, Ends, joined, made, retyped
from verl_ray.config.rollout import WireName
from verl_ray.errors import WeightSyncError
from verl_ray.rollout.scripted import ScriptedEngine
from verl_ray.weight_sync.cuda_ipc import CudaIpcSender
from verl_ray.weight_sync.transport import Route
from verl_ray.weight_sync.wires import Layout, carried_from

WIRES: list[tuple[WireName, bool]] = [
    ("shared_memory", False), ("broadcast", False), ("broadcast", True), ("disk", False), ("disk", True),
]  # fmt: skip


@pytest.fixture(params=WIRES, ids=lambda wire: wire[0] + (" of changes" if wire[1] else ""))
def wire(request: pytest.FixtureRequest) -> tuple[WireName, bool]:
    return request.param


@pytest.fixture
def ends(wire: tuple[WireName, bool], tmp_path: Path) -> Iterator[Ends]:
    made_ends = joined(wire[0], tmp_path, delta=wire[1])
    yield made_ends
    made_ends.close()


def test_every_receiver_gets_every_bit_of_every_sync(ends: Ends) -> None:
    for version in range(3):
        weights = made(version)
        ends.sync(weights, version, whole=version == 0)
        for engine in ends.engines:
            assert engine.policy_version == version
            for parameter in MANIFEST.parameters:
                dtype = getattr(torch, parameter.dtype)
                assert torch.equal(engine.weights[parameter.name], weights[parameter.name].to(dtype))


def test_a_bucket_that_is_dropped_is_named(ends: Ends) -> None:
    ends.begin(1)
    sent, _, _ = ends.stream(made(0), whole=True, buckets=BUCKETS[:-1])
    for engine in ends.engines:
        with pytest.raises(WeightSyncError, match=r"not received: \['layer4', 'norm', 'scale'\]"):
            engine.commit(sent)
        assert engine.policy_version is None


def test_buckets_that_changed_places_are_named(ends: Ends) -> None:
    first, second, third = BUCKETS
    swapped = (replace(second, index=0), replace(first, index=1), third)
    ends.begin(1)
    with pytest.raises(WeightSyncError, match=r"layer0"):
        sent, _, _ = ends.stream(made(0), whole=True, buckets=swapped)
        with pytest.raises(WeightSyncError, match=r"differ in \['layer0', 'layer1', 'layer2', 'layer3'\]"):
            ends.engines[1].commit(sent)
        ends.engines[0].commit(sent)


def test_who_has_met_no_sender_receives_nothing() -> None:
    engine = ScriptedEngine(lambda _: [])
    engine.begin_update(MANIFEST, 1)
    with pytest.raises(WeightSyncError, match="bucket 0 cannot be received: no wire is open; call connect first"):
        engine.receive(BUCKETS[0])


def test_another_dtype_is_named(ends: Ends) -> None:
    ends.begin(1)
    wrong = (retyped(BUCKETS[0], "layer1", "float16"), *BUCKETS[1:])
    with pytest.raises(WeightSyncError, match=r"layer1") as caught:
        sent, _, _ = ends.stream(made(0), whole=True, buckets=wrong)
        ends.engines[0].commit(sent)
    assert "layer0" not in str(caught.value)


def test_weights_of_one_step_before_are_named(ends: Ends) -> None:
    before, now = made(0), made(0)
    now["layer3"] = before["layer3"] + 1e-3 * before["layer3"].sign()  # a step of an optimizer, some below bfloat16's
    changed = (now["layer3"].bfloat16() != before["layer3"].bfloat16()).sum()
    assert 0 < changed < 512
    ends.sync(before, 0, whole=True)
    ends.begin(1)
    stale, _, _ = ends.stream(before, whole=False)
    other = joined("shared_memory", Path())
    other.begin(1)
    fresh, _, _ = other.stream(now, whole=True)
    other.close()
    assert stale != fresh
    for engine in ends.engines:
        with pytest.raises(WeightSyncError, match=r"version 1: sent and received differ in \['layer3'\]"):
            engine.commit(fresh)


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire[1]], indirect=True)
def test_only_changes_travel_and_a_wrong_base_is_named(ends: Ends, wire: tuple[WireName, bool]) -> None:
    weights = made(0)
    whole, all_of_it = ends.sync(weights, 0, whole=True)
    assert all_of_it == 5 * 512 + 7 + 1
    weights["layer2"][3, 5:8] += 1
    weights["scale"] += 1
    nbytes, changed = ends.sync(weights, 1, whole=False)
    assert changed == 3 + 1
    assert nbytes < whole / 3
    assert all(torch.equal(engine.weights["layer2"], weights["layer2"].bfloat16()) for engine in ends.engines)

    # One bit of what the second receiver keeps, of a parameter that does not change.
    ends.engines[1]._inbox._receiver._held._held[0].flat[7] ^= 1  # type: ignore
    weights["layer4"][0, 0] += 1
    ends.begin(2)
    sent, _, _ = ends.stream(weights, whole=False)
    ends.engines[0].commit(sent)
    with pytest.raises(WeightSyncError, match=r"sent and received differ in \['layer0'\]"):
        ends.engines[1].commit(sent)
    ends.sync(weights, 3, whole=True)  # what follows a failure
    assert torch.equal(ends.engines[1].weights["layer0"], weights["layer0"].bfloat16())


# ------------------------------------------------------------------------------------------------- which one

ONE = Layout(["a"], ["a"], gpus=False, shares_gpus=False)
TWO = Layout(["a", "b"], ["b"], gpus=False, shares_gpus=False)


def test_a_wire_joins_its_ends_or_is_refused() -> None:
    on_gpus, shared = replace(TWO, gpus=True), replace(TWO, gpus=True, shares_gpus=True)
    assert carried_from("shared_memory", replace(shared, actor_hosts=["b"])) == "cpu"
    assert carried_from("disk", on_gpus) == carried_from("host_broadcast", on_gpus) == "cpu"
    assert carried_from("broadcast", on_gpus) == "cuda"
    assert carried_from("broadcast", shared) == carried_from("broadcast", TWO) == "cpu"
    assert carried_from("cuda_ipc", shared) == "cuda"
    with pytest.raises(WeightSyncError, match=r"shared_memory joins processes of one node; .* run on \['a', 'b'\]"):
        carried_from("shared_memory", TWO)
    with pytest.raises(WeightSyncError, match="actor and rollout do not share any"):
        carried_from("cuda_ipc", replace(ONE, gpus=True))
    with pytest.raises(WeightSyncError, match="the actor is not on a GPU"):
        CudaIpcSender(Route(BUCKETS, 1, 1.0), 0, CPU)
