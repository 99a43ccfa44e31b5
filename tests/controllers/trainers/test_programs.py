"""Whole runs that learn from agents which are programs of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.agents.gateway.test_launch import remaining
from tests.agents.templates import PRESERVING, tokenizer_with
from tests.controllers.runs import Inputs, command_here, lasting
from tests.controllers.trainers.test_agents import TEMPLATE, lines_of, recorded
from tests.faults import HAPPENED
from tests.kills import Run
from tests.waiting import until
from verl_ray.cluster.session import Session
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.models.tiny import make_tiny_qwen3

pytestmark = [pytest.mark.cluster, pytest.mark.processes]

PROGRAMS = Path(__file__).parents[2] / "agents" / "gateway" / "programs"
TWO_TURNS = PROGRAMS / "two_turns.py"


def train(
    cluster: Session, inputs: Inputs, run_dir: Path, agent: str, *changes: str
) -> list[dict[str, Any]]:
    """The metrics of a run of four steps on an agent of two turns."""
    template = run_dir.with_suffix(".jinja")
    template.write_text(TEMPLATE)
    command_here(
        cluster, "train", "--config-name", "grpo", *inputs.rl(run_dir), "rollout.max_response_tokens=24",
        f"agent.environments.default={agent}", "reward.functions.default=environment",
        "agent.max_turn_tokens=6", f"data.chat_template={template}", "run.total_steps=3", *changes,
    )  # fmt: skip
    return lines_of(run_dir)


@pytest.mark.parametrize(
    "schedule",
    [
        "synchronous",
        pytest.param("one_step_off", marks=pytest.mark.slow),
    ],
)
def test_a_command_and_a_function_of_the_same_words_have_the_same_bits(
    cluster: Session, inputs: Inputs, tmp_path: Path, schedule: str
) -> None:
    """Over two protocols, and paid in two ways."""
    changes = [f"schedule={schedule}", "tracking.rollouts=all", "algorithm.kl=none"]
    if schedule == "one_step_off":
        changes.append("placement=separate")
    function = train(
        cluster, inputs, tmp_path / "function",
        f"{{function: {TWO_TURNS}:run, client: openai}}", *changes,
    )  # fmt: skip
    command = train(
        cluster, inputs, tmp_path / "command",
        f"{{command: python {TWO_TURNS}, reward: stdout}}", *changes,
    )  # fmt: skip
    for metrics, same in zip(function, command, strict=True):
        assert lasting(same) == lasting(metrics)
        assert metrics["episode/ends/completed"] == 1
        assert metrics["num_turns/mean"] == 4
    # The first step learns from what the same policy has sampled.
    assert function[0]["training/rollout_probs_diff_max"] < 1e-5
    assert function[-1]["critic/score/mean"] > function[0]["critic/score/mean"]

    # What it has printed is kept beside its last row; its last line is the score.
    rows = recorded(tmp_path / "command", 3)
    printed = [row for row in rows if row["output"]]
    assert len(printed) == len({row["trajectory"] for row in rows}) == 32
    for row in printed:
        ((_, score),) = row["scores"]
        _, first, second, last = row["output"].strip().splitlines()
        assert float(last) == pytest.approx(score, abs=1e-6)
        assert first.startswith("turn 0: ") and second.startswith("turn 1: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "reward"), [("by_openai_agents", "stdout"), ("by_smolagents", "post")]
)
def test_agents_of_frameworks_take_two_exact_steps(
    cluster: Session, inputs: Inputs, tmp_path: Path, program: str, reward: str
) -> None:
    tokenizer = Path(tokenizer_with(PRESERVING).name_or_path)
    shape = TinyModelConfig(
        hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_size=32, intermediate_size=48,
        tie_embeddings=False,
    )  # fmt: skip
    model = make_tiny_qwen3(tmp_path / "model", tokenizer, shape, seed=0)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 1 << 15})
    )
    policy = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        # At about half of all places the turn ends.
        policy.lm_head.weight[tokenizer_with(PRESERVING).eos_token_id] *= 8
    policy.save_pretrained(model)
    run_dir = tmp_path / "run"
    command_here(
        cluster, "train", "--config-name", "grpo", *inputs.rl(run_dir), f"model.path={model}",
        "data.prompts_per_step=2", "rollout.group_size=2", "rollout.max_response_tokens=16000",
        f"agent.environments.default={{command: python {PROGRAMS / program}.py, reward: {reward}}}",
        "reward.functions.default=environment", "agent.max_turn_tokens=32", "agent.tool_parser=hermes",
        "rollout.kv_cache_gib=0.25", "run.total_steps=2", "data.apply_chat_template=true", "data.max_prompt_tokens=64",
    )  # fmt: skip
    for metrics in lines_of(run_dir):
        assert metrics["episode/ends/completed"] == 1
        assert metrics["training/rollout_probs_diff_max"] < 1e-5


FORGED = "88888888"
ENDS = {
    "honest": "completed", "forks": "completed", "floods": "max_turns", "sends_much": "completed",
    "guesses": "completed", "never_reads": "completed", "forges": "completed", "stays": "max_turns",
    "dies": "environment_failed",
}  # fmt: skip


def marked(program: str, notes: Path, rest_s: float = 0.0) -> tuple[str, str]:
    """A command that notes its key and folder, and rests before its turns, and the mark
    of all its processes.
    """
    mark = f"1{os.getpid()}.{abs(hash(notes)) % 10**9}"
    options = (
        f"reward: stdout, env: {{NOTES: {notes}, MARK: '{mark}', REST_S: '{rest_s}'}}"
    )
    return f"{{command: python {PROGRAMS / program}.py, {options}}}", mark


@pytest.mark.slow
def test_a_run_goes_on_whatever_its_agents_do_and_nothing_of_them_stays(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    run_dir, notes = tmp_path / "run", tmp_path / "notes"
    agent, mark = marked("villains", notes)
    lines = inputs.train.read_text().splitlines()[:16]
    villains = [*ENDS][1:]
    # Every other one is honest, the first included, by which the run is tried.
    sources = ["honest" if n % 2 == 0 else villains[n // 2] for n in range(16)]
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps(json.loads(line) | {"data_source": source}) + "\n"
            for line, source in zip(lines, sources, strict=True)
        )
    )
    metrics = train(
        cluster, inputs, run_dir, agent, f"data.train_path={data}", "run.total_steps=2", "rollout.group_size=2",
        "agent.max_turns=4", "tracking.rollouts=all", "algorithm.kl=none", "reward.max_failed_fraction=0.5",
    )  # fmt: skip

    rows = [row for step in (1, 2) for row in recorded(run_dir, step)]
    assert {row["data_source"]: row["end"] for row in rows} == ENDS
    for row in rows:
        assert row["end"] == ENDS[row["data_source"]], row
        learned = [
            piece if own else " "
            for piece, own in zip(row["pieces"], row["mask"], strict=True)
        ]
        assert FORGED not in "".join(learned)
        sampled = [value is not None for value in row["rollout_log_probs"]]
        assert sampled == row["mask"]
        has_failed = row["data_source"] == "dies"
        assert any(row["mask"]) != has_failed
        assert ("killed by signal 9" in row["failure"]) == has_failed
        assert "sk-" not in row["output"]
    assert any(FORGED in "".join(row["pieces"]) for row in rows)
    assert len({row["trajectory"] for row in rows if row["output"]}) > 8

    assert len(metrics) == 2
    assert sum(each["reward_health/exception"] for each in metrics) == 2
    assert sum(each["episode/retries"] for each in metrics) == 2
    assert all(each["episode/lost_processes"] == 0 for each in metrics)
    assert all(each["training/rollout_probs_diff_max"] < 1e-5 for each in metrics)

    keys, folders = zip(*map(str.split, notes.read_text().splitlines()), strict=True)
    assert len(set(keys)) == len(keys) >= 32
    for path in run_dir.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(key.encode() in content for key in keys), path
    assert not any(Path(folder).exists() for folder in folders)
    assert not remaining(mark)


@pytest.mark.slow
def test_the_commands_of_a_lost_replica_end_with_it_and_their_episodes_begin_again(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    def run(name: str) -> tuple[Run, str]:
        agent, mark = marked("villains", tmp_path / f"{name}.notes", rest_s=2)
        folder = tmp_path / name
        template = folder.with_suffix(".jinja")
        template.write_text(TEMPLATE)
        changes = [
            f"agent.environments.default={agent}", "reward.functions.default=environment",
            "agent.max_turn_tokens=6", f"data.chat_template={template}",
        ]  # fmt: skip
        return Run(inputs, folder, "synchronous", 2, changes), mark

    whole, _ = run("whole")
    command_here(cluster, *whole.arguments)
    broken, mark = run("broken")
    fault = "rollouts@2:kill=rollout-0+1.5"
    code, output = broken.process([fault], f"ray.address={cluster.address}")
    assert code == 0, output
    (happened,) = (broken.folder / HAPPENED).read_text().splitlines()
    assert json.loads(happened)["found"] == 1
    assert broken.lines() == whole.lines()
    # Those that were begun have another key the second time.
    first, second = (
        (tmp_path / f"{name}.notes").read_text().split() for name in ("whole", "broken")
    )
    assert len(set(second)) > len(set(first))
    until(lambda: not remaining(mark))
