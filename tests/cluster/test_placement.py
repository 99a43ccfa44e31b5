from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.cluster import placement
from verl_ray.cluster.placement import (
    Bundles,
    ProcessSet,
    fits,
    node_resources,
    number_ranks,
    place,
    plan_bundles,
    release,
    share_cpus,
)
from verl_ray.cluster.session import Session
from verl_ray.errors import ClusterError

ROOT = Path(__file__).parents[2]


def process_set(
    name: str, ranks: int, cpus: float, gpus: int, group: str
) -> ProcessSet:
    return ProcessSet(name, ranks, cpus, gpus, group, 1, True)


def test_colocated_sets_share_bundles_rank_by_rank() -> None:
    (bundles,) = plan_bundles(
        [
            process_set("trainer", 2, 0.5, 0, "main"),
            process_set("rollout", 1, 0.25, 0, "main"),
        ]
    )
    assert bundles.bundles == ({"CPU": 0.75}, {"CPU": 0.5})
    assert bundles.shares == {"trainer": {"CPU": 0.5}, "rollout": {"CPU": 0.25}}


def test_colocated_sets_share_whole_gpus() -> None:
    plans = plan_bundles(
        [
            process_set("trainer", 2, 1, 1, "main"),
            process_set("rollout", 2, 1, 1, "main"),
            process_set("reward", 1, 1, 0, "r"),
        ]
    )
    assert plans[0].bundles == ({"CPU": 2.0, "GPU": 1.0},) * 2
    assert plans[0].shares["trainer"] == {"CPU": 1.0, "GPU": 0.5}
    assert plans[1].bundles == ({"CPU": 1.0},)
    with pytest.raises(ClusterError, match="share exactly one GPU"):
        plan_bundles(
            [
                process_set("trainer", 2, 1, 1, "main"),
                process_set("rollout", 1, 1, 2, "main"),
            ]
        )


def test_ranks_that_span_bundles_see_the_gpus_of_the_others() -> None:
    engines = replace(process_set("rollout", 2, 1, 2, "main"), spans=2)
    (plan,) = plan_bundles([process_set("trainer", 4, 1, 1, "main"), engines])
    assert plan.bundles == ({"CPU": 2.0, "GPU": 1.0},) * 4
    assert plan.shares == {
        "trainer": {"CPU": 1.0, "GPU": 1},
        "rollout": {"CPU": 1.0},
    }

    # Of a smaller set, too, all bundles are of one kind. They are reserved before a
    # judge, whose larger bundle Ray would place first.
    judge = process_set("judge", 1, 1, 2, "judge")
    smaller = process_set("reference", 1, 1, 1, "main")
    plans = plan_bundles(
        [process_set("trainer", 4, 1, 1, "main"), smaller, judge, engines]
    )
    assert len(set(map(str, plans[0].bundles))) == 1 and plans[0].bundles[0]["GPU"] == 1
    together = placement._reservations(plans)
    assert [[each.name for each in group] for group in together] == [
        ["main"],
        ["judge"],
    ]
    four_gpus = {"CPU": 16.0, "GPU": 4.0}
    assert placement.fit_in_turn(plans, [four_gpus, {"CPU": 16.0, "GPU": 2.0}])
    assert not placement.fit_in_turn(plans, [four_gpus, {"CPU": 16.0, "GPU": 1.0}])

    # Ranks that are neighbours are on one node where there are enough: the last bundle
    # of three is left for the end.
    three = [("a", "1")] * 3 + [("b", "2")] * 3
    numbered = number_ranks([replace(plan, bundles=plan.bundles[:1] * 6)], three)
    assert numbered["main"] == (0, 1, 3, 4, 2, 5)
    four = [three[index] for index in numbered["main"][:4]]
    placement._check_spans(engines, four)
    with pytest.raises(
        ClusterError, match=r"rank 1 .* bundles 2 to 3 on a and b\. Use"
    ):
        placement._check_spans(engines, three)


def test_three_shares_of_a_gpu_fit_it() -> None:
    (bundles,) = plan_bundles(
        [process_set(name, 1, 1, 1, "main") for name in ("a", "b", "c")]
    )
    assert 3 * bundles.shares["a"]["GPU"] <= bundles.bundles[0]["GPU"]


def test_bundles_fit_only_when_each_has_a_node() -> None:
    nodes = [{"CPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert fits([{"CPU": 2.0}, {"CPU": 2.0}], nodes)
    assert not fits([{"CPU": 3.0}], nodes)
    assert fits([{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0}], nodes)
    assert not fits([{"CPU": 1.0, "GPU": 1.0}] * 2, nodes)


def shares(
    sets: list[ProcessSet], nodes: list[float]
) -> tuple[list[float], str | None]:
    shared, warning = share_cpus(sets, [{"CPU": cores} for cores in nodes])
    return [each.cpus_per_rank for each in shared], warning


def test_cpu_shares_fit_the_cores_and_say_when_they_must() -> None:
    three = [
        process_set("trainer", 2, 9, 0, "main"),
        process_set("rollout", 1, 9, 0, "main"),
    ]
    assert shares(three, [3]) == ([1, 1], None)
    results, warning = shares(three, [2])
    assert results == [0.66, 0.66]
    assert warning is not None
    assert "3 worker processes share 2 CPU cores" in warning


def test_cpu_shares_fit_node_by_node() -> None:
    apart = [process_set(name, 1, 9, 0, name) for name in "abcde"]
    assert (
        shares(apart, [2, 2])[0] == [0.66] * 5
    )  # a fair share of all four cores, 0.8, fits twice on each node
    assert shares(apart, [1, 4])[0] == [1] * 5
    together = [
        process_set("trainer", 1, 9, 0, "main"),
        process_set("rollout", 1, 9, 0, "main"),
    ]
    assert shares(together, [1, 1])[0] == [0.5, 0.5]  # colocated ranks are on one node


def test_cpu_shares_fit_where_the_gpus_are() -> None:
    colocated = [
        process_set("trainer", 16, 9, 1, "main"),
        process_set("rollout", 16, 9, 1, "main"),
    ]
    head, worker = {"CPU": 64.0, "GPU": 0.0}, {"CPU": 8.0, "GPU": 8.0}
    results, _ = share_cpus(colocated, [head, worker, worker])
    assert [each.cpus_per_rank for each in results] == [
        0.5,
        0.5,
    ]  # 16 processes on 8 cores; the head's are no use
    results, warning = share_cpus(colocated, [head, worker])
    assert [each.cpus_per_rank for each in results] == [
        1,
        1,
    ] and warning is None  # there are too few GPUs at any share


# ---------------------------------------------------------- Ray's order, and the ranks'


def nodes_of(table: str) -> list[tuple[str, str]]:
    """The home of each bundle: one digit per bundle names its node."""
    return [(f"10.0.0.{node}", node) for node in table]


def by_rank(plans: list[Bundles], table: str) -> dict[str, str]:
    """The node of each rank, a digit each, by bundle group."""
    numbered = number_ranks(plans, nodes_of(table))
    assert sorted(index for bundles in numbered.values() for index in bundles) == list(
        range(len(table))
    )
    return {
        name: "".join(table[index] for index in bundles)
        for name, bundles in numbered.items()
    }


@pytest.mark.parametrize(
    ("reserved", "expected"),
    # Std::sort of so many equal bundles, as shared/facts/probes/ray_bundle_order.cc has
    # it
    [
        ("122222222111011110000000", "0" * 8 + "1" * 8 + "2" * 8),
        ("23333333322222220111111110000000", "0" * 8 + "1" * 8 + "2" * 8 + "3" * 8),
    ],
)
def test_neighbouring_ranks_are_on_one_node(reserved: str, expected: str) -> None:
    plans = plan_bundles(
        [
            process_set(name, len(reserved), 1, 1, "main")
            for name in ("trainer", "rollout")
        ]
    )
    assert by_rank(plans, reserved) == {"main": expected}


@given(st.permutations("0" * 8 + "1" * 8 + "2" * 4))
def test_ranks_meet_the_smaller_nodes_last(reserved: list[str]) -> None:
    plans = plan_bundles([process_set("trainer", 20, 1, 1, "main")])
    assert by_rank(plans, "".join(reserved)) == {"main": "0" * 8 + "1" * 8 + "2" * 4}
    renamed = "".join(reserved).translate(str.maketrans("012", "201"))
    assert by_rank(plans, renamed) == {"main": "0" * 8 + "2" * 8 + "1" * 4}


@given(st.permutations("1" * 8 + "2" * 4), st.permutations("2" * 4 + "0" * 8))
def test_ranks_with_an_engine_beside_come_first(
    with_engine: list[str], without: list[str]
) -> None:
    # 12 of 24 trainers share their bundle: those bundles are larger, and one node has
    # both kinds.
    plans = plan_bundles(
        [
            process_set("trainer", 24, 1, 1, "main"),
            process_set("rollout", 12, 1, 1, "main"),
        ]
    )
    assert by_rank(plans, "".join(with_engine + without)) == {
        "main": "1" * 8 + "2" * 8 + "0" * 8
    }


@given(st.permutations("0" * 8 + "1" * 8))
def test_sets_apart_take_whole_nodes_too(reserved: list[str]) -> None:
    sets = [
        process_set("reference", 4, 1, 1, "reference"),
        process_set("actor", 8, 1, 1, "actor"),
        process_set("critic", 4, 1, 1, "critic"),
    ]
    results = by_rank(plan_bundles(sets), "".join(reserved))
    assert results == {"actor": "0" * 8, "reference": "1" * 4, "critic": "1" * 4}


def test_the_packing_is_that_of_the_installed_ray() -> None:
    # Of another release, compare bundle_scheduling_policy.cc and scorer.cc first.
    release = ".".join(version("ray").split(".")[:2])
    assert placement.__doc__ is not None
    assert f"PACK strategy of Ray {release} " in placement.__doc__


def test_what_fits_is_what_ray_packs() -> None:
    eight: dict[str, float] = {"CPU": 32.0, "GPU": 8.0}
    engine: dict[str, float] = {"CPU": 1.0, "GPU": 8.0}
    rank: dict[str, float] = {"CPU": 1.0, "GPU": 1.0}
    assert fits([rank] * 8 + [engine], [eight, eight])
    assert not fits([rank] * 9 + [engine], [eight, eight])
    # The 2 goes to the node of 3, which it leaves emptier. Then there is only the node
    # of 2 for the two of 1.5.
    assert not fits(
        [{"CPU": 2.0}, {"CPU": 1.5}, {"CPU": 1.5}], [{"CPU": 2.0}, {"CPU": 3.0}]
    )


@pytest.mark.cluster
def test_resources_that_another_program_took_are_not_waited_for(
    cluster: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = node_resources()
    monkeypatch.setattr(placement, "_RELEASE_S", 0.5)
    sets = [process_set("trainer", 1, 3.5, 0, "main")]
    (others,) = place([process_set("others", 1, 1.0, 0, "others")], 60).values()
    # It is taken between the look at what is free and the reservation.
    monkeypatch.setattr(placement, "check_fits", lambda _: None)
    with pytest.raises(
        ClusterError, match=r"requests 3\.5 CPU(.|\n)*4 CPU, free 3 CPU"
    ):
        place(sets, 600)
    release([others.group])
    (trainer,) = place(sets, 60).values()
    release([trainer.group])
    while node_resources() != free:
        time.sleep(0.05)


BUNDLES: list[list[dict[str, float]]] = [
    # The 10 goes to the node of 15, which it leaves emptier than the node of 10. Then
    # there is only the node of 10 for the two of 7.5, and room for a 5 beside the 10.
    [{"CPU": 10.0}, {"CPU": 7.5}, {"CPU": 7.5}],
    [{"CPU": 5.0}, {"CPU": 7.5}, {"CPU": 10.0}],
    # Bundles with GPUs come first, and take the node of 15.
    [{"CPU": 15.0}, {"CPU": 1.0, "GPU": 8.0}],
    [{"CPU": 14.0}, {"CPU": 1.0, "GPU": 8.0}],
    [{"CPU": 1.0, "GPU": 8.0}] * 4,
]
"""Bundles for the nodes below, which a packer of another policy would judge otherwise."""

NODES = """
import json, os, time
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group, placement_group_table, remove_placement_group
from tests.cluster.test_placement import BUNDLES, process_set
from verl_ray.cluster.placement import fits
from verl_ray.cluster.placement import place, release
from verl_ray.cluster.placement import node_resources
from verl_ray.cluster.session import Session

# Nodes need not have the GPUs that they offer. Nothing runs on them, so no worker is started ahead.
cluster = Cluster(initialize_head=False)
for cores, of_the_head in ((6, {"_system_config": {"prestart_worker_first_driver": False}}), (10, {}), (15, {})):
    cluster.add_node(
        num_cpus=cores, num_gpus=8, object_store_memory=80 << 20, include_dashboard=False, **of_the_head
    )

def homes(places):
    tables = {name: placement_group_table(place.group)["bundles_to_node_id"] for name, place in places.items()}
    return {name: [tables[name][bundle] for bundle in place.bundles] for name, place in places.items()}

with Session.open(cluster.address):
    found = {}
    places = place([process_set("trainer", 24, 0.25, 1, "main"), process_set("rollout", 24, 0.25, 1, "main")], 60)
    found["colocated"] = homes(places)
    release([places["trainer"].group])
    other = placement_group([{"GPU": 8}])
    ray.get(other.ready(), timeout=60)
    trainers = [process_set(name, 4, 0.25, 1, name) for name in ("actor", "reference")]
    places = place([*trainers, process_set("engine", 1, 0.25, 8, "engine")], 60)
    found["apart"] = homes(places)
    release([places["actor"].group])
    release([other])
    found["fits"], found["placed"] = [], []
    for bundles in BUNDLES:
        until = time.monotonic() + 60
        while any(node.available != node.total for node in node_resources()) and time.monotonic() < until:
            time.sleep(0.05)
        found["fits"].append(fits(bundles, [node.total for node in node_resources()]))
        group, states = placement_group(bundles), set()
        while not states & {"NO_RESOURCES", "INFEASIBLE", "FINISHED"} and time.monotonic() < until:
            states.add(placement_group_table(group)["stats"]["scheduling_state"])
        found["placed"].append("FINISHED" in states)
        release([group])
    print(json.dumps(found))
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_ranks_of_three_nodes_are_in_their_order(tmp_path: Path) -> None:
    program = tmp_path / "nodes.py"
    program.write_text(NODES)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    ended = subprocess.run(
        [sys.executable, str(program)], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**inherited, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = json.loads(ended.stdout.splitlines()[-1])

    colocated = results["colocated"]["trainer"]
    assert results["colocated"]["rollout"] == colocated
    assert [len(set(colocated[start : start + 8])) for start in (0, 8, 16)] == [1, 1, 1]
    assert len(set(colocated)) == 3

    # Two nodes of 8 GPUs are left: 4 + 4 + 8 are placed there.
    apart = results["apart"]
    trainers = {*apart["actor"], *apart["reference"]}
    assert (len(apart["actor"]), len(apart["reference"]), len(trainers)) == (4, 4, 1)
    assert trainers.isdisjoint(apart["engine"])

    assert results["placed"] == [False, True, False, True, False]
    assert results["fits"] == results["placed"]
