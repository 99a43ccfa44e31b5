"""Where two computations of the same model part.

Invariant: the module that is named had equal inputs and unequal outputs, and no module
inside of it had.
"""

from __future__ import annotations

import linecache
import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module: its first input and its first output per token."""

    name: str
    inputs: Tensor
    outputs: Tensor


def traced(
    model: nn.Module, tokens: int, compute: Callable[[], object]
) -> list[ModuleCall]:
    """Return the calls of a model's modules while something is computed.

    A module's call comes after those of the modules inside of it. Calls whose tensors
    do not have a row per token are left out.

    Args:
        model: The model.
        tokens: The number of tokens.
        compute: Computes something with the model.
    """
    calls: list[ModuleCall] = []

    def record(name: str, arguments: object, result: object) -> None:
        inputs, outputs = _by_token(arguments, tokens), _by_token(result, tokens)
        if inputs is not None and outputs is not None:
            calls.append(ModuleCall(name, inputs, outputs))

    hooks = [
        module.register_forward_hook(
            lambda _, arguments, keywords, result, name=name: record(
                name, (arguments, keywords), result
            ),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            compute()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _by_token(values: object, tokens: int) -> Tensor | None:
    """Return the first tensor of numbers with a row per token, as [tokens, numbers]."""
    if isinstance(values, Tensor):
        shape = values.shape
        if values.is_floating_point() and shape[:2] == (1, tokens):
            return values.detach().flatten(0, 1).flatten(1).clone()
        if values.is_floating_point() and values.dim() > 1 and shape[0] == tokens:
            return values.detach().flatten(1).clone()
        return None
    parts: Iterable[object] = ()
    if isinstance(values, dict):
        parts = values.values()
    elif isinstance(values, tuple | list):
        parts = values
    tensors = (_by_token(each, tokens) for each in parts)
    return next((each for each in tensors if each is not None), None)


def joined_calls(parts: Sequence[ModuleCall]) -> ModuleCall:
    """Return calls of the same module with one row after another as a single call."""
    return ModuleCall(
        parts[0].name,
        torch.cat([part.inputs for part in parts]),
        torch.cat([part.outputs for part in parts]),
    )


def first_difference(
    calls: list[ModuleCall], others: list[ModuleCall], tolerance: float, places: Tensor
) -> str | None:
    """Return the module whose outputs differ first, though its inputs are equal.

    Args:
        calls: Calls of one computation.
        others: Calls of the other computation, in the same order of tokens.
        tolerance: The largest difference of equal numbers.
        places: int64, the tokens that are compared.

    Returns:
        The module's name; None if no module that both computations called is one.
    """
    remaining = list(others)
    for call in calls:
        other = next((each for each in remaining if each.name == call.name), None)
        if other is None or other.outputs.shape != call.outputs.shape:
            continue
        remaining.remove(other)
        if call.inputs.shape != other.inputs.shape:
            continue
        inputs_differ = _distance(call.inputs, other.inputs, places) > tolerance
        outputs_differ = _distance(call.outputs, other.outputs, places) > tolerance
        if outputs_differ and not inputs_differ:
            return call.name
    return None


def described(error: BaseException) -> str:
    """Return an error with its type, and the module of a model that raised it."""
    parts = (failed_call(error), f"{type(error).__name__}: {error}")
    return ": ".join(filter(None, parts))


def failed_call(error: BaseException) -> str:
    """Return the innermost module of a model in whose forward an error arose.

    Returns:
        The module's name, its class, and the statement that failed; "" if the error
        arose elsewhere.
    """
    calls = [
        (frame.f_locals.get("self"), frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    models = (caller for caller, *_ in calls if isinstance(caller, PreTrainedModel))
    model = next(models, None)
    if model is None:
        return ""

    names = {module: name for name, module in model.named_modules()}
    for module, code, line in reversed(calls):
        if isinstance(module, nn.Module) and names.get(module):
            statement = linecache.getline(code.co_filename, line).strip()
            return f"{names[module]} ({type(module).__name__}), in `{statement}`"
    return ""


def _distance(values: Tensor, others: Tensor, places: Tensor) -> float:
    return largest(values[places] - others[places])


def largest(differences: Tensor) -> float:
    """Return the largest size of an element, which is infinite for one that is NaN.

    The maximum of Python would lose a NaN.
    """
    return float(differences.abs().nan_to_num(nan=math.inf, posinf=math.inf).max())
