"""Which processes run where: sets of processes -> bundles -> one Ray placement group -> the bundle of each rank.

Invariant: what the cluster does not have is refused at once with both figures, and what is not refused Ray can place.
Sets of the same bundle group share bundles rank by rank, so colocated ranks are on one node and one device. Ranks are
numbered node by node, so groups of neighbouring ranks stay within a node wherever the nodes' sizes allow it.
Deliberately not here: the processes themselves (`launch.py`), and which of a node's GPUs a bundle has: Ray decides it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_ray.cluster.session import NodeResources, node_resources
from verl_ray.cluster.signals import heed_signals
from verl_ray.errors import ClusterError

Resources = dict[str, float]
NodeName = tuple[str, str]
"""The address of a node and, since several may have the same, Ray's id of it. Nodes are sorted by it."""
_Kind = tuple[tuple[str, float], ...]  # what a bundle asks for; those that ask for the same are of one kind

_GRAIN = 10_000  # Ray counts resources in ten-thousandths
_TICK_S = 0.5
_RELEASE_S = 5.0  # resources of processes that ended come back this late at most


@dataclass(frozen=True)
class ProcessSet:
    """Processes of one kind, one per rank; roles that share a process per rank live in one set."""

    name: str
    num_ranks: int
    cpus_per_rank: float  # may be a fraction
    gpus_per_rank: int  # devices each rank sees; colocated ranks see the same one
    bundle_group: str  # sets with the same name here share bundles: rank i of each sits in bundle i
    threads_per_rank: int
    process_group: bool  # torch.distributed over its ranks
    replicas: bool = False  # each rank is a group of its own: it fails and restarts alone
    built_first: bool = False  # before the others: it needs their devices' memory until it is built


@dataclass(frozen=True)
class Bundles:
    """The bundles of one bundle group, one per rank, and what one process of each set takes of its bundle."""

    name: str
    bundles: tuple[Resources, ...]
    """A later one is never larger than an earlier one."""
    shares: dict[str, Resources]  # by set name


@dataclass(frozen=True)
class Place:
    """Where the processes of one set go: rank i into the bundle `bundles[i]` of the placement group."""

    group: Any
    bundles: tuple[int, ...]
    share: Resources

    def options(self, rank: int) -> dict[str, Any]:
        """Actor options for one rank."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[rank])
        return {
            "num_cpus": self.share["CPU"],
            "num_gpus": self.share.get("GPU", 0),
            "scheduling_strategy": strategy,
        }


def share_cpus(sets: Sequence[ProcessSet], nodes: Sequence[Resources]) -> tuple[list[ProcessSet], str | None]:
    """The sets with as many CPUs per rank, at most 1, as let all bundles fit on these nodes, each bundle on one node;
    and a warning if that is less than 1. A fair share of all cores would not do: on several nodes some cores stay
    unused. Sets that no share makes fit keep 1 each; `check_fits` will say what they lack.
    """
    processes = sum(one.num_ranks for one in sets)
    cores = [node.get("CPU", 0.0) for node in nodes]
    shares = {1.0} | {math.floor(100 * some / n) / 100 for some in set(cores) for n in range(1, processes + 1)}
    for share in sorted((share for share in shares if share <= 1), reverse=True):
        shared = [replace(one, cpus_per_rank=max(share, 1 / _GRAIN)) for one in sets]
        if not fits([bundle for plan in plan_bundles(shared) for bundle in plan.bundles], nodes):
            continue
        if share == 1:
            return shared, None
        return shared, f"{processes} worker processes share {sum(cores):g} CPU cores; steps will be slower for it"
    return [replace(one, cpus_per_rank=1.0) for one in sets], None


def plan_bundles(sets: Sequence[ProcessSet]) -> list[Bundles]:
    """The bundles of every bundle group, in order of first appearance."""
    members: dict[str, list[ProcessSet]] = {}
    for one in sets:
        members.setdefault(one.bundle_group, []).append(one)
    return [_bundles(name, group) for name, group in members.items()]


def _bundles(name: str, sets: Sequence[ProcessSet]) -> Bundles:
    devices = max(one.gpus_per_rank for one in sets)
    sharing = sum(one.gpus_per_rank > 0 for one in sets)
    if sharing > 1 and devices > 1:
        raise ClusterError(
            f"bundle group {name!r}: {[one.name for one in sets]} share bundles, and one asks for {devices} GPUs per "
            "rank; colocated ranks share exactly one GPU. Use placement=separate, or one GPU per rank"
        )
    shares: dict[str, Resources] = {}
    for one in sets:
        shares[one.name] = {"CPU": math.floor(one.cpus_per_rank * _GRAIN) / _GRAIN}
        if one.gpus_per_rank:
            # Shared devices are charged by equal fractions; Ray then shows each process the whole device.
            shares[one.name]["GPU"] = devices if sharing == 1 else math.floor(_GRAIN / sharing) / _GRAIN
    bundles: list[Resources] = []
    for rank in range(max(one.num_ranks for one in sets)):
        present = [one for one in sets if rank < one.num_ranks]
        bundle = {"CPU": max(round(sum(shares[one.name]["CPU"] for one in present), 4), 1 / _GRAIN)}
        if any(one.gpus_per_rank for one in present):
            bundle["GPU"] = float(devices)
        bundles.append(bundle)
    return Bundles(name, tuple(bundles), shares)


def fits(bundles: Sequence[Resources], nodes: Sequence[Resources]) -> bool:
    """Whether Ray's PACK strategy would find a node for each of the bundles.

    What it does (Ray 2.60, bundle_scheduling_policy.cc and scorer.cc): the bundles are sorted by GPUs, then by CPUs,
    largest first. The first of them goes to the node of which it leaves the largest fractions free, then all others
    that still fit there. What is left begins anew on the other nodes. Among nodes of the same score Ray takes any.
    """
    waiting = sorted(bundles, key=lambda bundle: (bundle.get("GPU", 0.0), bundle["CPU"]), reverse=True)
    candidates = [dict(node) for node in nodes]
    while waiting:
        possible = [node for node in candidates if _holds(node, waiting[0])]
        if not possible:
            return False
        node = max(possible, key=lambda free: _free_fractions(free, waiting[0]))
        candidates = [other for other in candidates if other is not node]
        left: list[Resources] = []
        for bundle in waiting:
            if not _holds(node, bundle):
                left.append(bundle)
                continue
            for key, amount in bundle.items():
                node[key] -= amount
        waiting = left
    return True


def _holds(free: Resources, bundle: Resources) -> bool:
    return all(free.get(key, 0.0) + 1e-6 >= amount for key, amount in bundle.items())


def _free_fractions(free: Resources, bundle: Resources) -> float:
    """How much of each resource that the bundle asks for stays free, as fractions that are added up."""
    return sum((free[key] - amount) / free[key] for key, amount in bundle.items() if free.get(key))


def number_ranks(plans: Sequence[Bundles], homes: Sequence[NodeName]) -> dict[str, tuple[int, ...]]:
    """The bundle of each rank, by bundle group: the index of a bundle among those of all plans, one after another.

    `homes`: the node of each of these bundles. Ray sorts equal bundles by an algorithm that is not stable, so which of
    them are on one node says nothing. Equal bundles are therefore interchangeable here, between groups too: largest
    group first, each takes its bundles node by node. Nodes that hold more of them come first, so that groups of
    neighbouring ranks meet the odd nodes last. Where the first ranks of a group ask for more than the others, a node
    that holds both kinds lies between those that hold one.
    """
    asked = [_kind(bundle) for plan in plans for bundle in plan.bundles]
    unused: dict[_Kind, list[int]] = {}
    for index, kind in enumerate(asked):
        unused.setdefault(kind, []).append(index)

    numbered: dict[str, tuple[int, ...]] = {}
    for plan in sorted(plans, key=lambda one: len(one.bundles), reverse=True):
        kinds = list(dict.fromkeys(_kind(bundle) for bundle in plan.bundles))
        held: dict[NodeName, list[int]] = {}  # by node, the kind of each bundle there that the group may take
        for number, kind in enumerate(kinds):
            for index in unused[kind]:
                held.setdefault(homes[index], []).append(number)
        nodes = sorted(held, key=lambda node: (min(held[node]), max(held[node]), -len(held[node]), node))
        place_of = {node: place for place, node in enumerate(nodes)}
        for kind in kinds:
            unused[kind].sort(key=lambda index: (place_of[homes[index]], index))
        numbered[plan.name] = tuple(unused[_kind(bundle)].pop(0) for bundle in plan.bundles)
    return numbered


def _kind(bundle: Resources) -> _Kind:
    return tuple(sorted(bundle.items()))


def _refusal(plans: Sequence[Bundles], nodes: Sequence[NodeResources], free: bool) -> ClusterError:
    def text(amounts: Resources) -> str:
        return ", ".join(f"{amounts[key]:g} {key}" for key in ("CPU", "GPU") if amounts.get(key)) or "nothing"

    asked = [bundle for plan in plans for bundle in plan.bundles]
    total = {key: sum(bundle.get(key, 0.0) for bundle in asked) for key in ("CPU", "GPU")}
    lines = [f"the run asks for {text(total)} in {len(asked)} bundles, and the cluster cannot hold them:"]
    for plan in plans:
        lines += [f"  asked by {plan.name} bundle {i}: {text(bundle)}" for i, bundle in enumerate(plan.bundles)]
    for node in nodes:
        lines.append(
            f"  node {node.address} has {text(node.total)}" + (f", free {text(node.available)}" if free else "")
        )
    lines.append("lower <role>.num_ranks or rollout.num_replicas, use placement=colocated, or add nodes")
    return ClusterError("\n".join(lines))


def check_fits(plans: Sequence[Bundles]) -> None:
    """Raise ClusterError, with asked and available, unless the cluster can hold all the bundles now."""
    asked = [bundle for plan in plans for bundle in plan.bundles]
    nodes = node_resources()
    if not fits(asked, [node.total for node in nodes]):
        raise _refusal(plans, nodes, free=False)
    give_up = time.monotonic() + _RELEASE_S
    while not fits(asked, [node.available for node in nodes]):
        if time.monotonic() > give_up:
            raise _refusal(plans, nodes, free=True)
        heed_signals()
        time.sleep(0.1)
        nodes = node_resources()


def place(sets: Sequence[ProcessSet], stall_s: float) -> dict[str, Place]:
    """Reserve bundles for all sets, in one placement group; by set name. Raises ClusterError, with nothing reserved,
    if that fails."""
    plans = plan_bundles(sets)
    check_fits(plans)
    group = placement_group([bundle for plan in plans for bundle in plan.bundles], strategy="PACK")
    try:
        _wait_until_reserved(group, plans, stall_s)
        numbered = number_ranks(plans, _homes(ray.util.placement_group_table(group)))
    except BaseException:
        release([group])
        raise
    return {
        one.name: Place(group, numbered[plan.name], plan.shares[one.name])
        for plan in plans
        for one in sets
        if one.bundle_group == plan.name
    }


def _wait_until_reserved(group: Any, plans: Sequence[Bundles], stall_s: float) -> None:
    ready = group.ready()
    give_up = time.monotonic() + stall_s
    while not ray.wait([ready], timeout=_TICK_S)[0]:
        heed_signals()
        if time.monotonic() > give_up:
            raise ClusterError(
                f"Ray did not reserve the bundles of {[plan.name for plan in plans]} within {stall_s:g} s "
                "(run.stall_s). They fitted when this began, so another program may have taken resources since"
            )


def _homes(table: Mapping[str, Any]) -> list[NodeName]:
    """The node of each bundle, in the order of the bundles, from Ray's table of a placement group."""
    addresses = {node.node_id: node.address for node in node_resources()}
    node_of: Mapping[int, str] = table["bundles_to_node_id"]
    # A node that has been lost since has no address; what starts there will say so.
    return [(addresses.get(node_of[index], ""), node_of[index]) for index in sorted(node_of)]


def release(groups: Any) -> None:
    """Give the bundles of placement groups back."""
    for group in groups:
        remove_placement_group(group)
