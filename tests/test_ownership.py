"""An owner is gone when its process is, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from verl_ray.ownership import Owner


@pytest.mark.processes
def test_an_owner_is_gone_once_it_was_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(child.pid)
    assert not owner.has_ended and not Owner.here().has_ended
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert owner.has_ended  # although its parent has not asked for it yet
    assert child.wait() == -signal.SIGKILL and child.stdin is not None
    child.stdin.close()
    assert owner.has_ended and Owner.of(child.pid).has_ended


def test_a_process_id_that_is_used_again_is_no_owner() -> None:
    here = Owner.here()
    assert replace(here, started=here.started - 1).has_ended


def test_owners_in_other_containers_cannot_be_seen() -> None:
    elsewhere = replace(Owner.here(), namespace=1, pid=2**30)
    assert not elsewhere.has_ended
    assert replace(Owner.here(), pid=2**30).has_ended


def test_owners_on_other_machines_cannot_be_seen() -> None:
    """A folder that several machines share; their first namespaces have one number."""
    here = Owner.here()
    assert not replace(here, boot=here.boot + 1, pid=2**30).has_ended


def test_an_owner_is_read_as_it_was_written() -> None:
    assert Owner.parse(str(Owner.here())) == Owner.here()
    assert [Owner.parse(text) for text in ("", "1-2-3", "1-2-3-x", "1-2-3-4-5")] == [
        None
    ] * 4
