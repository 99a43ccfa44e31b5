"""The roles that run a model on a training backend, and how they learn.

Invariant: settings of a model that does not learn are refused, and so are backends that
do not fit a role's ranks. No backend is named: which settings go together is what
`verl_ray/backends` declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Protocol

from pydantic import Field

from verl_ray.backends import BACKENDS, Backend
from verl_ray.config.optimizers import Optimizer, OptimizerConfig
from verl_ray.config.paths import HubPath
from verl_ray.errors import Problem
from verl_ray.settings.hub_ids import COMMIT, is_hub_id, snapshot_of
from verl_ray.settings.section import (
    NonNegativeFloat,
    OverriddenKeys,
    Positive,
    Section,
    ZeroIsOff,
)
from verl_ray.suggest import either


class ModelConfig(Section):
    """The model of a role."""

    path: HubPath
    """Directory of a Hugging Face model (config.json, safetensors, tokenizer), or the
    id of one on the hub, such as Qwen/Qwen3-0.6B."""
    revision: str | None
    """Commit, tag or branch of a model on the hub; null = that of model.path where the
    path is the same, else the newest. The run records the commit."""
    trust_remote_code: bool
    """Whether the code in the model's directory (auto_map in its config.json) may run,
    in every role with this directory."""

    def is_same(self, other: ModelConfig) -> bool:
        """Return whether this is the same model, whoever trusts its code."""
        return (self.path, self.revision) == (other.path, other.revision)

    @property
    def folder(self) -> str:
        """Directory of the model's files, which are in the cache if it is on the hub.

        The id itself until its commit is known.
        """
        commit = self.revision or ""
        if not is_hub_id(self.path) or COMMIT.fullmatch(commit) is None:
            return self.path
        return str(snapshot_of(self.path, commit, "model").folder)


class LoraConfig(Section):
    """A low-rank adapter (arXiv:2106.09685).

    The adapter learns while the model's own weights are frozen.
    """

    rank: ZeroIsOff
    """Inner size of the adapter's matrices; 0 or null = no adapter: all parameters
    learn."""
    alpha: Positive
    """Scale of the adapter, whose output is multiplied by alpha / rank."""
    targets: Annotated[
        tuple[str, ...], Field(min_length=1, examples=["[q_proj,v_proj]"])
    ]
    """Names of the linear layers that get an adapter."""


class ModelRole(Section):
    """A role that runs a model on a training backend."""

    model: ModelConfig
    num_ranks: Positive
    """Processes that divide the rows and, on some backends, the model between them;
    each has a GPU where there are any."""
    backend: Backend

    @property
    def peers(self) -> int:
        """Number of ranks that get the same rows and compute them together."""
        return self.backend.peers

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapter that learns in place of the model's own weights.

        None if these learn themselves, or nothing does.
        """
        return None

    @property
    def scores_rollouts(self) -> bool:
        """Whether the model scores rollouts, in tokens of its own tokenizer."""
        return False

    def rows_per_update(self, rows: int) -> int | None:
        """Return the number of rows of one optimizer step.

        None if the model does not learn.

        Args:
            rows: the number of rows of a training step.
        """
        return None

    def updates_per_step(self, rows: int) -> int:
        """Return the number of optimizer steps on the `rows` of a training step."""
        return 0


class SupervisedRole(ModelRole):
    """The role whose model a supervised run trains."""

    optimizer: Optimizer
    lora: LoraConfig
    expert_balance: NonNegativeFloat | None
    """Weight of the loss that spreads tokens evenly over experts; null = the value of
    router_aux_loss_coef in the model's config.json, or a model without experts. It is
    refused where routers return no choice."""
    expert_bias_update: NonNegativeFloat
    """Step by which the biases of routers follow the load of their experts after each
    update of the weights; 0 = they stay."""

    @property
    def adapter(self) -> LoraConfig | None:
        return self.lora if self.lora.rank else None

    def rows_per_update(self, rows: int) -> int:
        return rows

    def updates_per_step(self, rows: int) -> int:
        return 1


class TrainedRole(SupervisedRole):
    """A role that learns from rollouts: the actor or the critic."""

    mini_batch_size: Positive | None
    """Rollouts per optimizer step, over all ranks; null = all rollouts of the step."""
    epochs: Positive
    """Passes over the rollouts of one step."""

    def rows_per_update(self, rows: int) -> int:
        return self.mini_batch_size or rows

    def updates_per_step(self, rows: int) -> int:
        # Divide and round up: the last mini-batch may be smaller.
        updates_per_epoch = -(-rows // self.rows_per_update(rows))
        return self.epochs * updates_per_epoch


class ReferenceRole(ModelRole):
    """The frozen policy that the divergence is measured from."""


# -------------------------------------------------------------------------------- rules


def revisions_are_of_the_hub(
    models: Mapping[str, ModelConfig], overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each revision of a model that is a folder."""
    for key, model in models.items():
        if model.revision is not None and not is_hub_id(model.path):
            keys = overridden.under(f"{key}.revision")
            reason = f"{key}.path is a folder, and only models of the hub have commits"
            yield from overridden.ignored(keys, reason)


def ranks_fit_the_backend(roles: Mapping[str, ModelRole]) -> Iterator[Problem]:
    """Yield the problems that a backend has with the number of a role's ranks."""
    for name, role in roles.items():
        yield from role.backend.rank_problems(name, role.num_ranks)


def frozen_models_do_not_learn(
    roles: Mapping[str, ModelRole], overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of training that a frozen model was given."""
    for name, role in roles.items():
        if isinstance(role, SupervisedRole):
            continue

        # A frozen model runs forward only.
        activations = role.backend.activation_settings
        gradients = role.backend.gradient_settings
        reasons = dict.fromkeys(activations, "keeps no activations")
        reasons |= dict.fromkeys(gradients, "has no gradients")

        for field, consequence in reasons.items():
            keys = overridden.under(f"{name}.backend.{field}")
            reason = f"this model does not learn, so it {consequence}"
            yield from overridden.ignored(keys, reason)


def adapter_settings_are_used(
    learners: Mapping[str, SupervisedRole], overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of an adapter that a role does not have."""
    for name, role in learners.items():
        if role.adapter is not None:
            continue

        keys = overridden.under(f"{name}.lora.alpha")
        keys += overridden.under(f"{name}.lora.targets")
        reason = f"{name}.lora.rank=0 makes no adapter"
        fix = f"Set {name}.lora.rank, 16 for example; or leave it out."
        yield from overridden.ignored(keys, reason, fix)


class Compared(Protocol):
    """A run whose actor may be compared with a reference."""

    @property
    def actor(self) -> SupervisedRole:
        """The policy that learns."""

    @property
    def has_reference(self) -> bool:
        """Whether a reference role is created."""

    @property
    def reference_is_base(self) -> bool:
        """Whether the actor without its adapter is the reference."""


def reference_settings_are_used(
    config: Compared, without: str, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of a reference that the run does not have.

    Args:
        without: Which setting makes no reference, in words.
    """
    if config.has_reference:
        return

    keys = overridden.under("reference")
    reason = without
    if config.reference_is_base:
        rank = config.actor.lora.rank
        reason = (
            f"with actor.lora.rank={rank} the reference is the actor without its"
            " adapter"
        )
        # The path equals the actor's, or there would be a reference of its own.
        keys = [key for key in keys if key != "reference.model.path"]
    yield from overridden.ignored(keys, reason)


def adapters_have_a_backend(
    learners: Mapping[str, SupervisedRole],
) -> Iterator[Problem]:
    """Yield a problem for each role with an adapter on a backend without adapters."""
    for name, role in learners.items():
        if role.adapter is None or role.backend.has_adapters:
            continue

        rule = (
            f"{name}.backend={role.backend.kind} trains all parameters, and has no"
            " adapters"
        )
        alternatives = [
            f"backend@{name}.backend={kind}"
            for kind, backend in BACKENDS.items()
            if backend.has_adapters
        ]
        fix = f"Set it to 0, or choose {either(alternatives)}."
        yield Problem(f"{name}.lora.rank", role.lora.rank, rule, fix)


def optimizers_have_a_backend(
    optimizers: Mapping[str, OptimizerConfig], learners: Mapping[str, SupervisedRole]
) -> Iterator[Problem]:
    """Yield a problem for each optimizer that its role's backend does not have."""
    for section, optimizer in optimizers.items():
        # A warm start has the backend of the actor.
        name = section.partition(".")[0].replace("prepare", "actor")
        if name not in learners or optimizer.kind in learners[name].backend.optimizers:
            continue

        backend = learners[name].backend
        choices = [f"optimizer@{section}={kind}" for kind in backend.optimizers]
        choices += [
            f"backend@{name}.backend={kind}"
            for kind, settings in BACKENDS.items()
            if optimizer.kind in settings.optimizers
        ]
        yield Problem(
            f"{section}.kind",
            optimizer.kind,
            f"{name}.backend={backend.kind} does not have this optimizer",
            f"Choose {either(choices)}.",
        )


def shared_processes_have_equal_ranks(
    roles: Mapping[str, ModelRole],
) -> Iterator[Problem]:
    """Yield a problem for each colocated role with another number of ranks.

    Colocated roles on one kind of backend share a process per rank.
    """
    # The first role on each kind of backend sets the number of ranks.
    first_roles: dict[str, str] = {}

    for name, role in roles.items():
        first = first_roles.setdefault(role.backend.kind, name)
        expected = roles[first].num_ranks
        if role.num_ranks == expected:
            continue

        rule = (
            "colocated roles on one backend share a process per rank, and"
            f" {first}.num_ranks={expected}"
        )
        fix = (
            f"Use {name}.num_ranks={expected}, {first}.num_ranks={role.num_ranks},"
            " placement=separate, or another backend for one of them"
            f" (backend@{name}.backend=...)."
        )
        yield Problem(f"{name}.num_ranks", role.num_ranks, rule, fix)
