"""Frames between a replica and the processes of its episodes.

Invariant: nothing is unpickled on either side. The bytes of a frame, if there are any,
are token ids as numbers of 32 bits.

To a process: `start` once, then `run` for each episode, `sampled` or `failed` for each
call of its policy, and before them `grown` for each part of a turn that is heard,
`cancel` for an episode that nobody waits for any more, and `pause` and `resume` with
the engine. From it: `ready` or `broken` once, then `sample`, `give_up` for a call that
nobody waits for any more, `ended` for each episode, `held` after a user's code has held
the event loop for more than a second, `told` with what is to be said about episodes,
and `alive` every second, with the delay of the loop, the number of episodes that go on,
and that of threads that hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from verl_ray.agents.contract import (
    Action,
    End,
    Episode,
    EpisodeEnded,
    EpisodeRow,
    EpisodeTask,
    Sampled,
    ToolCall,
)
from verl_ray.agents.models import ChatSettings
from verl_ray.agents.policy import (
    Limits,
)
from verl_ray.agents.template import Renderer
from verl_ray.config.data import SpecialTokens
from verl_ray.data.tokenizers import load_tokenizer, of_day
from verl_ray.errors import CallRefused
from verl_ray.processes.frames import Frame, frame
from verl_ray.settings.function_specs import parts_of

if TYPE_CHECKING:
    from verl_ray.config.agent import AgentConfig

Tokens = npt.NDArray[np.int32]


def token_bytes(tokens: Sequence[int] | Tokens) -> bytes:
    """Return token ids as the bytes of a frame."""
    return np.asarray(tokens, np.int32).tobytes()


def tokens_of(message: Frame) -> Tokens:
    """Return the token ids of a frame."""
    return np.frombuffer(message.data, np.int32)


@dataclass(frozen=True)
class EpisodeStart:
    """Everything that a process of episodes must know before the first of them.

    Attributes:
        environments: Spec and options of the environment of each data source;
            "default" is that of all others.
        model_path: The model directory, for its tokenizer.
        limits: Limits of an episode.
        chat_template: Text of the chat template that replaces the model's.
        template_arguments: Variables of the chat template, as values of JSON.
        template_day: The day that the chat template writes; None if it writes none.
        special_tokens: What happens if a text spells a special token, see
            `data.special_tokens`.
        models: Frozen models that environments talk to, by name.
        policy_name: Name of the policy for clients of its episodes.
        reads_tools: Whether calls of tools are read in turns.
    """

    environments: Mapping[str, tuple[str, Mapping[str, Any]]]
    model_path: str
    limits: Limits
    chat_template: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    template_day: str | None = None
    special_tokens: SpecialTokens = "escape"
    models: Mapping[str, ChatSettings] = field(default_factory=dict)
    policy_name: str = "policy"
    reads_tools: bool = True

    @classmethod
    def of_run(
        cls,
        agent: AgentConfig,
        model_path: str,
        *,
        context_tokens: int,
        row_tokens: int,
        chat_template: str | None,
        template_arguments: Mapping[str, Any],
        template_day: str | None,
        special_tokens: SpecialTokens,
        policy_name: str,
    ) -> EpisodeStart:
        """Return the start of a run's processes; see `EpisodeStart` and `Limits`."""
        limits = Limits(
            max_turns=agent.max_turns,
            context_tokens=context_tokens,
            row_tokens=row_tokens,
            max_tokens=agent.max_tokens,
            max_tool_calls=agent.max_tool_calls,
            max_turn_tokens=agent.max_turn_tokens,
            max_result_tokens=agent.max_result_tokens or max(1, row_tokens // 2),
            model_s=agent.model_timeout_s,
            tool_s=agent.tool_timeout_s,
            turn_s=agent.turn_timeout_s,
            episode_s=agent.episode_timeout_s,
        )
        environments = {
            source: parts_of(spec) for source, spec in agent.environments.items()
        }
        models = {
            name: ChatSettings(**each.model_dump())
            for name, each in agent.models.items()
        }
        return cls(
            environments,
            model_path,
            limits,
            chat_template,
            template_arguments,
            template_day,
            special_tokens,
            models,
            policy_name,
            agent.tool_parser is not None,
        )

    def renderer(self) -> Renderer:
        """Return the renderer of the conversations of all episodes.

        Raises:
            ModelError: The tokenizer cannot be loaded.
            DataError: It has no chat template.
        """
        tokenizer = load_tokenizer(self.model_path, self.chat_template)
        arguments = {**of_day(self.template_day), **self.template_arguments}
        return Renderer(tokenizer, arguments, special_tokens=self.special_tokens)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> EpisodeStart:
        """Return what `fields` is made of."""
        environments = {
            source: (spec, options)
            for source, (spec, options) in fields["environments"].items()
        }
        return cls(
            environments,
            fields["model_path"],
            Limits(**fields["limits"]),
            fields["chat_template"],
            fields["template_arguments"],
            fields["template_day"],
            fields["special_tokens"],
            {name: ChatSettings(**each) for name, each in fields["models"].items()},
            fields["policy_name"],
            fields["reads_tools"],
        )


def task_fields(task: EpisodeTask) -> dict[str, Any]:
    """Return a task as fields."""
    return asdict(task)


def task_of(fields: Mapping[str, Any]) -> EpisodeTask:
    """Return the task of its fields."""
    return EpisodeTask(**fields)


# ------------------------------------------------------------------------ sampled turns


def sampled_frame(call: int, sampled: Sampled) -> bytes:
    """Return the frame of a sampled turn.

    Args:
        call: Number of the call of the policy.
    """
    action = sampled.action
    fields = {
        "call": call,
        "log_probs": [float(value) for value in sampled.log_probs],
        "versions": [list(span) for span in sampled.versions],
        "text": action.text,
        "tool_calls": [[each.name, dict(each.arguments)] for each in action.tool_calls],
        "finish": action.finish,
        "parse_error": action.parse_error,
        "reasoning": action.reasoning,
        "content": action.content,
    }
    return frame("sampled", fields, token_bytes(sampled.tokens))


def grown_frame(call: int, thoughts: str, words: str) -> bytes:
    """Return the frame of further parts of a turn; see `Listener`.

    Args:
        call: Number of the call of the policy.
    """
    return frame("grown", {"call": call, "thoughts": thoughts, "words": words})


def failed_frame(
    call: int, detail: str, *, end: End | None = None, refused: str | None = None
) -> bytes:
    """Return the frame of a turn that is not sampled.

    Args:
        call: Number of the call of the policy.
        detail: Why, for a person.
        end: How the episode ends; None if it goes on.
        refused: Where the call itself is refused, the field that is the reason, or an
            empty text.
    """
    fields = {"call": call, "end": end, "detail": detail, "refused": refused}
    return frame("failed", fields)


def failure_of(reply: Frame) -> Exception:
    """Return what a turn that is not sampled raises, of its frame."""
    end, detail, refused = (reply.fields[name] for name in ("end", "detail", "refused"))
    if end is not None:
        return EpisodeEnded(End(end))
    if refused is not None:
        return CallRefused(detail, refused or None)
    return RuntimeError(detail)


def sampled_of(reply: Frame) -> Sampled:
    """Return the sampled turn of its frame."""
    fields = reply.fields
    tokens = tokens_of(reply).tolist()
    action = Action(
        tokens,
        fields["text"],
        [ToolCall(name, arguments) for name, arguments in fields["tool_calls"]],
        fields["finish"],
        fields["parse_error"],
        fields["reasoning"],
        fields["content"],
    )
    versions = [(first, version) for first, version in fields["versions"]]
    return Sampled(tokens, fields["log_probs"], versions, action)


# ----------------------------------------------------------------------- ended episodes


def episode_frame(number: int, episode: Episode) -> bytes:
    """Return the frame of an episode that has ended.

    Args:
        number: Number of the episode.
    """
    rows = [
        {
            "length": len(row.tokens),
            "sampled": np.flatnonzero(row.mask).tolist(),
            "log_probs": [
                value for value, own in zip(row.log_probs, row.mask, strict=True) if own
            ],
            "versions": [list(span) for span in row.versions],
            "rewards": [list(reward) for reward in row.rewards],
            "turns": row.turns,
        }
        for row in episode.rows
    ]
    fields = {
        "episode": number,
        "rows": rows,
        "end": episode.end,
        "score": episode.score,
        "detail": episode.detail,
        "num_turns": episode.num_turns,
        "num_tool_calls": episode.num_tool_calls,
        "conversations": episode.conversations,
        "metrics": episode.metrics,
        "response": episode.response,
        "output": episode.output,
    }
    tokens = [token for row in episode.rows for token in row.tokens]
    return frame("ended", fields, token_bytes(tokens))


def episode_of(reply: Frame) -> Episode:
    """Return the episode of its frame."""
    fields = dict(reply.fields)
    del fields["episode"]
    tokens = tokens_of(reply)
    rows = []
    first = 0
    for row in fields.pop("rows"):
        length = row["length"]
        log_probs = np.zeros(length)
        mask = np.zeros(length, np.bool_)
        mask[row["sampled"]] = True
        log_probs[row["sampled"]] = row["log_probs"]
        rows.append(
            EpisodeRow(
                tokens[first : first + length].tolist(),
                mask.tolist(),
                log_probs.tolist(),
                [(place, version) for place, version in row["versions"]],
                [(place, reward) for place, reward in row["rewards"]],
                row["turns"],
            )
        )
        first += length
    return Episode(rows=rows, end=End(fields.pop("end")), **fields)
