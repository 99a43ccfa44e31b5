"""One transformer with the head its role reads: the vocabulary (policy) or one number per token (value, score).

Invariant: a forward pass is a single call of this module on packed rows, so that wrappers (DDP, FSDP) see one module;
logits are never held for tokens that nobody asked about. Parameters carry the Hugging Face names of the model they
export to. Deliberately not here: micro-batches, losses, precision and placement (the engines' business).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from verl_ray.errors import ModelError
from verl_ray.models import attention
from verl_ray.models.weights import CheckpointReader, fill, materialize, parameters_on_meta
from verl_ray.ops.log_probs import head_log_probs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HeadKind = Literal["policy", "value"]
VALUE_HEAD = "score.weight"  # the name it has in Hugging Face's sequence-classification models
LANGUAGE_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Outputs:
    """What a caller wants of a model."""

    log_probs: bool = False
    entropy: bool = False
    greedy: bool = False
    values: bool = False
    scores: bool = False
    temperature: float = 1.0


@dataclass(frozen=True)
class PackedRows:
    """Rows in the form a model takes, on its device."""

    input_ids: Tensor  # int64 [1, tokens]
    position_ids: Tensor  # int64 [1, tokens]
    layout: attention.Layout
    before: Tensor  # int64 [read]: the token before each token that is read
    targets: Tensor  # int64 [read]: ids of the tokens that are read
    ends: Tensor  # int64 [rows]: the last token of each row


@dataclass(frozen=True)
class TokenOutputs:
    """Per token that is read, float32 [read], or per row; what was not asked for is absent."""

    log_probs: Tensor | None = None  # of the target, given all before it, at the asked temperature
    entropy: Tensor | None = None  # of the distribution the target was drawn from
    greedy: Tensor | None = None  # bool: the target is the most probable token
    values: Tensor | None = None  # the head's number before the target
    scores: Tensor | None = None  # float32 [rows]: the head's number after each row's last token


class RoleModel(nn.Module):
    """A Hugging Face model and its head. `hf` holds the parameters under their exported names."""

    hf: PreTrainedModel

    def __init__(self, hf: PreTrainedModel, kind: HeadKind) -> None:
        super().__init__()
        self.hf = hf
        self.kind = kind

    @property
    def backbone(self) -> PreTrainedModel:
        return self.hf.base_model

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer blocks: the units of sharding and of activation checkpointing."""
        return self.backbone.layers

    def forward(self, rows: PackedRows, outputs: Outputs) -> TokenOutputs:
        hidden = self.backbone(
            input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False, layout=rows.layout
        ).last_hidden_state
        hidden = hidden.squeeze(0)
        if self.kind == "value":
            return TokenOutputs(
                values=self._numbers(hidden, rows.before) if outputs.values else None,
                scores=self._numbers(hidden, rows.ends) if outputs.scores else None,
            )
        read = hidden.index_select(0, rows.before)
        head = self.hf.get_output_embeddings()
        found = head_log_probs(
            read, head.weight, rows.targets, temperature=outputs.temperature, with_entropy=outputs.entropy,
            with_greedy=outputs.greedy,
        )  # fmt: skip
        return TokenOutputs(log_probs=found.log_probs, entropy=found.entropy, greedy=found.greedy)

    def _numbers(self, hidden: Tensor, at: Tensor) -> Tensor:
        """The value head at some tokens, float32 [at], whatever the type of the layers before it."""
        with torch.autocast(hidden.device.type, enabled=False):
            read, weight = hidden.index_select(0, at).float(), self.hf.score.weight.float()
            return torch.nn.functional.linear(read, weight).squeeze(-1)


def build_role_model(path: str, kind: HeadKind, *, new_head: bool = True) -> RoleModel:
    """The model of a directory as a float32 RoleModel without memory for its parameters: shard it, then fill it.

    A value model built from a language model gets a new head, unless `new_head` is False; its language head is left
    aside. One built from a sequence-classification model (a reward model) keeps its head. Raises ModelError for a
    directory that is missing or does not fit, and for settings that this project does not compute (dropout, sliding
    windows).
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    checkpoint = CheckpointReader(path)
    AttentionInterface.register(attention.NAME, attention.attend)
    extra = {} if kind == "policy" else {"num_labels": 1}
    config = AutoConfig.from_pretrained(path, local_files_only=True, **extra)
    _refuse_unsupported(path, config)
    family = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    if kind == "value":
        _refuse_head(path, checkpoint, new_head)
    with parameters_on_meta():
        hf = family.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    hf.tie_weights()
    return RoleModel(hf.train(), kind)


def fill_role_model(model: RoleModel, path: str, *, seed: int, device: torch.device) -> None:
    """Memory on `device`, and the values of the directory, for the parameters of a model that `build_role_model` made
    and that may have been sharded since: each rank reads its own slices. A new head is drawn from `seed`."""
    hf = model.hf
    materialize(hf, device)
    hf.tie_weights()
    new = frozenset() if model.kind == "policy" else frozenset({VALUE_HEAD})
    unused = frozenset() if model.kind == "policy" else frozenset({LANGUAGE_HEAD})
    # A new head starts near 0: values of a magnitude of 1 would drown the first advantages.
    init_std = 1 / hf.config.hidden_size
    fill(hf, CheckpointReader(path), new=new, unused=unused, seed=seed, init_std=init_std)


def load_role_model(path: str, kind: HeadKind, *, seed: int, device: torch.device, new_head: bool = True) -> RoleModel:
    """Both in one, for a model that nothing shards."""
    model = build_role_model(path, kind, new_head=new_head)
    fill_role_model(model, path, seed=seed, device=device)
    return model


def _refuse_head(path: str, checkpoint: CheckpointReader, new_head: bool) -> None:
    wanted = (
        "Give the directory of a sequence-classification model with one label, as `train --config-name reward_model` "
        "writes it"
    )
    if VALUE_HEAD not in checkpoint and not new_head:
        raise ModelError(f"{path} has no {VALUE_HEAD}: it is no reward model. {wanted}")
    labels = checkpoint.shape(VALUE_HEAD)[0] if VALUE_HEAD in checkpoint else 1
    if labels != 1:
        raise ModelError(f"{path} has {labels} labels: its {VALUE_HEAD} gives {labels} numbers per row. {wanted}")


def _refuse_unsupported(path: str, config: object) -> None:
    dropout = {k: v for k, v in vars(config).items() if "dropout" in k and isinstance(v, float) and v > 0}
    if dropout:
        raise ModelError(
            f"model.path: {path} sets {dropout}; log-probs must be deterministic: set these to 0 in config.json"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ModelError(f"model.path: {path} has sliding-window layers, which this version does not compute")
