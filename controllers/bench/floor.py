"""The floor of a training step: the time of raw vLLM and raw PyTorch for the same
tokens in one process.

Invariant: the floor works on the same rows, token for token. It generates as many
responses of the same lengths. The rows of the step go through a padded Hugging Face
model for the reference, the loss, its gradient and AdamW. There is no Ray, no
streaming, no score, no weight sync and no verification, and updates are thrown away.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import numpy.typing as npt

from verl_ray.config.section import resolved
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.batch import Int64
from verl_ray.data.stages import Rollouts
from verl_ray.errors import VerlRayError

if TYPE_CHECKING:
    import torch
    from vllm import LLM

T = TypeVar("T", bound=np.generic)

_READY_S = 300.0
"""Limit for the child to load its models."""
_EXIT_S = 10.0
_STEP_S = 600.0
"""Limit for the child to do one step."""
_CLIP = 0.2
_KL_COEFFICIENT = 0.001


@dataclass(frozen=True)
class FloorSpec:
    """The model that the child loads, and its environment before it imports torch."""

    environment: dict[str, str]
    model_path: str
    dtype: str
    kv_cache_bytes: int
    max_model_len: int
    learning_rate: float


class Floor:
    """A child process that does the work of a step in the most direct way.

    It is used as a context manager: `with Floor(config, threads) as floor:`.
    """

    def __init__(self, config: RLConfig, threads: int) -> None:
        # The child imports this module, too. It may not import torch before it has its
        # environment, so these imports stay inside of the function.
        from verl_ray.cluster.environment import thread_environment
        from verl_ray.rollout.vllm_setup import environment

        rollout = config.rollout
        spec = FloorSpec(
            environment={
                **thread_environment(threads),
                **environment("cpu", threads),
            },
            model_path=config.actor.model.folder,
            dtype=resolved(rollout.dtype),
            kv_cache_bytes=int(resolved(rollout.kv_cache_gib) * 2**30),
            max_model_len=config.data.max_prompt_tokens + rollout.max_response_tokens,
            learning_rate=config.actor.optimizer.lr,
        )

        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child_connection, spec), name="floor", daemon=True
        )
        self._process.start()
        child_connection.close()
        self._receive(_READY_S)

    def step(self, rows: Rollouts) -> dict[str, float]:
        """Return the seconds of each part (`gen`, `ref`, `update`) for these rows."""
        self._connection.send(rows)
        return self._receive(_STEP_S)

    def close(self) -> None:
        """End the child."""
        self._connection.close()  # the child exits when it reads the end of file
        self._process.join(_EXIT_S)
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _receive(self, timeout_s: float) -> dict[str, float]:
        try:
            if self._connection.poll(timeout_s):
                reply: dict[str, float] = self._connection.recv()
                return reply
        except EOFError:
            pass
        self.close()
        raise VerlRayError(
            "the process that measures the floor exited or hung; its last output is"
            " above"
        )


def _serve(connection: Connection, spec: FloorSpec) -> None:
    """Run the child: reply to rows with seconds.

    The loop consumes the rows of one step at a time, waits for the next ones, and ends
    when the connection is closed.
    """
    os.environ.update(spec.environment)
    from vllm import LLM

    llm = LLM(
        spec.model_path,
        skip_tokenizer_init=True,
        dtype=spec.dtype,
        enforce_eager=True,
        kv_cache_memory_bytes=spec.kv_cache_bytes,
        max_model_len=spec.max_model_len,
        generation_config="vllm",
    )
    training = _Training(spec)
    connection.send({})
    while True:
        try:
            rows: Rollouts = connection.recv()
        except EOFError:
            return

        start = time.perf_counter()
        _generate(llm, rows)
        after_generation = time.perf_counter()
        reference = training.reference(rows)
        after_reference = time.perf_counter()
        training.update(rows, reference)
        after_update = time.perf_counter()

        seconds = {
            "gen": after_generation - start,
            "ref": after_reference - after_generation,
            "update": after_update - after_reference,
        }
        connection.send(seconds)


def _generate(llm: LLM, rows: Rollouts) -> None:
    """Generate responses of the same lengths to the same prompts, with log-probs."""
    from vllm import SamplingParams

    prompts = []
    for start, length in zip(rows.offsets, rows.prompt_length, strict=False):
        tokens = rows.tokens[start : start + length].tolist()
        prompts.append({"prompt_token_ids": tokens})

    sampling = [
        SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
        for length in rows.response_length.tolist()
    ]
    llm.generate(prompts, sampling, use_tqdm=False)


class _Training:
    """A policy with AdamW, and its reference.

    Both are plain Hugging Face models on padded rows.
    """

    def __init__(self, spec: FloorSpec) -> None:
        import torch

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
