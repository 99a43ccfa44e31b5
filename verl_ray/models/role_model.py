"""One transformer with the head its role reads: the vocabulary (policy) or one number per token (value, score).

Invariant: a forward pass is a single call of this module on packed rows, so that wrappers (DDP, FSDP) see one module;
logits are never held for tokens that nobody asked about. Parameters carry the Hugging Face names of the model they
export to. Deliberately not here: micro-batches, losses, precision and placement (the engines' business).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from verl_ray.config.roles import LoraConfig
from verl_ray.errors import ModelError
from verl_ray.models import attention, lora
from verl_ray.models.experts import RouterWatch, routing
from verl_ray.models.families import FAMILIES, LANGUAGE_HEAD, VALUE_HEAD, WITH_EXPERTS
from verl_ray.models.weights import TensorSource, fill, materialize, parameters_on_meta
from verl_ray.ops.log_probs import HeadOutputs, head_log_probs
from verl_ray.ops.outputs import Outputs, TokenOutputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HeadKind = Literal["policy", "value"]


@dataclass(frozen=True)
class PackedRows:
    """Rows in the form a model takes, on its device."""

    input_ids: Tensor  # int64 [1, tokens]
    position_ids: Tensor  # int64 [1, tokens]
    layout: attention.Layout
    before: Tensor  # int64 [read]: the token before each token that is read
    targets: Tensor  # int64 [read]: ids of the tokens that are read
    ends: Tensor  # int64 [rows]: the last token of each row


class VocabularyHead(nn.Linear):
    """The language head of a policy. A module of its own that is called, so that it can be sharded by itself."""

    def forward(self, read: Tensor, targets: Tensor, outputs: Outputs) -> HeadOutputs:  # type: ignore[override]
        """What the head says of `targets` int64 [read] from the hidden states before them [read, hidden]."""
        return head_log_probs(
            read, self.weight, targets, temperature=outputs.temperature, bias=self.bias,
            with_entropy=outputs.entropy, with_greedy=outputs.greedy,
        )  # fmt: skip


class ValueHead(nn.Linear):
    """The head of a value model: one number per token. A module of its own, as the vocabulary's."""

    def forward(self, hidden: Tensor) -> Tensor:
        """float32 [tokens], whatever the type of the hidden states [tokens, hidden]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.float() @ self.weight.float()[0]


class RoleModel(nn.Module):
    """A Hugging Face model and its head. `hf` holds the parameters under their exported names."""

    hf: PreTrainedModel

    def __init__(self, hf: PreTrainedModel, kind: HeadKind) -> None:
        super().__init__()
        self.hf = hf
        self.kind = kind
        self.routers = RouterWatch(hf) if hf.config.model_type in WITH_EXPERTS else None

    @property
    def backbone(self) -> PreTrainedModel:
        return self.hf.base_model

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer blocks: the units of sharding and of activation checkpointing."""
        return self.backbone.layers

    @property
    def embedding_units(self) -> list[nn.Module]:
        """What stands before and behind the layers, apart where it can be: a tied embedding is one with the head."""
        embedding, head = self.hf.get_input_embeddings(), self.hf.get_output_embeddings()
        if head is None:
            return [embedding]
        return [] if head.weight is embedding.weight else [embedding, head]

    @property
    def heads_of_others(self) -> tuple[dict[str, float], frozenset[str]]:
        """What the checkpoint of a model with another head lacks, with the scale that it is drawn from, and what it has
        beyond this one."""
        if self.kind == "policy":
            return {}, frozenset()
        # A new head starts near 0: values of a magnitude of 1 would drown the first advantages.
        return {VALUE_HEAD: 1 / self.hf.config.hidden_size}, frozenset({LANGUAGE_HEAD})

    def forward(self, rows: PackedRows, outputs: Outputs) -> TokenOutputs:
        with contextlib.ExitStack() as around:
            if outputs.base:
                around.enter_context(lora.without_adapters(self.hf))
            said = around.enter_context(self.routers.listening()) if self.routers and outputs.routing else []
            hidden = self.backbone(
                input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False, layout=rows.layout
            ).last_hidden_state.squeeze(0)
        routed = routing(said, rows.ends) if said else None
        if self.kind == "value":
            return TokenOutputs(
                values=self._numbers(hidden, rows.before) if outputs.values else None,
                scores=self._numbers(hidden, rows.ends) if outputs.scores else None,
                routing=routed,
            )
        found = self.hf.get_output_embeddings()(hidden.index_select(0, rows.before), rows.targets, outputs)
        return TokenOutputs(log_probs=found.log_probs, entropy=found.entropy, greedy=found.greedy, routing=routed)

    def _numbers(self, hidden: Tensor, at: Tensor) -> Tensor:
        """The value head at some tokens, float32 [at]."""
        found: Tensor = self.hf.score(hidden.index_select(0, at))
        return found


def build_role_model(
    source: TensorSource, path: str, kind: HeadKind, *, new_head: bool = True, adapter: LoraConfig | None = None
) -> RoleModel:
    """The model of a directory as a float32 RoleModel without memory for its parameters: shard it, then fill it.

    A value model built from a language model gets a new head, unless `new_head` is False; its language head is left
    aside. One built from a sequence-classification model (a reward model) keeps its head. With an adapter, it and a
    value head learn, and the rest is frozen. `path` is where `source` reads, for messages. Raises ModelError for a
    directory that is missing or does not fit, and for what this project does not compute.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForSequenceClassification

    AttentionInterface.register(attention.NAME, attention.attend)
    config = source.config(**{} if kind == "policy" else {"num_labels": 1})
    _refuse_unsupported(path, config)
    family = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    if kind == "value":
        _refuse_head(path, source, new_head)
    with parameters_on_meta():
        hf = family.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
        hf.tie_weights()
        if kind == "policy":
            hf.get_output_embeddings().__class__ = VocabularyHead
        else:
            hf.score.__class__ = ValueHead
        if adapter is not None:
            lora.add_adapters(hf, adapter, learning=() if kind == "policy" else (VALUE_HEAD,))
    return RoleModel(hf.train(), kind)


def fill_role_model(model: RoleModel, source: TensorSource, *, seed: int, device: torch.device) -> None:
    """Memory on `device`, and the values of the source, for the parameters of a model that `build_role_model` made and
    that may have been sharded since. A new head, and an adapter, are drawn from `seed`."""
    hf = model.hf
    materialize(hf, device)
    hf.tie_weights()
    new, unused = model.heads_of_others
    fill(hf, source, new=new | lora.initial_scales(hf), unused=unused, seed=seed)


def _refuse_head(path: str, checkpoint: TensorSource, new_head: bool) -> None:
    wanted = (
        "Give the directory of a sequence-classification model with one label, as `train --config-name reward_model` "
        "writes it"
    )
    if VALUE_HEAD not in checkpoint and not new_head:
        raise ModelError(f"{path} has no {VALUE_HEAD}: it is no reward model. {wanted}")
    labels = checkpoint.shape(VALUE_HEAD)[0] if VALUE_HEAD in checkpoint else 1
    if labels != 1:
        raise ModelError(f"{path} has {labels} labels: its {VALUE_HEAD} gives {labels} numbers per row. {wanted}")


def _refuse_unsupported(path: str, config: PretrainedConfig) -> None:
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"model.path: {path} is a {config.model_type!r} model; the supported ones are {', '.join(FAMILIES)}"
        )
    dropout = {k: v for k, v in vars(config).items() if "dropout" in k and isinstance(v, float) and v > 0}
    if dropout:
        raise ModelError(
            f"model.path: {path} sets {dropout}; log-probs must be deterministic: set these to 0 in config.json"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ModelError(f"model.path: {path} has sliding-window layers, which this version does not compute")
