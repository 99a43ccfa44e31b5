"""Values that go into a rollout engine and come out of it, all in token ids.

Invariant: these are plain values, and nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from verl_ray.columns.stages import Finish, Int16

Tokens = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """Parameters by which tokens are sampled.

    The log-probs of a response are those of the distribution that was sampled from,
    which is the one after temperature, top_p and top_k.

    Attributes:
        temperature: 0 samples greedily; the log-probs are then those at temperature 1.
        top_p: 1 keeps all tokens.
        top_k: -1 keeps all tokens.
        max_tokens: Largest number of tokens of a response.
        stop_token_ids: Tokens that end a response. None stands for the model's
            end-of-sequence tokens; () generates up to `max_tokens`.
        stop: Texts that end a response. The last token is the one that completes the
            text. Special tokens are part of the text, by their names.
        grammar: What the tokens have to match, as a structural tag of xgrammar in JSON;
            None for anything. The distribution is then that of the tokens that match.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    grammar: str | None = None


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """A prompt to continue.

    The same seed and prompt give the same tokens, whatever else the engine computes at
    the same time.

    Attributes:
        request_id: Number of the request, unique among those in flight.
        tokens: Token ids of the prompt.
        sampling: Parameters by which the response is sampled.
        seed: Seed of the request's own random generator.
        stream: Deliver chunks as tokens are sampled, instead of one at the end.
        session: A hint: the requests of a session share a prefix.
        preemptible: The request is aborted, with the tokens it has, when sleep or a
            weight update needs an engine without requests.
        scores_prompt: Also return the log-probs of the prompt's own tokens.
    """

    request_id: int
    tokens: Tokens
    sampling: Sampling
    seed: int
    stream: bool = False
    session: str | None = None
    preemptible: bool = False
    scores_prompt: bool = False


@dataclass(frozen=True, eq=False)
class PromptLogProbs:
    """Log-probs of the tokens of a prompt but the first, each given those before it.

    They are those at temperature 1, whatever the request samples at.

    Attributes:
        log_probs: The log-prob of each token, [tokens - 1].
        best_tokens: The likeliest token in its place, [tokens - 1].
        best_log_probs: The log-prob of that one, [tokens - 1].
    """

    log_probs: Float32
    best_tokens: Tokens
    best_log_probs: Float32

    @classmethod
    def joined(cls, parts: Sequence[PromptLogProbs]) -> PromptLogProbs | None:
        """Return the log-probs of a prompt from those of its parts; None for none."""
        if not parts:
            return None
        return cls(
            np.concatenate([part.log_probs for part in parts]),
            np.concatenate([part.best_tokens for part in parts]),
            np.concatenate([part.best_log_probs for part in parts]),
        )


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens of a request that were not delivered before.

    A request that does not stream has a single chunk, with all of its tokens.

    Attributes:
        request_id: The request that the tokens belong to.
        tokens: The token ids; a stop token is included.
        log_probs: The log-prob of each token.
        finish: Why the response ended; None while more chunks follow.
        first_token: Index of `tokens[0]` in the response.
        version_spans: The policy version of every token, as pairs of the index in the
            response where a span begins and the version of that span.
        prompt: The log-probs of the prompt, in the first chunk of a request that scores
            its prompt.
        routed_experts: The experts of the positions that these tokens were sampled
            behind, [positions, layers, k], where they are recorded; of all positions of
            the prompt with the response's first token.
    """

    request_id: int
    tokens: Tokens
    log_probs: Float32
    finish: Finish | None
    first_token: int
    version_spans: tuple[tuple[int, int], ...]
    prompt: PromptLogProbs | None = None
    routed_experts: Int16 | None = None


class GenerationProgress(NamedTuple):
    """Tokens that a step of an engine added to a request.

    Attributes:
        request_id: The request that was continued.
        tokens: The new token ids, possibly none.
        log_probs: The log-prob of each new token.
        finish: Why the response ended with this step; None = it goes on.
        prompt: Log-probs of the prompt, or of a part of it, where it is scored.
        routed_experts: As in `Chunk`.
    """

    request_id: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish: Finish | None
    prompt: PromptLogProbs | None = None
    routed_experts: Int16 | None = None


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        kv_cache_use: Share of the KV cache that requests hold, 0 to 1.
        running: Number of requests that hold a part of it and are sampled from.
        waiting: Number of requests that wait for space.
        preemptions: How often, since the start, a request lost its part to others. What
            a pause frees does not count.
    """

    kv_cache_use: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
