"""Arguments of reward functions: the values of one call, from the requests to score.

Invariant: what a batched function gets depends on the responses to one prompt
alone, in the order of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from verl_ray.rewards.request import (
    ScoreRequest,
)
from verl_ray.rewards.signatures import EPISODE_VALUES


def response_values(request: ScoreRequest) -> dict[str, object]:
    """Return the values of a call that scores one response, by name.

    Without an answer there is no `answer` and no `ground_truth`.
    """
    values: dict[str, object] = {
        "response": request.response,
        "prompt": request.prompt,
        "data_source": request.data_source,
        "extra": request.extra,
        "num_tokens": request.num_tokens,
        "finish_reason": request.finish_reason,
        "step": request.step,
        "solution_str": request.response,
        "extra_info": request.extra,
    }
    if request.answer is not None:
        values["answer"] = request.answer
        values["ground_truth"] = request.answer

    if request.episode_score is not None:
        values |= {name: getattr(request, name) for name in EPISODE_VALUES}

    # In verl's files it may be any value; the answer is its text.
    reward_model = request.extra.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        values["ground_truth"] = reward_model["ground_truth"]
    return values


class GroupLog:
    """Notes of a batched function about the responses of a call, beside scores."""

    def __init__(self, size: int) -> None:
        """Start without notes about `size` responses."""
        self.entries: list[dict[str, object]] = [{} for _ in range(size)]
        """Names and values of each response."""

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """Note one value per response.

        Raises:
            ValueError: There are more or fewer values than responses.
        """
        if len(values) != len(self.entries):
            raise ValueError(
                f"log_extra({column!r}) got {len(values)} values for"
                f" {len(self.entries)} responses"
            )
        for entries, value in zip(self.entries, values, strict=True):
            entries[column] = value

    def log_metric(self, name: str, value: object) -> None:
        """Note a value of the whole group."""
        for entries in self.entries:
            entries[name] = value


def group_values(requests: Sequence[ScoreRequest], log: GroupLog) -> dict[str, object]:
    """Return the values of a call that scores the responses to one prompt, by name."""
    columns: dict[str, object] = {
        name: [request.extra.get(name) for request in requests]
        for request in requests[:1]
        for name in request.extra
    }
    if all(request.answer is not None for request in requests):
        columns["answer"] = [request.answer for request in requests]
    response_columns = {
        "num_tokens": [request.num_tokens for request in requests],
        "finish_reason": [request.finish_reason for request in requests],
        "step": requests[0].step,
    }
    if all(request.episode_score is not None for request in requests):
        response_columns |= {
            name: [getattr(request, name) for request in requests]
            for name in EPISODE_VALUES
        }
    # A column of such a name is what a function for TRL means.
    return (
        response_columns
        | columns
        | {
            "data_source": [request.data_source for request in requests],
            "prompts": [request.conversation for request in requests],
            "completions": [_completion(request) for request in requests],
            "completion_ids": [request.tokens for request in requests],
            "trainer_state": SimpleNamespace(global_step=requests[0].step),
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
    )


def _completion(request: ScoreRequest) -> object:
    """Return a response in the form of its prompt: a text or messages.

    Messages of an episode are those from the policy's first turn on.
    """
    if isinstance(request.conversation, str):
        return request.response
    if request.episode_messages:
        messages = request.episode_messages
        turns = [n for n, each in enumerate(messages) if each["role"] == "assistant"]
        examples = [
            each for each in request.conversation if each["role"] == "assistant"
        ]
        return messages[turns[min(len(examples), len(turns) - 1)] :] if turns else []
    return [{"role": "assistant", "content": request.response}]
