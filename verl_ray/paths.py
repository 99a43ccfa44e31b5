"""What there is of a path: the nearest folder that exists, the names beside it that are spelt like it; and whether the
program's own packages are where they belong.

Invariant: looking changes nothing. Deliberately not here: what a path is for.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import verl_ray
from verl_ray.config.suggest import closest, either
from verl_ray.errors import InstallationError

OTHER_PACKAGES = ("workers", "controllers", "configs")
"""What belongs to this program besides `verl_ray`. Their names are common ones."""


def refuse_foreign_packages() -> None:
    """Raise InstallationError if one of the program's packages is found elsewhere than `verl_ray` is."""
    root = Path(verl_ray.__file__).resolve().parents[1]
    for name in OTHER_PACKAGES:
        spec = importlib.util.find_spec(name)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        expected = root / name / "__init__.py"
        if found != expected:
            raise InstallationError(
                f"the package {name} is {found or 'missing'}, expected {expected}, beside verl_ray. Start from another "
                "folder, or take that path out of PYTHONPATH"
            )


def nearest_existing(path: str) -> Path:
    directory = Path(path).expanduser().absolute()
    while not directory.exists():
        directory = directory.parent
    return directory


def near(path: Path, otherwise: str) -> str:
    """The paths beside `path` that are spelt like it, or else what would be right."""
    if not path.parent.is_dir():
        return f"{nearest_existing(str(path))} is as far as the path goes. {otherwise}"
    names = closest(path.name, (entry.name for entry in path.parent.iterdir()))
    return f"Did you mean {either(path.with_name(name) for name in names)}?" if names else otherwise


def in_ray_package(path: Path) -> bool:
    """Whether `path` lies in the copy of a working directory that Ray unpacked for a job, and will delete."""
    return any(part.startswith("_ray_pkg_") for part in path.parts)
