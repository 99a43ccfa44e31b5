"""The same tests over every wire that runs without a GPU.

What arrives is what was sent, and every fault is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.bench.scripted_engine import ScriptedEngine
from tests.weight_sync.endpoints import (
    BUCKETS,
    CPU,
    MANIFEST,
    WireEndpoints,
    joined,
    made,
    retyped,
)
from verl_ray.config.rollout import WireName
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.cuda_ipc import CudaIpcSender
from verl_ray.weight_sync.transport import WireSpec
from verl_ray.weight_sync.wires import WireLayout, carrier_device, choose_roots

WIRES: list[tuple[WireName, bool]] = [
    ("shared_memory", False), ("broadcast", False), ("broadcast", True), ("disk", False), ("disk", True),
]  # fmt: skip


@pytest.fixture(
    params=WIRES, ids=lambda wire: wire[0] + (" of changes" if wire[1] else "")
)
def wire(request: pytest.FixtureRequest) -> tuple[WireName, bool]:
    return request.param


@pytest.fixture
def endpoints(wire: tuple[WireName, bool], tmp_path: Path) -> Iterator[WireEndpoints]:
    wire_endpoints = joined(wire[0], tmp_path, delta=wire[1])
    yield wire_endpoints
    wire_endpoints.close()


def test_every_receiver_gets_every_bit_of_every_sync(endpoints: WireEndpoints) -> None:
    for version in range(3):
        weights = made(version)
        endpoints.sync(weights, version, whole=version == 0)
        for engine in endpoints.engines:
            assert engine.policy_version == version
            for parameter in MANIFEST.parameters:
                dtype = getattr(torch, parameter.dtype)
                assert torch.equal(
                    engine.weights[parameter.name], weights[parameter.name].to(dtype)
                )


def test_a_bucket_that_is_dropped_is_named(endpoints: WireEndpoints) -> None:
    endpoints.begin(1)
    sent, _, _ = endpoints.stream(made(0), whole=True, buckets=BUCKETS[:-1])
    for engine in endpoints.engines:
        with pytest.raises(
            WeightSyncError, match=r"not received: \['layer4', 'norm', 'scale'\]"
        ):
            engine.commit(sent)
        assert engine.policy_version is None


def test_buckets_that_changed_places_are_named(endpoints: WireEndpoints) -> None:
    first, second, third = BUCKETS
    swapped = (replace(second, index=0), replace(first, index=1), third)
    endpoints.begin(1)
    with pytest.raises(WeightSyncError, match=r"layer0"):
        sent, _, _ = endpoints.stream(made(0), whole=True, buckets=swapped)
        with pytest.raises(
            WeightSyncError,
            match=r"differ in \['layer0', 'layer1', 'layer2', 'layer3'\]",
        ):
            endpoints.engines[1].commit(sent)
        endpoints.engines[0].commit(sent)


def test_a_receiver_without_a_wire_receives_nothing() -> None:
    engine = ScriptedEngine(lambda _: [])
    engine.begin_update(MANIFEST, 1)
    with pytest.raises(
        WeightSyncError,
        match="bucket 0 cannot be received: no wire is open; call connect first",
    ):
        engine.receive(BUCKETS[0])


def test_another_dtype_is_named(endpoints: WireEndpoints) -> None:
    endpoints.begin(1)
    wrong = (retyped(BUCKETS[0], "layer1", "float16"), *BUCKETS[1:])
    with pytest.raises(WeightSyncError, match=r"layer1") as caught:
        sent, _, _ = endpoints.stream(made(0), whole=True, buckets=wrong)
        endpoints.engines[0].commit(sent)
    assert "layer0" not in str(caught.value)


def test_weights_of_one_step_before_are_named(endpoints: WireEndpoints) -> None:
    before, now = made(0), made(0)
    now["layer3"] = (
        before["layer3"] + 1e-3 * before["layer3"].sign()
    )  # a step of an optimizer, some below bfloat16's
    changed = (now["layer3"].bfloat16() != before["layer3"].bfloat16()).sum()
    assert 0 < changed < 512
    endpoints.sync(before, 0, whole=True)
    endpoints.begin(1)
    stale, _, _ = endpoints.stream(before, whole=False)
    other = joined("shared_memory", Path())
    other.begin(1)
    fresh, _, _ = other.stream(now, whole=True)
    other.close()
    assert stale != fresh
    for engine in endpoints.engines:
        with pytest.raises(
            WeightSyncError,
            match=r"version 1: sent and received differ in \['layer3'\]",
        ):
            engine.commit(fresh)


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire[1]], indirect=True)
def test_only_changes_travel_and_a_wrong_base_is_named(
    endpoints: WireEndpoints, wire: tuple[WireName, bool]
) -> None:
    weights = made(0)
    whole, all_of_it = endpoints.sync(weights, 0, whole=True)
    assert all_of_it == 5 * 512 + 7 + 1
    weights["layer2"][3, 5:8] += 1
    weights["scale"] += 1
    nbytes, changed = endpoints.sync(weights, 1, whole=False)
    assert changed == 3 + 1
    assert nbytes < whole / 3
    assert all(
        torch.equal(engine.weights["layer2"], weights["layer2"].bfloat16())
        for engine in endpoints.engines
    )

    # One bit of what the second receiver keeps, of a parameter that does not change.
    endpoints.engines[1]._inbox._receiver._decoder._copies[0].flat[7] ^= 1  # type: ignore
    weights["layer4"][0, 0] += 1
    endpoints.begin(2)
    sent, _, _ = endpoints.stream(weights, whole=False)
    endpoints.engines[0].commit(sent)
    with pytest.raises(
        WeightSyncError, match=r"sent and received differ in \['layer0'\]"
    ):
        endpoints.engines[1].commit(sent)
    endpoints.sync(weights, 3, whole=True)  # what follows a failure
    assert torch.equal(
        endpoints.engines[1].weights["layer0"], weights["layer0"].bfloat16()
    )


# ---------------------------------------------------------------------------- which one

ONE = WireLayout(["a"], ["a"], gpus=False, shares_gpus=False)
TWO = WireLayout(["a", "b"], ["b"], gpus=False, shares_gpus=False)


def test_a_wire_joins_its_processes_or_is_refused() -> None:
    on_gpus, shared = replace(TWO, gpus=True), replace(TWO, gpus=True, shares_gpus=True)
    assert carrier_device("shared_memory", replace(shared, actor_hosts=["b"])) == "cpu"
    assert (
        carrier_device("disk", on_gpus)
        == carrier_device("host_broadcast", on_gpus)
        == "cpu"
    )
    assert carrier_device("broadcast", on_gpus) == "cuda"
    assert (
        carrier_device("broadcast", shared) == carrier_device("broadcast", TWO) == "cpu"
    )
    assert carrier_device("cuda_ipc", shared) == "cuda"
    with pytest.raises(
        WeightSyncError,
        match=r"shared_memory joins processes of one node; .* run on \['a', 'b'\]",
    ):
        carrier_device("shared_memory", TWO)
    with pytest.raises(WeightSyncError, match="actor and rollout do not share any"):
        carrier_device("cuda_ipc", replace(ONE, gpus=True))
    with pytest.raises(WeightSyncError, match="the actor is not on a GPU"):
        CudaIpcSender(WireSpec(BUCKETS, 1, 1.0), 0, CPU)


def test_roots_are_on_different_nodes_and_no_more_than_pay() -> None:
    def roots(nodes: int, ranks_per_node: int, buckets: int = 12) -> tuple[int, ...]:
        hosts = [f"node{i // ranks_per_node}" for i in range(nodes * ranks_per_node)]
        layout = replace(TWO, actor_hosts=hosts)
        assert choose_roots("disk", layout, buckets) == (0,)
        host = choose_roots("host_broadcast", layout, buckets)
        assert choose_roots("broadcast", layout, buckets) == host
        return host

    assert roots(1, 1) == (0,)
    assert roots(1, 8) == (0, 4)
    assert roots(1, 8, buckets=1) == (0,)
    assert roots(2, 8) == (0, 8)
    assert roots(3, 8) == (0, 8, 16)
    assert roots(5, 8) == (0, 10, 20, 30)
    assert roots(64, 8) == (0, 128, 256, 384)
