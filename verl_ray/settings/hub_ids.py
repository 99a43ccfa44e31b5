"""Ids of the hub, and the folders of commits in its cache.

Invariant: they are functions of texts and of the environment; nothing is asked and
nothing is read for them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["model", "dataset"]

COMMIT = re.compile(r"[0-9a-f]{40}")

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w-][\w.-]*")

# What follows the owner in the name of a file is no name of a data set.
_FILES = re.compile(
    r".*\.(jsonl?|parquet|csv|tsv|arrow|txt|ya?ml|py|gz|zst|safetensors)"
)


def is_hub_id(path: str) -> bool:
    """Return whether a path of a configuration is an id: `owner/name`.

    Local paths of a configuration are absolute, and so no ids.
    """
    is_name = _ID.fullmatch(path) is not None and _FILES.fullmatch(path) is None
    # The hub gives no names with these.
    return is_name and "--" not in path and ".." not in path


@dataclass(frozen=True)
class Snapshot:
    """The files of a repository at one commit.

    Attributes:
        repository: Its id, such as Qwen/Qwen3-0.6B.
        commit: The commit, in 40 hexadecimal digits.
        kind: Whether it is a model or a data set.
        cache: Folder of the cache.
    """

    repository: str
    commit: str
    kind: Kind
    cache: Path

    @property
    def folder(self) -> Path:
        """The folder that `huggingface_hub` keeps the files in."""
        name = "--".join([f"{self.kind}s", *self.repository.split("/")])
        return self.cache / name / "snapshots" / self.commit

    @property
    def command(self) -> str:
        """The command that downloads the files where there is a network."""
        return (
            f"{download_command(self.repository, self.kind)} --revision {self.commit}"
        )


def snapshot_of(repository: str, commit: str, kind: Kind) -> Snapshot:
    """Return a snapshot in the cache of this process (`HF_HOME`)."""
    from huggingface_hub import constants

    return Snapshot(repository, commit, kind, Path(constants.HF_HUB_CACHE))


def snapshot_at(folder: str) -> Snapshot | None:
    """Return the snapshot that a folder of a cache holds; None for any other folder."""
    path = Path(folder)
    if path.parent.name != "snapshots" or COMMIT.fullmatch(path.name) is None:
        return None

    name = path.parents[1]
    kind, *parts = name.name.split("--")
    if len(parts) != 2 or kind not in ("models", "datasets"):
        return None
    kind_option: Kind = "model" if kind == "models" else "dataset"
    return Snapshot("/".join(parts), path.name, kind_option, name.parent)


def download_command(repository: str, kind: Kind) -> str:
    """Return the command that downloads the newest commit of a repository."""
    kind_option = " --repo-type dataset" if kind == "dataset" else ""
    return f"hf download {repository}{kind_option}"
