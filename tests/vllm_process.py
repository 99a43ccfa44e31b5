"""vLLM in the process of the tests, which has imported torch already and has other
tests to run afterwards.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from verl_ray.rollout.vllm_environment import environment


@contextmanager
def ready_for_vllm() -> Iterator[None]:
    """Engines may be started here, one at a time, and must be closed here. The process
    is then what it was before.
    """
    before, set_num_threads = dict(os.environ), torch.set_num_threads
    os.environ.update(environment("cpu", threads=1))
    from torch._dynamo import config as dynamo

    dynamo.disable = (
        True  # the environment variable is too late when torch is imported already
    )
    from vllm.v1.worker import cpu_worker  # noqa: F401

    # An engine that ends has all objects gone through three times, but for these. vLLM
    # would thaw them, and freeze its own.
    gc.freeze()
    try:
        with patch.object(gc, "freeze"), patch.object(gc, "unfreeze"):
            yield
    finally:
        gc.unfreeze()
        dynamo.disable = False
        torch.set_num_threads = set_num_threads
        os.environ.clear()
        os.environ.update(before)
