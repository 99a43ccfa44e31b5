"""Low-rank adapters (LoRA, arXiv:2106.09685) on frozen weights.

Invariant: what leaves an engine is a whole model, or an adapter in the format of peft,
whose layers these are. Without the adapter, the model is bit for bit the one in its
directory. A new adapter changes nothing, since its B is 0. Merged weights are computed
slice by slice, because a weight and its B are sharded equally.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_ray.config.roles import LoraConfig
from verl_ray.errors import ModelError
from verl_ray.hub.model_folders import json_object
from verl_ray.models.names import is_adapter
from verl_ray.settings.config_json import has_other_parts

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel

ADAPTER = "default"
"""The name that peft gives to an only adapter."""

_BODY = "base_model.model.model."
"""What the names of the body's tensors begin with in an adapter's file."""

BASE_WEIGHT = ".base_layer.weight"


def add_adapters(
    hf: PreTrainedModel, config: LoraConfig, learning: Sequence[str]
) -> None:
    """Add an adapter to each target layer, and freeze the other parameters.

    Args:
        hf: The model.
        config: The targets and sizes of the adapter.
        learning: Names of parameters that learn in addition to the adapter.

    Raises:
        ModelError: A target is no linear layer of the model.
    """
    from peft import inject_adapter_in_model

    linear = {
        name.rpartition(".")[2]
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear)
    }
    unknown = sorted(set(config.targets) - linear)
    if unknown:
        verb = "is" if len(unknown) == 1 else "are"
        raise ModelError(
            f"lora.targets: {', '.join(unknown)} {verb}"
            f" no linear layer of this {hf.config.model_type} model; it has"
            f" {', '.join(sorted(linear))}"
        )

    hf.requires_grad_(False)
    inject_adapter_in_model(_peft_config(config), hf)
    for name, parameter in hf.named_parameters():
        if is_adapter(name) or name in learning:
            parameter.requires_grad_(True)


def initial_scales(hf: nn.Module) -> dict[str, float]:
    """Return the standard deviations of the initial values of the adapters' parameters.

    A preserves the magnitude of its input, and B is 0.
    """
    scales = {}
    for name, parameter in hf.named_parameters():
        if not is_adapter(name):
            continue
        if ".lora_A." in name:
            scales[name] = (3 * parameter.shape[1]) ** -0.5
        else:
            scales[name] = 0.0
    return scales


@contextlib.contextmanager
def without_adapters(hf: nn.Module) -> Iterator[None]:
    """Let the model compute without its adapters in the block."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in hf.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        # Not `enable_adapters(False)`, which also freezes the parameters.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(name: str, parameters: Mapping[str, Tensor], config: LoraConfig) -> Tensor:
    """Return a parameter with its adapter, if it has one: W + alpha/r B A.

    Collective for a sharded parameter: all ranks must call this.

    Args:
        name: The parameter's name in the model.
        parameters: All parameters of the model.
        config: The sizes of the adapter.

    Returns:
        The parameter. If it is sharded, a DTensor that is sharded equally, of which
        each rank computes its own shard.
    """
    value = parameters[name].detach()
    prefix = name.removesuffix(BASE_WEIGHT)
    if prefix == name:
        return value

    a = parameters[f"{prefix}.lora_A.{ADAPTER}.weight"].detach()
    b = parameters[f"{prefix}.lora_B.{ADAPTER}.weight"].detach()
    scale = config.alpha / config.rank
    if not isinstance(value, DTensor):
        return torch.addmm(value, b, a, alpha=scale)

    # The rows of W + B A are those of W and B, so only A has to be whole.
    assert isinstance(a, DTensor) and isinstance(b, DTensor)
    assert b.placements == value.placements
    local = value.to_local()
    whole_a = a.full_tensor().to(local.device)
    local = torch.addmm(local, b.to_local(), whole_a, alpha=scale)
    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def adapter_name(name: str) -> str:
    """Return the name that an adapter's file has for a parameter of the model."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")


def file_name(name: str, base: str) -> str:
    """Return the name of a parameter in an adapter's file.

    Args:
        name: The parameter's name in the model.
        base: The directory of the base model. Where it sees images as well, the
            adapted layers are those of the language model inside.
    """
    own_name = adapter_name(name)
    if not _has_other_parts(base):
        return own_name
    return own_name.replace(_BODY, f"{_BODY}language_model.", 1)


def _has_other_parts(base: str) -> bool:
    return has_other_parts(json_object(Path(base, "config.json")))


def write_config(
    folder: Path, config: LoraConfig, base: str, kind: Literal["policy", "value"]
) -> None:
    """Write adapter_config.json as peft reads it.

    Args:
        folder: The directory of the adapter.
        config: The targets and sizes of the adapter.
        base: The directory of the base model.
        kind: The head of the model. A value head is saved with the adapter.
    """
    settings = _peft_config(config)
    settings.base_model_name_or_path = base
    if kind == "policy":
        settings.task_type = "CAUSAL_LM"
        settings.modules_to_save = None
    else:
        settings.task_type = "SEQ_CLS"
        settings.modules_to_save = ["score"]
    if _has_other_parts(base):
        # Layers of a vision tower may have the same names.
        targets = "|".join(config.targets)
        settings.target_modules = rf".*\.language_model\..*\.({targets})"
    settings.inference_mode = True
    settings.save_pretrained(str(folder))


def _peft_config(config: LoraConfig) -> peft.LoraConfig:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets),
        lora_dropout=0.0,
        bias="none",
    )
