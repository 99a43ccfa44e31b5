"""Low-rank adapters (LoRA, arXiv:2106.09685): small matrices that learn beside frozen weights.

Invariant: what leaves an engine is a whole model or an adapter in the format of peft, whose layers these are; with
the adapter off, the model is bit for bit the one of its directory. An adapter starts as nothing: B is 0. Merged weights
are computed slice by slice, since a weight and its B are cut alike. Deliberately not here: who trains with one.
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
from verl_ray.models.names import is_adapter

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel

ADAPTER = "default"  # what peft calls the only one
BASE_WEIGHT = ".base_layer.weight"


def add_adapters(hf: PreTrainedModel, config: LoraConfig, learning: Sequence[str]) -> None:
    """Put an adapter beside each target. It and the parameters named in `learning` learn, all others are frozen.

    Raises ModelError where a target is no linear layer of the model.
    """
    from peft import inject_adapter_in_model

    linear = {name.rpartition(".")[2] for name, module in hf.named_modules() if isinstance(module, nn.Linear)}
    unknown = sorted(set(config.targets) - linear)
    if unknown:
        raise ModelError(
            f"lora.targets: {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} no linear layer of this "
            f"{hf.config.model_type} model; it has {', '.join(sorted(linear))}"
        )
    hf.requires_grad_(False)
    inject_adapter_in_model(_peft_config(config), hf)
    for name, parameter in hf.named_parameters():
        if is_adapter(name) or name in learning:
            parameter.requires_grad_(True)


def initial_scales(hf: nn.Module) -> dict[str, float]:
    """Standard deviations that the adapters' parameters are drawn with: A keeps the size of what it reads, B is 0."""
    return {
        name: (3 * parameter.shape[1]) ** -0.5 if ".lora_A." in name else 0.0
        for name, parameter in hf.named_parameters()
        if is_adapter(name)
    }


@contextlib.contextmanager
def without_adapters(hf: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it did before it had them."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in hf.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters(False) would freeze parameters for good measure
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(name: str, parameters: Mapping[str, Tensor], config: LoraConfig) -> Tensor:
    """The parameter of this name, of a model's `parameters`, with its adapter added if it has one: W + alpha/r B A.

    Of a sharded parameter this rank's shard is computed, as a DTensor again; then all ranks must ask.
    """
    value = parameters[name].detach()
    prefix = name.removesuffix(BASE_WEIGHT)
    if prefix == name:
        return value
    a, b = (parameters[f"{prefix}.lora_{side}.{ADAPTER}.weight"].detach() for side in "AB")
    scale = config.alpha / config.rank
    if not isinstance(value, DTensor):
        return torch.addmm(value, b, a, alpha=scale)
    assert isinstance(a, DTensor) and isinstance(b, DTensor) and b.placements == value.placements
    local = torch.addmm(value.to_local(), b.to_local(), a.full_tensor().to(value.to_local().device), alpha=scale)
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def adapter_name(name: str) -> str:
    """What an adapter's file calls a parameter of the model."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")


def write_config(folder: Path, config: LoraConfig, base: str, kind: Literal["policy", "value"]) -> None:
    """adapter_config.json, as peft reads it."""
    found = _peft_config(config)
    found.base_model_name_or_path = base
    found.task_type = "CAUSAL_LM" if kind == "policy" else "SEQ_CLS"
    found.modules_to_save = None if kind == "policy" else ["score"]
    found.inference_mode = True
    found.save_pretrained(str(folder))


def _peft_config(config: LoraConfig) -> peft.LoraConfig:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets), lora_dropout=0.0, bias="none"
    )
