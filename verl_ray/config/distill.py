"""Distillation: what a policy learns from a teacher.

The teacher is the reference role, a server, or several by data source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, create_model

from verl_ray.algorithms.declaration import fields_of_settings
from verl_ray.algorithms.distillation import (
    DECLARED_SETTINGS,
    DIVERGENCES,
    TEACHER_PROMPTS,
    TeacherDivergence,
)
from verl_ray.config.algorithm import FUNCTION_AS_TEXT, own_function_alone
from verl_ray.errors import ConfigError, Problem
from verl_ray.settings.function_specs import DEFAULT
from verl_ray.settings.section import (
    OneOf,
    OverriddenKeys,
    Positive,
    PositiveFloat,
    Section,
)
from verl_ray.suggest import either, first_of

DivergenceName = Annotated[str, OneOf(DIVERGENCES)]
_OVER_CANDIDATES = {
    name: each for name, each in DIVERGENCES.items() if each.function is not None
}
DivergenceOverCandidates = Annotated[str, OneOf(_OVER_CANDIDATES)]
TeacherPromptName = Annotated[
    str, own_function_alone(TEACHER_PROMPTS), *FUNCTION_AS_TEXT
]

TEACHER_KEY = "distill.teacher"

_FIELDS = fields_of_settings(DECLARED_SETTINGS, "divergence")
_ReadByDivergences = create_model("_ReadByDivergences", __base__=Section, **_FIELDS)


class TeacherFileConfig(_ReadByDivergences):
    """How the actor learns from a teacher whose log-probs are in the data."""

    divergence: DivergenceOverCandidates | None
    """Learn what a teacher says of each token of its responses, by this divergence,
    in place of their likelihood: reverse, forward or jsd (docs/distillation.md).
    Records are those of `generate --top-logprobs`. null = the likelihood."""
    top_k: Positive
    """The teacher's most probable tokens that are compared; all others are one more
    outcome."""

    @property
    def declared(self) -> TeacherDivergence | None:
        """The declaration of the divergence; None for the likelihood."""
        return None if self.divergence is None else DIVERGENCES[self.divergence]

    @property
    def num_top(self) -> int:
        """How many of the teacher's tokens rows have in each place; 0 for none."""
        return 0 if self.divergence is None else self.top_k


class TeacherService(Section):
    """A teacher behind a vLLM server.

    It is given as a table, so what is left out has its default here.
    """

    url: str
    """Address of its API, such as http://host:8000/v1, as the actor's nodes reach
    it."""
    model: str | None = None
    """Name of the model; null = the only one that the server has."""
    token_env: str | None = None
    """Environment variable of the workers that holds a bearer token; null = none is
    sent."""
    timeout_s: PositiveFloat = 240.0
    """Longest time of one request, which is about one row, with its repetitions."""
    max_outage_s: PositiveFloat = 1800.0
    """Longest time to ask a server again that refuses, answers 5xx or times out as a
    whole; then the run ends."""
    concurrency: Positive = 32
    """Requests in flight at the same time, of each rank of the actor."""


_NAME, _SERVER, _TABLE = "a name", "a server", "servers by data source"


def _form(value: object) -> str:
    """Return which form of `distill.teacher` is meant, so that its errors are told."""
    if isinstance(value, str) and "/" not in value:
        return _NAME
    if not isinstance(value, dict):
        return _SERVER
    has_servers = any(isinstance(each, dict | Section) for each in value.values())
    return _TABLE if has_servers else _SERVER


class DistillConfig(_ReadByDivergences):
    """How the actor learns from a teacher."""

    teacher: (
        Annotated[
            Annotated[Literal["actor", "average"], Tag(_NAME)]
            | Annotated[TeacherService, Tag(_SERVER)]
            | Annotated[dict[str, TeacherService], Tag(_TABLE)],
            Discriminator(_form),
        ]
        | None
    )
    """Who teaches: null = the reference role; actor = the policy itself, as it is
    before the step; average = the average of the policy's weights; or a vLLM server, a
    table of url, model, token_env, timeout_s, max_outage_s and concurrency. A table
    from data source to server has one for each; `default` serves the other data
    sources."""
    average_decay: Annotated[float, Field(gt=0, lt=1)] | None
    """With teacher=average: what is left of the average after an optimizer step, such
    as 0.99; the rest comes from the weights. It begins as the weights of the start."""
    teacher_prompt: TeacherPromptName | None
    """Function of your own that writes the prompt which the teacher reads before the
    response, with the solution for example: path/to/file.py:function, or a table of it
    and its arguments. null = the prompt of the student."""
    max_prompt_tokens: Positive
    """The longest prompt that this function may write, in tokens."""

    divergence: DivergenceName
    """How the policy is compared with the teacher at each response token; each names
    its paper (docs/distillation.md). sampled: log p_T - log p_S of the token that was
    sampled is its advantage. Others are a term of the loss."""
    weight: PositiveFloat
    """Weight of the divergence, beside what rewards teach."""
    top_k: Positive
    """The teacher's most probable tokens that are compared; all others are one more
    outcome. sampled compares none."""

    @property
    def declared(self) -> TeacherDivergence:
        """The declaration of the divergence."""
        return DIVERGENCES[self.divergence]

    @property
    def services(self) -> dict[str, TeacherService]:
        """The servers of the teacher by their keys; empty if it has none.

        A key is distill.teacher, or distill.teacher.SOURCE in a table.
        """
        if isinstance(self.teacher, dict):
            by_source = self.teacher.items()
            return {f"{TEACHER_KEY}.{source}": each for source, each in by_source}
        if isinstance(self.teacher, TeacherService):
            return {TEACHER_KEY: self.teacher}
        return {}

    @property
    def own_teacher(self) -> Literal["actor", "average"] | None:
        """The form of the policy that teaches; None for another teacher."""
        return self.teacher if isinstance(self.teacher, str) else None

    @property
    def num_top(self) -> int:
        """How many of the teacher's most probable tokens are compared; 0 for none."""
        return 0 if self.declared.function is None else self.top_k


def keys_of_servers(
    services: Collection[str], sources: Iterable[str]
) -> dict[str, str]:
    """Return the key of the server of each data source.

    Args:
        services: The keys of `DistillConfig.services`.
        sources: The data sources of some rows.

    Raises:
        ConfigError: There is no server for one of them.
    """
    keys: dict[str, str] = {}
    unserved: list[str] = []
    for source in dict.fromkeys(sources):
        # A server that is no entry of a table serves all data sources.
        choices = f"{TEACHER_KEY}.{source}", f"{TEACHER_KEY}.{DEFAULT}", TEACHER_KEY
        key = next((each for each in choices if each in services), None)
        if key is None:
            unserved.append(source)
        else:
            keys[source] = key

    if unserved:
        known = [key.removeprefix(f"{TEACHER_KEY}.") for key in services]
        rule = f"there is no server for data source {first_of(unserved)}"
        key = f"{TEACHER_KEY}.{unserved[0]}"
        fix = f"Set {key}, or {TEACHER_KEY}.{DEFAULT} for all others."
        raise ConfigError([Problem(TEACHER_KEY, known, rule, fix)])
    return keys


# -------------------------------------------------------------------------------- rules


def divergence_settings_are_read(
    distill: DistillConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that the divergence does not read."""
    reason = f"distill.divergence={distill.divergence} does not use it"
    if distill.teacher_prompt is None:
        keys = overridden.under("distill.max_prompt_tokens")
        yield from overridden.ignored(keys, "distill.teacher_prompt is null")
    if distill.declared.function is None:
        yield from overridden.ignored(overridden.under("distill.top_k"), reason)

    yield from _unread("distill", distill, distill.declared, reason)


_TEXT_SETTINGS = (
    "data.special_tokens",
    "data.apply_chat_template",
    "data.chat_template_kwargs",
    "data.template_day",
)
"""Settings by which texts become tokens."""


def divergence_of_a_file_is_read(
    sft: TeacherFileConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of a divergence that is not read."""
    reason = f"sft.divergence={sft.divergence or 'null'} does not use it"
    if sft.divergence is None:
        yield from overridden.ignored(overridden.under("sft.top_k"), reason)
    else:
        tokens = "sft.divergence learns tokens as they were sampled"
        for key in _TEXT_SETTINGS:
            yield from overridden.ignored(overridden.under(key), tokens)
    yield from _unread("sft", sft, sft.declared, reason)


def _unread(
    section: str,
    values: DistillConfig | TeacherFileConfig,
    declared: TeacherDivergence | None,
    reason: str,
) -> Iterator[Problem]:
    """Yield a problem for each setting of other divergences that is not null."""
    for setting in DECLARED_SETTINGS:
        value = getattr(values, setting.name)
        if value is None or (declared is not None and setting in declared.reads):
            continue

        readers = [
            f"{section}.divergence={name}"
            for name, divergence in DIVERGENCES.items()
            if setting in divergence.reads
        ]
        fix = f"Set it to null, or {either(readers)}."
        yield Problem(f"{section}.{setting.name}", value, reason, fix)
