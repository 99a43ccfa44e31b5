"""The settings of every task that learns from rollouts of its own policy.

They are the actor, its rollout engines, and where the processes are placed. Invariant:
a setting of a wire or of a schedule that is not used is refused. What is learned from
the rollouts is in `tasks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from verl_ray.config.agent import AgentConfig
from verl_ray.config.data import DataConfig, RowFormat
from verl_ray.config.roles import TrainedRole
from verl_ray.config.rollout import (
    HEAD,
    VLLM_LORA_RANKS,
    RolloutConfig,
    RolloutEngineConfig,
    ServedModel,
    endpoint_settings_are_used,
    endpoints_have_an_address,
    experts_have_ranks,
    open_rows_survive_a_turn,
    quantization_is_measured,
    quantized_engines_compute_in_bfloat16,
    routing_is_recorded_whole,
    sampling_is_what_the_trainer_sees,
)
from verl_ray.config.schema import Config
from verl_ray.config.vllm_args import vllm_args_are_free
from verl_ray.errors import Problem
from verl_ray.settings.section import (
    Auto,
    OverriddenKeys,
    Section,
    resolved,
    set_exactly_when,
)
from verl_ray.suggest import either, nearest_divisors

Offloaded = Literal["all", "optimizer", "none"]


class PlacementConfig(Section):
    """Placement of the processes of the roles."""

    kind: Literal["colocated", "separate"]
    """Whether actor, critic, reference and rollout share bundles (and devices), or each
    have their own."""
    offload: Offloaded | Auto
    """State of actor, critic and reference that moves to the host while rollouts are
    generated on shared GPUs: all of it, only that of the optimizers, or none.

    auto: as little as the GPU needs, by the memory plan; none where no GPU is shared.
    """


class RolloutTaskConfig(Config):
    """A run that learns from rollouts of its own policy, which is the actor."""

    data: DataConfig
    rollout: RolloutConfig
    actor: TrainedRole
    placement: PlacementConfig

    @property
    def episodes(self) -> AgentConfig | None:
        """Environments of episodes; None where rollouts are single responses."""
        return None

    @property
    def examples_per_step(self) -> int:
        """Number of prompts per step."""
        return self.data.prompts_per_step

    @property
    def examples_key(self) -> str:
        return "data.prompts_per_step"

    @property
    def rows_per_step(self) -> int:
        return self.data.prompts_per_step * self.rollout.group_size

    @property
    def most_open_rows(self) -> int:
        """Number of rows that may be generated at the same time."""
        return (1 + self.rollout.staleness) * self.rows_per_step

    @property
    def step_in_words(self) -> str:
        prompts = self.data.prompts_per_step
        group_size = self.rollout.group_size
        return f"{prompts} prompts x {group_size} = {self.rows_per_step} rows"

    @property
    def row_format(self) -> RowFormat:
        return RowFormat(
            "prompt", self.data.max_prompt_tokens, "data.max_prompt_tokens"
        )

    @property
    def longest_row(self) -> tuple[int, str]:
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        return longest, "data.max_prompt_tokens + rollout.max_response_tokens"

    @property
    def length_key(self) -> str:
        return "rollout.max_response_tokens"

    @property
    def longest_response(self) -> int:
        return self.rollout.max_response_tokens

    @property
    def shares_processes(self) -> bool:
        return self.placement.kind == "colocated"

    def needs_old_log_probs(self, *, corrects: bool) -> bool:
        """Return whether the actor computes log-probs before it learns.

        Args:
            corrects: Whether a correction of the mismatch applies now.
        """
        return False

    @property
    def sends_adapter_alone(self) -> bool:
        """Whether only the actor's adapter is sent to the replicas.

        If so, the whole model is sent once, at the first sync.
        """
        return resolved(self.rollout.sync.adapter) == "alone"

    @property
    def overlaps(self) -> bool:
        return self.rollout.schedule in ("one_step_off", "asynchronous")

    @property
    def keeps_published_version(self) -> bool:
        """Whether the actor keeps the weights that it has sent while it learns.

        A replica that starts again meanwhile gets them.
        """
        return self.overlaps

    @property
    def engines(self) -> dict[str, ServedModel]:
        """The engines of the policy, then those of the judges, by role name."""
        # Most runs set model.path, which actor.model.path refers to; a message names
        # the key that the user has to change.
        key = "actor.model.path"
        if self.actor.model.folder == self.model.folder:
            key = "model.path"

        policy = ServedModel(
            config=self.rollout,
            section="rollout",
            key=key,
            path=self.actor.model.folder,
            trusts_code=self.trusts_code(self.actor.model.folder),
            max_prompt_tokens=self.data.max_prompt_tokens,
            max_response_tokens=self.rollout.max_response_tokens,
        )
        return {"rollout": policy} | super().engines

    def problems(self, overridden: OverriddenKeys) -> Iterator[Problem]:
        """Yield the problems of any task, the actor, its engines, and their places."""
        yield from super().problems(overridden)

        rollout = self.rollout
        judges = {section: judge.engine for section, judge in self.judges.items()}

        yield from mini_batches_divide_the_rows(self)
        yield from schedule_is_consistent(self)
        yield from open_rows_survive_a_turn(rollout)
        yield from offloading_frees_shared_devices(self.placement)
        yield from sampling_is_what_the_trainer_sees(rollout)
        yield from routing_is_recorded_whole(rollout)
        engines: dict[str, RolloutEngineConfig] = {"rollout": rollout}
        engines |= {f"{name}.engine": engine for name, engine in judges.items()}
        yield from experts_have_ranks(engines)
        yield from quantized_engines_compute_in_bfloat16(engines)
        yield from quantization_is_measured(rollout)
        yield from vllm_args_are_free(rollout, judges)
        yield from adapters_can_be_sent_alone(self, overridden)
        yield from transport_fits_the_placement(self, overridden)
        yield from endpoint_settings_are_used(rollout.endpoint, overridden)
        yield from endpoints_have_an_address(rollout)


# -------------------------------------------------------------------------------- rules


def offloading_frees_shared_devices(placement: PlacementConfig) -> Iterator[Problem]:
    """Yield a problem if trainers offload and share no device with rollout engines."""
    kind = placement.kind
    offload = placement.offload

    # Separate trainers have their devices to themselves.
    if kind != "colocated" and offload in ("all", "optimizer"):
        rule = (
            f"with placement={kind} trainers share their devices with no rollout engine"
        )
        fix = "Leave it out, or use placement=colocated."
        yield Problem("placement.offload", offload, rule, fix)


def mini_batches_divide_the_rows(config: RolloutTaskConfig) -> Iterator[Problem]:
    """Yield a problem for each role whose mini-batches leave a remainder of rows."""
    prompts = config.data.prompts_per_step
    group_size = config.rollout.group_size
    rows = config.rows_per_step

    for name, role in config.learners.items():
        size = role.rows_per_update(rows)
        if rows % size == 0:
            continue

        rule = (
            f"it must divide the {rows} rows of a step,"
            f" data.prompts_per_step={prompts} x rollout.group_size={group_size}"
        )
        nearest = either(nearest_divisors(rows, size))
        fix = f"The nearest that do are {nearest}; null takes all rows at once."
        yield Problem(f"{name}.mini_batch_size", size, rule, fix)


# ------------------------------------------------------------------------- the schedule


@dataclass(frozen=True)
class _Needs:
    """Needs of a schedule."""

    updates: Literal["between", "in_flight"]
    placement: Literal["colocated", "separate"] | None
    """None where it does not matter."""


_SCHEDULES: Mapping[str, _Needs] = {
    "synchronous": _Needs("between", None),
    "one_step_off": _Needs("between", "separate"),
    "asynchronous": _Needs("in_flight", "separate"),
    "carry_over": _Needs("in_flight", "colocated"),
}


def schedule_is_consistent(config: RolloutTaskConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that does not fit rollout.schedule."""
    rollout = config.rollout
    schedule = rollout.schedule
    needs = _SCHEDULES[schedule]
    choice = f"schedule={schedule}"

    if schedule == "synchronous" and rollout.staleness:
        rule = f"with {choice} a step learns from its own rollouts alone"
        fix = (
            "Set it to 0, or choose schedule=carry_over, or with placement=separate"
            " schedule=one_step_off or schedule=asynchronous."
        )
        yield Problem("rollout.staleness", rollout.staleness, rule, fix)
    if schedule != "synchronous" and not rollout.staleness:
        rule = f"with {choice} rollouts are older than the policy that learns from them"
        fix = "Use at least 1, or choose schedule=synchronous."
        yield Problem("rollout.staleness", 0, rule, fix)

    if rollout.updates != needs.updates:
        under = (
            "also under open rows" if needs.updates == "in_flight" else "between rows"
        )
        rule = f"with {choice} replicas take new weights {under}"
        fix = f"Leave it out: {choice} sets it to {needs.updates}."
        yield Problem("rollout.updates", rollout.updates, rule, fix)
        return

    because = f"rollout.updates={rollout.updates}"
    has_open_rows = rollout.updates == "in_flight"
    yield from set_exactly_when(
        has_open_rows, "rollout.kv", rollout.kv, because, "recompute"
    )

    placement = config.placement.kind
    if needs.placement is not None and placement != needs.placement:
        fix = f"Use placement={needs.placement}"
        if needs.placement == "separate":
            rule = f"with {choice} trainers and rollout engines work at the same time"
            fix += ", or schedule=carry_over, in which they take turns."
        else:
            rule = f"with {choice} trainers and rollout engines take turns on devices"
            fix += ", or schedule=asynchronous, in which they work at the same time."
        yield Problem("placement", placement, rule, fix)


# -------------------------------------------------------------------------- weight sync

_SYNC = "rollout.sync"

# Wires on which sending less saves more time than comparing costs.
_SLOW_WIRES = ("broadcast", "host_broadcast", "disk")


def transport_fits_the_placement(
    config: RolloutTaskConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that does not go with the chosen wire."""
    sync = config.rollout.sync

    if sync.delta and sync.transport not in _SLOW_WIRES:
        verb = "may be" if sync.transport == "auto" else "is"
        rule = (
            f"changes are for slow wires, and transport={sync.transport} {verb} memory"
            " that both sides see: finding changes there costs more than copying all"
        )
        fix = f"Use false, or {_SYNC}.transport=broadcast or disk."
        yield Problem(f"{_SYNC}.delta", True, rule, fix)

    # Only this wire writes files.
    if sync.transport != "disk":
        keys = overridden.under(f"{_SYNC}.folder")
        reason = f"{_SYNC}.transport={sync.transport} has no files"
        yield from overridden.ignored(keys, reason)

    if sync.transport == "cuda_ipc":
        yield from _cuda_ipc_problems(config)


def _cuda_ipc_problems(config: RolloutTaskConfig) -> Iterator[Problem]:
    key = f"{_SYNC}.transport"
    placement = config.placement.kind
    replicas = config.rollout.num_replicas
    actor_ranks = config.actor.num_ranks

    # A handle of GPU memory can be opened only on the same GPU.
    if placement != "colocated":
        rule = (
            f"it joins processes on one GPU, and placement={placement} gives each role"
            " its own"
        )
        fix = "Use auto or host_broadcast, or placement=colocated."
        yield Problem(key, "cuda_ipc", rule, fix)
        return

    # What auto becomes is at least 1.
    width = config.rollout.ranks_per_replica
    if width * (1 if replicas == "auto" else replicas) > actor_ranks:
        rule = (
            "every rank of a rollout engine must share the GPU of a rank of the actor,"
            f" and those of rollout.num_replicas={replicas} are more than"
            f" actor.num_ranks={actor_ranks}"
        )
        fix = "Use auto, or as many ranks of the actor."
        yield Problem(key, "cuda_ipc", rule, fix)


def adapters_can_be_sent_alone(
    config: RolloutTaskConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if an adapter cannot be sent in the way that the user chose."""
    key = f"{_SYNC}.adapter"
    choice = config.rollout.sync.adapter
    lora = config.actor.lora

    if choice == "auto":
        return

    if lora.rank == 0:
        # Without an adapter, auto resolves to merged, so a configuration that another
        # run has saved may hold that value.
        if choice == "alone" or overridden.under(key):
            rule = "with actor.lora.rank=0 there is no adapter"
            fix = "Leave it out, or set actor.lora.rank."
            yield Problem(key, choice, rule, fix)
        return

    # Merged weights go with every setting.
    if choice == "merged":
        return

    if config.rollout.sleep == "weights":
        rule = "rollout.sleep=weights frees the model that the adapter is for"
        fix = "Use merged, or rollout.sleep=kv_cache."
        yield Problem(key, choice, rule, fix)
    elif lora.rank > VLLM_LORA_RANKS[-1]:
        rule = (
            f"vLLM takes adapters up to rank {VLLM_LORA_RANKS[-1]}, and actor.lora.rank"
            f" is {lora.rank}"
        )
        fix = "Use merged, or a smaller rank."
        yield Problem(key, choice, rule, fix)
    elif HEAD in lora.targets:
        rule = (
            "vLLM has no log-probs of prompts, which verify a sync, with an adapter on"
            f" {HEAD}"
        )
        fix = f"Use merged, or take {HEAD} from actor.lora.targets."
        yield Problem(key, choice, rule, fix)
    elif config.rollout.quantization is not None:
        quantization = config.rollout.quantization
        rule = f"no test has an adapter on rollout.quantization={quantization}"
        yield Problem(key, choice, rule, "Use merged, or rollout.quantization=null.")
