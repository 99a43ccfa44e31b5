"""The program `python -m scripts.bench`.

Invariant: signals and failures end it as they end `verl-ray`.
"""

from __future__ import annotations

import functools
import gc
import sys


def main() -> int:
    """Run the suite of the command line and return the exit code."""
    # Off until everything is imported, as in `verl-ray`.
    gc.disable()
    from controllers.command_line import exit_code_of, run_with_flags

    work = functools.partial(run_with_flags, "scripts.bench", sys.argv[1:])
    return exit_code_of(work)


if __name__ == "__main__":
    sys.exit(main())
