"""A role's model that is not sharded, built and filled."""

from __future__ import annotations

import torch

from verl_ray.models.role_model import (
    HeadKind,
    RoleModel,
    build_role_model,
    fill_role_model,
)
from verl_ray.models.tensor_sources import CheckpointReader


def load_role_model(
    path: str, kind: HeadKind, *, seed: int, device: torch.device, new_head: bool = True
) -> RoleModel:
    source = CheckpointReader(path)
    model = build_role_model(source, path, kind, new_head=new_head)
    fill_role_model(model, source, seed=seed, device=device)
    return model
