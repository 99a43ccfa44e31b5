"""The parts of a language model of transformers, found by what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from verl_ray.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def backbone_of(hf: PreTrainedModel) -> PreTrainedModel:
    """Return a model without its head.

    Raises:
        ModelError: It has no such part, or several.
    """
    from transformers import PreTrainedModel

    if hf.base_model is not hf:
        backbone: PreTrainedModel = hf.base_model
        return backbone
    children = [each for each in hf.children() if isinstance(each, PreTrainedModel)]
    if len(children) != 1:
        raise ModelError(f"{type(hf).__name__} has {len(children)} parts, and not one")
    return children[0]


def blocks_of(backbone: nn.Module) -> nn.ModuleList:
    """Return the transformer blocks of a model: its longest list of modules.

    Raises:
        ModelError: It has none.
    """
    lists = [each for each in backbone.children() if isinstance(each, nn.ModuleList)]
    if not lists:
        raise ModelError(f"{type(backbone).__name__} has no list of layers")
    return max(lists, key=len)
