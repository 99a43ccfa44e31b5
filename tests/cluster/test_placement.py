from __future__ import annotations

import pytest

from verl_ray.cluster.placement import ProcessSet, fits, plan_bundles, share_cpus
from verl_ray.errors import ClusterError


def one(name: str, ranks: int, cpus: float, gpus: int, group: str) -> ProcessSet:
    return ProcessSet(name, ranks, cpus, gpus, group, 1, True)


def test_colocated_sets_share_bundles_rank_by_rank() -> None:
    (bundles,) = plan_bundles([one("trainer", 2, 0.5, 0, "main"), one("rollout", 1, 0.25, 0, "main")])
    assert bundles.bundles == ({"CPU": 0.75}, {"CPU": 0.5})
    assert bundles.shares == {"trainer": {"CPU": 0.5}, "rollout": {"CPU": 0.25}}


def test_colocated_sets_share_whole_gpus() -> None:
    plans = plan_bundles(
        [one("trainer", 2, 1, 1, "main"), one("rollout", 2, 1, 1, "main"), one("reward", 1, 1, 0, "r")]
    )
    assert plans[0].bundles == ({"CPU": 2.0, "GPU": 1.0},) * 2
    assert plans[0].shares["trainer"] == {"CPU": 1.0, "GPU": 0.5}
    assert plans[1].bundles == ({"CPU": 1.0},)
    with pytest.raises(ClusterError, match="share exactly one GPU"):
        plan_bundles([one("trainer", 2, 1, 1, "main"), one("rollout", 1, 1, 2, "main")])


def test_three_shares_of_a_gpu_fit_it() -> None:
    (bundles,) = plan_bundles([one(name, 1, 1, 1, "main") for name in ("a", "b", "c")])
    assert 3 * bundles.shares["a"]["GPU"] <= bundles.bundles[0]["GPU"]


def test_bundles_fit_only_when_each_has_a_node() -> None:
    nodes = [{"CPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert fits([{"CPU": 2.0}, {"CPU": 2.0}], nodes)
    assert not fits([{"CPU": 3.0}], nodes)
    assert fits([{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0}], nodes)
    assert not fits([{"CPU": 1.0, "GPU": 1.0}] * 2, nodes)


def shares(sets: list[ProcessSet], nodes: list[float]) -> tuple[list[float], str | None]:
    shared, warning = share_cpus(sets, nodes)
    return [each.cpus_per_rank for each in shared], warning


def test_cpu_shares_fit_the_cores_and_say_when_they_must() -> None:
    three = [one("trainer", 2, 9, 0, "main"), one("rollout", 1, 9, 0, "main")]
    assert shares(three, [3]) == ([1, 1], None)
    found, warning = shares(three, [2])
    assert found == [0.66, 0.66]
    assert warning is not None
    assert "3 worker processes share 2 CPU cores" in warning


def test_cpu_shares_fit_node_by_node() -> None:
    apart = [one(name, 1, 9, 0, name) for name in "abcde"]
    assert shares(apart, [2, 2])[0] == [0.66] * 5  # a fair share of all four cores, 0.8, fits twice on each node
    assert shares(apart, [1, 4])[0] == [1] * 5
    together = [one("trainer", 1, 9, 0, "main"), one("rollout", 1, 9, 0, "main")]
    assert shares(together, [1, 1])[0] == [0.5, 0.5]  # colocated ranks are on one node
