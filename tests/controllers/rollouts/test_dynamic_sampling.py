"""Batches of the groups that have spread, whatever is finished first."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controllers.rollouts.dynamic_sampling import (
    DynamicAdmission,
    require_dynamic_sampling,
    with_spread,
)
from controllers.watch.measures import group_metrics
from scripts.configuration import compose
from tests.data.test_prompts import config as prompt_config
from tests.rows import rollouts_of
from verl_ray.algorithms.groups import has_spread
from verl_ray.columns.batch import Int64
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.columns.stages import Finish
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import CheckpointError, DataError
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.shaping import ResponseScores

SIZE = 2
PATHS = ["model.path=m", "data.train_path=t", "data.validation_path=v"]
STOPPED = np.full(2, Finish.STOP, np.int8)
SCHEDULES = {
    "synchronous": (),
    "asynchronous": ("schedule=asynchronous", "placement=separate"),
}


def scores_of(*values: float) -> ResponseScores:
    """Scores, of which those that are no number have failed."""
    score = np.array(values, np.float32)
    health = np.where(np.isnan(score), ScoreHealth.EXCEPTION, ScoreHealth.OK)
    return ResponseScores(score, health.astype(np.int8))


def test_failed_scores_make_no_spread() -> None:
    groups = np.array([7, 3, 7, 3, 5, 5, 9, 9])
    scores = scores_of(1, 0, 1, 0.5, 1, np.nan, np.nan, np.nan)
    spread = has_spread(scores.score, groups, scores.ok)
    assert groups[spread].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("truncated", "has"), [("score", True), ("mask", True), ("drop", False)]
)
def test_a_response_that_is_no_member_makes_no_spread(
    truncated: str, has: bool
) -> None:
    """The only other score is that of a response that was cut."""
    config = compose(
        "quickstart", ["algorithm=dapo", f"algorithm.truncated={truncated}"]
    )
    assert isinstance(config, RLConfig)
    finish = np.array([Finish.STOP, Finish.STOP, Finish.LENGTH], np.int8)
    group = np.zeros(3, np.int64)
    found = with_spread(config, group, scores_of(1, 1, 0), finish)
    assert found.tolist() == [has] * 3
    # One that was aborted never is a member.
    finish[2] = Finish.ABORTED
    assert not with_spread(config, group, scores_of(1, 1, 0), finish).any()


class Sampling:
    """Admission of the sums of a file, of which every third has no spread."""

    def __init__(
        self,
        folder: Path,
        schedule: str,
        staleness: int,
        *,
        most: int = 10,
        advantage: str = "grpo",
    ) -> None:
        records = [
            {"prompt": f"{number}+1=", "answer": str(number)} for number in range(9)
        ]
        file = folder / "sums.jsonl"
        file.write_text("\n".join(map(json.dumps, records)))
        tokenizer: Any = character_tokenizer(folder / "characters", "0123456789+=")
        config = compose(
            "quickstart",
            [*SCHEDULES[schedule], f"rollout.staleness={staleness}", "run.total_steps=6",
             f"data.prompts_per_step={SIZE}", "rollout.group_size=2", "actor.mini_batch_size=null",
             "algorithm=grpo", f"algorithm.dynamic_sampling={most}", f"algorithm.advantage={advantage}"],
        )  # fmt: skip
        assert isinstance(config, RLConfig)
        self.rejects: Callable[[int], bool] = lambda ordinal: ordinal % 3 == 0
        self.settled: set[int] = set()
        source = PromptSource(
            str(file), tokenizer, prompt_config(max_prompt_tokens=5, shuffle=False), seed=3
        )  # fmt: skip
        self.admission = DynamicAdmission(source, config, self._is_settled)
        self.most_open = SIZE * (staleness + 1)
        self.open: dict[int, int] = {}
        """Version that each undecided ordinal was drawn with."""
        self.versions: dict[int, int] = {}

    def _is_settled(self, ordinals: Int64) -> np.ndarray:
        return np.isin(ordinals, list(self.settled))

    def draw(self) -> None:
        for _, prompts in self.admission.draw():
            version = self.admission.num_trained
            self.open |= dict.fromkeys(prompts.group_id.tolist(), version)
            self.versions |= dict.fromkeys(prompts.group_id.tolist(), version)
        assert self.admission.undecided.tolist() == sorted(self.open)

    def decide(self, ordinal: int) -> None:
        del self.open[ordinal]
        spread = int(not self.rejects(ordinal))
        rejected = self.admission.decide(
            np.array([ordinal, ordinal]), scores_of(0, spread), STOPPED
        )
        assert rejected.tolist() == ([] if spread else [ordinal])
        self.settled |= set(rejected.tolist())

    def train(self) -> list[int]:
        ordinals = self.admission.oldest.tolist()
        self.admission.note_trained()
        self.settled |= set(ordinals)
        return ordinals


@pytest.fixture(params=[("synchronous", 0), ("asynchronous", 1), ("asynchronous", 3)])
def sampling(request: pytest.FixtureRequest, tmp_path: Path) -> Sampling:
    return Sampling(tmp_path, *request.param)


@pytest.mark.parametrize("seed", range(5))
def test_batches_depend_on_no_order_and_no_group_is_too_old(
    sampling: Sampling, seed: int
) -> None:
    """Every third ordinal from 0 on is rejected, so that batches hold 1 2, 4 5, ..."""
    random = np.random.default_rng(seed)
    staleness = sampling.most_open // SIZE - 1
    batches = []
    for version in range(6):
        sampling.draw()
        while not sampling.admission.is_full:
            sampling.decide(int(random.choice(list(sampling.open))))
            # A driver may look at once, or after some more are decided.
            if not sampling.open or random.random() < 0.5:
                sampling.draw()
        batches.append(sampling.train())
        assert all(version - sampling.versions[o] <= staleness for o in batches[-1])
    assert batches == [[1, 2], [4, 5], [7, 8], [10, 11], [13, 14], [16, 17]]
    # Nothing is drawn behind the last step.
    sampling.draw()
    assert not sampling.open and max(sampling.versions) == 17


def test_a_synchronous_run_draws_exactly_what_is_missing(tmp_path: Path) -> None:
    run = Sampling(tmp_path, "synchronous", 0)
    run.draw()
    assert list(run.open) == [0, 1]
    run.decide(1)
    run.draw()
    assert list(run.open) == [0]  # it may be accepted
    run.decide(0)
    run.draw()
    assert list(run.open) == [2]
    run.decide(2)
    assert run.train() == [1, 2]
    # Ordinal 3 is rejected, so the batch has 3, 4, 5.
    run.draw()
    assert list(run.open) == [3, 4]


def test_a_group_is_not_jumped_by_later_ones(tmp_path: Path) -> None:
    run = Sampling(tmp_path, "asynchronous", 1)
    run.draw()
    assert list(run.open) == [0, 1, 2, 3]
    run.decide(2)
    run.decide(3)
    run.draw()
    run.decide(4)
    # 2 and 4 are accepted, but 0 and 1 may come before them.
    assert not run.admission.is_full
    run.decide(0)
    assert not run.admission.is_full
    run.decide(1)
    assert run.admission.oldest.tolist() == [1, 2]
    # Behind them 4 is the first of the next batch, at latest.
    assert run.admission.batches_of(np.array([1, 2, 4])).tolist() == [0, 0, 1]


def test_a_resumed_run_passes_by_what_was_rejected(tmp_path: Path) -> None:
    run = Sampling(tmp_path, "asynchronous", 1)
    run.draw()
    for ordinal in (0, 3, 1):
        run.decide(ordinal)
    state = json.loads(json.dumps(run.admission.state()))
    assert state["drawn"] == 1  # 0 is rejected, and 1 is not trained

    (tmp_path / "again").mkdir()
    resumed = Sampling(tmp_path / "again", "asynchronous", 1)
    resumed.settled = {0, 3}
    resumed.admission.load_state(state)
    resumed.draw()
    assert list(resumed.open) == [1, 2, 4, 5]
    for ordinal in (5, 4, 2, 1):
        resumed.decide(ordinal)
    assert resumed.train() == [1, 2] and resumed.train() == [4, 5]


def test_too_many_draws_end_the_run_with_the_accepted_share(tmp_path: Path) -> None:
    run = Sampling(tmp_path, "synchronous", 0, most=2)
    run.rejects = lambda ordinal: ordinal != 1
    # Two draws for each group of a batch of two are four, of which two are accepted.
    for ordinals in ([0, 1], [2], [3]):
        run.draw()
        for ordinal in ordinals:
            run.decide(ordinal)
    with pytest.raises(
        DataError,
        match=r"3 groups have no two different scores \(0 in the mean\), and 1 were accepted, 25\.0%",
    ):
        run.draw()


def test_the_bound_is_that_of_all_open_batches(tmp_path: Path) -> None:
    """A slow group holds up its batch, while later ones are filled and refilled."""
    run = Sampling(tmp_path, "asynchronous", 3, most=3)
    run.rejects = lambda ordinal: ordinal % 2 == 1
    run.draw()
    # Two draws for each accepted group; ordinal 0 is undecided all the time.
    while len(run.open) > 1:
        for ordinal in list(run.open)[1:]:
            run.decide(ordinal)
        run.draw()
    run.decide(0)
    batches = [run.train() for _ in range(4)]
    assert batches == [[0, 2], [4, 6], [8, 10], [12, 14]]


def test_the_place_is_behind_what_is_settled(tmp_path: Path) -> None:
    """A resumed run with a smaller staleness, and a rejected ordinal at the end."""
    run = Sampling(tmp_path, "synchronous", 0)
    run.settled = {2}
    run.draw()
    run.rejects = lambda ordinal: False
    run.decide(0)
    run.decide(1)
    run.settled |= {0, 1}
    assert run.admission.state()["drawn"] == 0
    run.train()
    assert run.admission.state()["drawn"] == 3


def test_groups_whose_sums_agree_may_differ_in_parts(tmp_path: Path) -> None:
    score = np.full(2, 3, np.float32)
    health = np.zeros(2, np.int8)
    parts = ((1.0, np.array([1, 2], np.float32)), (1.0, np.array([2, 1], np.float32)))
    scores = ResponseScores(score, health, parts=parts)
    # A part that only one member has makes no spread.
    lone = (1.0, np.array([3, np.nan], np.float32))
    config = compose("quickstart", ["algorithm=dapo", "algorithm.advantage=gdpo"])
    assert isinstance(config, RLConfig)
    without = replace(scores, parts=(lone,))
    assert not with_spread(config, np.zeros(2, np.int64), without, STOPPED).any()
    # Normalised in their groups, parts of one size cancel; here they are of two.
    unequal = replace(scores, parts=((1.0, parts[0][1]), (2.0, parts[1][1])))
    cancelling = replace(scores, score=parts[0][1])
    for advantage, group_scores, rejected in (
        ("gdpo", unequal, []),
        ("gdpo", cancelling, [0]),
        ("gdpo", replace(cancelling, parts=()), []),
        ("grpo", unequal, [0]),
        ("grpo", cancelling, []),
    ):
        folder = tmp_path / f"{advantage}{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        run = Sampling(folder, "synchronous", 0, advantage=advantage)
        run.draw()
        found = run.admission.decide(np.zeros(2, np.int64), group_scores, STOPPED)
        assert found.tolist() == rejected
        # The metric of groups without spread follows the same rule.
        rows = Sharded.stored(None, Receipt.of(rollouts_of([1, 1], groups=[0, 0])))
        config = compose("grpo", [*PATHS, f"algorithm.advantage={advantage}"])
        assert isinstance(config, RLConfig)
        share = group_metrics(config, rows, group_scores, np.zeros(2, bool))
        assert share == {"frac_reward_zero_std": len(rejected)}


def test_a_group_whose_scores_differ_by_rounding_is_rejected(tmp_path: Path) -> None:
    run = Sampling(tmp_path, "synchronous", 0, advantage="gdpo")
    run.draw()
    nearly = np.nextafter(np.float32(0.9), np.float32(1))
    pair_scores = scores_of(0.9, nearly, 0.9, 0.8)
    # A part that differs by rounding says no more.
    scores = ResponseScores(
        pair_scores.score,
        pair_scores.health,
        parts=((1.0, pair_scores.score), (2.0, pair_scores.score)),
    )
    finish = np.full(4, Finish.STOP, np.int8)
    assert run.admission.decide(np.array([0, 0, 1, 1]), scores, finish).tolist() == [0]


def test_only_dynamic_sampling_passes_rejected_prompts_by(tmp_path: Path) -> None:
    without = compose("grpo", PATHS)
    with_it = compose("grpo", [*PATHS, "algorithm.dynamic_sampling=10"])
    assert isinstance(without, RLConfig) and isinstance(with_it, RLConfig)
    require_dynamic_sampling(without, {"holes": []})
    require_dynamic_sampling(with_it, {"holes": [[4, 5]]})
    with pytest.raises(CheckpointError, match=r"algorithm\.dynamic_sampling=10"):
        require_dynamic_sampling(without, {"holes": [[4, 5]]})


def test_metrics_say_what_was_drawn_for_a_batch(tmp_path: Path) -> None:
    run = Sampling(tmp_path, "synchronous", 0)
    while not run.admission.is_full:
        run.draw()
        for ordinal in list(run.open):
            run.decide(ordinal)
    assert run.admission.note_trained() == {
        "dynamic_sampling/rejected": 1.0,
        "dynamic_sampling/accepted_share": pytest.approx(2 / 3),
        "dynamic_sampling/rejected_score_mean": 0.0,
    }
