"""A chunk of a role's model out of megatron-core's parts, the head on the last.

Invariant: it computes what transformers computes with the same weights. megatron-core's
own modules are the layers; its module specifications let them contain the norm, the
attention and the router of this package. Logits are never gathered, and only exist for
selected tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor

from verl_ray.engine.megatron.experts import RoutedRows, Router
from verl_ray.engine.megatron.latent_attention import LatentAttention
from verl_ray.engine.megatron.layout import ParallelLayout
from verl_ray.engine.megatron.model_config import (
    family_of,
    layers_with_experts,
    num_experts,
    routing_rule,
)
from verl_ray.engine.megatron.modules import (
    LayerKind,
    MegatronValueHead,
    NormedAdd,
    PackedAttention,
    PackedLayer,
    PackedRowParams,
    RMSNorm,
    UnitRMSNorm,
    WordEmbedding,
)
from verl_ray.engine.megatron.weight_map import padded_vocabulary, share
from verl_ray.models.attention import AttentionScores
from verl_ray.models.role_model import HeadKind, PackedRows, RoleModel
from verl_ray.ops.log_probs import head_log_probs
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs
from verl_ray.ops.vocab_parallel import VocabularySlice


class Stage(GPTModel):
    """The layers of one chunk of one pipeline rank.

    The first chunk of the model has the embedding, and the last one has the head. The
    head is called by itself on what `forward` returns.
    """

    def __init__(
        self,
        model: RoleModel,
        config: TransformerConfig,
        layout: ParallelLayout,
        chunk: int,
    ) -> None:
        """Build the chunk without values.

        Args:
            model: The model as transformers has it, without values.
            config: megatron-core's configuration of the model.
            layout: The process groups.
            chunk: Index of the chunk among those of this rank.
        """
        hf = model.hf.config
        is_first = layout.pp.rank == 0 and chunk == 0
        is_last = layout.is_last_stage and chunk == layout.chunks - 1
        words = padded_vocabulary(hf.vocab_size, layout.tp.size)
        super().__init__(
            config,
            _block_spec(model, config, layout, chunk),
            vocab_size=words,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=is_first,
            post_process=is_last,
            share_embeddings_and_output_weights=has_tied_embeddings(model),
            # `forward` passes the angles itself: rows are packed.
            position_embedding_type="none",
            pg_collection=layout.groups,
            vp_stage=_virtual_stage(layout, chunk),
        )

        self.kind: HeadKind = model.kind
        if is_first:
            embedding = self.embedding.word_embeddings
            embedding.__class__ = WordEmbedding
            embedding.padding = model.hf.get_input_embeddings().padding_idx
            embedding.factor = 1.0
            if family_of(model).scaled_embeddings:
                embedding.factor = hf.hidden_size**0.5
        # megatron-core knows no value heads; it has built a head of the vocabulary.
        if is_last and model.kind == "value":
            del self.output_layer
            self.value_head = MegatronValueHead(config)

        self._tp_group = layout.groups.tp
        self._token_axis = layout.tp
        words_per_rank = words // layout.tp.size
        first_word = layout.tp.rank * words_per_rank
        self._vocabulary: VocabularySlice | None = None
        if layout.tp.size > 1:
            self._vocabulary = VocabularySlice(self._tp_group, first_word)
        # The words behind these only pad the vocabulary.
        self._own_words = max(0, min(words_per_rank, hf.vocab_size - first_word))

        self._softcap: float | None = None
        if model.kind == "policy":
            self._softcap = model.hf.get_output_embeddings().shape_of_logits.softcap
        self._keep_frequencies(model)

    def _keep_frequencies(self, model: RoleModel) -> None:
        """Keep the frequencies of each kind of rotary positions on the device."""
        self._positions = sorted(set(_positions_by_layer(model)))
        for number, kind in enumerate(self._positions):
            frequencies, _ = _rotation(model, kind)
            name = f"_inverse_frequencies_{number}"
            self.register_buffer(name, frequencies.detach().clone(), persistent=False)

    def _angles(self, rows: PackedRows) -> dict[str, Tensor]:
        """Return the angles of the tokens, [tokens, 1, 1, size], by kind of layers."""
        positions = rows.position_ids[0, :, None].float()
        angles = {}
        for number, kind in enumerate(self._positions):
            frequencies = self.get_buffer(f"_inverse_frequencies_{number}")
            half = positions * frequencies.float()
            angles[kind] = torch.cat([half, half], -1)[:, None, None]
        return angles

    def forward(self, rows: PackedRows, routed: RoutedRows | None = None) -> Tensor:
        """Return hidden states for the next chunk or the head, [tokens, 1, hidden].

        Args:
            rows: The rows of a micro-batch.
            routed: The rows for routers, in a pass that is learned from.
        """
        hidden = None
        if self.pre_process:
            hidden = self.embedding(rows.input_ids, rows.position_ids)
        recorded = rows.recorded_routing
        if recorded is not None and self.config.sequence_parallel:
            recorded = recorded.part(share(rows.input_ids.shape[1], self._token_axis))

        return self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            packed_seq_params=PackedRowParams(
                layout=rows.layout,
                routed=routed,
                recorded=recorded,
                angles=self._angles(rows),
            ),
        )

    def head(
        self, hidden: Tensor, rows: PackedRows, outputs: RequestedOutputs
    ) -> TokenOutputs:
        """Return the requested outputs, identical on all tensor-parallel ranks.

        Args:
            hidden: The last layer's hidden states, [tokens, 1, hidden].
            rows: The rows of the micro-batch.
            outputs: Which outputs, and the temperature.
        """
        is_policy = self.kind == "policy"
        hidden = hidden.squeeze(1)
        if self.config.sequence_parallel:
            # In a policy each rank computes the part of the gradient that belongs to
            # its words; in a value model every rank computes the whole gradient.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=is_policy, group=self._tp_group
            )

        if is_policy:
            return self._policy_outputs(hidden, rows, outputs)

        values = None
        if outputs.values:
            values = self.value_head(hidden.index_select(0, rows.predecessors))
        scores = None
        if outputs.scores:
            scores = self.value_head(hidden.index_select(0, rows.last_tokens))
        return TokenOutputs(values=values, scores=scores)

    def _policy_outputs(
        self, hidden: Tensor, rows: PackedRows, outputs: RequestedOutputs
    ) -> TokenOutputs:
        """Return the outputs of the vocabulary's head; `hidden` is [tokens, hidden]."""
        selected = hidden.index_select(0, rows.predecessors)
        if not self.config.sequence_parallel:
            # Its backward pass sums the gradients of the ranks' words.
            selected = copy_to_tensor_model_parallel_region(
                selected, group=self._tp_group
            )

        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        head_outputs = head_log_probs(
            selected,
            weight[: self._own_words],
            rows.targets,
            vocabulary=self._vocabulary,
            softcap=self._softcap,
            requested=outputs,
            candidates=rows.candidates,
        )
        return TokenOutputs(**vars(head_outputs))


def has_tied_embeddings(model: RoleModel) -> bool:
    """Return whether the head of a policy is the transposed embedding."""
    return model.kind == "policy" and model.hf.config.tie_word_embeddings


def _virtual_stage(layout: ParallelLayout, chunk: int) -> int | None:
    """Return megatron-core's number of a chunk; None if there is one per rank."""
    if layout.chunks == 1:
        return None
    return chunk


def _positions_by_layer(model: RoleModel) -> list[str]:
    """Return the kind of rotary positions of each layer; "" where there is one."""
    if family_of(model).positions_by_kind:
        return list(model.hf.config.layer_types)
    return [""] * len(model.layers)


def _rotation(model: RoleModel, kind: str) -> tuple[Tensor, float]:
    """Return the frequencies of rotary positions, and the factor of their sines."""
    rotary: Any = model.backbone.rotary_emb
    prefix = f"{kind}_" if kind else ""
    frequencies: Tensor = getattr(rotary, f"{prefix}inv_freq")
    factor: float = getattr(rotary, f"{prefix}attention_scaling")
    return frequencies, factor


def _attention_scores(model: RoleModel, layer: int, kind: str) -> AttentionScores:
    """Return how a layer's products of queries and keys become weights."""
    hf, family = model.hf.config, family_of(model)
    attention: Any = model.layers[layer].self_attn
    scaling = attention.scaling
    if not family.latent:
        # Queries and keys would be multiplied by the factor as a whole.
        _, factor = _rotation(model, kind)
        scaling *= factor**2

    window = None
    if family.windows == "layer":
        window = attention.sliding_window
    elif family.windows == "model":
        window = hf.sliding_window
    return AttentionScores(
        scaling=scaling,
        window=window,
        softcap=hf.attn_logit_softcapping if family.softcap else None,
    )


def _block_spec(
    model: RoleModel, config: TransformerConfig, layout: ParallelLayout, chunk: int
) -> TransformerBlockSubmodules:
    """Return the specification of a chunk's layers."""
    count = get_num_layers_to_build(
        config, vp_stage=_virtual_stage(layout, chunk), pp_rank=layout.pp.rank
    )
    first_layer = (chunk * layout.pp.size + layout.pp.rank) * count
    norm = UnitRMSNorm if family_of(model).unit_norms else RMSNorm
    specs = [
        _layer_spec(model, config, norm, layer)
        for layer in range(first_layer, first_layer + count)
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _layer_spec(
    model: RoleModel, config: TransformerConfig, norm: type[RMSNorm], number: int
) -> ModuleSpec:
    """Return the specification of the layer of this number, from 0."""
    family = family_of(model)
    has_experts = number in layers_with_experts(model)
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts(model) if has_experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=family.latent,
        normalization="RMSNorm",
    )
    positions = _positions_by_layer(model)[number]
    spec.module = PackedLayer
    spec.params["kind"] = LayerKind(
        _attention_scores(model, number, positions), positions
    )

    layer = spec.submodules
    layer.input_layernorm = norm
    layer.pre_mlp_layernorm = norm
    if family.norms_after:
        after = {"config": config, "norm": norm}
        layer.self_attn_bda = ModuleSpec(NormedAdd, params=after)
        layer.mlp_bda = ModuleSpec(NormedAdd, params=after)
    if has_experts:
        rule = routing_rule(model)
        layer.mlp.submodules.router = functools.partial(Router, rule=rule)

    attention = layer.self_attention
    attention.submodules.core_attention = PackedAttention
    if family.latent:
        template: Any = model.layers[number].self_attn
        attention.module = LatentAttention
        attention.params["epsilon"] = template.kv_a_layernorm.variance_epsilon
        attention.params["factor"] = _rotation(model, positions)[1]
    elif config.qk_layernorm:
        attention.submodules.q_layernorm = norm
        attention.submodules.k_layernorm = norm
    return spec
