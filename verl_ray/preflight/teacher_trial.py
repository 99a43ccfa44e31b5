"""The teacher of a run and its training data: servers of data sources, and prompts.

`distill.teacher_prompt` is tried on the first record. The response is the record's own
answer, or its prompt if it has no answer.

Invariant: user's code runs in a process that is killed at its deadline, never in this
one.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_ray.algorithms.distillation import TEACHER_PROMPTS
from verl_ray.columns.stages import Prompts
from verl_ray.config.distill import keys_of_servers
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.encoding import SpelledTokens
from verl_ray.data.prompts import tokens_of_prompts
from verl_ray.data.tokenizers import of_run, policy_tokenizer
from verl_ray.errors import ConfigError, DataError, Problem
from verl_ray.preflight.data_files import DataFile
from verl_ray.preflight.reward_trial import VALIDATION_KEY
from verl_ray.preflight.trial_requests import requests_at
from verl_ray.preflight.trials import Trials
from verl_ray.processes.trial import Tell, run_trial, try_in_child
from verl_ray.profiling.phases import blocking
from verl_ray.rewards.request import ScoreRequest
from verl_ray.settings.function_specs import in_words
from verl_ray.settings.section import resolved
from verl_ray.suggest import first_of

DEADLINE_S = 60.0
KEY = "distill.teacher_prompt"
_SHOWN = 200  # characters of the prompt


def records_of_servers(config: Config, files: Sequence[DataFile]) -> Trials:
    """Count the records of each server, where a teacher has several by data source.

    A problem says which data sources have none, and a warning which servers have no
    record.

    Args:
        config: Configuration of the run, without `auto`.
        files: The data files of the run.
    """
    trials = Trials()
    distill = config.distill if isinstance(config, RLConfig) else None
    if distill is None or not isinstance(distill.teacher, dict):
        return trials

    for file, prompts in _training_prompts(files):
        sources = Counter(prompts.data_source.texts())
        total = prompts.num_rows
        try:
            keys = keys_of_servers(distill.services, sources)
        except ConfigError as error:
            trials.problems += error.problems
            continue
        read = "records" if file.is_whole else "records that were read"
        for key, service in distill.services.items():
            own = [source for source in sources if keys[source] == key]
            if own:
                count = sum(sources[source] for source in own)
                trials.lines.append(
                    f"{key}={service.url} is asked about {count} of {total} {read}, of"
                    f" data source {first_of(own)}"
                )
            # Others may follow in the rest of a file.
            elif file.is_whole:
                text = f"{key}={service.url} is asked about no record of {file.key}"
                trials.warnings.append(text)
    return trials


def _training_prompts(
    files: Sequence[DataFile],
) -> Iterator[tuple[DataFile, Prompts]]:
    for file in files:
        if file.prompts is not None and file.key != VALIDATION_KEY:
            yield file, file.prompts


def try_teacher_prompt(config: Config, files: Sequence[DataFile]) -> Trials:
    """Let the function write the teacher's prompt of a record.

    Args:
        config: Configuration of the run, without `auto`.
        files: The data files of the run.
    """
    if not isinstance(config, RLConfig) or config.distill is None:
        return Trials()
    spec = config.distill.teacher_prompt
    prompts = [rows for _, rows in _training_prompts(files)]
    if spec is None or not prompts or not prompts[0].num_rows:
        return Trials()

    (request,) = requests_at(prompts[0], [0])
    # What graders get with it is no part of the trial.
    fields = {"spec": spec, "request": dataclasses.asdict(request)}
    with blocking(f"trying {KEY} on a record"):
        messages, cause = try_in_child(__name__, fields, DEADLINE_S)
    outcomes = {message.kind: message.fields for message in messages}
    outcome = outcomes.get("prompt", {"failure": f"its process {cause}"})
    rule, num_tokens = outcome.get("failure"), 0
    if rule is None:
        try:
            num_tokens = _num_tokens(outcome["prompt"], config)
        except DataError as error:
            rule = str(error)
    limit = config.distill.max_prompt_tokens
    if rule is None and not num_tokens:
        rule = "it writes a prompt without a token"
    if rule is None and num_tokens > limit:
        rule = (
            f"it writes {num_tokens} tokens, and distill.max_prompt_tokens is {limit}"
        )
    if rule is not None:
        fix = "Correct it: a step would call it like this."
        rule = f"on the first record of the training data {rule}"
        return Trials(problems=[Problem(KEY, in_words(spec), rule, fix, may_pass=True)])

    shown = json.dumps(outcome["prompt"], ensure_ascii=False)[:_SHOWN]
    return Trials([f"{KEY}={in_words(spec)} writes {num_tokens} tokens: {shown}"])


def _num_tokens(prompt: Any, config: RLConfig) -> int:
    """Return the number of tokens of a prompt, as the teacher reads it."""
    tokenizer = policy_tokenizer(config)
    chat = resolved(config.data.apply_chat_template)
    spelled = SpelledTokens(tokenizer, config.data.special_tokens)
    arguments = [of_run(config.data)] if chat else None
    tokens = tokens_of_prompts([prompt], [KEY], tokenizer, spelled, arguments)
    return int(tokens.lengths[0])


# -------------------------------------------------------------------- in that process


def main(connection: socket.socket) -> None:
    """Try the function that the other end of a connection names."""
    run_trial(connection, _tried)


def _tried(fields: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Tell what the function writes; the result is empty."""
    request = ScoreRequest(**fields["request"])
    try:
        prompt = TEACHER_PROMPTS[fields["spec"]].function(request)
        tell("prompt", {"prompt": prompt})
    except DataError as error:
        tell("prompt", {"failure": str(error)})
    return {}
