"""What only the machine knows: whether all that a configuration asks for is there.

Invariant: nothing is started, imported from a user or read in full; seconds at most, and torch is not needed. In here
are the run's own folder, its data, its graders and its endpoints; models and resources have modules of their own
(`model_directories.py`, `resources.py`). Deliberately not here: rules over the configuration alone
(`verl_ray.config.rules`).
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from verl_ray.config.drawing import DrawingConfig
from verl_ray.config.resolve import resolve
from verl_ray.config.schema import Config
from verl_ray.config.suggest import either
from verl_ray.config.versions import problem_of
from verl_ray.errors import Problem
from verl_ray.paths import in_ray_package, near, nearest_existing
from verl_ray.preflight.backends import backend_problems
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.model_directories import model_problems
from verl_ray.preflight.resources import resource_problems, resource_warnings
from verl_ray.rewards.functions import spec_problem
from verl_ray.rewards.remote import url_problem
from verl_ray.rollout.vllm_core import installed_version

DATA_SUFFIXES = (".jsonl", ".parquet")

INPUTS_STARTED, INPUTS_COMPLETE = "made-by-verl_ray", "complete"
"""Markers in run.dir/inputs: the run made this folder and may delete it, and everything is in it."""


@dataclass
class Findings:
    """What would stop the run, and what would only slow it."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def preflight(config: Config, machine: Machine | None, *, evaluates: bool = False) -> Findings:
    """Check files, and the resources of `machine` unless it is None. Inputs that the run makes are not missing, unless
    the command only `evaluates` and makes none."""
    findings = Findings()
    findings.problems += _installed_problems()
    findings.problems += _inputs_problems(config, evaluates)
    findings.problems += _data_problems(config)
    findings.problems += _run_dir_problems(config)
    findings.problems += model_problems(config, machine)
    findings.problems += backend_problems(config, machine)
    findings.problems += _grader_problems(config)
    if config.drawing is not None:
        findings.problems += _endpoint_problems(config.drawing, machine)
        findings.warnings += _endpoint_warnings(config.drawing)
    planned = resolve(config, facts_here(config, machine, learns=not evaluates))
    findings.problems += resource_problems(planned, machine)
    findings.warnings += resource_warnings(planned, machine)
    return findings


def _installed_problems() -> Iterator[Problem]:
    """Of the torch and the vLLM in this environment. Without a torch nothing else here can be run, and pip says so."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    if found := problem_of(torch, installed_version()):
        yield Problem("the environment", torch, *found)


def _grader_problems(config: Config) -> Iterator[Problem]:
    """Of functions and services that score."""
    for key, one in config.graders_at_work(learns=True).items():
        for source, spec in (one.named_functions or {}).items():
            if (problem := spec_problem(spec, f"{key}.functions.{source}")) is not None:
                yield problem
        if one.service is not None and (problem := url_problem(one.service.url, f"{key}.url")) is not None:
            yield problem


def _data_problems(config: Config) -> Iterator[Problem]:
    if config.preparation is not None:
        return
    paths = {"data.train_path": config.data.train_path, "data.validation_path": config.data.validation_path}
    for key, path in paths.items():
        if path is None:
            continue
        found = Path(path).expanduser()
        if not found.exists():
            fix = near(found, f"Give a {either(DATA_SUFFIXES)} file, or a folder saved by datasets.")
            yield Problem(key, path, "there is no such file or folder", fix)
        elif found.is_file() and found.suffix not in DATA_SUFFIXES:
            rule = f"a file of this kind ({found.suffix or 'no suffix'}) cannot be read"
            yield Problem(key, path, rule, f"Use {either(DATA_SUFFIXES)}, or a folder saved by datasets.")


def inputs_folder(config: Config) -> Path:
    """Where a run with `prepare` keeps the inputs that it makes."""
    return Path(config.run.dir) / "inputs"


def foreign_inputs(config: Config) -> Iterator[Problem]:
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
    if config.preparation is None:
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


def _endpoint_problems(config: DrawingConfig, machine: Machine | None) -> Iterator[Problem]:
    """What keeps the replicas from listening, where they will be on this machine."""
    endpoint, key = config.rollout.endpoint, "rollout.endpoint"
    address = _address(endpoint.host)
    if not endpoint.enabled or machine is None or address is None:
        return
    if endpoint.token_env is not None and not os.environ.get(endpoint.token_env):
        rule = "there is no such environment variable, or it is empty"
        yield Problem(f"{key}.token_env", endpoint.token_env, rule, "Set it to the token that clients must send.")
    last = endpoint.port + config.rollout.num_replicas - 1 if endpoint.port else 0
    for port in range(endpoint.port, min(last, 65535) + 1):
        try:
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            socket.create_server((endpoint.host, port), family=family).close()
        except OSError as error:
            rule = f"nobody can listen on {endpoint.host} port {port} here: {os.strerror(error.errno or 0)}"
            fix = f"Give a port that is free, or 0 for any, and an address of this machine as {key}.host."
            yield Problem(f"{key}.port", endpoint.port, rule, fix)
            return


def _endpoint_warnings(config: DrawingConfig) -> Iterator[str]:
    endpoint = config.rollout.endpoint
    address = _address(endpoint.host)
    if endpoint.enabled and endpoint.token_env is None and address is not None and not address.is_loopback:
        yield (
            f"rollout.endpoint.host={endpoint.host}: everybody who can reach this address may use the rollout servers "
            "(rollout.endpoint.token_env asks them for a token)"
        )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None: the rules refuse it."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _run_dir_problems(config: Config) -> Iterator[Problem]:
    if in_ray_package(Path(config.run.dir)):
        rule = "this lies in the copy of the working directory that Ray made for this job, and will delete"
        yield Problem("run.dir", config.run.dir, rule, "Give an absolute path, or none: it is then ~/outputs/NAME.")
    parent = nearest_existing(config.run.dir)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        fix = "Give a folder that can be written to."
        yield Problem("run.dir", config.run.dir, f"{parent} cannot be written to", fix)
    if config.run.resume not in ("auto", "none") and not Path(config.run.resume).expanduser().exists():
        fix = near(Path(config.run.resume).expanduser(), "Use auto, none, or the path of a checkpoint.")
        yield Problem("run.resume", config.run.resume, "there is no such checkpoint", fix)
