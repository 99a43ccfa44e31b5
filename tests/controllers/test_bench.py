"""The benchmarks count what they say they count, and their figures have the promised names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controllers import bench
from controllers.bench import data
from controllers.bench.floor import _padded

ROOT = Path(__file__).parents[2]


def test_an_unknown_suite_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["steps"]) == 2
    assert "step" in capsys.readouterr().err


def test_rows_have_the_lengths_asked_for() -> None:
    rows = data.rollouts(np.array([2, 20, 17]))
    assert rows.lengths.tolist() == [2, 20, 17]
    assert rows.prompt_length.tolist() == [1, 16, 16]
    assert rows.response_length.tolist() == [1, 4, 1]
    assert int(rows.response_mask.sum()) == 6
    # 39 tokens: an id (4 bytes), a mask (1) and a log-prob (4) each
    assert data.nbytes(rows) == 39 * 9


def test_the_floor_sees_every_token_of_a_row_and_nothing_behind_it() -> None:
    rows = data.rollouts(np.array([1, 3]))
    table = _padded(rows, np.array([7, 4, 5, 6]))
    assert table.tolist() == [[7, 0, 0], [4, 5, 6]]


def measured(*arguments: str) -> dict[str, Any]:
    """What a suite prints, run as the README has it: it opens a cluster of its own."""
    command = [str(Path(sys.executable).with_name("verl-ray")), "bench", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.cluster
def test_data() -> None:
    found = measured("data", "--rows", "2048", "--tokens", "128", "--repeats", "3")
    names = {"split_8", "concat_8", "select_random", "select_neighbours", "put", "get"}
    assert found["equal_lengths"].keys() == found["mixed_lengths"].keys() == names
    assert all(one["ms"] > 0 for one in found["mixed_lengths"].values())
    driver = found["driver"]
    assert driver["tokens"] == 2 * 2048 * 16 and driver["tokens_x8"] == 8 * driver["tokens"]
    # The rows are 2.4 MB larger and their log-probs 0.9 MB; the driver may not hold even a quarter of that.
    assert driver["growth_bytes_x8"] < 800_000
    assert driver["call_ms"] > 0


@pytest.mark.cluster
@pytest.mark.vllm
def test_step(tmp_path: Path) -> None:
    quick = ["prepare.warm_start.accuracy_low=0", "prepare.warm_start.accuracy_high=1"]
    quick += ["prepare.warm_start.min_steps=1", "prepare.warm_start.evaluate_every=1", "run.threads_per_rank=1"]
    found = measured("step", "--steps", "2", "--warmup", "1", "--dir", str(tmp_path), *quick)
    for name in ("natural", "forced"):
        figures = found[name]
        assert 0 < figures["best_step_s"] <= figures["median_step_s"]
        assert {"gen", "ref", "update_actor", "update_weights"} <= figures["parts_s"].keys()
        assert figures["floor_s"] > 0 and 0 < figures["driver_share"] < 1
    assert found["forced"]["mean_response_tokens"] == 32 > found["natural"]["mean_response_tokens"]
    assert found["peak_memory_gib"] > 0 and found["start_to_first_step_s"] > 0


@pytest.mark.cluster
def test_fsdp() -> None:
    found = measured("fsdp", "--rows", "4", "--repeats", "1")
    for contender in ("plain_1", "engine_1", "fsdp_1", "fsdp_2"):
        figures = found[contender]
        assert figures["tokens_per_s"].keys() == {"forward", "forward_backward", "step"}
        assert all(speed > 0 for speed in figures["tokens_per_s"].values()) and figures["peak_memory_gib"] > 0.1
    assert found["plain_1"]["times_plain"] == {"forward": 1.0, "forward_backward": 1.0, "step": 1.0}
    assert found["rows"]["count"] == 4
