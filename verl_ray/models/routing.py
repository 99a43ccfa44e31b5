"""The decisions of a model's routers, which choose the experts of each token.

Invariant: what is a router, and where its logits are, is what the family's class
declares to transformers; no name of a family stands here. The decisions are summarized
as the load of each expert, and a loss that balances it. The balance of a row depends on
that row alone, so the loss depends neither on the micro-batch size nor on the number of
ranks. This deviates from Switch Transformer (Fedus et al. 2021, arXiv:2101.03961,
equations 4 to 6), which takes fractions over a batch. Per row it is the sequence-wise
balance of DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20) in the scale of Switch:
top_k where experts are used evenly, up to the number of experts where they are not.
Probabilities are a router's own scores with sum 1: the softmax of its logits, their
sigmoids (DeepSeek-V3, GLM-4.5), or what it returns where that is no logits (Gemma 4).

Some families are balanced without a loss, by biases of the experts that take part in
the choice alone and get no gradient (DeepSeek-V3, section 2.1.2). Here they are found,
and the engine moves them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl_ray.ops.outputs import Routing
from verl_ray.settings.config_json import SELECTION_BIASES


@dataclass(frozen=True)
class RouterDecision:
    """The decision of the router of one layer."""

    logits: Tensor
    """[tokens, experts]; in a few families probabilities already."""

    chosen: Tensor
    """int64 [tokens, k], the experts of each token."""

    weights: Tensor | None = None
    """[tokens, k], without gradient: the weight of each of them. None if the router
    does not return it."""


RouterDecisions = list[RouterDecision]
"""The decisions of all layers, in their order."""


class RouterWatch:
    """A recorder of the decisions of a model's routers.

    A router returns a tuple, in which logits [tokens, experts] have a place that its
    class declares, and choices [tokens, k] are the only whole numbers. Another tensor
    of their shape has the weights of the choices. Routers that return no choice (Llama
    4's, Jamba's, JetMoE's) are not recorded.

    Attributes:
        routers: The router of each layer that has one, by the layer's number, from 0.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self._decisions: RouterDecisions | None = None
        from transformers.utils.output_capturing import OutputRecorder

        declared = getattr(backbone, "_can_record_outputs", None) or {}
        router = declared.get("router_logits")

        self.routers: dict[int, nn.Module] = {}
        self._biases: list[tuple[nn.Module, str]] = []
        for name, module in backbone.named_modules():
            # A router that is a plain linear layer has made no choice yet.
            if not isinstance(router, OutputRecorder):
                break
            if router.target_class is nn.Linear:
                break
            if isinstance(module, router.target_class) and (
                router.layer_name is None or name.endswith(router.layer_name)
            ):
                module.register_forward_hook(
                    functools.partial(self._record, router.index)
                )
                layer = next(int(part) for part in name.split(".") if part.isdigit())
                self.routers[layer] = module
                around = backbone.get_submodule(name.rpartition(".")[0])
                self._biases += _selection_biases(module) or _selection_biases(around)

    @property
    def biases(self) -> list[Tensor]:
        """The bias [experts] of each layer's choice; none unless all layers have one.

        Biases that are parameters (ERNIE 4.5's) are not among them: states of a run
        have no parameters that an optimizer does not change.
        """
        if len(self._biases) != len(self.routers):
            return []
        # Allocating a model's memory makes its buffers anew.
        return [module.get_buffer(name) for module, name in self._biases]

    def _record(
        self,
        place: int,
        module: nn.Module,
        inputs: Any,
        outputs: tuple[Tensor, ...],
    ) -> None:
        # Nothing is recorded when a checkpointed layer is computed again for the
        # backward pass.
        if self._decisions is None:
            return
        logits, *others = (
            outputs[place],
            *(each for i, each in enumerate(outputs) if i != place),
        )
        for chosen in (each for each in others if not each.is_floating_point()):
            weights = next(
                (
                    each.detach().flatten(0, -2)
                    for each in others
                    if each.is_floating_point() and each.shape == chosen.shape
                ),
                None,
            )
            self._decisions.append(
                RouterDecision(logits.flatten(0, -2), chosen.flatten(0, -2), weights)
            )

    @contextlib.contextmanager
    def recording(self) -> Iterator[RouterDecisions]:
        """Record the decisions of every router inside the block.

        The list fills up in the order of the layers and remains valid after the block.
        """
        decisions: RouterDecisions = []
        self._decisions = decisions
        try:
            yield decisions
        finally:
            self._decisions = None


def _selection_biases(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return a module's own biases of the choice, each with its name."""
    return [
        (module, name)
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith(SELECTION_BIASES)
    ]


def summarize_routing(decisions: RouterDecisions, last_tokens: Tensor) -> Routing:
    """Summarize the routing of packed rows.

    Args:
        decisions: The decisions of each layer.
        last_tokens: int64 [rows], index of the last token of each row. Tokens behind
            the last row are ignored.
    """
    num_tokens, num_experts = decisions[0].logits.shape
    num_rows = len(last_tokens)

    # [tokens]: the row of each token, `num_rows` behind the last row.
    token_index = torch.arange(num_tokens, device=last_tokens.device)
    row = torch.bucketize(token_index, last_tokens)
    # [rows, 1]
    length = torch.bincount(row, minlength=num_rows + 1)[:num_rows, None].float()

    balances = []
    loads = []
    for decision in decisions:
        probabilities = _probabilities(decision)
        # 1 for the experts that a token is routed to, else 0.
        picks = torch.zeros_like(probabilities).scatter_(1, decision.chosen, 1.0)

        # Means over each row: fractions of its tokens, and of its probability mass.
        picked = sum_by_row(picks, row, num_rows) / length
        mass = sum_by_row(probabilities, row, num_rows) / length
        balances.append(num_experts * (picked * mass).sum(-1))
        loads.append((picked.detach() * length).sum(0))

    return Routing(torch.stack(balances).mean(0), torch.stack(loads))


def _probabilities(decision: RouterDecision) -> Tensor:
    """Return the scores of a router with sum 1, float32 [tokens, experts].

    What they are is measured. Numbers that are not negative and have sum 1 are the
    probabilities. Of logits, the weights of the chosen experts tell a softmax from
    sigmoids: they are their scores times a factor of the token. The weight of a single
    expert has no ratio to another one, and counts as that of a softmax.
    """
    returned = decision.logits.float()
    sums = returned.detach().sum(-1)
    # On the device, which is not waited for; so is the other choice below.
    are_probabilities = (returned >= 0).all() & ((sums - 1).abs() < 0.01).all()
    return torch.where(are_probabilities, returned, _probabilities_of_logits(decision))


def _probabilities_of_logits(decision: RouterDecision) -> Tensor:
    softmax = router_probabilities(decision.logits, sigmoid=False)
    if decision.weights is None or decision.chosen.shape[1] == 1:
        return softmax

    sigmoids = router_probabilities(decision.logits, sigmoid=True)
    weights = _shares(decision.weights.float())
    from_softmax, from_sigmoids = (
        (_shares(scores.detach().gather(1, decision.chosen)) - weights).abs().sum()
        for scores in (softmax, sigmoids)
    )
    return torch.where(from_sigmoids < from_softmax, sigmoids, softmax)


def router_probabilities(logits: Tensor, *, sigmoid: bool) -> Tensor:
    """Return the softmax of logits, or their sigmoids with sum 1, in float32."""
    logits = logits.float()
    if sigmoid:
        logits = torch.nn.functional.logsigmoid(logits)
    return torch.softmax(logits, -1)


def _shares(values: Tensor) -> Tensor:
    """Divide the values of each token by their sum."""
    return values / values.sum(-1, keepdim=True)


def sum_by_row(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Sum [tokens, experts] over the tokens of each row to [rows, experts].

    Args:
        values: [tokens, experts].
        row: int64 [tokens], the row of each token; `num_rows` for tokens of no row.
        num_rows: The number of rows.
    """
    sums = values.new_zeros(num_rows + 1, values.shape[1])
    return sums.index_add(0, row, values)[:num_rows]
