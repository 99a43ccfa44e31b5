"""What a run stands on, and how it gives way: a service, a disk and the clock.

A fault of a run only writes the line that says when it happened (`tests/faults.py`).
Whoever makes the run reads it, and acts. Deliberately not here: what becomes of the run
(`tests/drill_course.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.configuration import compose
from tests.drill_choice import Drill
from tests.faults import BEGUN, HAPPENED
from tests.kills import ROOT, Run
from tests.layouts import recorded
from tests.preflight.configs import settled
from tests.rewards.services import Items, Reply, Service, lengths
from verl_ray.preflight.disk_space import bytes_to_come
from verl_ray.preflight.machine import MIB

OUTAGE_S = 30.0
HOUR_S = 3600
_SHIFTED_S = 3.0
"""Seconds for which the clock is wrong, besides those that its drill takes to look."""
_CLOCK = Path(__file__).with_name("shifted_clock.c")
_SLACK_BYTES = MIB
"""Disk space beside what is asked for: each file takes whole pages."""


@dataclass(frozen=True)
class Surroundings:
    """What a run stands on.

    Attributes:
        folder: Its run.dir.
        environment: Variables of its processes.
        act: What is done as the fault happens; it returns what is wrong.
        wrong: What was wrong.
    """

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    act: Callable[[], list[str]] = list
    wrong: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Act once the fault has happened, if it does before the end."""
        ended = threading.Event()

        def wait_and_act() -> None:
            while not (self.folder / HAPPENED).exists():
                if ended.wait(0.02):
                    return
            self.wrong.extend(self.act())

        thread = threading.Thread(target=wait_and_act)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextlib.contextmanager
def surrounding(
    drill: Drill, run: Run, service: ScoringService
) -> Iterator[Surroundings]:
    """Set up what a run of a drill stands on, until its end.

    Args:
        drill: The drill.
        run: The run, whose folder is another one on a small disk.
        service: The service that scores where the layout has one.
    """
    if drill.layout == "cramped":
        with _small_disk(run) as surroundings:
            yield surroundings
    elif drill.fault == "hour":
        yield _settable_clock(run)
    else:
        service.told_by = run.folder / HAPPENED
        yield Surroundings(run.folder)


def hindrance(drill: Drill, folder: Path) -> str | None:
    """Return why this machine cannot make a drill; None if it can.

    Args:
        drill: The drill.
        folder: A folder to try it in.
    """
    if drill.fault == "hour" and shutil.which("cc") is None:
        return "there is no C compiler (cc) to build the clock that can be set"
    if drill.layout == "cramped":
        with tempfile.TemporaryDirectory(dir=folder) as name:
            mounted = _mount(Path(name), MIB)
            if mounted.returncode:
                return f"no small disk can be mounted: {mounted.stderr.strip()}"
            _unmount(Path(name))
    return None


# ------------------------------------------------------------------------- a service


class ScoringService(Service):
    """A service that scores, and that answers 500 for a while after a fault."""

    told_by: Path | None = None
    """The file that says when the fault happened, of the run that it scores for."""

    def __init__(self) -> None:
        super().__init__()
        self.behave = self._score
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def __enter__(self) -> ScoringService:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def _score(self, number: int, items: Items) -> Reply:
        return Reply(b"", status=500) if self._is_away() else lengths(items)

    def _is_away(self) -> bool:
        for line in recorded(self.told_by) if self.told_by is not None else []:
            if time.time() < float(str(line["time"])) + OUTAGE_S:
                return True
        return False


# --------------------------------------------------------------------- a small disk


@contextlib.contextmanager
def _small_disk(run: Run) -> Iterator[Surroundings]:
    """Give a run a disk with room for what its first start asks for, and no more."""
    disk = run.folder.with_suffix(".disk")
    disk.mkdir()
    root, *overrides = run.arguments[2:]
    config = settled(compose(root, [*overrides, f"run.dir={disk / 'new'}"]))
    asked = bytes_to_come(config, learns=True)

    def look() -> list[str]:
        free = shutil.disk_usage(disk).free
        if asked <= free:
            return [f"a new run asks for {asked} bytes, and {free} are free"]
        return []

    mounted = _mount(disk, asked + _SLACK_BYTES)
    assert mounted.returncode == 0, mounted.stderr
    try:
        yield Surroundings(disk / "run", act=look)
    finally:
        _unmount(disk)


def _mount(folder: Path, nbytes: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "drill", str(folder)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip


def _unmount(folder: Path) -> None:
    # Lazily, since a process of a run that did not go on may still have files there.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


# ------------------------------------------------------------------------- the clock


def _settable_clock(run: Run) -> Surroundings:
    """Give a run a clock that goes wrong by an hour for a few seconds."""
    library = run.folder.with_suffix(".so")
    build = ["cc", "-shared", "-fPIC", "-O2", "-o", library, _CLOCK, "-ldl"]
    subprocess.run(build, check=True)
    shift = run.folder.with_suffix(".shift")
    environment = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(shift)}

    def set_by(seconds: int) -> None:
        # In place, since all processes have mapped the file.
        with shift.open("r+b") as file:
            file.write(struct.pack("=q", seconds))

    def set_and_look() -> list[str]:
        set_by(HOUR_S)
        wrong = _of_status(run, environment, "an hour ahead")
        time.sleep(_SHIFTED_S)
        last = float(str(recorded(run.folder / BEGUN)[-1]["time"]))
        if last - time.time() < HOUR_S / 2:
            wrong.append("the driver has not seen that the clock is wrong")
        set_by(0)
        return [*wrong, *_of_status(run, environment, "set back")]

    shift.write_bytes(bytes(8))
    return Surroundings(run.folder, environment, set_and_look)


def _of_status(run: Run, environment: Mapping[str, str], when: str) -> list[str]:
    """Return what `verl-ray status` says wrongly of a run whose processes all run."""
    ended = subprocess.run(
        [sys.executable, "-m", "controllers", "status", str(run.folder)],
        cwd=ROOT, env={**os.environ, **environment}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    first = ended.stdout.partition("\n")[0]
    print(f"status, {when}: {first}", file=sys.stderr)
    is_right = ended.returncode == 0 and first.startswith("driver ")
    gone = ("does not run any more", "has ended", "is stopped")
    if is_right and not any(word in ended.stdout for word in gone):
        return []
    return [f"status, {when}: {ended.stdout}"]
