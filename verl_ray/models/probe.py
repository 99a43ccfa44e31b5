"""Fixed rows, and what plain transformers says of them: the other side of every comparison with a written model.

Invariant: the rows depend on nothing but the vocabulary's size, and the model is read from its directory by
transformers alone. Deliberately not here: what the comparison is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_ray.data.batch import offsets_of
from verl_ray.data.stages import Float32, Rows

LENGTHS = (9, 5, 14)


def probe_rows(vocab_size: int, longest: int = max(LENGTHS)) -> Rows:
    """A few rows of up to `longest` tokens from all over the vocabulary, each token but the first under the response
    mask."""
    offsets = offsets_of(np.minimum(LENGTHS, longest))
    mask = np.ones(int(offsets[-1]), np.bool_)
    mask[offsets[:-1]] = False
    tokens = np.random.default_rng(vocab_size).integers(0, vocab_size, len(mask)).astype(np.int32)
    return Rows(offsets=offsets, tokens=tokens, response_mask=mask)


@torch.no_grad()
def plain_outputs(path: str, rows: Rows, policy: bool) -> Float32:
    """In float32 on the CPU, row by row: log-probs [tokens], 0 outside the response mask, or scores [rows]. `path` may
    be that of an adapter, which names its base."""
    model = _plain_model(path, policy)
    body = model.base_model
    found = []
    for start, end in zip(rows.offsets, rows.offsets[1:], strict=False):
        tokens = torch.from_numpy(rows.tokens[start:end].astype(np.int64))
        if policy:
            log_p = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1], -1)
            found += [torch.zeros(1), log_p.gather(1, tokens[1:, None])[:, 0]]
        else:
            found.append(model.score(body(input_ids=tokens[None]).last_hidden_state[0, -1]))
    numbers: Float32 = torch.cat(found).numpy()
    return numbers


def _plain_model(path: str, policy: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    def load(folder: str) -> Any:
        if policy:
            return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        return AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, num_labels=1
        )

    if not (Path(path) / "adapter_config.json").is_file():
        return load(path)
    from peft import PeftConfig, PeftModel

    base = load(str(PeftConfig.from_pretrained(path).base_model_name_or_path))
    return PeftModel.from_pretrained(base, path).merge_and_unload()
