"""Responses on which the reward functions of a run are tried, made from its records.

A record's own answer stands for a right response. A record without an answer is
tried with its own prompt as the response: some text that a function has to score.

Invariant: there is one request for each data source, from its first record.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from verl_ray.agents.contract import End
from verl_ray.columns.stages import Prompts
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.encoding import encode
from verl_ray.data.fields import environment_of
from verl_ray.data.prompts import prompt_text
from verl_ray.errors import DataError
from verl_ray.preflight.data_files import DataFile
from verl_ray.preflight.tokenizer_trial import (
    tried_tokenizer,
)
from verl_ray.rewards.built_in import built_in_of
from verl_ray.rewards.request import ScoreRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def requests_of(
    files: Sequence[DataFile], functions: Mapping[str, str]
) -> dict[str, ScoreRequest]:
    """Return one request for each data source.

    The first source of each function comes before the second one of any.
    """
    requests: dict[str, ScoreRequest] = {}
    for file in files:
        assert file.prompts is not None, "only files of prompts are scored"
        for source, request in _first_requests(file.prompts).items():
            requests.setdefault(source, request)

    counts: Counter[str | None] = Counter()
    turns = {}
    for source in requests:
        function = functions.get(source, functions.get("default"))
        turns[source] = counts[function]
        counts[function] += 1
    return dict(sorted(requests.items(), key=lambda item: turns[item[0]]))


def _first_requests(prompts: Prompts) -> dict[str, ScoreRequest]:
    """Return a request for the first row of each data source."""
    rows: dict[str, int] = {}
    for row, source in enumerate(prompts.data_source.texts()):
        rows.setdefault(source, row)
    return dict(zip(rows, requests_at(prompts, list(rows.values())), strict=True))


def requests_at(prompts: Prompts, rows: Sequence[int]) -> list[ScoreRequest]:
    """Return a request for each of these rows, whose group is its number here."""
    # A column is decoded as a whole, so once for all rows.
    sources = prompts.data_source.texts()
    answers = prompts.answer.texts()
    messages = prompts.messages.texts()
    extras = prompts.extra.texts()
    requests = []
    for number, row in enumerate(rows):
        prompt = prompt_text(messages[row])
        answer = answers[row] if prompts.has_answer[row] else None
        request = ScoreRequest(
            response=prompt if answer is None else answer,
            answer=answer,
            prompt=prompt,
            data_source=sources[row],
            extra=json.loads(extras[row]),
            step=1,
            group=number,
            conversation=json.loads(messages[row]),
        )
        requests.append(request)
    return requests


def as_the_run_asks(request: ScoreRequest, config: Config) -> ScoreRequest:
    """Return a request as one about an episode, if the run makes one of its record."""
    if not isinstance(config, RLConfig):
        return request
    environments = config.agent.environments
    if environment_of(request.extra, request.data_source, environments) is None:
        return request
    return replace(
        request,
        episode_score=0.0,
        episode_end=End.COMPLETED.value,
        episode_conversations=[
            [
                {"role": "user", "content": request.prompt},
                {"role": "assistant", "content": request.response},
            ]
        ],
    )


def tokenizer_for(
    functions: Mapping[str, str], config: Config
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the policy; None where no function asks for tokens."""
    # Built-in functions ask for none.
    has_own = None in map(built_in_of, functions.values())
    return tried_tokenizer(config) if has_own else None


def pair_of(
    request: ScoreRequest, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[ScoreRequest, ScoreRequest]:
    """Return a request with the tokens of its response, and with an empty response.

    Args:
        request: The request.
        tokenizer: Tokenizer of the policy; None where no function asks for tokens.
    """
    # The last message of an episode is its response.
    conversations = [
        [*messages[:-1], {**messages[-1], "content": ""}]
        for messages in request.episode_conversations
    ]
    empty = replace(
        request, response="", num_tokens=1, episode_conversations=conversations
    )
    if tokenizer is None:
        return request, empty

    end: int = tokenizer.eos_token_id
    try:
        columns = encode(
            tokenizer,
            [request.response],
            special=False,
            where=lambda _: "a trial response",
        )
        tokens = [*columns[0].tolist(), end]
    # The policy could not write this answer; the trial is about the function.
    except DataError:
        tokens = [end]
    own = replace(request, tokens=tokens, num_tokens=len(tokens))
    return own, replace(empty, tokens=[end])
