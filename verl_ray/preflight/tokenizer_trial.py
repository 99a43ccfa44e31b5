"""The tokenizers of a run, loaded as the run loads them, with a question each.

Invariant: a fault of a tokenizer or of its chat template is a problem of the directory
that it is in, whichever texts the run has for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from verl_ray.config.reward import JudgeReward, ModelReward, SingleReward
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.data.fields import Message, excerpt
from verl_ray.data.tokenizers import (
    CHAT_TEMPLATES,
    TemplateArguments,
    applied_template,
    day_of_run,
    load_tokenizer,
    of_run,
    render,
    strip_special_tokens,
    template_of,
)
from verl_ray.errors import ConfigError, DataError, ModelError, Problem, file_problem
from verl_ray.preflight.facts import writes_day
from verl_ray.rewards.health import Score
from verl_ray.rewards.judge import Judgement, question_tokens
from verl_ray.rewards.request import ScoreRequest
from verl_ray.settings.section import resolved
from verl_ray.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LIKE_SPECIAL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)

_TEXT = "1 + 1"
_USER: Message = {"role": "user", "content": _TEXT}
_PROBES: tuple[list[Message], ...] = (
    [_USER],
    [{"role": "system", "content": "Add."}, _USER],
)
"""Conversations, of which every chat template takes at least one."""


def tried_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the data are read with, and try its chat template.

    Args:
        config: Configuration of the run, without `auto`.

    Raises:
        ConfigError: The tokenizer cannot be loaded, its template writes no question, or
            it has none that the run could apply.
    """
    role = config.evaluated_role
    applies = resolved(config.data.apply_chat_template)
    path = config.model_roles[role].model.folder
    tokenizer = _tokenizer(role, path, config, applies_template=applies)
    if applies and not tokenizer.chat_template:
        rule = f"the tokenizer in {path} has no chat template"
        fix = "Set it to false, or give it one: data.chat_template=chatml."
        raise ConfigError([Problem("data.apply_chat_template", True, rule, fix)])
    unread = list(_unread_arguments(config, tokenizer))
    if unread:
        raise ConfigError(unread)
    return tokenizer


def _unread_arguments(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Problem]:
    """Yield a problem for each argument that the chat template does not mention."""
    text, named = "", "no chat template is applied, which could"
    if resolved(config.data.apply_chat_template):
        text = applied_template(tokenizer)
        place = tokenizer.name_or_path
        if config.data.chat_template is not None:
            place = "data.chat_template"
        named = f"the chat template in {place} does not"

    for name, value in config.data.chat_template_kwargs.items():
        if name not in text:
            rule = f"this setting would be ignored: {named} read {name}"
            fix = "Leave it out, or correct its name."
            yield Problem(f"data.chat_template_kwargs.{name}", value, rule, fix)

    day = resolved(config.data.template_day)
    if day is not None and not writes_day(config):
        rule = f"this setting would be ignored: {named} write the day"
        fix = "Leave it out, and it is auto."
        yield Problem("data.template_day", day, rule, fix)


def stop_warnings(config: Config, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield a warning for each stop text that is a special token of others."""
    stop = config.rollout.stop if isinstance(config, RolloutTaskConfig) else []
    known = [token.content for token in tokenizer.added_tokens_decoder.values()]
    for text in stop:
        if _LIKE_SPECIAL.fullmatch(text) and text not in known:
            yield (
                f"rollout.stop has {text}, which is no special token of the tokenizer"
                f" in {tokenizer.name_or_path}, so only a response that spells it out"
                f" ends there. {did_you_mean(text, known, 'special token')}"
            )


def _tokenizer(
    role: str, path: str, config: Config, *, applies_template: bool
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a role, and try its chat template if it has one.

    Args:
        role: The role, which is the key of its section.
        path: Directory of its model.
        config: Configuration of the run.
        applies_template: Whether the run uses the template.

    Raises:
        ConfigError: The tokenizer cannot be loaded, the template does not fit it, or
            its template writes no question.
    """
    key = "model.path" if path == config.model.folder else f"{role}.model.path"
    # A grader is asked in its own way.
    is_policy = role == config.evaluated_role
    template = template_of(config.data) if is_policy else None
    arguments = of_run(config.data) if is_policy else day_of_run(config.data)
    try:
        tokenizer = load_tokenizer(path, template)
    except ModelError as error:
        raise ConfigError([file_problem(key, path, error)]) from error
    except DataError as error:
        raise ConfigError([_template_problem(config, error)]) from error

    fault = None
    if applies_template:
        fault = _template_fault(tokenizer, arguments)
    if fault is not None:
        if template is not None:
            refusal = DataError(f"the template {fault}")
            raise ConfigError([_template_problem(config, refusal)])
        rule = f"its chat template {fault}"
        instead = ", replace it with data.chat_template" if is_policy else ""
        fix = (
            "Correct the template in its tokenizer_config.json or chat_template.jinja"
            f"{instead}, or take another model."
        )
        raise ConfigError([Problem(key, path, rule, fix)])
    return tokenizer


def _template_problem(config: Config, error: DataError) -> Problem:
    """Return what is wrong with the run's own chat template."""
    named = str(config.data.chat_template)
    value = named if named in CHAT_TEMPLATES else excerpt(named)
    return file_problem("data.chat_template", value, error)


def _template_fault(
    tokenizer: PreTrainedTokenizerBase, arguments: TemplateArguments
) -> str | None:
    """Return what is wrong with a chat template; None if nothing is, or there is none.

    The answer is the end of a sentence.

    Args:
        tokenizer: The tokenizer.
        arguments: What the run gives to the template.
    """
    if not tokenizer.chat_template:
        return None

    fault = None
    for probe in _PROBES:
        try:
            (text,) = render(
                tokenizer,
                [probe],
                add_generation_prompt=True,
                where=lambda _: "a question",
                arguments=[arguments],
            )
        except DataError as error:
            fault = f"fails on a plain question: {error.__cause__}"
        else:
            if _TEXT in text:
                return None
            fault = "leaves out the words of a plain question"
    return fault


def model_grader_problems(
    key: str, grader: SingleReward, requests: Sequence[ScoreRequest], config: Config
) -> Iterator[Problem]:
    """Yield what would keep a grader that is a model from scoring anything.

    Args:
        key: The key of its section.
        grader: The grader.
        requests: Responses of the run.
        config: Configuration of the run, without `auto`.
    """
    if not isinstance(grader, JudgeReward | ModelReward):
        return

    # A grader uses a chat template wherever it has one.
    path = grader.model.folder
    try:
        tokenizer = _tokenizer(key, path, config, applies_template=True)
    except ConfigError as error:
        yield from error.problems
        return

    # Only a judge is tried on requests.
    if isinstance(grader, ModelReward):
        return
    for request in requests:
        day = day_of_run(config.data)
        problem = _question_problem(key, grader, request, tokenizer, day)
        if problem is not None:
            yield problem
            return


def _question_problem(
    key: str,
    judge: JudgeReward,
    request: ScoreRequest,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TemplateArguments,
) -> Problem | None:
    """Return why a judge cannot be sent a question, with a response or without."""
    judgement = Judgement(judge)
    response = strip_special_tokens(request.response, tokenizer)
    source = f"a record of data source {request.data_source!r}"

    for shown in (response, ""):
        question = judgement.question(replace(request, response=shown))
        if isinstance(question, Score):
            fix = "Correct the template, or the records that it shows."
            rule = f"it fails on {source}: {question.detail}"
            return Problem(f"{key}.template", judge.template, rule, fix)
        try:
            (tokens,) = question_tokens([question], tokenizer, key, arguments)
        except DataError as error:
            fix = "Take another judge, or correct its tokenizer."
            return Problem(f"{key}.model.path", judge.model.folder, str(error), fix)

    # The last question has an empty response.
    if len(tokens) <= judge.max_prompt_tokens:
        return None
    rule = f"the question about {source} has {len(tokens)} tokens without a response"
    fix = "Give more than that, for the response as well; or shorten the template."
    return Problem(f"{key}.max_prompt_tokens", judge.max_prompt_tokens, rule, fix)
