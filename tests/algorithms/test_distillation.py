"""Divergences from a teacher: by hand, against TRL's GKD, and in the objective."""

from __future__ import annotations

import importlib
import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.algorithms.choices import NO_KL, with_loss
from tests.algorithms.distillation import distill_config
from verl_ray.algorithms.distillation import DIVERGENCES, with_tail
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.config.distill import DistillConfig
from verl_ray.learning.objectives import LossInputs
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.ops.outputs import TokenOutputs

TRL_BETAS = {"forward": 0.0, "jsd": 0.3, "reverse": 1.0}
"""The limits of TRL's divergence are the two others."""


def log_probs_of(seed: int, tokens: int = 5, words: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, words, generator=generator, dtype=torch.float64)
    return torch.log_softmax(2 * logits, dim=1)


def divergence(
    name: str, student: Tensor, teacher: Tensor, **settings: float
) -> Tensor:
    function = DIVERGENCES[name].function
    assert function is not None
    return function(student, teacher, **settings)


def test_numbers_by_hand() -> None:
    """The student gives 1/4, 1/2 and 1/4 to all others; the teacher 1/2, 1/4, 1/4.

    The mixture of the two halves is 3/8, 3/8, 1/4.
    """
    student, teacher = with_tail(
        torch.tensor([[0.25, 0.5]]).log(), torch.tensor([[0.5, 0.25]]).log()
    )
    assert student.exp().tolist() == [pytest.approx([0.25, 0.5, 0.25])]

    quarter = 0.25 * math.log(2)
    assert divergence("reverse", student, teacher).tolist() == pytest.approx([quarter])
    assert divergence("forward", student, teacher).tolist() == pytest.approx([quarter])
    from_mixture = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    found = divergence("jsd", student, teacher, beta=0.5).tolist()
    assert found == pytest.approx([from_mixture])


@pytest.mark.parametrize("name", TRL_BETAS)
def test_values_and_gradients_are_those_of_trl(name: str) -> None:
    trainer = importlib.import_module("trl.experimental.gkd").GKDTrainer
    student, teacher = log_probs_of(1), log_probs_of(2)
    beta = TRL_BETAS[name]
    settings = {"beta": beta} if name == "jsd" else {}

    gradients = []
    for mean in (
        lambda logits: trainer.generalized_jsd_loss(
            logits[None], teacher[None], beta=beta, reduction="sum"
        ),
        lambda logits: divergence(
            name, torch.log_softmax(logits, 1), teacher, **settings
        ).sum(),
    ):
        logits = student.clone().requires_grad_()
        value = mean(logits)
        (gradient,) = torch.autograd.grad(value, logits)
        gradients.append(torch.cat([value.detach()[None], gradient.flatten()]))
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", TRL_BETAS)
def test_a_divergence_of_some_tokens_is_a_lower_bound(name: str) -> None:
    """It grows with the number of tokens, and is 0 where both agree."""
    student, teacher = log_probs_of(3), log_probs_of(4)
    settings = {"beta": 0.3} if name == "jsd" else {}
    values = [
        divergence(name, *with_tail(student[:, :k], teacher[:, :k]), **settings)
        for k in (1, 3, 6)
    ]
    values.append(divergence(name, student, teacher, **settings))
    assert all((low <= high + 1e-12).all() for low, high in itertools.pairwise(values))
    torch.testing.assert_close(values[2], values[3])

    same, _ = with_tail(student[:, :3], teacher[:, :3])
    nothing = divergence(name, same, same, **settings)
    assert nothing.abs().max() < 1e-12


@pytest.mark.parametrize("name", TRL_BETAS)
def test_gradients_are_finite_differences(name: str) -> None:
    settings = {"beta": 0.3} if name == "jsd" else {}
    teacher = log_probs_of(6)[:, :3]

    def value(logits: Tensor) -> Tensor:
        both = with_tail(torch.log_softmax(logits, 1)[:, :3], teacher)
        return divergence(name, *both, **settings)

    assert torch.autograd.gradcheck(value, log_probs_of(5).requires_grad_())


def test_a_teacher_that_is_sure_leaves_nothing_to_others() -> None:
    """What float32 cannot tell from 0 is finite, and so is its gradient."""
    sure = torch.tensor([[0.0, -40.0]])
    student = torch.tensor([[-1e-9, -30.0]], requires_grad=True)
    for name in TRL_BETAS:
        settings = {"beta": 0.5} if name == "jsd" else {}
        value = divergence(name, *with_tail(student, sure), **settings)
        (gradient,) = torch.autograd.grad(value.sum(), student)
        assert value.abs().max() < 1e-5 and gradient.isfinite().all()


def test_places_without_a_token_say_nothing() -> None:
    """A teacher that gave two tokens of three: the third slot changes no divergence."""
    student, teacher = log_probs_of(8)[:, :3], log_probs_of(9)[:, :3]
    student.requires_grad_()
    shorter = teacher.clone()
    shorter[:, 2] = -torch.inf
    for name in TRL_BETAS:
        settings = {"beta": 0.5} if name == "jsd" else {}
        found = divergence(name, *with_tail(student, shorter), **settings)
        both = with_tail(student[:, :2], teacher[:, :2])
        torch.testing.assert_close(
            found, divergence(name, *both, **settings), rtol=0, atol=1e-5
        )
        (gradient,) = torch.autograd.grad(found.sum(), student)
        assert not gradient[:, 2].any() and gradient.isfinite().all()


# -------------------------------------------------------------------- in the objective


def measured(
    distill: DistillConfig, log_probs: Tensor, candidates: Tensor | None = None
) -> TokenLoss:
    """Return the loss of three tokens with advantages of 1, 0 and -1."""
    algorithm = with_loss("reinforce", kl=NO_KL)
    objective = PolicyObjective(algorithm, 1.0, 0.0, distill=distill)
    inputs = LossInputs(
        row=torch.zeros(3, dtype=torch.int64),
        advantages=torch.tensor([1.0, 0.0, -1.0]),
        ref_log_probs=torch.tensor([-1.0, -2.0, -3.0]),
        teacher_log_probs=torch.tensor([[0.5], [0.5], [0.5]]).log(),
    )
    outputs = TokenOutputs(
        log_probs=log_probs,
        entropy=torch.zeros(3),
        candidate_log_probs=candidates,
    )
    return objective(outputs, inputs)


def test_the_log_ratio_of_a_sampled_token_is_its_advantage() -> None:
    """The gradient of -A log p is -A, with A = reward's + weight (log p_T - log p_S)."""
    distill = distill_config(divergence="sampled", weight=0.5, top_k=64, beta=None)
    log_probs = torch.tensor([-2.0, -2.0, -1.0], requires_grad=True)
    found = measured(distill, log_probs)
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_probs)
    assert gradient.tolist() == pytest.approx([-(1 + 0.5), 0.0, -(-1 - 1.0)])
    assert found.metrics["distill/kl"].tolist() == pytest.approx([-1.0, 0.0, 2.0])
    assert "actor/distill_loss" not in found.terms


def test_a_divergence_is_a_term_of_the_loss_beside_the_rewards() -> None:
    distill = distill_config(divergence="forward", weight=0.5, top_k=1, beta=None)
    log_probs = torch.tensor([-2.0, -2.0, -1.0], requires_grad=True)
    candidates = torch.tensor([[0.5], [0.25], [0.75]]).log()
    found = measured(distill, log_probs, candidates)
    # 1/2 log(1/2 / p) + 1/2 log(1/2 / (1 - p)) of p = 1/2, 1/4 and 3/4
    expected = [0.0, 0.5 * math.log(4 / 3), 0.5 * math.log(4 / 3)]
    assert found.terms["actor/distill_loss"].tolist() == pytest.approx(expected)
    rewards = found.loss.detach() - 0.5 * torch.tensor(expected)
    assert rewards.tolist() == pytest.approx(
        found.terms["actor/pg_loss"].tolist(), abs=1e-6
    )
    assert found.metrics["distill/kl"].tolist() == pytest.approx([-1.0, 0.0, 2.0])
