"""The suite `broadcast`: weights from the ranks of an actor to receivers over
gloo, by the number of ranks that broadcast them, and with experts by who gets them.

Invariant: senders and receivers are those of a weight sync, each in a process of its
own, and the fingerprints of both sides have to agree. There is neither a driver nor
vLLM, so a figure is of the wire alone. The bytes of a process are those that TCP has
carried for it, with what it passes on to others. In a round all variants take turns.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from scripts.bench.processes import PATIENCE_S, fork, joined
from scripts.bench.suite import MIB, Flags, circumstances, print_json
from verl_ray.errors import VerlRayError

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

    from torch import Tensor

    from verl_ray.weight_sync.fingerprint import Fingerprints
    from verl_ray.weight_sync.manifest import Bucket, Slice
    from verl_ray.weight_sync.transport import WireSpec

_HOST = "127.0.0.1"
_WIDTH = 1024
_COMMON = 4
"""Matrices of a layer with experts that every rank of an engine holds."""

# Bytes that arrived, bytes that were sent, and how many of these were sent again, in
# tcp_info of <linux/tcp.h>. Acknowledgements may come later than the bytes are read.
_TCP_INFO_BYTES = 216
_CARRIED = struct.Struct("=128xQ64xQQ")


class _Variant(NamedTuple):
    """A way of sending the weights, to compare with the others."""

    roots: int
    """Number of ranks that broadcast."""
    holders: bool
    """Whether an expert goes to the receivers that hold it, and not to all."""

    def __str__(self) -> str:
        experts = ", experts to their holders" if self.holders else ""
        return f"{self.roots} roots{experts}"


@dataclass(frozen=True)
class _Setup:
    """Settings of a measurement, which all processes know."""

    folder: str
    """Folder in which they find each other."""
    ranks: int
    receivers: int
    variants: Sequence[_Variant]
    experts: int
    """Experts of each layer; 0 for a model without any."""
    bytes: int
    bucket_bytes: int
    rounds: int

    @property
    def holders(self) -> list[frozenset[int]]:
        """The experts of each receiver, which are ranks of one engine."""
        ends = [self.experts * n // self.receivers for n in range(self.receivers + 1)]
        return [frozenset(range(*part)) for part in itertools.pairwise(ends)]

    def wire_spec(self, variant: _Variant) -> WireSpec:
        """Return the wire of a variant, whose roots are spread evenly."""
        from verl_ray.weight_sync.manifest import Manifest, Parameter, plan_buckets
        from verl_ray.weight_sync.transport import WireRoot, WireSpec

        count = self.bytes // (2 * _WIDTH * _WIDTH)
        parameters = [
            Parameter(self._name_of(number), (_WIDTH, _WIDTH), "bfloat16")
            for number in range(count)
        ]
        manifest = Manifest(tuple(parameters))
        places = [n * self.ranks // variant.roots for n in range(variant.roots)]
        holders = self.holders if variant.holders else ()
        return WireSpec(
            plan_buckets(manifest, self.bucket_bytes, holders),
            receivers=self.receivers,
            patience_s=PATIENCE_S,
            roots=tuple(WireRoot(rank, _HOST) for rank in places),
        )

    def _name_of(self, number: int) -> str:
        """Return the name of the matrix of this number."""
        if not self.experts:
            return f"layers.{number}.weight"
        layer, place = divmod(number, _COMMON + self.experts)
        if place < _COMMON:
            return f"layers.{layer}.attention.{place}.weight"
        return f"layers.{layer}.experts.{place - _COMMON}.up.weight"


@dataclass(frozen=True)
class _Sync:
    """One weight sync in one process."""

    began: float
    """Time of the clock that all processes of a machine share, in seconds."""
    ended: float
    sent_bytes: int
    received_bytes: int
    fingerprints: Fingerprints


Syncs = dict[_Variant, list[_Sync]]
"""The weight syncs of a process by the variant."""


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; return the exit code, 0."""
    options = _flags().parse_args(argv)
    destinations = (False, True) if options.experts else (False,)
    variants = itertools.starmap(
        _Variant, itertools.product(options.roots, destinations)
    )
    with TemporaryDirectory() as folder:
        setup = _Setup(
            folder=folder,
            ranks=options.ranks,
            receivers=options.receivers,
            variants=list(variants),
            experts=options.experts,
            bytes=options.mib * MIB,
            bucket_bytes=options.bucket_mib * MIB,
            rounds=options.repeats + 1,
        )
        figures = {
            str(variant): _figures(setup, variant, senders, receivers)
            for variant, senders, receivers in _measure(setup)
        }
    print_json({"bytes": setup.bytes, **figures, **circumstances()})
    return 0


def _measure(
    setup: _Setup,
) -> Iterable[tuple[_Variant, list[list[_Sync]], list[list[_Sync]]]]:
    """Yield the syncs of each variant, by sending and receiving process."""
    # The forks have these modules then.
    import verl_ray.weight_sync.broadcast  # noqa: F401

    barrier = multiprocessing.get_context("fork").Barrier(
        setup.ranks + setup.receivers, timeout=PATIENCE_S
    )
    tasks: list[tuple[Callable[[_Setup, int, Barrier], Syncs], int]] = []
    tasks += [(_send, rank) for rank in range(setup.ranks)]
    tasks += [(_receive, number) for number in range(setup.receivers)]
    process_syncs: list[Syncs] = fork(
        _call, [(run, setup, number, barrier) for run, number in tasks]
    )
    for variant in setup.variants:
        syncs = [times[variant][1:] for times in process_syncs]
        yield variant, syncs[: setup.ranks], syncs[setup.ranks :]


def _call(
    run: Callable[[_Setup, int, Barrier], Syncs],
    setup: _Setup,
    number: int,
    barrier: Barrier,
) -> Syncs:
    return run(setup, number, barrier)


def _figures(
    setup: _Setup,
    variant: _Variant,
    senders: list[list[_Sync]],
    receivers: list[list[_Sync]],
) -> dict[str, object]:
    """Return the figures of one variant.

    Raises:
        VerlRayError: What arrived is not what was sent.
    """
    from verl_ray.weight_sync.fingerprint import Fingerprints

    buckets = setup.wire_spec(variant).buckets
    seconds: list[float] = []
    for number, rank_zero_sync in enumerate(senders[0]):
        sent = sum((syncs[number].fingerprints for syncs in senders), Fingerprints())
        for receiver, syncs in enumerate(receivers):
            names = [each.names for each in buckets if each.is_for(receiver)]
            expected = {name: sent.by_name[name] for name in itertools.chain(*names)}
            if syncs[number].fingerprints.by_name != expected:
                raise VerlRayError("what arrived is not what was sent")
        seconds.append(max(syncs[number].ended for syncs in receivers))
        seconds[-1] -= rank_zero_sync.began

    def shares(processes: list[list[_Sync]], name: str) -> list[float]:
        """Return the bytes of each process, as a multiple of the weights' size."""
        return [
            round(median(getattr(sync, name) for sync in syncs) / setup.bytes, 2)
            for syncs in processes
        ]

    return {
        "median_s": round(median(seconds), 4),
        "best_s": round(min(seconds), 4),
        "ns_per_byte": round(1e9 * median(seconds) / setup.bytes, 3),
        "sent_by_ranks": shares(senders, "sent_bytes"),
        "received_by_ranks": shares(senders, "received_bytes"),
        "sent_by_receivers": shares(receivers, "sent_bytes"),
        "received_by_receivers": shares(receivers, "received_bytes"),
    }


# ------------------------------------------------------------------------ the processes


def _send(setup: _Setup, rank: int, barrier: Barrier) -> Syncs:
    """Send as a rank of the actor, which owns some rows of every parameter."""
    import torch

    from verl_ray.rendezvous import choose_interfaces
    from verl_ray.weight_sync.broadcast import BroadcastSender
    from verl_ray.weight_sync.fingerprint import Fingerprints

    choose_interfaces(_HOST)
    with joined(rank, setup.ranks, f"{setup.folder}/ranks") as device:
        store = _addresses(setup)
        senders: dict[_Variant, tuple[BroadcastSender, Sequence[Bucket]]] = {}
        for variant in setup.variants:
            wire_spec = setup.wire_spec(variant)
            sender = BroadcastSender(wire_spec, rank, device)
            address = sender.offer()
            if rank == 0:
                store.set(str(variant), pickle.dumps(address).hex())
            sender.connect(address)
            senders[variant] = sender, wire_spec.buckets

        torch.manual_seed(rank)
        start, stop = (_WIDTH * (rank + end) // setup.ranks for end in (0, 1))
        rows = torch.randn(stop - start, _WIDTH).bfloat16()

        def sync(variant: _Variant) -> Fingerprints:
            sender, buckets = senders[variant]
            fingerprints = Fingerprints()
            for bucket in buckets:
                slices = _rows(bucket, start, rows)
                fingerprints += sender.send(bucket, slices, whole=True).fingerprints
            sender.finish()
            return fingerprints

        syncs: Syncs = {variant: [] for variant in setup.variants}
        for _ in range(setup.rounds):
            for variant in setup.variants:
                syncs[variant].append(_watched(sync, variant, barrier))
        for sender, _ in senders.values():
            sender.close()
    return syncs


def _rows(bucket: Bucket, start: int, rows: Tensor) -> Iterable[tuple[Slice, Tensor]]:
    """Yield these rows of every parameter of a bucket."""
    from verl_ray.weight_sync.manifest import Slice

    for name in bucket.names:
        yield Slice(name, (start, 0), tuple(rows.shape)), rows


def _receive(setup: _Setup, number: int, barrier: Barrier) -> Syncs:
    """Receive as a rank of an engine, without loading."""
    import torch

    from verl_ray.weight_sync.transport import Inbox, WireEndpoint

    torch.set_num_threads(1)
    store = _addresses(setup)
    inboxes: dict[_Variant, tuple[Inbox, Sequence[Bucket]]] = {}
    for variant in setup.variants:
        wire_spec = setup.wire_spec(variant)
        address = pickle.loads(bytes.fromhex(store.get(str(variant)).decode()))
        inbox = Inbox()
        endpoint = WireEndpoint(wire_spec, number, torch.device("cpu"))
        inbox.connect(address, endpoint)
        inboxes[variant] = inbox, wire_spec.buckets

    def sync(variant: _Variant) -> Fingerprints:
        inbox, buckets = inboxes[variant]
        inbox.begin()
        for bucket in buckets:
            inbox.receive(bucket)
            inbox.release()
        return inbox.fingerprints

    syncs: Syncs = {variant: [] for variant in setup.variants}
    for _ in range(setup.rounds):
        for variant in setup.variants:
            syncs[variant].append(_watched(sync, variant, barrier))
    for inbox, _ in inboxes.values():
        inbox.close()
    return syncs


def _addresses(setup: _Setup) -> Any:
    """Return the store in which rank 0 leaves the addresses of the wires."""
    import torch.distributed as dist

    return dist.FileStore(  # type: ignore[attr-defined]
        f"{setup.folder}/addresses"
    )


def _watched(
    sync: Callable[[_Variant], Fingerprints], variant: _Variant, barrier: Barrier
) -> _Sync:
    """Run a sync, and count its time and bytes.

    At each barrier all processes wait for one another, so that they count while none of
    them sends or closes: before anyone begins, and after everyone has read what was
    sent.
    """
    sent_before, received_before = _carried_bytes()
    barrier.wait()
    began = time.monotonic()
    fingerprints = sync(variant)
    ended = time.monotonic()
    barrier.wait()
    sent, received = _carried_bytes()
    barrier.wait()
    return _Sync(
        began, ended, sent - sent_before, received - received_before, fingerprints
    )


def _carried_bytes() -> tuple[int, int]:
    """Return the bytes that TCP has sent and received over this process's sockets."""
    total_sent = 0
    total_received = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            is_socket = entry.readlink().name.startswith("socket:")
        except FileNotFoundError:
            # The folder that is listed was open itself.
            continue
        if not is_socket:
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as own:
            if own.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        received, sent, sent_again = _CARRIED.unpack_from(info)
        total_sent += sent - sent_again
        total_received += received
    return total_sent, total_received


def _flags() -> Flags:
    flags = Flags(
        "broadcast",
        "Time weight syncs over gloo from the ranks of an actor to the ranks of rollout"
        " engines, and count the bytes of each process, by the number of ranks that"
        " broadcast, and with experts by who gets them.",
    )
    flags.number("--ranks", 8, "ranks of the actor")
    flags.number("--receivers", 4, "ranks of rollout engines")
    about = f"experts of each layer, beside {_COMMON} matrices that all ranks hold"
    flags.number("--experts", 0, about)
    about = "ranks that broadcast in turn, one or more numbers to compare (1 2 4)"
    flags.add_argument(
        "--roots", nargs="+", type=int, default=[1, 2, 4], metavar="N", help=about
    )
    flags.number("--mib", 256, "size of the weights, in bfloat16")
    flags.number("--bucket-mib", 16, "size of a bucket")
    flags.number("--repeats", 5, "weight syncs of each that count")
    return flags
