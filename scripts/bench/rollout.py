"""The suite `rollout`: tokens per second of our rollout servers, compared with
vLLM's own offline `LLM.generate`.

Invariant: both sides have the same model, prompts, sampling and number of tokens. They
take turns, each in processes that have started and warmed up.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from statistics import median

from controllers.rollouts.replicas import Replicas
from controllers.system.plan import ClusterShape, resolve_on, rollout_spec
from scripts.bench.inputs import POLICIES, run_with_inputs
from scripts.bench.raw import RawProcess, RawRequests, RawSpec
from scripts.bench.running import ActorAndReplicas, actor_and_replicas, cluster
from scripts.bench.suite import Flags, circumstances, print_json, rounds
from verl_ray.cluster.process_setup import thread_environment
from verl_ray.cluster.waiting import TICK_S
from verl_ray.columns.stages import Prompts
from verl_ray.config.rollout import VLLM_BATCHED_REQUESTS, VLLM_BATCHED_TOKENS
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.rollout.requests import Sampling
from verl_ray.rollout.vllm_environment import environment
from verl_ray.settings.section import resolved
from workers.generation import Generation


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; return the exit code, 0."""
    options = _flags().parse_args(argv)
    overrides = (f"rollout.max_response_tokens={options.tokens}",)
    config = run_with_inputs(options.model, options.dir, overrides)

    figures = {}
    with cluster(config) as (_, shape):
        data = resolve_on(config, shape).data
        source = PromptSource(data.train_sets, policy_tokenizer(config), data, 0)
        prompts = source.next_batch(options.prompts)
        for count in options.replicas:
            name = "1_replica" if count == 1 else f"{count}_replicas"
            figures[name] = measure(config, shape, prompts, count, options.repeats)

    sizes = {name: getattr(options, name) for name in ("prompts", "tokens", "model")}
    print_json({**sizes, **figures, **circumstances()})
    return 0


def measure(
    config: RLConfig, shape: ClusterShape, prompts: Prompts, replicas: int, repeats: int
) -> dict[str, object]:
    """Return tokens per second of the replicas and of as many offline engines.

    They take turns in rounds.
    """
    rollout = config.rollout.model_copy(update={"num_replicas": replicas})
    config = config.model_copy(update={"rollout": rollout})
    with (
        actor_and_replicas(config, shape) as running,
        offline(running, replicas) as engines,
    ):
        running.replicas.sync_weights(0)
        ranges = zip(prompts.offsets, prompts.offsets[1:], strict=False)
        rows = [prompts.tokens[start:end].tolist() for start, end in ranges]
        length = rollout.max_response_tokens
        speeds = []
        for number in rounds(repeats, f"with {replicas}:"):
            online = _generate_online(running.replicas, prompts, config, number)
            speeds.append((online, _generate_offline(engines, rows, length, number)))

    # The first round only warms up.
    online_speeds, offline_speeds = zip(*speeds[1:], strict=True)
    online_median = median(online_speeds)
    offline_median = median(offline_speeds)
    return {
        "servers_tokens_per_s": round(online_median),
        "offline_tokens_per_s": round(offline_median),
        "ratio": round(online_median / offline_median, 3),
        "best_ratio": round(max(online_speeds) / max(offline_speeds), 3),
        "threads_per_engine": running.threads_per_engine,
        "repeats": repeats,
    }


def _generate_online(
    servers: Replicas, prompts: Prompts, config: RLConfig, seed: int
) -> float:
    """Generate one response per prompt, and return tokens per second."""
    rollout = config.rollout
    sampling = Sampling(1.0, 1.0, -1, rollout.max_response_tokens, ())
    settings = Generation(
        "bench", 1, sampling, run_seed=seed, stream_rows=rollout.stream_rows
    )

    start = time.perf_counter()
    job = servers.scheduler.open(prompts, settings)
    while job.num_pending:
        servers.advance(TICK_S)
    lengths = [piece.row("response_length") for piece in job.finished]
    tokens = sum(int(values.sum()) for values in lengths)
    return tokens / (time.perf_counter() - start)


def _generate_offline(
    engines: Sequence[RawProcess], prompts: Sequence[list[int]], length: int, seed: int
) -> float:
    """Let each offline engine generate for its share; return tokens per second."""
    count = len(engines)
    for number, engine in enumerate(engines):
        share = prompts[number::count]
        seeds = [seed * 100_003 + row for row in range(len(share))]
        engine.send(RawRequests(share, [length] * len(share), seeds))
    slowest_s = max(engine.seconds()["gen"] for engine in engines)
    return len(prompts) * length / slowest_s


@contextlib.contextmanager
def offline(running: ActorAndReplicas, count: int) -> Iterator[list[RawProcess]]:
    """Start processes with vLLM's `LLM` in the settings of the replicas."""
    config = running.config
    device = "cuda" if running.on_gpus else "cpu"
    threads = running.threads_per_engine
    variables = thread_environment(threads, os.environ) | environment(
        device, threads, dtype=resolved(config.rollout.dtype)
    )
    all_devices = ",".join(map(str, range(count)))
    devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or all_devices).split(",")

    spec = rollout_spec(config)
    settings = _engine_settings(config, spec.max_model_len, running.on_gpus)
    with contextlib.ExitStack() as processes:
        engines = []
        for index in range(count):
            if running.on_gpus:
                variables["CUDA_VISIBLE_DEVICES"] = devices[index]
            raw = RawSpec(dict(variables), spec.model_path, settings)
            engines.append(processes.enter_context(RawProcess(raw)))
        yield engines


def _engine_settings(
    config: RLConfig, max_model_len: int, on_gpus: bool
) -> dict[str, object]:
    """Return the arguments of `LLM` with which our engine runs, too."""
    own: dict[str, object] = {"enforce_eager": True, "enable_chunked_prefill": False}
    if on_gpus:
        own = {"gpu_memory_utilization": 0.01}
    return {
        "dtype": resolved(config.rollout.dtype),
        "kv_cache_memory_bytes": int(resolved(config.rollout.kv_cache_gib) * 2**30),
        "max_model_len": max_model_len,
        "max_num_seqs": VLLM_BATCHED_REQUESTS,
        "max_num_batched_tokens": max(max_model_len, VLLM_BATCHED_TOKENS),
        **own,
    }


def _flags() -> Flags:
    flags = Flags(
        "rollout",
        "Measure tokens per second of the rollout servers, compared with vLLM's"
        " LLM.generate on the same prompts. All responses have their full length.",
    )
    flags.choice("--model", POLICIES, "parameters of the policy")
    flags.number("--prompts", 256, "prompts")
    flags.number("--tokens", 64, "tokens of each response")
    flags.add_argument(
        "--replicas",
        type=int,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="engines (1 and 2)",
    )
    flags.number("--repeats", 5, "rounds that count")
    flags.folder()
    return flags
