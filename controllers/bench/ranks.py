"""Ranks of a training backend, as suites start them without a cluster.

Invariant: they compute with the shipped settings as `auto` is on a CPU, so a suite
measures the same settings on every machine. Loading this module loads no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from controllers.bench.processes import PATIENCE_S
from controllers.compose.composition import compose
from verl_ray.config.schema import Config
from verl_ray.data.batch import offsets_of
from verl_ray.data.stages import TrainingBatch
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.resolve import resolve
from verl_ray.shell import override_of

if TYPE_CHECKING:
    import torch

    from verl_ray.config.roles import SupervisedRole

C = TypeVar("C", bound=Config)


def as_on_a_cpu(config: C) -> C:
    """Return the configuration with the values that `auto` has on a CPU."""
    return resolve(config, facts_here(config, None))


def learner(
    backend: str, model: str, max_tokens: int, overrides: Sequence[str]
) -> SupervisedRole:
    """Return a role of supervised training, with rows of at most `max_tokens`."""
    own = (
        f"backend={backend}",
        override_of("model.path", model),
        f"sft.max_tokens={max_tokens}",
        "run.dir=none",
        "run.evaluate_every=0",
        "data.train_path=none",
        "data.validation_path=null",
    )
    return as_on_a_cpu(compose("sft", (*own, *overrides))).learners["actor"]


@contextlib.contextmanager
def joined(
    rank: int, world: int, rendezvous: str, *, device: str = "cpu", threads: int = 1
) -> Iterator[torch.device]:
    """Join the process group of all ranks; yield the device of this one.

    Args:
        rank: The number of this rank.
        world: The number of ranks.
        rendezvous: A file through which the ranks find each other.
        device: "cpu" or "cuda", with one GPU per rank.
        threads: Threads that compute.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    on_gpu = device == "cuda"
    own_device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(own_device)

    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE_S),
        device_id=own_device if on_gpu else None,
    )
    yield own_device
    dist.destroy_process_group()


def training_rows(
    lengths: Sequence[int] | np.ndarray, vocab_size: int, prompt_tokens: int = 1
) -> TrainingBatch:
    """Return rows of random tokens; what follows their prompts is learned from."""
    offsets = offsets_of(lengths)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = place >= prompt_tokens
    tokens = np.random.default_rng(1).integers(0, vocab_size, len(mask))
    return TrainingBatch(
        offsets=offsets,
        tokens=tokens.astype(np.int32),
        response_mask=mask,
        loss_weight=np.full(len(lengths), 1 / mask.sum(), np.float32),
    )
