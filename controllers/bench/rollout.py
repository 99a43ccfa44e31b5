"""`verl-ray bench rollout`: tokens per second of our rollout servers, compared with
vLLM's own offline `LLM.generate`.

Invariant: both sides have the same model, prompts, sampling and number of tokens. They
take turns, each in processes that have started and warmed up.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from controllers.bench.inputs import POLICIES, run_with_inputs
from controllers.bench.running import ActorAndReplicas, actor_and_replicas, cluster
from controllers.bench.suite import Flags, circumstances, print_json, rounds
from controllers.rollouts.replicas import Replicas
from controllers.system.plan import ClusterShape, resolve_on, rollout_spec
from verl_ray.cluster.waiting import TICK_S
from verl_ray.config.rollout import VLLM_BATCHED_REQUESTS, VLLM_BATCHED_TOKENS
from verl_ray.config.section import resolved
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.chat_templates import policy_tokenizer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.stages import Prompts
from verl_ray.rollout.requests import Sampling
from workers.rollout import Generation


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
        offline(running, prompts, replicas) as engines,
    ):
        running.replicas.publish(0)
        speeds = []
        for number in rounds(repeats, f"with {replicas}:"):
            online = _generate_online(running.replicas, prompts, config, number)
            speeds.append((online, _generate_offline(engines, number)))

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
    job = servers.generate(prompts, settings)
    while job.num_pending:
        servers.advance(TICK_S)
    lengths = [piece.row("response_length") for piece in job.finished]
    tokens = sum(int(values.sum()) for values in lengths)
    return tokens / (time.perf_counter() - start)


def _generate_offline(engines: list[subprocess.Popen[str]], seed: int) -> float:
    """Let all offline engines generate, and return their tokens per second."""
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write(f"{seed}\n")
        engine.stdin.flush()

    reports = [_read_report(engine) for engine in engines]
    tokens = sum(report["tokens"] for report in reports)
    return tokens / max(report["seconds"] for report in reports)


def _read_report(engine: subprocess.Popen[str]) -> dict[str, float]:
    assert engine.stdout is not None
    for line in engine.stdout:  # vLLM may print other lines
        if line.startswith("{"):
            report: dict[str, float] = json.loads(line)
            return report
    raise RuntimeError(f"the offline engine ended with {engine.wait()}")


@contextlib.contextmanager
def offline(
    running: ActorAndReplicas, prompts: Prompts, count: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes with an `LLM` and a share of the prompts each.

    A process generates whenever it reads a seed from its stdin. Its settings are those
    of the replicas.
    """
    from verl_ray.rollout.vllm_setup import environment

    config = running.config
    spec = rollout_spec(config)
    task: dict[str, object] = {
        "model": spec.model_path,
        "dtype": resolved(config.rollout.dtype),
        "engine": _engine_settings(config, spec.max_model_len, running.on_gpus),
        "max_tokens": config.rollout.max_response_tokens,
    }
    variables = environment(
        "cuda" if running.on_gpus else "cpu",
        running.threads_per_engine,
        dtype=config.rollout.dtype,
    )
    all_devices = ",".join(map(str, range(count)))
    devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or all_devices).split(",")
    ranges = zip(prompts.offsets, prompts.offsets[1:], strict=False)
    rows = [prompts.tokens[start:end].tolist() for start, end in ranges]

    with contextlib.ExitStack() as cleanup:
        engines = []
        for index in range(count):
            path = Path(config.run.dir) / f"offline-{index}.json"
            path.write_text(json.dumps(task | {"prompts": rows[index::count]}))
            if running.on_gpus:
                variables["CUDA_VISIBLE_DEVICES"] = devices[index]
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **variables, "OMP_WAIT_POLICY": "PASSIVE"},
            )
            engines.append(cleanup.enter_context(process))
            cleanup.callback(process.kill)
        yield engines


def _engine_settings(
    config: RLConfig, max_model_len: int, on_gpus: bool
) -> dict[str, object]:
    """Return the arguments of `LLM` with which our engine runs, too."""
    own: dict[str, object] = {"enforce_eager": True, "enable_chunked_prefill": False}
    if on_gpus:
        own = {"gpu_memory_utilization": 0.01}
    return {
        "kv_cache_memory_bytes": int(resolved(config.rollout.kv_cache_gib) * 2**30),
        "max_model_len": max_model_len,
        "max_num_seqs": VLLM_BATCHED_REQUESTS,
        "max_num_batched_tokens": max(max_model_len, VLLM_BATCHED_TOKENS),
        **own,
    }


def _serve(path: str) -> None:
    """Run an offline engine in its own process.

    The loop consumes seeds from stdin, generates all prompts for each, and prints the
    time as JSON. It ends when stdin is closed.
    """
    from vllm import LLM, SamplingParams

    task = json.loads(Path(path).read_text())
    llm = LLM(
        task["model"],
        dtype=task["dtype"],
        skip_tokenizer_init=True,
        seed=0,
        **task["engine"],
    )
    requests = [{"prompt_token_ids": tokens} for tokens in task["prompts"]]

    for line in sys.stdin:
        sampling = [
            SamplingParams(
                temperature=1.0,
                max_tokens=task["max_tokens"],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                seed=int(line) * 100_003 + row,
            )
            for row in range(len(requests))
        ]
        start = time.perf_counter()
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start

        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


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


if __name__ == "__main__":
    _serve(sys.argv[1])
