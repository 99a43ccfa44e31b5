"""The configuration of a run of any task: the shared sections, and the task's answers.

Invariant: YAML under `configs/` holds every value, so there are no defaults here. A
field that is absent there is an error, and so is a key that is absent here.

What sets one task apart is in its own type (`tasks`, or the file of its trainer). That
type overrides the properties below, so other code never has to ask which task it has.
The sections are in modules of this package, by noun (`run`, `data`, `roles`, ...). A
section has its rules beside it; types, ranges and the meaning of each setting stand
with its field. Rules over several sections are in the file of the task that has them;
every task has those that are here. Every rule runs, and every problem is reported at
once with its key, its value, the rule and what would be right. A setting that another
one makes meaningless is refused, never ignored.

The batch algebra says how the rows of a step become mini-batches and micro-batches.
Sizes are global unless the name ends in `_per_rank`, and one unit, the row, runs
through all of them.

Deliberately not here: reading YAML (`load`), and what only the machine knows, such as
files and memory (`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from verl_ray.config.data import (
    DataFilesConfig,
    RowFormat,
    columns_are_of_fields,
    template_settings_have_a_use,
)
from verl_ray.config.optimizers import OptimizerConfig, schedule_settings_are_used
from verl_ray.config.preparation import PrepareConfig
from verl_ray.config.reward import (
    JudgeReward,
    SingleReward,
    graders_finish_within_the_stall_limit,
    judge_settings_work,
    requests_end_before_their_batch,
    rewards_have_a_function,
)
from verl_ray.config.roles import (
    ModelConfig,
    ModelRole,
    SupervisedRole,
    adapter_settings_are_used,
    adapters_have_a_backend,
    frozen_models_do_not_learn,
    optimizers_have_a_backend,
    ranks_fit_the_backend,
    revisions_are_of_the_hub,
    shared_processes_have_equal_ranks,
)
from verl_ray.config.rollout import ServedModel
from verl_ray.config.run import (
    RayConfig,
    RunConfig,
    TrackingConfig,
    best_is_measured,
    checkpoints_are_kept,
    evaluation_is_used,
    resume_is_a_choice_or_a_path,
    run_has_a_name,
    run_has_one_length,
    wandb_settings_are_used,
)
from verl_ray.errors import Problem
from verl_ray.settings.section import Auto, OverriddenKeys, Section


class Config(Section):
    """One run of any task: the shared sections, and what other code needs to know."""

    task: str
    """Name of the task, which leads to its file (`controllers/tasks.py`)."""
    run: RunConfig
    ray: RayConfig
    model: ModelConfig
    data: DataFilesConfig
    tracking: TrackingConfig

    main_metrics: ClassVar[str] = "val-core/*"
    """Names of `main_metric` under any values of the settings; * stands for anything.
    """

    # --------------------------------------------------------------------------- models

    @property
    @abstractmethod
    def model_roles(self) -> dict[str, ModelRole]:
        """The roles, by name, that run a model on a training backend.

        Only roles that the run creates are listed. The evaluated role comes first.
        """

    @property
    def learners(self) -> dict[str, SupervisedRole]:
        """The model roles that learn, by name."""
        return {
            name: role
            for name, role in self.model_roles.items()
            if isinstance(role, SupervisedRole)
        }

    @property
    def evaluated_role(self) -> str:
        """Name of the role whose model an evaluation measures."""
        return next(iter(self.model_roles))

    def head_of(self, role: str) -> Literal["policy", "value"]:
        """Return the kind of head on a role's model.

        A policy head gives logits over the vocabulary, a value head a single number.
        """
        return "policy"

    def replays_routing(self, role: str) -> bool:
        """Return whether a role's routers choose what the sampler's have chosen."""
        return False

    def average_decay(self, role: str) -> float | None:
        """Return the decay of the average of a role's weights; None for none."""
        return None

    @property
    def optimizers(self) -> dict[str, OptimizerConfig]:
        """Every optimizer that has settings, by the key of its section."""
        return {
            f"{name}.optimizer": role.optimizer for name, role in self.learners.items()
        }

    @property
    def shares_processes(self) -> bool:
        """Whether roles on one backend share a process per rank.

        If they do, rollout engines also share the devices of these processes.
        """
        return True

    @property
    def overlaps(self) -> bool:
        """Whether rollouts are generated while the trainers learn."""
        return False

    def learning_steps(self, role: str) -> int:
        """Return the number of training steps in which a role learns."""
        return self.run.steps

    @property
    def main_metric(self) -> str:
        """Name of the held-out metric that the best step is chosen by.

        * stands for anything; metrics with several matching names are averaged.
        """
        return self.main_metrics

    # ----------------------------------------------------------------------------- rows

    @property
    @abstractmethod
    def examples_per_step(self) -> int:
        """Number of examples by which one step moves the data cursor."""

    @property
    @abstractmethod
    def examples_key(self) -> str:
        """The key that sets `examples_per_step`."""

    @property
    def rows_per_step(self) -> int:
        """Number of rows that a step learns from."""
        return self.examples_per_step

    @property
    def step_in_words(self) -> str:
        """Size of a step in words, such as "32 prompts x 8 = 256 rows"."""
        return f"{self.rows_per_step} rows"

    @property
    def rows_per_unit(self) -> int:
        """Number of rows that a loss compares, which share a micro-batch."""
        return 1

    @property
    def row_format(self) -> RowFormat | None:
        """Format of the data files; None for a task that has a format of its own."""
        return None

    @property
    @abstractmethod
    def longest_row(self) -> tuple[int, str]:
        """Length of the longest possible row in tokens, and the keys that set it."""

    @property
    def longest_own_row(self) -> int:
        """Length of the longest row that a model learns from, in tokens."""
        return self.longest_row[0]

    @property
    def length_key(self) -> str:
        """The key to lower where rows are too long."""
        return self.longest_row[1]

    @property
    def longest_response(self) -> int:
        """The most tokens of a row whose log-probs or values are read."""
        return self.longest_row[0]

    # ------------------------------------------------------------------- optional parts

    @property
    def graders(self) -> dict[str, SingleReward]:
        """The sources of scores by role name, which is also the key of the section."""
        return {}

    def active_graders(self, *, learns: bool) -> dict[str, SingleReward]:
        """Return the graders that have processes, by role name.

        Args:
            learns: False for a single evaluation, which needs only the grader of
                held-out problems.
        """
        return self.graders

    def active_models(self, *, learns: bool) -> dict[str, ModelRole]:
        """Return the model roles that have processes, by name.

        Args:
            learns: False for a single evaluation, which needs only the evaluated role
                and a model that grades.
        """
        graders = self.active_graders(learns=learns)
        return {
            name: role
            for name, role in self.model_roles.items()
            if learns or name == self.evaluated_role or name in graders
        }

    def active_engines(self, *, learns: bool) -> dict[str, ServedModel]:
        """Return the models that vLLM serves in a job, by role name.

        Args:
            learns: False for a single evaluation, in which some judges are idle.
        """
        graders = self.active_graders(learns=learns)
        idle = self.judges.keys() - graders.keys()
        return {name: model for name, model in self.engines.items() if name not in idle}

    @property
    def judges(self) -> dict[str, JudgeReward]:
        """The graders that are language models, by role name."""
        return {
            name: grader
            for name, grader in self.graders.items()
            if isinstance(grader, JudgeReward)
        }

    @property
    def engines(self) -> dict[str, ServedModel]:
        """The models that vLLM serves, by role name."""
        return {
            name: ServedModel(
                config=judge.engine,
                section=f"{name}.engine",
                key=f"{name}.model.path",
                path=judge.model.folder,
                trusts_code=self.trusts_code(judge.model.folder),
                max_prompt_tokens=judge.max_prompt_tokens,
                max_response_tokens=judge.max_response_tokens,
            )
            for name, judge in self.judges.items()
        }

    def trusts_code(self, folder: str) -> bool:
        """Return whether the code in a model's directory may run."""
        return any(
            model.trust_remote_code
            for model in _models(self).values()
            if model.folder == folder
        )

    @property
    def preparation(self) -> PrepareConfig | None:
        """Settings of the inputs that the run makes itself; None if it makes none."""
        return None

    @property
    def num_top(self) -> int:
        """Number of a teacher's tokens that the actor compares in each place."""
        return 0

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the loss is corrected for the mismatch of sampler and trainer."""
        return False

    @property
    def responses_per_evaluation(self) -> int | None:
        """Number of responses that an evaluation generates.

        None if it generates none, or if only the held-out file tells how many.
        """
        return None

    # ---------------------------------------------------------------------------- rules

    def problems(self, overridden: OverriddenKeys) -> Iterator[Problem]:
        """Yield the problem of every rule that the configuration breaks.

        A task adds its rules to these, which are those of every task.
        """
        run = self.run
        roles = self.model_roles
        learners = self.learners
        graders = self.active_graders(learns=True)

        yield from run_has_a_name(run)
        yield from run_has_one_length(run)
        yield from resume_is_a_choice_or_a_path(run)
        if self.row_format is not None:
            yield from columns_are_of_fields(self.data, self.row_format.fields)
        makes_inputs = self.preparation is not None
        yield from template_settings_have_a_use(self.data, makes_inputs=makes_inputs)
        yield from evaluation_has_data(self, overridden)
        yield from evaluation_is_used(run, overridden)
        yield from best_is_measured(run, overridden)
        yield from checkpoints_are_kept(run, overridden)
        yield from wandb_settings_are_used(self.tracking, overridden)
        yield from schedule_settings_are_used(self.optimizers, overridden)
        yield from micro_batch_holds_the_longest_row(self)
        yield from revisions_are_of_the_hub(_models(self), overridden)
        yield from ranks_fit_the_backend(roles)
        yield from frozen_models_do_not_learn(roles, overridden)
        yield from adapter_settings_are_used(learners, overridden)
        yield from adapters_have_a_backend(learners)
        yield from optimizers_have_a_backend(self.optimizers, learners)
        if self.shares_processes:
            yield from shared_processes_have_equal_ranks(roles)
        yield from rewards_have_a_function(graders)
        yield from graders_finish_within_the_stall_limit(graders, run.stall_s)
        yield from judge_settings_work(self.judges)
        yield from requests_end_before_their_batch(self.graders)


# -------------------------------------------------------------------------------- rules


def rule_violations(
    config: Config,
    overridden: Collection[str] = (),
    *,
    evaluates: bool = False,
    before: Mapping[str, object] | None = None,
) -> list[Problem]:
    """Return the problems of every rule that `config` breaks.

    Args:
        config: the configuration of any task.
        overridden: the dotted keys that the user set on the command line.
        evaluates: whether the command is a single evaluation instead of training.
        before: the values that these keys had before, where they are known.
    """
    # No rule stops the others, so that all problems are reported at once.
    keys = OverriddenKeys(overridden, evaluates, config, before or {})
    return list(config.problems(keys))


def _models(config: Config) -> dict[str, ModelConfig]:
    """Return every model of a run, by the key of its section."""
    models = {"model": config.model}
    for name, role in config.model_roles.items():
        models[f"{name}.model"] = role.model
    for name, judge in config.judges.items():
        models[f"{name}.model"] = judge.model

    return models


def evaluation_has_data(
    config: Config, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if the run evaluates and has no held-out problems."""
    key = "data.validation_path"
    evaluate_every = config.run.evaluate_every
    if config.data.validation_path is not None:
        return

    # The command `evaluate` needs data even if the run itself never evaluates.
    if overridden.evaluates:
        rule = "an evaluation needs held-out problems"
        yield Problem(key, None, rule, f"Set {key} to a file.")
    elif evaluate_every:
        rule = f"run.evaluate_every={evaluate_every} needs held-out problems"
        fix = f"Set {key} to a file, or run.evaluate_every=0."
        yield Problem(key, None, rule, fix)


def micro_batch_holds_the_longest_row(config: Config) -> Iterator[Problem]:
    """Yield a problem for each role whose micro-batch is shorter than a row may be."""
    longest, source = config.longest_row
    rows_per_unit = config.rows_per_unit
    if rows_per_unit > 1:
        longest = rows_per_unit * longest
        source = f"{rows_per_unit} x {source}: rows that are compared stay together"

    for name, role in config.model_roles.items():
        # A model that scores counts the tokens of its own tokenizer; rows that are too
        # long get no score, and are counted.
        if role.scores_rollouts:
            continue

        backend = role.backend
        tokens_per_rank = backend.micro_batch_tokens_per_rank
        slices = backend.token_slices
        # What auto becomes holds the longest row.
        if tokens_per_rank == "auto" or tokens_per_rank * slices >= longest:
            continue

        shared = f", which {slices} ranks share" if slices > 1 else ""
        rule = (
            f"a row may have {longest} tokens ({source}) and must fit into one"
            f" micro-batch{shared}"
        )
        least = -(-longest // slices)
        fix = f"The nearest value that works is {least}; or shorten the rows."
        key = f"{name}.backend.micro_batch_tokens_per_rank"
        yield Problem(key, tokens_per_rank, rule, fix)


# -------------------------------------------------------------------- the batch algebra


@dataclass(frozen=True)
class RoleBatch:
    """The sizes of one role's batches within one step."""

    role: str
    ranks: int
    """Number of processes."""
    dp_size: int
    """Number of data-parallel ranks, each of which has rows of its own."""
    rows_per_rank: int
    """Rows of one step on the rank that has the most."""
    mini_batch_size: int | None
    """Rows per optimizer step over all ranks; None if the role does not learn."""
    mini_batch_size_per_rank: int | None
    updates_per_step: int
    """Optimizer steps per training step."""
    micro_batch_tokens_per_rank: int | Auto
    """The most tokens of one micro-batch."""


@dataclass(frozen=True)
class BatchAlgebra:
    """The sizes of one training step."""

    rows: int
    """Number of rows that the step learns from."""
    max_row_tokens: int
    """Length of the longest row that can occur, in tokens."""
    roles: tuple[RoleBatch, ...]


def batch_algebra(config: Config) -> BatchAlgebra:
    """Return the sizes that follow from `config`.

    Divisions round up, because the rank with the most rows counts.
    """
    rows = config.rows_per_step
    max_row_tokens, _ = config.longest_row
    roles = tuple(
        _role_batch(name, role, rows) for name, role in config.model_roles.items()
    )
    return BatchAlgebra(rows, max_row_tokens, roles)


def row_tokens_per_rank(config: Config, role: str) -> int:
    """Return the tokens on a rank of what must be computed at once, at its longest.

    It is a row, or the rows that a loss compares.
    """
    longest, _ = config.longest_row
    slices = config.model_roles[role].backend.token_slices
    return -(-config.rows_per_unit * longest // slices)


def _role_batch(name: str, role: ModelRole, rows: int) -> RoleBatch:
    # Ranks that compute the same rows together count once.
    dp_size = max(1, role.num_ranks // role.peers)

    mini_batch_size = role.rows_per_update(rows)
    mini_batch_size_per_rank = None
    if mini_batch_size is not None:
        mini_batch_size_per_rank = -(-mini_batch_size // dp_size)

    return RoleBatch(
        role=name,
        ranks=role.num_ranks,
        dp_size=dp_size,
        rows_per_rank=-(-rows // dp_size),
        mini_batch_size=mini_batch_size,
        mini_batch_size_per_rank=mini_batch_size_per_rank,
        updates_per_step=role.updates_per_step(rows),
        micro_batch_tokens_per_rank=role.backend.micro_batch_tokens_per_rank,
    )
