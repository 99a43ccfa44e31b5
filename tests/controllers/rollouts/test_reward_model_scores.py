"""Scores of a reward model in real groups.

It runs on every backend, on one and two ranks, in the actor's processes and in its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from controllers.system.plan import plan_processes, resolve_on
from scripts.configuration import compose
from tests.controllers.runs import SHAPE
from tests.reward_models import (
    EXACT,
    ROWS,
    SIZES,
    SUM,
    Row,
    conversation,
    make_reward_model,
    make_tokenizers,
    rollouts,
    transformers_scores,
)
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import put, read
from verl_ray.columns.stages import Finish, Rollouts
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.models.tiny import make_tiny
from verl_ray.rewards.health import ScoreHealth
from workers.reward_model import RewardModelGrader

pytestmark = pytest.mark.cluster

CAP = 100  # tokens: several micro-batches, of another number on each rank
CASES: list[Row] = [
    *ROWS,
    (SUM, "The sum of 12 and 30 is 42." * 20, Finish.STOP),  # longer than the cap
    *((SUM, f"It is {number}.", Finish.STOP) for number in range(6)),
]


@dataclass(frozen=True)
class ScoredRows:
    """Rows, and the expected score of each."""

    policy: Path
    model: Path
    rows: Rollouts
    health: list[ScoreHealth]
    score: list[float]  # transformers'; NaN where there is none


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> ScoredRows:
    """Rows of which some fail on one rank and not on the other.

    The template of the reward model refuses a system turn.
    """
    folder = tmp_path_factory.mktemp("scores")
    make_tokenizers(folder)
    policy = make_tiny("qwen3", folder / "policy", folder / "chatml", SIZES, seed=0)
    model = make_reward_model(folder / "reward", "llama", folder / "no_system")
    own = load_tokenizer(model)
    seen = {
        row: conversation(own, *case)
        for row, case in enumerate(CASES)
        if isinstance(case[0], str)
    }
    fitting = [row for row, tokens in seen.items() if len(tokens) <= CAP]
    score = np.full(len(CASES), np.nan)
    score[fitting] = transformers_scores(model, [seen[row] for row in fitting])
    health = [
        ScoreHealth.EXCEPTION
        if row not in seen
        else ScoreHealth.OK
        if row in fitting
        else ScoreHealth.TOO_LONG
        for row in range(len(CASES))
    ]
    assert [
        health.count(kind)
        for kind in (ScoreHealth.OK, ScoreHealth.TOO_LONG, ScoreHealth.EXCEPTION)
    ] == [9, 1, 3]
    return ScoredRows(
        policy, model, rollouts(load_tokenizer(policy), CASES), health, score.tolist()
    )


@pytest.fixture(
    # of the first two backends, every two of backend, number of ranks and placement
    # once; megatron in two stages. The contract of engines compares the scores of each
    # backend with transformers.
    params=[
        pytest.param(("engine", 1, "colocated"), marks=pytest.mark.slow),
        pytest.param(("engine", 2, "separate"), marks=pytest.mark.slow),
        pytest.param(("fsdp", 1, "separate"), marks=pytest.mark.slow),
        ("fsdp", 2, "colocated"),
        pytest.param(("megatron", 2, "separate"), marks=pytest.mark.slow),
    ],
    ids=lambda place: "-".join(map(str, place)),
)
def reward(
    request: pytest.FixtureRequest, cluster: Session, scored: ScoredRows, tmp_path: Path
) -> Iterator[WorkerGroup[RewardModelGrader]]:
    """The reward role of a run, in the actor's process or in its own."""
    backend, ranks, placement = request.param
    stages = (
        [f"reward.backend.pipeline_parallel={ranks}"] if backend == "megatron" else []
    )
    config = compose(
        "ppo",
        [
            f"model.path={scored.policy}", "data.train_path=none", "data.validation_path=none", f"run.dir={tmp_path}",
            f"backend={backend}", f"actor.num_ranks={ranks}", f"placement={placement}", "run.threads_per_rank=1",
            "reward=model", f"reward.model.path={scored.model}", f"reward.backend.micro_batch_tokens_per_rank={CAP}",
            f"reward.num_ranks={ranks}", *stages,
        ],
    )  # fmt: skip
    plan = plan_processes(resolve_on(config, SHAPE), SHAPE)
    wanted = ("actor", "reward") if placement == "colocated" else ("reward",)
    roles = [plan.roles[name] for name in wanted]
    assert (
        [role.processes for role in roles] == [f"{backend} trainer"] * 2
        if placement == "colocated"
        else ["reward"]
    )
    sets = [
        replace(one, cpus_per_rank=0.25)
        for one in plan.sets
        if one.name == roles[-1].processes
    ]
    with start_groups(sets, roles, stall_s=240, log_dir=tmp_path / "logs") as groups:
        group = groups[plan.roles["reward"]]
        homes = [
            {
                member.process_info.pid
                for member in groups[role].members()
                if member.process_info
            }
            for role in roles
        ]
        assert all(home == homes[0] for home in homes) and len(homes[0]) == ranks
        assert group.dp_size == (1 if stages else ranks)
        yield group


def test_scores_are_those_of_transformers_in_the_order_of_the_rows(
    reward: WorkerGroup[RewardModelGrader], scored: ScoredRows
) -> None:
    stored = put(scored.rows)
    for order in (
        np.arange(len(CASES)),
        np.arange(len(CASES))[::-1],
        np.array([8]),
    ):  # one row: less than one a rank
        scores = read(
            reward.scatter(RewardModelGrader.score, stored.select(order), 1).result(),
            60,
        )
        assert scores.health.tolist() == [scored.health[row] for row in order]
        np.testing.assert_allclose(
            scores.score, [scored.score[row] for row in order], rtol=0, atol=EXACT
        )
        failed = [bool(text) for text in scores.detail.texts()]
        assert failed == [scored.health[row] != ScoreHealth.OK for row in order]
