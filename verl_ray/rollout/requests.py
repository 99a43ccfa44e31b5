"""What is asked of a rollout engine, and what it answers: token ids in, token ids and log-probs out.

Invariant: values; nothing here knows an engine. Deliberately not here: text, and the rows that a run makes of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from verl_ray.data.stages import Finish

Tokens = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Log-probs are those of the distribution drawn from: after temperature, top_p and top_k."""

    temperature: float  # 0 = greedy; the log-probs are then those at temperature 1
    top_p: float  # 1 = all tokens
    top_k: int  # -1 = all tokens
    max_tokens: int
    stop_token_ids: tuple[int, ...] | None = None  # None = the model's end-of-sequence tokens; () = run to max_tokens


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue. The same seed and prompt give the same tokens, whatever runs beside them."""

    request_id: int
    tokens: Tokens
    sampling: Sampling
    seed: int
    stream: bool = False  # chunks as tokens are sampled, instead of one at the end
    session: str | None = None  # requests of one session share a prefix: a hint
    gives_way: bool = False  # ended where it is when sleep or a weight update needs an engine without requests


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens of one request that have not been delivered before: all of them, unless it streams."""

    request_id: int
    tokens: Tokens  # a stop token is included
    log_probs: Float32  # of each token
    finish: Finish | None  # None = more to come
    first_token: int  # index of tokens[0] in the response
    version_spans: tuple[tuple[int, int], ...]  # (index in the response of the span's first token, policy version)


class Progress(NamedTuple):
    """What one step of an engine added to one request."""

    request_id: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish: Finish | None
