"""The command `check`, and the check that every other command begins with.

Invariant: neither torch nor ray nor vllm is imported, and user's code only runs in a
process that is killed at its deadline. What needs no data takes a second.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from controllers.commands.check_data import print_data
from controllers.commands.check_pools import PoolTimes, pool_lines
from controllers.compose.composition import examine
from controllers.compose.listing import groups
from controllers.run.finished import finished_step
from controllers.run.resumption import Resumption
from verl_ray.agents.specs import KEY
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.catalogue import CHOICES
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.advice import DEVICE
from verl_ray.config.algorithm import ADDITIONS, AlgorithmConfig
from verl_ray.config.distill import DistillConfig
from verl_ray.config.load import parse, to_tree
from verl_ray.config.preference import PreferenceLossConfig
from verl_ray.config.schema import Config, rule_violations
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import CheckpointError, ConfigError, Problem
from verl_ray.hub.data_sets import pinned_data
from verl_ray.hub.models import fetch_models, pinned_in_words, pinned_models
from verl_ray.preflight.component_trial import try_components
from verl_ray.preflight.data_files import DataFile, DataFindings, examine_data
from verl_ray.preflight.environment_trial import EnvironmentTrials, try_environments
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.findings import Findings, preflight
from verl_ray.preflight.function_trial import sections_of_functions, try_functions
from verl_ray.preflight.machine import Machine, machine_in_words, machine_of
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.model_directories import model_problems
from verl_ray.preflight.model_files import has_tokenizer, model_size
from verl_ray.preflight.resolve import (
    resolution_of_steps,
    resolutions,
    resolve,
    with_total_steps,
)
from verl_ray.preflight.reward_trial import TrialFindings, try_rewards
from verl_ray.preflight.tables import (
    batch_table,
    memory_table,
    print_resolutions,
    print_tables,
    role_table,
    source_lines,
)
from verl_ray.preflight.teacher_trial import records_of_servers, try_teacher_prompt
from verl_ray.preflight.trials import Trials
from verl_ray.settings.function_specs import in_words

GIB = 2**30


@dataclass(frozen=True)
class TrialResults:
    """Findings about the data, and about users' code on the first records.

    Attributes:
        data: The data files; empty if they were not read.
        rewards: The trials of the reward functions; empty without data.
        components: The trials of the components of a mixed reward.
        environments: The trials of the environments of episodes.
        teacher: The servers of data sources, and the trial of the function that writes
            a teacher's prompts.
        functions: The trials of the user's functions of `algorithm` or `preference`.
    """

    data: DataFindings = field(default_factory=DataFindings)
    rewards: TrialFindings = field(default_factory=TrialFindings)
    components: Trials = field(default_factory=Trials)
    environments: EnvironmentTrials = field(default_factory=EnvironmentTrials)
    teacher: Trials = field(default_factory=Trials)
    functions: Trials = field(default_factory=Trials)

    @property
    def problems(self) -> list[Problem]:
        """The problems of all of them."""
        return [*self.data.problems, *(p for each in self._code for p in each.problems)]

    @property
    def lines_of_data(self) -> list[str]:
        """Results of users' code on the first records, in words."""
        trials = (self.components, self.environments, self.teacher)
        return [line for each in trials for line in each.lines]

    @property
    def warnings(self) -> list[str]:
        """The warnings of all of them."""
        return [*self.data.warnings, *(w for each in self._code for w in each.warnings)]

    @property
    def _code(self) -> list[Trials]:
        on_records = [self.rewards, self.components, self.environments, self.teacher]
        return [*on_records, self.functions]


@dataclass(frozen=True)
class Checked:
    """A configuration without problems, and what was seen on the way.

    Attributes:
        config: The configuration as the user gave it, which may hold `auto`.
        results: What was found out about data and users' code.
        warnings: What does not stop the run.
    """

    config: Config
    results: TrialResults
    warnings: list[str]


class SeenData:
    """The findings about data and functions of the configurations that were checked.

    Runs of a sweep often have the same, which are read and tried once.
    """

    def __init__(self) -> None:
        self._findings: dict[str, TrialResults] = {}
        self._functions: dict[str, Trials] = {}

    def examine(
        self, config: Config, problems: Sequence[Problem], *, evaluates: bool
    ) -> TrialResults:
        """Read the data of a configuration without `auto`, and try users' code.

        Args:
            config: the configuration.
            problems: those that it has. One of the algorithm is no function's fault.
            evaluates: whether the command is `evaluate`, which uses no algorithm.
        """
        settings_of_data = _settings_of_data(config)
        if settings_of_data not in self._findings:
            data = examine_data(config, evaluates=evaluates)
            results = TrialResults(data)
            # Records that cannot be read cannot be scored.
            if not data.problems:
                rewards = try_rewards(config, data.files, evaluates=evaluates)
                results = replace(results, rewards=rewards)
                if not rewards.problems and not evaluates:
                    components = try_components(config, data.files)
                    teacher = records_of_servers(config, data.files)
                    teacher += try_teacher_prompt(config, data.files)
                    results = replace(results, components=components, teacher=teacher)
                if isinstance(config, RLConfig) and config.episodes is not None:
                    environments = try_environments(
                        config, data.files, trains=not evaluates
                    )
                    results = replace(results, environments=environments)
            self._findings[settings_of_data] = results

        functions = Trials()
        sections = {} if evaluates else sections_of_functions(config)
        for name, values in sections.items():
            settings = values.model_dump_json()
            is_wrong = any(each.key.startswith(name) for each in problems)
            if not is_wrong and settings not in self._functions:
                self._functions[settings] = try_functions(name, values)
            functions += self._functions.get(settings, Trials())
        return replace(self._findings[settings_of_data], functions=functions)


def _settings_of_data(config: Config) -> str:
    """Return all settings but those that neither data nor rewards depend on."""
    tree = to_tree(config)
    for section in ("run", "ray", "tracking", "algorithm", "placement"):
        tree.pop(section, None)
    # Held-out data are only read for an evaluation.
    tree["evaluates"] = config.run.evaluate_every > 0

    for name in ("actor", "critic", "reference"):
        role = tree.get(name)
        if isinstance(role, dict):
            tree[name] = role["model"]
    # Each run has a folder of its own, which is empty before it begins.
    return json.dumps(tree).replace(config.run.dir, "")


def checked_config(
    config_name: str,
    overrides: Sequence[str],
    config_dir: str | None,
    *,
    evaluates: bool = False,
    trains: bool = False,
    reads_data: bool = True,
    seen: SeenData | None = None,
    described: Machine | None = None,
    assumed: Sequence[str] = (),
) -> Checked:
    """Check a configuration, the machine, the data and the user's functions.

    Args:
        config_name: the root config.
        overrides: what the user typed, in Hydra's grammar.
        config_dir: a folder of the user's own, or None.
        evaluates: whether the command measures a model.
        trains: whether it is `train`; a finished run reads nothing any more.
        reads_data: whether to read data files and to try functions.
        seen: the findings of the other runs of a sweep.
        described: the machine to check for, in place of the one that would run it.
        assumed: overrides of the command itself.

    Raises:
        ConfigError: the problems of all of them together.
    """
    composition = examine(
        config_name, overrides, config_dir, evaluates=evaluates, assumed=assumed
    )
    config, problems = composition.config, list(composition.problems)
    findings = Findings()
    # The machine is checked in any case, so that all problems come together.
    if config is not None:
        machine = described or machine_of(config)
        config, unavailable = _pinned(config, machine, reads_data=reads_data)
        kind = {"evaluates": evaluates, "reads_data": reads_data}
        findings = preflight(config, machine, **kind)
        problems = _together(_together(problems, unavailable), findings.problems)

    results = TrialResults()
    is_finished = config is not None and trains and finished_step(config) is not None
    reads_data = reads_data and not is_finished
    if config is not None and reads_data and not _hide_data(problems):
        planned = resolve(config, facts_here(config, machine, learns=not evaluates))
        examine_once = (seen or SeenData()).examine
        results = examine_once(planned, problems, evaluates=evaluates)
        problems += results.problems

        # Some rules compare the number of steps, which follows from the data.
        counted = _with_counted_steps(config, results.data.files)
        if counted is not config:
            problems += rule_violations(counted, evaluates=evaluates)

    if config is None or problems:
        raise ConfigError([_with_devices(problem) for problem in problems])
    if (trains or evaluates) and not is_finished:
        _fetch_models(config)
    return Checked(config, results, findings.warnings + results.warnings)


def _with_devices(problem: Problem) -> Problem:
    """Add to the answer about a key that would choose a device which ones there are."""
    if problem.fix != DEVICE:
        return problem
    num_gpus = Machine.here().gpus
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus or 'no'} GPUs"
    return replace(problem, fix=f"{DEVICE} This machine has {gpus}.")


def _pinned(
    config: Config, machine: Machine | None, *, reads_data: bool
) -> tuple[Config, list[Problem]]:
    """Return the configuration with the commit of all that it takes from the hub.

    Args:
        config: the configuration.
        machine: the machine that is checked. One that was described has folders of its
            own.
        reads_data: whether the data are read, which have to be downloaded for it.
    """
    starts_here = machine is None or not machine.is_described
    recorded = recorded_tree(config) if starts_here else {}
    config, problems = pinned_models(config, recorded, needs_weights=starts_here)
    for line in pinned_in_words(config):
        print(line, flush=True)
    if not reads_data:
        return config, problems

    tree = to_tree(config)
    section = config.data.model_dump(mode="json")
    section, unavailable = pinned_data(section, recorded.get("data", {}))
    config = parse({**tree, "data": section}, type(config))
    return config, [*problems, *unavailable]


def _fetch_models(config: Config) -> None:
    """Download the weights of models of the hub, and check them.

    They come last, since a mistake that is known without them costs seconds.

    Raises:
        ConfigError: They are unavailable, or not what a run needs.
    """
    if fetch_models(config):
        machine = machine_of(config)
        known = config
        if machine is not None:
            known = resolve(config, facts_here(config, machine))
        problems = list(model_problems(known, machine))
        if problems:
            raise ConfigError(problems)


def _hide_data(problems: Sequence[Problem]) -> bool:
    """Return whether problems concern what is needed to read and score the data."""
    hidden = ("data.", "model.", "reward.", "evaluation.", KEY, "--config-name")
    return any(
        problem.key.startswith(hidden) or ".model." in problem.key
        for problem in problems
    )


def _together(
    config_problems: Sequence[Problem], machine_problems: Sequence[Problem]
) -> list[Problem]:
    """Return both lists of problems with one problem per key.

    Where both have the same key and value, preflight's problem stays, since it knows
    the models as well. Where only the key is the same, the value was bad and replaced
    before preflight saw it, so the configuration's problem stays.
    """
    seen_by_preflight = [(problem.key, problem.value) for problem in machine_problems]
    problems = [
        problem
        for problem in config_problems
        if (problem.key, problem.value) not in seen_by_preflight
    ]

    bad_keys = {problem.key for problem in problems}
    problems += [problem for problem in machine_problems if problem.key not in bad_keys]
    return problems


def check(
    config_name: str,
    overrides: Sequence[str],
    config_dir: str | None,
    *,
    reads_data: bool = True,
    described: Machine | None = None,
    rates: PoolTimes | None = None,
) -> int:
    """Print the sizes of a step, the roles, what they need and the data; return 0.

    The arguments are those of `checked_config`, and the seconds in which trainers and
    rollout engines work, if they are known.

    Raises:
        ConfigError: all problems.
    """
    checked = checked_config(
        config_name, overrides, config_dir, reads_data=reads_data, described=described
    )
    config = _with_counted_steps(checked.config, checked.results.data.files)
    # A run that would be refused because of its folder is refused here, too.
    writing = "" if described is not None else _writing(config)
    machine = described or machine_of(config)
    facts = facts_here(config, machine)
    planned = resolve(config, facts)
    planned_memory = memory_plan(planned, on_gpus=facts.gpus > 0)

    # Another cluster may resolve the settings otherwise than this machine would.
    known = config if machine is None else planned
    print_tables(batch_table(known), role_table(known), source_lines(config))
    width = shutil.get_terminal_size().columns
    for line in algorithm_lines(known):
        print(textwrap.fill(line, width, subsequent_indent="    "))
    for line in checked.results.functions.lines:
        print(line)
    if machine is not None:
        resolved = resolutions(config, facts)
        if described is not None:
            resolved = [each for each in resolved if each.key not in _unknown(config)]
        print_resolutions(resolved, "there" if machine.is_described else "here")
    _print_length(checked.config, checked.results.data.files)

    if machine is not None:
        print_tables(memory_table(planned_memory, nodes=machine.nodes))
    for line in (
        *rate_lines(planned),
        *repetition_lines(planned, machine),
        *pool_lines(planned, rates),
    ):
        print(line)
    results = checked.results
    openings = results.environments.openings
    print_data(config, results.data.files, results.rewards.trials, openings)
    for line in checked.results.lines_of_data:
        print(line)
    print(_resources(machine))
    print_warnings(checked.warnings, sys.stdout)
    print(f"{config.run.name} can run{writing}")
    return 0


def _with_counted_steps(config: Config, files: Sequence[DataFile]) -> Config:
    """Return the configuration with the steps of run.total_epochs, if they are known.

    They are not where the training data were not read, or only at their beginning.
    """
    num_examples = _num_examples(files)
    if num_examples is None:
        return config
    return with_total_steps(config, num_examples)


def _num_examples(files: Sequence[DataFile]) -> int | None:
    """Return the number of examples to learn from; None if it is not known."""
    for file in files:
        if file.key == "data.train_path" and file.is_whole:
            return file.num_examples
    return None


def _print_length(config: Config, files: Sequence[DataFile]) -> None:
    """Print what run.total_epochs becomes; nothing if the length is in steps."""
    epochs = config.run.total_epochs
    if epochs is None:
        return

    num_examples = _num_examples(files)
    if num_examples is None:
        print(
            f"run.total_steps: run.total_epochs={epochs} x examples /"
            f" {config.examples_per_step} per step; the run counts its examples"
        )
        return

    resolution = resolution_of_steps(config, num_examples)
    assert resolution is not None, "the rules ask for a number of steps or of epochs"
    print(f"{resolution.key} = {resolution.value}: {resolution.because}")


def _unknown(config: Config) -> set[str]:
    """Return the settings whose `auto` depends on files of a machine elsewhere."""
    unknown = {"run.resume"}
    if not has_tokenizer(config.model_roles[config.evaluated_role].model.folder):
        unknown.add("data.apply_chat_template")
    return unknown


def _writing(config: Config) -> str:
    """Return what the run does in its folder, as the end of a sentence.

    Raises:
        ConfigError: the run cannot go on from what is in its folder.
    """
    resumption = Resumption(config, verify=False)
    resumption.refuse_fewer_steps(config.run.total_steps)

    step = resumption.step
    total = config.run.total_steps
    if step is None:
        return f"; it writes to {config.run.dir}"
    if total is None:
        return f"; it goes on after step {step} in {config.run.dir}"
    if step >= total:
        return (
            f"; it is finished: {config.run.dir} holds step {step} of run.total_steps ="
            f" {total}"
        )
    return f"; it goes on after step {step} of {total} in {config.run.dir}"


def _resources(machine: Machine | None) -> str:
    """Return what the machine has, in a line; None stands for another cluster."""
    if machine is None:
        return (
            "resources: read from the cluster when the run starts, and so is what auto"
            " becomes, and the memory plan"
        )

    if machine.is_described:
        return machine_in_words(machine)
    return (
        f"this machine: {machine.cores} cores, {machine.gpus} GPUs,"
        f" {machine.memory_bytes / GIB:.1f} GiB memory,"
        f" {machine.shm_free_bytes / GIB:.1f} GiB free in /dev/shm"
    )


def print_warnings(warnings: Sequence[str], stream: TextIO) -> None:
    """Print a line per warning."""
    for warning in warnings:
        print(f"warning: {warning}", file=stream)


def rate_lines(config: Config) -> list[str]:
    """Return a line for each small model with a learning rate of large ones."""
    lines = []
    for name, learner in config.learners.items():
        rate = learner.optimizer.lr
        parameters = model_size(name, learner, config).parameters
        if 0 < parameters < _SMALL_MODEL and 0 < rate <= _RATE_OF_LARGE_MODELS:
            lines.append(
                f"{name}.optimizer.lr={rate:g} is a rate for billions of parameters,"
                f" and this model has {parameters / 1e6:.2g} million: it will hardly"
                " move. The quickstart's, of a million, learns with 3e-4"
            )
    return lines


_SMALL_MODEL = 30_000_000
_RATE_OF_LARGE_MODELS = 1e-5


def repetition_lines(config: Config, machine: Machine | None) -> list[str]:
    """Return a line about equal bits, where a schedule has them on a CPU alone.

    None stands for a machine of which nothing is known.
    """
    if not isinstance(config, RLConfig) or machine is None or not machine.gpus:
        return []
    rollout = config.rollout
    if rollout.updates != "between" or not rollout.staleness:
        return []
    return [
        f"schedule {rollout.schedule}: each row has a fixed policy version, but equal"
        " bits in two runs are promised on a CPU alone. On GPUs the last bits of"
        " log-probs depend on which rows are computed together"
    ]


# ------------------------------------------------------------ an algorithm of one's own

# Two lines of `check` about the algorithm: what it is, and what it is made of.

_OWN = "an algorithm of your own"


def algorithm_lines(config: Config) -> list[str]:
    """Return two lines about the algorithm; none for a task without one."""
    if not isinstance(config, RLConfig):
        return []
    algorithm = config.algorithm
    about = groups()["algorithm"].get(algorithm.name) or _OWN
    return [f"algorithm {algorithm.name}: {about}", f"  {'; '.join(_parts(config))}"]


def _parts(config: RLConfig) -> Iterator[str]:
    algorithm = config.algorithm
    advantage = ADVANTAGES[algorithm.advantage]
    whitened = ", whitened" if algorithm.whiten_advantages else ""
    unit = "response" if advantage.level == "row" else "token"
    settings = _settings(algorithm, "advantage")
    yield f"advantage {advantage.name} per {unit}{whitened}{settings}"
    if config.preference is None:
        yield from _policy_loss_in_words(config)
    else:
        yield _preference_in_words(config.preference)
        yield "sum mean over pairs"

    kl = algorithm.kl
    if kl.place == "none":
        yield "no KL"
    else:
        yield f"KL {kl.estimator} in the {kl.place}, {kl.coefficient:g} per nat"

    if config.distill is not None:
        yield _teacher_in_words(config.distill)

    additions = [name for name in ADDITIONS if getattr(algorithm, name) is not None]
    if additions:
        yield ", ".join(_in_words(algorithm, name) for name in additions)


def _policy_loss_in_words(config: RLConfig) -> Iterator[str]:
    """Yield what the loss of the policy is made of."""
    algorithm = config.algorithm
    loss = POLICY_LOSSES[algorithm.policy_loss]
    ratio = ""
    if loss.has_ratio:
        unit = algorithm.sequence if loss.sequence == "row" else loss.sequence
        ratio = f", ratio of a {unit} to {_old_policy(config)}"
    yield f"loss {loss.name}{_settings(algorithm, 'policy_loss')}{ratio}"
    if algorithm.correction.form != "none":
        yield _correction_in_words(algorithm)

    yield f"sum {algorithm.aggregation}"


def _preference_in_words(preference: PreferenceLossConfig) -> str:
    """Return the loss of pairs with its settings."""
    numbers = preference.declared.settings(preference)
    numbers |= {"rpo_alpha": preference.rpo_alpha}
    return f"loss of pairs {in_words(preference.loss)}{_named(numbers)}"


def _teacher_in_words(distill: DistillConfig) -> str:
    """Return what the actor learns from its teacher, the reference."""
    numbers: dict[str, float | None] = {"weight": distill.weight}
    if distill.num_top:
        numbers["top_k"] = distill.num_top
    numbers |= distill.declared.settings(distill)
    who = ""
    if distill.average_decay is not None:
        who = f", an average of the policy (decay {distill.average_decay:g})"
    return f"teacher {distill.divergence}{_named(numbers)}{who}"


def _correction_in_words(algorithm: AlgorithmConfig) -> str:
    """Return how tokens of another policy are corrected for, rejections included."""
    correction = algorithm.correction
    waits = " beyond algorithm.mismatch.limit" if algorithm.corrects_later else ""
    words = [f"correction {correction.form}{waits}"]
    if correction.kind is not None:
        bounds = {"lower": correction.lower, "upper": correction.upper}
        mean = ", normalised" if correction.normalise else ""
        words.append(f"{correction.kind} per {correction.level}{_named(bounds)}{mean}")
    elif correction.form == "two_policy":
        words.append("by the ratio of the loss alone")
    for name, (lower, upper) in (correction.rejections or {}).items():
        bounds = {"lower": lower, "upper": upper}
        words.append(f"rejection {name}{_named(bounds)}")
    return ", ".join(words)


def _in_words(algorithm: AlgorithmConfig, name: str) -> str:
    value = getattr(algorithm, name)
    return f"{name}={value if isinstance(value, str) else format(value, 'g')}"


def _old_policy(config: RLConfig) -> str:
    """Return in words which policy the loss compares with."""
    if config.algorithm.correction.form == "two_policy":
        return "the sampler"
    if config.actor.updates_per_step(config.rows_per_step) > 1:
        return "the policy before the step"
    return "itself (one update per step: all ratios are 1)"


def _settings(algorithm: AlgorithmConfig, key: str) -> str:
    """Return the settings that a choice reads, in brackets."""
    choice = CHOICES[key][getattr(algorithm, key)]
    values = {
        setting.name: getattr(algorithm, setting.name) for setting in choice.reads
    }
    return _named(values)


def _named(values: Mapping[str, float | None]) -> str:
    """Return the values that are not null with their names, in brackets."""
    named = [f"{name}={value:g}" for name, value in values.items() if value is not None]
    return f" ({', '.join(named)})" if named else ""


# --------------------------------------------------------- the recorded configuration

# Nothing is refused here; a checkpoint that cannot be used has recorded nothing.


def recorded_tree(config: Config) -> Mapping[str, Any]:
    """Return the configuration in the checkpoint that a run continues from.

    It is empty where the run begins anew.
    """
    resume = config.run.resume
    folder = Path(config.run.dir if resume in ("auto", "none") else resume)
    # The folder of a run stands for its newest checkpoint.
    checkpoints = folder / "checkpoints"
    if resume == "none" or not folder.is_dir():
        return {}

    try:
        if checkpoints.is_dir():
            store = CheckpointStore(checkpoints, config.run.keep_checkpoints)
            checkpoint = store.latest(verify=False).checkpoint
        elif resume != "auto":
            checkpoint = CheckpointStore.open(folder, verify=False)
        else:
            checkpoint = None
    except (CheckpointError, OSError):
        return {}
    return {} if checkpoint is None else checkpoint.config
