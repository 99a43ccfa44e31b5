"""Which models have a place in megatron-core's, as it is driven here.

Invariant: a model that is let through is computed as transformers computes it, and none of its parameters is left out.
Deliberately not here: what of a configuration decides it alone (`verl_ray/config/rules`, `verl_ray/preflight`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, cast

import torch.distributed as dist

from verl_ray.engine.base import EngineSpec
from verl_ray.engine.megatron.weight_map import Mapped
from verl_ray.errors import EngineError, ModelError
from verl_ray.models.families import ACTIVATIONS_IN_MEGATRON, IN_MEGATRON
from verl_ray.models.role_model import RoleModel


def require_mapped(spec: EngineSpec, described: RoleModel) -> None:
    """What `check` says of models too, before anything starts.

    Raises:
        EngineError: an adapter was asked for.
        ModelError: megatron-core has no place for the model, or does not compute what it does.
    """
    family = described.hf.config.model_type
    if spec.lora is not None:
        raise EngineError(
            f"{spec.role}.lora.rank = {spec.lora.rank}: megatron takes no adapter here; set it to 0, or take fsdp "
            f"or engine as {spec.role}.backend"
        )
    if family not in IN_MEGATRON:
        raise ModelError(
            f"model.path: {spec.model_path} is a {family!r} model, which has no place in megatron's; those of "
            f"{', '.join(IN_MEGATRON)} have"
        )

    activation = described.hf.config.hidden_act
    if activation not in ACTIVATIONS_IN_MEGATRON:
        raise ModelError(
            f"model.path: {spec.model_path} has hidden_act={activation!r}; megatron computes "
            f"{ACTIVATIONS_IN_MEGATRON[0]} here, so take fsdp or engine as {spec.role}.backend"
        )
    factor = cast(Any, described.backbone.rotary_emb).attention_scaling
    if factor != 1:
        raise ModelError(
            f"model.path: {spec.model_path} scales attention by {factor} with its rotary positions, which megatron "
            f"does not here; take fsdp or engine as {spec.role}.backend"
        )


def require_complete(spec: EngineSpec, names: Collection[str], mapped: Iterable[Mapped], world_size: int) -> None:
    """Every parameter of the model must be on some rank: one without a place would be lost in silence. Collective.

    Args:
        names: all parameters of the model.
        mapped: what this rank holds.

    Raises:
        ModelError: some are on no rank; names them.
    """
    held = {region.name for one in mapped for region in one.regions}
    everyone: list[set[str]] = [held] * world_size
    if world_size > 1:
        dist.all_gather_object(everyone, held)
    if missing := sorted(set(names).difference(*everyone)):
        raise ModelError(
            f"model.path: {spec.model_path} has {missing[:5]}, which have no place in megatron's model; take "
            f"fsdp or engine as {spec.role}.backend"
        )
