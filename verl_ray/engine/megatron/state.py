"""What megatron-core's optimizer holds, as state that any layout and any other backend reads.

Invariant: weights and moments stand under the names of the model as transformers has it, as boxes of whole parameters,
in float32, as they learn. Deliberately not here: random streams and counters, and the settings of the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_ray.checkpoint.slices import Slices
from verl_ray.engine.megatron.optimizer import MOMENTS, Shard
from verl_ray.weight_sync.manifest import Manifest


def held_state(shards: Iterable[Shard], shapes: Mapping[str, tuple[int, ...]], manifest: Manifest) -> dict[str, Any]:
    """`model` and `optimizer.state` of what this rank holds; the tensors are the optimizer's own.

    Args:
        shapes: of all parameters of the model, by name.
    """
    model: dict[str, list[Any]] = defaultdict(list)
    moments: dict[str, dict[str, list[Any]]] = {name: defaultdict(list) for name in MOMENTS}
    steps: dict[str, Tensor] = {}
    saved: dict[str, bool] = {}
    for one in shards:
        for name, box, run in one.parts():
            sides = [side.stop - side.start for side in box]
            model[name].append((box, one.main[run].view(sides)))
            for kind in MOMENTS:
                moments[kind][name].append((box, one.held[kind][run].view(sides)))
            steps[name] = one.held["step"]
            saved[name] = one.mapped.owned

    def slices(name: str, parts: list[Any]) -> Slices:
        return Slices(shapes[name], torch.float32, parts, saved=saved[name])

    weights = {f"hf.{name}": slices(name, parts) for name, parts in model.items()}
    for parameter in manifest.parameters:
        if parameter.tied_to in model:
            weights[f"hf.{parameter.name}"] = slices(parameter.tied_to, model[parameter.tied_to])
    of_optimizer = {
        f"hf.{name}": {"step": steps[name].clone(), **{kind: slices(name, moments[kind][name]) for kind in MOMENTS}}
        for name in model
    }
    return {"model": weights, "optimizer": {"state": of_optimizer}}
