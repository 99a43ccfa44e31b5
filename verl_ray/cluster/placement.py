"""Which processes run where: sets of processes -> bundles -> Ray placement groups.

Invariant: what the cluster does not have is refused at once with both figures; nothing waits for it. Sets of the same
bundle group share bundles rank by rank, so colocated ranks are on one node and one device. Deliberately not here:
the processes themselves (`launch.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_ray.cluster.session import NodeResources, node_resources
from verl_ray.errors import ClusterError

Resources = dict[str, float]
_GRAIN = 10_000  # Ray counts resources in ten-thousandths
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
    """One placement group to be: its bundles, and what one process of each set takes of its bundle."""

    name: str
    bundles: tuple[Resources, ...]
    shares: dict[str, Resources]  # by set name


@dataclass(frozen=True)
class Place:
    """Where the processes of one set go: one bundle of `group` per rank."""

    group: Any
    share: Resources

    def options(self, rank: int) -> dict[str, Any]:
        """Actor options for one rank."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank)
        return {
            "num_cpus": self.share["CPU"],
            "num_gpus": self.share.get("GPU", 0),
            "scheduling_strategy": strategy,
        }


def share_cpus(sets: Sequence[ProcessSet], nodes: Sequence[float]) -> tuple[list[ProcessSet], str | None]:
    """The sets with as many CPUs per rank, at most 1, as let all bundles fit on nodes of these cores, each bundle on
    one node; and a warning if that is less than 1. A fair share of all cores would not do: on several nodes some cores
    stay unused.
    """
    processes = sum(one.num_ranks for one in sets)
    shares = {1.0} | {math.floor(100 * cores / n) / 100 for cores in set(nodes) for n in range(1, processes + 1)}
    shared = list(sets)
    for share in sorted((share for share in shares if share <= 1), reverse=True):
        shared = [replace(one, cpus_per_rank=max(share, 1 / _GRAIN)) for one in sets]
        bundles = [{"CPU": bundle["CPU"]} for plan in plan_bundles(shared) for bundle in plan.bundles]
        if fits(bundles, [{"CPU": cores} for cores in nodes]):
            break
    if share == 1:
        return shared, None
    return shared, f"{processes} worker processes share {sum(nodes):g} CPU cores; steps will be slower for it"


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
    """Whether all bundles fit on the nodes, each bundle on one node: first fit, largest first."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0.0), b["CPU"]), reverse=True):
        home = next((n for n in free if all(n.get(k, 0.0) + 1e-6 >= amount for k, amount in bundle.items())), None)
        if home is None:
            return False
        for key, amount in bundle.items():
            home[key] -= amount
    return True


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
        time.sleep(0.1)
        nodes = node_resources()


def place(sets: Sequence[ProcessSet], deadline_s: float) -> dict[str, Place]:
    """Reserve bundles for all sets; by set name. Raises ClusterError, with nothing reserved, if that fails."""
    plans = plan_bundles(sets)
    check_fits(plans)
    groups: dict[str, Any] = {}
    try:
        for plan in plans:
            groups[plan.name] = placement_group(list(plan.bundles), strategy="PACK")
        waiting = [group.ready() for group in groups.values()]
        _, late = ray.wait(waiting, num_returns=len(waiting), timeout=deadline_s)
        if late:
            names = [name for name, ref in zip(groups, waiting, strict=True) if ref in late]
            raise ClusterError(
                f"bundles of {names} were not reserved within {deadline_s:g} s (run.start_deadline_s); another "
                "program may have taken the resources in the meantime"
            )
    except BaseException:
        release(groups.values())
        raise
    return {
        one.name: Place(groups[plan.name], plan.shares[one.name])
        for plan in plans
        for one in sets
        if one.bundle_group == plan.name
    }


def release(groups: Any) -> None:
    """Give the bundles of placement groups back."""
    for group in groups:
        remove_placement_group(group)
