"""The correction of a mismatch, and the limit on it."""

from __future__ import annotations

import pytest

from controllers.compose.composition import examine
from scripts.configuration import compose
from tests.config.rules.cases import Case
from verl_ray.config.tasks.rl import RLConfig

KEY = "algorithm.correction"
TIS = f"{KEY}.form=three_policy {KEY}.kind=tis {KEY}.level=token {KEY}.upper=2.0"

CASES = [
    Case(
        "rejections_have_bounds",
        f"{KEY}.rejections={{token_k1:[0.5,2.0]}}",
        f"{KEY}.rejections",
        "form is none",
        "form=three_policy",
    ),
    Case(
        "rejections_have_bounds",
        f"{TIS} {KEY}.rejections={{token_k1:[null,null]}}",
        f"{KEY}.rejections.token_k1",
        "leaves nothing out",
        "bound",
    ),
    Case(
        "rejections_have_bounds",
        f"{TIS} {KEY}.rejections={{seq_max_k2:[0.1,0.5]}}",
        f"{KEY}.rejections.seq_max_k2",
        "never negative",
        "[null, 0.1]",
    ),
    Case(
        "rejections_have_bounds",
        f"{TIS} {KEY}.rejections={{seq_mean_k1:[null,0.9]}}",
        f"{KEY}.rejections.seq_mean_k1",
        "1 where the policies agree",
        "[0.5, 2.0]",
    ),
    Case(
        "kind_matches_the_form",
        f"{KEY}.kind=tis",
        f"{KEY}.kind",
        "form=none does not use it",
        "null",
    ),
    Case(
        "kind_matches_the_form",
        f"{KEY}.form=three_policy",
        f"{KEY}.kind",
        "form=three_policy needs it",
        "tis",
    ),
    Case(
        "kind_matches_the_form",
        f"algorithm=rloo {KEY}.form=two_policy",
        f"{KEY}.kind",
        "form=two_policy with algorithm.policy_loss=reinforce needs it",
        "tis",
    ),
    Case(
        "correction_is_complete",
        f"{KEY}.level=token",
        f"{KEY}.level",
        "kind=null does not use it",
        "null",
    ),
    Case(
        "correction_is_complete",
        f"{TIS} {KEY}.level=null",
        f"{KEY}.level",
        "kind=tis needs it",
        "token",
    ),
    Case(
        "correction_is_complete",
        f"{TIS} {KEY}.upper=null",
        f"{KEY}.upper",
        "kind=tis needs it",
        "2.0",
    ),
    Case(
        "correction_is_complete",
        f"{KEY}.form=three_policy {KEY}.kind=mis {KEY}.level=token {KEY}.upper=2.0"
        f" {KEY}.lower=0.5",
        f"{KEY}.lower",
        "kind=mis does not use it",
        "null",
    ),
    Case(
        "correction_is_complete",
        f"{TIS} {KEY}.kind=icepop",
        f"{KEY}.lower",
        "kind=icepop needs it",
        "0.5",
    ),
    Case(
        "correction_is_complete",
        f"{TIS} {KEY}.kind=reject",
        f"{KEY}.lower",
        "kind=reject needs it",
        "0.5",
    ),
    Case(
        "weights_are_not_applied_twice",
        f"{TIS} {KEY}.form=two_policy",
        f"{KEY}.kind",
        "the ratio of ppo_clip is the weight already",
        "form=three_policy",
    ),
    Case(
        "rows_are_corrected_as_a_whole",
        f"algorithm=gspo actor.mini_batch_size=64 {TIS}",
        f"{KEY}.level",
        "gspo has one loss per row",
        "Use geometric",
    ),
    Case(
        "rows_are_corrected_as_a_whole",
        f"algorithm=gmpo {KEY}.form=two_policy {KEY}.kind=reject {KEY}.level=token {KEY}.lower=0.5 {KEY}.upper=2.0",
        f"{KEY}.level",
        "gmpo has one loss per row",
        "Use geometric",
    ),
    Case(
        "rows_are_corrected_as_a_whole",
        f"algorithm=gspo actor.mini_batch_size=64 {KEY}.form=three_policy {KEY}.kind=tis {KEY}.level=sequence"
        f" {KEY}.upper=2.0 {KEY}.rejections={{token_k3:[null,0.1]}}",
        f"{KEY}.rejections.token_k3",
        "gspo has one loss per row",
        "Use seq_mean_k3",
    ),
    Case(
        "normalised_weights_are_known",
        f"{TIS} {KEY}.kind=reject {KEY}.lower=0.5 {KEY}.normalise=true",
        f"{KEY}.normalise",
        "there are no weights",
        "tis, mis or icepop",
    ),
    Case(
        "normalised_weights_are_known",
        f"{TIS} {KEY}.form=two_policy {KEY}.kind=mis {KEY}.normalise=true",
        f"{KEY}.normalise",
        "the ratio of ppo_clip is the weight",
        "form=three_policy",
    ),
    Case(
        "normalised_weights_are_known",
        f"algorithm=rloo {TIS} {KEY}.form=two_policy {KEY}.normalise=true actor.epochs=2",
        f"{KEY}.normalise",
        "would need another forward pass",
        "one update per step",
    ),
    Case(
        "normalised_weights_are_known",
        f"{TIS} {KEY}.normalise=true schedule=asynchronous rollout.kv=keep",
        f"{KEY}.normalise",
        "no policy has those of the tokens",
        "rollout.kv=recompute",
    ),
    Case(
        "mismatch_is_complete",
        "algorithm.mismatch.limit=0.1 algorithm.mismatch.then=stop",
        "algorithm.mismatch.metric",
        "limit=0.1 needs it",
        "rollout_corr/k3_kl",
    ),
    Case(
        "mismatch_is_complete",
        "algorithm.mismatch.limit=0.1 algorithm.mismatch.metric=rollout_corr/kl",
        "algorithm.mismatch.then",
        "limit=0.1 needs it",
        "stop",
    ),
    Case(
        "mismatch_is_complete",
        "algorithm.mismatch.metric=rollout_corr/kl",
        "algorithm.mismatch.metric",
        "limit=null does not use it",
        "null",
    ),
    Case(
        "mismatch_is_measured",
        "algorithm.mismatch.limit=0.1 algorithm.mismatch.metric=staleness/fresh_kl algorithm.mismatch.then=stop",
        "algorithm.mismatch.metric",
        "rollout.staleness is 0",
        "rollout_corr/k3_kl",
    ),
    Case(
        "mismatch_is_measured",
        "schedule=one_step_off placement=separate algorithm.correction.form=two_policy algorithm.mismatch.limit=0.1"
        " algorithm.mismatch.metric=staleness/fresh_kl algorithm.mismatch.then=stop",
        "algorithm.mismatch.metric",
        "there are none: rollout.updates is between",
        "rollout_corr/k3_kl",
    ),
    Case(
        "mismatch_has_a_correction",
        "algorithm.mismatch.limit=0.1 algorithm.mismatch.metric=rollout_corr/kl algorithm.mismatch.then=correct",
        "algorithm.mismatch.then",
        "there is no correction to turn on",
        "form=three_policy",
    ),
]


def keys(overrides: str) -> set[str]:
    return {
        problem.key for problem in examine("quickstart", overrides.split()).problems
    }


@pytest.mark.parametrize(
    "overrides",
    [
        TIS,
        f"{TIS} {KEY}.normalise=true",
        f"{TIS} {KEY}.kind=icepop {KEY}.lower=0.5 {KEY}.level=sequence",
        f"{TIS} {KEY}.form=two_policy {KEY}.kind=mis",
        f"{KEY}.form=two_policy",
        f"algorithm=gspo actor.mini_batch_size=64 {TIS} {KEY}.level=geometric {KEY}.rejections={{seq_max_k3:[null,0.1]}}",
        f"algorithm=rloo {TIS} {KEY}.form=two_policy",
        f"{TIS} algorithm.mismatch.limit=0.1 algorithm.mismatch.metric=rollout_corr/kl algorithm.mismatch.then=correct",
    ],
)
def test_what_goes_together(overrides: str) -> None:
    config = compose("quickstart", overrides.split())
    assert isinstance(config, RLConfig) and config.algorithm.correction.form != "none"


def test_a_mean_over_the_mini_batch_needs_log_probs_from_before_the_step() -> None:
    for normalise in (False, True):
        setting = f"{KEY}.normalise={str(normalise).lower()}"
        overrides = [
            "algorithm=dr_grpo",
            *TIS.split(),
            setting,
            "actor.mini_batch_size=null",
        ]
        config = compose("quickstart", overrides)
        assert isinstance(config, RLConfig)
        assert config.needs_old_log_probs(corrects=True) == normalise
        assert not config.needs_old_log_probs(corrects=False)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("upper", "0.9"), ("lower", "1.0"), ("lower", "0.0"), ("form", "both")],
)
def test_bounds_leave_an_exact_sampler_alone(setting: str, value: str) -> None:
    assert f"{KEY}.{setting}" in keys(
        f"{TIS} {KEY}.kind=icepop {KEY}.lower=0.5 {KEY}.{setting}={value}"
    )


def test_weights_make_up_for_a_second_update_of_reinforce() -> None:
    twice = f"algorithm=rloo actor.epochs=2 {TIS}"
    assert keys(f"{twice} {KEY}.form=two_policy") == set()
    assert keys(twice) == {
        "actor.epochs"
    }  # of the policy before the first update, which the second one has left
    waits = "algorithm.mismatch.limit=0.1 algorithm.mismatch.metric=rollout_corr/kl algorithm.mismatch.then=correct"
    assert keys(f"{twice} {KEY}.form=two_policy {waits}") == {"actor.epochs"}
    assert keys(f"{twice} {KEY}.form=two_policy {KEY}.kind=reject {KEY}.lower=0.5") == {
        "actor.epochs"
    }
