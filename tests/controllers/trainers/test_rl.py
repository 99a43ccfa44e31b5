"""Whole steps of the driver, on real engines and real vLLM."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from controllers.trainers.rl import Trainer
from controllers.trainers.updates import LearnerBatch
from tests.algorithms.choices import (
    REWARDED,
    TAKES_SEVERAL_UPDATES,
    learning_at_once,
)
from tests.controllers.conftest import MakeTrainer
from tests.controllers.runs import (
    Inputs,
    Samplers,
    lasting,
    produced,
    replicas_of,
    start_some,
    training,
)
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import read
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import MismatchError, RewardError
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.shaping import response_scores
from verl_ray.weight_sync.fingerprint import Fingerprint
from workers.actor import ActorWorker

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]

FirstStep = Callable[[str, str], tuple[list[int], dict[str, float]]]
SETTINGS = {
    "one update": [],
    "four updates": ["actor.mini_batch_size=16", "actor.epochs=2"],
}
LAYOUTS = {
    "engine, 1 rank": [],
    "engine, 2 ranks": ["actor.num_ranks=2"],
    "fsdp, 1 rank": ["backend=fsdp"],
    "fsdp, 2 ranks": ["backend=fsdp", "actor.num_ranks=2"],
    "a process for every role": ["backend@critic.backend=fsdp", "placement=separate"],
}


@pytest.fixture(scope="module")
def first_step(
    inputs: Inputs, samplers: Samplers, tmp_path_factory: pytest.TempPathFactory
) -> FirstStep:
    """The tokens of some rollouts, and the metrics of the first step."""
    found: dict[tuple[str, str], tuple[list[int], dict[str, float]]] = {}

    def first(setting: str, layout: str) -> tuple[list[int], dict[str, float]]:
        if (setting, layout) not in found:
            folder = tmp_path_factory.mktemp("first")
            config = inputs.config("ppo", folder, *SETTINGS[setting], *LAYOUTS[layout])
            with training(config, samplers) as trainer:
                trainer.publish(0)
                drawn = produced(trainer, 4, trainer.producer.training_generation())
                found[setting, layout] = (
                    read(drawn.rollouts, 60).tokens.tolist(),
                    trainer.step(1),
                )
        return found[setting, layout]

    return first


OWN = """
import torch

def centered(rewards, group, valid, *, trajectory):
    members = [rewards[(group == g) & valid] for g in group]
    return [reward - each.mean() for reward, each in zip(rewards, members)]

def clipped(tokens, *, clip_low, clip_high):
    ratio = tokens.log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(-tokens.advantages * ratio, -tokens.advantages * bounded)
"""


def test_functions_of_a_user_learn_what_those_of_the_package_do(
    inputs: Inputs, samplers: Samplers, tmp_path: Path
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    metrics = []
    for name, advantage, loss in (
        ("ours", "dr_grpo", "ppo_clip"),
        ("own", f"{file}:centered", f"{file}:clipped"),
    ):
        (tmp_path / name).mkdir()
        config = inputs.config(
            "grpo", tmp_path / name, f"algorithm.advantage={advantage}",
            f"algorithm.policy_loss={loss}", "algorithm.dual_clip=null", "actor.mini_batch_size=16",
        )  # fmt: skip
        with training(config, samplers) as trainer:
            trainer.publish(0)
            metrics.append(trainer.step(1))
    ours, own = metrics
    for key in (
        "actor/pg_loss",
        "actor/grad_norm",
        "critic/advantages/max",
        "actor/ppo_kl",
    ):
        assert own[key] == pytest.approx(ours[key], rel=1e-5, abs=1e-8), key
    assert own["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    "setting",
    # Four updates are one update with more behind it.
    [pytest.param("one update", marks=pytest.mark.slow), "four updates"],
)
@pytest.mark.parametrize(
    "layout",
    # What shards over two ranks is the hardest of them; the contract of engines
    # compares the numbers of each layout.
    [
        pytest.param("engine, 2 ranks", marks=pytest.mark.slow),
        pytest.param("fsdp, 1 rank", marks=pytest.mark.slow),
        "fsdp, 2 ranks",
    ],
)
def test_the_first_step_is_the_same_on_every_backend_and_number_of_ranks(
    first_step: FirstStep, setting: str, layout: str
) -> None:
    check_first_step(first_step, setting, layout)


@pytest.mark.slow
def test_the_first_step_is_the_same_where_every_role_is_alone(
    first_step: FirstStep,
) -> None:
    check_first_step(first_step, "four updates", "a process for every role")


def check_first_step(first_step: FirstStep, setting: str, layout: str) -> None:
    expected_tokens, expected = first_step(setting, "engine, 1 rank")
    tokens, metrics = first_step(setting, layout)
    assert tokens == expected_tokens
    assert expected["actor/grad_norm"] > 1e-3 and expected["critic/grad_norm"] > 1e-3
    assert lasting(metrics) == pytest.approx(
        lasting(expected), rel=1e-3, abs=1e-6, nan_ok=True
    )


# --------------------------------------------------------------------------- algorithms


FOLDER = Path(__file__).parents[3] / "configs" / "algorithm"
ALGORITHMS = {
    name: yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in REWARDED
}


def allows(name: str, setting: str) -> bool:
    """Whether an algorithm takes so many updates on the same rollouts."""
    if setting == "four updates":
        return POLICY_LOSSES[ALGORITHMS[name]["policy_loss"]].has_ratio
    return name not in TAKES_SEVERAL_UPDATES


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        # Four updates are one update with more behind it.
        pytest.param(name, setting, marks=pytest.mark.slow)
        if setting == "one update" and allows(name, "four updates")
        else (name, setting)
        for name in ALGORITHMS
        for setting in SETTINGS
        if allows(name, setting)
    ],
)
def test_every_algorithm_takes_steps(
    trainer: MakeTrainer, name: str, setting: str
) -> None:
    choice = [*learning_at_once(name), "actor.mini_batch_size=null"]
    run = trainer("ppo", *choice, *SETTINGS[setting])
    run.publish(0)
    for number in (1, 2):
        metrics = run.step(number)
        # The policy that is learned is the one that was sampled: in every step, so
        # every sync arrived.
        assert apart(metrics) < 1e-5
        assert math.isfinite(metrics["actor/loss"])
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/skipped_steps"] == 0
        assert (
            metrics["weight_sync/verified"] == 24
        )  # parameters: 2 x 11, embeddings, norm
        has_critic = "gae" in ALGORITHMS[name]["advantage"]
        assert ("critic/vf_loss" in metrics) == has_critic
        _, divergence, *_ = ALGORITHMS[name]["defaults"]
        place = divergence["kl"].partition("_")[0]
        assert ("actor/kl_loss" in metrics) == (place == "loss")
        assert ("actor/reward_kl_penalty" in metrics) == (place == "reward")


def apart(metrics: dict[str, float]) -> float:
    """The largest of what would be 0 were sampler and trainer exactly alike."""
    assert metrics["rollout_corr/training_ppl"] > 1
    names = ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff")
    corr = {name: metrics[f"rollout_corr/{name}"] for name in names}
    corr["ppl"] = metrics["rollout_corr/ppl_ratio"] - 1
    return max(metrics["training/rollout_probs_diff_mean"], *map(abs, corr.values()))


def test_only_the_critic_learns_while_it_warms_up(trainer: MakeTrainer) -> None:
    run = trainer("ppo", "algorithm.critic_warmup_steps=1")
    run.publish(0)
    first, second = run.step(1), run.step(2)
    assert first["critic/grad_norm"] > 0 and "actor/grad_norm" not in first
    assert apart(first) < 1e-5  # sampler and trainer are compared all the same
    assert second["actor/grad_norm"] > 0


ADAPTED = ("backend=fsdp", "actor.lora.rank=4", "actor.optimizer.lr=5e-2")


def two_steps(config: RLConfig, samplers: Samplers) -> list[dict[str, float]]:
    """The metrics of the first sync and of two steps."""
    with training(config, samplers) as run:
        assert (run.system.reference is None) == (
            config.rollout.sync.adapter != "merged"
        )
        return [run.publish(0), *(run.step(number) for number in (1, 2))]


@pytest.fixture(scope="module")
def adapted(
    cluster: Session, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, float]]:
    """Two steps with an adapter that is sent alone, to engines that know of adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    config = inputs.config("grpo", folder, *ADAPTED)
    groups, by_name = start_some(config, folder, sampling=True)
    with groups:
        samplers = Samplers(replicas_of(config, groups), by_name["reward"])
        return two_steps(config, samplers)


def test_with_an_adapter_the_reference_is_the_actors_base(
    inputs: Inputs, adapted: list[dict[str, float]], tmp_path: Path
) -> None:
    whole, first, second = adapted
    # An adapter starts as nothing.
    assert first["actor/kl_loss"] == 0 and first["actor/grad_norm"] > 0
    assert second["actor/kl_loss"] > 1e-4
    # The adapter arrived.
    assert second["training/rollout_probs_diff_mean"] < 1e-5
    # A and B of each target in each layer.
    targets = inputs.config("grpo", tmp_path, *ADAPTED).actor.lora.targets
    adapter_parts = 2 * 2 * len(targets)
    verified = [metrics["weight_sync/verified"] for metrics in (whole, second)]
    assert verified == [24 + adapter_parts, adapter_parts]
    assert second["weight_sync/bytes"] < whole["weight_sync/bytes"] / 4


@pytest.mark.slow
def test_a_merged_adapter_and_a_copy_of_its_base_learn_the_same(
    inputs: Inputs,
    samplers: Samplers,
    adapted: list[dict[str, float]],
    tmp_path: Path,
) -> None:
    elsewhere = shutil.copytree(inputs.model, tmp_path / "a copy")
    merged = inputs.config(
        "grpo",
        tmp_path / "run",
        *ADAPTED,
        "actor.num_ranks=2",
        f"reference.model.path={elsewhere}",
        "rollout.sync.adapter=merged",
    )
    *_, second = two_steps(merged, samplers)
    assert second["actor/kl_loss"] == pytest.approx(
        adapted[-1]["actor/kl_loss"], rel=1e-3
    )
    assert second["training/rollout_probs_diff_mean"] < 1e-5
    assert second["weight_sync/verified"] == 24


def test_the_divergence_is_steered_to_its_target(trainer: MakeTrainer) -> None:
    adaptive = [
        "algorithm.kl.controller=adaptive",
        "algorithm.kl.target=1000",
        "algorithm.kl.horizon=320",
    ]
    run = trainer("ppo", *adaptive)
    run.publish(0)
    coefficients = [
        run.step(number)["actor/reward_kl_penalty_coeff"] for number in (1, 2)
    ]
    # far below the target: 1 - 0.2 * 32 / 320 per step
    assert coefficients == pytest.approx([0.001, 0.001 * 0.98])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "online_dpo"])
def test_the_policy_learns_what_is_rewarded(
    inputs: Inputs, samplers: Samplers, tmp_path: Path, algorithm: str
) -> None:
    config = inputs.config(
        "grpo", tmp_path, f"algorithm={algorithm}", "actor.optimizer.lr=5e-3", "backend=fsdp"
    )  # fmt: skip
    with training(config, samplers) as run:
        run.publish(0)
        scores = [run.step(number)["critic/score/mean"] for number in range(1, 16)]
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 0.2


# ------------------------------------------------------------------------ failed scores


def test_failed_scores_are_counted_and_kept_out_of_their_groups(
    trainer: MakeTrainer,
    inputs: Inputs,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = inputs.graded_by("sometimes", tmp_path)
    run = trainer("grpo", "algorithm=dr_grpo", f"data.train_path={data}", "reward.max_failed_fraction=0.6",
                  "data.prompts_per_step=32", "run.seed=1")  # fmt: skip
    run.publish(0)
    experience = run.produce()
    scores = response_scores(experience.scores)["reward"]
    score, ok = scores.score, scores.ok
    assert 0 < (~ok).sum() < len(ok) / 2
    assert scores.health[~ok].tolist() == [ScoreHealth.EXCEPTION] * int((~ok).sum())
    assert np.isnan(score[~ok]).all()
    outputs = run.learner.compute_log_probs_and_values(1, experience.rollouts)
    credit = run.learner.assign_credit(experience.rollouts, scores, outputs)
    assert credit.row("in_loss").tolist() == ok.tolist()
    told = read(credit, 60)
    first_token = (
        np.cumsum(experience.rollouts.lengths) - 1
    )  # of each row its last token: advantages are constant
    for group in set(experience.rollouts.row("group_id").tolist()):
        members = np.flatnonzero((experience.rollouts.row("group_id") == group) & ok)
        expected = score[members] - score[members].mean()
        assert told.advantages[first_token[members]] == pytest.approx(
            expected, abs=1e-6
        )
    batch = LearnerBatch(1, experience.rollouts, credit, outputs)
    metrics = run.learner.update_models(batch, policy_version=0)
    assert math.isfinite(metrics["actor/grad_norm"])
    run.supply.note_trained(1, experience.rollouts.row("group_id"))
    run.publish(1)
    recorded = run.step(2)
    assert recorded["reward_health/ok"] + recorded["reward_health/exception"] == 128
    assert recorded["reward_health/exception"] > 0 and math.isfinite(
        recorded["critic/score/mean"]
    )
    assert 0 <= recorded["frac_reward_zero_std"] < 1
    assert recorded["training/num_examples"] == 64
    # The first failure of a kind is told in its own words, and no other one.
    warnings = capfd.readouterr().err
    assert re.search(
        r"warning: reward: \d+ of the first \d+ scores failed \(exception\); the run stops above"
        r" reward.max_failed_fraction = 0.6 of 128 responses. The first: (?s:.)*ValueError: cannot grade",
        warnings,
    )
    assert warnings.count("warning: reward:") == 1


def test_a_broken_grader_stops_the_run_with_its_own_words(
    trainer: MakeTrainer, inputs: Inputs, tmp_path: Path
) -> None:
    data = inputs.graded_by("broken", tmp_path)
    run = trainer("grpo", f"data.train_path={data}")
    run.publish(0)
    with pytest.raises(
        RewardError,
        match=r"(?s)(\d+) of the first \1 scores failed \(exception \1\), more than reward.max_failed_fraction = 0.1"
        r" allows for 32 responses.*nothing can be graded",
    ):
        run.step(1)


@pytest.mark.parametrize("algorithm", ["ppo", "online_dpo"])
def test_a_step_in_which_every_score_failed_teaches_nothing(
    trainer: MakeTrainer, inputs: Inputs, tmp_path: Path, algorithm: str
) -> None:
    data = inputs.graded_by("broken", tmp_path)
    run = trainer("ppo", f"algorithm={algorithm}", f"data.train_path={data}",
                  "reward.max_failed_fraction=1")  # fmt: skip
    run.publish(0)
    before = held(run)
    metrics = run.step(1)
    assert metrics["reward_health/exception"] == 32 and math.isnan(
        metrics["critic/score/mean"]
    )
    assert (
        "actor/grad_norm" not in metrics
    )  # no step at all: momentum alone would have moved the weights
    assert held(run) == before
    if algorithm == "online_dpo":
        assert metrics["preference/pairs"] == 0
        assert metrics["preference/groups_without_pair"] == 1


# ------------------------------------------------------------------ sampler and trainer


def correction(form: str, kind: str, **bounds: float | str) -> list[str]:
    values = {"form": form, "kind": kind, **bounds}
    return [f"algorithm.correction.{name}={value}" for name, value in values.items()]


LIMIT = ("algorithm.mismatch.metric=training/rollout_probs_diff_max", "algorithm.mismatch.limit=1e-4")  # fmt: skip


def test_a_mismatch_beyond_the_limit_turns_the_correction_on(
    trainer: MakeTrainer, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = [*correction("three_policy", "tis", level="sequence", upper=1.5), *LIMIT]
    run = trainer("grpo", *settings, "algorithm.mismatch.then=correct")
    run.publish(0)
    experience = run.produce()
    rollouts = experience.rollouts
    scores = response_scores(experience.scores)["reward"]

    def learn(number: int) -> dict[str, float]:
        # The trainer takes its weights for those of version 0, whatever it has learned.
        run.learner.optimizer_steps.publish(0)
        outputs = run.learner.compute_log_probs_and_values(number, rollouts)
        credit = run.learner.assign_credit(rollouts, scores, outputs)
        batch = LearnerBatch(number, rollouts, credit, outputs)
        return run.learner.update_models(batch, run.policy_version)

    assert apart(learn(1)) < 1e-5 and capfd.readouterr().err == ""
    stale = learn(2)
    assert (
        stale["training/rollout_probs_diff_max"] > 1e-4
        and "rollout_corr/rollout_is_mean" not in stale
    )
    assert "weights or kernels (version 0" in capfd.readouterr().err
    corrected = learn(3)
    assert (
        corrected["rollout_corr/rollout_is_std"] > 0
        and corrected["rollout_corr/rollout_is_max"] > 1
        and corrected["rollout_corr/rollout_is_seq_max_deviation"] > 0
    )
    assert corrected["rollout_corr/rollout_rs_masked_fraction"] == 0


def test_older_rollouts_beyond_the_limit_end_the_run(trainer: MakeTrainer) -> None:
    run = trainer(
        "grpo",
        "schedule=one_step_off",
        "placement=separate",
        *LIMIT,
        "algorithm.mismatch.then=stop",
    )
    run.publish(0)
    fresh = run.step(1)
    assert fresh["training/rollout_probs_diff_max"] < 1e-4
    with pytest.raises(
        MismatchError,
        match=r"rollout_probs_diff_max is .*stale version \(tokens of policy version 0,"
        " a trainer at 1",
    ):
        run.step(2)


def test_two_policies_need_no_old_log_probs_and_compare_before_anything_is_learned(
    trainer: MakeTrainer,
) -> None:
    several = ["algorithm.kl=none", *SETTINGS["four updates"]]
    run = trainer(
        "grpo",
        *correction("two_policy", "icepop", level="token", lower=0.999, upper=1.001),
        *several,
    )
    assert not run.learner.needs_old_log_probs
    run.publish(0)
    metrics = run.step(1)
    assert "timing_s/old_log_prob" not in metrics and apart(metrics) < 1e-5
    # The second epoch has left its sampler behind.
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert metrics["actor/grad_norm"] > 0


def held(run: Trainer) -> list[dict[str, Fingerprint]]:
    """The fingerprints of the actor's weights."""
    sent = run.system.actor.broadcast(ActorWorker.send, [0], True, False).result()
    return [part.fingerprints.by_name for part in sent]
