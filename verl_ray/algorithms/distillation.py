"""Divergences of a student from its teacher: the choices of `distill.divergence`.

Invariant: a divergence gives one number per token, and depends on no other token. Each
is declared once, with its paper, its equation, and the settings that it reads.
Functions import torch when they are called, since the configuration reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from verl_ray.algorithms.declaration import (
    Declaration,
    DeclarationWithUsualValues,
    Setting,
    by_name,
)
from verl_ray.algorithms.own_functions import Choices, OwnFunction, keywords_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TeacherDivergence(DeclarationWithUsualValues):
    """A choice of `distill.divergence`.

    Attributes:
        function: Maps log-probs of the student and of the teacher, float32
            [tokens, outcomes] each, and its settings to a divergence, float32 [tokens].
            None if the sampled token alone is compared, as an advantage.
    """

    section: ClassVar[str] = "distill"

    function: Callable[..., Tensor] | None

    def over_candidates(
        self, student: Tensor, teacher: Tensor, section: object
    ) -> Tensor:
        """Return the divergence over some tokens and all others, float32 [tokens].

        Args:
            student: Log-probs of the student, float32 [tokens, candidates].
            teacher: Those of the teacher.
            section: The section of the configuration that has its settings.
        """
        assert self.function is not None, "others compare the sampled token alone"
        divergence: Tensor = self.function(
            *with_tail(student, teacher), **self.settings(section)
        )
        return divergence


BETA = Setting(
    "beta",
    Annotated[float, Field(gt=0, lt=1)],
    "Share of the teacher in the mixture that both are compared with.",
)

_LEAST = 1e-7
"""A probability that float32 can tell from 0 as the complement of a sum near 1."""


def with_tail(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probs of some tokens and, behind them, of all others together.

    So they are those of whole distributions, whose divergence is never larger than that
    of the whole vocabularies. A teacher may have fewer candidates in a place, with -inf
    for the others: these are the same in both then, and nothing.

    Args:
        student: float32 [tokens, candidates].
        teacher: float32 [tokens, candidates].

    Returns:
        Both, float32 [tokens, candidates + 1].
    """
    import math

    import torch

    missing = teacher == -torch.inf
    both = []
    for log_probs in (student, teacher):
        candidates = log_probs.masked_fill(missing, math.log(_LEAST))
        others = 1 - candidates.exp().sum(dim=1, keepdim=True)
        both.append(torch.cat([candidates, others.clamp(min=_LEAST).log()], dim=1))
    return both[0], both[1]


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over outcomes of p_S (log p_S - log p_T).

    Source: MiniLLM (arXiv:2306.08543, eq. 1), at each token.
    """
    return (student.exp() * (student - teacher)).sum(dim=1)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over outcomes of p_T (log p_T - log p_S).

    Source: knowledge distillation (arXiv:1503.02531) at each token.
    """
    return (teacher.exp() * (teacher - student)).sum(dim=1)


def jsd(student: Tensor, teacher: Tensor, *, beta: float) -> Tensor:
    """beta KL(p_T || m) + (1 - beta) KL(p_S || m), with m = beta p_T + (1 - beta) p_S.

    Source: generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649, eq. 1).
    """
    import math

    import torch

    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
    teacher_kl, student_kl = forward_kl(mixture, teacher), forward_kl(mixture, student)
    return beta * teacher_kl + (1 - beta) * student_kl


DIVERGENCES = by_name(
    TeacherDivergence(
        name="sampled",
        paper="on-policy distillation (K. Lu, Thinking Machines, 2025)",
        function=None,
    ),
    TeacherDivergence(
        name="reverse",
        paper="MiniLLM (arXiv:2306.08543, eq. 1)",
        function=reverse_kl,
    ),
    TeacherDivergence(
        name="forward",
        paper="knowledge distillation (arXiv:1503.02531)",
        function=forward_kl,
    ),
    TeacherDivergence(
        name="jsd",
        paper="GKD (arXiv:2306.13649, eq. 1)",
        function=jsd,
        reads={BETA: 0.5},
    ),
)
"""Every choice of `distill.divergence`, by its name."""


Prompt = str | list[dict[str, Any]]
"""A text, or messages with role and content."""


@dataclass(frozen=True, kw_only=True)
class TeacherPrompt(Declaration):
    """A choice of `distill.teacher_prompt`, which is always a function of the user's.

    Attributes:
        function: Maps a `ScoreRequest` to the prompt that the teacher reads before the
            response.
    """

    section: ClassVar[str] = "distill"

    function: Callable[..., Prompt]


def _own_prompt(spec: str, _: Mapping[Setting, object]) -> TeacherPrompt:
    keywords_of(spec, ("request",), {}, section="distill")
    return TeacherPrompt(
        name=spec,
        paper="a function of your own",
        function=OwnFunction(spec, as_prompt),
    )


def as_prompt(returned: Any, _request: object) -> Prompt:
    """Return what a user's function has returned, as a prompt.

    Raises:
        ValueError: It is none.
    """
    if isinstance(returned, str):
        return returned
    is_list = isinstance(returned, list) and bool(returned)
    if not is_list or not all(
        isinstance(message, dict) and {"role", "content"} <= message.keys()
        for message in returned
    ):
        raise ValueError(
            f"{returned!r:.100}; expected a text, or a list of messages with role and"
            " content"
        )
    messages: Prompt = returned
    return messages


TEACHER_PROMPTS: Choices[TeacherPrompt] = Choices({}, _own_prompt)
"""The functions of users that `distill.teacher_prompt` names."""

DECLARED_SETTINGS = tuple(
    dict.fromkeys(
        setting for divergence in DIVERGENCES.values() for setting in divergence.reads
    )
)
"""Every setting that a divergence reads."""
