"""The schedule: what it needs of other settings, and the correction of older tokens."""

from __future__ import annotations

import pytest

from controllers.compose.composition import examine
from scripts.configuration import compose
from tests.config.rules.cases import Case
from tests.corrections import NO_CORRECTION
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.config.algorithm import CorrectionConfig
from verl_ray.config.tasks.rl import RLConfig

OFF = "schedule=one_step_off placement=separate"
ASYNCHRONOUS = "schedule=asynchronous placement=separate"
CORRECTION = "algorithm.correction"
THREE = (
    f"{CORRECTION}.form=three_policy {CORRECTION}.kind=tis {CORRECTION}.lower=null"
    f" {CORRECTION}.upper=2.0"
)
LIMIT = "algorithm.mismatch.limit=0.1 algorithm.mismatch.metric=rollout_corr/kl"

CASES = [
    Case(
        "schedule_is_consistent",
        "rollout.staleness=1",
        "rollout.staleness",
        "with schedule=synchronous a step learns from its own rollouts alone",
        "Set it to 0, or choose schedule=carry_over, or with placement=separate",
    ),
    Case(
        "schedule_is_consistent",
        f"{OFF} rollout.staleness=0",
        "rollout.staleness",
        "with schedule=one_step_off rollouts are older than the policy that learns",
        "Use at least 1, or choose schedule=synchronous.",
    ),
    Case(
        "schedule_is_consistent",
        f"{OFF} rollout.updates=in_flight",
        "rollout.updates",
        "with schedule=one_step_off replicas take new weights between rows",
        "schedule=one_step_off sets it to between",
    ),
    Case(
        "schedule_is_consistent",
        f"{ASYNCHRONOUS} rollout.updates=between",
        "rollout.updates",
        "with schedule=asynchronous replicas take new weights also under open rows",
        "schedule=asynchronous sets it to in_flight",
    ),
    Case(
        "schedule_is_consistent",
        f"{OFF} rollout.kv=keep",
        "rollout.kv",
        "rollout.updates=between does not use it",
        "null",
    ),
    Case(
        "schedule_is_consistent",
        f"{ASYNCHRONOUS} rollout.kv=null",
        "rollout.kv",
        "rollout.updates=in_flight needs it",
        "recompute is usual",
    ),
    Case(
        "schedule_is_consistent",
        "schedule=one_step_off",
        "placement",
        "trainers and rollout engines work at the same time",
        "Use placement=separate, or schedule=carry_over",
    ),
    Case(
        "schedule_is_consistent",
        "schedule=asynchronous",
        "placement",
        "trainers and rollout engines work at the same time",
        "Use placement=separate, or schedule=carry_over",
    ),
    Case(
        "schedule_is_consistent",
        "schedule=carry_over placement=separate",
        "placement",
        "trainers and rollout engines take turns on devices",
        "Use placement=colocated, or schedule=asynchronous",
    ),
    Case(
        "open_rows_survive_a_turn",
        "schedule=carry_over rollout.kv=keep",
        "rollout.kv",
        "the trainers use the memory of the cache",
        "Use recompute.",
    ),
    Case(
        "stale_tokens_are_corrected",
        f"{OFF} '{CORRECTION}={{form: none, kind: null, level: null, lower: null, upper: null}}'",
        f"{CORRECTION}.form",
        "tokens may be 1 policy versions old (rollout.staleness), and nothing corrects",
        "Use two_policy with algorithm.correction.kind=icepop",
    ),
    Case(
        "stale_tokens_are_corrected",
        f"{OFF} algorithm=cispo {CORRECTION}.form=none actor.mini_batch_size=64",
        f"{CORRECTION}.form",
        "nothing corrects",
        "cispo bounds the ratio to the sampler itself",
    ),
    Case(
        "stale_tokens_are_corrected",
        f"{OFF} algorithm=gspo {CORRECTION}.form=none actor.mini_batch_size=64",
        f"{CORRECTION}.form",
        "nothing corrects",
        "level=geometric",
    ),
    Case(
        "stale_tokens_are_corrected",
        f"{OFF} rollout.staleness=3 {LIMIT} algorithm.mismatch.then=correct",
        "algorithm.mismatch.then",
        "tokens may be 3 policy versions old (rollout.staleness), and nothing corrects"
        " for it until the mismatch exceeds its limit",
        "Use stop",
    ),
    Case(
        "stale_tokens_are_corrected",
        f"{ASYNCHRONOUS} rollout.kv=keep {THREE}",
        "rollout.kv",
        "no version of the policy has the log-probs of later tokens",
        f"Use rollout.kv=recompute, or {CORRECTION}.form=two_policy",
    ),
]


def test_a_bound_without_its_schedule_is_one_mistake() -> None:
    (problem,) = examine("quickstart", ["rollout.staleness=1"]).problems
    assert problem.key == "rollout.staleness"


def composed(overrides: str, root: str = "quickstart") -> RLConfig:
    config = compose(root, overrides.split())
    assert isinstance(config, RLConfig)
    return config


SETTINGS = {
    "synchronous": (0, "between", None, "none"),
    "one_step_off": (1, "between", None, "two_policy"),
    "asynchronous": (2, "in_flight", "recompute", "two_policy"),
    "carry_over": (1, "in_flight", "recompute", "two_policy"),
}


@pytest.mark.parametrize("schedule", SETTINGS)
def test_what_each_schedule_sets(schedule: str) -> None:
    separate = (
        "placement=separate" if schedule in ("one_step_off", "asynchronous") else ""
    )
    config = composed(f"schedule={schedule} {separate}")
    rollout = config.rollout
    assert rollout.schedule == schedule
    assert (
        rollout.staleness, rollout.updates, rollout.kv, config.algorithm.correction.form
    ) == SETTINGS[schedule]  # fmt: skip
    assert config.overlaps == bool(separate) == config.keeps_published_version


def test_the_default_is_synchronous() -> None:
    # The name of a run has the time in it.
    inputs = (
        "run.name=r model.path=/m data.train_path=t.jsonl data.validation_path=v.jsonl"
    )
    for root in ("ppo", "grpo"):
        assert composed(inputs, root) == composed(
            f"{inputs} schedule=synchronous", root
        )


@pytest.mark.parametrize(
    "overrides",
    [
        f"{OFF} rollout.staleness=3",
        f"{OFF} {THREE}",
        f"{OFF} {LIMIT} algorithm.mismatch.then=stop",
        f"{ASYNCHRONOUS} rollout.kv=keep",
        f"{ASYNCHRONOUS} {THREE}",
        f"{ASYNCHRONOUS} rollout.concurrency=32",
        "schedule=carry_over rollout.staleness=2",
        "schedule=synchronous placement=separate",
    ],
)
def test_what_goes_together(overrides: str) -> None:
    assert composed(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        *(
            f"algorithm={algorithm} {OFF}"
            for algorithm in ("ppo", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus")
        ),
        f"{OFF} algorithm=grpo",
    ],
)
def test_the_correction_holds_for_every_algorithm_in_either_order(
    overrides: str,
) -> None:
    correction = composed(overrides).algorithm.correction
    assert (correction.form, correction.kind) == ("two_policy", "icepop")
    assert (correction.level, correction.lower, correction.upper) == ("token", 0.5, 5.0)


BY_LOSS = {
    ("two_policy", "icepop", "token", 0.5, 5.0): "ppo_clip reinforce dro clip_cov kl_cov",
    ("three_policy", "icepop", "geometric", 0.5, 5.0): "gspo gmpo",
    ("two_policy", None, None, None, None): "cispo sapo dppo_tv dppo_kl vespo m2po",
}  # fmt: skip


@pytest.mark.parametrize("schedule", [OFF, ASYNCHRONOUS, "schedule=carry_over"])
def test_the_correction_leaves_the_loss_what_it_is(schedule: str) -> None:
    """One that bounds every ratio is not masked besides, and a row keeps one weight."""
    found = {}
    for loss in POLICY_LOSSES:
        overrides = [*schedule.split(), f"algorithm.policy_loss={loss}"]
        config = examine("quickstart", overrides).config
        assert isinstance(config, RLConfig)
        one = config.algorithm.correction
        found[loss] = (one.form, one.kind, one.level, one.lower, one.upper)
    pairs = examine("quickstart", [*schedule.split(), "algorithm=online_dpo"]).config
    assert isinstance(pairs, RLConfig)
    assert pairs.algorithm.correction == CorrectionConfig.model_validate(NO_CORRECTION)
    assert found == {
        loss: correction
        for correction, losses in BY_LOSS.items()
        for loss in losses.split()
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        "cispo",
        "gspo",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("dppo", "vespo", "m2po", "luspo", "gmpo", "sapo")
        ),
    ],
)
def test_every_schedule_goes_with_a_loss_of_its_own_bounds(algorithm: str) -> None:
    for schedule in (OFF, ASYNCHRONOUS, "schedule=carry_over"):
        assert composed(f"{schedule} algorithm={algorithm} actor.mini_batch_size=64")


@pytest.mark.parametrize(
    ("choice", "fix"),
    [
        ("cosine", "the learning rate's schedule is actor.optimizer.schedule=cosine"),
        ("constant", "the learning rate's schedule is actor.optimizer.schedule=constant"),
        ("linear", "the learning rate's schedule is actor.optimizer.schedule=linear"),
        ("warmup_stable_decay", "the learning rate's schedule is actor.optimizer.schedule=wsd"),
        ("constant_with_warmup", "actor.optimizer.schedule=constant (critic"),
        ("async", "Write schedule=asynchronous."),
        ("sync", "Write schedule=synchronous."),
        ("partial_rollout", "Write schedule=carry_over."),
        ("one_step_of", "Did you mean one_step_off?"),
    ],
)  # fmt: skip
def test_a_schedule_of_something_else_leads_to_what_was_meant(
    choice: str, fix: str
) -> None:
    (problem,) = examine("quickstart", [f"schedule={choice}"]).problems
    assert (problem.key, problem.rule) == ("schedule", "there is no such choice")
    assert fix in problem.fix


def test_the_names_of_the_optimizers_schedules_exist() -> None:
    for choice in ("constant", "cosine", "linear", "wsd", "inverse_sqrt"):
        assert composed(f"actor.optimizer.schedule={choice}")
    typed = "actor.optimizer.schedule=warmup_stable_decay"
    (problem,) = examine("quickstart", [typed]).problems
    assert problem.fix.startswith("Write wsd. Use constant, cosine")


def test_over_an_old_cache_nothing_computes_an_old_policy() -> None:
    """A KL penalty in the reward compares the sampler's log-probs with the reference."""
    for settings in (ASYNCHRONOUS, f"{ASYNCHRONOUS} actor.epochs=2"):
        kept = composed(f"{settings} rollout.kv=keep")
        assert kept.algorithm.kl.place == "reward"
        assert not kept.needs_old_log_probs(corrects=True)
        assert composed(settings).needs_old_log_probs(corrects=True)


def test_a_correction_that_is_switched_off_is_one_mistake() -> None:
    (problem,) = examine(
        "quickstart", [*OFF.split(), f"{CORRECTION}.form=none"]
    ).problems
    assert problem.key == f"{CORRECTION}.form"
