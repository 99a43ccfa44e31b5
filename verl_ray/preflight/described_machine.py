"""A machine in words: `nodes=2,gpus=8,gpu=H100-80G,memory=2T,link=400G`.

Invariant: a description is read whole or refused with every mistake in it, and what it
leaves out is assumed and named. Deliberately not here: the figures of the GPUs
(`gpus.py`), and what a run needs of a machine (`resources.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import ConfigError, Problem
from verl_ray.preflight.gpus import GIB, GPUS, Gpu
from verl_ray.preflight.machine import Machine

OPTION = "--machine"

EXAMPLE = "nodes=2,gpus=8,gpu=H100-80G,memory=2T,link=400G"

ASSUMED_CORES = 12
"""Cores per GPU of a node that says nothing of them."""

ASSUMED_GIB = 128
"""Memory of the host per GPU, in GiB."""

ASSUMED_LINK_GBIT_PER_S = 400
"""A port of InfiniBand NDR for each GPU."""

_COUNTS: Mapping[str, tuple[int, int]] = {
    "nodes": (1, 10_000),
    "gpus": (0, 128),
    "cores": (1, 10_000),
}
"""Parts that are whole numbers, with the least and the greatest."""

_UNITS: Mapping[str, Mapping[str, int]] = {
    "memory": {"G": GIB, "T": 1024 * GIB},
    "shm": {"G": GIB, "T": 1024 * GIB},
    "link": {"G": 10**9, "T": 10**12},
}
"""Parts that are amounts, with their units: bytes of a node, and bits per second."""

PARTS = ("nodes", "gpus", "gpu", "cores", "memory", "shm", "link")

_AMOUNT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([A-Za-z]*)")


def parse_machine(text: str) -> Machine:
    """Return the machine that a text describes.

    Args:
        text: Parts `key=value` with commas between them, in any order. nodes (1 unless
            it is given); of each node: gpus, gpu (their kind, a name of `GPUS`), cores,
            memory and shm (/dev/shm) in GiB (G) or TiB (T); link in Gbit/s (G) or
            Tbit/s (T) of each GPU, or of the node where it has none.

    Raises:
        ConfigError: Every part that is wrong or missing.
    """
    problems: list[Problem] = []
    words = _parts(text, problems)

    counts: dict[str, int] = {}
    for key, (least, most) in _COUNTS.items():
        if key in words:
            counts[key] = _count(key, words[key], least, most, problems)

    amounts: dict[str, int] = {}
    for key, units in _UNITS.items():
        if key in words:
            amounts[key] = _amount(key, words[key], units, problems)

    gpu = _gpu(words, counts.get("gpus"), problems)
    if problems:
        raise ConfigError(problems)

    machine = _with_assumptions(counts, amounts, gpu)
    if machine.shm_free_bytes > machine.memory_bytes:
        memory_gib = machine.memory_bytes / GIB
        rule = f"it is a part of the node's memory, which is {memory_gib:g}G"
        fix = "Give less, or more memory."
        raise ConfigError([_problem(f"shm={words['shm']}", rule, fix)])
    return machine


def _with_assumptions(
    counts: Mapping[str, int], amounts: Mapping[str, int], gpu: Gpu | None
) -> Machine:
    """Return the machine, with values for the parts that were left out."""
    nodes = counts.get("nodes", 1)
    # A node without GPUs is taken for one with the share of a single GPU.
    gpus = max(1, counts["gpus"])
    cores = counts.get("cores", ASSUMED_CORES * gpus)
    memory = amounts.get("memory", ASSUMED_GIB * GIB * gpus)
    shm = amounts.get("shm", memory // 2)
    link = amounts.get("link", ASSUMED_LINK_GBIT_PER_S * 10**9)

    typed = counts.keys() | amounts.keys()
    if nodes == 1:
        # Nothing goes over it.
        typed |= {"link"}
    values = _as_parts(cores, memory, shm, link)
    return Machine(
        cores=cores,
        gpus=counts["gpus"],
        memory_bytes=memory,
        shm_free_bytes=shm,
        gpu_memory_bytes=None if gpu is None else gpu.memory_bytes,
        nodes=nodes,
        gpu=gpu,
        link_bytes_per_s=link / 8,
        assumed=tuple(value for key, value in values.items() if key not in typed),
    )


def with_host_memory(machine: Machine, memory_bytes: int) -> Machine:
    """Return a described machine whose nodes have another amount of memory.

    /dev/shm, where nothing was said of it, follows from that.
    """
    assumed = machine.assumed or ()
    known = [part for part in assumed if not part.startswith(("memory=", "shm="))]
    shm = machine.shm_free_bytes
    if any(part.startswith("shm=") for part in assumed):
        shm = memory_bytes // 2
        known.append(f"shm={shm / GIB:g}G")
    return replace(
        machine, memory_bytes=memory_bytes, shm_free_bytes=shm, assumed=tuple(known)
    )


def _as_parts(
    cores: int, memory_bytes: int, shm_bytes: int, link_bits_per_s: float
) -> dict[str, str]:
    """Return the parts of a description that may be left out."""
    return {
        "cores": f"cores={cores}",
        "memory": f"memory={memory_bytes / GIB:g}G",
        "shm": f"shm={shm_bytes / GIB:g}G",
        "link": f"link={link_bits_per_s / 10**9:g}G",
    }


def as_described(machine: Machine) -> str:
    """Return the description of a machine, without what was assumed."""
    assert machine.assumed is not None and machine.link_bytes_per_s is not None
    parts = [f"nodes={machine.nodes}", f"gpus={machine.gpus}"]
    if machine.gpu is not None:
        parts.append(f"gpu={machine.gpu.name}")
    values = _as_parts(
        machine.cores,
        machine.memory_bytes,
        machine.shm_free_bytes,
        8 * machine.link_bytes_per_s,
    )
    if machine.nodes == 1:
        del values["link"]
    parts += [value for value in values.values() if value not in machine.assumed]
    return ",".join(parts)


def machine_in_words(machine: Machine) -> str:
    """Return a described machine in a line, and in another what was assumed of it."""
    if machine.gpu is None:
        kind = "without GPUs"
    else:
        kind = f"of {machine.gpus} {machine.gpu.name}"
    nodes = "1 node" if machine.nodes == 1 else f"{machine.nodes} nodes"
    line = (
        f"machine: {nodes} {kind} (described), each with {machine.cores} cores,"
        f" {machine.memory_bytes / GIB:g} GiB memory,"
        f" {machine.shm_free_bytes / GIB:g} GiB in /dev/shm"
    )

    if machine.nodes > 1 and machine.link_bytes_per_s is not None:
        sender = "node" if machine.gpu is None else "GPU"
        gbit_per_s = 8 * machine.link_bytes_per_s / 10**9
        line += f"; {gbit_per_s:g} Gbit/s per {sender} between nodes"
    if machine.assumed:
        line += f"\n{OPTION} does not say, and assumed is: {', '.join(machine.assumed)}"
    return line


# ---------------------------------------------------------------------------- its parts


def _parts(text: str, problems: list[Problem]) -> dict[str, str]:
    """Return the value of each part.

    What is no part, and a part that is missing, are added to the problems.
    """
    words: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not key or not value:
            rule = "a machine is described by parts such as gpus=8"
            problems.append(_problem(part, rule, f"Write {EXAMPLE}."))
        elif key not in PARTS:
            rule = f"a machine has no part {key!r}"
            problems.append(_problem(part, rule, did_you_mean(key, PARTS, "part")))
        elif key in words:
            rule = f"{key} is there twice"
            problems.append(_problem(part, rule, "Give it once."))
        else:
            words[key] = value

    # What is misspelt may be what is missing.
    if problems:
        return words
    if "gpus" not in words:
        rule = "it does not say how many GPUs a node has"
        fix = "Add gpus=8, or gpus=0 for nodes without GPUs."
        problems.append(_problem(text, rule, fix))
    elif "gpu" not in words and words["gpus"].strip("0"):
        rule = "it does not say which GPUs these are"
        fix = f"Add gpu=NAME. There is {', '.join(GPUS)}."
        problems.append(_problem(f"gpus={words['gpus']}", rule, fix))
    return words


def _count(key: str, word: str, least: int, most: int, problems: list[Problem]) -> int:
    """Return a whole number; the greatest one if it is none, which is a problem."""
    if re.fullmatch(r"[0-9]{1,9}", word) and least <= int(word) <= most:
        return int(word)
    rule = f"this is a whole number from {least} to {most}"
    problems.append(_problem(f"{key}={word}", rule, f"Write {key}={max(least, 8)}."))
    return most


def _amount(
    key: str, word: str, units: Mapping[str, int], problems: list[Problem]
) -> int:
    """Return an amount in bytes, or in bits per second; 1 if it is none."""
    match = _AMOUNT.fullmatch(word)
    if match is not None and match[2] in units:
        amount = int(Fraction(match[1]) * units[match[2]])
        if amount:
            return amount

    if key == "link":
        rule = "this is a number of Gbit/s (G) or Tbit/s (T) per GPU, above 0"
        fix = "Write link=400G, which is 50 GB/s."
    else:
        rule = "this is a number of GiB (G) or TiB (T) per node, above 0"
        fix = f"Write {key}=512G or {key}=2T."
    problems.append(_problem(f"{key}={word}", rule, fix))
    return 1


def _gpu(
    words: Mapping[str, str], gpus: int | None, problems: list[Problem]
) -> Gpu | None:
    """Return the kind of the GPUs; None for a node without any."""
    name = words.get("gpu")
    if name is not None and name not in GPUS:
        rule = "no GPU of this name is known"
        fix = did_you_mean(name, list(GPUS), "GPU")
        problems.append(_problem(f"gpu={name}", rule, fix))
    elif name is not None and gpus == 0:
        rule = "the nodes have no GPUs (gpus=0)"
        problems.append(_problem(f"gpu={name}", rule, "Leave it out."))
    return GPUS.get(name or "")


def _problem(part: str, rule: str, fix: str) -> Problem:
    return Problem(OPTION, part, rule, fix)
