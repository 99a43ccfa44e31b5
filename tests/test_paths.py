"""Packages that the program runs with."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from verl_ray.paths import (
    OTHER_PACKAGES,
    UnknownPart,
    expanded,
    path_suggestion,
    program,
    refuse_foreign_packages,
)

ROOT = Path(__file__).parents[1]


def test_packages_of_one_root_belong_together() -> None:
    refuse_foreign_packages()


def test_what_is_installed_is_the_program_alone() -> None:
    """Neither tests nor `scripts` are in a wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    finder = project["tool"]["setuptools"]["packages"]["find"]
    packages = find_packages(str(ROOT), include=finder["include"])
    roots = {package.partition(".")[0] for package in packages}
    assert roots == {"verl_ray", *OTHER_PACKAGES}


@pytest.mark.processes
@pytest.mark.parametrize("name", ["workers.py", "configs/__init__.py"])
def test_a_package_of_another_root_is_named(tmp_path: Path, name: str) -> None:
    """The folder of a user's script comes first on the path, and holds the package."""
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
    code += "from controllers.command_line import main; sys.exit(main(['check']))"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    package = name.partition("/")[0].removesuffix(".py")
    message = f"InstallationError: the package {package} is {mine}, expected {ROOT}/{package}/__init__.py, beside verl_ray"
    assert ended.returncode == 1 and ended.stderr.startswith(message)


def test_a_missing_file_is_answered_with_one_that_is_spelt_like_it(
    tmp_path: Path,
) -> None:
    for name in ("container_info.json", "train.jsonl"):
        (tmp_path / name).touch()
    meant = f"Did you mean {tmp_path}/train.jsonl?"
    assert path_suggestion(tmp_path / "trian.jsonl", "Give a file.") == meant
    # The same ending alone is no likeness.
    assert path_suggestion(tmp_path / "prompts.jsonl", "Give a file.") == "Give a file."
    link = tmp_path / "trains.jsonl"
    link.symlink_to(tmp_path / "gone")
    assert path_suggestion(tmp_path / "trian.jsonl", "Give a file.") == meant
    expected = f"It is a link to {tmp_path}/gone, which does not exist. Give a file."
    assert path_suggestion(link, "Give a file.") == expected


def test_a_path_cannot_look_like_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_RAY_FOLDER", str(tmp_path))
    assert expanded("$VERL_RAY_FOLDER/a") == expanded("${VERL_RAY_FOLDER}/a")
    odd = tmp_path / "c$d"
    odd.mkdir()
    monkeypatch.chdir(odd)
    with pytest.raises(UnknownPart, match=r"/c\$d/run has a \$, with which variables"):
        expanded("run")


def test_a_program_is_named_as_the_user_can_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / ".venv" / "bin" / "wandb"
    tool.parent.mkdir(parents=True)
    tool.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tool.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program("wandb") == ".venv/bin/wandb"
    assert program("nothing-of-ours") == "nothing-of-ours"
    monkeypatch.setenv("PATH", str(tool.parent))
    assert program("wandb") == "wandb"
