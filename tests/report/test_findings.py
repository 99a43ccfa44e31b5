"""Findings of recorded runs, and of lines whose numbers are written here."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from verl_ray.report.evidence import Finding
from verl_ray.report.findings import RULES, findings, is_beyond_plan
from verl_ray.tracking.history import RunSegment

RECORDED = Path(__file__).parent / "recorded"
Lines = list[dict[str, float]]
Tree = dict[str, object]


def kinds(seen: Sequence[Finding]) -> set[str]:
    return {finding.kind for finding in seen}


# ----------------------------------------------------------------------- recorded runs


def recorded(name: str) -> list[Finding]:
    """Findings of a run of the command `train`, whose numbers have four digits.

    The first line of a file is its configuration, its history and the faults of its
    processes, if it had any; the others are those of metrics.jsonl.
    """
    text = gzip.decompress((RECORDED / f"{name}.jsonl.gz").read_bytes()).decode()
    head, *lines = map(json.loads, text.splitlines())
    # null stands for a number that is not finite.
    numbers = [
        {key: np.nan if value is None else value for key, value in line.items()}
        for line in lines
    ]
    history = [RunSegment(**segment) for segment in head["history"]]
    return findings(numbers, head["config"], history, head.get("faults", ()))


HEALTHY = (
    "agent_grpo",
    "agent_grpo_longer",
    "agent_ppo",
    "cispo_asynchronous",
    "distill",
    "dpo",
    "grpo",
    "gspo",
    "ppo",
    "reward_model",
    "rloo_one_step_off",
    "sft",
)

FAULTY: dict[str, set[str]] = {
    # GRPO on sums of up to three digits, with rollout.max_response_tokens=3.
    "cut": {"responses_cut"},
    # PPO with actor.optimizer.lr=2e-2 in place of 3e-4.
    "learning_rate": {
        "same_scores",
        "reward_collapse",
        "entropy_collapse",
        "kl_runaway",
    },
    # GRPO on sums whose reward counts the digit 1, while held-out sums have to be right.
    "reward_hacking": {
        "mostly_cut",
        "over_optimisation",
        "kl_runaway",
        "groups_without_spread",
    },
    # A function that raises an exception for every third sum.
    "failing_grader": {"failed_scores"},
    # SFT of a model that can add, with actor.optimizer.lr=0.3.
    "diverging": {"loss_rises"},
    # Episodes of several turns, with agent.max_turns=1.
    "limited_turns": {"same_scores", "episode_limits", "responses_cut"},
    # Distillation from a model of 94% with actor.optimizer.lr=1e-2 in place of 3e-4.
    "teacher_left": {"teacher_left", "same_scores", "reward_collapse"},
    # DPO of an untrained model with actor.optimizer.lr=3e-2 in place of 3e-3.
    "chosen_falls": {"chosen_falls"},
    # SFT for 60 epochs of 64 sums.
    "overfitting": {"overfitting"},
    # The model of agent_quickstart without its warm start.
    "untrained_model": {"same_scores"},
    # PPO with critic.optimizer.lr=0.3 in place of 1e-3.
    "blind_critic": {"blind_critic"},
    # PPO whose grader waits 50 ms for each response.
    "slow_grader": {"phase_dominates"},
    # GRPO on 16 sums, in steps of 32.
    "few_examples": {"few_examples"},
    # GRPO on 32 sums, in steps of 32.
    "epoch_per_step": {"epoch_per_step"},
    # GRPO with algorithm.entropy_coefficient=0.5 and rollout.max_response_tokens=64: the
    # policy becomes uniform, and so rarely ends a response.
    "lengths_exploding": {
        "lengths_exploding",
        "same_scores",
        "reward_collapse",
        "kl_runaway",
    },
    # GRPO with actor.epochs=4 and actor.optimizer.lr=1e-2.
    "large_updates": {
        "large_updates",
        "same_scores",
        "reward_collapse",
        "kl_runaway",
        "responses_cut",
    },
    # GRPO with schedule=asynchronous, rollout.staleness=4 and actor.optimizer.lr=1e-2.
    "mismatch": {
        "mismatch",
        "large_updates",
        "same_scores",
        "reward_collapse",
        "entropy_collapse",
        "kl_runaway",
    },
    # PPO with critic.optimizer.lr=1e18, whose values are not finite from step 2 on.
    "skipped_updates": {"skipped_updates"},
    # GRPO whose engine computes in bfloat16, with a correction that rejects every row:
    # algorithm.correction.lower=0.999999 and upper=1.000001, of sequences.
    "zero_gradient": {"zero_gradient/actor"},
    # GRPO with rollout.temperature=0.01.
    "no_spread": {"no_spread"},
    # Episodes whose environment raises an exception for every third problem.
    "episode_faults": {"episode_faults", "failed_scores"},
    # GRPO beside another process, which takes what memory is left up to 91%.
    "memory_near_limit": {"memory_near_limit"},
    # GRPO whose driver is killed in step 12, and starts again with the checkpoint of 10.
    "killed_driver": {"restarts"},
    # GRPO whose grader and whose engine are killed in steps 6 and 15. The weight sync of
    # step 15 waits for the engine, which takes 38% of the time of the run.
    "restarts": {"restarts"},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name: str) -> None:
    assert list(map(str, recorded(name))) == []


@pytest.mark.parametrize("name", FAULTY)
def test_a_run_with_a_fault_has_the_findings_of_it(name: str) -> None:
    assert kinds(recorded(name)) == FAULTY[name]


@pytest.mark.parametrize(
    ("form", "staleness", "advice"),
    [
        ("none", 4, "algorithm.correction.form = none"),
        ("two_policy", 4, "rollout.staleness = 4"),
        ("three_policy", 0, "rollout.dtype = bfloat16"),
    ],
)
def test_no_run_is_advised_to_set_what_it_has(
    form: str, staleness: int, advice: str
) -> None:
    config = {
        **RL,
        "algorithm": {"correction": {"form": form}},
        "rollout": {"staleness": staleness, "dtype": "bfloat16"},
    }
    lines = run_of(rollout_corr__k3_kl=ten_and_ten(0.001, 0.051))
    (mismatch,) = findings(lines, config, [], ())
    assert mismatch.text.endswith(f". Look at {advice}")
    assert mismatch.setting == advice.partition(" =")[0]


def test_each_rule_has_a_recorded_run_with_its_fault() -> None:
    seen = {
        kind.partition("/")[0] for run_kinds in FAULTY.values() for kind in run_kinds
    }
    # What is idle is told of GPUs alone, and all of these runs were made without any.
    assert {rule.kind for rule in RULES} - seen == {"idle_devices"}


# -------------------------------------------------------- either side of each threshold

RL: Tree = {
    "task": "rl",
    "algorithm": {"advantage": "grpo", "aggregation": "token_mean"},
    "placement": {"kind": "separate"},
    "actor": {"optimizer": {"lr": 1e-6}},
    "agent": {"max_turns": 4},
}
SFT: Tree = {"task": "sft"}
DPO: Tree = {"task": "dpo"}


def run_of(**columns: float | Sequence[float]) -> Lines:
    """Lines of steps from 1 on; `__` in a name stands for `/`."""
    count = max(len(np.atleast_1d(column)) for column in columns.values())
    lines: Lines = [{"training/global_step": float(step + 1)} for step in range(count)]
    for name, column in columns.items():
        for line, value in zip(lines, np.broadcast_to(column, count), strict=True):
            line[name.replace("__", "/")] = float(value)
    return lines


def ten_and_ten(first: float, second: float) -> list[float]:
    return [first] * 10 + [second] * 10


def scored(second: float) -> Lines:
    return run_of(
        critic__score__mean=ten_and_ten(0.8, second),
        critic__score__min=0.0,
        critic__score__max=1.0,
    )


def entropy(second: float, score: float = 0.5, first: float = 1.0) -> Lines:
    return run_of(
        actor__entropy_per_token=ten_and_ten(first, second),
        critic__score__mean=score,
        critic__score__min=0.0,
        critic__score__max=1.0,
    )


def lengths(second: float, score: float = 0.5) -> Lines:
    return run_of(
        response_length__mean=ten_and_ten(10, second),
        critic__score__mean=ten_and_ten(0.5, score),
    )


def held_out(
    last: float, score: float = 0.7, metric: str = "val-core/sums/acc/mean@1"
) -> Lines:
    """Three evaluations after the first, with 500 problems each."""
    lines = run_of(critic__score__mean=[*[0.5] * 10, *[score] * 20])
    lines.insert(0, {"training/global_step": 0.0})
    for step, accuracy in {0: 0.4, 10: 0.6, 20: last, 30: last}.items():
        lines[step][metric] = accuracy
        lines[step]["val-aux/num_prompts"] = 500.0
    return lines


def best_of_all() -> Lines:
    lines = held_out(0.998)
    lines[10]["val-core/sums/acc/mean@1"] = 1.0
    return lines


def held_out_loss(last: float, training: float = 0.5) -> Lines:
    lines = run_of(actor__loss=[*[0.9] * 10, *[training] * 20])
    for step, loss in {10: 0.8, 20: last, 30: last}.items():
        lines[step - 1]["val-core/held_out/loss"] = loss
    return lines


def devices(**columns: float | Sequence[float]) -> Lines:
    return run_of(actor__perf__max_memory_reserved_gb=[10.0] * 10, **columns)


def episodes(turns: float, tokens: float, parse: float = 0.0) -> Lines:
    return run_of(
        episode__ends__max_turns=[turns] * 10,
        episode__ends__max_tokens=tokens,
        episode__ends__parse_error=parse,
        episode__ends__environment_failed=0.0,
    )


Case = tuple[Lines, Lines, Tree, tuple[int, int, float, float, str]]

STEP_OF_32: Tree = {**RL, "data": {"prompts_per_step": 32}}

CASES: dict[str, Case] = {
    "few_examples": (
        run_of(training__num_examples=[33.0] * 3),
        run_of(training__num_examples=[31.0] * 3),
        STEP_OF_32,
        (1, 3, 31, 32, "data.prompts_per_step"),
    ),
    "epoch_per_step": (
        run_of(training__num_examples=[33.0] * 3),
        run_of(training__num_examples=[32.0] * 3),
        STEP_OF_32,
        (1, 3, 32, 32, "data.prompts_per_step"),
    ),
    "mostly_cut": (
        run_of(response_length__clip_ratio=[0.89] * 3),
        run_of(response_length__clip_ratio=[0.9, 0.91, 0.9]),
        RL,
        (1, 3, 0.91, 0.9, "rollout.max_response_tokens"),
    ),
    "same_scores": (
        run_of(
            critic__score__max=[0.5] * 3, critic__score__min=0.4, reward_health__ok=8
        ),
        run_of(
            critic__score__max=[0.5] * 3, critic__score__min=0.5, reward_health__ok=8
        ),
        RL,
        (1, 3, 0.5, 0.5, "reward"),
    ),
    "no_spread": (
        run_of(frac_reward_zero_std=[0.99] * 3),
        run_of(frac_reward_zero_std=[1.0] * 3),
        RL,
        (1, 3, 1.0, 1.0, "rollout.temperature"),
    ),
    "zero_gradient": (
        run_of(actor__grad_norm=[1e-9] * 3),
        run_of(actor__grad_norm=[0.0] * 3),
        RL,
        (1, 3, 0.0, 0.0, "algorithm.correction.form"),
    ),
    "failed_scores": (
        run_of(reward_health__ok=[6.0] * 3, reward_health__timeout=0.0),
        run_of(reward_health__ok=[6.0] * 3, reward_health__timeout=[0, 2, 1]),
        RL,
        (2, 3, 2.0, 0.0, "reward"),
    ),
    # Half of 0.8 is 0.4. The median over steps 9 to 13 is the first with the new value.
    "reward_collapse": (
        scored(0.41),
        scored(0.39),
        RL,
        (11, 18, 0.39, 0.4, "actor.optimizer.lr"),
    ),
    "entropy_collapse": (
        entropy(0.11),
        entropy(0.09),
        RL,
        (11, 18, 0.09, 0.1, "algorithm.clip_high"),
    ),
    "kl_runaway": (
        run_of(actor__reward_kl_penalty=ten_and_ten(0.1, 0.99)),
        run_of(actor__reward_kl_penalty=ten_and_ten(0.1, 1.01)),
        RL,
        (11, 18, 1.01, 1.0, "algorithm.kl.coefficient"),
    ),
    "teacher_left": (
        run_of(distill__kl=ten_and_ten(1.0, 1.49)),
        run_of(distill__kl=ten_and_ten(1.0, 1.51)),
        RL,
        (11, 18, 1.51, 1.5, "actor.optimizer.lr"),
    ),
    "chosen_falls": (
        run_of(logps__chosen=ten_and_ten(-10, -14.9), rewards__margins=[1.0] * 20),
        run_of(logps__chosen=ten_and_ten(-10, -15.1), rewards__margins=[1.0] * 20),
        DPO,
        (11, 18, -15.1, -15.0, "actor.optimizer.lr"),
    ),
    "large_updates": (
        run_of(actor__ppo_kl=ten_and_ten(0.01, 0.09)),
        run_of(actor__ppo_kl=ten_and_ten(0.01, 0.11)),
        RL,
        (11, 18, 0.11, 0.1, "actor.optimizer.lr"),
    ),
    "lengths_exploding": (
        lengths(19),
        lengths(21),
        RL,
        (11, 18, 21, 20, "algorithm.aggregation"),
    ),
    "responses_cut": (
        run_of(response_length__clip_ratio=ten_and_ten(0.0, 0.29)),
        run_of(response_length__clip_ratio=ten_and_ten(0.0, 0.31)),
        RL,
        (11, 18, 0.31, 0.3, "rollout.max_response_tokens"),
    ),
    "groups_without_spread": (
        run_of(frac_reward_zero_std=ten_and_ten(0.5, 0.79)),
        run_of(frac_reward_zero_std=ten_and_ten(0.5, 0.81)),
        RL,
        (11, 18, 0.81, 0.8, "algorithm.dynamic_sampling"),
    ),
    "mismatch": (
        run_of(rollout_corr__k3_kl=ten_and_ten(0.001, 0.049)),
        run_of(rollout_corr__k3_kl=ten_and_ten(0.001, 0.051)),
        RL,
        (11, 18, 0.051, 0.05, "algorithm.correction.form"),
    ),
    # The mean of 0.6 and 0.525 is 0.5625, so the standard error of a difference in 500
    # problems each is sqrt(2 * 0.5625 * 0.4375 / 500) = 0.03137. Two evaluations came
    # before the last two, so 1.25% of a normal distribution is beyond 2.2414 of them.
    "over_optimisation": (
        held_out(0.535),
        held_out(0.525),
        RL,
        (20, 30, 0.525, 0.5297, "reward.kind"),
    ),
    # The first median with a middle from step 50 on is that of steps 40 to 59.
    "blind_critic": (
        run_of(critic__vf_explained_var=[0.002] * 80),
        run_of(critic__vf_explained_var=[0.0] * 80),
        RL,
        (50, 71, 0.0, 0.001, "critic.optimizer.lr"),
    ),
    "skipped_updates": (
        run_of(critic__skipped_steps=[0.0] * 9),
        run_of(critic__skipped_steps=[0, 0, 0, 0, 0, 0, 1, 0, 0]),
        RL,
        (7, 7, 1.0, 0.0, "critic.optimizer.lr"),
    ),
    "loss_rises": (
        run_of(actor__loss=ten_and_ten(1.0, 1.19)),
        run_of(actor__loss=ten_and_ten(1.0, 1.21)),
        SFT,
        (11, 18, 1.21, 1.2, "actor.optimizer.lr"),
    ),
    # 1.05 * 0.8 = 0.84
    "overfitting": (
        held_out_loss(0.835),
        held_out_loss(0.845),
        SFT,
        (20, 30, 0.845, 0.84, "run.total_steps"),
    ),
    "episode_limits": (
        episodes(0.3, 0.19),
        episodes(0.3, 0.21),
        RL,
        (3, 8, 0.51, 0.5, "agent.max_turns"),
    ),
    "episode_faults": (
        episodes(0.0, 0.0, 0.09),
        episodes(0.0, 0.0, 0.11),
        RL,
        (3, 8, 0.11, 0.1, "agent.tool_parser"),
    ),
    "phase_dominates": (
        run_of(timing_s__step=[10.0] * 10, timing_s__update_weights=2.4),
        run_of(timing_s__step=[10.0] * 10, timing_s__update_weights=2.6),
        RL,
        (1, 10, 2.6, 2.5, "rollout.sync.transport"),
    ),
    "idle_devices": (
        devices(perf__rollouts_idle=0.49, perf__both_idle=0.24),
        devices(perf__rollouts_idle=0.51, perf__both_idle=0.24),
        RL,
        (3, 8, 0.51, 0.5, "rollout.num_replicas"),
    ),
    "memory_near_limit": (
        devices(actor__perf__device_memory_gb=11.2),
        devices(actor__perf__device_memory_gb=11.0),
        RL,
        (3, 8, 10.0, 9.9, "actor.backend.micro_batch_tokens_per_rank"),
    ),
    "restarts": (
        run_of(rollout__restarts=[0.0] * 5),
        run_of(rollout__restarts=[0, 0, 2, 0, 1]),
        RL,
        (3, 5, 2.0, 0.0, "run.recovery.max_restarts"),
    ),
}


def test_each_rule_has_a_case() -> None:
    assert list(CASES) == [rule.kind for rule in RULES]


@pytest.mark.parametrize("kind", CASES)
def test_a_rule_holds_beyond_its_threshold_alone(kind: str) -> None:
    below, beyond, config, expected = CASES[kind]
    assert findings(below, config) == []

    (finding,) = findings(beyond, config)
    first, last, value, threshold, setting = expected
    assert (finding.kind.partition("/")[0], finding.setting) == (kind, setting)
    assert (finding.step, finding.last_step) == (first, last)
    assert finding.value == pytest.approx(value)
    assert finding.threshold == pytest.approx(threshold, abs=2e-4)
    assert finding.metric in beyond[-1] and setting in finding.text


@pytest.mark.parametrize(
    "lines",
    [
        # Who is certain and right has not collapsed.
        entropy(0.01, score=0.95),
        # A policy that is certain from the beginning has nothing to lose.
        entropy(0.0, first=0.0099),
        # A critic that explains something by now was only slow.
        run_of(critic__vf_explained_var=[0.0] * 80 + [0.01] * 20),
        # Longer responses that earn more are what was wanted.
        lengths(40, score=0.6),
        # Held-out accuracy that falls with the training score is not over-optimised.
        held_out(0.4, score=0.45),
        # Of 500 problems 499 are as good as all.
        best_of_all(),
        # Nobody knows the scale of a mean reward without scores in training, and the
        # best of k is seen in the mean, too.
        held_out(0.1, metric="val-core/sums/reward/mean@1"),
        held_out(0.1, metric="val-core/sums/acc/best@4/mean"),
        # Two steps of twenty say nothing.
        run_of(actor__ppo_kl=[0.0] * 9 + [5.0, 5.0] + [0.0] * 9),
        # A critic may need some steps.
        run_of(critic__vf_explained_var=[-9.0] * 40 + [0.5] * 40),
        # Four steps are too few for anything but what learns nothing.
        run_of(actor__ppo_kl=[9.0] * 4, response_length__clip_ratio=0.5),
    ],
)
def test_what_looks_alike_is_no_finding(lines: Lines) -> None:
    assert findings(lines, RL) == []


def test_held_out_scores_fall_by_data_source() -> None:
    # The case of `CASES`, with a source of 20 problems, for which it is chance, and
    # with the best of four, which falls as well.
    lines = held_out(0.525)
    for line in lines:
        if (accuracy := line.get("val-core/sums/acc/mean@1")) is not None:
            line["val-core/others/acc/mean@1"] = accuracy
            line["val-core/sums/acc/best@4/mean"] = accuracy
    # Nobody knows how many of the 500 problems are sums.
    assert findings(lines, RL) == []

    for line in lines:
        if "val-aux/num_prompts" in line:
            line["val-aux/sums/num_prompts"] = 480.0
            line["val-aux/others/num_prompts"] = 20.0
    (finding,) = findings(lines, RL)
    assert finding.kind == "over_optimisation"
    assert finding.metric == "val-core/sums/acc/mean@1"


def test_mean_rewards_fall_on_the_scale_of_the_scores_in_training() -> None:
    # The case of `CASES` with scores of -1 and 3 in place of 0 and 1.
    def rewarded(last: float, metric: str = "val-core/sums/reward/mean@1") -> Lines:
        lines = held_out(last, metric=metric)
        for line in lines:
            if metric in line:
                line[metric] = 4 * line[metric] - 1
            line |= {"critic/score/min": -1.0, "critic/score/max": 3.0}
        return lines

    assert findings(rewarded(0.535), RL) == []
    (finding,) = findings(rewarded(0.525), RL)
    assert finding.kind == "over_optimisation"
    assert finding.value == pytest.approx(1.1)
    assert finding.threshold == pytest.approx(4 * 0.5297 - 1, abs=1e-3)

    # Graders of held-out problems alone have a scale that nobody knows.
    functions = {"functions": {"default": "numeric"}}
    assert findings(rewarded(0.525), {**RL, "evaluation": functions}) == []
    aside = "val-aux/sums/reward/mean@1"
    assert findings(rewarded(0.525, aside), RL) == []
    chosen = {**RL, "run": {"best_metric": aside}}
    assert kinds(findings(rewarded(0.525, aside), chosen)) == {"over_optimisation"}


def test_memory_beyond_its_plan_is_more_than_a_margin() -> None:
    # 1.2 * 2 GiB and a quarter of one.
    assert is_beyond_plan(2.66, 2.0) and not is_beyond_plan(2.64, 2.0)
    assert not is_beyond_plan(np.nan, 2.0) and not is_beyond_plan(2.66, np.nan)


def test_the_best_of_many_evaluations_is_high_by_chance() -> None:
    # After 22 evaluations 0.125% of a normal distribution is beyond 3.02 standard
    # errors of 0.0314, so a fall by 0.075 is none, and one by 0.1 is.
    def evaluated(last: float) -> Lines:
        lines = held_out(last)
        for step in range(11, 20):
            lines[step] |= {**lines[0], "training/global_step": float(step)}
        for step in range(1, 10):
            lines[step] |= {**lines[0], "training/global_step": float(step)}
        return lines

    assert findings(evaluated(0.525), RL) == []
    assert kinds(findings(evaluated(0.5), RL)) == {"over_optimisation"}


def test_a_fall_within_the_noise_is_no_collapse() -> None:
    def noisy(spread: float) -> Lines:
        # All medians are the first number of three. Two in three neighbours differ by
        # `spread`, which is the median difference.
        around = [0.0, spread, -spread] * 10
        scores = [0.5 + x for x in around] + [0.2 + x for x in around]
        return run_of(
            critic__score__mean=scores, critic__score__min=0.0, critic__score__max=1.0
        )

    # The score falls by 0.3, and 4 * 1.4826 / sqrt(2) = 4.1934 times 0.07 is 0.294, times
    # 0.073 it is 0.306.
    assert kinds(findings(noisy(0.07), RL)) == {"reward_collapse"}
    assert findings(noisy(0.073), RL) == []


def test_a_loss_near_0_may_double() -> None:
    def losses(last: float) -> Lines:
        return run_of(actor__loss=[3.0, *[0.5] * 10, *[last] * 10])

    # The loss fell by 2.5, and a tenth of that is 0.25.
    assert findings(losses(0.74), SFT) == []
    assert kinds(findings(losses(0.76), SFT)) == {"loss_rises"}


def test_nothing_is_idle_where_all_share_the_cores() -> None:
    lines = run_of(perf__rollouts_idle=[0.9] * 10, perf__both_idle=0.9)
    assert findings(lines, RL) == []
    colocated = {**RL, "placement": {"kind": "colocated"}}
    taking_turns = devices(perf__rollouts_idle=0.9, perf__both_idle=0.1)
    assert findings(taking_turns, colocated) == []
    waiting = devices(perf__rollouts_idle=0.9, perf__both_idle=0.26)
    assert kinds(findings(waiting, colocated)) == {"idle_devices"}


def test_the_limit_of_the_configuration_comes_before_that_of_the_rule() -> None:
    limit = {"metric": "staleness/fresh_k3_kl", "limit": 0.01, "then": "stop"}
    config = {**RL, "algorithm": {"mismatch": limit}}
    lines = run_of(staleness__fresh_k3_kl=[0.02] * 10, rollout_corr__k3_kl=0.9)
    (finding,) = findings(lines, config)
    assert (finding.metric, finding.threshold) == ("staleness/fresh_k3_kl", 0.01)


def segment(first: int, last: int | None, ending: str) -> RunSegment:
    return RunSegment(0.0, 1.0, first, last, ending)  # type: ignore[arg-type]


def test_processes_that_were_lost_are_counted() -> None:
    stopped = [segment(0, 4, "stopped"), segment(4, 9, "finished")]
    assert findings([], RL, stopped) == []
    lost = [
        segment(0, 4, "failed"),
        segment(4, None, "killed"),
        segment(6, 9, "finished"),
    ]
    (finding,) = findings([], RL, lost)
    assert str(finding).startswith(
        "the driver failed or was killed in 2 of its 3 starts."
    )
    assert (finding.step, finding.value, finding.metric) == (4, 2, "history.jsonl")
    # The second one noted no step, and the third went on from step 6.
    assert finding.last_step == 6


def test_processes_that_came_back_while_the_driver_went_on_are_counted() -> None:
    def fault(role: str, kind: str, step: object, cure: str) -> dict[str, object]:
        return {"role": role, "kind": kind, "step": step, "cure": cure}

    ended = [
        fault("actor", "defect", 9, "stop"),
        fault("ray", "cluster", 5, "start again"),
    ]
    assert findings([], RL, faults=[*ended, {"kind": "died"}]) == []

    restored = [
        fault("actor", "died", 3, "go back"),
        fault("actor", "died", 4, "go back"),
        fault("reward", "stalled", 6, "restart"),
    ]
    (finding,) = findings([], RL, [segment(0, 9, "finished")], [*restored, *ended])
    assert str(finding) == (
        "processes were lost and started again: actor died 2, reward stalled 1. Read"
        " `history.jsonl` and `faults.jsonl`; the limit is run.recovery.max_restarts"
        " (3 steps, 3 to 6)"
    )
    assert (finding.kind, finding.value) == ("restarts", 3)
    assert finding.metric == "faults.jsonl"


def test_a_cause_stands_for_the_rule_that_says_less() -> None:
    cut = run_of(response_length__clip_ratio=[0.95] * 10)
    assert kinds(findings(cut, RL)) == {"mostly_cut"}
    equal = run_of(frac_reward_zero_std=[1.0] * 10)
    assert kinds(findings(equal, RL)) == {"no_spread"}


def test_the_worst_comes_first_and_names_values_and_settings() -> None:
    lines = [
        {**cut, **score}
        for cut, score in zip(CASES["responses_cut"][1], scored(0.39), strict=True)
    ]
    first, second = findings(lines, RL)
    assert (first.severity, second.severity) == ("critical", "warning")
    assert str(first) == (
        "critic/score/mean came to 0.39, below 0.4. Lower"
        " actor.optimizer.lr = 1e-06, or raise algorithm.kl.coefficient, and begin"
        " again with a checkpoint from before (8 steps, 11 to 18)"
    )


@pytest.mark.parametrize("config", [{}, RL, SFT])
def test_an_empty_record_has_no_finding(config: Tree) -> None:
    nothing: list[Callable[[], Lines]] = [list, lambda: [{"training/global_step": 0.0}]]
    for lines in nothing:
        assert findings(lines(), config) == []


def test_numbers_that_are_not_finite_are_passed_over() -> None:
    lines = run_of(critic__score__mean=[np.nan] * 10, actor__ppo_kl=[np.nan] * 10)
    assert findings(lines, RL) == []
