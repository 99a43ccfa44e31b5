"""Paths that do not exist, paths to type, and the place of the program's own packages.

Invariant: nothing here changes a file, and `expanded` alone knows what `~` and `$VAR`
stand for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
from difflib import get_close_matches
from pathlib import Path

from verl_ray.errors import ConfigError, InstallationError, Problem
from verl_ray.suggest import either

SCRIPT = "VERL_RAY_SCRIPT"
"""Environment variable in which a script that stands for a command names itself."""

OTHER_PACKAGES = ("workers", "controllers", "configs")
"""Packages of this program besides `verl_ray`. Their names are common ones."""

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")

# Below this likeness two names of files are two files, not one with a wrong letter.
_LEAST_LIKENESS = 0.8


def refuse_foreign_packages() -> None:
    """Raise InstallationError unless all packages of the program are in one folder."""
    root = Path(__file__).resolve().parents[1]
    for name in OTHER_PACKAGES:
        actual = _location_of_package(name)
        expected = root / name / "__init__.py"
        if actual != expected:
            raise InstallationError(
                f"the package {name} is {actual or 'missing'}, expected {expected},"
                " beside verl_ray. Start from another folder, or take that path out of"
                " PYTHONPATH"
            )


def digest_of_program() -> str:
    """Return a digest of the code of all packages of the program."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for package in ("verl_ray", *OTHER_PACKAGES):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _location_of_package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve()


class UnknownPart(ValueError):
    """A path begins with a home folder, or has a variable, that does not exist.

    Attributes:
        rule: What does not exist.
        fix: What would be right.
    """

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule, fix)
        self.rule = rule
        self.fix = fix


def expanded(path: str) -> str:
    """Return a local path absolute, with `~`, `$VAR` and `${VAR}` replaced.

    An empty text or a URL stays as it is.

    Raises:
        UnknownPart: There is no such environment variable, or no such home folder.
    """
    if not path.strip() or "://" in path:
        return path

    def value_of(match: re.Match[str]) -> str:
        name = match[1].strip("{}")
        if name not in os.environ:
            rule = f"there is no environment variable {name}"
            raise UnknownPart(rule, f"Set it (export {name}=...), or write the path.")
        return os.environ[name]

    plain = Path(_VARIABLE.sub(value_of, path))
    try:
        whole = str(plain.expanduser().absolute())
    except RuntimeError:
        rule = f"there is no home folder {plain.parts[0]}"
        raise UnknownPart(rule, "Write the path.") from None
    # Runs write paths down, and whoever reads them takes it for a variable.
    if "$" in whole:
        rule = f"the path {whole} has a $, with which variables begin"
        raise UnknownPart(rule, "Use a folder without one, or a link to it.")
    return whole


def typed_path(argument: str, path: str) -> Path:
    """Return the path that an argument of a command line stands for.

    Raises:
        ConfigError: `expanded` knows no part of it, told under the argument's name.
    """
    try:
        return Path(expanded(path))
    except UnknownPart as error:
        problem = Problem(argument, path, error.rule, error.fix)
        raise ConfigError([problem]) from None


def nearest_existing(path: str) -> Path:
    """The path itself or its nearest parent, whichever exists."""
    directory = Path(path).absolute()
    while not directory.exists():
        directory = directory.parent
    return directory


def path_suggestion(path: Path, otherwise: str) -> str:
    """Advice for a path that does not exist.

    Args:
        path: The path.
        otherwise: Advice if no path in the same folder is spelt like it.
    """
    if path.is_symlink():
        return f"It is a link to {path.readlink()}, which does not exist. {otherwise}"
    if not path.parent.is_dir():
        return f"{nearest_existing(str(path))} is as far as the path goes. {otherwise}"

    # A link that leads nowhere is no way on.
    names = [entry.name for entry in path.parent.iterdir() if entry.exists()]
    candidates = get_close_matches(path.name, names, cutoff=_LEAST_LIKENESS)
    if not candidates:
        return otherwise
    return f"Did you mean {either(path.with_name(name) for name in candidates)}?"


def in_ray_package(path: Path) -> bool:
    """Whether `path` is in the copy of a working directory that Ray made for a job.

    Ray deletes that copy.
    """
    return any(part.startswith("_ray_pkg_") for part in path.parts)


def program(name: str) -> str:
    """Return what the user types to call a program of this installation."""
    beside = Path(sys.executable).with_name(name)
    on_path = shutil.which(name)
    if not beside.exists():
        return name
    # The script does not put its programs on the user's PATH.
    is_on_path = on_path is not None and Path(on_path).samefile(beside)
    if is_on_path and not os.environ.get(SCRIPT):
        return name
    return shown_path(beside)


def shown_path(path: Path) -> str:
    """Return a path as it is shortest where the user is."""
    here = Path.cwd()
    # The script has left the folder of its user, which is known only if it was called
    # by the path that it has from here. A job's folder is a copy.
    script = os.environ.get(SCRIPT)
    has_moved = script is not None and Path(script) != Path("scripts/quickstart")
    if has_moved or in_ray_package(here) or not path.is_relative_to(here):
        return str(path)
    return str(path.relative_to(here))


# --------------------------------------------------------- the argument RUN of commands

OUTPUTS = Path("outputs")
RUN_HELP = f"the folder of a run, or its name under {OUTPUTS}/"
RUN_HINT = f"Give the folder of a run ({OUTPUTS}/NAME), or its NAME."


def run_folder(run: str) -> Path:
    """Return the folder of a run.

    Args:
        run: The folder, or the name of the run.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = typed_path("RUN", run)
    in_outputs = OUTPUTS / run
    if not folder.is_dir() and in_outputs.is_dir():
        folder = in_outputs

    if not folder.is_dir():
        fix = path_suggestion(folder, RUN_HINT)
        raise ConfigError([Problem("RUN", run, "there is no such folder", fix)])
    return folder
