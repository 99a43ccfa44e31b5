"""`verl-ray bench rollout`: tokens per second of our rollout servers, beside vLLM's own offline `LLM.generate`.

Invariant: the same model, prompts, sampling and number of tokens on both sides, in turns, each in processes that are up
and warm. Deliberately not here: rewards and training.
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
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from controllers.bench.step import MODELS, configuration, make_inputs, shown_versions
from controllers.system.build import Shape, own_replicas, plan_processes, resolve_on, rollout_spec
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.cluster.waiting import TICK_S
from verl_ray.config.rollout import VLLM_BATCHED_REQUESTS, VLLM_BATCHED_TOKENS
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.prompts import PromptSource
from verl_ray.data.stages import Prompts
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.rollout.requests import Sampling
from workers.rollout import Generation

ROLES = ("actor", "rollout")


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; returns 0."""
    given = _parser().parse_args(argv)
    overrides = (f"rollout.max_response_tokens={given.tokens}",)
    config = configuration(given.model, "engine", Path(given.dir), overrides)
    with contextlib.redirect_stdout(sys.stderr):  # what is printed there is JSON
        make_inputs(config, warm_start=False)
    with Session.open(config.ray.address) as session:
        stop_on_signals()
        data = resolve_on(config, Shape.of(session)).data
        source = PromptSource(data.train_path, load_tokenizer(config.actor.model.path), data, 0)
        prompts = source.next_batch(given.prompts)
        figures = {
            f"{count}_replica{'s' * (count > 1)}": measure(config, session, prompts, count, given.repeats)
            for count in given.replicas
        }
    asked = {"prompts": given.prompts, "tokens": given.tokens, "model": given.model}
    print(
        json.dumps({**asked, **figures, "cores": len(os.sched_getaffinity(0)), "versions": shown_versions()}, indent=2)
    )
    return 0


def measure(config: RLConfig, session: Session, prompts: Prompts, replicas: int, repeats: int) -> dict[str, object]:
    """Tokens per second of so many replicas and of as many offline engines, in turns."""
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_replicas": replicas})})
    shape = Shape.of(session)
    config = resolve_on(config, shape)
    plan = plan_processes(config, shape)
    roles = {name: role for name, role in plan.roles.items() if name in ROLES}
    homes = {role.processes for role in roles.values()}
    sets = [one for one in plan.sets if one.name in homes]
    threads = next(one.threads_per_rank for one in sets if one.name == "rollout")
    sampling = Sampling(1.0, 1.0, -1, config.rollout.max_response_tokens, ())
    what = Generation("bench", 1, sampling, run_seed=0, stream_rows=config.rollout.stream_rows)
    groups = start_groups(
        sets,
        list(roles.values()),
        stall_s=config.run.stall_s,
        log_dir=Path(config.run.dir) / "logs",
    )
    ours, theirs = [], []
    on_gpus, actor = shape.gpus > 0, groups[roles["actor"]]
    with groups, offline(config, prompts, replicas, threads, on_gpus=on_gpus) as engines:
        servers = own_replicas(config, groups.replicas(roles["rollout"]), actor, [actor], on_gpus=on_gpus)
        servers.publish(0)
        for number in range(repeats + 1):
            began = time.perf_counter()
            drawing = servers.draw(prompts, replace(what, run_seed=number))
            while drawing.owed:
                servers.advance(TICK_S)
            tokens = sum(int(piece.row("response_length").sum()) for piece in drawing.finished)
            seconds = time.perf_counter() - began
            told = [_draw(engine, number) for engine in _begin(engines, number)]
            if number:  # the first of each is not timed
                ours.append(tokens / seconds)
                theirs.append(sum(one["tokens"] for one in told) / max(one["seconds"] for one in told))
            print(f"{number} of {repeats} with {replicas}", file=sys.stderr, flush=True)
    return {
        "servers_tokens_per_s": round(median(ours)),
        "offline_tokens_per_s": round(median(theirs)),
        "ratio": round(median(ours) / median(theirs), 3),
        "best_ratio": round(max(ours) / max(theirs), 3),
        "threads_per_engine": threads,
        "repeats": repeats,
    }


@contextlib.contextmanager
def offline(
    config: RLConfig, prompts: Prompts, count: int, threads: int, *, on_gpus: bool
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that hold an `LLM` each and a share of the prompts, and draw when a line tells them to."""
    from verl_ray.rollout.vllm_setup import environment

    spec = rollout_spec(config)
    rows = [tokens.tolist() for tokens in prompts_of(prompts)]
    cpu = {"enforce_eager": True, "enable_chunked_prefill": False}  # as our engine
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    with contextlib.ExitStack() as started:
        engines = []
        for index in range(count):
            work = {
                "model": spec.model_path,
                "dtype": config.rollout.dtype,
                "engine": {
                    "kv_cache_memory_bytes": int(config.rollout.kv_cache_gib * 2**30),
                    "max_model_len": spec.max_model_len,
                    "max_num_seqs": VLLM_BATCHED_REQUESTS,
                    "max_num_batched_tokens": max(spec.max_model_len, VLLM_BATCHED_TOKENS),
                    **({"gpu_memory_utilization": 0.01} if on_gpus else cpu),
                },
                "max_tokens": config.rollout.max_response_tokens,
                "prompts": rows[index::count],
            }
            variables = environment("cuda" if on_gpus else "cpu", threads)
            if on_gpus:
                variables["CUDA_VISIBLE_DEVICES"] = visible[index]
            path = Path(config.run.dir) / f"offline-{index}.json"
            path.write_text(json.dumps(work))
            engines.append(
                started.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-m", __name__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        text=True, env={**os.environ, **variables, "OMP_WAIT_POLICY": "PASSIVE"},
                    )
                )
            )  # fmt: skip
            started.callback(engines[-1].kill)
        yield engines


def prompts_of(prompts: Prompts) -> list[Any]:
    """The tokens of each prompt."""
    return [prompts.tokens[start:end] for start, end in zip(prompts.offsets, prompts.offsets[1:], strict=False)]


def _begin(engines: list[subprocess.Popen[str]], seed: int) -> list[subprocess.Popen[str]]:
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write(f"{seed}\n")
        engine.stdin.flush()
    return engines


def _draw(engine: subprocess.Popen[str], _: int) -> dict[str, float]:
    assert engine.stdout is not None
    for line in engine.stdout:  # vLLM may say something, too
        if line.startswith("{"):
            told: dict[str, float] = json.loads(line)
            return told
    raise RuntimeError(f"the offline engine ended with {engine.wait()}")


def _hold(path: str) -> None:
    """In a process of its own: draw all prompts for each seed that comes, and tell how long that took."""
    from vllm import LLM, SamplingParams

    work = json.loads(Path(path).read_text())
    llm = LLM(work["model"], dtype=work["dtype"], skip_tokenizer_init=True, seed=0, **work["engine"])
    for line in sys.stdin:
        sampling = [
            SamplingParams(
                temperature=1.0, max_tokens=work["max_tokens"], ignore_eos=True, logprobs=0, detokenize=False,
                seed=int(line) * 100_003 + row,
            )
            for row in range(len(work["prompts"]))
        ]  # fmt: skip
        asked = [{"prompt_token_ids": tokens} for tokens in work["prompts"]]
        began = time.perf_counter()
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray bench rollout",
        description="Tokens per second of the rollout servers beside vLLM's LLM.generate on the same prompts, all "
        "responses drawn to their full length.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=list(MODELS), default="1m", help="parameters of the policy (1m)")
    parser.add_argument("--prompts", type=int, default=256, metavar="N", help="prompts (256)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens of each response (64)")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], metavar="N", help="engines (1 and 2)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds that count (5)")
    parser.add_argument("--dir", default="outputs/bench", help="where its inputs are kept (outputs/bench)")
    return parser


if __name__ == "__main__":
    _hold(sys.argv[1])
