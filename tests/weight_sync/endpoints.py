"""All endpoints of a wire in one process: a sender, and scripted rollout engines."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from scripts.bench.scripted_engine import ScriptedEngine
from tests.weight_sync.fingerprints import EMPTY
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import (
    Bucket,
    Manifest,
    Parameter,
    Slice,
    plan_buckets,
)
from verl_ray.weight_sync.transport import Address, Sender, WireSpec
from verl_ray.weight_sync.wires import WireName, sender_of

Weights = Mapping[str, torch.Tensor]

_LAYERS = [Parameter(f"layer{i}", (32, 16), "bfloat16") for i in range(5)]
MANIFEST = Manifest(
    (*_LAYERS, Parameter("norm", (7,), "float32"), Parameter("scale", (), "float32"))
)
BUCKETS = plan_buckets(MANIFEST, 2048)  # two layers each, then one with norm and scale
CPU = torch.device("cpu")


def made(seed: int, manifest: Manifest = MANIFEST) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        one.name: torch.randn(one.shape, generator=generator)
        for one in manifest.parameters
    }


@dataclass
class WireEndpoints:
    sender: Sender
    engines: list[ScriptedEngine]
    address: Address
    buckets: tuple[Bucket, ...]

    def sync(self, weights: Weights, version: int, *, whole: bool) -> tuple[int, int]:
        """Run a sync as a publisher does. Return its bytes and changed elements."""
        self.begin(version)
        sent, nbytes, changed = self.stream(weights, whole=whole)
        for engine in self.engines:
            engine.commit(sent)
        self.sender.finish()
        return nbytes, changed

    def begin(self, version: int) -> None:
        for engine in self.engines:
            engine.begin_update(MANIFEST, version)

    def stream(
        self,
        weights: Weights,
        *,
        whole: bool,
        buckets: tuple[Bucket, ...] | None = None,
    ) -> tuple[dict[str, Fingerprint], int, int]:
        """Send and receive all buckets.

        Args:
            buckets: The buckets as the sender sees them.

        Returns:
            Fingerprints of what was sent, bytes, and changed elements.
        """
        sent: dict[str, Fingerprint] = {}
        nbytes = changed = 0
        for bucket in buckets or self.buckets:
            result = self.sender.send(bucket, shards(bucket, weights), whole=whole)
            for name, part in result.fingerprints.by_name.items():
                sent[name] = sent.get(name, EMPTY) + part
            nbytes += result.nbytes
            changed += result.changed
            for engine in self.engines:
                engine.receive(self.buckets[bucket.index])
        return sent, nbytes, changed

    def close(self) -> None:
        self.sender.close()
        for engine in self.engines:
            engine.close()


def joined(
    name: WireName,
    folder: Path,
    *,
    delta: bool = False,
    receivers: int = 2,
    patience_s: float = 60,
) -> WireEndpoints:
    """Endpoints that are connected."""
    wire_spec = WireSpec(
        BUCKETS, receivers, patience_s, folder=str(folder), delta=delta
    )
    sender = sender_of(name)(wire_spec, 0, CPU)
    address = sender.offer()
    engines = [ScriptedEngine(lambda _: []) for _ in range(receivers)]
    with ThreadPoolExecutor(receivers) as threads:
        connecting = [
            threads.submit(engine.connect, address, wire_spec, i)
            for i, engine in enumerate(engines)
        ]
        sender.connect(address)
        for call in connecting:
            call.result()
    return WireEndpoints(sender, engines, address, BUCKETS)


def shards(bucket: Bucket, weights: Weights) -> list[tuple[Slice, torch.Tensor]]:
    """Two shards per parameter: the two halves of its rows."""
    halves = []
    for entry in bucket.entries:
        name, tensor = entry.parameter.name, weights[entry.parameter.name]
        if not tensor.dim():
            halves.append((Slice(name, (), ()), tensor))
            continue
        middle = len(tensor) // 2
        for start, part in ((0, tensor[:middle]), (middle, tensor[middle:])):
            halves.append(
                (
                    Slice(name, (start, *[0] * (tensor.dim() - 1)), tuple(part.shape)),
                    part,
                )
            )
    return halves


def retyped(bucket: Bucket, name: str, dtype: str) -> Bucket:
    """A bucket in which one parameter has another dtype of the same size."""
    entries = tuple(
        replace(one, parameter=replace(one.parameter, dtype=dtype))
        if one.parameter.name == name
        else one
        for one in bucket.entries
    )
    return replace(bucket, entries=entries)
