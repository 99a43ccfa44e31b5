"""A transformer with the head of its role: a vocabulary (policy) or a value head.

A policy has the vocabulary head of a language model. A critic or a reward model has a
value head with one number per token.

Invariant: a forward pass is a single call of this module on packed rows, so that
wrappers (DDP, FSDP) see one module. Logits are never held for tokens that are not
selected. Parameters carry the Hugging Face names of the model that they export to.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from verl_ray.config.roles import LoraConfig
from verl_ray.errors import ModelError
from verl_ray.models import attention, lora
from verl_ray.models.conversions import checkpoint_names
from verl_ray.models.heads import ValueHead, VocabularyHead
from verl_ray.models.parts import backbone_of, blocks_of, runs_own_code
from verl_ray.models.routing import RouterDecisions, RouterWatch, summarize_routing
from verl_ray.models.routing_replay import RecordedRouting, RoutingReplay
from verl_ray.models.tensor_sources import TensorSource
from verl_ray.models.weights import fill, materialize, parameters_on_meta
from verl_ray.ops.installed_torch import with_tensors_found
from verl_ray.ops.outputs import RequestedOutputs, Routing, TokenOutputs
from verl_ray.settings.config_json import (
    LANGUAGE_HEAD,
    LANGUAGE_HEAD_BIAS,
    VALUE_HEAD,
    num_experts,
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
    """int64 [1, tokens], or [rows, tokens] for rows of equal length that are not
    packed."""

    position_ids: Tensor
    """int64 like input_ids: position of each token within its row."""

    layout: attention.PackedLayout

    offsets: Tensor
    """[rows + 1]: index of the first token of each row, then the number of tokens; of
    the tokens of all ranks, if a row's are cut between them."""

    predecessors: Tensor
    """[selected]: index of the token before each selected token."""

    targets: Tensor
    """[selected]: ids of the selected tokens."""

    last_tokens: Tensor
    """[rows]: index of the last token of each row."""

    recorded_routing: RecordedRouting | None = None
    """What the routers are to choose; None = what they choose themselves."""

    candidates: Tensor | None = None
    """[selected, candidates]: further tokens in the places of the selected ones, whose
    log-probs are computed as well; None = none."""

    @property
    def borders(self) -> dict[str, Tensor]:
        """The borders of packed rows as layers with states take them; else nothing.

        transformers passes them on to kernels (mamba-ssm, causal-conv1d,
        flash-linear-attention). Its own code, which runs without these, ignores them.
        """
        if len(self.input_ids) > 1 or self.layout.exchange is not None:
            return {}
        row = torch.cumsum(self.position_ids == 0, -1, dtype=torch.int32) - 1
        return dict(zip(attention.BORDERS, (row, self.offsets), strict=True))


class RoleModel(nn.Module):
    """A Hugging Face model and its head.

    `hf` holds the parameters under the names of their export.
    """

    hf: PreTrainedModel

    def __init__(self, hf: PreTrainedModel, kind: HeadKind) -> None:
        super().__init__()
        self.hf = hf
        self.kind = kind
        self.names = checkpoint_names(hf)
        watch = RouterWatch(self.backbone)
        self.router_watch = watch if watch.routers else None
        self._routing_replay: RoutingReplay | None = None

    def replay_routing(self) -> None:
        """Let routers choose what rows have recorded, from now on."""
        assert self.router_watch is not None, "routers that return their choice"
        count = num_experts(self.hf.config.to_dict())
        self._routing_replay = RoutingReplay(self.router_watch.routers, count)

    @property
    def backbone(self) -> PreTrainedModel:
        """The model without its head."""
        return backbone_of(self.hf)

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer blocks: units of sharding and activation checkpointing."""
        return blocks_of(self.backbone)

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
    def precise_units(self) -> list[nn.Module]:
        """The modules that the family keeps in float32 where it computes in bfloat16.

        These are the outermost of which it names every parameter, as ERNIE 4.5 does of
        its routers. transformers searches names for the same patterns.
        """
        patterns = self.hf._keep_in_fp32_modules_strict
        if not patterns:
            return []
        pattern = re.compile("|".join(patterns).replace("*", ".*"))
        precise = {
            id(value)
            for name, value in self.hf.named_parameters()
            if pattern.search(name)
        }

        units: list[nn.Module] = []
        parts: set[nn.Module] = set()
        for module in self.hf.modules():
            own = {id(value) for value in module.parameters()}
            if own and own <= precise and module not in parts:
                units.append(module)
                parts.update(module.modules())
        return units

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
        return {VALUE_HEAD: std}, frozenset({LANGUAGE_HEAD, LANGUAGE_HEAD_BIAS})

    def forward(self, rows: PackedRows, outputs: RequestedOutputs) -> TokenOutputs:
        decisions: RouterDecisions = []
        if self._routing_replay is not None:
            # The model before training is another one, such as the reference is.
            recorded = None if outputs.base else rows.recorded_routing
            self._routing_replay.recorded = recorded
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
                **rows.borders,
            ).last_hidden_state.flatten(0, 1)

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
        head_outputs = head(selected, rows.targets, outputs, rows.candidates)
        return TokenOutputs(**vars(head_outputs), routing=routing)

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
    from transformers import AttentionInterface

    # transformers finds the kernel of `attn_implementation` by this name.
    AttentionInterface.register(attention.NAME, attention.attend)
    learning: tuple[str, ...]
    if kind == "policy":
        config = source.config()
        learning = ()
    else:
        config = source.config(num_labels=1)
        learning = (VALUE_HEAD,)

    _refuse_dropout(path, config)
    if kind == "value":
        _refuse_head(path, source, new_head)

    with parameters_on_meta():
        hf = _model_with_head(config, kind)
        if adapter is not None:
            lora.add_adapters(hf, adapter, learning=learning)

    return RoleModel(hf.train(), kind)


def _model_with_head(config: PretrainedConfig, kind: HeadKind) -> PreTrainedModel:
    """Build the model of a family, and replace the computation of its head.

    A family that has no class for sequence classification gets the value head in the
    place of its language head.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    settings: dict[str, Any] = {
        "attn_implementation": attention.NAME,
        "dtype": torch.float32,
        "trust_remote_code": runs_own_code(config),
    }
    has_class = type(config) in AutoModelForSequenceClassification._model_mapping
    if kind == "value" and has_class:
        hf = AutoModelForSequenceClassification.from_config(config, **settings)
        hf.tie_weights()
        hf.score.__class__ = ValueHead
        return hf

    hf = AutoModelForCausalLM.from_config(config, **settings)
    if kind == "policy":
        hf.tie_weights()
        VocabularyHead.replace(hf)
    else:
        ValueHead.replace(hf)
    return hf


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
    fill(
        hf,
        source,
        names=model.names,
        new=new | lora.initial_scales(hf),
        unused=unused,
        seed=seed,
    )


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


def _refuse_dropout(path: str, config: PretrainedConfig) -> None:
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
