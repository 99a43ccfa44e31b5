"""Ranks of a test: processes forked from a parent that imports once what all of them
need.

Invariant: no rank outlives `run_ranks`, and the first that fails ends the others, which
would wait for it. The parent is a new process that starts no thread and computes
nothing, so that it can be forked. Deliberately not here: what ranks do, and how they
meet.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.bench.processes import fork

if TYPE_CHECKING:  # the parent of ranks imports no more than they need
    import pytest

ROOT = Path(__file__).parents[1]
THREADS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}  # there are more ranks than cores


Place = Sequence[str | int]


def run_ranks(
    module: str,
    waves: Sequence[Sequence[Place]],
    folder: Path,
    *,
    deadline_s: float,
    imports: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> None:
    """Call `main(*place, folder)` of a module for each place, in processes of their
    own: those of a wave at the same time, one wave after another.

    `imports` are what it imports only while it runs, and `settings` go into its
    environment. Raises AssertionError with what all of them said when one fails, and
    TimeoutExpired when they are not done in time.
    """
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        __name__,
        module,
        json.dumps(waves),
        str(folder),
        *imports,
    ]
    environment = {**os.environ, **THREADS, **(settings or {})}
    with (folder / "said").open("wb") as said:
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=deadline_s,
        )
    words = "\n".join(
        f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("said*"))
    )
    assert ended.returncode == 0, words


def slow_tests_asked(request: pytest.FixtureRequest) -> bool:
    """Whether tests that are marked slow, as those of four ranks are, are among those
    of this module that are run.
    """
    own = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("slow") is not None for item in own)


def _rank(module: str, place: Place, folder: Path) -> None:
    with (folder / "_".join(["said", *map(str, place)])).open("wb") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.modules[module].main(*place, folder)


def _parent(
    module: str, waves: Sequence[Sequence[Place]], folder: Path, imports: Sequence[str]
) -> None:
    for name in (module, *imports):
        importlib.import_module(name)
    # What is imported stays; Megatron-FSDP goes through all objects each time it shards
    # a model
    gc.freeze()
    for places in waves:
        fork(_rank, [(module, place, folder) for place in places])


if __name__ == "__main__":
    _parent(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
