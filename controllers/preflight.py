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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from verl_ray.config.algebra import batch_algebra
from verl_ray.config.rules import ATTENTION_HEAD_SIZES, VLLM_ARGS_FIXED_ON_A_CPU
from verl_ray.config.schema import (
    Config,
    FsdpBackend,
    FunctionReward,
    HttpReward,
    JudgeReward,
    ModelReward,
    ModelRole,
    RLConfig,
    RolloutEngineConfig,
    SupervisedRole,
    TinyModelConfig,
)
from verl_ray.config.suggest import closest, either, nearest_divisors
from verl_ray.data.arithmetic import ALPHABET
from verl_ray.errors import Problem
from verl_ray.rewards.functions import spec_problem
from verl_ray.rewards.remote import url_problem

DATA_SUFFIXES = (".jsonl", ".parquet")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

VALUE_HEAD = "score.weight"
"""As in `verl_ray.models.role_model`, which imports torch."""

INPUTS_STARTED, INPUTS_COMPLETE = "made-by-verl_ray", "complete"
"""Markers in run.dir/inputs: the run made this folder and may delete it, and everything is in it."""

MIB, GIB = 2**20, 2**30
PROCESS_BYTES = {
    "trainer": int(0.3 * GIB),
    "rollout": int(0.45 * GIB),
    "judge": int(0.45 * GIB),
    "reward": int(0.25 * GIB),
}
"""Memory of a process alone (unique set size) but for its model: in runs of a model of 0.1 million parameters on a CPU
it was 303, 504 and 279 MiB, of 458, 665 and 418 MiB resident; rounded down."""
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


def preflight(config: Config, machine: Machine | None, *, evaluates: bool = False) -> Findings:
    """Check files, and the resources of `machine` unless it is None. Inputs that the run makes are not missing, unless
    the command only `evaluates` and makes none."""
    findings = Findings()
    findings.problems += _inputs_problems(config, evaluates)
    findings.problems += _data_problems(config)
    findings.problems += _run_dir_problems(config)
    for key, path in _model_paths(config).items():
        findings.problems += _model_problems(key, path, config)
    findings.problems += _value_head_problems(config)
    findings.problems += _sequence_problems(config)
    findings.problems += _token_problems(config)
    if isinstance(config, RLConfig):
        for section, engine in _engines(config).items():
            findings.problems += _engine_problems(section, engine, machine)
        findings.problems += _judge_problems(config)
        specs = _functions(config).items()
        findings.problems += [problem for key, spec in specs if (problem := spec_problem(spec, key)) is not None]
        urls = {f"{key}.url": one.url for key, one in config.graders.items() if isinstance(one, HttpReward)}.items()
        findings.problems += [problem for key, url in urls if (problem := url_problem(url, key)) is not None]
    findings.problems += _disk_problems(config)
    findings.warnings += _idle_ranks(config)
    if machine is not None:
        findings.problems += _memory_problems(config, machine)
        if machine.gpus:
            findings.problems += _gpu_problems(config, machine)
        else:
            findings.problems += _vllm_problems(config)
            findings.warnings += _cpu_warnings(config, machine)
    return findings


def _functions(config: RLConfig) -> dict[str, str]:
    """Every reward function that is named, by its key."""
    given = {key: one.functions for key, one in config.graders.items() if isinstance(one, FunctionReward)}
    if config.evaluation.functions is not None:
        given["evaluation"] = config.evaluation.functions
    return {f"{key}.functions.{source}": spec for key, functions in given.items() for source, spec in functions.items()}


# ------------------------------------------------------------------------------------------------------ files


def _model_paths(config: Config) -> dict[str, str]:
    """The model directories that must exist already, each under the key that says so."""
    made = isinstance(config, RLConfig) and config.prepare is not None
    roles: dict[str, ModelRole | JudgeReward] = {**config.model_roles}
    if isinstance(config, RLConfig):
        roles |= config.judges
    paths: dict[str, str] = {}
    for name, role in roles.items():
        shared = role.model.path == config.model.path
        if not (shared and made):
            paths["model.path" if shared else f"{name}.model.path"] = role.model.path
    return paths


def _model_problems(key: str, path: str, config: Config) -> Iterator[Problem]:
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
    if key.startswith("reward") and isinstance(config, RLConfig):
        return  # rows of its own tokenizer: those that are too long get no score, and are counted
    longest, most = batch_algebra(config).max_row_tokens, settings.get("max_position_embeddings")
    if isinstance(most, int) and longest > most:
        length = "rollout.max_response_tokens" if isinstance(config, RLConfig) else config.longest_row[1]
        rule = f"the model has {most} positions, and a row may have {longest} tokens"
        yield Problem(key, path, rule, f"Lower {length} by {longest - most}, or take another model.")


@dataclass(frozen=True)
class _Engine:
    """A rollout engine that a run starts."""

    config: RolloutEngineConfig
    path_key: str
    path: str


def _engines(config: Config) -> dict[str, _Engine]:
    """By the key of their section."""
    if not isinstance(config, RLConfig):
        return {}
    shared = config.actor.model.path == config.model.path
    key = "model.path" if shared else "actor.model.path"
    return {"rollout": _Engine(config.rollout, key, config.actor.model.path)} | {
        f"{name}.engine": _Engine(judge.engine, f"{name}.model.path", judge.model.path)
        for name, judge in config.judges.items()
    }


def _engine_problems(section: str, engine: _Engine, machine: Machine | None) -> Iterator[Problem]:
    """What a rollout engine needs of its model."""
    settings = _json(Path(engine.path).expanduser() / "config.json")
    heads, hidden = settings.get("num_attention_heads"), settings.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    parallel = engine.config.tensor_parallel
    if heads % parallel:
        rule = f"it must divide the {heads} attention heads of the model"
        nearest = either(nearest_divisors(heads, parallel))
        yield Problem(f"{section}.tensor_parallel", parallel, rule, f"The nearest that do are {nearest}.")
    size = settings.get("head_dim") or hidden // heads
    if machine is not None and machine.gpus == 0 and size not in ATTENTION_HEAD_SIZES:
        rule = f"the model's head size is {size}, which the rollout engine's attention does not take on a CPU"
        yield Problem(engine.path_key, engine.path, rule, f"Take one of {either(ATTENTION_HEAD_SIZES)}.")


def _judge_problems(config: RLConfig) -> Iterator[Problem]:
    """Whether a judge's question and answer fit its model."""
    for name, judge in config.judges.items():
        longest = judge.max_prompt_tokens + judge.max_response_tokens
        most = _json(Path(judge.model.path).expanduser() / "config.json").get("max_position_embeddings")
        if isinstance(most, int) and longest > most:
            rule = f"the judge has {most} positions, and question and answer may have {longest} tokens"
            fix = f"Lower it or {name}.max_response_tokens by {longest - most} in all, or take another judge."
            yield Problem(f"{name}.max_prompt_tokens", judge.max_prompt_tokens, rule, fix)


def _sequence_problems(config: Config) -> Iterator[Problem]:
    """Ranks that compute the same rows share out the attention heads of the model."""
    for name, role in config.model_roles.items():
        settings = _json(Path(role.model.path).expanduser() / "config.json")
        heads = settings.get("num_attention_heads")
        if role.peers == 1 or not isinstance(heads, int):
            continue
        shared = settings.get("num_key_value_heads", heads)
        assert isinstance(shared, int), "transformers reads it as a number"

        def fits(peers: int, heads: int = heads, shared: int = shared) -> bool:
            return heads % peers == 0 and (shared % peers == 0 or peers % shared == 0)

        if not fits(role.peers):
            sizes = [size for size in range(1, heads + 1) if fits(size) and role.num_ranks % size == 0]
            rule = f"these ranks share out the model's {heads} attention heads and {shared} key-value heads"
            yield Problem(f"{name}.backend.sequence_parallel", role.peers, rule, f"Use {either(sizes)}.")


def _value_head_problems(config: Config) -> Iterator[Problem]:
    """Whether a model gives one number per text. A critic's, or one that is to become a reward model, may give none."""
    fix = "Give a sequence-classification model with one label; `train --config-name reward_model` makes one."
    for name, role in config.model_roles.items():
        if name != "critic" and not name.startswith("reward"):
            continue
        key, path, shapes = f"{name}.model.path", role.model.path, tensor_shapes(role.model.path)
        labels = shapes[VALUE_HEAD][0] if VALUE_HEAD in shapes else None
        if labels is None and isinstance(role, ModelReward) and (shapes or path == config.model.path):
            yield Problem(key, path, f"this model has no {VALUE_HEAD}: it is no reward model", fix)
        elif labels not in (None, 1):
            yield Problem(key, path, f"this model gives {labels} numbers per text (labels), and a score is one", fix)


def _token_problems(config: Config) -> Iterator[Problem]:
    """Whether the models that read rollouts as they are know the actor's tokens. A reward model has its own."""
    actor = config.actor.model.path if isinstance(config, RLConfig) else None
    for name, role in config.model_roles.items():
        path = role.model.path
        if actor is None or path == actor or isinstance(role, ModelReward):
            continue
        written, read = _token_ids(actor), _token_ids(path)
        if written and read and not written.items() <= read.items():
            rule = "it reads rollouts in the actor's tokens, and its tokenizer numbers them otherwise"
            fix = "Give a model with the actor's tokenizer, such as one that was trained from the actor's model."
            yield Problem(f"{name}.model.path", path, rule, fix)


def _token_ids(path: str) -> dict[object, object]:
    """The number of every token in a model directory's tokenizer.json; empty where that does not say."""
    content = _json(Path(path).expanduser() / "tokenizer.json")
    model, added = content.get("model"), content.get("added_tokens")
    known = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[object, object] = {}
    if isinstance(known, dict):
        ids |= known
    elif isinstance(known, list):  # pairs of a piece and its score
        ids |= {piece[0]: number for number, piece in enumerate(known)}
    return ids | {token["content"]: token["id"] for token in (added if isinstance(added, list) else ())}


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


def inputs_folder(config: RLConfig) -> Path:
    """Where a run with `prepare` keeps the inputs that it makes."""
    return Path(config.run.dir) / "inputs"


def foreign_inputs(config: RLConfig) -> Iterator[Problem]:
    """A run makes its inputs anew in a folder of its own, never in one that something else wrote."""
    folder = inputs_folder(config)
    if (folder / INPUTS_COMPLETE).exists():
        return
    own = (folder / INPUTS_STARTED).exists()
    empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if folder.is_symlink() or not (own or empty):
        rule = f"the run makes its inputs in {folder}, which is there and which no run has made"
        yield Problem("run.dir", config.run.dir, rule, "Give another run.dir, or move that folder away.")


def _inputs_problems(config: Config, evaluates: bool) -> Iterator[Problem]:
    if not isinstance(config, RLConfig) or config.prepare is None:
        return
    if evaluates and not (inputs_folder(config) / INPUTS_COMPLETE).exists():
        yield Problem(
            "model.path",
            config.model.path,
            "training makes this model, and there is none yet",
            "Give run.dir of a finished run; or prepare=null with model.path, data.train_path and data.validation_path "
            "of your own.",
        )
    elif not evaluates:
        yield from foreign_inputs(config)


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
        apart = {name: one.engine.num_replicas * one.engine.tensor_parallel for name, one in config.judges.items()}
        if config.placement.kind == "colocated":
            largest = max(roles, key=lambda name: roles[name])
            return {largest: roles[largest]} | apart
        return roles | apart
    return roles


def _ranks_key(role: str, config: Config) -> str:
    """The key that says how many ranks or replicas a role has."""
    if role == "rollout":
        return "rollout.num_replicas"
    judges = config.judges if isinstance(config, RLConfig) else {}
    return f"{role}.engine.num_replicas" if role in judges else f"{role}.num_ranks"


def _vllm_problems(config: Config) -> Iterator[Problem]:
    for section, engine in _engines(config).items():
        arguments = engine.config.vllm_args
        for name in sorted(arguments.keys() & VLLM_ARGS_FIXED_ON_A_CPU.keys()):
            rule = f"this argument may not change on a CPU: {VLLM_ARGS_FIXED_ON_A_CPU[name]}"
            yield Problem(f"{section}.vllm_args.{name}", arguments[name], rule, "Leave it out.")


def _gpu_problems(config: Config, machine: Machine) -> Iterator[Problem]:
    if isinstance(config, RLConfig) and config.placement.kind == "colocated" and config.rollout.tensor_parallel > 1:
        parallel = config.rollout.tensor_parallel
        rule = "with placement=colocated a rollout engine shares exactly one GPU with a trainer rank"
        fix = f"Use placement=separate, or rollout.tensor_parallel=1 and {parallel} times the rollout.num_replicas."
        yield Problem("rollout.tensor_parallel", parallel, rule, fix)
    ranks = _ranks(config)
    needed = sum(ranks.values())
    if needed > machine.gpus:
        largest = max(ranks, key=lambda name: ranks[name])
        key = _ranks_key(largest, config)
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
    """What certainly does not fit: processes, weights, optimizer and caches, without activations."""
    shared = _shared_memory_bytes(config)
    if shared > machine.shm_free_bytes:
        yield Problem(
            "/dev/shm",
            f"{machine.shm_free_bytes / MIB:.0f} MiB free",
            f"rows and weights travel through shared memory, about {shared / MIB:.0f} MiB of it",
            f"Start the container with --shm-size={math.ceil(shared / GIB) + 1}g, or remount /dev/shm larger.",
        )
    if machine.gpus:
        return
    processes = _processes(config)
    idle = sum(one.nbytes for one in processes)
    needed = idle + sum(_host_bytes(role, config) for role in config.model_roles.values())
    needed += sum(_engine_bytes(engine, config) for engine in _engines(config).values())
    if needed <= machine.memory_bytes:
        return
    has = f"This machine has {machine.memory_bytes / GIB:.1f} GiB"
    if 2 * idle > needed:
        most = max(processes, key=lambda one: one.nbytes)
        kinds = Counter[str]()
        for one in processes:
            kinds[one.kind] += one.count
        split = " + ".join(f"{kind} {count}" for kind, count in kinds.items())
        rule = f"{kinds.total()} processes ({split}) and what they hold take at least {needed / GIB:.1f} GiB"
        yield Problem(most.key, most.value, rule, f"{has}: use fewer, or set ray.address to a cluster.")
    else:
        rule = f"processes, weights, optimizer and caches take at least {needed / GIB:.1f} GiB before any activation"
        yield Problem("model.path", config.model.path, rule, f"{has}: take a smaller model or rollout.kv_cache_gib.")


@dataclass(frozen=True)
class _Processes:
    """Processes of one kind, and the key that says how many."""

    kind: str
    key: str
    value: int
    each: int = 1
    """Processes per one of them."""

    @property
    def count(self) -> int:
        return self.value * self.each

    @property
    def nbytes(self) -> int:
        return self.count * PROCESS_BYTES[self.kind]


def _processes(config: Config) -> list[_Processes]:
    """All of a run; colocated roles on one backend share theirs."""
    colocated = isinstance(config, RLConfig) and config.placement.kind == "colocated"
    homes: dict[str, _Processes] = {}
    for name, role in config.model_roles.items():
        home = role.backend.kind if colocated else name
        homes.setdefault(home, _Processes("trainer", f"{name}.num_ranks", role.num_ranks))
    found = list(homes.values())
    for section, engine in _engines(config).items():
        kind, replicas = ("rollout" if section == "rollout" else "judge"), engine.config.num_replicas
        found.append(_Processes(kind, f"{section}.num_replicas", replicas, engine.config.tensor_parallel))
    if isinstance(config, RLConfig):
        for name, one in config.graders.items():
            if isinstance(one, FunctionReward | HttpReward):
                found.append(_Processes("reward", f"{name}.num_ranks", one.num_ranks))
    return found


def _host_bytes(role: ModelRole, config: Config) -> int:
    """Weights and training state of a role on all ranks: whole on each of them, or one copy in shards."""
    copies = role.num_ranks
    if isinstance(role.backend, FsdpBackend) and role.backend.sharding != "none":
        copies //= role.backend.shard_size or role.num_ranks
    width = BYTES_PER_TRAINED_PARAMETER if isinstance(role, SupervisedRole) else 4
    return _parameters(role.model.path, config) * width * copies


def _engine_bytes(engine: _Engine, config: Config) -> int:
    """Weights, split over the ranks of a replica, and the key-value cache of every rank."""
    width, replicas = (4 if engine.config.dtype == "float32" else 2), engine.config.num_replicas
    cache = engine.config.kv_cache_gib * GIB * replicas * engine.config.tensor_parallel
    return _parameters(engine.path, config) * width * replicas + int(cache)


def _parameters(path: str, config: Config) -> int:
    """Of the model that is there, or else of the one that the run will make."""
    found = parameter_count(path)
    if found or not isinstance(config, RLConfig) or config.prepare is None or path != config.model.path:
        return found
    return tiny_parameter_count(config.prepare.model)


def tiny_parameter_count(model: TinyModelConfig) -> int:
    """Parameters of the model that `verl_ray.models.tiny` makes for arithmetic (Qwen3: norms on queries and keys)."""
    vocabulary = len(ALPHABET) + 2  # padding and the end of a text
    hidden, size = model.hidden_size, model.head_size
    attention = 2 * hidden * size * (model.num_heads + model.num_kv_heads) + 2 * size
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    return vocabulary * hidden * (1 if model.tie_embeddings else 2) + model.num_layers * layer + hidden


WIRE_BUCKET_BYTES = 256 << 20
"""Of the weights that travel to the rollout engine at once: a bucket's calls cost little beside its copy, and it is
small beside any model. A single larger tensor takes more."""


def _shared_memory_bytes(config: Config) -> int:
    sizes = batch_algebra(config)
    rows = max(sizes.rows * sizes.max_row_tokens * BYTES_PER_TOKEN_OF_A_ROW, OBJECT_STORE_FLOOR_BYTES)
    if not isinstance(config, RLConfig):
        return rows
    # The wire has two slots of a bucket each; weights travel as the trainer holds them, in float32.
    return rows + 2 * min(4 * _parameters(config.actor.model.path, config), WIRE_BUCKET_BYTES)


def _disk_problems(config: Config) -> Iterator[Problem]:
    free = shutil.disk_usage(_nearest_existing(config.run.dir)).free
    trained = [role for role in config.model_roles.values() if isinstance(role, SupervisedRole)]
    checkpoint = sum(_parameters(role.model.path, config) for role in trained) * BYTES_PER_SAVED_PARAMETER
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
    """Parameters in the safetensors of a model directory; 0 where there are none yet."""
    return sum(math.prod(shape) for shape in tensor_shapes(path).values())


def tensor_shapes(path: str) -> dict[str, list[int]]:
    """The shape of every tensor in the safetensors of a model directory by its name, from their headers alone."""
    return {name: shape for file in Path(path).expanduser().glob("*.safetensors") for name, shape in _header(file)}


def _header(file: Path) -> Iterator[tuple[str, list[int]]]:
    """One safetensors file begins with a length of 8 bytes, and a JSON object with every tensor's shape."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError):
        return
    yield from ((name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


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
