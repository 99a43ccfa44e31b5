"""What there is of a path: the nearest folder that exists, the names beside it that are spelt like it.

Invariant: looking changes nothing. Deliberately not here: what a path is for.
"""

from __future__ import annotations

from pathlib import Path

from verl_ray.config.suggest import closest, either


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
