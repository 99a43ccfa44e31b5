"""The parts of a language model of transformers, found by what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from verl_ray.errors import ModelError
from verl_ray.settings.config_json import PLAIN_FAMILIES, plain_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def read_config(path: str, *, trusts_code: bool) -> PretrainedConfig:
    """Read the configuration of a model directory.

    Code in the directory is run only where it is trusted; otherwise the configuration
    has no `auto_map`, so that nothing which is made of it finds the code.

    Args:
        path: The directory.
        trusts_code: Whether its code may run.
    """
    from transformers import AutoConfig

    # Without an answer here, transformers asks at the terminal.
    config: PretrainedConfig = AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=trusts_code
    )
    if not trusts_code and hasattr(config, "auto_map"):
        del config.auto_map
    return config


def runs_own_code(config: PretrainedConfig) -> bool:
    """Return whether a configuration of `read_config` names code of its directory."""
    return hasattr(config, "auto_map")


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the text part of a model, or `config` if it is all.

    A model that sees images as well says for all its parts whether the head is tied.
    """
    from transformers import CONFIG_MAPPING

    text: PretrainedConfig | None = getattr(config, "text_config", None)
    if text is None:
        return config
    if text.model_type in PLAIN_FAMILIES:
        settings = plain_text(text.to_dict())
        text = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def whole_model_class(config: PretrainedConfig) -> Any:
    """Return transformers' automatic class of a model, whatever it sees beside text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


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
