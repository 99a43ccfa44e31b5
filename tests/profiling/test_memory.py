"""Memory of real processes."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from scripts.bench.memory import TreeMemorySampler
from verl_ray.profiling.memory import (
    GIB,
    device_memory,
    host_used_gib,
    tree_pss_bytes,
)

MIB = 1 << 20
PATIENCE_S = 60.0


def test_an_array_shows_in_what_the_host_uses() -> None:
    for _ in range(10):  # other processes come and go
        before = host_used_gib()
        array = np.ones(1 << 30, dtype=np.uint8)
        grown = host_used_gib() - before
        del array
        if grown > 0.5:
            break
    assert grown > 0.5
    assert (
        0
        < host_used_gib()
        < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    )


# In a process of its own, where nothing else takes or gives memory.
PEAKS = """
import json, sys
import numpy as np
from verl_ray.profiling.memory import PeakWatch
watch = PeakWatch(on_device=False)
if sys.argv[1] == "False":
    watch._reset_file = None  # as where /proc/self/clear_refs cannot be written
before = watch.take().current_bytes
with watch("actor", "outer"):
    with watch("critic", "large"):
        array = np.ones(96 << 20, dtype=np.uint8)
        del array
    with watch("critic", "small"):
        array = np.ones(32 << 20, dtype=np.uint8)
told = watch.take()
del array
assert watch.take().by_call == {}
grown = {"/".join(name): (peak - before) / (1 << 20) for name, peak in told.by_call.items()}
print(json.dumps(grown | {"now": (told.current_bytes - before) / (1 << 20)}))
"""


@pytest.mark.processes
@pytest.mark.parametrize("may_forget", [True, False])
def test_each_call_has_the_peak_of_its_own_time(may_forget: bool) -> None:
    command = [sys.executable, "-c", PEAKS, str(may_forget)]
    grown = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    assert 28 < grown["critic/small"] < 60 and 28 < grown["now"] < 60
    if may_forget:
        assert 90 < grown["critic/large"] < 120 and 90 < grown["actor/outer"] < 120


# Each generation holds 64 MiB of its own; the child starts the grandchild, and both
# wait for their stdin to end.
CHILD = """
import subprocess, sys
held = bytearray(b"x") * (64 << 20)
if sys.argv[1] == "child":
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "grandchild", ""])
else:
    print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_a_tree_counts_children_and_grandchildren_and_the_sampler_keeps_the_peak() -> (
    None
):
    before = tree_pss_bytes(os.getpid())
    with TreeMemorySampler(interval_s=0.02) as memory:
        command = [sys.executable, "-c", CHILD, "child", CHILD]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            grown = tree_pss_bytes(os.getpid()) - before
            assert 128 * MIB < grown < 190 * MIB
            deadline = time.monotonic() + PATIENCE_S
            while (
                memory.peak_bytes - before <= 128 * MIB and time.monotonic() < deadline
            ):
                time.sleep(0.02)
        deadline = time.monotonic() + PATIENCE_S
        while (
            tree_pss_bytes(os.getpid()) - before > 64 * MIB
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
    assert memory.peak_bytes - before > 128 * MIB
    assert tree_pss_bytes(os.getpid()) - before < 64 * MIB


@pytest.mark.processes
def test_a_process_that_is_gone_holds_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert tree_pss_bytes(process.pid) == 0


# Blocks below the size that malloc maps by itself come from the heap, which cannot
# shrink below the ones that stay.
TRIM = """
import os, psutil
from verl_ray.profiling.memory import malloc_trim
process = psutil.Process(os.getpid())
blocks = [b"x" * (100_000 + i % 2) for i in range(1000)]
del blocks[::2]
held = process.memory_full_info().uss
assert malloc_trim()
print(held - process.memory_full_info().uss)
"""


@pytest.mark.processes
def test_trimming_gives_freed_heap_back() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TRIM], check=True, capture_output=True, text=True
    )
    assert int(ended.stdout) > 40_000_000


def test_device_memory_is_there_exactly_where_a_device_is() -> None:
    if not torch.cuda.is_available():
        assert device_memory() is None
        return
    tensor = torch.ones(16 * MIB, dtype=torch.uint8, device="cuda")
    memory = device_memory(reset_peak=True)
    assert memory is not None
    assert (
        16 * MIB
        <= memory.allocated_bytes
        <= memory.peak_allocated_bytes
        <= memory.peak_reserved_bytes
    )
    del tensor
    after = device_memory(reset_peak=True)
    assert (
        after is not None and after.allocated_bytes <= memory.allocated_bytes - 16 * MIB
    )
    last = device_memory()
    assert last is not None and last.peak_allocated_bytes == after.allocated_bytes
