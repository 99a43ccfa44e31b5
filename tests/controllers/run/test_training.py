"""The commands as a user gives them: everything a run writes, read back."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from controllers.commands.check import checked_config
from controllers.run.resumption import Resumption
from controllers.run.run_config import settle
from controllers.tasks import typed_config
from controllers.trainers.base import task_of
from scripts.prepare_data import main as prepare_data
from tests.controllers.runs import ROOT, Inputs, command, command_here, lasting
from verl_ray.checkpoint.manifest import CHECKSUM, sealed
from verl_ray.cluster.session import Session
from verl_ray.config.schema import Config
from verl_ray.errors import DataError
from verl_ray.profiling.trace import read_trace
from verl_ray.tracking.evaluations import read_scores, recorded_evaluations, scores_path
from verl_ray.tracking.held_out_responses import recorded_responses
from verl_ray.tracking.jsonl import read_metrics
from verl_ray.tracking.rollouts import recorded_rollouts

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"

# What dashboards of this field know, of what a synchronous run on CPUs has.
PUBLISHED_NAMES = """
actor/entropy actor/entropy_per_token actor/log_ratio_clipfrac actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/grad_norm actor/lr actor/loss
actor/reward_kl_penalty actor/reward_kl_penalty_coeff actor/reward_kl_per_response
critic/score/mean critic/score/max critic/score/min critic/rewards/mean critic/rewards/max critic/rewards/min
critic/advantages/mean critic/advantages/max critic/advantages/min critic/returns/mean critic/returns/max
critic/returns/min critic/values/mean critic/values/max critic/values/min
critic/vf_loss critic/vf_clipfrac critic/vf_explained_var critic/vpred_mean critic/grad_norm critic/lr
response_length/mean response_length/max response_length/min response_length/clip_ratio
response_length_non_aborted/mean response_length_non_aborted/max response_length_non_aborted/min
response_length_non_aborted/clip_ratio response/aborted_ratio
prompt_length/mean prompt_length/max prompt_length/min prompt_length/clip_ratio
num_turns/mean num_turns/max num_turns/min
timing_s/gen timing_s/reward timing_s/old_log_prob timing_s/ref timing_s/values timing_s/adv timing_s/update_critic
timing_s/update_actor timing_s/update_weights timing_s/step timing_s/controller
timing_per_token_ms/gen timing_per_token_ms/ref timing_per_token_ms/values timing_per_token_ms/adv
timing_per_token_ms/update_critic timing_per_token_ms/update_actor
perf/total_num_tokens perf/time_per_step perf/throughput perf/cpu_memory_used_gb perf/cpu_memory_total_gb perf/cpu_percent perf/driver/cpu_cores perf/rollout/cpu_cores
perf/tflops/actor perf/tflops/critic
global_seqlen/min global_seqlen/max global_seqlen/minmax_diff global_seqlen/balanced_min global_seqlen/balanced_max
global_seqlen/mean
training/global_step training/epoch training/rollout_probs_diff_mean training/rollout_probs_diff_max
training/rollout_probs_diff_std training/rollout_actor_probs_pearson_corr rollout_corr/kl rollout_corr/k3_kl
rollout_corr/training_ppl rollout_corr/rollout_ppl rollout_corr/log_ppl_diff rollout_corr/ppl_ratio
rollout_corr/chi2_token rollout_corr/chi2_seq rollout_corr/training_log_ppl rollout_corr/rollout_log_ppl
rollout_corr/log_ppl_abs_diff rollout_corr/log_ppl_diff_max rollout_corr/log_ppl_diff_min
weight_sync/bytes weight_sync/bytes_per_s weight_sync/verified
memory/actor/learn_gib memory/actor/learn_predicted_gib memory/rollout/generate_gib
reward_health/ok reward_health/timeout reward_health/exception reward_health/nonfinite reward_health/none
reward_health/rescored
"""


def held_out(lines: list[dict[str, float]]) -> list[float | None]:
    return [
        next(
            (value for name, value in line.items() if name.startswith("val-core/")),
            None,
        )
        for line in lines
    ]


def wandb_history(run_dir: Path) -> list[dict[str, float]]:
    """What W&B's own reader finds in the run's offline files."""
    (session,) = (run_dir / "wandb").glob("offline-run-*")
    reader = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(session)]
    printed = subprocess.run(
        reader, check=True, capture_output=True, text=True, timeout=200
    ).stdout
    records = [json.loads(line) for line in printed.splitlines()]
    return [
        record["history"]["item"] for record in records if record["type"] == "history"
    ]


def check_rollouts(run_dir: Path, lines: list[dict[str, float]]) -> None:
    """Two whole groups of each step, with what sampler and trainer knew of them."""
    files = recorded_rollouts(run_dir)
    assert list(files) == [1, 2, 3]
    for step, path in files.items():
        rows = pq.read_table(path).to_pylist()
        assert lines[step]["rollouts/recorded_rows"] == len(rows) == 8
        assert lines[step]["rollouts/recorded_every"] == 1
        # The critic's updates are the first that go on meanwhile.
        recording_s = lines[step]["timing_s/record_rollouts"]
        assert 0 < recording_s < lines[step]["timing_s/update_critic"]
        assert [row["member"] for row in rows] == [0, 1, 2, 3] * 2
        assert len({row["ordinal"] for row in rows}) == 2
        for row in rows:
            assert row["step"] == step and row["row"] == 0
            assert 8 * (step - 1) <= row["ordinal"] < 8 * step
            text = "".join(row["pieces"])
            assert re.sub("<[a-z]+>", "", text) == row["prompt"] + row["response"]
            assert row["prompt"].endswith("=") and row["answer"].isdigit()
            ((grader, score),) = row["scores"]
            # The rest is the KL penalty.
            assert grader == "reward" and abs(row["reward"] - score) < 0.1
            sampled = np.array(row["mask"])
            assert sampled.sum() == row["response_tokens"] > 0
            assert set(np.array(row["versions"])[sampled]) == {step - 1}
            ours, theirs = (
                np.array(row[name], np.float64)
                for name in ("log_probs", "rollout_log_probs")
            )
            np.testing.assert_array_equal(np.isnan(ours), ~sampled)
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
            advantages = np.array(row["advantages"], np.float64)[sampled]
            assert row["advantage"] == pytest.approx(advantages.mean(), abs=1e-5)
            assert advantages.min() >= lines[step]["critic/advantages/min"] - 1e-5
            assert advantages.max() <= lines[step]["critic/advantages/max"] + 1e-5


def check_trace(run_dir: Path, lines: list[dict[str, float]]) -> None:
    """A track per process, spans that nest, and the steps as the metrics have them."""
    events = read_trace(run_dir / "trace.json")
    tracks = {
        event["pid"]: event["args"]["name"].partition(" ")[0]
        for event in events
        if event["name"] == "process_name"
    }
    # Actor, critic and reference share a process.
    assert sorted(tracks.values()) == [
        "driver", "engine_trainer-0", "reward-0", "rollout-0",
    ]  # fmt: skip

    spans = [event for event in events if event["ph"] == "X"]
    spans_by_thread: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        spans_by_thread.setdefault((span["pid"], span["tid"]), []).append(span)
    for thread_spans in spans_by_thread.values():
        open_until: list[float] = []
        for span in thread_spans:
            begin, end = span["ts"], span["ts"] + span["dur"]
            # Times have a resolution of a quarter of a microsecond.
            while open_until and open_until[-1] <= begin + 0.5:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.5, span
            open_until.append(end)

    names = {(tracks[span["pid"]], span["name"]) for span in spans}
    assert {
        ("driver", "updating"), ("driver", "waiting for workers"), ("rollout-0", "rollout.generate"),
        ("engine_trainer-0", "actor.update"), ("engine_trainer-0", "critic.update"), ("reward-0", "reward.score"),
        ("engine_trainer-0", "actor.send"),
    } <= names  # fmt: skip
    buckets = [span for span in spans if span["name"] == "rollout.receive"]
    sent = sum(line.get("weight_sync/bytes", 0) for line in lines)
    # The first policy was published before the first step.
    published = sum(span["args"]["bytes"] for span in buckets)
    assert published == pytest.approx(4 / 3 * sent, rel=0.01)

    driver = [span for span in spans if tracks[span["pid"]] == "driver"]
    steps = [span for span in driver if (span["name"], span["cat"]) == ("step", "time")]
    for span, line in zip(steps, lines[1:], strict=True):
        # The span is within what the metrics count; a machine that is busy counts more.
        assert span["dur"] / 1e6 == pytest.approx(line["timing_s/step"], abs=0.5)
        end = span["ts"] + span["dur"]
        inside = [
            other
            for other in driver
            if other is not span and span["ts"] <= other["ts"] < end
        ]
        phases_s = sum(other["dur"] for other in outermost(inside)) / 1e6
        # The driver does little between its phases.
        assert 0.5 * span["dur"] / 1e6 < phases_s <= span["dur"] / 1e6 + 1e-5


def outermost(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans that are in no other one, of one thread."""
    outer: list[dict[str, Any]] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        if not outer or span["ts"] >= outer[-1]["ts"] + outer[-1]["dur"]:
            outer.append(span)
    return outer


@dataclass(frozen=True)
class Finished:
    """A run of PPO that is finished: its folder, and what it printed."""

    folder: Path
    printed: str


@pytest.fixture(scope="module")
def finished(
    cluster: Session, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    folder = tmp_path_factory.mktemp("finished") / "run"
    ended = command_here(
        cluster, "train", "--config-name", "ppo", *inputs.rl(folder), "run.total_steps=3", "run.evaluate_every=2",
        "run.checkpoint_every=3", "tracking.wandb.mode=offline", "tracking.tensorboard=true", "evaluation.samples=4",
        "run.trace=steps",
    )  # fmt: skip
    return Finished(folder, ended.stdout)


@pytest.mark.cluster
@pytest.mark.vllm
def test_a_run_writes_all_that_it_promises(inputs: Inputs, finished: Finished) -> None:
    run_dir, printed = finished.folder, finished.printed
    tree = yaml.safe_load((run_dir / "config.yaml").read_text())
    config = typed_config(tree)  # fully resolved: it is a configuration by itself
    assert config.run.total_steps == 3 and config.model.path == str(inputs.model)

    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["training/global_step"] for line in lines] == [0, 1, 2, 3]
    assert [value is not None for value in held_out(lines)] == [True, False, True, True]
    for line in lines[1:]:
        assert set(PUBLISHED_NAMES.split()) - line.keys() == set()
        assert line["training/rollout_probs_diff_mean"] < 1e-5
        assert line["training/rollout_probs_diff_max"] < 1e-4
        assert line["training/rollout_actor_probs_pearson_corr"] > 0.9999
        assert line["timing_s/controller"] < line["timing_s/step"]
        outputs = {
            name: value
            for name, value in line.items()
            if name.startswith("memory/") and "predicted" not in name
        }
        assert {name.split("/")[1] for name in outputs} == {
            "actor",
            "critic",
            "reference",
            "rollout",
        }
        for (
            name,
            value,
        ) in (
            outputs.items()
        ):  # of a process's own memory nearly all: the model is small
            assert value == pytest.approx(
                line[name.replace("_gib", "_predicted_gib")], rel=0.2
            ), name
    first, auto, memory, *_ = printed.splitlines()
    assert first.endswith(f": writing to {run_dir}")
    assert " settings were auto: backend.dtype=float32, " in auto
    assert "predicted: the machine is fullest in the phase" in memory
    plan = (run_dir / "plan.txt").read_text()
    assert "auto: what these settings become here" in plan and "buffers" in plan

    logged = wandb_history(run_dir)
    assert [item["training/global_step"] for item in logged] == [0, 1, 2, 3]
    for item, line in zip(logged, lines, strict=True):
        for name, value in line.items():
            assert item[name] == pytest.approx(value), name

    assert list(recorded_responses(run_dir)) == [0, 2, 3]
    check_rollouts(run_dir, lines)
    check_trace(run_dir, lines)
    assert b"Content-Security-Policy" in (run_dir / "report.html").read_bytes()
    assert (run_dir / "checkpoints").is_dir() and any((run_dir / "logs").iterdir())
    assert f"{run_dir}/report.html" in printed.replace("\n", "")
    assert list(recorded_evaluations(run_dir)) == [0, 2, 3]
    assert "finished after 3 steps" in printed
    assert "where the time went" in printed
    assert f" export {run_dir}/checkpoints/step_00000003 {run_dir}/ex" in printed


@pytest.mark.cluster
@pytest.mark.vllm
def test_a_finished_run_is_evaluated_by_a_command(
    cluster: Session, inputs: Inputs, finished: Finished
) -> None:
    run_dir = finished.folder
    lines = read_metrics(run_dir / "metrics.jsonl")
    same = [
        "run.total_steps=3",
        "run.evaluate_every=2",
        "run.checkpoint_every=3",
        "evaluation.samples=2",
    ]
    again = command_here(
        cluster, "evaluate", "--config-name", "ppo", *inputs.rl(run_dir), *same
    )
    cells = [line.replace("│", " ").split() for line in again.stdout.splitlines()]
    assert ["val-aux/num_prompts", "16"] in cells and "timing_s" not in again.stdout
    (printed,) = [line for line in cells if line and "val-core/" in line[0]]
    name, value = printed
    # It is of the checkpoint of step 3.
    assert float(value) == pytest.approx(held_out(lines)[-1], abs=1e-4)
    assert "with 95 % intervals" in again.stdout
    assert again.stdout.count("auto: what these settings become here") == 1
    assert f"measuring step 3 from {run_dir}" in again.stdout

    # What was found is on disk: a number of each metric, and each response.
    folder = run_dir / "evaluated" / "step_000003"
    assert again.stdout.endswith(f"evaluation: {folder}\n")
    written = json.loads((folder / "metrics.json").read_text())
    assert written["metrics"][name] == pytest.approx(float(value), abs=1e-4)
    assert written["checkpoint"].endswith("step_00000003") and written["step"] == 3
    rows = [
        json.loads(line)
        for line in (folder / "responses.jsonl").read_text().splitlines()
    ]
    assert [row["problem"] for row in rows] == list(range(16))
    assert np.mean([row["score"] for row in rows]) == written["metrics"][name]
    assert {row["finish"] for row in rows} <= {"stop", "length"}
    assert all(row["prompt"].endswith("=") and row["answer"] for row in rows)
    written = pq.read_table(recorded_responses(run_dir)[3]).to_pylist()
    for kept, row in zip(written, rows, strict=True):
        assert kept["response"] == row["response"] and kept["score"] == row["score"]
        assert kept["response_tokens"] > 0 == kept["member"]
        assert kept["num_turns"] == 1 and kept["pieces"] == []
    scores = read_scores(scores_path(run_dir, 3))
    is_core = [name.startswith("val-core/") for name in scores.metrics]
    assert scores.scores[is_core].tolist() == [[row["score"]] for row in rows]
    # What is optimised is there beside the accuracy, which it is here.
    is_reward = [name.endswith("/reward/mean@1") for name in scores.metrics]
    assert np.array_equal(scores.scores[is_reward], scores.scores[is_core])


def values(tree: Any) -> Iterator[object]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from values(value)
    else:
        yield tree


def config_of(run_dir: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((run_dir / "config.yaml").read_text())
    return tree


@pytest.mark.cluster
@pytest.mark.vllm
def test_a_run_can_be_begun_again_from_its_config(
    cluster: Session,
    finished: Finished,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written = config_of(finished.folder)
    # Which checkpoint is the newest is found anew each time.
    assert written["run"].pop("resume") == "auto"
    assert "auto" not in values(written)
    written["run"]["resume"] = "auto"
    assert written["rollout"]["sync"]["transport"] == "shared_memory"

    def from_file(*changes: str) -> Config:
        folder = str(finished.folder)
        found = checked_config("config", changes, folder, reads_data=False)
        assert found.config is not None
        return found.config

    # In another folder it is a new run with the same settings.
    second = tmp_path / "second"
    second.mkdir()
    config = from_file(f"run.dir={second}")
    settle(config, cluster, Resumption(config))
    again = config_of(second)
    first = {"dir": str(finished.folder)}
    assert again | {"run": again["run"] | first} == written

    # In its own folder it is the same run, which is finished.
    named = ["--config-name", "config", "--config-dir", str(finished.folder)]
    said = command_here(cluster, "train", *named).stdout
    assert f"{finished.folder} is finished: 3 steps are done" in said

    capsys.readouterr()
    Resumption(from_file("run.total_steps=4"))
    told = capsys.readouterr().out.splitlines()
    changes = [line for line in told if line.startswith("changed since")]
    assert changes == ["changed since step_00000003: run.total_steps: 3 -> 4"]


@pytest.mark.cluster
@pytest.mark.vllm
def test_a_run_that_an_earlier_version_began_goes_on_with_the_same_numbers(
    cluster: Session, tmp_path: Path
) -> None:
    """Two steps of PPO by revision 55ff3d3, which also recorded steps 3 and 4 itself.

    Where it was written both are the same to the bit. Another processor's kernels may
    round otherwise, which the tolerance allows.
    """
    with tarfile.open(Path(__file__).with_name("saved_by_55ff3d3.tar.gz")) as saved:
        saved.extractall(tmp_path, filter="data")
    manifest = tmp_path / "run" / "checkpoints" / "step_00000002" / "manifest.json"
    for path in (manifest, tmp_path / "run" / "config.yaml"):
        path.write_text(path.read_text().replace("ROOT", str(tmp_path)))
    written = json.loads(manifest.read_text())
    del written[CHECKSUM]
    manifest.write_text(json.dumps(sealed(written)))

    command_here(
        cluster, "train", "--config-dir", str(tmp_path / "run"), "--config-name", "config"
    )  # fmt: skip

    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    earlier = read_metrics(tmp_path / "expected.jsonl")
    assert [line["training/global_step"] for line in lines] == [1, 2, 3, 4]
    for line, expected in zip(lines[2:], earlier[2:], strict=True):
        numbers = lasting(expected)
        repeated = {name: line[name] for name in numbers}
        assert repeated == pytest.approx(numbers, rel=1e-3, abs=1e-6, nan_ok=True)


@pytest.mark.cluster
def test_a_supervised_run(cluster: Session, inputs: Inputs, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    changes = ["run.total_steps=30", "run.evaluate_every=15", "sft.batch_size=16", "actor.optimizer.lr=5e-3",
               "sft.max_tokens=16", "tracking.wandb.mode=offline", "tracking.rollouts=all",
               "run.save_at_end=false"]  # fmt: skip
    ended = command(
        cluster,
        "train",
        "--config-name",
        "sft",
        *inputs.overrides(run_dir)[:-1],
        *changes,
    )
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["training/global_step"] for line in lines] == list(range(31))
    assert lines[-1]["train/loss"] < lines[1]["train/loss"] / 2
    assert [
        step for step, value in enumerate(held_out(lines)) if value is not None
    ] == [0, 15, 30]
    for line in (lines[0], lines[15], lines[30]):
        perplexity = math.exp(line["val-core/held_out/loss"])
        assert line["val-aux/held_out/perplexity"] == pytest.approx(perplexity)
    for step, path in recorded_rollouts(run_dir).items():
        rows = pq.read_table(path).to_pylist()
        tokens = [loss for row in rows for loss in row["losses"] if loss is not None]
        assert np.mean(tokens) == pytest.approx(lines[step]["train/loss"], abs=1e-5)
        assert (
            "".join(rows[0]["pieces"])
            == f"{rows[0]['prompt']}{rows[0]['response']}<eos>"
        )
    assert step == len(recorded_rollouts(run_dir)) == 30
    losses = {step: lines[step]["val-core/held_out/loss"] for step in (0, 15, 30)}
    # An untrained model is no better than a guess among all tokens.
    assert losses[0] == pytest.approx(lines[1]["train/loss"], rel=0.2)
    best = min(losses, key=losses.__getitem__)
    assert best > 0 and losses[30] < losses[0]
    assert f"best: step {best}, by val-core/held_out/loss" in ended.stdout

    # The model that it wrote is measured by a command of its own.
    model = f"{run_dir}/model"
    assert f"run.resume=auto model.path={model} actor.model" in ended.stdout
    overrides = [*inputs.overrides(tmp_path / "measured"), f"model.path={model}"]
    told = command_here(
        cluster, "evaluate", "--config-name", "sft", *overrides, "sft.max_tokens=16"
    ).stdout
    cells = [line.replace("│", " ").split() for line in told.splitlines()]
    assert ["val-core/held_out/loss", f"{losses[30]:.4g}"] in cells
    assert told.count("[") == 3  # accuracy, loss and perplexity have intervals
    folder = tmp_path / "measured" / "evaluated" / "step_000000"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["metrics.json", "scores.jsonl"]
    assert len(wandb_history(run_dir)) == 31
    assert (run_dir / "model" / "model.safetensors").exists() and (
        run_dir / "model" / "tokenizer.json"
    ).exists()


def test_rows_that_cannot_be_learned_from_end_a_run_before_its_processes_start(
    inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.supervised(tmp_path, "sft.max_tokens=2")
    with pytest.raises(DataError, match=r"rows are longer than sft\.max_tokens = 2"):
        task_of(config).read()


PROBLEMS = [
    (
        "Ann has {a} pens and buys {b} more. How many pens has she?",
        "She has {a}+{b}=<<{a}+{b}={c}>>{c} pens.\n#### {c}",
    ),
    (
        "A farm has {a} cows and {b} hens. How many animals?",
        "There are {a}+{b}=<<{a}+{b}={c}>>{c} animals.\n#### {c}",
    ),
]


def gsm8k_copy(folder: Path) -> Path:
    """The real data set where it lies beside the checkout, or a few problems of its
    form.
    """
    if GSM8K.is_dir():
        return GSM8K
    for name in ("train", "test"):
        lines = []
        for number in range(40):
            question, answer = PROBLEMS[number % 2]
            fields = {"a": number, "b": 3, "c": number + 3}
            lines.append(
                json.dumps(
                    {
                        "question": question.format(**fields),
                        "answer": answer.format(**fields),
                    }
                )
            )
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.slow
def test_real_text_with_a_chat_template_and_a_rollout_engine_of_two_ranks(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    assert (
        prepare_data(
            ["gsm8k", str(gsm8k_copy(tmp_path)), str(tmp_path / "data"), "--model"]
        )
        == 0
    )
    run_dir, data = tmp_path / "run", tmp_path / "data"
    command_here(
        cluster, "train", "--config-name", "ppo", *inputs.rl(run_dir), f"model.path={data}/model",
        f"data.train_path={data}/train.parquet", f"data.validation_path={data}/validation.parquet",
        "data.max_prompt_tokens=256", "data.overlong=skip", "rollout.max_response_tokens=24", "run.total_steps=3",
        "rollout.tensor_parallel=2",
    )  # fmt: skip
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["training/global_step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["reward_health/ok"] == 32
        assert line["training/rollout_probs_diff_mean"] < 1e-5
        assert line["actor/grad_norm"] > 0


@pytest.mark.cluster
def test_what_a_worker_refuses_is_told_in_two_lines(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(inputs.model, model)
    # Without a size the family's own holds, which only a worker knows.
    settings = json.loads((model / "config.json").read_text())
    del settings["intermediate_size"]
    (model / "config.json").write_text(json.dumps(settings))
    ended = command_here(
        cluster,
        "train",
        "--config-name",
        "sft",
        *inputs.overrides(tmp_path / "run"),
        f"model.path={model}",
        code=1,
    )
    refused, _, _, origin = ended.stderr.splitlines()[-4:]  # what goes on is between
    assert refused.startswith(
        "ModelError: model.path: model.layers.0.mlp.gate_proj.weight has shape (96, 64)"
    )
    log = tmp_path / "run" / "logs" / "engine_trainer-0.log"
    assert origin.startswith("raised by actor rank 0 on ") and origin.endswith(
        f"; its stack is in {log}"
    )
    assert (
        "Traceback" not in ended.stdout + ended.stderr
        and "ModelError: model.path" in log.read_text()
    )
