"""Outputs of vLLM's engine core as values of this project.

Invariant: tokens and log-probs are handed on as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verl_ray.columns.stages import Finish
from verl_ray.rollout.requests import (
    GenerationProgress,
    PromptLogProbs,
)

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORTED}


def progress_of(output: EngineCoreOutput) -> GenerationProgress:
    """Return what a step has added to a request."""
    log_probs: list[float] = []
    if output.new_logprobs is not None:
        log_probs = output.new_logprobs.logprobs[:, 0].tolist()

    finish = None
    if output.finish_reason is not None:
        finish = _FINISH[str(output.finish_reason)]

    return GenerationProgress(
        request_id=int(output.request_id),
        tokens=output.new_token_ids,
        log_probs=log_probs,
        finish=finish,
        prompt=prompt_log_probs_of(output),
        routed_experts=None
        if output.routed_experts is None
        else output.routed_experts.astype(np.int16, copy=False),
    )


def prompt_log_probs_of(output: EngineCoreOutput) -> PromptLogProbs | None:
    """Return the log-probs of a part of the prompt; None where there are none.

    The likeliest token is the prompt's own where the request asked for no other.
    """
    tensors = output.new_prompt_logprobs_tensors
    if tensors is None:
        return None
    # The prompt's own token comes first, and others by their log-probs.
    log_probs = tensors.logprobs.float().cpu().numpy()
    tokens = tensors.logprob_token_ids.cpu().numpy().astype(np.int32)
    best = min(1, tokens.shape[1] - 1)
    return PromptLogProbs(log_probs[:, 0], tokens[:, best], log_probs[:, best])
