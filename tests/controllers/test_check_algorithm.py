"""What `check` says of the algorithm."""

from __future__ import annotations

import pytest

from controllers.commands.check import algorithm_lines, rate_lines
from controllers.compose.listing import groups
from scripts.configuration import compose
from tests.algorithms.choices import REWARDED


@pytest.mark.parametrize("name", REWARDED)
def test_two_lines_explain_an_algorithm(name: str) -> None:
    config = compose("quickstart", [f"algorithm={name}"])
    about, parts = algorithm_lines(config)
    assert about == f"algorithm {name}: {groups()['algorithm'][name]}"
    assert parts.startswith("  advantage ") and "; loss " in parts and "; sum " in parts


def test_the_parts_by_hand() -> None:
    changes = [
        "algorithm=cispo", "algorithm.kl.place=loss", "algorithm.kl.estimator=k3",
        "algorithm.kl.coefficient=0.01", "algorithm.kl.controller=fixed", "algorithm.entropy_share=0.2",
    ]  # fmt: skip
    _, parts = algorithm_lines(compose("quickstart", changes))
    assert parts == (
        "  advantage grpo per response; loss cispo (ratio_max=5), ratio of a token to the"
        " sampler; correction two_policy, by the ratio of the loss alone; sum token_mean; KL k3 in the loss, 0.01 per nat; entropy_share=0.2"
    )


def test_the_correction_is_one_of_the_parts() -> None:
    def said(*changes: str) -> str:
        _, parts = algorithm_lines(compose("quickstart", [*changes]))
        return next(
            (part for part in parts.split("; ") if part.startswith("correction")), ""
        )

    assert said("algorithm=grpo") == ""
    assert said("algorithm=grpo", "schedule=carry_over") == (
        "correction two_policy, icepop per token (lower=0.5, upper=5)"
    )
    key = "algorithm.correction"
    tis = [
        f"{key}.form=three_policy",
        f"{key}.kind=tis",
        f"{key}.level=geometric",
        f"{key}.upper=2",
    ]
    rejections = f"{key}.rejections={{seq_mean_k1: [0.5, 2], seq_max_k3: [null, 0.1]}}"
    limit = [
        "algorithm.mismatch.metric=rollout_corr/kl",
        "algorithm.mismatch.limit=1",
        "algorithm.mismatch.then=correct",
    ]
    assert said(*tis, f"{key}.normalise=true", rejections, *limit) == (
        "correction three_policy beyond algorithm.mismatch.limit, tis per geometric"
        " (upper=2), normalised, rejection seq_mean_k1 (lower=0.5, upper=2), rejection"
        " seq_max_k3 (upper=0.1)"
    )  # fmt: skip


def test_supervised_training_has_no_algorithm() -> None:
    paths = ["model.path=/m", "data.train_path=/t", "data.validation_path=/v"]
    assert algorithm_lines(compose("sft", paths)) == []


def test_a_small_model_is_told_the_rate_that_moves_it() -> None:
    assert rate_lines(compose("quickstart", [])) == []
    (line,) = rate_lines(compose("quickstart", ["actor.optimizer.lr=1e-6"]))
    assert line.startswith("actor.optimizer.lr=1e-06 is a rate for billions")
    assert "0.79 million" in line
