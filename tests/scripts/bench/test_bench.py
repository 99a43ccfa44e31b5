"""The benchmarks count what they say they count, and their figures have the promised
names.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts import bench
from scripts.bench import contest
from scripts.bench.agents import as_one_response, turns_of
from scripts.bench.contest import padded_batches, row_lengths
from scripts.bench.processes import run_processes
from scripts.bench.raw import padded
from scripts.bench.suite import MIB, markdown, rounds
from verl_ray.agents.contract import End, Episode, EpisodeRow
from verl_ray.agents.policy import (
    turn_seed,
)
from verl_ray.errors import VerlRayError
from verl_ray.profiling.flops import ModelShape

ROOT = Path(__file__).parents[3]


def test_an_unknown_suite_is_refused_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main(["steps"]) == 2
    assert "step" in capsys.readouterr().err


def test_the_help_lists_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, about in bench.SUITES.items():
        assert re.search(rf"\n  {name} +{re.escape(about)}\n", text)


@pytest.mark.parametrize("suite", bench.SUITES)
def test_every_suite_explains_its_flags(
    suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main([suite, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(
        f"usage: python -m scripts.bench {suite} "
    )


def test_a_table_has_a_rule_below_its_columns() -> None:
    table = markdown(["case", "s"], [["equal", "0.5"], ["tail", "2"]])
    rows = ["| case | s |", "|---|---|", "| equal | 0.5 |", "| tail | 2 |"]
    assert table.splitlines() == rows


def test_the_first_round_only_warms_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(rounds(2, "weight sync")) == [0, 1, 2]
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines()[-1] == "weight sync 2 of 2"


def test_the_floor_sees_every_token_of_a_row_and_nothing_behind_it() -> None:
    table = padded(np.array([1, 3]), np.array([7, 4, 5, 6]))
    assert table.tolist() == [[7, 0, 0], [4, 5, 6]]


def test_the_turns_of_an_episode_are_drawn_as_they_were() -> None:
    def row(tokens: list[int], sampled: list[int]) -> EpisodeRow:
        mask = [token in sampled for token in tokens]
        return EpisodeRow(tokens, mask, [0.0] * len(tokens), [], [])

    # The second row begins with a turn of the first one, which is not drawn again.
    rows = [row([5, 6, 7, 8, 9, 4], [7, 8, 4]), row([5, 7, 8, 3, 2, 1], [2, 1])]
    turns = turns_of(Episode(rows, End.COMPLETED, 0.0), seed=11)
    assert [turn.tokens.tolist() for turn in turns] == [
        [5, 6],
        [5, 6, 7, 8, 9],
        [5, 7, 8, 3],
    ]
    assert [turn.sampling.max_tokens for turn in turns] == [2, 1, 2]
    assert [turn.seed for turn in turns] == [turn_seed(11, turn) for turn in range(3)]
    whole = as_one_response(turns)
    assert whole.tokens.tolist() == [5, 6] and whole.sampling.max_tokens == 5


def measured(*arguments: str) -> dict[str, Any]:
    """What a suite prints, run as the README has it: it opens a cluster of its own."""
    command = [sys.executable, "-m", "scripts.bench", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.slow
def test_step(tmp_path: Path) -> None:
    quick = ["prepare.warm_start.accuracy_low=0", "prepare.warm_start.accuracy_high=1"]
    quick += [
        "prepare.warm_start.min_steps=1",
        "prepare.warm_start.evaluate_every=1",
        "run.threads_per_rank=1",
    ]
    found = measured(
        "step", "--steps", "2", "--warmup", "1", "--dir", str(tmp_path), *quick
    )
    for name in ("natural", "forced"):
        figures = found[name]
        assert 0 < figures["best_step_s"] <= figures["median_step_s"]
        assert {"gen", "ref", "update_actor", "update_weights"} <= figures[
            "parts_s"
        ].keys()
        assert figures["floor_s"] > 0 and 0 < figures["driver_share"] < 1
    assert (
        found["forced"]["mean_response_tokens"]
        == 32
        > found["natural"]["mean_response_tokens"]
    )
    assert found["peak_memory_gib"] > 0 and found["start_to_first_step_s"] > 0


@pytest.mark.processes
@pytest.mark.slow
def test_a_broadcast_counts_the_bytes_of_every_process() -> None:
    found = measured(
        "broadcast", "--ranks", "4", "--receivers", "2", "--roots", "1", "2",
        "--mib", "16", "--bucket-mib", "4", "--repeats", "1", "--experts", "4",
    )  # fmt: skip
    alone, shared = found["1 roots"], found["2 roots"]
    # Rank 0 sends all to both receivers; the others send it their quarter.
    assert alone["sent_by_ranks"] == pytest.approx([2, 0.25, 0.25, 0.25], abs=0.02)
    assert alone["received_by_ranks"] == pytest.approx([0.75, 0, 0, 0], abs=0.02)
    # Two roots share that, and each sends its quarter of the other one's half.
    assert shared["sent_by_ranks"] == pytest.approx([9 / 8, 1 / 4] * 2, abs=0.02)
    assert shared["received_by_ranks"] == pytest.approx([3 / 8, 0] * 2, abs=0.02)
    for figures in (alone, shared):
        assert figures["received_by_receivers"] == pytest.approx([1, 1], abs=0.02)
        assert figures["sent_by_receivers"] == pytest.approx([0, 0], abs=0.02)
        assert figures["ns_per_byte"] > 0

    # Half are for both receivers, and a quarter for each: two of the four experts.
    held = found["2 roots, experts to their holders"]
    assert held["received_by_receivers"] == pytest.approx([3 / 4] * 2, abs=0.02)
    assert held["sent_by_ranks"] == pytest.approx([7 / 8, 1 / 4] * 2, abs=0.02)


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.slow
def test_weight_sync(tmp_path: Path) -> None:
    found = measured(
        "weight-sync", "--models", "1m", "--repeats", "1", "--dir", str(tmp_path)
    )["1m"]
    assert found["bytes"] > 3_000_000
    seconds = found["median_s"]
    assert {
        "stream",
        "prove",
        "wake",
        "hand_over",
        "reload",
        "copy",
        "fingerprints",
    } == seconds.keys()
    # Not of times: as many bytes were sent as the engine holds, and the time is that of
    # both phases.
    assert seconds["stream"] + seconds["prove"] == pytest.approx(
        seconds["hand_over"], rel=0.2
    )
    assert found["stream_to_reload"] == pytest.approx(
        seconds["stream"] / seconds["reload"], rel=0.02
    )
    assert 0 < found["fingerprints_share"] < 1


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.slow
def test_rollout(tmp_path: Path) -> None:
    found = measured(
        "rollout",
        "--prompts",
        "8",
        "--tokens",
        "8",
        "--replicas",
        "1",
        "--repeats",
        "1",
        "--dir",
        str(tmp_path),
    )
    figures = found["1_replica"]
    ratio = figures["servers_tokens_per_s"] / figures["offline_tokens_per_s"]
    assert figures["ratio"] == pytest.approx(ratio, rel=0.02) == figures["best_ratio"]


@pytest.mark.processes
@pytest.mark.vllm
@pytest.mark.slow
def test_agents() -> None:
    sizes = ("--episodes", "4", "--at-once", "4", "--turns", "2", "--threads", "1")
    figures = measured("agents", *sizes, "--crowd", "50", "--repeats", "1")
    speed, crowd = figures["speed"], figures["crowd"]
    ratio = speed["episodes_tokens_per_s"] / speed["turns_alone_tokens_per_s"]
    assert speed["ratio"] == pytest.approx(ratio, rel=0.02)
    assert crowd["requests_at_most"] == 50
    for side in ("engine_process", "episodes_process"):
        # No episode has a file of its own.
        files = crowd[side]["files"]
        assert files["most"] - files["before"] < 25


def test_padded_batches_hold_as_many_rows_as_fit_however_long_they_are() -> None:
    lengths = np.array([40, 500, 32, 512, 64])
    assert [b.tolist() for b in padded_batches(lengths, 1024, by_length=False)] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert [b.tolist() for b in padded_batches(lengths, 1024, by_length=True)] == [
        [2, 0],
        [4, 1],
        [3],
    ]


def test_figures_by_hand() -> None:
    shape = ModelShape(
        num_layers=1,
        hidden_size=2,
        num_heads=2,
        num_kv_heads=1,
        head_size=3,
        intermediate_size=5,
        vocab_size=7,
    )
    lengths = np.array([3])

    def rank(seconds: float, gib: float) -> dict[str, Any]:
        return {
            "seconds": dict.fromkeys(contest.PASSES, seconds),
            "peak_bytes": gib * 2**30,
            "loss": seconds,
        }

    figures = {
        "plain": contest.figures_of([[rank(3.0, 1.0)], [rank(4.0, 1.5)]], lengths),
        "fsdp_2": contest.figures_of(
            [[rank(1.0, 0.5), rank(2.5, 0.25)], [rank(2.0, 0.25), rank(1.5, 0.25)]],
            lengths,
        ),
    }
    both = figures["fsdp_2"]
    assert both["best_s"] == dict.fromkeys(
        contest.PASSES, 2.0
    )  # the slower rank of the faster round
    assert both["tokens_per_s"]["step"] == round(3 / 2.0)
    assert both["peak_memory_gib"] == 0.75 and both["loss"] == 3.5

    # forward: 2 x 80 parameters x 3 tokens and 6 pairs x 24 = 624 FLOPs; with the
    # backward pass 1872 (test_flops.py)
    contest.compare(figures, {"plain": 1, "fsdp_2": 2}, shape, lengths, 1000.0)
    assert both["times_plain"] == dict.fromkeys(contest.PASSES, 1.5)
    assert both["model_flops_utilization"] == {
        "forward": 0.156,
        "forward_backward": 0.468,
        "step": 0.468,
    }  # 2 devices
    contest.compare(figures, {"plain": 1, "fsdp_2": 2}, shape, lengths, None)
    assert both["model_flops_utilization"] is None


@pytest.mark.ranks
@pytest.mark.slow
def test_memory_of_megatron_fsdp_is_what_the_formula_says() -> None:
    found = measured("megatron_fsdp_memory", "--only", "all")["strategies"]["all"]
    formula, held = found["formula"], found["measured"]
    assert (
        formula["between_steps"]
        < held["between_steps"]
        < formula["between_steps"] + 16 * MIB
    )
    assert (
        formula["in_flight"] < held["in_flight"] < formula["in_flight"] + 64 * MIB
    )  # and activations


CHILD = """
import json, os, sys, time
work = json.loads(sys.argv[1])
if work["fails"]:
    sys.exit(3)
time.sleep(work["sleeps"])
print("a word of a library", json.dumps(os.environ["OMP_NUM_THREADS"]), sep="\\n")
"""


@pytest.mark.processes
def test_processes_answer_or_the_first_that_fails_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    good, bad = {"fails": False, "sleeps": 0}, {"fails": True}
    assert run_processes("child", [good, good], threads=7) == ["7", "7"]
    with pytest.raises(
        VerlRayError, match=r"ended with \[None, 3\]"
    ):  # None: the first was not waited for
        run_processes("child", [good | {"sleeps": 3600}, bad], threads=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main(["fsdp", "--device", "cuda"]) == 2
    said = capsys.readouterr()
    assert (
        said.err
        == "python -m scripts.bench fsdp: --device cuda needs a GPU, and torch finds none on this machine\n"
    )
    assert said.out == ""


@pytest.mark.cluster
@pytest.mark.slow
def test_fsdp() -> None:
    found = measured(
        "fsdp",
        "--rows",
        "4",
        "--repeats",
        "1",
        "--only",
        "plain_sorted",
        "engine_1",
        "fsdp_2",
    )
    lengths = row_lengths(4)
    for contender in ("plain", "plain_sorted", "engine_1", "fsdp_2"):
        figures = found[contender]
        assert figures["tokens_per_s"].keys() == set(contest.PASSES)
        assert (
            all(speed > 0 for speed in figures["tokens_per_s"].values())
            and figures["peak_memory_gib"] > 0.1
        )
        assert figures["loss"] == pytest.approx(
            found["plain"]["loss"], rel=1e-5
        )  # they compute the same
        assert figures["model_flops_utilization"] is None
    assert found["plain"]["times_plain"] == {
        "forward": 1.0,
        "forward_backward": 1.0,
        "step": 1.0,
    }
    assert found["rows"] == {
        "count": 4,
        "tokens": int(lengths.sum()),
        "shortest": 32,
        "longest": 512,
    }

    packing = found["packing"]
    assert packing["padded_padding_fraction"] == round(
        1 - lengths.sum() / (4 * lengths.max()), 4
    )
    assert packing["speedup_over_padded"] == pytest.approx(
        packing["padded_step_s"] / packing["packed_step_s"], abs=1e-3
    )


@pytest.mark.cluster
@pytest.mark.slow
def test_every_layout_computes_what_the_plain_engine_computes() -> None:
    found = measured("layouts")
    assert {one["ranks"] for one in found} == {1, 2, 4} and len(found) > 30
    for one in found:
        figures = [*one["outputs"].values(), one["loss"], one["grad_norm"]]
        assert len(figures) == 5 and max(figures) < 1e-5, one
        assert one["unwritten"] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_fsdp_on_a_gpu() -> None:
    found = measured(
        "fsdp",
        "--rows",
        "4",
        "--repeats",
        "1",
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
    )
    assert ("fsdp_2" in found) == (torch.cuda.device_count() > 1)
    for contender in ("plain", "engine_1", "fsdp_1"):
        assert found[contender]["loss"] == pytest.approx(
            found["plain"]["loss"], rel=1e-2
        )
        assert found[contender]["peak_memory_gib"] > 0
    assert found["device"] == torch.cuda.get_device_name()
