"""What `check` says of the algorithm."""

from __future__ import annotations

import pytest

from controllers.commands.check import algorithm_lines
from controllers.compose.composition import compose
from controllers.compose.listing import groups
from tests.algorithms.choices import with_updates
from tests.controllers.runs import ROOT, Inputs


@pytest.mark.parametrize("name", groups()["algorithm"])
def test_two_lines_explain_an_algorithm(name: str) -> None:
    config = compose("quickstart", with_updates(name))
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
        " sampler; sum token_mean; KL k3 in the loss, 0.01 per nat; entropy_share=0.2"
    )


def test_supervised_training_has_no_algorithm(inputs: Inputs) -> None:
    assert algorithm_lines(inputs.supervised(ROOT / "outputs" / "none")) == []
