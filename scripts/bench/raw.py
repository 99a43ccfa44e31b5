"""Raw vLLM and raw PyTorch in processes of their own, which suites judge ours by.

Invariant: they work on the same rows in the most direct way. Responses have the same
lengths, token for token. Rows go through a padded Hugging Face model for the reference,
the loss, its gradient and AdamW. There is no Ray, no streaming, no score, no weight
sync and no verification, and updates are thrown away.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import numpy.typing as npt

from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Rollouts
from verl_ray.errors import VerlRayError

if TYPE_CHECKING:
    import torch

T = TypeVar("T", bound=np.generic)

_READY_S = 300.0
"""Limit for a process to load its models."""
_EXIT_S = 10.0
_REPLY_S = 600.0
"""Limit for a process to do what it was asked to."""
_CLIP = 0.2
_KL_COEFFICIENT = 0.001


@dataclass(frozen=True)
class RawSpec:
    """The models of a process, and its environment before it imports torch.

    Attributes:
        environment: Environment variables.
        model_path: The model of vLLM and of PyTorch.
        engine: Further arguments of vLLM's `LLM`.
        learning_rate: That of AdamW; None for a process that only generates.
    """

    environment: Mapping[str, str]
    model_path: str
    engine: Mapping[str, object]
    learning_rate: float | None = None


@dataclass(frozen=True)
class RawRequests:
    """Prompts as token ids, the exact length of each response, and seeds, if any."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    seeds: Sequence[int] | None = None


class RawProcess:
    """A process with raw vLLM, and with raw PyTorch if it learns.

    It is used as a context manager: `with RawProcess(spec) as process:`.
    """

    def __init__(self, spec: RawSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child_connection, spec), name="raw", daemon=True
        )
        self._process.start()
        child_connection.close()
        self._receive(_READY_S)

    def send(self, work: Rollouts | RawRequests) -> None:
        """Begin to make the step of these rollouts, or to generate for requests."""
        self._connection.send(work)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part of what was begun: `gen`, `ref`, `update`."""
        return self._receive(_REPLY_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._connection.close()  # the child exits when it reads the end of file
        self._process.join(_EXIT_S)
        self._process.kill()
        self._process.join()

    def _receive(self, timeout_s: float) -> dict[str, float]:
        try:
            if self._connection.poll(timeout_s):
                reply: dict[str, float] = self._connection.recv()
                return reply
        except EOFError:
            pass
        self._process.kill()
        raise VerlRayError(
            "a process of raw vLLM exited or hung; its last output is above"
        )


# ------------------------------------------------------------------- inside the process


def _serve(connection: Connection, spec: RawSpec) -> None:
    """Run the child: reply to rollouts or requests with seconds.

    The loop consumes one of them at a time, waits for the next, and ends when the
    connection is closed.
    """
    os.dup2(2, 1)  # stdout is for the figures of the parent
    os.environ.update(spec.environment)
    from vllm import LLM, SamplingParams

    llm = LLM(
        spec.model_path,
        skip_tokenizer_init=True,
        generation_config="vllm",
        seed=0,
        **spec.engine,
    )

    def generate(requests: RawRequests) -> float:
        seeds: Sequence[int | None] = requests.seeds or [None] * len(requests.lengths)
        sampling = [
            SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                seed=seed,
            )
            for length, seed in zip(requests.lengths, seeds, strict=True)
        ]
        prompts = [{"prompt_token_ids": tokens} for tokens in requests.prompts]
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    training = None if spec.learning_rate is None else _Training(spec)
    connection.send({})
    while True:
        try:
            work: Rollouts | RawRequests = connection.recv()
        except EOFError:
            return
        if isinstance(work, RawRequests):
            connection.send({"gen": generate(work)})
            continue

        assert training is not None
        seconds = {"gen": generate(_requests_of(work))}
        began = time.perf_counter()
        reference = training.reference(work)
        seconds["ref"] = time.perf_counter() - began
        training.update(work, reference)
        seconds["update"] = time.perf_counter() - began - seconds["ref"]
        connection.send(seconds)


def _requests_of(rows: Rollouts) -> RawRequests:
    """Return requests for responses of the same lengths to the same prompts."""
    prompts = [
        rows.tokens[start : start + length].tolist()
        for start, length in zip(rows.offsets, rows.prompt_length, strict=False)
    ]
    return RawRequests(prompts, rows.response_length.tolist())


class _Training:
    """A policy with AdamW, and its reference.

    Both are plain Hugging Face models on padded rows.
    """

    def __init__(self, spec: RawSpec) -> None:
        import torch

        assert spec.learning_rate is not None
        self._policy = _load_model(spec.model_path)
        self._reference = _load_model(spec.model_path).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(), lr=spec.learning_rate, fused=True
        )

    def reference(self, rows: Rollouts) -> torch.Tensor:
        """Return the reference's log-probs, float32 [rows, longest - 1]."""
        import torch

        with torch.no_grad():
            return self._log_probs(self._reference, rows)

    def update(self, rows: Rollouts, reference: torch.Tensor) -> None:
        """Do one optimizer step of the clipped surrogate with KL (k3) in the loss."""
        import torch

        log_probs = self._log_probs(self._policy, rows)
        mask = torch.from_numpy(padded(rows.lengths, rows.response_mask)[:, 1:])
        advantage = torch.randn(len(mask), 1)  # the figures are not read
        ratio = (log_probs - log_probs.detach()).exp()
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        distance = reference - log_probs
        loss = (_KL_COEFFICIENT * (distance.exp() - distance - 1) - gain) * mask
        (loss.sum(1) / mask.sum(1)).mean().backward()  # type: ignore[no-untyped-call]

        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _log_probs(self, model: torch.nn.Module, rows: Rollouts) -> torch.Tensor:
        """Return log-probs of each token given those before it.

        The result is float32 [rows, longest - 1].
        """
        import torch

        tokens = torch.from_numpy(padded(rows.lengths, rows.tokens.astype(np.int64)))
        present = torch.from_numpy(
            padded(rows.lengths, np.ones(rows.num_tokens, np.int64))
        )
        outputs = model(input_ids=tokens, attention_mask=present, use_cache=False)
        all_log_probs = torch.log_softmax(outputs.logits[:, :-1], -1)
        log_probs: torch.Tensor = all_log_probs.gather(-1, tokens[:, 1:, None])
        return log_probs.squeeze(-1)


def _load_model(path: str) -> torch.nn.Module:
    import torch
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32
    )
    return model


def padded(lengths: Int64, values: npt.NDArray[T]) -> npt.NDArray[T]:
    """Return token values as [rows, longest], with zeros after the end of each row."""
    inside = np.arange(lengths.max()) < lengths[:, None]
    table = np.zeros(inside.shape, values.dtype)
    table[inside] = values
    return table
