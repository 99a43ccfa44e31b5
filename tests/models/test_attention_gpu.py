"""The variable-length flash kernel computes the same attention as the buckets.

Only a GPU can show this.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_ray.columns.batch import offsets_of
from verl_ray.models.attention import attend, plan_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flash_and_buckets_agree_forward_and_backward(kv_heads: int) -> None:
    device = torch.device("cuda")
    offsets = offsets_of(np.array([5, 130, 1, 64, 9]))
    torch.manual_seed(0)
    tokens = int(offsets[-1])
    shapes = [(1, heads, tokens, 64) for heads in (4, kv_heads, kv_heads)]
    inputs = [
        torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes
    ]
    found = {}
    for name, dtype in (("flash", torch.bfloat16), ("buckets", torch.float32)):
        layout = plan_layout(offsets, device, dtype)
        assert (layout.cumulative is not None) == (name == "flash")
        own = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        out, _ = attend(torch.nn.Module(), *own, None, scaling=0.125, layout=layout)
        out.float().square().sum().backward()
        found[name] = [out, *(x.grad for x in own)]
    for flash, exact in zip(found["flash"], found["buckets"], strict=True):
        assert torch.allclose(flash.float(), exact.float(), atol=3e-2, rtol=3e-2)
