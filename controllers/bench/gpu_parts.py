"""The parts of `verl-ray bench gpu`, in the order of what most probably breaks.

Invariant: a part is a program that prints a JSON object last and exits with another
code than 0 if something is wrong. Parts whose programs are tests run from a checkout.
Deliberately not here: how parts are run and reported (`gpu.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

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


def parts_of(device: str, folder: str) -> list[Part]:
    """Return all parts for "cuda" or "cpu"; they write into `folder`."""
    least = 1 if device == "cuda" else 0
    return [
        Part("devices", "versions and devices", _devices(), 30),
        _tests("attention", "flash attention", "tests/models/test_attention_gpu.py"),
        *(_contract(kind, device, least) for kind in KINDS),
        _rollout("bfloat16", device, least),
        _rollout("float32", device, least),
        _tests("cuda_ipc", "the wire on one GPU", "tests/weight_sync/test_cuda_ipc.py"),
        _tests(
            "offload", "memory that is given back", "tests/engine/test_place_gpu.py"
        ),
        _uneven("engine", device, least),
        _uneven("fsdp", device, least),
        _run_of_grpo(device, least, folder),
        _sync("shared_memory", device, least, folder),
        _sync("cuda_ipc", device, 1, folder),
        _sync("broadcast", device, 2, folder),
        _utilization("500m", device, least),
        _utilization("1500m", device, 1),
        # 4 bytes each of weights, gradients and two moments are on the host: 122 GiB.
        _utilization("8b", device, 1, host_gib=150),
    ]


def _devices() -> tuple[str, ...]:
    return ("-m", "controllers.bench.gpu_devices")


def _tests(name: str, about: str, path: str) -> Part:
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", path)
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
        ("-m", "controllers.bench.gpu_run", json.dumps(task)),
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
        90,
        gpus=gpus,
        packages=("vllm", "ray"),
    )


def _utilization(model: str, device: str, gpus: int, host_gib: int = 0) -> Part:
    """Return the part that measures speed; one whose state is on the host is fsdp's."""
    on_gpu = device == "cuda"
    contender = "fsdp_1_host" if host_gib else "engine_1"
    sizes = ("--model", model, "--rows", "64", "--micro-batch-tokens", "8192")
    if not on_gpu:
        sizes = ("--model", "1m", "--rows", "4", "--micro-batch-tokens", "512")
    dtype = "bfloat16" if on_gpu else "float32"
    flags = ("--device", device, "--dtype", dtype, "--repeats", "1")
    # Plain PyTorch, the yardstick, has all of its state on the device.
    only = ("--only", contender, *(["--alone"] if host_gib else []))
    return Part(
        f"mfu_{model}",
        f"model FLOPs utilization of {contender}",
        ("-m", "controllers", "bench", "fsdp", *flags, *sizes, *only),
        240 if host_gib else 90,
        gpus=gpus,
        host_gib=host_gib,
    )
