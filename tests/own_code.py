"""A tiny model with code of its own, which notes every process that imports it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from verl_ray.data.tokenizers import character_tokenizer

_CONFIGURATION = """
import os, sys
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"

with open({log!r}, "a") as file:
    print(os.getpid(), os.path.basename(sys.argv[0]), file=file)
"""

# Its embeddings are twice those of Llama.
_MODELING = """
from transformers import LlamaForCausalLM, LlamaModel
from .configuration_own import OwnConfig

class OwnModel(LlamaModel):
    config_class = OwnConfig

    def forward(
        self, input_ids=None, position_ids=None, inputs_embeds=None, **settings
    ):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return super().forward(
            position_ids=position_ids, inputs_embeds=2 * inputs_embeds, **settings
        )

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
"""


def own_model(folder: Path, alphabet: str = "0123456789+= ") -> Path:
    """Write the model beside its log, without running its code, and return its folder.

    The tokenizer is one of characters.
    """
    model = folder / "own"
    character_tokenizer(model, alphabet)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(model)

    (model / "configuration_own.py").write_text(
        _CONFIGURATION.format(log=str(folder / "imports"))
    )
    (model / "modeling_own.py").write_text(_MODELING)
    file = model / "config.json"
    settings = json.loads(file.read_text()) | {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModel": "modeling_own.OwnModel",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    file.write_text(json.dumps(settings))
    return model


def importers(folder: Path) -> dict[int, str]:
    """Return the program of each process that has imported the code of the model."""
    log = folder / "imports"
    lines = log.read_text().splitlines() if log.exists() else []
    return {int(pid): program for pid, program in map(str.split, lines)}
