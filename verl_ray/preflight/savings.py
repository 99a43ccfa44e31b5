"""The cheapest change of settings with which a run fits its GPUs and their hosts.

Invariant: the run that follows from the change, typed as overrides, obeys every rule
and fits GPUs and hosts alike. What the user left to `auto` is changed only where
nothing else is enough. An attempt is the configuration as its user gave it, with other
values of some settings, so every `auto` follows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from verl_ray.config.load import Changes, with_auto_again, with_changes
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config, row_tokens_per_rank, rule_violations
from verl_ray.preflight.device_defaults import SNAPSHOT_COPIES, SNAPSHOT_EVERY
from verl_ray.preflight.devices import device_problems, ranks_on_idle_gpus
from verl_ray.preflight.facts import ClusterFacts, facts_here
from verl_ray.preflight.ladder import (
    WHILE_GENERATING,
    WHILE_LEARNING,
    Rung,
    Step,
    micro_batches,
    offloading,
    saved,
)
from verl_ray.preflight.machine import GIB, Machine
from verl_ray.preflight.memory_plan import (
    PROCESS_BYTES,
    USED_SHARE,
    Job,
    MemoryPlan,
    cache_bounds_gib,
    memory_plan,
)
from verl_ray.preflight.model_directories import backend_problems, engine_problems
from verl_ray.preflight.model_files import remembered_sizes
from verl_ray.preflight.resolve import resolve
from verl_ray.preflight.role_memory import ROLLOUT
from verl_ray.settings.section import resolved
from verl_ray.shell import for_shell

Place = Literal["device", "host"]
"""A GPU, or the host of a node."""


@dataclass(frozen=True)
class Attempt:
    """A run on a machine with GPUs, some of whose settings were changed."""

    typed: Config
    """Configuration that may hold `auto`."""
    machine: Machine
    facts: ClusterFacts
    changes_auto: bool
    """Whether a setting that is `auto` may be changed."""
    overridden: frozenset[str] = frozenset()
    """Keys that were changed."""

    @staticmethod
    def of(job: Job, *, changes_auto: bool) -> Attempt:
        """Return the run without any change."""
        typed = with_auto_again(job.config)
        facts = facts_here(typed, job.machine, learns=job.learns)
        return Attempt(typed, job.machine, facts, changes_auto)

    def changed(self, changes: Changes) -> Attempt:
        """Return the run with other values of some settings."""
        typed = with_changes(self.typed, changes)
        return replace(self, typed=typed, overridden=frozenset(changes))

    @property
    def settings(self) -> Config:
        """The settings to change. One that may not be changed is `auto`."""
        return self.config if self.changes_auto else self.typed

    @cached_property
    def config(self) -> Config:
        """The configuration with every `auto` replaced by its value.

        Where nothing fits a GPU, it is what needs least of one, which is found sooner.
        """
        least = self._frugal()
        plan = memory_plan(least, on_gpus=True, learns=self.facts.learns)
        if plan.fullest(on_device=True)[1] > self.available["device"]:
            return least
        return resolve(self.typed, self.facts)

    def _frugal(self) -> Config:
        """Return the configuration in which every `auto` needs least of a GPU."""
        facts = replace(self.facts, gpu_memory_bytes=None)
        config = resolve(self.typed, facts)
        least: dict[str, object] = {}
        for name, engine in self.typed.engines.items():
            if engine.config.kv_cache_gib == "auto":
                own = config.engines[name]
                key = f"{engine.section}.kv_cache_gib"
                least[key], _ = cache_bounds_gib(own, config, learns=facts.learns)
        return with_changes(config, least)

    @cached_property
    def job(self) -> Job:
        """The run with every `auto` replaced by its value."""
        return Job(self.config, self.machine, self.facts.learns)

    @property
    def models(self) -> list[str]:
        """Roles that run a model on a training backend."""
        return list(self.config.active_models(learns=self.facts.learns))

    @property
    def engines(self) -> list[str]:
        """Roles that vLLM serves."""
        return list(self.config.active_engines(learns=self.facts.learns))

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan."""
        return self.job.memory

    @cached_property
    def needed(self) -> Mapping[Place, int]:
        """Bytes of the fullest GPU and of the fullest host."""
        _, device_bytes = self.memory.fullest(on_device=True)
        gpus = self.machine.gpus
        host_bytes = [self.memory.node_bytes(each, gpus) for each in self.memory.phases]
        return {"device": device_bytes, "host": max(host_bytes)}

    @property
    def available(self) -> Mapping[Place, float]:
        """Bytes of a GPU, without limit if it is not known, and of a host."""
        device_bytes = self.machine.gpu_memory_bytes or math.inf
        return {"device": device_bytes, "host": self.machine.memory_bytes}

    @property
    def short(self) -> list[Place]:
        """Places that are too small."""
        return [
            place for place in self.needed if self.needed[place] > self.available[place]
        ]

    def is_possible_after(self, before: Attempt) -> bool:
        """Return whether the changes break no rule, and need no more that is short."""
        if self._keys_of_problems - before._keys_of_problems:
            return False
        return all(self.needed[place] <= before.needed[place] for place in self.short)

    @cached_property
    def _keys_of_problems(self) -> set[str]:
        """Keys of the settings that break a rule."""
        problems = rule_violations(self.typed, self.overridden)
        problems += backend_problems(self.config, None)
        problems += device_problems(self.job)
        for engine in self.config.engines.values():
            problems += engine_problems(engine, self.machine)
        return {problem.key for problem in problems}

    def is_short(self, role: str) -> bool:
        """Return whether the GPUs of a role are too small in some phase."""
        plan = self.memory
        device = plan.device_of(role)
        sizes = [plan.bytes_by_device(phase)[device] for phase in plan.phases]
        return max(sizes) > self.available["device"]

    def excess_gib(self, engine: str, share: float = 1.0) -> float:
        """Return what an engine's GPUs lack while it has a cache, in GiB.

        Args:
            engine: Name of the engine.
            share: Share of a GPU that may be filled.
        """
        plan = self.memory
        device = plan.device_of(engine)
        needed = max(
            plan.bytes_by_device(phase)[device]
            for phase in plan.phases
            if plan.by_role[engine][phase].of("cache")
        )
        return (needed - share * self.available["device"]) / GIB


def cheapest_change(job: Job) -> Changes | None:
    """Return the settings to change so that the prediction fits, by key.

    Kinds of changes are tried in the order of `SAVINGS`, each in addition to those
    before it. Of these, what is not needed is left out, the dearest first.

    Args:
        job: The run, on a machine with GPUs of which some, or some host, is too small.

    Returns:
        The changes; None if no combination that is tried fits.
    """
    with remembered_sizes():
        for changes_auto in (False, True):
            before = Attempt.of(job, changes_auto=changes_auto)
            changes = _cheapest(before)
            if changes:
                return changes | _to_stay(changes, before.typed)
    return None


def _cheapest(before: Attempt) -> dict[str, object]:
    """Return the cheapest changes of settings that may be changed, or none."""
    changes: dict[str, object] = {}
    current = before
    for saving in [saving for place in before.short for saving in SAVINGS[place]]:
        step = dict(saving(current))
        changed = before.changed(changes | step)
        if not step or not changed.is_possible_after(current):
            continue
        changes |= step
        current = changed
        if not current.short:
            break
    else:
        return {}

    key = _superfluous(changes, before)
    while key is not None:
        del changes[key]
        key = _superfluous(changes, before)
    return changes


def _superfluous(changes: Changes, before: Attempt) -> str | None:
    """Return the dearest change without which the others are enough, if any is."""
    for key in reversed(list(changes)):
        fewer = {other: changes[other] for other in changes if other != key}
        changed = before.changed(fewer)
        if not changed.short and changed.is_possible_after(before):
            return key
    return None


FOLLOWERS: Mapping[str, tuple[str, ...]] = {
    "actor.num_ranks": ("critic.num_ranks", "reference.num_ranks", "reward.num_ranks"),
    "rollout.dtype": ("reward.engine.dtype",),
    "rollout.kv_cache_gib": ("reward.engine.kv_cache_gib",),
}
"""Settings whose value is that of another one, until it is typed."""


def _to_stay(changes: Changes, typed: Config) -> dict[str, object]:
    """Return the settings that changes of others would drag along, as they are."""
    values: dict[str, object] = {
        f"{name}.num_ranks": role.num_ranks for name, role in typed.model_roles.items()
    }
    for engine in typed.engines.values():
        values[f"{engine.section}.dtype"] = engine.config.dtype
        values[f"{engine.section}.kv_cache_gib"] = engine.config.kv_cache_gib
    return {
        follower: values[follower]
        for key, value in changes.items()
        for follower in FOLLOWERS.get(key, ())
        if follower not in changes and values.get(follower, value) != value
    }


def single_rows(config: Config) -> Changes:
    """Return the changes that make micro-batches as small as the longest row."""
    changes = {}
    for name, role in config.model_roles.items():
        longest = row_tokens_per_rank(config, name)
        if resolved(role.backend.micro_batch_tokens_per_rank) > longest:
            changes[f"{name}.backend.micro_batch_tokens_per_rank"] = longest
    return changes


def as_overrides(changes: Changes) -> str:
    """Return changes as overrides that hold whatever else was typed."""
    return for_shell(changes.items())


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_words(changes: Changes) -> str:
    """Return settings in few words; roles that share a value share a key."""
    shared: dict[tuple[str, str], list[str]] = {}
    for key, value in changes.items():
        _, separator, setting = key.partition(".backend.")
        name = f"backend.{setting}" if separator else key
        shared.setdefault((name, _as_text(value)), []).append(key)

    words = []
    for (name, text), keys in shared.items():
        # A single role keeps its own key.
        key = name if len(keys) > 1 else keys[0]
        words.append(f"{key}={text}")
    return " ".join(words)


# -------------------------------------------- savings of a GPU, the cheapest ones first

Saving = Callable[[Attempt], Step]
"""Takes the run as the savings before it have changed it."""


def _rung(rung: Rung) -> Saving:
    """Return the saving by a rung of the ladder."""
    return lambda run: rung(run.settings)


def _more_ranks(run: Attempt) -> Step:
    """Yield the ranks that use idle GPUs, each with a smaller part of the model."""
    names = [name for name in run.models if run.is_short(name)] or run.models
    if names:
        yield from ranks_on_idle_gpus(run.job, names).items()


def _smaller_caches(run: Attempt) -> Step:
    """Yield caches that leave a tenth of a GPU free, or are the largest that fit.

    A small one leaves few rows at a time.
    """
    for name in run.engines:
        engine = run.settings.engines[name]
        cache_gib = engine.config.kv_cache_gib
        if cache_gib == "auto" or run.excess_gib(name) <= 0:
            continue
        own = run.config.engines[name]
        least, _ = cache_bounds_gib(own, run.config, learns=run.facts.learns)
        smaller = [
            math.floor(100 * (cache_gib - run.excess_gib(name, share))) / 100
            for share in (USED_SHARE, 1.0)
        ]
        enough = next((each for each in smaller if each >= least), least)
        if enough < cache_gib:
            yield f"{engine.section}.kv_cache_gib", enough


def _wider_engines(width: int) -> Saving:
    """Return the saving by engines of so many ranks, on as many GPUs as before.

    A smaller cache would not be enough for them.
    """

    def wider(run: Attempt) -> Step:
        for name in run.engines:
            engine = run.config.engines[name]
            parallel = engine.config.tensor_parallel
            cache_gib = resolved(engine.config.kv_cache_gib)
            has_stages = engine.config.pipeline_parallel > 1
            if parallel >= width or has_stages or run.excess_gib(name) < cache_gib:
                continue
            yield f"{engine.section}.tensor_parallel", width
            if run.settings.engines[name].config.num_replicas != "auto":
                replicas = max(1, engine.ranks // width)
                yield f"{engine.section}.num_replicas", replicas

    return wider


def _sharded_matrices(ranks: int) -> Saving:
    """Return the saving by so many ranks that share the matrices of each layer."""

    def sharded(run: Attempt) -> Step:
        for name, role in run.settings.model_roles.items():
            for setting, value in role.backend.matrix_sharing(ranks).items():
                yield f"{name}.backend.{setting}", value

    return sharded


def _slices_of_rows(slices: int) -> Saving:
    """Return the saving by so many ranks that share the tokens of each row."""

    def sliced(run: Attempt) -> Step:
        for name, role in run.settings.model_roles.items():
            backend = role.backend
            key = backend.token_slices_key
            if key is None or backend.token_slices >= slices:
                continue
            yield f"{name}.backend.{key}", slices
            if backend.micro_batch_tokens_per_rank != "auto":
                row = row_tokens_per_rank(run.config, name) * backend.token_slices
                tokens = -(-row // slices)
                yield f"{name}.backend.micro_batch_tokens_per_rank", tokens

    return sliced


def _ranks_of_engines(run: Attempt) -> Step:
    """Yield ranks that take GPUs of engines whose number is `auto`, as few as fit."""
    task = run.settings
    names = [name for name in run.models if run.is_short(name)]
    if not isinstance(task, RolloutTaskConfig) or not names:
        return
    if task.rollout.num_replicas != "auto":
        return
    spare = run.config.engines[ROLLOUT].ranks - task.rollout.ranks_per_replica
    step: Changes = {}
    for more in range(1, spare // len(names) + 1):
        ranks = {name: run.settings.model_roles[name].num_ranks for name in names}
        step = {f"{name}.num_ranks": ranks[name] + more for name in names}
        changed = run.changed(step)
        if not changed.short and changed.is_possible_after(run):
            break
    yield from step.items()


def _bfloat16(run: Attempt) -> Step:
    for name, role in run.settings.model_roles.items():
        if role.backend.dtype == "float32":
            yield f"{name}.backend.dtype", "bfloat16"
    for engine in run.settings.engines.values():
        if engine.config.dtype == "float32":
            yield f"{engine.section}.dtype", "bfloat16"


def _parameters_on_the_host(run: Attempt) -> Step:
    for name, role in run.settings.model_roles.items():
        yield from saved(name, role, role.backend.host_offload)


# ------------------------------------------- savings of a host, the cheapest ones first


def _no_second_copies(run: Attempt) -> Step:
    recovery = run.settings.run.recovery
    if recovery.taken_every and recovery.num_copies == 2:
        yield SNAPSHOT_COPIES, 1


def _no_snapshots(run: Attempt) -> Step:
    if run.settings.run.recovery.taken_every:
        yield SNAPSHOT_EVERY, 0


def _parameters_on_gpus(run: Attempt) -> Step:
    for name, role in run.settings.model_roles.items():
        trade = role.backend.host_offload
        if trade is not None and role.backend.stays_on_host:
            yield f"{name}.backend.{trade.setting}", trade.fast


def _whole_syncs(run: Attempt) -> Step:
    task = run.settings
    if isinstance(task, RolloutTaskConfig) and task.rollout.sync.delta:
        yield "rollout.sync.delta", False


def _fewer_graders(run: Attempt) -> Step:
    """Yield as many processes of graders without a model as there is memory for."""
    excess = run.needed["host"] - run.available["host"]
    for name, grader in run.settings.graders.items():
        if grader.cpu_ranks is not None:
            superfluous = math.ceil(excess / PROCESS_BYTES["reward"])
            ranks = max(1, grader.cpu_ranks - superfluous)
            if ranks < grader.cpu_ranks:
                yield f"{name}.num_ranks", ranks


_SIZES = (2, 4, 8)
"""Numbers of ranks that share a layer, a row or an engine: all within a node."""

SAVINGS: Mapping[Place, tuple[Saving, ...]] = {
    "device": (
        *(_wider_engines(width) for width in _SIZES),
        _more_ranks,
        *map(_rung, WHILE_LEARNING),
        _rung(micro_batches(1)),
        _smaller_caches,
        *map(_rung, WHILE_GENERATING),
        *(_sharded_matrices(ranks) for ranks in _SIZES),
        *(_slices_of_rows(slices) for slices in _SIZES),
        _ranks_of_engines,
        _bfloat16,
        _parameters_on_the_host,
    ),
    "host": (
        _no_second_copies,
        _no_snapshots,
        _more_ranks,
        _rung(offloading("none")),
        _rung(offloading("optimizer")),
        _parameters_on_gpus,
        _whole_syncs,
        _fewer_graders,
    ),
}
"""Kinds of changes. Idle GPUs cost nothing; then come the rungs of the ladder, and what
is dearer. The type of the computation is changed late, since it changes numbers; an
optimizer on the host costs most."""
