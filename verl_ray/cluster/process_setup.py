"""Setup of a process on its own node: its environment variables and its open files.

Invariant: environment variables are set before torch is imported, which reads them
once.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path

from verl_ray.cluster.context import RankSpec
from verl_ray.private_files import users_folder
from verl_ray.profiling.memory import trainer_environment

# Torch's flight recorder remembers this many collectives, which `host.py` reads.
# More than a rank has under way are of no use there.
_REMEMBERED_COLLECTIVES = "256"
_SIZES = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}


def process_environment(
    rank_spec: RankSpec, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Variables that the process of a rank sets for itself.

    Args:
        rank_spec: Identity and settings of the process.
        inherited: Variables that the process was started with.
    """
    variables = thread_environment(rank_spec.threads, inherited)
    if rank_spec.process_group and not _SIZES.intersection(inherited):
        variables["TORCH_FR_BUFFER_SIZE"] = _REMEMBERED_COLLECTIVES
    trains_on_gpu = rank_spec.process_group and rank_spec.device != "cpu"
    if trains_on_gpu:
        variables |= trainer_environment(inherited)
    # transformers imports the code of a model from a copy there, and ranks that share
    # the folder read what another one is writing.
    modules = users_folder(Path(tempfile.gettempdir())) / f"modules-{os.getpid()}"
    variables["HF_MODULES_CACHE"] = str(modules)
    return variables | compiler_environment(inherited)


_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_TORCHS_OWN = "torchinductor_"
"""Beginning of the name of torch's own choice, followed by that of the user."""


def compiler_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process that may compile with torch, or load what was compiled.

    Torch would take `/tmp/torchinductor_NAME`, whoever has made it, and run what is in
    it. Where it was imported before the run started, as in a notebook, it has even put
    this path into the variable.

    Args:
        inherited: Variables that the process was started with. Another folder that they
            name stays.

    Raises:
        UnsafeFile: The folder of this user is not its own.
    """
    shared = Path(tempfile.gettempdir())
    named = Path(inherited.get(_COMPILED) or shared / _TORCHS_OWN)
    if named.parent != shared or not named.name.startswith(_TORCHS_OWN):
        return {}
    return {_COMPILED: str(users_folder(shared) / "torchinductor")}


_OPEN_FILES = 65_536


def allow_open_files() -> None:
    """Raise the limit of open files and sockets of this process, if it may be raised.

    Over gloo a receiver of weights is connected with each of the others, once per root:
    more than the usual 1,024 from some 250 receivers on. Ray raises the limit of a
    driver that starts a cluster, and of the cluster's processes, but not on nodes that
    `ray start` adds.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = _OPEN_FILES
    if most != resource.RLIM_INFINITY:
        new_limit = min(new_limit, most)
    if limit != resource.RLIM_INFINITY and limit < new_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, most))


_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""How idle OpenMP threads wait: they spin for half a millisecond, and then sleep."""


def thread_environment(threads: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process that computes with `threads` CPU threads.

    The processes of a node take turns on its cores, and a spinning thread keeps its
    core from the process that the others wait for. By default it would spin for several
    milliseconds: the update of a small model then took ten times as long on two busy
    cores. A thread that sleeps at once has to be woken for every layer: with it, steps
    of 32 tokens took 1.29 s instead of 0.91 s (the benchmark `step`, two idle cores).

    Args:
        threads: The number of threads.
        inherited: Variables that the process was started with. Where they say how
            threads wait, that stays: on a machine that is busy with other work, threads
            should sleep at once (OMP_WAIT_POLICY=PASSIVE).
    """
    count = str(threads)
    variables = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count
    )
    if _WAITING.keys().isdisjoint(inherited):
        variables |= _WAITING
    return variables
