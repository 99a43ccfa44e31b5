"""Checks that read files: whether everything exists that a configuration names.

Invariant: nothing is started, imported from a user or read in full. The checks take
seconds at most, and torch is not needed.

Here are the run's own folder, its data, its graders and its endpoints. Models and
resources have modules of their own (`model_directories.py`, `resources.py`). For a
machine that was described, what only concerns this one is left out: packages, folders,
ports and tokens.

Rules over the configuration alone are elsewhere (`verl_ray.config`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import ipaddress
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from verl_ray.agents.specs import KEY
from verl_ray.agents.specs import spec_problem as environment_problem
from verl_ray.algorithms.own_functions import is_own
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.config.agent import ModelService
from verl_ray.config.data import in_words as paths_in_words
from verl_ray.config.distill import TeacherService
from verl_ray.config.load import resolved_elsewhere, with_auto_again
from verl_ray.config.reward import HttpReward
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config, batch_algebra
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.config.versions import problem_of
from verl_ray.config.vllm_args import VLLM_ARGS_PROVEN
from verl_ray.data.files import FORMATS, READERS, files_at, is_glob
from verl_ray.errors import Problem
from verl_ray.paths import in_ray_package, nearest_existing, path_suggestion
from verl_ray.preflight.facts import ClusterFacts, facts_here
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.model_directories import backend_problems, model_problems
from verl_ray.preflight.model_files import config_json, made_model, settings_of
from verl_ray.preflight.model_proof import may_disagree_with_vllm, proof_of
from verl_ray.preflight.resolve import resolutions, resolve
from verl_ray.preflight.resources import resource_problems, resource_warnings
from verl_ray.preflight.savings import in_words
from verl_ray.rewards.client import url_problem
from verl_ray.rewards.specs import spec_problems
from verl_ray.rollout.vllm_core import installed_version
from verl_ray.settings.config_json import balance_weight, chooses_experts
from verl_ray.settings.function_specs import parts_of
from verl_ray.settings.hub_ids import is_hub_id
from verl_ray.settings.section import resolved
from verl_ray.shell import for_shell
from verl_ray.tracking.wandb_credentials import credentials_problem

INPUTS_STARTED = "made-by-verl_ray"
"""Marker in run.dir/inputs: a run made this folder and may delete it."""

INPUTS_COMPLETE = "complete"
"""Marker in run.dir/inputs: all inputs are there."""


@dataclass
class Findings:
    """Problems that would stop a run, and warnings about what would slow it."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def preflight(
    config: Config,
    machine: Machine | None,
    *,
    evaluates: bool = False,
    reads_data: bool = True,
) -> Findings:
    """Check a run before anything starts.

    Args:
        config: Configuration of the run.
        machine: Machine that must hold the run: this one, or one that was described.
            None leaves out what depends on it.
        evaluates: Whether the command only evaluates. It then makes no inputs, so the
            run's own inputs must exist.
        reads_data: Whether data and reward functions will be read as well. A run on
            this machine needs them in any case.
    """
    # What a run needs depends on what each `auto` will stand for.
    facts = facts_here(config, machine, learns=not evaluates)
    planned = resolve(config, facts)
    # A cluster of which nothing is known yet leaves it open.
    known = config if machine is None else planned

    # Causes come before their consequences, such as a missing model before its memory.
    findings = Findings()
    starts_here = machine is None or not machine.is_described
    if starts_here:
        findings.problems += _installed_problems()
        findings.problems += _inputs_problems(config, evaluates)
    needs_data = starts_here or reads_data
    if needs_data:
        findings.problems += _data_problems(config)
        findings.problems += _environment_problems(config, machine)
        if not evaluates:
            findings.problems += _teacher_problems(config, machine)
    if starts_here:
        findings.problems += _run_dir_problems(config)
        findings.warnings += _run_dir_warnings(config)
    findings.problems += model_problems(known, machine)
    findings.problems += backend_problems(planned, machine)
    findings.problems += _grader_problems(config, machine, needs_data=needs_data)

    wandb_problem = credentials_problem(config.tracking.wandb)
    if wandb_problem is not None and starts_here:
        findings.problems.append(wandb_problem)

    if isinstance(planned, RolloutTaskConfig):
        findings.problems += _endpoint_problems(planned, machine)
        findings.warnings += _endpoint_warnings(planned)

    findings.warnings += _unproven_arguments(config)
    learns = not evaluates
    if machine is not None:
        findings.warnings += _recorded_warnings(config, facts)
    shortages = resource_problems(planned, machine, learns=learns)
    findings.problems += _with_origin(shortages, config, machine)
    findings.warnings += resource_warnings(planned, machine, learns=learns)
    findings.warnings += cost_warnings(known, machine, evaluates=evaluates)
    return findings


def _recorded_warnings(config: Config, facts: ClusterFacts) -> Iterator[str]:
    """Yield a warning if values that a run has resolved would be others here."""
    record = config.run.resolved
    recorded: dict[str, object] = {**record.cpu, **record.gpu}
    if not recorded:
        return
    again = with_auto_again(config)
    here = {each.key: each.value for each in resolutions(again, facts)}

    # What is `auto` now is resolved here in any case.
    for each in resolutions(config, facts):
        here.pop(each.key, None)
    there = {
        key: value
        for key, value in recorded.items()
        if key in here and here[key] != value
    }
    if there:
        yield (
            f"auto became {in_words(there)} on another machine, and these values stay;"
            f" here it becomes {in_words({key: here[key] for key in there})}. KEY=auto"
            " resolves one anew"
        )


def _with_origin(
    problems: Iterable[Problem], config: Config, machine: Machine | None
) -> Iterator[Problem]:
    """Yield the problems; those of values that a run chose on other devices say so."""
    on_gpus = machine is not None and machine.gpus > 0
    chosen = resolved_elsewhere(config, on_gpus=on_gpus)
    device = "a CPU" if on_gpus else "GPUs"

    for problem in problems:
        if problem.key in chosen:
            rule = f"{problem.rule}; auto became this on {device}"
            problem = replace(problem, rule=rule)
        yield problem


def _installed_problems() -> Iterator[Problem]:
    """Yield a problem if the installed torch and vLLM do not go together.

    Without torch nothing else runs here, and pip reports it.
    """
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return

    mismatch = problem_of(torch, installed_version())
    if mismatch is not None:
        rule, fix = mismatch
        yield Problem("the environment", torch, rule, fix)


def _grader_problems(
    config: Config, machine: Machine | None, *, needs_data: bool
) -> Iterator[Problem]:
    """Yield functions that cannot be found, and services with a wrong URL or token."""
    for key, grader in config.active_graders(learns=True).items():
        functions = grader.named_functions or {}
        if needs_data:
            yield from spec_problems(functions, f"{key}.functions")

        if isinstance(grader, HttpReward):
            yield from _service_problems(key, grader, machine)


def _service_problems(
    key: str,
    service: HttpReward | ModelService | TeacherService,
    machine: Machine | None,
) -> Iterator[Problem]:
    """Yield a problem with the address or the token of a service."""
    problem = url_problem(service.url, f"{key}.url")
    if problem is not None:
        yield problem
    # Other machines have an environment of their own.
    if machine is not None and not machine.is_described:
        fix = "Set it to the token that the service expects."
        yield from _token_problems(f"{key}.token_env", service.token_env, fix)


def _teacher_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Yield problems with the addresses and the tokens of a teacher's servers."""
    if isinstance(config, RLConfig) and config.distill is not None:
        for key, service in config.distill.services.items():
            yield from _service_problems(key, service, machine)


def _environment_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Yield environments of episodes that cannot be found, and their services."""
    if isinstance(config, RLConfig):
        for source, function in config.agent.environments.items():
            spec, options = parts_of(function)
            problem = environment_problem(spec, f"{KEY}.{source}", options)
            if problem is not None:
                yield problem
        for name, service in config.agent.models.items():
            key = f"agent.models.{name}"
            yield from _service_problems(key, service, machine)


def _token_problems(key: str, variable: str | None, fix: str) -> Iterator[Problem]:
    """Yield a problem if a token is in no environment variable of this name."""
    if variable is not None and not os.environ.get(variable):
        rule = "there is no such environment variable, or it is empty"
        yield Problem(key, variable, rule, fix)


# ---------------------------------------------------------------------- data and inputs


def _data_problems(config: Config) -> Iterator[Problem]:
    """Yield data files that are missing or of an unknown kind."""
    # The run makes its data itself.
    if config.preparation is not None:
        return

    data = config.data
    paths = [("data.train_path", data_set.path) for data_set in data.train_sets]
    paths += [("data.validation_path", other.path) for other in data.validation_sets]
    for key, path in paths:
        # What is wrong with a data set of the hub is known once it is read.
        if is_hub_id(path):
            continue
        file = Path(path)
        fix = f"Give {FORMATS}."
        if not file.exists() and is_glob(file):
            if not files_at(file):
                yield Problem(key, path, "the glob matches no file", fix)
        elif not file.exists():
            rule = "there is no such file or folder"
            yield Problem(key, path, rule, path_suggestion(file, fix))
        elif file.is_file() and file.suffix not in READERS:
            rule = f"a file of this kind ({file.suffix or 'no suffix'}) cannot be read"
            yield Problem(key, path, rule, fix)


def inputs_folder(config: Config) -> Path:
    """Return the folder of the inputs that a run with `prepare` makes."""
    return Path(config.run.dir) / "inputs"


def foreign_inputs(config: Config) -> Iterator[Problem]:
    """Yield a problem if the folder for a run's inputs was made by something else.

    A run deletes and makes its inputs anew only in a folder of its own.
    """
    folder = inputs_folder(config)
    if (folder / INPUTS_COMPLETE).exists():
        return

    # A link may lead to a folder that belongs to somebody else.
    is_own = (folder / INPUTS_STARTED).exists()
    is_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if folder.is_symlink() or not (is_own or is_empty):
        rule = (
            f"the run makes its inputs in {folder}, which is there and which no run has"
            " made"
        )
        fix = "Give another run.dir, or move that folder away."
        yield Problem("run.dir", config.run.dir, rule, fix)


def _inputs_problems(config: Config, evaluates: bool) -> Iterator[Problem]:
    """Yield problems with the inputs that a run makes, or should have made."""
    if config.preparation is None:
        return
    if not evaluates:
        yield from foreign_inputs(config)
        return

    if not (inputs_folder(config) / INPUTS_COMPLETE).exists():
        rule = "training makes this model, and there is none yet"
        fix = (
            "Give run.dir of a finished run; or prepare=null with model.path,"
            " data.train_path and data.validation_path of your own."
        )
        yield Problem("model.path", config.model.path, rule, fix)


# ---------------------------------------------------------------------------- endpoints


def _endpoint_problems(
    config: RolloutTaskConfig, machine: Machine | None
) -> Iterator[Problem]:
    """Yield what prevents the replicas from listening on this machine."""
    endpoint = config.rollout.endpoint
    address = _address(endpoint.host)
    if not endpoint.enabled or address is None:
        return
    if machine is None or machine.is_described:
        return

    fix = "Set it to the token that clients must send."
    yield from _token_problems("rollout.endpoint.token_env", endpoint.token_env, fix)

    # Replicas have successive ports, unless the port is 0, which stands for any.
    last_port = 0
    if endpoint.port:
        replicas = resolved(config.rollout.num_replicas)
        last_port = min(endpoint.port + replicas - 1, 65535)

    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    # The only certain test is to listen; one refusal is enough.
    for port in range(endpoint.port, last_port + 1):
        try:
            socket.create_server((endpoint.host, port), family=family).close()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            rule = f"nobody can listen on {endpoint.host} port {port} here: {reason}"
            fix = (
                "Give a port that is free, or 0 for any, and an address of this"
                " machine as rollout.endpoint.host."
            )
            key = "rollout.endpoint.port"
            yield Problem(key, endpoint.port, rule, fix, may_pass=True)
            return


def _endpoint_warnings(config: RolloutTaskConfig) -> Iterator[str]:
    """Yield a warning if other machines can use the rollout servers without a token."""
    endpoint = config.rollout.endpoint
    address = _address(endpoint.host)
    if not endpoint.enabled or address is None:
        return

    if endpoint.token_env is None and not address.is_loopback:
        yield (
            f"rollout.endpoint.host={endpoint.host}: everybody who can reach this"
            " address may use the rollout servers (rollout.endpoint.token_env asks"
            " them for a token)"
        )


def _unproven_arguments(config: Config) -> Iterator[str]:
    """Yield a warning if engines get arguments of vLLM with which no test runs one."""
    by_engine = {
        f"{engine.section}.vllm_args": engine.config.vllm_args.keys() - VLLM_ARGS_PROVEN
        for engine in config.engines.values()
    }
    unproven = [
        f"{key}: {', '.join(sorted(names))}"
        for key, names in by_engine.items()
        if names
    ]
    if unproven:
        yield (
            f"{'; '.join(unproven)}: not proven here, since no test of verl_ray runs an"
            " engine with this (docs/rollout_on_gpus.md, Arguments of vLLM)"
        )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address; None for one that the rules of the configuration refuse."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


# ------------------------------------------------------------------------ run directory


def _run_dir_warnings(config: Config) -> Iterator[str]:
    """Yield a warning if all users may write to run.dir.

    A folder that the run makes has the access that the user's umask says.
    """
    run_dir = Path(config.run.dir)
    with contextlib.suppress(OSError):
        mode = run_dir.stat().st_mode
        if mode & stat.S_IWOTH:
            yield (
                f"run.dir = {run_dir} may be written to by every user of the machine"
                f" ({stat.filemode(mode)}), also its checkpoints; `chmod o-w` ends that"
            )


def _run_dir_problems(config: Config) -> Iterator[Problem]:
    """Yield problems with run.dir, and with the checkpoint of run.resume."""
    run_dir = config.run.dir
    if in_ray_package(Path(run_dir)):
        rule = (
            "this lies in the copy of the working directory that Ray made for this job,"
            " and will delete"
        )
        fix = "Give an absolute path, or none: it is then ~/outputs/NAME."
        yield Problem("run.dir", run_dir, rule, fix)

    # The run makes the missing folders itself.
    parent = nearest_existing(run_dir)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        rule = f"{parent} cannot be written to"
        fix = "Give a folder that can be written to."
        yield Problem("run.dir", run_dir, rule, fix, may_pass=True)

    resume = config.run.resume
    if resume in ("auto", "none"):
        return

    checkpoint = Path(resume)
    if not checkpoint.exists():
        rule = "there is no such checkpoint"
        fix = path_suggestion(
            checkpoint, "Use auto, none, or the path of a checkpoint."
        )
        yield Problem("run.resume", resume, rule, fix)


# -------------------------------------------------------------- what is costly together


def cost_warnings(
    config: Config, machine: Machine | None, *, evaluates: bool
) -> Iterator[str]:
    """Yield a warning for each combination of settings that works badly.

    Args:
        config: Configuration of the run.
        machine: Machine that will hold the run, if it is known.
        evaluates: Whether the command only evaluates, so that nothing learns.
    """
    if machine is not None and machine.gpus:
        yield from _float32_on_gpus(config, learns=not evaluates)
        yield from _untested_on_gpus(config)
    elif machine is not None and not machine.computes_bfloat16:
        yield from _bfloat16_on_a_cpu(config)
    if machine is not None and not machine.gpus:
        yield from _unproven_rollouts(config)
    if evaluates:
        return

    yield from _different_types(config)
    yield from _quantized_sampler(config)
    yield from _unread_validation(config)
    yield from _large_evaluations(config)
    yield from _endless_warmups(config)
    yield from _still_learners(config)
    yield from _trajectories_of_one_row(config)
    yield from _clips_of_rounding(config)
    yield from _clips_without_effect(config)
    yield from _stale_for_nothing(config)
    yield from _rows_of_one_length(config)
    yield from _experts_out_of_sight(config)


def _experts_out_of_sight(config: Config) -> Iterator[str]:
    """Yield a warning for models whose own balance loss is not computed, each once."""
    paths = dict.fromkeys(
        role.model.folder
        for role in config.learners.values()
        if role.expert_balance is None
    )
    for path in paths:
        settings = settings_of(path, config)
        weight = balance_weight(settings)
        if not weight or not chooses_experts(settings):
            continue
        if proof_of(path, trusts_code=config.trusts_code(path)).has_balance:
            continue
        yield (
            f"config.json of {path} gives the balance loss of experts the weight"
            f" {weight:g}, and this loss is not computed, since its routers return no"
            " choice"
        )


def _unproven_rollouts(config: Config) -> Iterator[str]:
    """Yield a warning if it is not known whether vLLM computes the policy's model."""
    if not isinstance(config, RolloutTaskConfig):
        return
    path = config.model_roles[config.evaluated_role].model.folder
    trusts_code = config.trusts_code(path)
    if made_model(path, config) or not may_disagree_with_vllm(
        path, trusts_code=trusts_code
    ):
        return
    trust = ["--trust-remote-code"] if trusts_code else []
    yield (
        f"vLLM has not been compared with the model in {path}:"
        f" {for_shell(['verl-ray', 'prove', *trust, path])} does so in minutes;"
        " otherwise the first sync of the run shows whether they agree"
    )


def _rows_of_one_length(config: Config) -> Iterator[str]:
    """Yield a warning for each model that has more micro-batches than packed rows."""
    for name, role in config.learners.items():
        path = role.model.folder
        if made_model(path, config) or not config_json(path):
            continue
        proof = proof_of(path, trusts_code=config.trusts_code(path))
        if proof.packs_rows_in(role.backend.dtype):
            continue

        cap = role.backend.micro_batch_tokens_per_rank
        rows = role.rows_per_update(config.rows_per_step) or 0
        own_rows = -(-rows * role.peers // role.num_ranks)
        # What auto becomes on a cluster is not known yet.
        packed = "few"
        if isinstance(cap, int):
            packed = f"about {-(-own_rows * config.longest_row[0] // cap)} at most"
        yield (
            f"{name}: the layers of {path} have states, so each micro-batch holds rows"
            f" of one length alone: up to {own_rows} per rank and update, where packed"
            f" rows take {packed}; a smaller number of lengths takes less time"
        )


def _different_types(config: Config) -> Iterator[str]:
    """Yield a warning if sampler and trainer compute in different types."""
    if not isinstance(config, RolloutTaskConfig):
        return

    sampler = config.rollout.dtype
    trainer = config.actor.backend.dtype
    if sampler == trainer or config.corrects_mismatch:
        return
    # A quantized sampler has a warning of its own.
    if config.rollout.quantization is not None:
        return
    # What auto becomes on a cluster is not known yet.
    if "auto" in (sampler, trainer):
        return
    yield (
        f"rollout.dtype={sampler} beside actor.backend.dtype={trainer}: rollout engine"
        " and trainer round differently, so each token is learned from as if another"
        " policy had sampled it (rollout_corr/* shows by how much). Give both the same"
        " type, or correct with importance weights"
        " (algorithm.correction.form=three_policy)"
    )


def _quantized_sampler(config: Config) -> Iterator[str]:
    """Yield a warning if tokens of a quantized engine are learned from uncorrected."""
    if not isinstance(config, RolloutTaskConfig) or config.corrects_mismatch:
        return
    quantization = config.rollout.quantization
    if quantization is not None:
        yield (
            f"rollout.quantization={quantization}: the engine samples from rounded"
            " weights, so each token is learned from as if another policy had sampled"
            " it (rollout_corr/* shows by how much); correct with importance weights"
            " (algorithm.correction.form=three_policy)"
        )


def _float32_on_gpus(config: Config, *, learns: bool) -> Iterator[str]:
    """Yield a warning for trainers and one for engines that compute in float32."""
    trainers = _keys_of_type(config, "float32", trainers=True)
    if trainers and learns:
        yield (
            f"{', '.join(trainers)}=float32 on GPUs: matrix products and attention run"
            " without tensor cores, since TF32 is off, and activations take twice the"
            " memory; use bfloat16"
        )

    # vLLM 0.32: `_get_backend_priorities` of platforms/cuda.py, and the
    # `supported_dtypes` of the classes in v1/attention/backends.
    engines = _keys_of_type(config, "float32", trainers=False)
    if engines:
        yield (
            f"{', '.join(engines)}=float32 on GPUs: FlashAttention and FlashInfer take"
            " no float32, so vLLM attends with a slower Triton kernel, and everything"
            " runs without tensor cores; use bfloat16"
        )


def _untested_on_gpus(config: Config) -> Iterator[str]:
    """Yield a warning if engines compute in a way that has run on a CPU alone."""
    keys: list[str] = []
    for engine in config.engines.values():
        if engine.config.pipeline_parallel > 1:
            keys.append(f"{engine.section}.pipeline_parallel")
        if engine.config.quantization is not None:
            keys.append(f"{engine.section}.quantization")
        if engine.config.expert_parallel:
            keys.append(f"{engine.section}.expert_parallel")
    if (
        isinstance(config, RolloutTaskConfig)
        and config.shares_processes
        and config.rollout.ranks_per_replica > 1
    ):
        keys.append("placement=colocated with engines of several GPUs")
    if isinstance(config, RolloutTaskConfig) and config.rollout.routing_replay:
        keys.append("rollout.routing_replay")
    if keys:
        yield f"untested on GPUs, and tested on a CPU: {', '.join(keys)}"


def _keys_of_type(config: Config, dtype: str, *, trainers: bool) -> list[str]:
    """Return the keys of trainers, or of rollout engines, that compute in `dtype`."""
    if trainers:
        types = {
            f"{name}.backend.dtype": role.backend.dtype
            for name, role in config.model_roles.items()
        }
    else:
        types = {
            f"{engine.section}.dtype": engine.config.dtype
            for engine in config.engines.values()
        }
    return [key for key, value in types.items() if value == dtype]


def _bfloat16_on_a_cpu(config: Config) -> Iterator[str]:
    """Yield a warning if anything computes in bfloat16, which the CPU emulates."""
    keys = _keys_of_type(config, "bfloat16", trainers=True)
    keys += _keys_of_type(config, "bfloat16", trainers=False)
    if keys:
        yield (
            f"{', '.join(keys)}=bfloat16 on a CPU without instructions for it"
            " (avx512_bf16, amx_bf16): slower than float32, and less exact; use float32"
        )


def _unread_validation(config: Config) -> Iterator[str]:
    """Yield a warning if held-out problems are given and no evaluation reads them."""
    # A run that makes its problems always makes held-out ones, too.
    held_out = config.data.validation_sets
    if config.run.evaluate_every or not held_out or config.preparation is not None:
        return
    yield (
        f"run.evaluate_every=0: data.validation_path={paths_in_words(held_out)} is"
        " never read, and the run ends without a result on held-out problems; set"
        " run.evaluate_every to a number of steps, or data.validation_path=null"
    )


def _large_evaluations(config: Config) -> Iterator[str]:
    """Yield a warning if evaluations generate more responses than training does."""
    responses = config.responses_per_evaluation
    interval = config.run.evaluate_every
    if not interval or responses is None:
        return

    trained = interval * config.rows_per_step
    if responses > trained:
        yield (
            f"an evaluation generates {responses} responses, and the"
            f" {interval} steps until the next one {trained}: the run evaluates for"
            " more than half of its generation; lower evaluation.num_prompts, or raise"
            " run.evaluate_every"
        )


def _endless_warmups(config: Config) -> Iterator[str]:
    """Yield a warning for each role whose learning rate never reaches its value."""
    # The steps of run.total_epochs are known once the data are read.
    if config.run.total_steps is None:
        return

    updates = {role.role: role.updates_per_step for role in batch_algebra(config).roles}
    for name, learner in config.learners.items():
        steps = config.learning_steps(name) * updates[name]
        warmup_steps = learner.optimizer.warmup_steps
        if warmup_steps > steps:
            yield (
                f"{name}.optimizer.warmup_steps={warmup_steps} is more than the run's"
                f" {steps} optimizer steps: the learning rate never reaches"
                f" {name}.optimizer.lr; lower it, or raise run.total_steps"
            )


def _still_learners(config: Config) -> Iterator[str]:
    """Yield a warning for each role that learns with a learning rate of 0."""
    for name, learner in config.learners.items():
        if learner.optimizer.lr == 0:
            yield f"{name}.optimizer.lr=0: the {name} never changes; raise it"


def _trajectories_of_one_row(config: Config) -> Iterator[str]:
    """Yield a warning if rows are kept together that are trajectories of their own.

    Episodes may have several rows each.
    """
    if not isinstance(config, RLConfig) or config.episodes is not None:
        return
    if config.algorithm.judges_trajectories:
        yield (
            "algorithm.sequence=trajectory: every trajectory that rollout samples has"
            " one row, so losses are those of algorithm.sequence=row, and rows are"
            " shared out by trajectories for nothing; use row"
        )


def _clips_of_rounding(config: Config) -> Iterator[str]:
    """Yield a warning if ratios to the sampler are clipped closer than they are known.

    What rounding adds to them is then most of what is clipped.
    """
    if not isinstance(config, RLConfig):
        return
    algorithm = config.algorithm
    is_rounded = "bfloat16" in (config.rollout.dtype, config.actor.backend.dtype)
    has_sampler = algorithm.correction.form == "two_policy"
    if is_rounded and has_sampler and algorithm.clips_finer_than_bfloat16:
        yield (
            "algorithm.correction.form=two_policy: the ratio of"
            f" {algorithm.policy_loss} is the one to the sampler, which in bfloat16 is"
            " further from 1 than algorithm.clip_low and algorithm.clip_high, so most"
            " is clipped for its rounding; use three_policy, or none, and several"
            " updates per step (actor.mini_batch_size)"
        )


_BROUGHT_DUAL_CLIP = 3.0
"""The dual clip that ppo, grpo and others bring, for steps of several updates."""

_USUAL_UPDATES = 16
"""Updates per step in the papers of DAPO (arXiv:2503.14476) and VAPO
(arXiv:2504.05118)."""


def _clips_without_effect(config: Config) -> Iterator[str]:
    """Yield a warning if bounds of a ratio were chosen that is always 1.

    Bounds with their usual values are nobody's choice: `check` only says that all
    ratios are 1. What a function of the user's makes of a ratio of 1 is not known.
    """
    if not isinstance(config, RLConfig) or not config.compares_with_itself:
        return
    algorithm = config.algorithm
    if config.preference is not None or is_own(algorithm.policy_loss):
        return

    loss = POLICY_LOSSES[algorithm.policy_loss]
    usual_bounds = {
        setting.name: _BROUGHT_DUAL_CLIP if usual is None else usual
        for setting, usual in loss.reads.items()
    }
    # Without those of a selection, which does not read the ratio.
    bounds = {
        name: value
        for name, value in loss.settings(algorithm).items()
        if value is not None
    }
    if all(value == usual_bounds[name] for name, value in bounds.items()):
        return
    settings = [f"algorithm.{name}={value:g}" for name, value in bounds.items()]
    size = max(config.rows_per_step // _USUAL_UPDATES, 1)
    updates = config.actor.model_copy(update={"mini_batch_size": size})
    yield (
        f"{', '.join(settings)}: with one update per step the ratio of {loss.name} is 1"
        " at every token, so these bounds have no effect; make several updates, such as"
        f" {updates.updates_per_step(config.rows_per_step)}"
        f" (actor.mini_batch_size={size})"
    )


def _stale_for_nothing(config: Config) -> Iterator[str]:
    """Yield a warning if tokens become older and no step becomes faster.

    With dynamic sampling further batches hold groups in the place of rejected ones.
    """
    if not isinstance(config, RLConfig) or config.rollout.updates != "between":
        return
    staleness = config.rollout.staleness
    if staleness > 1 and config.algorithm.dynamic_sampling is None:
        yield (
            f"rollout.staleness={staleness} with rollout.updates=between: a publication"
            " waits until all batches that are drawn are generated and scored, one more"
            " in each step, so tokens are older than with 1 and no step is faster; use"
            " rollout.staleness=1, or schedule=asynchronous"
        )
