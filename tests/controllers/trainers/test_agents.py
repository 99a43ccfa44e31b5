"""Whole runs that learn from episodes of several turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.controllers.runs import Inputs, command, command_here, lasting
from tests.faults import HAPPENED
from tests.kills import KILLED, Run, steps_of
from verl_ray.cluster.session import Session
from verl_ray.tracking.held_out_responses import recorded_responses
from verl_ray.tracking.jsonl import read_metrics
from verl_ray.tracking.rollouts import recorded_rollouts

pytestmark = [pytest.mark.cluster, pytest.mark.processes]

ENVIRONMENTS = Path(__file__).with_name("environments.py")
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def environment_of(
    run_dir: Path, environment: str, source: str = "default"
) -> list[str]:
    """The overrides of an environment, and of a chat template beside the run."""
    template = run_dir.with_suffix(".jinja")
    template.write_text(TEMPLATE)
    return [
        f"agent.environments.{source}={ENVIRONMENTS}:{environment}", f"reward.functions.{source}=environment",
        "agent.max_turn_tokens=6", f"data.chat_template={template}",
    ]  # fmt: skip


def train(
    cluster: Session, inputs: Inputs, run_dir: Path, environment: str, *changes: str, source: str = "default"
) -> list[dict[str, Any]]:  # fmt: skip
    """The metrics of the lines of a run on episodes of two turns."""
    command_here(
        cluster, "train", "--config-name", "grpo", *inputs.rl(run_dir),
        "rollout.max_response_tokens=24", *environment_of(run_dir, environment, source), *changes,
    )  # fmt: skip
    return lines_of(run_dir)


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


CORE = "val-core/arithmetic/reward/mean@1"


@pytest.fixture(scope="module")
def learned(
    cluster: Session, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run that has learned from episodes."""
    run_dir = tmp_path_factory.mktemp("learned") / "run"
    train(
        cluster, inputs, run_dir, "TwoTurns", "run.total_steps=4", "run.evaluate_every=4",
        "algorithm.dynamic_sampling=20", "run.checkpoint_every=4",
    )  # fmt: skip
    return run_dir


def test_a_policy_learns_from_episodes(learned: Path) -> None:
    before, *steps = lines_of(learned)
    assert before[CORE] < 1 < steps[-1][CORE] <= 12 / 8
    for metrics in (before, steps[-1]):
        turns_key = "val-aux/arithmetic/episode/world/turns/mean@1"
        assert (
            metrics["val-aux/arithmetic/num_turns/mean"] == 2 * metrics[turns_key] == 4
        )
        assert metrics["val-aux/arithmetic/episode/ends/completed"] == 1
        assert metrics["val-aux/arithmetic/episode/ends/max_turns"] == 0
    for metrics in steps:
        assert metrics["num_turns/mean"] == 4 and metrics["episode/ends/completed"] == 1
        assert (
            metrics["episode/world/turns"]
            == metrics["episode/world/arithmetic/turns"]
            == 2
        )
        # A turn that is cut by its length begins a row.
        assert 1 < metrics["episode/rows"] <= 2
        # No episode ends by a limit, and groups whose scores are equal are drawn again.
        assert metrics["response_length/clip_ratio"] == 0
        assert metrics["frac_reward_zero_std"] == 0
        assert metrics["critic/rewards/mean"] == pytest.approx(
            metrics["critic/score/mean"], rel=1e-5
        )
        # A forward pass over whole rows gives the log-probs of turn by turn.
        assert metrics["training/rollout_probs_diff_max"] < 1e-5

    # Two whole groups are recorded, with all rows of each episode.
    rows = recorded(learned, 4)
    assert len(rows) == steps[-1]["rollouts/recorded_rows"]
    rows_by_trajectory: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        rows_by_trajectory.setdefault(row["trajectory"], []).append(row)
    assert len(rows_by_trajectory) == 8 and len({row["ordinal"] for row in rows}) == 2
    for trajectory_rows in rows_by_trajectory.values():
        assert [row["row"] for row in trajectory_rows] == [*range(len(trajectory_rows))]
        ((_, score),) = trajectory_rows[0]["scores"]
        paid = sum(row["reward"] for row in trajectory_rows)
        assert paid == pytest.approx(score, abs=1e-5)
        # Turns are numbered over the rows of an episode.
        assert [number for row in trajectory_rows for number in row["turns"]] == [0, 1]
        paid_in_turns = sum(
            reward for row in trajectory_rows for reward in row["turn_rewards"]
        )
        assert paid_in_turns == pytest.approx(score, abs=1e-5)
        for row in trajectory_rows:
            assert (row["end"], row["num_turns"], row["failure"]) == (
                "completed",
                2,
                "",
            )
            # A single update needs no log-probs of the trainer, and none are computed.
            assert set(row["log_probs"]) == {None}
            is_sampled = [value is not None for value in row["rollout_log_probs"]]
            assert is_sampled == row["mask"]
    assert all(row["response_tokens"] == sum(row["mask"]) > 0 for row in rows)
    for metrics in steps:
        assert "timing_s/old_log_prob" not in metrics
        recording_s = metrics["timing_s/record_rollouts"]
        assert 0 < recording_s < metrics["timing_s/update_actor"]

    # Held-out episodes keep the tokens of their last rows in the same columns.
    held_out = rows_in(recorded_responses(learned)[4])
    assert len(held_out) == 16
    for row in held_out:
        # A special token may stand behind a turn, and texts are without those.
        assert "".join(row["pieces"]).startswith(row["prompt"][:4])
        assert row["num_turns"] == 2
        assert row["turns"][-1] == 1 and row["mask"][row["turn_ends"][-1]]
        assert 0 < sum(row["mask"]) <= row["response_tokens"] <= 2 * 6
        assert [version == 4 for version in row["versions"]] == row["mask"]
        sampled = [value is not None for value in row["rollout_log_probs"]]
        assert sampled == row["mask"] and len(row["tokens"]) == len(row["mask"])
        assert set(row["log_probs"]) == set(row["advantages"]) == {None}


@pytest.mark.slow
def test_an_evaluation_in_the_same_environment_has_the_scores_of_the_run(
    cluster: Session, inputs: Inputs, learned: Path, tmp_path: Path
) -> None:
    measured = tmp_path / "measured"
    command_here(
        cluster, "evaluate", "--config-name", "grpo", *inputs.rl(measured), "rollout.max_response_tokens=24",
        *environment_of(measured, "TwoTurns"), f"run.resume={learned / 'checkpoints' / 'step_00000004'}",
    )  # fmt: skip
    written = measured / "evaluated" / "step_000004" / "metrics.json"
    again = json.loads(written.read_text())
    assert again["metrics"][CORE] == lines_of(learned)[-1][CORE]


def recorded(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The recorded rollouts of a step."""
    return rows_in(recorded_rollouts(run_dir)[step])


def rows_in(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("evaluate_every", [0, 1])
def test_what_failed_is_recorded_where_it_stops_the_run(
    cluster: Session, inputs: Inputs, tmp_path: Path, evaluate_every: int
) -> None:
    """In the first step, or in the evaluation before it."""
    folder = tmp_path / "run"
    ended = command(
        cluster, "train", "--config-name", "grpo", *inputs.rl(folder), *environment_of(folder, "Failing"),
        "rollout.max_response_tokens=24", "run.total_steps=1", f"run.evaluate_every={evaluate_every}",
        "reward.max_failed_fraction=0", code=1,
    )  # fmt: skip
    assert "in agent.environments.default as environment_failed" in ended.stderr
    assert f'File "{ENVIRONMENTS}", line ' in ended.stderr
    assert "\nLookupError: nothing begins so here" in ended.stderr

    if evaluate_every:
        path = recorded_responses(folder)[0]
    else:
        path = recorded_rollouts(folder)[1]
    lines = rows_in(path)
    assert lines
    for line in lines:
        assert line["end"] == "environment_failed"
        assert "LookupError: nothing begins so here" in line["failure"]


@pytest.fixture(scope="module")
def mixed(
    cluster: Session, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run of one step. Of three records one acts in an environment that
    fails now and then, one in another, and one in none; the graders are those of the
    data sources.
    """
    folder = tmp_path_factory.mktemp("mixed")
    lines = inputs.train.read_text().splitlines()
    sources = ("frail", "sums", "game")
    records = [
        {**json.loads(line), "data_source": sources[number % 3]}
        for number, line in enumerate(lines)
    ]
    data = folder / "mixed.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    train(
        cluster, inputs, folder / "run", "TwoTurns", f"data.train_path={data}", "run.total_steps=1",
        "tracking.rollouts=all", f"agent.environments.frail={ENVIRONMENTS}:Failing", "reward.functions.frail=environment",
        "reward.max_failed_fraction=1", source="game",
    )  # fmt: skip
    return folder / "run"


def test_single_responses_and_episodes_are_trained_in_one_run(mixed: Path) -> None:
    (metrics,) = lines_of(mixed)
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    rows = recorded(mixed, 1)
    singles = [row for row in rows if row["data_source"] == "sums"]
    games = [row for row in rows if row["data_source"] == "game"]
    assert singles and games
    for row in singles:
        assert (row["end"], row["num_turns"], row["failure"]) == ("", 1, "")
        # The whole response, which agent.max_turn_tokens does not bound.
        assert row["mask"] == sorted(row["mask"])
    assert max(row["response_tokens"] for row in singles) > 6
    for row in games:
        assert (row["end"], row["num_turns"], row["failure"]) == ("completed", 2, "")

    # Turns are counted of episodes alone.
    episodes = {row["trajectory"]: row for row in rows if row["data_source"] != "sums"}
    turns = [2 * row["num_turns"] for row in episodes.values()]
    assert metrics["num_turns/mean"] == pytest.approx(sum(turns) / len(turns))


def test_a_failed_episode_is_no_member_of_its_group(mixed: Path) -> None:
    (metrics,) = lines_of(mixed)
    rows = recorded(mixed, 1)
    episodes = {row["trajectory"]: row for row in rows if row["data_source"] != "sums"}
    failed = [row for row in episodes.values() if row["end"] == "environment_failed"]
    frail = [row for row in episodes.values() if row["data_source"] == "frail"]
    assert 0 < len(failed) < len(frail)
    share = metrics["episode/ends/environment_failed"]
    assert share == pytest.approx(len(failed) / len(episodes))
    assert metrics["episode/ends/completed"] == pytest.approx(1 - share)
    assert metrics["response/aborted_ratio"] > 0
    assert metrics["reward_health/exception"] == len(failed)
    # Each was run once more, to the same end.
    assert metrics["episode/retries"] == len(failed)
    assert metrics["episode/lost_processes"] == metrics["episode/run_again"] == 0
    assert metrics["episode/loop_lag_s"] >= 0
    for row in rows:
        has_failed = row["end"] == "environment_failed"
        assert (row["finish"] == "aborted") == has_failed == (row["reward"] is None)
        assert bool(row["failure"]) == has_failed


@pytest.mark.slow
def test_episodes_have_the_same_bits_after_a_resume(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    def run(name: str, *more: str) -> list[dict[str, Any]]:
        ppo = ("algorithm=ppo", "critic.optimizer.lr=1e-3")
        return train(cluster, inputs, tmp_path / name, "TwoTurns", *ppo, *more)

    straight = run("straight", "run.total_steps=4")
    run("other", "run.total_steps=2", "run.checkpoint_every=2")
    other = run("other", "run.total_steps=4", "run.checkpoint_every=2")
    assert len(straight) == len(other) == 4
    for metrics, same in zip(straight, other, strict=True):
        assert lasting(same) == lasting(metrics)


@pytest.mark.slow
def test_episodes_have_the_same_bits_wherever_they_run_and_whatever_is_lost(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    def run(name: str, *more: str) -> Run:
        folder = tmp_path / name
        changes = [*environment_of(folder, "TwoTurns"), *more]
        return Run(inputs, folder, "one_step_off", 4, changes)

    whole = run("whole")
    command_here(cluster, *whole.arguments)

    few = ("agent.processes_per_replica=2", "agent.episodes_per_process=3")
    broken = run("broken", *few)
    # The processes of episodes, then their replica.
    faults = ("rollouts@2:kill=rollout-0-child", "rollouts@3:kill=rollout-0+0.05")
    code, output = broken.process(faults, f"ray.address={cluster.address}")
    assert code == 0, output
    happened = (broken.folder / HAPPENED).read_text().splitlines()
    assert [json.loads(line)["fault"] for line in happened] == list(faults)
    assert all(json.loads(line)["found"] for line in happened)
    assert broken.lines() == whole.lines()
    assert broken.has_each_once()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["asynchronous", "carry_over"])
def test_each_prompt_is_learned_from_once_where_episodes_are_lost(
    cluster: Session, inputs: Inputs, tmp_path: Path, schedule: str
) -> None:
    """A replica in the middle of its groups, the processes of the next one's episodes,
    and the driver.
    """
    folder = tmp_path / "run"
    run = Run(inputs, folder, schedule, 4, environment_of(folder, "SlowTurns"))
    here = f"ray.address={cluster.address}"
    faults = (
        "rollouts@2:kill=rollout-0+0.05",
        "updating@2:kill=rollout-0-child",
        "publishing weights@4:kill=driver+0.05",
    )
    code, output = run.process(faults, here)
    assert code == KILLED, output
    happened = (folder / HAPPENED).read_text().splitlines()
    assert [json.loads(line)["fault"] for line in happened] == list(faults)
    assert all(json.loads(line)["found"] for line in happened)
    command_here(cluster, *run.arguments)

    assert run.trained() == list(range(32)) and run.has_each_once()
    lines = read_metrics(folder / "metrics.jsonl")
    assert steps_of(lines) == list(range(5))
    # The processes that were killed had episodes, which began again.
    assert sum(line.get("episode/run_again", 0) for line in lines) > 0
    for line in lines[1:]:
        assert line["episode/ends/completed"] == 1 and line["num_turns/mean"] == 4
        assert line["staleness/age_max"] <= 2


@pytest.mark.slow
def test_the_quickstart_of_agents_learns_to_call_its_tool_twice(
    cluster: Session, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # The command fails unless the accuracy rises by prepare.min_gain.
    command_here(
        cluster, "train", "--config-name", "agent_quickstart", f"run.dir={run_dir}"
    )
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    _, first, *_, last = map(json.loads, lines)
    # Three turns of the policy: two calls, and the answer.
    assert first["num_turns/mean"] < 5.5 < last["num_turns/mean"] < 6.5
    assert last["episode/ends/completed"] > 0.9
    assert last["episode/rows"] < 1.1
    assert last["training/rollout_probs_diff_max"] < 1e-4
