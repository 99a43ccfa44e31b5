"""Choice of the network interface that the ranks use."""

from __future__ import annotations

import os

import pytest

from verl_ray.rendezvous import choose_interfaces

LOOPBACK, ELSEWHERE = (
    "127.0.0.1",
    "192.0.2.1",
)  # the latter is of no machine: it is kept for documentation


@pytest.mark.parametrize(
    ("named", "address", "used"),
    [
        ({}, LOOPBACK, {"GLOO": "lo", "NCCL": "lo"}),
        ({"NCCL": "ib0"}, LOOPBACK, {"GLOO": "lo", "NCCL": "ib0"}),
        ({"GLOO": "eth1", "NCCL": "ib0"}, LOOPBACK, {"GLOO": "eth1", "NCCL": "ib0"}),
        ({"GLOO": "eth1"}, ELSEWHERE, {"GLOO": "eth1", "NCCL": None}),
    ],
)
def test_an_interface_that_the_user_named_stays(
    monkeypatch: pytest.MonkeyPatch,
    named: dict[str, str],
    address: str,
    used: dict[str, str | None],
) -> None:
    for library in ("GLOO", "NCCL"):
        monkeypatch.setenv(
            f"{library}_SOCKET_IFNAME", ""
        )  # so that what the test sets is undone
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME")
    for library, interface in named.items():
        monkeypatch.setenv(f"{library}_SOCKET_IFNAME", interface)
    choose_interfaces(address)
    assert {
        library: os.environ.get(f"{library}_SOCKET_IFNAME")
        for library in ("GLOO", "NCCL")
    } == used
