"""The heads of a transformer: a vocabulary, or one value per token.

Invariant: a head computes what the family's own class computes. What the class does to
the logits (a factor, a cap) is not read from names in config.json, but measured: its
own forward pass is given hidden states that are numbers, and a head that returns them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl_ray.errors import ModelError
from verl_ray.models.parts import backbone_of
from verl_ray.ops.log_probs import HeadOutputs, head_log_probs
from verl_ray.ops.outputs import RequestedOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LogitShape:
    """The function of the product of hidden states and head that gives logits.

    The logits are factor * z, or softcap * tanh(factor * z / softcap).
    """

    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """Return the logits of products, in their shape."""
        z = self.factor * z
        return (
            z if self.softcap is None else torch.tanh(z / self.softcap) * self.softcap
        )


class VocabularyHead(nn.Linear):
    """The language-model head of a policy.

    It is called as a module of its own, so that it can be sharded by itself.
    """

    shape_of_logits: LogitShape

    @classmethod
    def replace(cls, hf: PreTrainedModel) -> None:
        """Let the model's head compute outputs of chosen tokens, as its class would.

        Raises:
            ModelError: The class has no linear head, or shapes its logits otherwise.
        """
        head = hf.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"{type(hf).__name__} has no linear language-model head, but"
                f" {type(head).__name__}"
            )
        shape = logit_shape(hf)
        head.__class__ = cls
        assert isinstance(head, VocabularyHead)
        head.shape_of_logits = shape

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor,
        outputs: RequestedOutputs,
        candidates: Tensor | None = None,
    ) -> HeadOutputs:
        """Compute the requested outputs for the selected tokens.

        Args:
            hidden: [selected, hidden], the hidden states before the targets.
            targets: int64 [selected].
            outputs: Which outputs, and the temperature.
            candidates: int64 [selected, candidates], tokens beside the targets.
        """
        factor, softcap = self.shape_of_logits.factor, self.shape_of_logits.softcap
        if softcap is None:
            # A factor of the logits is a temperature.
            outputs = replace(outputs, temperature=outputs.temperature / factor)
        elif factor != 1:
            hidden = hidden * factor
        return head_log_probs(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            softcap=softcap,
            requested=outputs,
            candidates=candidates,
        )


class ValueHead(nn.Linear):
    """The head of a critic or a reward model, with one number per token.

    It is called as a module of its own, so that it can be sharded by itself.
    """

    @classmethod
    def replace(cls, hf: PreTrainedModel) -> None:
        """Put a value head in the place of a model's language head."""
        head = hf.get_output_embeddings()
        name = next(name for name, child in hf.named_children() if child is head)
        delattr(hf, name)
        # No head is left that could be tied to the embeddings.
        hf.all_tied_weights_keys, hf._tied_weights_keys = {}, {}
        hf.score = cls(head.in_features, 1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32 [tokens] for hidden states [tokens, hidden] of any dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.float() @ self.weight.float()[0]


# ------------------------------------------------------------- logits of a class

_HUGE = 1e12
"""A product for which a capped logit is its cap."""


class _Answer:
    """The result of a backbone: hidden states, and None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


def logit_shape(hf: PreTrainedModel) -> LogitShape:
    """Measure what the class of a model does to the products of its head.

    Args:
        hf: A causal language model, whose parameters may have no memory.

    Raises:
        ModelError: It is neither a factor nor a cap.
    """
    products = torch.tensor([-30.0, -3.0, -0.25, 0.0, 1e-6, 1.0, 7.0, 40.0, _HUGE])
    products = products.double()[None, :, None]
    with _stubbed(hf, products), torch.no_grad():
        logits = hf(
            input_ids=torch.zeros(1, products.shape[1], dtype=torch.int64),
            use_cache=False,
        ).logits.double()

    factor, softcap = float(logits[0, 5, 0]), None
    largest = float(logits[0, -1, 0])
    if largest < factor * _HUGE / 2:
        # The cap bends all but the smallest logits. Seven digits are those of float32.
        factor = float(f"{float(logits[0, 4, 0] / products[0, 4, 0]):.7g}")
        softcap = float(f"{largest:.7g}")
    shape = LogitShape(factor, softcap)

    has_bias = hf.get_output_embeddings().bias is not None
    if not torch.allclose(shape(products), logits, rtol=1e-6, atol=1e-9) or (
        has_bias and shape.factor != 1
    ):
        raise ModelError(
            f"{type(hf).__name__} makes logits {logits[0, :, 0].tolist()} of"
            f" {products[0, :, 0].tolist()}, which is neither a factor nor a cap"
        )
    return shape


@contextlib.contextmanager
def _stubbed(hf: PreTrainedModel, hidden: Tensor) -> Iterator[None]:
    """Let the backbone return `hidden` in the block, and the head what it gets."""
    backbone, head = backbone_of(hf), hf.get_output_embeddings()
    # An attribute of the instance goes before the method of its class.
    backbone.forward = lambda *_, **__: _Answer(hidden)
    head.forward = lambda hidden: hidden
    try:
        yield
    finally:
        del backbone.forward, head.forward
