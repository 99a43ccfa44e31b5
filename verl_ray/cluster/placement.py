"""Placement of processes: from process sets to the bundle of each rank, and its number.

Sets of the same bundle group share bundles rank by rank, so colocated ranks are on one
node and one device. A rank that computes on several devices spans as many bundles. All
bundles are reserved in one Ray placement group. Ranks are
numbered node by node, so groups of neighbouring ranks stay within a node wherever the
sizes of the nodes allow it.

`fits` follows the PACK strategy of Ray 2.60 (`bundle_scheduling_policy.cc` and
`scorer.cc`). Ray cannot be asked: it has no call that says whether bundles would fit
without reserving them, and `share_cpus` tries many sizes before anything is reserved.
The packers in Ray's Python code are those of its autoscaler and choose other nodes.
`tests/cluster/test_placement.py` compares the answers with placement groups of a
cluster, and fails as soon as another release of Ray is installed.

Invariant: a plan that the cluster cannot hold is refused at once with both figures, and
a plan that is not refused can be placed by Ray. Ray chooses a node's GPUs for a bundle.
The numbering depends on the nodes of the bundles alone, not on Ray's order of equal
bundles.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_ray.cluster.signals import heed_signals
from verl_ray.cluster.waiting import RAY_CALLS, TICK_S, wait
from verl_ray.errors import ClusterError

# Ray counts resources in ten-thousandths.
_GRAIN = 10_000
# Resources of processes that ended become available this late at most.
_RELEASE_S = 5.0


@dataclass(frozen=True)
class NodeResources:
    """Resources of one live node.

    Attributes:
        node_id: Ray's id of the node.
        address: IP address of the node.
        total: Amounts that the node has, by Ray's resource names (CPU, GPU, memory in
            bytes, ...).
        available: Amounts that are free now.
    """

    node_id: str
    address: str
    total: dict[str, float]
    available: dict[str, float]


def node_resources() -> list[NodeResources]:
    """Resources of each live node of the connected cluster (`Session.resources`).

    Raises:
        ClusterError: The cluster is lost, or Ray hangs.
    """
    state = ray._private.state
    available = RAY_CALLS.make(state.available_resources_per_node)
    resources = []
    for node in RAY_CALLS.make(ray.nodes):
        if node["Alive"]:
            node_id = node["NodeID"]
            resources.append(
                NodeResources(
                    node_id=node_id,
                    address=node["NodeManagerAddress"],
                    total=dict(node["Resources"]),
                    available=dict(available.get(node_id, {})),
                )
            )
    return resources


# --------------------------------------------------------------------- sets and bundles


@dataclass(frozen=True)
class ProcessSet:
    """Processes of one kind, one per rank.

    Roles that share a process per rank live in one set.

    Attributes:
        name: Name of the set.
        num_ranks: Number of ranks.
        cpus_per_rank: CPUs that Ray reserves for each rank; may be a fraction.
        gpus_per_rank: GPUs that each rank sees; colocated ranks see the same one.
        bundle_group: Sets with the same bundle group share bundles: rank i of each is
            in bundle i, or in the first of those that it spans.
        spans: Bundles of each rank, which are on one node. Where they are several, the
            rank requests no GPU: it sees those of the other ranks in them.
        threads_per_rank: CPU threads that each process may use.
        process_group: True if the ranks form a torch.distributed process group.
        replicas: True if each rank is a group of its own, which fails and restarts
            without the others.
        built_first: True if the set is built before the others, since it needs their
            devices' memory until it is built.
    """

    name: str
    num_ranks: int
    cpus_per_rank: float
    gpus_per_rank: int
    bundle_group: str
    threads_per_rank: int
    process_group: bool
    replicas: bool = False
    built_first: bool = False
    spans: int = 1

    @property
    def num_bundles(self) -> int:
        """Number of bundles of all ranks."""
        return self.num_ranks * self.spans


@dataclass(frozen=True)
class Place:
    """Bundles of one process set.

    Attributes:
        group: Ray's placement group.
        bundles: Index of each rank's bundle in the placement group.
        share: Resources that one process takes of its bundle.
    """

    group: Any
    bundles: tuple[int, ...]
    share: Resources

    def options(self, rank: int) -> dict[str, Any]:
        """Ray's options of the actor for one rank."""
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.bundles[rank]
        )
        return {
            "num_cpus": self.share["CPU"],
            "num_gpus": self.share.get("GPU", 0),
            "scheduling_strategy": strategy,
        }


def share_cpus(
    sets: Sequence[ProcessSet], nodes: Sequence[Resources]
) -> tuple[list[ProcessSet], str | None]:
    """Sets with the largest number of CPUs per rank, at most 1, that lets all fit.

    Each bundle must fit on one node. A fair share of all cores would be too large: on
    several nodes some cores stay unused.

    Args:
        sets: Process sets; their own CPUs per rank are ignored.
        nodes: Resources of each node.

    Returns:
        The sets, and a warning if the ranks get less than 1 CPU each. If no share lets
        the sets fit, the ranks get 1 CPU each and no warning; `check_fits` will report
        what they lack.
    """
    num_processes = sum(process_set.num_bundles for process_set in sets)
    cores_of_nodes = [node.get("CPU", 0.0) for node in nodes]

    for share in _possible_shares(cores_of_nodes, num_processes):
        # Ray rounds less than a grain down to nothing.
        cpus = max(share, 1 / _GRAIN)
        shared = [replace(process_set, cpus_per_rank=cpus) for process_set in sets]
        if not fit_in_turn(plan_bundles(shared), nodes):
            continue

        warning = None
        if share != 1:
            warning = (
                f"{num_processes} worker processes share {sum(cores_of_nodes):g} CPU"
                " cores; steps will be slower for it"
            )
        return shared, warning

    return [replace(process_set, cpus_per_rank=1.0) for process_set in sets], None


def _possible_shares(
    cores_of_nodes: Sequence[float], num_processes: int
) -> list[float]:
    """Shares of 1 CPU or less that divide the cores of a node, the largest first."""
    shares = {1.0}
    for cores in set(cores_of_nodes):
        for num_on_node in range(1, num_processes + 1):
            shares.add(math.floor(100 * cores / num_on_node) / 100)
    return sorted((share for share in shares if share <= 1), reverse=True)


def plan_bundles(sets: Sequence[ProcessSet]) -> list[Bundles]:
    """Bundles of every bundle group, in order of first appearance."""
    sets_by_group: dict[str, list[ProcessSet]] = {}
    for process_set in sets:
        sets_by_group.setdefault(process_set.bundle_group, []).append(process_set)
    return [_bundles(name, members) for name, members in sets_by_group.items()]


def _bundles(name: str, sets: Sequence[ProcessSet]) -> Bundles:
    """Bundles that the sets of one bundle group share."""
    owners = [process_set for process_set in sets if process_set.spans == 1]
    gpus_per_bundle = max(process_set.gpus_per_rank for process_set in owners)
    shares = _shares_of_bundle(name, sets, gpus_per_bundle)

    bundles: list[Resources] = []
    num_bundles = max(process_set.num_bundles for process_set in sets)
    span = max(process_set.spans for process_set in sets)
    for number in range(num_bundles):
        # Sets of a bundle group may have different numbers of ranks. Where ranks span
        # bundles, which their processes compute in, all bundles are equal: then those
        # of one node are neighbours.
        present = [each for each in sets if number < each.num_bundles or span > 1]
        cpus = sum(shares[process_set.name]["CPU"] for process_set in present)
        # The sum of fractions is not exact, and Ray refuses an empty bundle.
        bundle = {"CPU": max(round(cpus, 4), 1 / _GRAIN)}
        if any(process_set.gpus_per_rank for process_set in present):
            bundle["GPU"] = float(gpus_per_bundle)
        bundles.append(bundle)
    return Bundles(name, tuple(bundles), shares, span)


def _shares_of_bundle(
    name: str, sets: Sequence[ProcessSet], gpus_per_bundle: int
) -> dict[str, Resources]:
    """Resources that one process of each set takes of its bundle, by set name."""
    num_sharing = sum(each.gpus_per_rank > 0 for each in sets if each.spans == 1)
    if num_sharing > 1 and gpus_per_bundle > 1:
        set_names = [process_set.name for process_set in sets]
        raise ClusterError(
            f"bundle group {name!r}: {set_names} share bundles, and one asks for"
            f" {gpus_per_bundle} GPUs per rank; colocated ranks share exactly one GPU."
            " Use placement=separate, or one GPU per rank"
        )

    shares: dict[str, Resources] = {}
    for process_set in sets:
        cpus = math.floor(process_set.cpus_per_rank * _GRAIN) / _GRAIN
        share: Resources = {"CPU": cpus}
        requests_gpu = process_set.gpus_per_rank and process_set.spans == 1
        if requests_gpu and num_sharing == 1:
            share["GPU"] = gpus_per_bundle
        elif requests_gpu:
            # A shared device is charged by equal fractions. Ray then shows each process
            # the whole device.
            share["GPU"] = math.floor(_GRAIN / num_sharing) / _GRAIN
        shares[process_set.name] = share
    return shares


def _all_bundles(plans: Sequence[Bundles]) -> list[Resources]:
    return [bundle for plan in plans for bundle in plan.bundles]


# -------------------------------------------------------------------------- reservation


def place(sets: Sequence[ProcessSet], stall_s: float) -> dict[str, Place]:
    """Reserve bundles for all sets; return places by set name.

    Raises:
        ClusterError: The cluster cannot hold the bundles, or Ray did not reserve them
            within `stall_s` seconds. Nothing is reserved then.
    """
    plans = plan_bundles(sets)
    check_fits(plans)
    places: dict[str, Place] = {}
    try:
        for together in _reservations(plans):
            names = {plan.name for plan in together}
            members = [each for each in sets if each.bundle_group in names]
            places |= _reserve(together, members, stall_s)
    except BaseException:
        release({place.group.id: place.group for place in places.values()}.values())
        raise
    return places


def _reservations(plans: Sequence[Bundles]) -> list[list[Bundles]]:
    """Return the plans of each placement group, in the order of their reservation.

    Groups whose ranks span bundles come first, each by itself, so that they begin on
    whole nodes. All others are in one placement group.
    """
    spanning = [[plan] for plan in plans if plan.span > 1]
    others = [plan for plan in plans if plan.span == 1]
    return [*spanning, others] if others else spanning


def _reserve(
    plans: Sequence[Bundles], sets: Sequence[ProcessSet], stall_s: float
) -> dict[str, Place]:
    """Reserve bundles in one placement group; return places by set name."""
    bundles = _all_bundles(plans)
    group = RAY_CALLS.make(placement_group, bundles, strategy="PACK")
    # The nodes of the bundles are known only once Ray has reserved them.
    try:
        _wait_until_reserved(group, plans, stall_s)
        table = RAY_CALLS.make(ray.util.placement_group_table, group)
        homes = _homes(table)
        numbered = number_ranks(plans, homes)
        for process_set in sets:
            bundles_of_group = numbered[process_set.bundle_group]
            _check_spans(process_set, [homes[index] for index in bundles_of_group])
    except BaseException:
        release([group])
        raise

    shares = {plan.name: plan.shares for plan in plans}
    return {
        process_set.name: Place(
            group,
            numbered[process_set.bundle_group][:: process_set.spans],
            shares[process_set.bundle_group][process_set.name],
        )
        for process_set in sets
    }


def _check_spans(process_set: ProcessSet, homes: Sequence[NodeName]) -> None:
    """Raise ClusterError unless the bundles that a rank spans are on one node.

    Args:
        process_set: The set of the rank.
        homes: Node of each bundle of its group, in their order.
    """
    span = process_set.spans
    for rank in range(process_set.num_ranks):
        first = rank * span
        nodes = sorted(set(homes[first : first + span]))
        if len(nodes) > 1:
            addresses = " and ".join(address for address, _ in nodes)
            raise ClusterError(
                f"{process_set.name} rank {rank} computes on {span} GPUs of one node,"
                f" and Ray reserved bundles {first} to {first + span - 1} on"
                f" {addresses}. Use nodes whose numbers of free GPUs {span} divides, or"
                " engines with fewer"
            )


def check_fits(plans: Sequence[Bundles]) -> None:
    """Raise ClusterError unless the cluster can hold all the bundles now.

    The error states the requested and the available resources. Resources of processes
    that have just ended may take some seconds to become available, so the function
    waits that long.
    """
    # A plan that does not fit an empty cluster need not wait.
    nodes = node_resources()
    if not fit_in_turn(plans, [node.total for node in nodes]):
        raise _refusal(plans, nodes, show_available=False)

    deadline = time.monotonic() + _RELEASE_S
    while not fit_in_turn(plans, [node.available for node in nodes]):
        if time.monotonic() > deadline:
            raise _refusal(plans, nodes, show_available=True)
        heed_signals()
        time.sleep(0.1)
        nodes = node_resources()


def _refusal(
    plans: Sequence[Bundles], nodes: Sequence[NodeResources], show_available: bool
) -> ClusterError:
    bundles = _all_bundles(plans)
    total = {
        key: sum(bundle.get(key, 0.0) for bundle in bundles) for key in ("CPU", "GPU")
    }
    lines = [
        f"the run requests {_amounts(total)} in {len(bundles)} bundles, and the cluster"
        " cannot hold them:"
    ]
    for plan in plans:
        for index, bundle in enumerate(plan.bundles):
            lines.append(f"  {plan.name} bundle {index} needs {_amounts(bundle)}")
    for node in nodes:
        line = f"  node {node.address} has {_amounts(node.total)}"
        if show_available:
            line += f", free {_amounts(node.available)}"
        lines.append(line)
    lines.append(
        "lower <role>.num_ranks or rollout.num_replicas, use placement=colocated, or"
        " add nodes"
    )
    return ClusterError("\n".join(lines))


def _amounts(resources: Resources) -> str:
    amounts = [
        f"{resources[key]:g} {key}" for key in ("CPU", "GPU") if resources.get(key)
    ]
    return ", ".join(amounts) or "nothing"


def _wait_until_reserved(group: Any, plans: Sequence[Bundles], stall_s: float) -> None:
    """Wait for a placement group that fitted when it was made.

    Raises:
        ClusterError: Other programs have taken its resources since, or Ray does not
            reserve them.
    """
    ready = RAY_CALLS.make(group.ready)
    fitted_s = begun_s = time.monotonic()
    while not wait([ready], 1, TICK_S):
        now_s = time.monotonic()
        nodes = node_resources()
        # What is reserved is no longer available, though the group is not ready yet.
        state = RAY_CALLS.make(ray.util.placement_group_table, group)["state"]
        if state != "PENDING" or fit_in_turn(plans, [each.available for each in nodes]):
            fitted_s = now_s
        elif now_s - fitted_s > _RELEASE_S:
            raise _refusal(plans, nodes, show_available=True)
        if now_s - begun_s > stall_s:
            raise ClusterError(
                f"Ray did not reserve the bundles of {[plan.name for plan in plans]}"
                f" within {stall_s:g} s (run.stall_s), and they fit"
            )


def _homes(table: Mapping[str, Any]) -> list[NodeName]:
    """Node of each bundle, in the order of the bundles.

    Args:
        table: Ray's table of the placement group.
    """
    addresses = {node.node_id: node.address for node in node_resources()}
    node_of: Mapping[int, str] = table["bundles_to_node_id"]
    # A node that was lost since then has no address. The start of a process on it will
    # report that.
    return [
        (addresses.get(node_of[index], ""), node_of[index]) for index in sorted(node_of)
    ]


def release(groups: Iterable[Any]) -> None:
    """Release the bundles of placement groups, unless Ray hangs."""
    for group in groups:
        RAY_CALLS.attempt(_RELEASE_S, remove_placement_group, group)


# ----------------------------------------------------------------- packing as Ray packs

Resources = dict[str, float]
"""Amounts by Ray's resource names (CPU, GPU, ...)."""

NodeName = tuple[str, str]
"""Address of a node and Ray's id of it, since several nodes may have one address.

Nodes are sorted by this name.
"""

_Kind = tuple[tuple[str, float], ...]
"""Resources of a bundle in a form that can be a key: equal bundles are of one kind."""

# Sums of fractions are not exact.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Bundles:
    """Bundles of one bundle group.

    Attributes:
        name: Name of the bundle group.
        bundles: One bundle per rank; none is larger than the one before it.
        shares: Resources that one process of each set takes of its bundle, by set name.
        span: So many neighbouring bundles should be on one node.
    """

    name: str
    bundles: tuple[Resources, ...]
    shares: dict[str, Resources]
    span: int = 1


def fits(bundles: Sequence[Resources], nodes: Sequence[Resources]) -> bool:
    """Whether Ray's PACK strategy would find a node for each of the bundles.

    The strategy sorts the bundles by GPUs, then by CPUs, the largest first. The first
    bundle goes to the node of which it leaves the largest fractions free, then all
    others that still fit there. The remaining bundles go to the other nodes in the same
    way. Among nodes of the same score Ray takes any.
    """
    return _pack(bundles, [dict(node) for node in nodes])


def fit_in_turn(plans: Sequence[Bundles], nodes: Sequence[Resources]) -> bool:
    """Whether each placement group fits in what those before it leave free."""
    remaining = [dict(node) for node in nodes]
    return all(
        _pack(_all_bundles(together), remaining) for together in _reservations(plans)
    )


def _pack(bundles: Sequence[Resources], nodes: Sequence[Resources]) -> bool:
    """Take bundles from the resources of nodes; return whether each found a node."""
    waiting = sorted(
        bundles,
        key=lambda bundle: (bundle.get("GPU", 0.0), bundle["CPU"]),
        reverse=True,
    )
    candidates = list(nodes)

    # Consumes one node per turn. Ends when all bundles are placed, or when no remaining
    # node holds the first of them.
    while waiting:
        first = waiting[0]
        possible = [node for node in candidates if _holds(node, first)]
        if not possible:
            return False

        chosen = max(possible, key=lambda node: _free_fractions(node, first))
        candidates = [node for node in candidates if node is not chosen]
        waiting = _fill(chosen, waiting)
    return True


def _fill(node: Resources, bundles: Sequence[Resources]) -> list[Resources]:
    """Put the bundles that fit on a node; return the others."""
    remaining = []
    for bundle in bundles:
        if _holds(node, bundle):
            for key, amount in bundle.items():
                node[key] -= amount
        else:
            remaining.append(bundle)
    return remaining


def _holds(node: Resources, bundle: Resources) -> bool:
    return all(
        node.get(key, 0.0) + _TOLERANCE >= amount for key, amount in bundle.items()
    )


def _free_fractions(node: Resources, bundle: Resources) -> float:
    """Sum of the fractions of the node's resources that the bundle would leave free.

    Only resources that the bundle requests count.
    """
    return sum(
        (node[key] - amount) / node[key]
        for key, amount in bundle.items()
        if node.get(key)
    )


def number_ranks(
    plans: Sequence[Bundles], homes: Sequence[NodeName]
) -> dict[str, tuple[int, ...]]:
    """Bundle of each rank, by bundle group.

    Ray sorts equal bundles by an algorithm that is not stable, so their order does not
    show which of them are on one node. Equal bundles are therefore interchangeable
    here, between groups too. The largest group chooses first. Each takes its bundles
    node by node, starting with the nodes that hold most of them, so that groups of
    neighbouring ranks meet the smaller nodes last. Where the first ranks of a
    group request more than the others, a node with both kinds of bundles comes between
    the nodes with one kind.

    Args:
        plans: Bundles of every bundle group.
        homes: Node of each bundle of all plans, one plan after another.

    Returns:
        For each bundle group the indices of its ranks' bundles in `homes`.
    """
    kinds_of_bundles = [_kind(bundle) for plan in plans for bundle in plan.bundles]
    unused: dict[_Kind, list[int]] = {}
    for index, kind in enumerate(kinds_of_bundles):
        unused.setdefault(kind, []).append(index)

    numbered: dict[str, tuple[int, ...]] = {}
    for plan in sorted(plans, key=lambda plan: len(plan.bundles), reverse=True):
        # Kinds in the order in which the ranks of this group request them.
        kinds = list(dict.fromkeys(map(_kind, plan.bundles)))
        position = _positions_of_nodes(kinds, unused, homes)
        for kind in kinds:
            unused[kind].sort(key=lambda index: (position[homes[index]], index))
            unused[kind] = _whole_spans_first(unused[kind], homes, plan.span)

        numbered[plan.name] = tuple(
            unused[_kind(bundle)].pop(0) for bundle in plan.bundles
        )
    return numbered


def _whole_spans_first(
    indices: Sequence[int], homes: Sequence[NodeName], span: int
) -> list[int]:
    """Return bundles in their order, but the last ones of a node after all others.

    These are the ones that are too few for another rank which spans bundles.
    """
    on_node: dict[NodeName, list[int]] = {}
    for index in indices:
        on_node.setdefault(homes[index], []).append(index)
    whole = {
        index
        for together in on_node.values()
        for index in together[: len(together) // span * span]
    }
    return sorted(indices, key=lambda index: index not in whole)


def _positions_of_nodes(
    kinds: Sequence[_Kind], unused: dict[_Kind, list[int]], homes: Sequence[NodeName]
) -> dict[NodeName, int]:
    """Position of each node in the order in which a bundle group fills the nodes."""
    # For each unused bundle on a node, the number of its kind.
    kinds_on: dict[NodeName, list[int]] = {}
    for number, kind in enumerate(kinds):
        for index in unused[kind]:
            kinds_on.setdefault(homes[index], []).append(number)

    def order(node: NodeName) -> tuple[int, int, int, NodeName]:
        numbers = kinds_on[node]
        return min(numbers), max(numbers), -len(numbers), node

    nodes = sorted(kinds_on, key=order)
    return {node: position for position, node in enumerate(nodes)}


def _kind(bundle: Resources) -> _Kind:
    return tuple(sorted(bundle.items()))
