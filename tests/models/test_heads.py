"""The logits of a family are those of its own class, measured before it has weights."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl_ray.errors import ModelError
from verl_ray.models.heads import LogitShape, ValueHead, VocabularyHead, logit_shape
from verl_ray.ops.outputs import RequestedOutputs

SIZES = {
    "hidden_size": 8, "intermediate_size": 8, "vocab_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "pad_token_id": 0,
}  # fmt: skip


def built(family: str, **settings: object) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **SIZES | settings)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


CASES = [
    ("qwen3", {}, LogitShape()),
    ("gemma2", {"final_logit_softcapping": 5.0}, LogitShape(1.0, 5.0)),
    ("gemma3_text", {"final_logit_softcapping": None}, LogitShape()),
    ("granite", {"logits_scaling": 8.0}, LogitShape(0.125)),
    ("cohere2", {"logit_scale": 0.25}, LogitShape(0.25)),
]


@pytest.mark.parametrize(("family", "settings", "shape"), CASES)
def test_what_a_class_does_to_logits_is_measured_and_computed(
    family: str, settings: dict[str, object], shape: LogitShape
) -> None:
    model = built(family, **settings)
    assert logit_shape(model) == shape
    tokens = torch.arange(6)[None] + 1
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0]
        hidden = model.base_model(input_ids=tokens, use_cache=False)[0][0]
    expected = (logits[:-1] / 0.7).log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    VocabularyHead.replace(model)
    head = model.get_output_embeddings()
    outputs = RequestedOutputs(log_probs=True, temperature=0.7)
    actual = head(hidden[:-1], tokens[0, 1:], outputs).log_probs
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


def test_logits_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("qwen3")
    forward = type(model).forward

    def squared(
        self: PreTrainedModel, *arguments: object, **settings: object
    ) -> object:
        outputs = forward(self, *arguments, **settings)
        outputs.logits = outputs.logits**2
        return outputs

    monkeypatch.setattr(type(model), "forward", squared)
    with pytest.raises(ModelError, match="which is neither a factor nor a cap"):
        logit_shape(model)


def test_a_value_head_takes_the_place_of_a_tied_head() -> None:
    model = built("cohere2", tie_word_embeddings=True)
    ValueHead.replace(model)
    model.tie_weights()
    assert (
        model.score.weight.shape == (1, 8)
        and "lm_head.weight" not in model.state_dict()
    )
