"""scripts/setup: what it installs, when it does nothing, and what it says when the
machine lacks something.
"""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.scripts.checkout import Checkout

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}


def test_it_installs_torch_then_the_lock_then_the_package_and_then_nothing(
    checkout: Checkout,
) -> None:
    code, output = checkout.run("scripts/setup")
    assert code == 0, output
    torch, tools, lock, package, imports = checkout.notes()
    assert "torch==2.13.0" in torch and "--index-url" not in torch
    assert "--no-deps setuptools==" in tools
    assert lock.endswith("--no-deps --no-build-isolation -r requirements-cpu.lock")
    assert package.endswith("--editable .")
    assert "vllm" in imports and "megatron_fsdp" in imports
    assert re.search(r"setup: done in \d+ s", output)
    assert checkout.run("scripts/setup") == (0, "")
    assert checkout.notes() == []


@pytest.mark.parametrize(
    "name", ["requirements-cpu.lock", "pyproject.toml", "scripts/setup"]
)
def test_it_starts_over_when_what_it_is_made_from_changes(
    checkout: Checkout, name: str
) -> None:
    checkout.run("scripts/setup")
    checkout.notes()
    with (checkout.folder / name).open("a") as stream:
        stream.write("# changed\n")
    assert checkout.run("scripts/setup")[0] == 0
    assert len(checkout.notes()) == 5


def test_an_installation_that_failed_is_tried_again(checkout: Checkout) -> None:
    assert checkout.run("scripts/setup", fails="-r requirements-cpu.lock")[0] != 0
    assert len(checkout.notes()) == 3
    assert checkout.run("scripts/setup")[0] == 0
    assert len(checkout.notes()) == 5


def test_two_at_once_install_once(checkout: Checkout) -> None:
    both = [checkout.start("scripts/setup") for _ in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(checkout.notes()) == 5
    assert sum("done in" in output for output in outputs) == 1


def test_the_index_for_torch_is_the_users(checkout: Checkout) -> None:
    checkout.run("scripts/setup", VERL_RAY_TORCH_INDEX="https://example.org/cpu")
    torch, *others = checkout.notes()
    assert "--index-url https://example.org/cpu" in torch
    assert not any("--index-url" in other for other in others)


@pytest.mark.parametrize(
    ("lacking", "says"),
    [
        (
            "import ctypes\ndef missing(name): raise OSError(name)\nctypes.CDLL = missing",
            "apt-get install libnuma1",
        ),
        (
            "import sys\nsys.version_info = (3, 10, 9, 'final', 0)",
            "expected 3.11 or newer",
        ),
        ("import sys\nsys.modules['ensurepip'] = None", "apt-get install python3-venv"),
    ],
)
def test_what_pip_cannot_bring_is_found_first(
    checkout: Checkout, tmp_path: Path, lacking: str, says: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(lacking)
    code, output = checkout.run("scripts/setup", PYTHONPATH=str(tmp_path))
    assert code == 1
    assert says in output
    assert checkout.notes() == []


def test_little_shared_memory_is_a_warning(checkout: Checkout, tmp_path: Path) -> None:
    little = "import shutil\nfrom types import SimpleNamespace\nshutil.disk_usage = lambda _: SimpleNamespace(free=64 << 20)"
    (tmp_path / "sitecustomize.py").write_text(little)
    code, output = checkout.run("scripts/setup", PYTHONPATH=str(tmp_path))
    assert code == 0
    assert (
        "warning: /dev/shm has 64 MiB free, expected 1024" in output
        and "--shm-size" in output
    )


def test_an_environment_of_the_users_own_is_taken_as_it_is(checkout: Checkout) -> None:
    assert checkout.run("scripts/setup", VERL_RAY_SKIP_SETUP="1") == (0, "")
    assert checkout.notes() == []
    (checkout.folder / ".venv" / "bin" / "python").unlink()
    code, output = checkout.run("scripts/setup", VERL_RAY_SKIP_SETUP="1")
    assert code == 1 and "there is no" in output


def test_its_arguments(checkout: Checkout) -> None:
    code, output = checkout.run("scripts/setup", "--help")
    assert code == 0 and "VERL_RAY_TORCH_INDEX" in output
    code, output = checkout.run("scripts/setup", "--gpu")
    assert code == 0 and ".[gpu,megatron,math,text,dev]" in output
    code, output = checkout.run("scripts/setup", "--gup")
    assert code == 2 and "usage" in output
    assert checkout.notes() == []


# ------------------------------------------------------------------------ the lock file


def locked() -> dict[str, str]:
    lines = [
        line
        for line in (ROOT / "requirements-cpu.lock").read_text().splitlines()
        if line and line[0] != "#"
    ]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs), "every line is name==version"
    assert len({canonicalize_name(name) for name, _ in pairs}) == len(pairs), (
        "no package stands twice"
    )
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_lock_file_is_complete_and_consistent() -> None:
    """Every requirement of every package in it is in it, in a version that is asked
    for.
    """
    pins = locked() | {"torch": metadata.version("torch")}
    assert LEFT_OUT.isdisjoint(pins) and not any(
        name.startswith("nvidia") for name in pins
    )
    for name in pins:
        for text in metadata.requires(name) or []:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                check(wanted, pins, name)


def test_the_lock_file_holds_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = locked() | {"torch": metadata.version("torch")}
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["cpu"], *extras["dev"]]:
        check(Requirement(text), pins, "pyproject.toml")


def check(wanted: Requirement, pins: dict[str, str], by: str) -> None:
    name = canonicalize_name(wanted.name)
    if name not in LEFT_OUT:
        assert name in pins, f"{by} asks for {wanted}, which the lock file lacks"
        assert wanted.specifier.contains(pins[name], prereleases=True), (
            f"{by} asks for {wanted}, not {pins[name]}"
        )
