"""The parts of `verl-ray bench gpu`, in the order of what most probably breaks.

Invariant: a part is a program that prints a JSON object last and exits with another
code than 0 if something is wrong. Parts whose programs are tests run from a checkout.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from controllers.bench.inputs import MODELS, Size, tensors_of, with_layers
from verl_ray.backends.base import FLOAT32, MOMENTS
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.remaining_memory import USED_SHARE

LEAST_LAYERS = 8
"""With fewer layers of 8B most parameters would be those of the embeddings."""

OTHER_HOST_GIB = 4
"""Memory of the host for the process itself."""

_ON_A_GPU = ("--rows", "64", "--micro-batch-tokens", "8192")

_PROGRAMS = ("-m", "controllers.bench.gpu_run")
KINDS = ("engine", "fsdp", "megatron", "megatron_fsdp")
_PACKAGES = {"megatron": ("megatron.core",), "megatron_fsdp": ("megatron_fsdp",)}


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


def parts_of(device: str, folder: str, host_bytes: float = 0.0) -> list[Part]:
    """Return all parts.

    Args:
        device: "cuda" or "cpu".
        folder: Where they write into.
        host_bytes: Memory of the host that they may use; the largest model has as many
            layers as it holds.
    """
    least = 1 if device == "cuda" else 0
    contracts = [_contract(kind, device, least) for kind in KINDS]
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
        packages=("peft", *_PACKAGES.get(kind, ())),
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
    arguments = ("-m", "controllers", "bench", "weight-sync", *sizes, *ways)
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
    return ("-m", "controllers", "bench", "fsdp", *flags)
