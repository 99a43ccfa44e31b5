"""What only the machine knows: whether files, devices, memory and disk are there for a configuration.

Invariant: nothing is started, imported from a user or read in full; seconds at most, and torch is not needed.
Deliberately not here: rules over the configuration alone (`verl_ray.config.rules`), and the resources of a cluster,
which the cluster is asked for when the run starts.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_ray.config.algebra import batch_algebra
from verl_ray.config.rules import ATTENTION_HEAD_SIZES
from verl_ray.config.schema import Config, ModelRole, RLConfig
from verl_ray.config.suggest import closest, either, nearest_divisors
from verl_ray.errors import Problem
from verl_ray.rewards.functions import spec_problem

DATA_SUFFIXES = (".jsonl", ".parquet")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

MIB, GIB = 2**20, 2**30
BYTES_PER_TRAINED_PARAMETER = 16
"""float32 weight, gradient and the two moments of AdamW."""
BYTES_PER_SAVED_PARAMETER = 12
"""float32 weight and the two moments of AdamW."""
BYTES_PER_TOKEN_OF_A_ROW = 32
"""Token, mask, and the log-probs, values, advantages and returns that a step adds."""
OBJECT_STORE_FLOOR_BYTES = 128 * MIB
"""Ray refuses to start with much less."""
LOG_ROOM_BYTES = 256 * MIB
"""Logs, samples and metrics of one run."""


@dataclass(frozen=True)
class Machine:
    """What a run without a cluster can use."""

    cores: int
    gpus: int
    memory_bytes: int
    shm_free_bytes: int

    @staticmethod
    def here() -> Machine:
        """This machine, within the limits of its container."""
        return Machine(
            cores=len(os.sched_getaffinity(0)),
            gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
            memory_bytes=_memory_bytes(),
            shm_free_bytes=shutil.disk_usage("/dev/shm").free,
        )


@dataclass
class Findings:
    """What would stop the run, and what would only slow it."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def machine_of(config: Config) -> Machine | None:
    """The machine that must hold the run; None when a cluster, given by address, will."""
    given = config.ray.address or os.environ.get("RAY_ADDRESS")
    return None if given else Machine.here()


def preflight(config: Config, machine: Machine | None) -> Findings:
    """Check files, and the resources of `machine` unless it is None. Inputs that the run makes are not missing."""
    findings = Findings()
    findings.problems += _data_problems(config)
    findings.problems += _run_dir_problems(config)
    for key, path in _model_paths(config).items():
        findings.problems += _model_problems(key, path, config, machine)
    if isinstance(config, RLConfig):
        specs = ((f"reward.functions.{source}", spec) for source, spec in config.reward.functions.items())
        findings.problems += [problem for key, spec in specs if (problem := spec_problem(spec, key)) is not None]
    findings.problems += _disk_problems(config)
    findings.warnings += _idle_ranks(config)
    if machine is not None:
        findings.problems += _memory_problems(config, machine)
        if machine.gpus:
            findings.problems += _gpu_problems(config, machine)
        else:
            findings.warnings += _cpu_warnings(config, machine)
    return findings


# ------------------------------------------------------------------------------------------------------ files


def _model_paths(config: Config) -> dict[str, str]:
    """The model directories that must exist already, each under the key that says so."""
    made = isinstance(config, RLConfig) and config.prepare is not None
    paths: dict[str, str] = {}
    for name, role in config.model_roles.items():
        shared = role.model.path == config.model.path
        if not (shared and made):
            paths["model.path" if shared else f"{name}.model.path"] = role.model.path
    return paths


def _model_problems(key: str, path: str, config: Config, machine: Machine | None) -> Iterator[Problem]:
    directory = Path(path).expanduser()
    if not directory.is_dir():
        fix = _near(directory, "Give a directory that `save_pretrained` wrote.")
        yield Problem(key, path, "there is no such directory (nothing is looked up on a hub)", fix)
        return
    settings = _json(directory / "config.json")
    if not settings:
        fix = "Give the directory that `save_pretrained` wrote."
        yield Problem(key, path, "this directory has no readable config.json", fix)
        return
    if not any(directory.glob("*.safetensors")):
        yield Problem(key, path, "this directory has no *.safetensors", "Save the weights as safetensors.")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        fix = f"Put the model's tokenizer beside it ({either(TOKENIZER_FILES[:3])})."
        yield Problem(key, path, "this directory has no tokenizer", fix)
    longest, most = batch_algebra(config).max_row_tokens, settings.get("max_position_embeddings")
    if isinstance(most, int) and longest > most:
        length = "rollout.max_response_tokens" if isinstance(config, RLConfig) else "sft.max_tokens"
        rule = f"the model has {most} positions, and a row may have {longest} tokens"
        yield Problem(key, path, rule, f"Lower {length} by {longest - most}, or take another model.")
    if isinstance(config, RLConfig) and path == config.actor.model.path:
        yield from _rollout_problems(settings, config, machine)


def _rollout_problems(settings: Mapping[str, object], config: RLConfig, machine: Machine | None) -> Iterator[Problem]:
    """What the rollout engine needs of the actor's model."""
    heads, hidden = settings.get("num_attention_heads"), settings.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    parallel = config.rollout.tensor_parallel
    if heads % parallel:
        rule = f"it must divide the {heads} attention heads of the model"
        nearest = either(nearest_divisors(heads, parallel))
        yield Problem("rollout.tensor_parallel", parallel, rule, f"The nearest that do are {nearest}.")
    size = settings.get("head_dim") or hidden // heads
    if machine is not None and machine.gpus == 0 and size not in ATTENTION_HEAD_SIZES:
        rule = f"the model's head size is {size}, which the rollout engine's attention does not take on a CPU"
        yield Problem("model.path", config.actor.model.path, rule, f"Take one of {either(ATTENTION_HEAD_SIZES)}.")


def _data_problems(config: Config) -> Iterator[Problem]:
    if isinstance(config, RLConfig) and config.prepare is not None:
        return
    paths = {"data.train_path": config.data.train_path, "data.validation_path": config.data.validation_path}
    for key, path in paths.items():
        if path is None:
            continue
        found = Path(path).expanduser()
        if not found.exists():
            fix = _near(found, f"Give a {either(DATA_SUFFIXES)} file, or a folder saved by datasets.")
            yield Problem(key, path, "there is no such file or folder", fix)
        elif found.is_file() and found.suffix not in DATA_SUFFIXES:
            rule = f"a file of this kind ({found.suffix or 'no suffix'}) cannot be read"
            yield Problem(key, path, rule, f"Use {either(DATA_SUFFIXES)}, or a folder saved by datasets.")


def in_ray_package(path: Path) -> bool:
    """Whether `path` lies in the copy of a working directory that Ray unpacked for a job, and will delete."""
    return any(part.startswith("_ray_pkg_") for part in path.parts)


def _run_dir_problems(config: Config) -> Iterator[Problem]:
    if in_ray_package(Path(config.run.dir)):
        rule = "this lies in the copy of the working directory that Ray made for this job, and will delete"
        yield Problem("run.dir", config.run.dir, rule, "Give an absolute path, or none: it is then ~/outputs/NAME.")
    parent = _nearest_existing(config.run.dir)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        fix = "Give a folder that can be written to."
        yield Problem("run.dir", config.run.dir, f"{parent} cannot be written to", fix)
    if config.run.resume not in ("auto", "none") and not Path(config.run.resume).expanduser().exists():
        fix = _near(Path(config.run.resume).expanduser(), "Use auto, none, or the path of a checkpoint.")
        yield Problem("run.resume", config.run.resume, "there is no such checkpoint", fix)


def _near(path: Path, otherwise: str) -> str:
    """The paths beside `path` that are spelt like it, or else what would be right."""
    if not path.parent.is_dir():
        return f"{_nearest_existing(str(path))} is as far as the path goes. {otherwise}"
    names = closest(path.name, (entry.name for entry in path.parent.iterdir()))
    return f"Did you mean {either(path.with_name(name) for name in names)}?" if names else otherwise


def _json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# -------------------------------------------------------------------------------------------------- resources


def _ranks(config: Config) -> dict[str, int]:
    """Devices that each role keeps for itself: colocated roles count once, as the most that one of them has."""
    roles = {name: role.num_ranks for name, role in config.model_roles.items()}
    if isinstance(config, RLConfig):
        roles["rollout"] = config.rollout.num_replicas * config.rollout.tensor_parallel
        if config.placement.kind == "colocated":
            largest = max(roles, key=lambda name: roles[name])
            return {largest: roles[largest]}
    return roles


def _gpu_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    ranks = _ranks(config)
    needed = sum(ranks.values())
    if needed > machine.gpus:
        largest = max(ranks, key=lambda name: ranks[name])
        key = "rollout.num_replicas" if largest == "rollout" else f"{largest}.num_ranks"
        split = " + ".join(f"{name} {count}" for name, count in ranks.items())
        rule = f"the run needs {needed} GPUs ({split}), and this machine has {machine.gpus}"
        fix = f"Lower it by {needed - machine.gpus}, choose placement=colocated, or set ray.address to a cluster."
        yield Problem(key, ranks[largest], rule, fix)


def _cpu_warnings(config: Config, machine: Machine) -> Iterator[str]:
    ranks = _ranks(config)
    threads = 1 if config.run.threads_per_rank == "auto" else config.run.threads_per_rank
    busy = sum(ranks.values()) * threads
    if busy > machine.cores:
        split = " + ".join(f"{name} {count}" for name, count in ranks.items())
        yield (
            f"{busy} threads compute at once ({split}, {threads} per rank) on {machine.cores} cores: "
            "the run works, slower than with fewer ranks (num_ranks, rollout.num_replicas, run.threads_per_rank)"
        )


def _idle_ranks(config: Config) -> Iterator[str]:
    for role in batch_algebra(config).roles:
        if role.mini_batch_size is not None and role.mini_batch_size < role.ranks:
            yield (
                f"{role.role}.num_ranks={role.ranks} share mini-batches of {role.mini_batch_size} rows: "
                f"{role.ranks - role.mini_batch_size} ranks have nothing to do in each update"
            )


def _memory_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    """What certainly does not fit: weights, optimizer and caches, without activations."""
    actor = parameter_count(config.actor.model.path)
    shared = _shared_memory_bytes(config, actor)
    if shared > machine.shm_free_bytes:
        yield Problem(
            "/dev/shm",
            f"{machine.shm_free_bytes / MIB:.0f} MiB free",
            f"rows and weights travel through shared memory, about {shared / MIB:.0f} MiB of it",
            f"Start the container with --shm-size={math.ceil(shared / GIB) + 1}g, or remount /dev/shm larger.",
        )
    if machine.gpus:
        return
    needed = sum(_host_bytes(name, role, config) for name, role in config.model_roles.items())
    if isinstance(config, RLConfig):
        rollout, ranks = config.rollout, config.rollout.num_replicas * config.rollout.tensor_parallel
        width = 4 if rollout.dtype == "float32" else 2
        needed += int(actor * width * rollout.num_replicas + rollout.kv_cache_gib * GIB * ranks)
    if needed > machine.memory_bytes:
        rule = f"weights, optimizer and caches take at least {needed / GIB:.1f} GiB before any activation"
        fix = f"This machine has {machine.memory_bytes / GIB:.1f} GiB: take a smaller model or rollout.kv_cache_gib."
        yield Problem("model.path", config.model.path, rule, fix)


def _host_bytes(name: str, role: ModelRole, config: Config) -> int:
    """Weights and training state of a role on all ranks: whole on each of them, or one copy in shards."""
    copies = 1 if role.backend.kind == "fsdp" else role.num_ranks
    width = 4 if name == "reference" else BYTES_PER_TRAINED_PARAMETER
    return parameter_count(role.model.path) * width * copies


def _shared_memory_bytes(config: Config, parameters: int) -> int:
    sizes = batch_algebra(config)
    rows = sizes.rows * sizes.max_row_tokens * BYTES_PER_TOKEN_OF_A_ROW
    weights = parameters * (4 if isinstance(config, RLConfig) and config.rollout.dtype == "float32" else 2)
    return max(rows, OBJECT_STORE_FLOOR_BYTES) + (weights if isinstance(config, RLConfig) else 0)


def _disk_problems(config: Config) -> Iterator[Problem]:
    free = shutil.disk_usage(_nearest_existing(config.run.dir)).free
    trained = [role for name, role in config.model_roles.items() if name != "reference"]
    checkpoint = sum(parameter_count(role.model.path) for role in trained) * BYTES_PER_SAVED_PARAMETER
    # One more than are kept: the oldest goes only when the newest is whole.
    needed = LOG_ROOM_BYTES + (checkpoint * (config.run.keep_checkpoints + 1) if config.run.checkpoint_every else 0)
    if needed > free:
        yield Problem(
            "run.dir",
            config.run.dir,
            f"the run writes up to {needed / GIB:.1f} GiB there, and {free / GIB:.1f} GiB are free",
            "Free some, choose another run.dir, or lower run.keep_checkpoints.",
        )


def parameter_count(path: str) -> int:
    """Parameters in the safetensors of a model directory, from their headers alone; 0 where there are none yet."""
    return sum(_tensor_sizes(file) for file in Path(path).expanduser().glob("*.safetensors"))


def _tensor_sizes(file: Path) -> int:
    """Elements in one safetensors file: an 8-byte length, then a JSON header with every tensor's shape."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError):
        return 0
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _nearest_existing(path: str) -> Path:
    directory = Path(path).expanduser().absolute()
    while not directory.exists():
        directory = directory.parent
    return directory


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no limit reads "max"
        return total
