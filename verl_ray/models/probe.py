"""Fixed rows, and the outputs of plain transformers for them.

Every check of a written model compares with these outputs.

Invariant: the rows depend on nothing but the size of the vocabulary, and the model is
read from its directory by transformers alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_ray.data.batch import offsets_of
from verl_ray.data.stages import Float32, Rows

LENGTHS = (9, 5, 14)


def probe_rows(vocab_size: int, longest: int = max(LENGTHS)) -> Rows:
    """Return a few rows of tokens from all over the vocabulary.

    Each token but the first is under the response mask.

    Args:
        vocab_size: The size of the vocabulary.
        longest: The largest number of tokens of a row.
    """
    offsets = offsets_of(np.minimum(LENGTHS, longest))
    mask = np.ones(int(offsets[-1]), np.bool_)
    mask[offsets[:-1]] = False

    generator = np.random.default_rng(vocab_size)
    tokens = generator.integers(0, vocab_size, len(mask)).astype(np.int32)
    return Rows(offsets=offsets, tokens=tokens, response_mask=mask)


@torch.no_grad()
def plain_outputs(path: str, rows: Rows, policy: bool) -> Float32:
    """Compute outputs with plain transformers, in float32 on the CPU, row by row.

    Args:
        path: The directory of a model, or of an adapter, which names its base model.
        rows: The rows.
        policy: Compute log-probs, else scores.

    Returns:
        Log-probs [tokens], 0 outside the response mask; or scores [rows].
    """
    model = _plain_model(path, policy)
    parts: list[Tensor] = []

    for start, end in zip(rows.offsets, rows.offsets[1:], strict=False):
        tokens = torch.from_numpy(rows.tokens[start:end].astype(np.int64))
        batch = tokens[None]
        if policy:
            logits = model(input_ids=batch).logits[0, :-1]
            log_p = torch.log_softmax(logits, -1)
            # Nothing predicts the first token.
            parts.append(torch.zeros(1))
            parts.append(log_p.gather(1, tokens[1:, None])[:, 0])
        else:
            hidden = model.base_model(input_ids=batch).last_hidden_state
            parts.append(model.score(hidden[0, -1]))

    outputs: Float32 = torch.cat(parts).numpy()
    return outputs


def _plain_model(path: str, policy: bool) -> Any:
    """Load a model with transformers, and merge an adapter into its base."""
    if not (Path(path) / "adapter_config.json").is_file():
        return _load(path, policy)

    from peft import PeftConfig, PeftModel

    base_path = PeftConfig.from_pretrained(path).base_model_name_or_path
    base = _load(str(base_path), policy)
    return PeftModel.from_pretrained(base, path).merge_and_unload()


def _load(folder: str, policy: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if policy:
        return AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        )
    return AutoModelForSequenceClassification.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, num_labels=1
    )
