"""The floor of a training step: what raw vLLM and raw PyTorch take for the same tokens in one process.

Invariant: the same rows, token for token: as many responses of the same lengths are generated, and the very rows of
the step go through a padded Hugging Face model for the reference, the loss, its gradient and AdamW. No Ray, no
streaming, no scores, no weight sync, nothing verified. Deliberately not a trainer: what it learns is thrown away.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.stages import Rollouts
from verl_ray.errors import VerlRayError

if TYPE_CHECKING:
    import torch
    from vllm import LLM

_READY_S = 300.0  # until the child has loaded its models
_END_S = 10.0
_ANSWER_S = 600.0  # until it has done one step
_CLIP, _KL_COEFFICIENT = 0.2, 0.001


@dataclass(frozen=True)
class Spec:
    """What the child loads, and the environment that it needs before it imports torch."""

    environment: dict[str, str]
    model_path: str
    dtype: str
    kv_cache_bytes: int
    max_model_len: int
    learning_rate: float


class Floor:
    """A child process that does the work of a step the direct way: `with Floor(config, threads) as floor:`."""

    def __init__(self, config: RLConfig, threads: int) -> None:
        # Here, since what this module imports the child imports, too, and these import torch.
        from verl_ray.cluster.host import thread_environment
        from verl_ray.rollout.vllm_setup import environment

        spec = Spec(
            {**thread_environment(threads), **environment("cpu", threads)},
            config.actor.model.path,
            config.rollout.dtype,
            int(config.rollout.kv_cache_gib * 2**30),
            config.data.max_prompt_tokens + config.rollout.max_response_tokens,
            config.actor.optimizer.lr,
        )
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec), name="floor", daemon=True)
        self._process.start()
        theirs.close()
        self._receive(_READY_S)

    def step(self, rows: Rollouts) -> dict[str, float]:
        """Seconds by part (`gen`, `ref`, `update`) for the rows of one step."""
        self._connection.send(rows)
        return self._receive(_ANSWER_S)

    def close(self) -> None:
        """End the child."""
        self._connection.close()  # the child ends when it reads the end of it
        self._process.join(_END_S)
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _receive(self, timeout_s: float) -> dict[str, float]:
        try:
            if self._connection.poll(timeout_s):
                answer: dict[str, float] = self._connection.recv()
                return answer
        except EOFError:
            pass
        self.close()
        raise VerlRayError("the process that measures the floor ended or hung; its last words are above")


def _serve(connection: Connection, spec: Spec) -> None:
    """The child: answers rows with seconds until the other end of the connection is closed."""
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
        began = time.perf_counter()
        _generate(llm, rows)
        generated = time.perf_counter()
        reference = training.reference(rows)
        measured = time.perf_counter()
        training.update(rows, reference)
        ended = time.perf_counter()
        connection.send({"gen": generated - began, "ref": measured - generated, "update": ended - measured})


def _generate(llm: LLM, rows: Rollouts) -> None:
    """As many responses of the same lengths to the same prompts, with the log-probabilities of their tokens."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": rows.tokens[start : start + length].tolist()}
        for start, length in zip(rows.offsets, rows.prompt_length, strict=False)
    ]
    lengths = rows.response_length.tolist()
    wanted = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False) for n in lengths]
    llm.generate(prompts, wanted, use_tqdm=False)


class _Training:
    """A policy with AdamW and its reference, both plain Hugging Face models on padded rows."""

    def __init__(self, spec: Spec) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        def model() -> torch.nn.Module:
            loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=torch.float32)
            return loaded

        self._policy, self._reference = model(), model().requires_grad_(False)
        self._optimizer = torch.optim.AdamW(self._policy.parameters(), lr=spec.learning_rate, fused=True)

    def reference(self, rows: Rollouts) -> torch.Tensor:
        import torch

        with torch.no_grad():
            return self._log_probs(self._reference, rows)

    def update(self, rows: Rollouts, reference: torch.Tensor) -> None:
        """One step of the clipped surrogate with the divergence from the reference (k3) in the loss."""
        import torch

        log_probs = self._log_probs(self._policy, rows)
        mask = torch.from_numpy(_padded(rows, rows.response_mask)[:, 1:])
        advantage = torch.randn(len(mask), 1)  # the figures are not read
        ratio = (log_probs - log_probs.detach()).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantage)
        distance = reference - log_probs
        loss = (_KL_COEFFICIENT * (distance.exp() - distance - 1) - gain) * mask
        (loss.sum(1) / mask.sum(1)).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _log_probs(self, model: torch.nn.Module, rows: Rollouts) -> torch.Tensor:
        """float32 [rows, longest - 1] of each token given those before it."""
        import torch

        tokens = torch.from_numpy(_padded(rows, rows.tokens.astype(np.int64)))
        present = torch.from_numpy(_padded(rows, np.ones(rows.num_tokens, np.int64)))
        logits = model(input_ids=tokens, attention_mask=present, use_cache=False).logits[:, :-1]
        chosen: torch.Tensor = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return chosen


def _padded(rows: Rollouts, values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Token values as [rows, longest], zeros behind the end of each row."""
    inside = np.arange(rows.lengths.max()) < rows.lengths[:, None]
    table = np.zeros(inside.shape, values.dtype)
    table[inside] = values
    return table
