"""Bundles on nodes: whether Ray 2.60 can pack them, and which ranks get which.

`fits` follows the PACK strategy of Ray 2.60 (`bundle_scheduling_policy.cc` and
`scorer.cc`). Ray cannot be asked: it has no call that says whether bundles would fit
without reserving them, and `share_cpus` tries many sizes before anything is reserved.
The packers in Ray's Python code are those of its autoscaler and choose other nodes.
`tests/cluster/test_placement.py` compares the answers with placement groups of a
cluster, and fails as soon as another release of Ray is installed.

Invariant: `fits` agrees with Ray, and the numbering of ranks depends on the nodes of
the bundles alone, not on Ray's order of equal bundles. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    name: str
    bundles: tuple[Resources, ...]
    shares: dict[str, Resources]


def fits(bundles: Sequence[Resources], nodes: Sequence[Resources]) -> bool:
    """Whether Ray's PACK strategy would find a node for each of the bundles.

    The strategy sorts the bundles by GPUs, then by CPUs, the largest first. The first
    bundle goes to the node of which it leaves the largest fractions free, then all
    others that still fit there. The remaining bundles go to the other nodes in the same
    way. Among nodes of the same score Ray takes any.
    """
    waiting = sorted(
        bundles,
        key=lambda bundle: (bundle.get("GPU", 0.0), bundle["CPU"]),
        reverse=True,
    )
    candidates = [dict(node) for node in nodes]

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

        numbered[plan.name] = tuple(
            unused[_kind(bundle)].pop(0) for bundle in plan.bundles
        )
    return numbered


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
