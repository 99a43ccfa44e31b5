"""Whose a run's folder is while a run writes to it.

Invariant: one run at a time writes to a folder, and a run that was killed has let go of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from verl_ray.errors import ConfigError, Problem


@contextlib.contextmanager
def claim(run_dir: str) -> Iterator[None]:
    """One run at a time writes to a folder: the lock ends with the process that holds it, however that ends.

    Raises ConfigError when another run holds it. A file system without locks is a warning.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                print(f"warning: {folder} cannot be locked against a second run: {error}", file=sys.stderr, flush=True)
            else:
                file.seek(0)
                rule = f"another run is writing to it ({file.read().strip() or 'not yet known which'})"
                fix = "wait for it to end, or use another run.dir"
                raise ConfigError([Problem("run.dir", run_dir, rule, fix)]) from None
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}")
            file.flush()
        yield
