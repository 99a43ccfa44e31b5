"""The lock that reserves a run's folder for one run.

Invariant: one run at a time writes to a folder, and a run that was killed has released
it.
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
    """Reserve a folder for this process in the block.

    The operating system releases the lock when the process exits, however it exits. On
    a file system without locks, a warning is printed and the block runs.

    Raises:
        ConfigError: Another run holds the folder.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)

    # The file is made if it is missing, and its content survives if another run holds
    # it. The lock itself is released with the file.
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_held = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            if not is_held:
                print(
                    f"warning: {folder} cannot be locked against a second run: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                file.seek(0)
                # The other run may hold the lock and not have written its name yet.
                holder = file.read().strip() or "not yet known which"
                rule = f"another run is writing to it ({holder})"
                fix = "wait for it to end, or use another run.dir"
                raise ConfigError([Problem("run.dir", run_dir, rule, fix)]) from None
        else:
            # A run that finds the lock held can name the process that holds it.
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}")
            file.flush()

        yield
