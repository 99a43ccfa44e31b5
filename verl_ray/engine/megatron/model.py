"""A chunk of a role's model out of megatron-core's parts, the head on the last.

Invariant: it computes what transformers computes with the same weights. megatron-core's
own modules are the layers; its module specifications let them contain the norm, the
attention and the router of this package. Logits are never gathered, and only exist for
selected tokens.
"""

from __future__ import annotations

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

from verl_ray.engine.megatron.experts import ExpertLayer, RoutedRows, Router
from verl_ray.engine.megatron.layout import ParallelLayout
from verl_ray.engine.megatron.model_config import has_experts, padded_vocabulary
from verl_ray.engine.megatron.modules import (
    MegatronValueHead,
    PackedAttention,
    PackedRowParams,
    RMSNorm,
    WordEmbedding,
)
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
        # megatron-core knows no value heads; it has built a head of the vocabulary.
        if is_last and model.kind == "value":
            del self.output_layer
            self.value_head = MegatronValueHead(config)

        self._tp_group = layout.groups.tp
        words_per_rank = words // layout.tp.size
        first_word = layout.tp.rank * words_per_rank
        self._vocabulary: VocabularySlice | None = None
        if layout.tp.size > 1:
            self._vocabulary = VocabularySlice(self._tp_group, first_word)
        # The words behind these only pad the vocabulary.
        self._own_words = max(0, min(words_per_rank, hf.vocab_size - first_word))

        frequencies = model.backbone.rotary_emb.inv_freq.detach().clone()
        self.register_buffer("_inverse_frequencies", frequencies, persistent=False)

    def forward(self, rows: PackedRows, routed: RoutedRows | None = None) -> Tensor:
        """Return hidden states for the next chunk or the head, [tokens, 1, hidden].

        Args:
            rows: The rows of a micro-batch.
            routed: The rows for routers, in a pass that is learned from.
        """
        hidden = None
        if self.pre_process:
            hidden = self.embedding(rows.input_ids, rows.position_ids)

        positions = rows.position_ids[0, :, None].float()
        angles = positions * self._inverse_frequencies.float()
        return self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles, angles], -1)[:, None, None],
            packed_seq_params=PackedRowParams(layout=rows.layout, routed=routed),
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
            temperature=outputs.temperature,
            with_entropy=outputs.entropy,
            with_greedy=outputs.greedy,
            with_squared_probs=outputs.squared_probs,
        )
        return TokenOutputs(
            log_probs=head_outputs.log_probs,
            entropy=head_outputs.entropy,
            greedy=head_outputs.greedy,
            squared_probs=head_outputs.squared_probs,
        )


def has_tied_embeddings(model: RoleModel) -> bool:
    """Return whether the head of a policy is the transposed embedding."""
    return model.kind == "policy" and model.hf.config.tie_word_embeddings


def _virtual_stage(layout: ParallelLayout, chunk: int) -> int | None:
    """Return megatron-core's number of a chunk; None if there is one per rank."""
    if layout.chunks == 1:
        return None
    return chunk


def _block_spec(
    model: RoleModel, config: TransformerConfig, layout: ParallelLayout, chunk: int
) -> TransformerBlockSubmodules:
    """Return the specification of a chunk's layers."""
    hf = model.hf.config
    count = get_num_layers_to_build(
        config, vp_stage=_virtual_stage(layout, chunk), pp_rank=layout.pp.rank
    )
    first_layer = (chunk * layout.pp.size + layout.pp.rank) * count

    layer_specs = []
    for layer in range(first_layer, first_layer + count):
        num_experts = None
        if config.num_moe_experts and has_experts(hf, layer):
            num_experts = hf.num_experts
        layer_specs.append(_layer_spec(config, num_experts))
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    """Return the specification of a layer; `num_experts` is None if it has none."""
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )

    layer = spec.submodules
    layer.input_layernorm = RMSNorm
    layer.pre_mlp_layernorm = RMSNorm
    if num_experts:
        spec.module = ExpertLayer
        layer.mlp.submodules.router = Router

    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return spec
