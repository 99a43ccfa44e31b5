"""The numbers of a step, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from controllers.watch import (
    held_out_measures,
    measures,
    score_entries,
    update_measures,
)
from controllers.watch.held_out_measures import CoreScores
from controllers.watch.measures import Metrics
from controllers.watch.score_entries import (
    entry_metrics,
    held_out_entry_metrics,
    merged_entries,
)
from tests.corrections import NO_CORRECTION, NO_LIMIT
from tests.rows import rewards_of, rollouts_of, values_of
from verl_ray.algorithms.mismatch import MISMATCH_PREFIX
from verl_ray.algorithms.subsets import NO_ANSWER
from verl_ray.columns.batch import Batch, Ragged
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.columns.stages import Credit, Finish, Scores
from verl_ray.config.algorithm import AlgorithmConfig
from verl_ray.engine.base import LossReport, StepReport
from verl_ray.learning.correction_weights import CORRECTION_PREFIX
from verl_ray.learning.credit import token_credit
from verl_ray.ops.masked import Moments
from verl_ray.profiling.memory import GIB, DeviceMemory
from verl_ray.rewards.health import Entries, ScoreHealth
from verl_ray.rewards.shaping import ResponseScores, response_scores
from verl_ray.tracking.comparison import intervals
from verl_ray.tracking.evaluations import HeldOutScores
from workers.model_worker import UpdateReport


def held(batch: Batch) -> Sharded:  # type: ignore[type-arg]
    return Sharded.stored(None, Receipt.of(batch))


def test_lengths_and_ends() -> None:
    finish = [Finish.STOP, Finish.LENGTH, Finish.ABORTED, Finish.STOP]
    rows = rollouts_of([1, 4, 2, 3], prompts=[3, 5, 1, 1], finish=finish)
    found = measures.rollout_metrics(
        held(rows), max_prompt_tokens=5, rows_of_ranks=[np.arange(2), np.arange(2, 4)]
    )
    assert [
        found[f"response_length/{what}"]
        for what in ("mean", "max", "min", "clip_ratio")
    ] == [2.5, 4, 1, 0.25]
    assert found["response_length_non_aborted/mean"] == pytest.approx(8 / 3)
    assert found["response/aborted_ratio"] == 0.25
    assert [
        found[f"prompt_length/{what}"] for what in ("mean", "max", "min", "clip_ratio")
    ] == [2.5, 5, 1, 0.25]
    assert found["response_length_non_aborted/clip_ratio"] == pytest.approx(1 / 3)
    assert found["num_turns/mean"] == 2  # the prompt's and the response's
    assert found["perf/total_num_tokens"] == 20


def test_tokens_per_rank_as_they_come_and_as_they_are_dealt() -> None:
    rows = rollouts_of([8, 6, 1, 3], prompts=[1, 1, 1, 1])  # 9, 7, 2, 4 tokens
    found = measures.rollout_metrics(
        held(rows),
        max_prompt_tokens=5,
        rows_of_ranks=[np.array([0, 2]), np.array([1, 3])],
    )
    # in order: 9 + 7 and 2 + 4; dealt: 9 + 2 and 7 + 4
    names = ("min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean")
    assert [found[f"global_seqlen/{name}"] for name in names] == [6, 16, 10, 11, 11, 11]


def test_scores_that_failed_are_counted_and_not_averaged() -> None:
    health = [
        ScoreHealth.OK,
        ScoreHealth.TIMEOUT,
        ScoreHealth.OK,
        ScoreHealth.EXCEPTION,
    ]
    scores = Scores(
        offsets=np.zeros(5, np.int64), score=np.array([1, np.nan, 0, np.nan], np.float32),
        health=np.array(health, np.int8), detail=Ragged.of_texts(["", "late", "", "broken"]),
        rescored=np.array([False, False, True, True]),
        has_entries=np.zeros(4, bool), entries=Ragged.of_texts([""] * 4),
    )  # fmt: skip
    raw = response_scores({"reward": held(scores)})
    found = score_entries.score_metrics(raw["reward"], raw, np.zeros(4, bool))
    assert not any(
        name.startswith("reward/") for name in found
    )  # one grader: its scores are critic/score
    assert [found[f"critic/score/{what}"] for what in ("mean", "max", "min")] == [
        0.5,
        1,
        0,
    ]
    assert [found[kind.metric] for kind in ScoreHealth] == [2, 1, 1, *[0] * 6]
    assert found["reward_health/rescored"] == 2
    found = score_entries.score_metrics(
        raw["reward"], raw, np.array([True, False, False, False])
    )
    assert [found[f"critic/score/{what}"] for what in ("mean", "max", "min")] == [
        0,
        0,
        0,
    ]  # the 1 was aborted
    assert found["reward_health/ok"] == 2
    # The sum of the scores is beyond float32, and their mean is not.
    large = ResponseScores(np.full(4, 3e38, np.float32), np.zeros(4, np.int8))
    found = score_entries.score_metrics(large, raw, np.zeros(4, bool))
    assert found["critic/score/mean"] == pytest.approx(3e38)


def test_each_grader_of_several_has_its_own_numbers() -> None:
    style = ResponseScores(
        np.array([4, np.nan, 2], np.float32), np.array([0, 7, 0], np.int8)
    )
    # The last response is left to the other one.
    right = ResponseScores(
        np.array([1, 0, np.nan], np.float32), np.array([0, 0, 4], np.int8)
    )
    found = measures.component_metrics(
        {"reward.components.style": style, "reward.components.right": right}, "reward"
    )
    names = ("mean", "max", "min", "failed", "none")
    assert [found[f"reward/style/{what}"] for what in names] == [3, 4, 2, 1, 0]
    assert [found[f"reward/right/{what}"] for what in names] == [0.5, 1, 0, 0, 1]


def test_preferences_by_hand() -> None:
    chosen, rejected = (
        np.array([math.log(3), 0.0, 1.0, 0.0]),
        np.array([0.0, math.log(3), 1.0, math.log(3)]),
    )
    found = held_out_measures.preference_metrics(chosen, rejected)
    assert found["val-core/held_out/pair_accuracy"] == pytest.approx(
        (1 + 0 + 0.5 + 0) / 4
    )
    assert found["val-core/held_out/log_loss"] == pytest.approx(
        (math.log(4 / 3) + 2 * math.log(4) + math.log(2)) / 4
    )
    # certain to 3/4 three times and right once; certain to 1/2 of the tie, which counts
    # half
    assert found["val-aux/held_out/calibration_error"] == pytest.approx(
        (3 * 0.75 - 1) / 4
    )
    assert found["val-aux/held_out/margin/mean"] == pytest.approx(-math.log(3) / 4)
    assert found["val-aux/held_out/num_pairs"] == 4
    assert math.isnan(
        held_out_measures.preference_metrics(np.array([math.nan]), np.zeros(1))[
            "val-aux/held_out/calibration_error"
        ]
    )


def test_labels_by_hand() -> None:
    """Of 2 x 3 pairs the desirable response is above in 4, and there is a tie."""
    rewards = np.array([1.0, 3.0, 0.0, 1.0, 2.0])
    is_desirable = np.array([True, True, False, False, False])
    auc = (1 + 0.5 + 0 + 3) / 6
    found = held_out_measures.label_metrics(rewards, is_desirable)
    assert found["val-core/held_out/auc"] == pytest.approx(auc)
    assert found["val-aux/held_out/num_responses"] == 5
    assert found["val-aux/held_out/chosen/mean"] == 2
    assert found["val-aux/held_out/rejected/mean"] == 1

    scores = held_out_measures.auc_scores(rewards, is_desirable)
    shares = np.array([1.5 / 3, 1, 1, 1.5 / 2, 1 / 2])
    weights = np.array([5 / 2, 5 / 2, 5 / 3, 5 / 3, 5 / 3])
    assert scores == pytest.approx(auc + weights * (shares - auc))
    # The order of the rows changes nothing, and reversed labels reverse the order.
    order = np.array([3, 0, 4, 1, 2])
    mixed = held_out_measures.auc_scores(rewards[order], is_desirable[order])
    assert mixed == pytest.approx(scores[order])
    reverse = held_out_measures.auc_scores(-rewards, is_desirable)
    assert reverse.mean() == pytest.approx(1 - auc)
    rewards[0] = math.nan
    assert np.isnan(held_out_measures.auc_scores(rewards, is_desirable)).all()


def test_the_spread_of_label_scores_is_that_of_the_area() -> None:
    """DeLong's variance is near that of the AUC over many draws of responses."""
    random = np.random.default_rng(0)
    is_desirable = np.arange(90) < 30
    means, variances = [], []
    for _ in range(2000):
        rewards = random.normal(size=90) + is_desirable
        scores = held_out_measures.auc_scores(rewards, is_desirable)
        means.append(scores.mean())
        variances.append(scores.var() / 90)
    assert np.mean(variances) == pytest.approx(np.var(means), rel=0.1)


def test_rewards_are_per_response_and_advantages_per_token() -> None:
    kl = {
        "importance_weighted": False,
        "place": "none",
        "estimator": None,
        "coefficient": None,
        "controller": None,
        "target": None,
        "horizon": None,
    }
    algorithm = AlgorithmConfig.model_validate({
        "name": "test", "advantage": "gae", "gamma": 1.0, "lam": 1.0, "whiten_advantages": True,
        "policy_loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "aggregation": "token_mean",
        "aggregation_horizon": None, "entropy_coefficient": 0.0, "kl": kl, "value_loss": None,
        "critic_warmup_steps": 0, "correction": NO_CORRECTION, "mismatch": NO_LIMIT, "truncated": "score", "sequence": "row",
    })  # fmt: skip
    rows = rollouts_of([2, 1, 1])
    rewards = rewards_of([1.0, 3.0, 100.0], in_loss=[True, True, False])
    credit = token_credit(
        algorithm,
        0.0,
        rows,
        rewards,
        None,
        None,
        values_of(rows, [0.0, 0.5, 1.0, 0.0], [0.0] * 3),
    )
    found = measures.credit_metrics(
        held(credit), rows.response_length, rows.trajectory_id, None
    )
    assert [found[f"critic/rewards/{what}"] for what in ("mean", "max", "min")] == [
        2,
        3,
        1,
    ]
    # returns (1, 1, 3), values (0, 0.5, 1), advantages (1, 0.5, 2)
    assert [
        found[f"critic/returns/{what}"] for what in ("mean", "max", "min")
    ] == pytest.approx([5 / 3, 3, 1])
    assert [found[f"critic/values/{what}"] for what in ("mean", "max", "min")] == [
        0.5,
        1,
        0,
    ]
    assert [
        found[f"critic/advantages/{what}"] for what in ("mean", "max", "min")
    ] == pytest.approx([3.5 / 3, 2, 0.5])
    # Whitened with a mean of 1 and a standard deviation of 0.5, as the policy learns
    # from them.
    whitened = measures.credit_metrics(
        held(credit), rows.response_length, rows.trajectory_id, Moments(4, 4, 5)
    )
    assert [
        whitened[f"critic/advantages/{what}"] for what in ("mean", "max", "min")
    ] == pytest.approx([1 / 3, 2, -1])
    # Clipped at 0.75 after that, as in the loss.
    clipped = measures.credit_metrics(
        held(credit), rows.response_length, rows.trajectory_id, Moments(4, 4, 5), 0.75
    )
    assert [
        clipped[f"critic/advantages/{what}"] for what in ("mean", "max", "min")
    ] == pytest.approx([1 / 3, 0.75, -0.75])
    residual, returns = np.array([1, 0.5, 2]), np.array([1, 1, 3])
    assert found["critic/vf_explained_var"] == pytest.approx(
        1 - residual.var() / returns.var()
    )


def test_the_kl_penalty_is_per_token() -> None:
    """Four responses with 2, 1, 0 and 3 tokens; the last one is not learned from and
    holds no numbers.
    """
    nothing = np.zeros(4, np.float32)
    credit = Credit(
        offsets=np.zeros(5, np.int64), advantages=np.zeros(0, np.float32), in_loss=np.array([True, True, True, False]),
        reward=nothing, kl=np.array([1.0, 0.25, 0.0, math.nan], np.float32),
        kl_bounded=np.array([1, 0, 0, 3]), is_positive=nothing > 0, advantage_statistics=np.zeros((4, 4)),
    )  # fmt: skip
    lengths = np.array([2, 1, 0, 3], np.int32)
    charge = measures.ReferenceDivergence.of(held(credit), lengths, np.arange(4))
    assert charge.metrics(0.5) == {
        "actor/reward_kl_penalty": (0.5 + 0.25) / 2, "actor/reward_kl_per_response": (1.0 + 0.25) / 2,
        "actor/reward_kl_penalty_coeff": 0.5,
        # One of the three tokens that are learned from.
        "actor/kl_clipfrac": 1 / 3,
    }  # fmt: skip
    assert charge.responses == 2
    # Of one trajectory they are one response, as if it had not been cut.
    whole = measures.ReferenceDivergence.of(
        held(credit), lengths, np.array([5, 5, 5, 6])
    )
    assert (whole.responses, whole.per_response, whole.bounded) == (1, 1.25, 1 / 3)
    assert whole.per_token == pytest.approx(1.25 / 3)
    nothing_sampled = np.zeros(4, np.int32)
    assert not measures.ReferenceDivergence.of(
        held(credit), nothing_sampled, np.arange(4)
    ).responses


def test_updates_are_averaged_over_tokens_and_norms_over_steps() -> None:
    def report(
        tokens: int, loss: float, x: float, norm: float, skipped: str | None = None
    ) -> UpdateReport:
        terms = {"actor/pg_loss": 2 * loss}
        return UpdateReport(
            LossReport(tokens, loss, {"actor/x": x}, terms=terms),
            StepReport(norm, 0.5, skipped),
        )

    first = [report(3, 1.0, 6.0, 2.0), report(1, 0.5, 2.0, 2.0)]  # two ranks
    second = [
        report(4, 2.5, 4.0, math.inf, "inf"),
        report(0, 0.0, 0.0, math.inf, "inf"),
    ]
    found = update_measures.update_metrics("actor", [first, second])
    assert found == {
        "actor/x": 12 / 8, "actor/loss": 2.0, "actor/pg_loss": 4.0, "actor/grad_norm": 2.0, "actor/lr": 0.5,
        "actor/skipped_steps": 1.0,
    }  # fmt: skip
    assert math.isnan(
        update_measures.update_metrics("actor", [second])["actor/grad_norm"]
    )


def test_utilisation_counts_the_slowest_rank_of_each_step() -> None:
    def report(seconds: float, flops: float, peak: float | None = 1e12) -> UpdateReport:
        memory = DeviceMemory(0, GIB, 2 * GIB, 80 * GIB)
        return UpdateReport(
            LossReport(),
            StepReport(1.0, 0.1),
            seconds,
            flops,
            peak,
            memory if peak else None,
        )

    # two ranks for 2 s, then for 1 s: 6 rank-seconds; 3 TFLOP of the 6 that the devices
    # could have done
    found = update_measures.utilisation_metrics(
        "actor", [[report(2, 1e12), report(1, 1e12)], [report(1, 1e12), report(1, 0)]]
    )
    assert found == {
        "perf/tflops/actor": 0.5, "perf/mfu/actor": 0.5,
        "actor/perf/max_memory_allocated_gb": 1.0, "actor/perf/max_memory_reserved_gb": 2.0,
        "actor/perf/device_memory_gb": 80.0,
    }  # fmt: skip
    assert update_measures.utilisation_metrics("critic", [[report(2, 1e12, None)]]) == {
        "perf/tflops/critic": 0.5
    }


def test_timings_per_token() -> None:
    timings = {"timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "timing_s/step": 9.0}
    found = measures.per_token_ms(timings, response_tokens=1000, all_tokens=2000)
    assert found == {
        "timing_per_token_ms/gen": 2.0,
        "timing_per_token_ms/update_actor": 0.5,
    }


def in_problems(core: CoreScores) -> HeldOutScores:
    """Main scores of which each is of a problem of its own."""
    numbers = range(len(core.names))
    return HeldOutScores(
        numbers, [""] * len(numbers), core.metrics, core.values[:, None]
    )


def reward_means(scored: ResponseScores, core: CoreScores) -> Metrics:
    parts = held_out_measures.reward_scores(scored, core, in_problems(core))
    return held_out_measures.reward_metrics(parts)


def test_accuracy_per_data_source() -> None:
    scored = ResponseScores(
        np.array([1, 0.5, np.nan], np.float32), np.array([0, 0, 1], np.int8)
    )
    sources = ["a", "b", "a"]

    def core(entries: list[Entries], built_in: set[str]) -> CoreScores:
        return held_out_measures.core_scores(sources, scored, entries, built_in, 4)

    plain = core([{}, {}, {}], set())
    # A failed score is left out of a mean reward.
    assert plain.means() == {
        "val-core/a/reward/mean@4": 1.0,
        "val-core/b/reward/mean@4": 0.5,
    }
    assert reward_means(scored, plain) == {}

    right = core([{}, {}, {}], {"a"})
    # It counts as wrong in an accuracy.
    assert right.means() == {
        "val-core/a/acc/mean@4": 0.5,
        "val-core/b/reward/mean@4": 0.5,
    }

    entries: list[Entries] = [{"acc": 0.0, "length": 2.0}, {"why": "no"}, {"acc": 1.0}]
    returned = core(entries, set())
    assert returned.means() == right.means()
    assert returned.values.tolist() == [0.0, 0.5, 1.0]
    # An episode that was dropped is no answer.
    scored.health[2] = ScoreHealth.DROPPED
    assert core([{}, {}, {}], {"a"}).means()["val-core/a/acc/mean@4"] == 1.0
    assert held_out_measures.missing_scores(scored) == {
        "val-aux/failed_scores": 0, "val-aux/dropped": 1,
    }  # fmt: skip
    assert core([{"acc": 1.0}, {}, {}], set()).means()["val-core/a/acc/mean@4"] == 1.0
    scored.health[2] = ScoreHealth.TIMEOUT
    assert reward_means(scored, returned) == {"val-aux/a/reward/mean@4": 1.0}
    (part,) = held_out_measures.reward_scores(scored, returned, in_problems(returned))
    assert list(part.problems) == [0, 2]
    assert np.array_equal(part.scores, [[1], [math.nan]], equal_nan=True)
    assert held_out_entry_metrics(sources, entries, 4) == {
        "val-aux/a/acc/mean@4": 0.5,
        "val-aux/a/length/mean@4": 2.0,
    }


def test_a_data_source_that_is_named_like_a_metric_loses_none() -> None:
    source = "b/reward/mean@"
    scored = ResponseScores(np.array([0.5], np.float32), np.array([0], np.int8))
    core = held_out_measures.core_scores([source], scored, [{"acc": 1.0}], set(), 4)
    assert core.means() == {f"val-core/{source}/acc/mean@4": 1.0}
    assert reward_means(scored, core) == {f"val-aux/{source}/reward/mean@4": 0.5}


def test_answers_have_the_number_of_the_first_response_with_them() -> None:
    entries: list[Entries] = [
        {"pred": "7"},
        {},
        {"pred": "8", "acc": 1.0},
        {"pred": "7"},
    ]
    answers = held_out_measures.numbered_answers(
        [*entries, {"pred": "7"}, {}, {}, {}], 4
    )
    assert answers is not None
    assert answers.tolist() == [[0, NO_ANSWER, 2, 0], [0, *[NO_ANSWER] * 3]]
    assert held_out_measures.numbered_answers([{}, {"why": "no"}], 2) is None


def test_lengths_and_cut_responses_are_of_a_data_source() -> None:
    scores = HeldOutScores(
        [0, 1, 2], ["a", "b", "c"], ["val-core/x/acc/mean@2"] * 3, np.zeros((3, 2))
    )
    lengths, cut = np.array([3, 5, 9, 9, 2, 4]), np.array([0, 0, 1, 1, 0, 1], bool)
    parts = held_out_measures.length_scores(scores, ["x", "y", "x"], lengths, cut)
    assert held_out_measures.length_metrics(parts) == {
        "val-aux/x/response_length/mean": 3.5,
        "val-aux/x/response_length/max": 5.0,
        "val-aux/x/response_length/min": 2.0,
        "val-aux/x/response_length/clip_ratio": 0.25,
        "val-aux/y/response_length/mean": 9.0,
        "val-aux/y/response_length/max": 9.0,
        "val-aux/y/response_length/min": 9.0,
        "val-aux/y/response_length/clip_ratio": 1.0,
    }
    assert held_out_measures.problem_counts(["x", "y", "x"]) == {
        "val-aux/x/num_prompts": 2.0,
        "val-aux/y/num_prompts": 1.0,
    }
    # Over two problems, as the file of the evaluation has them.
    interval = intervals(HeldOutScores.joined(parts))["val-aux/x/response_length/mean"]
    assert (interval.low, interval.mean, interval.high) == (3.0, 3.5, 4.0)


def test_entries_become_metrics_of_the_responses_that_have_them() -> None:
    alone = {0: '{"acc": 1.0, "why": "yes"}', 2: '{"acc": 0.0, "n": 3}'}
    entries = merged_entries(3, {"reward": alone})
    assert entries == [{"acc": 1.0, "why": "yes"}, {}, {"acc": 0.0, "n": 3}]
    assert entry_metrics(entries) == {"reward/acc/mean": 0.5, "reward/n/mean": 3.0}

    both = {
        "reward.components.style": {1: '{"n": 5}'},
        "reward.components.right": alone,
    }
    assert entry_metrics(merged_entries(3, both)) == {
        "reward/right/acc/mean": 0.5,
        "reward/right/n/mean": 3.0,
        "reward/style/n/mean": 5.0,
    }


def test_the_mismatch_is_of_the_updates_that_are_given_and_the_correction_of_all() -> (
    None
):
    def report(tokens: int, value: float, peak: float) -> UpdateReport:
        names = ("kl", "k3_kl", "chi2", "difference", "difference_squared", "trainer", "rollout", "trainer_squared",
                 "rollout_squared", "product")  # fmt: skip
        rows = (
            "count",
            "trainer_ppl",
            "rollout_ppl",
            "trainer_log_ppl",
            "rollout_log_ppl",
            "log_ppl_diff",
            "log_ppl_abs_diff",
            "ppl_ratio",
            "chi2",
        )
        sums = {f"{MISMATCH_PREFIX}token/{name}": tokens * value for name in names}
        sums |= {f"{MISMATCH_PREFIX}row/{name}": float(tokens) for name in rows}
        sums |= {CORRECTION_PREFIX + name: tokens * value for name in
                 ("ratio", "share", "high", "low", "weight", "deviation_squared", "left_out",
                  "row_deviation", "row_deviation_squared", "row_high", "row_low")}  # fmt: skip
        # Rows of two tokens each.
        sums[f"{CORRECTION_PREFIX}rows"] = tokens / 2
        peaks = {
            "weight": peak,
            "inverse_weight": 4.0,
            "ratio": 2 * peak,
            "inverse_ratio": 8.0,
            "row_weight": peak,
            "inverse_row_weight": 5.0,
            "row_deviation": peak,
        }
        sides = {"above": peak, "below": 0.0, "inverse_above": 1 / peak}
        sides |= {"inverse_below": 0.0, "difference": peak}
        maxima = {MISMATCH_PREFIX + name: value for name, value in sides.items()} | {
            CORRECTION_PREFIX + name: value for name, value in peaks.items()
        }
        return UpdateReport(LossReport(tokens, 0.0, sums, maxima), StepReport(1.0, 0.1))

    first, second = [report(3, 0.5, 0.5), report(1, 0.1, 0.25)], [report(4, 0.9, 2.0)]
    found = update_measures.step_mismatch_metrics([one.loss for one in first])
    assert found["rollout_corr/kl"] == pytest.approx((1.5 + 0.1) / 4)
    assert found["training/rollout_probs_diff_max"] == 0.5
    # The smallest is 0.25, whose inverse is the largest.
    assert found["rollout_corr/log_ppl_diff_max"] == 0.5
    assert found["rollout_corr/log_ppl_diff_min"] == 0.25
    # All of them infinite, and on one side.
    endless = report(3, 0.5, math.inf)
    found = update_measures.step_mismatch_metrics([endless.loss])
    assert found["rollout_corr/log_ppl_diff_min"] == math.inf
    everything = update_measures.update_metrics("actor", [first, second])
    assert everything["rollout_corr/rollout_is_mean"] == pytest.approx(
        (1.5 + 0.1 + 3.6) / 8
    )
    assert (
        everything["rollout_corr/rollout_is_max"],
        everything["rollout_corr/rollout_is_min"],
    ) == (2.0, 0.25)
    assert (
        everything["rollout_corr/ratio_max"],
        everything["rollout_corr/ratio_min"],
    ) == (4.0, 0.125)
    assert everything["rollout_corr/rollout_is_seq_mean"] == pytest.approx(
        1 + (1.5 + 0.1 + 3.6) / 4
    )
    assert everything["rollout_corr/rollout_is_seq_max"] == 2.0
    assert everything["rollout_corr/rollout_is_seq_min"] == 0.2
    assert not any(
        name.startswith((MISMATCH_PREFIX, CORRECTION_PREFIX)) or name in found
        for name in everything
    )
    assert update_measures.step_mismatch_metrics([]) == {}
    nothing = LossReport(
        0, 0.0, dict.fromkeys(first[0].loss.sums, 0.0)
    )  # ranks without a row that is learned from
    assert update_measures.step_mismatch_metrics([nothing, nothing]) == {}
