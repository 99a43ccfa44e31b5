"""The ladder: settings that leave memory of a GPU free and cost time, cheapest first.

Invariant: a rung never makes a micro-batch larger, and names no backend; what a backend
can save is what it declares. Every `auto` on GPUs stands on the lowest rungs that fit
(`device_defaults.py`). The changes that are proposed for what a user typed are these
rungs and dearer ones (`savings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from verl_ray.backends.base import Trade
from verl_ray.config.roles import ModelRole
from verl_ray.config.rollout_task import Offloaded, RolloutTaskConfig
from verl_ray.config.schema import Config, row_tokens_per_rank

MICRO_BATCH_TOKENS = (32768, 16384, 8192, 4096, 2048)
"""Sizes of micro-batches on GPUs. Fewer, larger ones gather a layer's weights less
often."""

FEWEST_TOKENS = 4096
"""Micro-batches of fewer tokens leave matrix products short, and FSDP gathers a layer
for each of them: from here on, layers are computed again before rows are cut finer."""

Step = Iterator[tuple[str, object]]
"""Settings and their new values. A setting that is `auto` is none of them."""

Rung = Callable[[Config], Step]
"""Takes the configuration with the rungs below."""


def saved(name: str, role: ModelRole, trade: Trade | None) -> Step:
    """Yield the setting of a backend that saves memory, unless it does, or is `auto`.

    Args:
        name: Name of the role.
        role: Its settings.
        trade: What its backend declares; None if it has no such setting.
    """
    if trade is not None:
        value = getattr(role.backend, trade.setting)
        if value not in ("auto", trade.small):
            yield f"{name}.backend.{trade.setting}", trade.small


def micro_batches(most: int) -> Rung:
    """Return the rung of micro-batches of so many tokens, or of a longer row."""

    def smaller(config: Config) -> Step:
        for name, role in config.model_roles.items():
            tokens = role.backend.micro_batch_tokens_per_rank
            least = max(most, row_tokens_per_rank(config, name))
            if tokens != "auto" and least < tokens:
                yield f"{name}.backend.micro_batch_tokens_per_rank", least

    return smaller


def _sharded_sums(config: Config) -> Step:
    """Yield the sums of gradients in shards, in each micro-batch."""
    for name, role in config.learners.items():
        yield from saved(name, role, role.backend.gradient_sums)


def _recomputation(config: Config) -> Step:
    """Yield the layers that are computed again, of models that keep activations."""
    for name, role in config.learners.items():
        yield from saved(name, role, role.backend.recomputation)


def offloading(offload: Offloaded) -> Rung:
    """Return the rung by what leaves shared GPUs while rollouts are generated."""

    def offloaded(config: Config) -> Step:
        if not isinstance(config, RolloutTaskConfig) or not config.shares_processes:
            return
        if config.placement.offload not in ("auto", offload):
            yield "placement.offload", offload

    return offloaded


_TOKENS_BEFORE = [each for each in MICRO_BATCH_TOKENS if each >= FEWEST_TOKENS]
_TOKENS_AFTER = [each for each in MICRO_BATCH_TOKENS if each < FEWEST_TOKENS]

WHILE_LEARNING: tuple[Rung, ...] = (
    *map(micro_batches, _TOKENS_BEFORE),
    _sharded_sums,
    _recomputation,
    *map(micro_batches, _TOKENS_AFTER),
)
"""Rungs that a GPU may need while models compute and learn. Smaller micro-batches and
sharded sums cost exchanges, which hide behind computation where links are fast; to
compute every layer again costs a third of an update."""

WHILE_GENERATING: tuple[Rung, ...] = (offloading("optimizer"), offloading("all"))
"""Rungs that a shared GPU may need while an engine generates: two copies of the state
in each step."""
