"""The program `verl-ray`, also as `python -m controllers`.

A run is made by a driver under a supervisor, and any other command by this process.
"""

from __future__ import annotations

import gc
import sys

from controllers.supervisor import (
    is_supervised,
    report_to_supervisor,
    reports,
    supervise,
)


def main() -> int:
    """Run the command of this process and return its exit code."""
    if is_supervised():
        report_to_supervisor()
    elif sys.argv[1:2] == ["train"]:
        return supervise(sys.orig_argv)

    # Off until everything is imported: it took a tenth of the start to go through what
    # imports leave behind.
    gc.disable()
    # The supervisor does without it, and without the second that it takes.
    from controllers.command_line import main as run_command

    try:
        return run_command()
    finally:
        # A driver that was ended from outside, or by Ray, does not come here.
        reports().end()


if __name__ == "__main__":
    sys.exit(main())
