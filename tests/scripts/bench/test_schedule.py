"""The benchmark of schedules forces the lengths that it says, and its figures are those
of hand-made records.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.schedule import Block, figures, table
from scripts.bench.schedule_run import (
    DriverRecord,
    ForcedGeneration,
    Lengths,
    Moment,
    Reaction,
    ReplicaRecord,
    graded,
    percentiles,
    replaced,
)
from verl_ray.rollout.requests import Sampling

ROOT = Path(__file__).parents[3]


def moment(at_s: float, *row_ids: int) -> Moment:
    return Moment(at_s, np.array(row_ids))


def test_half_of_the_tail_is_short_and_its_longest_are_cut_off() -> None:
    tail = Lengths("tail", 64)
    lengths = np.array([tail.of(row_id) for row_id in range(8000)])
    assert lengths.min() == 8 and lengths.max() == 64
    # P(length >= n) = 8 / n
    for least, share in ((16, 1 / 2), (32, 1 / 4), (64, 1 / 8)):
        assert (lengths >= least).mean() == pytest.approx(share, abs=0.02)
    assert tail.of(5) == lengths[5]


def test_a_row_is_sampled_up_to_its_length_and_stops_at_no_token() -> None:
    lengths = Lengths("tail", 64)
    sampling = Sampling(0.5, 1.0, -1, 64)
    generation = ForcedGeneration("train", 2, sampling, 0, 1, lengths)
    for row_id in range(8):
        expected = Sampling(0.5, 1.0, -1, lengths.of(row_id), stop_token_ids=())
        assert generation.sampling_of(row_id) == expected


def driver_record() -> DriverRecord:
    return DriverRecord(
        passed_on={0: 1.01, 1: 1.5, 2: 1.5, 4: 1.85},
        drawn={0: 0.0, 1: 0.0, 2: 0.0, 3: 1.95},
        waiting=[(0.0, 1.1)],
        publishing=[(1.6, 1.8)],
    )


def test_a_reaction_lasts_from_the_end_of_rows_to_their_graders() -> None:
    ended = [moment(1.0, 0), moment(1.2, 2, 1), moment(1.5, 4), moment(1.9, 3)]
    reactions = graded(ended, driver_record())
    # Row 4 waited for a weight sync, and row 3 was abandoned.
    phases = [reaction.phase for reaction in reactions]
    assert phases == ["waiting", "learning", "publishing"]
    seconds = [reaction.seconds for reaction in reactions]
    assert seconds == pytest.approx([0.01, 0.3, 0.35])


def test_a_group_is_replaced_once_its_rows_have_capacity() -> None:
    replica = ReplicaRecord(
        begun=[moment(0.1, 0, 1, 2, 3), moment(1.25, 4, 5), moment(2.0, 6, 7)],
        ended=[moment(1.0, 0), moment(1.2, 2, 1), moment(1.9, 3)],
    )
    # With 4 rows at a time, group 2 has capacity when two have ended, at 1.2. Group 3
    # had capacity at 1.9, but was drawn after that.
    (reaction,) = replaced(replica, driver_record(), concurrency=4, group_size=2)
    assert reaction.phase == "learning"
    assert reaction.seconds == pytest.approx(0.05)


def test_percentiles_are_by_phase_and_in_ms() -> None:
    reactions = [Reaction("learning", 0.001 * ms) for ms in range(1, 102)]
    reactions.append(Reaction("waiting", 1.0))
    found = percentiles(reactions)
    assert found["learning"] == {
        "count": 101,
        "p50_ms": 51,
        "p99_ms": 100,
        "max_ms": 101,
    }
    assert found["waiting"]["p99_ms"] == 1000
    assert found["all"]["count"] == 102


def block(step_s: float, overlap: float) -> Block:
    metrics = {
        "timing_s/step": step_s,
        "timing_s/update_weights": 0.25,
        "timing_s/weight_sync/pause": 0.125,
        "perf/trainers_idle": 0.5,
        "perf/rollouts_idle": 0.5,
        "perf/overlap": overlap,
        "rollout_corr/k3_kl": 0.0,
    }
    reactions = {"graded": [Reaction("learning", 0.02)]}
    return Block(step_s, [metrics, metrics], reactions)


def test_ratios_are_of_the_blocks_of_one_round() -> None:
    cases = {
        "equal": figures(
            {
                "synchronous": [block(2.0, 0), block(8.0, 0), block(3.0, 0)],
                "one_step_off": [block(1.0, 1), block(2.0, 0.5), block(1.0, 0)],
            }
        ),
        "reactions": figures({"asynchronous_keep": [block(1.0, 1)]}),
    }
    found = cases["equal"]["one_step_off"]
    assert found["ratios"] == [2, 4, 3] and found["ratio"] == 3
    assert found["best_ratio"] == 2  # 2 s to 1 s
    assert found["step_s"] == 1 and found["perf/overlap"] == 0.5
    assert found["reactions"]["graded"]["learning"]["count"] == 3
    assert "ratio" not in cases["reactions"]["asynchronous_keep"]

    header, _, *rows = table(cases).splitlines()
    assert len(rows) == 3
    assert {row.count("|") for row in rows} == {header.count("|")}
    assert "| one_step_off | 1.00 | 3.00 | 2.00 | 50% | 50% | 50% |" in rows[1]


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.slow
def test_schedule(tmp_path: Path) -> None:
    """Run tiny sizes as the README has it: the command opens a cluster of its own."""
    command = [sys.executable, "-m", "scripts.bench", "schedule"]
    command += ["--tiny", "--rounds", "1", "--steps", "2", "--warmup", "1"]
    command += ["--dir", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout)

    assert found["equal"].keys() == {
        "synchronous",
        "one_step_off",
        "asynchronous_recompute",
        "asynchronous_keep",
    }
    assert found["tail_colocated"].keys() == {"synchronous", "carry_over"}
    for name in ("equal", "tail_colocated"):
        for schedule, shown in found[name].items():
            assert shown["step_s"] > 0 and shown["ratio"] > 0
            assert shown["reactions"]["graded"]["all"]["count"] > 0
            is_stale = schedule != "synchronous"
            assert ("staleness/age_mean" in shown) == is_stale
    assert {shown["response_length/mean"] for shown in found["equal"].values()} == {4}
    assert found["equal"]["one_step_off"]["staleness/age_mean"] == 1
    # How much overlaps depends on the machine: rows this short may wait for nobody.
    assert "perf/overlap" in found["equal"]["one_step_off"]
    assert found["equal"]["synchronous"]["perf/overlap"] < 0.02

    reactions = found["reactions"]["asynchronous_keep"]["reactions"]
    assert reactions["replaced"]["all"]["count"] > 0
