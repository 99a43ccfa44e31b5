"""Files of training rollouts: what a line holds, and the bound on all of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from verl_ray.tracking.rollouts import (
    BYTES_PER_MB,
    TURN_COLUMNS,
    RolloutFiles,
    RolloutTable,
    drop_rollouts,
    recorded_rollouts,
)

NAN = math.nan


def table() -> RolloutTable:
    """Two rows, "1+2=3" and a failed "1+2=1", of a tokenizer of characters."""
    return RolloutTable(
        rows={
            "step": np.array([4, 4]),
            "ordinal": np.array([7, 7]),
            "member": np.array([0, 1]),
            "trajectory": np.array([14, 15]),
            "row": np.array([0, 0]),
            "data_source": ["sums", "sums"],
            "prompt": ["1+2=", "1+2="],
            "response": ["3", "1"],
            "answer": ["3", "3"],
            "reward": np.array([1.0, NAN], np.float32),
            "scores": [[("reward", 1.0), ("style", 0.5)], [("reward", None)]],
            "finish": ["stop", "length"],
            "end": ["", ""],
            "failure": ["", "reward: timeout"],
            "output": ["", "a line"],
            "entries": ['{"pred": "3"}', ""],
            "num_turns": np.array([1, 1]),
            "response_tokens": np.array([1, 1]),
            "advantage": np.array([0.5, NAN], np.float32),
            "turns": [[], [1, 2]],
            "turn_ends": [[], [4, 7]],
            "turn_rewards": [[], [0.5, 0.0]],
        },
        offsets=np.array([0, 5, 10]),
        tokens={
            "tokens": np.arange(10, dtype=np.int32),
            "pieces": list("1+2=31+2=1"),
            "mask": np.array([False] * 4 + [True] + [False] * 4 + [True]),
            "rollout_log_probs": np.array([NAN] * 4 + [-0.5] + [NAN] * 4 + [-2.0]),
            "log_probs": np.full(10, NAN),
            "advantages": np.array([NAN] * 4 + [0.5] + [NAN] * 5),
            "versions": np.array([-1] * 4 + [3] + [-1] * 4 + [3]),
        },
    )


def test_a_line_is_a_row_and_nothing_is_null_but_what_is_missing(
    tmp_path: Path,
) -> None:
    files = RolloutFiles(tmp_path, most_mb=1)
    content = table().encoded()
    assert files.write(4, content) and content == table().encoded()

    (path,) = recorded_rollouts(tmp_path).values()
    assert path.name == "step_000004.parquet"
    first, second = pyarrow.parquet.read_table(path).to_pylist()
    assert first["scores"] == [("reward", 1.0), ("style", 0.5)]
    assert (first["reward"], first["advantage"], first["failure"]) == (1.0, 0.5, "")
    assert first["advantages"] == [None] * 4 + [0.5]
    assert first["rollout_log_probs"] == [None] * 4 + [-0.5]
    assert first["log_probs"] == [None] * 5
    assert first["versions"] == [-1, -1, -1, -1, 3]
    assert second["scores"] == [("reward", None)]
    assert (second["reward"], second["advantage"]) == (None, None)
    assert "".join(second["pieces"]) == "1+2=1" and second["tokens"] == [5, 6, 7, 8, 9]
    assert [row["output"] for row in (first, second)] == ["", "a line"]
    assert second["mask"] == [False] * 4 + [True]
    turn_columns = [second[name] for name in TURN_COLUMNS]
    assert turn_columns == [[1, 2], [4, 7], [0.5, 0.0]] and first["turns"] == []


def test_files_thin_out_and_a_run_that_goes_back_ends_with_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quarter = b"x" * (BYTES_PER_MB // 4)
    straight = RolloutFiles(tmp_path / "straight", most_mb=1)
    for step in range(1, 13):
        straight.write(step, quarter)
    # Four fit: 1 to 4, then 2, 4, 6 and 8, then 4, 8 and 12.
    assert list(recorded_rollouts(tmp_path / "straight")) == [4, 8, 12]
    assert straight.every == 4 and not straight.keeps(13) and straight.keeps(16)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and "every 2 steps from here on" in warnings[0]

    broken = tmp_path / "broken"
    for first, end in ((1, 7), (3, 13)):
        drop_rollouts(broken, first - 1)
        again = RolloutFiles(broken, most_mb=1)
        for step in range(first, end):
            again.write(step, quarter)
    assert list(recorded_rollouts(broken)) == [4, 8, 12]

    # A process that is killed as it thins out may leave files, which the next removes.
    torn = broken / "rollouts" / "step_000010.parquet"
    torn.write_bytes(quarter)
    assert RolloutFiles(broken, most_mb=1).every == 4 and not torn.exists()

    # A run from the beginning keeps every step again.
    drop_rollouts(broken, -1)
    assert RolloutFiles(broken, most_mb=1).every == 1


def test_a_step_that_is_too_large_takes_no_place_and_a_full_disk_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = RolloutFiles(tmp_path, most_mb=1)
    assert files.write(7, b"x")
    large = b"x" * (BYTES_PER_MB // 4 + 1)
    assert not files.write(8, large) and not files.write(16, large)
    assert files.every == 1 and list(recorded_rollouts(tmp_path)) == [7]
    warnings = capsys.readouterr().err
    assert warnings.count("more than a quarter of tracking.rollouts_max_mb = 1") == 1

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rollouts").touch()
    refused = RolloutFiles(tmp_path / "other", most_mb=1)
    assert not refused.write(1, b"x") and not refused.write(2, b"x")
    assert capsys.readouterr().err.count("the run goes on without the rollouts") == 1
