"""The suite `gpu`: everything that only a GPU can show, in under ten minutes.

Invariant: each part is a process of its own with a deadline, so no part keeps another
from running; a part that was not run is listed with the reason. The figures are written
after every part, so a session that is cut off leaves what it has. Parts come in the
order of what most probably breaks. With `--device cpu` the parts that need no GPU run
at tiny sizes, which tests the suite and no GPU.

As a program this file is one of two parts, `devices` or `grpo`. A part prints a JSON
object last, and exits with another code than 0 if something is wrong. The run of `grpo`
is that of `verl-ray train`, with colocated roles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

from controllers.compose.listing import WIDTH
from scripts.bench.inputs import (
    FOLDER,
    MODELS,
    Size,
    run_with_inputs,
    tensors_of,
    with_layers,
)
from scripts.bench.suite import Flags, print_json, progress, shown_versions
from verl_ray.backends import BACKENDS
from verl_ray.backends.base import FLOAT32, MOMENTS
from verl_ray.config.versions import missing_packages, problem_of
from verl_ray.json_lines import lines_of
from verl_ray.ops.installed_torch import varlen_attn_groups_heads
from verl_ray.preflight.findings import inputs_folder
from verl_ray.preflight.machine import GIB, Machine
from verl_ray.preflight.memory_plan import USED_SHARE
from verl_ray.shell import override_of

Status = Literal["passed", "failed", "timed out", "not run"]

LIMIT_S = 580.0
SHORTEST_S = 10.0
"""With less time left, no further part is started."""
_GRACE_S = 10.0
"""Time to end for a part that is stopped, in addition to its own."""
_SHOWN_LINES = 15
_SHOWN_CHARACTERS = 60

LEAST_LAYERS = 8
"""With fewer layers of 8B most parameters would be those of the embeddings."""

OTHER_HOST_GIB = 4
"""Memory of the host for the process itself."""

_ON_A_GPU = ("--rows", "64", "--micro-batch-tokens", "8192")

_PROGRAMS = ("-m", "scripts.bench.gpu")


@dataclass(frozen=True)
class Part:
    """One program.

    Attributes:
        name: A short name, for tables and flags.
        about: The subject, for people.
        arguments: The arguments of Python.
        limit_s: Seconds that it may take.
        gpus: Number of GPUs that it needs.
        packages: Packages that it needs.
        host_gib: Memory of the host that it needs.
    """

    name: str
    about: str
    arguments: tuple[str, ...]
    limit_s: float
    gpus: int = 0
    packages: tuple[str, ...] = ()
    host_gib: int = 0


@dataclass(frozen=True)
class Outcome:
    """The end of a part.

    Attributes:
        name: The part.
        status: Whether its process ended well, ended in time, or was started.
        seconds: How long it ran.
        reason: Why it was not run or did not pass, or that its time was shortened.
        result: What it has printed as JSON on its last line.
        last_lines: The end of what it has said, unless it passed.
    """

    name: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    last_lines: list[str] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Run the parts, and print their figures.

    Returns:
        The exit code: 0, or 1 if a part failed or did not end in time.
    """
    options = _flags().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="verl-ray-gpu-") as folder:
        parts = parts_of(options.device, folder, _free_host_bytes())
        if options.only:
            parts = [part for part in parts if part.name in options.only]
        outcomes = run_parts(
            parts,
            gpus=Machine.here().gpus if options.device == "cuda" else 0,
            limit_s=options.limit_s,
            path=Path(options.out),
        )

    Console(stderr=True).print(_table(outcomes))
    print_json([asdict(outcome) for outcome in outcomes])
    return int(any(outcome.status in ("failed", "timed out") for outcome in outcomes))


def run_parts(
    parts: Sequence[Part], *, gpus: int, limit_s: float, path: Path
) -> list[Outcome]:
    """Run one part after another, whatever becomes of each.

    Args:
        parts: The parts, in their order.
        gpus: Number of GPUs that parts may use.
        limit_s: Seconds for all of them together.
        path: The JSON file of the outcomes, written after every part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + limit_s
    outcomes: list[Outcome] = []

    for part in parts:
        left_s = end - time.monotonic()
        reason = _obstacle(part, gpus)
        if not reason and left_s < SHORTEST_S:
            reason = f"{left_s:.0f} of {limit_s:.0f} s were left"

        if reason:
            outcome = Outcome(part.name, "not run", reason=reason)
        else:
            progress(f"{part.name}: {part.about} ...")
            outcome = _run(part, min(part.limit_s, left_s))
        outcomes.append(outcome)
        progress(f"{part.name}: {outcome.status}")
        path.write_text(json.dumps([asdict(each) for each in outcomes], indent=2))

    return outcomes


def _obstacle(part: Part, gpus: int) -> str:
    """Return what the part lacks on this machine, or nothing."""
    if part.gpus > gpus:
        noun = "GPU" if part.gpus == 1 else "GPUs"
        return f"needs {part.gpus} {noun}, and {gpus} may be used"
    missing = missing_packages(part.packages)
    if missing:
        return f"needs {' and '.join(missing)}, not installed here"
    free_gib = _free_host_bytes() / GIB
    if part.host_gib > free_gib:
        return f"needs {part.host_gib} GiB of host memory, {free_gib:.0f} are free"
    return ""


def _free_host_bytes() -> int:
    """Return the memory that parts may use, at most the limit of the container."""
    return min(int(psutil.virtual_memory().available), Machine.here().memory_bytes)


def _run(part: Part, limit_s: float) -> Outcome:
    """Run the process of a part and all that it starts, for at most `limit_s`."""
    start = time.monotonic()
    shortened = f"shortened to {limit_s:.0f} s" if limit_s < part.limit_s else ""

    # Output goes to a file: a process that the part leaves behind would keep a pipe
    # open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            # A driver ends its cluster, whose processes have sessions of their own.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:
            # The session is the part's own: this ends what it has left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        seconds = round(time.monotonic() - start, 1)
        output.seek(0)
        lines = output.read().splitlines()

    result = _result(lines)
    last_lines = lines[-_SHOWN_LINES:]
    if code is None:
        reason = f"not done after {limit_s:.0f} s"
        reason += f", {shortened}" if shortened else ""
        return Outcome(part.name, "timed out", seconds, reason, result, last_lines)
    if code:
        reason = f"exit code {code}"
        return Outcome(part.name, "failed", seconds, reason, result, last_lines)
    # pytest ends well, too, if it has skipped all tests.
    last = lines[-1] if lines else ""
    if "skipped" in last and "passed" not in last:
        return Outcome(part.name, "not run", seconds, last.strip("= "))
    return Outcome(part.name, "passed", seconds, shortened, result)


def _result(lines: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object at the end of a part's output, on one line or on many."""
    for first in range(len(lines) - 1, -1, -1):
        if not lines[first].startswith("{"):
            continue
        with contextlib.suppress(json.JSONDecodeError):
            result: dict[str, Any] = json.loads("\n".join(lines[first:]))
            return result
    return {}


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("part", "", "s", "figures, or the reason")
    for outcome in outcomes:
        report = outcome.reason or json.dumps(outcome.result)
        if len(report) > _SHOWN_CHARACTERS:
            report = report[:_SHOWN_CHARACTERS] + " ..."
        table.add_row(outcome.name, outcome.status, f"{outcome.seconds:.1f}", report)
    return table


def _listed(parts: Sequence[Part]) -> str:
    """Return the parts for the help, as they are with `--device cpu`."""
    heading = "parts, in their order (* needs a GPU, with --device cpu, too):"
    column = max(len(part.name) for part in parts) + 4
    lines = []
    for part in parts:
        mark = "*" if part.gpus else " "
        first = f"{mark} {part.name}".ljust(column)
        rest = " " * column
        lines += textwrap.wrap(
            part.about, WIDTH, initial_indent=first, subsequent_indent=rest
        )
    return "\n".join([heading, *lines])


def _flags() -> Flags:
    parts = parts_of("cpu", "", _free_host_bytes())
    about = (
        "Run what only a GPU can show, in the order of what most probably breaks, from"
        " a checkout. Goes on after a failure."
    )
    flags = Flags("gpu", textwrap.fill(about, WIDTH))
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.epilog = _listed(parts)
    about = "cpu: the parts that need no GPU, at tiny sizes, to test the suite"
    flags.choice("--device", ("cuda", "cpu"), about)
    flags.add_argument(
        "--limit-s",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"seconds for all parts together ({LIMIT_S:.0f})",
    )
    out = f"{FOLDER}/gpu.json"
    about = f"where the outcomes are written ({out})"
    flags.add_argument("--out", default=out, metavar="FILE", help=about)
    about = "these parts alone, of those below"
    names = [part.name for part in parts]
    flags.add_argument("--only", nargs="+", choices=names, metavar="PART", help=about)
    return flags


# ---------------------------------------------------------------------------- the parts

# A part is a program that prints a JSON object last and exits with another code than 0
# if something is wrong. Parts whose programs are tests run from a checkout.


def parts_of(device: str, folder: str, host_bytes: float = 0.0) -> list[Part]:
    """Return all parts.

    Args:
        device: "cuda" or "cpu".
        folder: Where they write into.
        host_bytes: Memory of the host that they may use; the largest model has as many
            layers as it holds.
    """
    least = 1 if device == "cuda" else 0
    contracts = [_contract(kind, device, least) for kind in BACKENDS]
    return [
        Part("devices", "versions and devices", (*_PROGRAMS, "devices"), 30),
        _tests("attention", "flash attention", "tests/models/test_attention_gpu.py"),
        # vLLM's runner for GPUs has seen least of what is asked of it.
        _rollout("bfloat16", device, least),
        *contracts[:2],
        _tests("cuda_ipc", "the wire on one GPU", "tests/weight_sync/test_cuda_ipc.py"),
        _tests(
            "offload", "memory that is given back", "tests/engine/test_place_gpu.py"
        ),
        _run_of_grpo(device, least, folder),
        *contracts[2:],
        _rollout("float32", device, least),
        _uneven("engine", device, least),
        _uneven("fsdp", device, least),
        _sync("cuda_ipc", device, 1, folder),
        _sync("broadcast", device, 2, folder),
        _sync("shared_memory", device, least, folder),
        _utilization("500m", device, least),
        _utilization("1500m", device, 1),
        _utilization_from_the_host(device, host_bytes),
    ]


def _tests(name: str, about: str, path: str) -> Part:
    # The last lines that are kept are then those of the failure.
    short = ("-q", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider")
    arguments = ("-m", "pytest", *short, "-m", "gpu", path)
    return Part(name, about, arguments, 90, gpus=1, packages=("pytest",))


def _contract(kind: str, device: str, gpus: int) -> Part:
    task = {"check": "contract", "kind": kind, "device": device, "world": 1}
    return Part(
        f"contract_{kind}",
        f"{kind} in float32 and bfloat16, beside transformers in float64",
        ("-m", "tests.engine.on_device", json.dumps(task)),
        90,
        gpus=gpus,
        packages=("peft", *BACKENDS[kind].packages),
    )


def _uneven(kind: str, device: str, least: int) -> Part:
    task = {"check": "offload", "kind": kind, "device": device, "world": 2}
    return Part(
        f"uneven_{kind}",
        f"{kind} with uneven shards, to the host and back",
        ("-m", "tests.engine.on_device", json.dumps(task)),
        90,
        gpus=2 * least,
        packages=("peft",),
    )


def _rollout(dtype: str, device: str, gpus: int) -> Part:
    task = {"device": device, "dtype": dtype}
    return Part(
        f"rollout_{dtype}",
        f"a rollout engine in {dtype}: log-probs, probe, seeds, pauses, sleep",
        ("-m", "tests.rollout.on_device", json.dumps(task)),
        120,
        gpus=gpus,
        packages=("vllm",),
    )


def _run_of_grpo(device: str, gpus: int, folder: str) -> Part:
    task = {"device": device, "folder": folder}
    return Part(
        "grpo",
        "a whole run: steps, and memory predicted and measured",
        (*_PROGRAMS, "grpo", json.dumps(task)),
        150,
        gpus=gpus,
        packages=("vllm", "ray"),
    )


def _sync(wire: str, device: str, gpus: int, folder: str) -> Part:
    model, dtype = ("0.5b", "bfloat16") if device == "cuda" else ("1m", "float32")
    sizes = ("--models", model, "--repeats", "1", "--dtype", dtype)
    # With a GPU for each side `broadcast` is NCCL.
    placement = "separate" if gpus > 1 else "colocated"
    ways = ("--transport", wire, "--placement", placement)
    arguments = ("-m", "scripts.bench", "weight-sync", *sizes, *ways)
    return Part(
        f"sync_{wire}",
        f"weight syncs over {wire}, sleep levels and offload",
        (*arguments, "--dir", f"{folder}/sync"),
        150,
        gpus=gpus,
        packages=("vllm", "ray"),
    )


def _utilization(model: str, device: str, gpus: int) -> Part:
    """Return the part that measures the speed of plain PyTorch and of `engine`."""
    sizes = ("--model", model, *_ON_A_GPU)
    if device == "cpu":
        sizes = ("--model", "1m", "--rows", "4", "--micro-batch-tokens", "512")
    dtype = "bfloat16" if device == "cuda" else "float32"
    return Part(
        f"mfu_{model}",
        "model FLOPs utilization of engine, beside plain PyTorch",
        (*_speed(device, dtype), *sizes, "--only", "engine_1"),
        90,
        gpus=gpus,
    )


def bytes_on_the_host(size: Size) -> int:
    """Return what a model takes whose weights, gradients and moments are on the host.

    torch rounds page-locked memory, that of weights and gradients, up to a power of
    two.
    """
    total = 0
    for elements in tensors_of(size):
        page_locked = 1 << (FLOAT32 * elements - 1).bit_length()
        total += 2 * page_locked + MOMENTS * elements
    return total


def layers_on_the_host(host_bytes: float) -> int:
    """Return the layers of the 8B model that a host holds, `LEAST_LAYERS` at least."""
    whole = MODELS["8b"]
    fitting = [
        number
        for number in range(LEAST_LAYERS, whole.layers.num_layers + 1)
        if bytes_on_the_host(with_layers(whole, number)) <= USED_SHARE * host_bytes
    ]
    return max(fitting, default=LEAST_LAYERS)


def _utilization_from_the_host(device: str, host_bytes: float) -> Part:
    """Return the part that measures the 8B model with its state on the host."""
    layers = layers_on_the_host(host_bytes)
    needed = bytes_on_the_host(with_layers(MODELS["8b"], layers))
    all_layers = MODELS["8b"].layers.num_layers
    sizes = ("--model", "8b", "--layers", str(layers), *_ON_A_GPU)
    return Part(
        "mfu_8b",
        f"model FLOPs utilization of fsdp, with weights and optimizer of {layers} of"
        f" {all_layers} layers on the host",
        # Plain PyTorch, the yardstick, has all of its state on the device.
        (*_speed(device, "bfloat16"), *sizes, "--only", "fsdp_1_host", "--alone"),
        240,
        gpus=1,
        host_gib=math.ceil(needed / GIB) + OTHER_HOST_GIB,
    )


def _speed(device: str, dtype: str) -> tuple[str, ...]:
    flags = ("--device", device, "--dtype", dtype, "--repeats", "1")
    return ("-m", "scripts.bench", "fsdp", *flags)


# ---------------------------------------------------------------- programs of the parts

_STEPS = 3


def devices() -> int:
    """Print what is installed; return 1 if it does not fit together.

    It does not if torch finds no device that the machine has.
    """
    import torch

    versions = shown_versions()
    report = {
        "versions": versions,
        "problem": problem_of(str(versions["torch"]), versions["vllm"]),
        "cuda": torch.version.cuda,
        "devices": [
            torch.cuda.get_device_name(index)
            for index in range(torch.cuda.device_count())
        ],
        "has_triton": not missing_packages(["triton"]),
        "flash_groups_heads": varlen_attn_groups_heads(),
    }
    print(json.dumps(report))

    expected = Machine.here().gpus
    is_wrong = report["problem"] is not None or (expected and not report["devices"])
    return int(bool(is_wrong))


def grpo(task: dict[str, Any]) -> int:
    """Run GRPO for three steps and print its figures; return the exit code of the run.

    Args:
        task: The "device", and the "folder" to write into.
    """
    on_gpu = task["device"] == "cuda"
    model, dtype = ("0.5b", "bfloat16") if on_gpu else ("1m", "float32")
    folder = Path(task["folder"]) / "grpo"
    config = run_with_inputs(model, folder)

    inputs = inputs_folder(config)
    run_dir = folder / "run"
    overrides = (
        override_of("model.path", f"{inputs}/model"),
        override_of("data.train_path", f"{inputs}/train.jsonl"),
        "data.validation_path=null",
        "data.max_prompt_tokens=16",
        "data.prompts_per_step=16",
        "rollout.group_size=8",
        "rollout.max_response_tokens=32",
        f"rollout.kv_cache_gib={config.rollout.kv_cache_gib}",
        f"backend.dtype={dtype}",
        f"rollout.dtype={dtype}",
        override_of("run.dir", str(run_dir)),
        f"run.total_steps={_STEPS}",
        "run.evaluate_every=0",
        "run.checkpoint_every=0",
        "run.save_at_end=false",
        "tracking.wandb.mode=disabled",
    )
    command = [sys.executable, "-m", "controllers", "train", "--config-name", "grpo"]
    ended = subprocess.run([*command, *overrides])
    if ended.returncode:
        return ended.returncode

    lines = lines_of(Path(run_dir, "metrics.jsonl").read_bytes())
    print(json.dumps(_figures([json.loads(line) for line in lines])))
    return 0


def _figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the steps' seconds, and memory and mismatch of the last step."""
    steps = [record for record in records if "timing_s/step" in record]
    last = steps[-1]
    shown = ("memory/", "rollout_corr/", "weight_sync/")
    return {
        "steps": len(steps),
        "step_s": [round(record["timing_s/step"], 3) for record in steps],
        "last": {key: value for key, value in last.items() if key.startswith(shown)},
    }


if __name__ == "__main__":
    name, *tasks = sys.argv[1:]
    raise SystemExit(devices() if name == "devices" else grpo(json.loads(tasks[0])))
