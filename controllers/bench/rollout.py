"""`verl-ray bench rollout`: tokens per second of our rollout servers, compared with
vLLM's own offline `LLM.generate`.

Invariant: both sides have the same model, prompts, sampling and number of tokens. They
take turns, each in processes that have started and warmed up. Deliberately not here:
rewards and training.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from controllers.bench.inputs import POLICIES, run_with_inputs
from controllers.bench.step import shown_versions
from controllers.rollouts.replicas import Replicas
from controllers.system.build import build_replicas
from controllers.system.plan import (
    ClusterShape,
    plan_processes,
    resolve_on,
    rollout_spec,
)
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.cluster.waiting import TICK_S
from verl_ray.config.rollout import VLLM_BATCHED_REQUESTS, VLLM_BATCHED_TOKENS
from verl_ray.config.section import resolved
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.chat_templates import policy_tokenizer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.stages import Prompts
from verl_ray.rollout.requests import Sampling
from workers.rollout import Generation

ROLES = ("actor", "rollout")


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; return the exit code, 0."""
    options = _parser().parse_args(argv)
    overrides = (f"rollout.max_response_tokens={options.tokens}",)
    config = run_with_inputs(options.model, options.dir, overrides)

    log_dir = Path(config.run.dir) / "logs"
    with Session.open(config.ray.address, log_dir=log_dir) as session:
        stop_on_signals()
        data = resolve_on(config, ClusterShape.of(session)).data
        tokenizer = policy_tokenizer(config)
        source = PromptSource(data.train_sets, tokenizer, data, 0)
        prompts = source.next_batch(options.prompts)

        figures = {}
        for count in options.replicas:
            name = "1_replica" if count == 1 else f"{count}_replicas"
            figures[name] = measure(config, session, prompts, count, options.repeats)

    result = {
        "prompts": options.prompts,
        "tokens": options.tokens,
        "model": options.model,
        **figures,
        "cores": len(os.sched_getaffinity(0)),
        "versions": shown_versions(),
    }
    print(json.dumps(result, indent=2))
    return 0


def measure(
    config: RLConfig, session: Session, prompts: Prompts, replicas: int, repeats: int
) -> dict[str, object]:
    """Return tokens per second of the replicas and of as many offline engines.

    They take turns in rounds.
    """
    rollout = config.rollout.model_copy(update={"num_replicas": replicas})
    config = config.model_copy(update={"rollout": rollout})
    shape = ClusterShape.of(session)
    config = resolve_on(config, shape)
    on_gpus = shape.gpus > 0

    plan = plan_processes(config, shape)
    roles = {name: role for name, role in plan.roles.items() if name in ROLES}
    set_names = {role.processes for role in roles.values()}
    sets = [processes for processes in plan.sets if processes.name in set_names]
    (engine_set,) = [processes for processes in sets if processes.name == "rollout"]
    threads = engine_set.threads_per_rank

    groups = start_groups(
        sets,
        list(roles.values()),
        stall_s=config.run.stall_s,
        log_dir=Path(config.run.dir) / "logs",
    )
    engines = offline(config, prompts, replicas, threads, on_gpus=on_gpus)
    with groups, engines as processes:
        actor = groups[roles["actor"]]
        servers = build_replicas(
            config, groups.replicas(roles["rollout"]), actor, [actor], on_gpus=on_gpus
        )
        servers.publish(0)

        online_speeds = []
        offline_speeds = []
        for number in range(repeats + 1):
            online_speed = _generate_online(servers, prompts, config, number)
            offline_speed = _generate_offline(processes, number)
            if number > 0:  # the first round only warms up
                online_speeds.append(online_speed)
                offline_speeds.append(offline_speed)
            print(f"{number} of {repeats} with {replicas}", file=sys.stderr, flush=True)

    online_median = median(online_speeds)
    offline_median = median(offline_speeds)
    return {
        "servers_tokens_per_s": round(online_median),
        "offline_tokens_per_s": round(offline_median),
        "ratio": round(online_median / offline_median, 3),
        "best_ratio": round(max(online_speeds) / max(offline_speeds), 3),
        "threads_per_engine": threads,
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
    config: RLConfig, prompts: Prompts, count: int, threads: int, *, on_gpus: bool
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes with an `LLM` and a share of the prompts each.

    A process generates whenever it reads a seed from its stdin.
    """
    from verl_ray.rollout.vllm_setup import environment

    spec = rollout_spec(config)
    engine_settings: dict[str, object] = {
        "kv_cache_memory_bytes": int(resolved(config.rollout.kv_cache_gib) * 2**30),
        "max_model_len": spec.max_model_len,
        "max_num_seqs": VLLM_BATCHED_REQUESTS,
        "max_num_batched_tokens": max(spec.max_model_len, VLLM_BATCHED_TOKENS),
    }
    if on_gpus:
        engine_settings["gpu_memory_utilization"] = 0.01
    else:
        # Our engine has the same settings on a CPU.
        engine_settings["enforce_eager"] = True
        engine_settings["enable_chunked_prefill"] = False

    all_devices = ",".join(map(str, range(count)))
    devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or all_devices).split(",")
    rows = [tokens.tolist() for tokens in prompts_of(prompts)]

    with contextlib.ExitStack() as cleanup:
        engines = []
        for index in range(count):
            task = {
                "model": spec.model_path,
                "dtype": resolved(config.rollout.dtype),
                "engine": engine_settings,
                "max_tokens": config.rollout.max_response_tokens,
                "prompts": rows[index::count],
            }
            path = Path(config.run.dir) / f"offline-{index}.json"
            path.write_text(json.dumps(task))

            device = "cuda" if on_gpus else "cpu"
            variables = environment(device, threads, dtype=config.rollout.dtype)
            if on_gpus:
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


def prompts_of(prompts: Prompts) -> list[Any]:
    """Return the tokens of each prompt, int32 [tokens]."""
    ranges = zip(prompts.offsets, prompts.offsets[1:], strict=False)
    return [prompts.tokens[start:end] for start, end in ranges]


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray bench rollout",
        description=(
            "Measure tokens per second of the rollout servers, compared with vLLM's"
            " LLM.generate on the same prompts. All responses have their full length."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        choices=list(POLICIES),
        default="1m",
        help="parameters of the policy (1m)",
    )
    parser.add_argument(
        "--prompts", type=int, default=256, metavar="N", help="prompts (256)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens of each response (64)",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="engines (1 and 2)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="rounds that count (5)"
    )
    parser.add_argument(
        "--dir",
        default="outputs/bench",
        help="where its inputs are kept (outputs/bench)",
    )
    return parser


if __name__ == "__main__":
    _serve(sys.argv[1])
