"""The decisions of a model's routers, which choose the experts of each token.

Invariant: what is a router, and where its logits are, is what the family's class
declares to transformers; no name of a family stands here. The decisions are summarized
as the load of each expert, and a loss that balances it. The balance of a row depends on
that row alone, so the loss depends neither on the micro-batch size nor on the number of
ranks. This deviates from Switch Transformer (Fedus et al. 2021, arXiv:2101.03961,
equations 4 to 6), which takes fractions over a batch. Per row it is the sequence-wise
balance of DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20) in the scale of Switch:
top_k where experts are used evenly, up to the number of experts where they are not.
Probabilities are the softmax of a router's logits, also where the router itself takes
sigmoids.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl_ray.ops.outputs import Routing

RouterDecisions = list[tuple[Tensor, Tensor]]
"""Logits [tokens, experts] and chosen experts int64 [tokens, k] of each layer."""


class RouterWatch:
    """A recorder of the decisions of a model's routers.

    A router returns a tuple, in which logits [tokens, experts] have a place that its
    class declares, and choices [tokens, k] are the only whole numbers. Routers that
    return no choice (Llama 4's, Jamba's) are not recorded.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self._decisions: RouterDecisions | None = None
        from transformers.utils.output_capturing import OutputRecorder

        declared = getattr(backbone, "_can_record_outputs", None) or {}
        router = declared.get("router_logits")

        self.count = 0
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
                self.count += 1

    def _record(
        self,
        place: int,
        module: nn.Module,
        inputs: Any,
        outputs: tuple[Tensor, ...],
    ) -> None:
        # Nothing is recorded when a checkpointed layer is computed again for the
        # backward pass.
        if self._decisions is not None:
            logits = outputs[place].flatten(0, -2)
            self._decisions.extend(
                (logits, each.flatten(0, -2))
                for each in outputs
                if not each.is_floating_point()
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


def summarize_routing(decisions: RouterDecisions, last_tokens: Tensor) -> Routing:
    """Summarize the routing of packed rows.

    Args:
        decisions: The decisions of each layer.
        last_tokens: int64 [rows], index of the last token of each row. Tokens behind
            the last row are ignored.
    """
    num_tokens, num_experts = decisions[0][0].shape
    num_rows = len(last_tokens)

    # [tokens]: the row of each token, `num_rows` behind the last row.
    token_index = torch.arange(num_tokens, device=last_tokens.device)
    row = torch.bucketize(token_index, last_tokens)
    # [rows, 1]
    length = torch.bincount(row, minlength=num_rows + 1)[:num_rows, None].float()

    balances = []
    loads = []
    for logits, chosen in decisions:
        probabilities = torch.softmax(logits.float(), -1)
        # 1 for the experts that a token is routed to, else 0.
        picks = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)

        # Means over each row: fractions of its tokens, and of its probability mass.
        picked = sum_by_row(picks, row, num_rows) / length
        mass = sum_by_row(probabilities, row, num_rows) / length
        balances.append(num_experts * (picked * mass).sum(-1))
        loads.append((picked.detach() * length).sum(0))

    return Routing(torch.stack(balances).mean(0), torch.stack(loads))


def sum_by_row(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Sum [tokens, experts] over the tokens of each row to [rows, experts].

    Args:
        values: [tokens, experts].
        row: int64 [tokens], the row of each token; `num_rows` for tokens of no row.
        num_rows: The number of rows.
    """
    sums = values.new_zeros(num_rows + 1, values.shape[1])
    return sums.index_add(0, row, values)[:num_rows]
