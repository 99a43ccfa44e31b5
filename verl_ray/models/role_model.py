"""A transformer with the head of its role: a vocabulary (policy) or a value head.

A policy has the vocabulary head of a language model. A critic or a reward model has a
value head with one number per token.

Invariant: a forward pass is a single call of this module on packed rows, so that
wrappers (DDP, FSDP) see one module. Logits are never held for tokens that are not
selected. Parameters carry the Hugging Face names of the model that they export to.

Where layers have experts, the decisions of their routers are summarized: the load of
each expert, and a loss that balances it. The balance of a row depends on that row
alone, so the loss depends neither on the micro-batch size nor on the number of ranks.
This deviates from Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, equations 4
to 6), which takes fractions over a batch. Per row it is the sequence-wise balance of
DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20) in the scale of Switch: top_k where
experts are used evenly, up to the number of experts where they are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from verl_ray.config.roles import LoraConfig
from verl_ray.errors import ModelError
from verl_ray.models import attention, lora
from verl_ray.models.tensor_sources import TensorSource
from verl_ray.models.weights import fill, materialize, parameters_on_meta
from verl_ray.ops.installed_torch import with_tensors_found
from verl_ray.ops.log_probs import HeadOutputs, head_log_probs
from verl_ray.ops.outputs import RequestedOutputs, Routing, TokenOutputs
from verl_ray.settings.config_json import (
    FAMILIES,
    LANGUAGE_HEAD,
    VALUE_HEAD,
    WITH_EXPERTS,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HeadKind = Literal["policy", "value"]

# Where they are defined, torch is not imported yet.
with_tensors_found(Routing)
with_tensors_found(TokenOutputs)


@dataclass(frozen=True)
class PackedRows:
    """Rows in the form that a model takes, on its device. Indices are int64.

    The selected tokens are those whose outputs are read.
    """

    input_ids: Tensor
    """int64 [1, tokens]."""

    position_ids: Tensor
    """int64 [1, tokens]: position of each token within its row."""

    layout: attention.PackedLayout

    predecessors: Tensor
    """[selected]: index of the token before each selected token."""

    targets: Tensor
    """[selected]: ids of the selected tokens."""

    last_tokens: Tensor
    """[rows]: index of the last token of each row."""


class VocabularyHead(nn.Linear):
    """The language-model head of a policy.

    It is called as a module of its own, so that it can be sharded by itself.
    """

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor, outputs: RequestedOutputs
    ) -> HeadOutputs:
        """Compute the requested outputs for the selected tokens.

        Args:
            hidden: [selected, hidden], the hidden states before the targets.
            targets: int64 [selected].
            outputs: Which outputs, and the temperature.
        """
        return head_log_probs(
            hidden,
            self.weight,
            targets,
            temperature=outputs.temperature,
            bias=self.bias,
            with_entropy=outputs.entropy,
            with_greedy=outputs.greedy,
            with_squared_probs=outputs.squared_probs,
        )


class ValueHead(nn.Linear):
    """The head of a critic or a reward model, with one number per token.

    It is called as a module of its own, so that it can be sharded by itself.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32 [tokens] for hidden states [tokens, hidden] of any dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.float() @ self.weight.float()[0]


class RoleModel(nn.Module):
    """A Hugging Face model and its head.

    `hf` holds the parameters under the names of their export.
    """

    hf: PreTrainedModel

    def __init__(self, hf: PreTrainedModel, kind: HeadKind) -> None:
        super().__init__()
        self.hf = hf
        self.kind = kind
        self.router_watch: RouterWatch | None = None
        if hf.config.model_type in WITH_EXPERTS:
            self.router_watch = RouterWatch(hf)

    @property
    def backbone(self) -> PreTrainedModel:
        """The model without its head."""
        return self.hf.base_model

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer blocks: units of sharding and activation checkpointing."""
        return self.backbone.layers

    @property
    def embedding_units(self) -> list[nn.Module]:
        """The embedding and the language-model head, where they can be sharded alone.

        The list is empty for tied embeddings, which are a single parameter.
        """
        embedding = self.hf.get_input_embeddings()
        head = self.hf.get_output_embeddings()
        if head is None:
            return [embedding]
        if head.weight is embedding.weight:
            return []
        return [embedding, head]

    @property
    def head_differences(self) -> tuple[dict[str, float], frozenset[str]]:
        """The differences between this model and a checkpoint with another head.

        Returns:
            The parameters that the checkpoint may lack, with the standard deviation of
            their initial values; and the tensors that only the checkpoint has.
        """
        if self.kind == "policy":
            return {}, frozenset()
        # A new head starts near 0, because values of magnitude 1 would drown the first
        # advantages.
        std = 1 / self.hf.config.hidden_size
        return {VALUE_HEAD: std}, frozenset({LANGUAGE_HEAD})

    def forward(self, rows: PackedRows, outputs: RequestedOutputs) -> TokenOutputs:
        decisions: RouterDecisions = []
        with contextlib.ExitStack() as stack:
            if outputs.base:
                stack.enter_context(lora.without_adapters(self.hf))
            if self.router_watch and outputs.routing:
                decisions = stack.enter_context(self.router_watch.recording())

            hidden = self.backbone(
                input_ids=rows.input_ids,
                position_ids=rows.position_ids,
                use_cache=False,
                layout=rows.layout,
            ).last_hidden_state.squeeze(0)

        # The router decisions remain valid after the recording.
        routing = None
        if decisions:
            routing = summarize_routing(decisions, rows.last_tokens)

        if self.kind == "value":
            values = None
            if outputs.values:
                values = self._values_at(hidden, rows.predecessors)
            scores = None
            if outputs.scores:
                scores = self._values_at(hidden, rows.last_tokens)
            return TokenOutputs(values=values, scores=scores, routing=routing)

        # Logits are computed for the selected tokens only.
        head = self.hf.get_output_embeddings()
        selected = hidden.index_select(0, rows.predecessors)
        head_outputs = head(selected, rows.targets, outputs)
        return TokenOutputs(
            log_probs=head_outputs.log_probs,
            entropy=head_outputs.entropy,
            greedy=head_outputs.greedy,
            squared_probs=head_outputs.squared_probs,
            routing=routing,
        )

    def _values_at(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Return the value head's output at some tokens, float32 [indices]."""
        values: Tensor = self.hf.score(hidden.index_select(0, indices))
        return values


def build_role_model(
    source: TensorSource,
    path: str,
    kind: HeadKind,
    *,
    new_head: bool = True,
    adapter: LoraConfig | None = None,
) -> RoleModel:
    """Build a float32 model whose parameters have no memory yet.

    Shard it, then fill it with `fill_role_model`.

    A value model that is built from a language model gets a new head, and ignores the
    language head. One that is built from a sequence-classification model (a reward
    model) keeps its head. With an adapter, only the adapter and a value head learn; all
    other parameters are frozen.

    Args:
        source: The configuration and the tensors of the model.
        path: The directory that `source` reads, for messages.
        kind: The head.
        new_head: Whether a value model may get a new head.
        adapter: The adapter to add.

    Raises:
        ModelError: The directory is missing or does not fit, or the model has a feature
            that this project does not compute.
    """
    from transformers import (
        AttentionInterface,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    # transformers finds the kernel of `attn_implementation` by this name.
    AttentionInterface.register(attention.NAME, attention.attend)
    learning: tuple[str, ...]
    if kind == "policy":
        config = source.config()
        auto_class = AutoModelForCausalLM
        learning = ()
    else:
        config = source.config(num_labels=1)
        auto_class = AutoModelForSequenceClassification
        learning = (VALUE_HEAD,)

    _refuse_unsupported(path, config)
    if kind == "value":
        _refuse_head(path, source, new_head)

    with parameters_on_meta():
        hf = auto_class.from_config(
            config, attn_implementation=attention.NAME, dtype=torch.float32
        )
        hf.tie_weights()
        _replace_head(hf, kind)
        if adapter is not None:
            lora.add_adapters(hf, adapter, learning=learning)

    return RoleModel(hf.train(), kind)


def _replace_head(hf: PreTrainedModel, kind: HeadKind) -> None:
    """Replace the computation of the head, but neither its parameters nor its name."""
    if kind == "policy":
        hf.get_output_embeddings().__class__ = VocabularyHead
    else:
        hf.score.__class__ = ValueHead


def fill_role_model(
    model: RoleModel, source: TensorSource, *, seed: int, device: torch.device
) -> None:
    """Allocate the parameters of a model of `build_role_model`, and fill them.

    The model may have been sharded since it was built. Values come from the source,
    except for a new head and an adapter, which are initialized from `seed`.
    """
    hf = model.hf
    materialize(hf, device)
    # Allocating the parameters has untied them.
    hf.tie_weights()
    new, unused = model.head_differences
    fill(hf, source, new=new | lora.initial_scales(hf), unused=unused, seed=seed)


def _refuse_head(path: str, checkpoint: TensorSource, new_head: bool) -> None:
    remedy = (
        "Give the directory of a sequence-classification model with one label, as"
        " `train --config-name reward_model` writes it"
    )
    if VALUE_HEAD not in checkpoint:
        if new_head:
            return
        raise ModelError(f"{path} has no {VALUE_HEAD}: it is no reward model. {remedy}")

    labels = checkpoint.shape(VALUE_HEAD)[0]
    if labels != 1:
        raise ModelError(
            f"{path} has {labels} labels: its {VALUE_HEAD} gives {labels} numbers per"
            f" row. {remedy}"
        )


def _refuse_unsupported(path: str, config: PretrainedConfig) -> None:
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"model.path: {path} is a {config.model_type!r} model; the supported ones"
            f" are {', '.join(FAMILIES)}"
        )

    dropout = {
        name: value
        for name, value in vars(config).items()
        if "dropout" in name and isinstance(value, float) and value > 0
    }
    if dropout:
        raise ModelError(
            f"model.path: {path} sets {dropout}; log-probs must be deterministic: set"
            " these to 0 in config.json"
        )

    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ModelError(
            f"model.path: {path} has sliding-window layers, which this version does not"
            " compute"
        )


# ------------------------------------------------------------------- routers of experts

RouterDecisions = list[tuple[Tensor, Tensor]]
"""Logits [tokens, experts] and chosen experts int64 [tokens, k] of each layer."""


class RouterWatch:
    """A recorder of the decisions of a model's routers.

    A router is a module that returns logits [tokens, experts], weights and choices
    [tokens, k].
    """

    def __init__(self, model: nn.Module) -> None:
        self._decisions: RouterDecisions | None = None
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self._record)

    def _record(
        self, module: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]
    ) -> None:
        # Nothing is recorded when a checkpointed layer is computed again for the
        # backward pass.
        if self._decisions is not None:
            logits = outputs[0]
            chosen = outputs[2]
            self._decisions.append((logits, chosen))

    @contextlib.contextmanager
    def recording(self) -> Iterator[RouterDecisions]:
        """Record the decisions of every router inside the block.

        The list fills up in the order of the layers and remains valid after the block.
        """
        decisions: RouterDecisions = []
        self._decisions = decisions
        try:
            yield decisions
        finally:
            self._decisions = None


def summarize_routing(decisions: RouterDecisions, last_tokens: Tensor) -> Routing:
    """Summarize the routing of packed rows.

    Args:
        decisions: The decisions of each layer.
        last_tokens: int64 [rows], index of the last token of each row. Tokens behind
            the last row are ignored.
    """
    num_tokens, num_experts = decisions[0][0].shape
    num_rows = len(last_tokens)

    # [tokens]: the row of each token, `num_rows` behind the last row.
    token_index = torch.arange(num_tokens, device=last_tokens.device)
    row = torch.bucketize(token_index, last_tokens)
    # [rows, 1]
    length = torch.bincount(row, minlength=num_rows + 1)[:num_rows, None].float()

    balances = []
    loads = []
    for logits, chosen in decisions:
        probabilities = torch.softmax(logits.float(), -1)
        # 1 for the experts that a token is routed to, else 0.
        picks = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)

        # Means over each row: fractions of its tokens, and of its probability mass.
        picked = sum_by_row(picks, row, num_rows) / length
        mass = sum_by_row(probabilities, row, num_rows) / length
        balances.append(num_experts * (picked * mass).sum(-1))
        loads.append((picked.detach() * length).sum(0))

    return Routing(torch.stack(balances).mean(0), torch.stack(loads))


def sum_by_row(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Sum [tokens, experts] over the tokens of each row to [rows, experts].

    Args:
        values: [tokens, experts].
        row: int64 [tokens], the row of each token; `num_rows` for tokens of no row.
        num_rows: The number of rows.
    """
    sums = values.new_zeros(num_rows + 1, values.shape[1])
    return sums.index_add(0, row, values)[:num_rows]
