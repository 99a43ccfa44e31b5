"""Both ends of a wire in one process: a sender, and rollout engines whose tokens are scripted."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from verl_ray.rollout.scripted import ScriptedEngine
from verl_ray.weight_sync.buckets import Bucket, plan_buckets
from verl_ray.weight_sync.fingerprint import EMPTY, Fingerprint
from verl_ray.weight_sync.manifest import Manifest, Parameter, Slice
from verl_ray.weight_sync.transport import Address, Route, Sender
from verl_ray.weight_sync.wires import SENDERS, WireName

Weights = Mapping[str, torch.Tensor]

_LAYERS = [Parameter(f"layer{i}", (32, 16), "bfloat16") for i in range(5)]
MANIFEST = Manifest((*_LAYERS, Parameter("norm", (7,), "float32"), Parameter("scale", (), "float32")))
BUCKETS = plan_buckets(MANIFEST, 2048)  # two layers each, then one with norm and scale
CPU = torch.device("cpu")


def made(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {one.name: torch.randn(one.shape, generator=generator) for one in MANIFEST.parameters}


@dataclass
class Ends:
    sender: Sender
    engines: list[ScriptedEngine]
    address: Address
    buckets: tuple[Bucket, ...]

    def sync(self, weights: Weights, version: int, *, whole: bool) -> tuple[int, int]:
        """As a publisher does it; returns bytes and changed elements."""
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
        self, weights: Weights, *, whole: bool, buckets: tuple[Bucket, ...] | None = None
    ) -> tuple[dict[str, Fingerprint], int, int]:
        """`buckets`: as the sender sees them."""
        sent: dict[str, Fingerprint] = {}
        nbytes = changed = 0
        for bucket in buckets or self.buckets:
            told = self.sender.send(bucket, shards(bucket, weights), whole=whole)
            for name, one in told.prints.by_name.items():
                sent[name] = sent.get(name, EMPTY) + one
            nbytes, changed = nbytes + told.nbytes, changed + told.changed
            for engine in self.engines:
                engine.receive(self.buckets[bucket.index])
        return sent, nbytes, changed

    def close(self) -> None:
        self.sender.close()
        for engine in self.engines:
            engine.close()


def joined(name: WireName, folder: Path, *, delta: bool = False, receivers: int = 2, patience_s: float = 60) -> Ends:
    """Ends that have met."""
    route = Route(BUCKETS, receivers, patience_s, folder=str(folder), delta=delta)
    sender = SENDERS[name](route, 0, CPU)
    address = sender.offer()
    engines = [ScriptedEngine(lambda _: []) for _ in range(receivers)]
    with ThreadPoolExecutor(receivers) as threads:
        meeting = [threads.submit(engine.connect, address, route, i) for i, engine in enumerate(engines)]
        sender.connect(address)
        for one in meeting:
            one.result()
    return Ends(sender, engines, address, BUCKETS)


def shards(bucket: Bucket, weights: Weights) -> list[tuple[Slice, torch.Tensor]]:
    """Halves of the rows, as two shards."""
    found = []
    for entry in bucket.entries:
        name, tensor = entry.parameter.name, weights[entry.parameter.name]
        if not tensor.dim():
            found.append((Slice(name, (), ()), tensor))
            continue
        middle = len(tensor) // 2
        for start, part in ((0, tensor[:middle]), (middle, tensor[middle:])):
            found.append((Slice(name, (start, *[0] * (tensor.dim() - 1)), tuple(part.shape)), part))
    return found


def retyped(bucket: Bucket, name: str, dtype: str) -> Bucket:
    """The bucket with another dtype of the same size for one parameter."""
    entries = tuple(
        replace(one, parameter=replace(one.parameter, dtype=dtype)) if one.parameter.name == name else one
        for one in bucket.entries
    )
    return replace(bucket, entries=entries)
