"""The command `verl-ray` as `python -m controllers`."""

from __future__ import annotations

import sys

from controllers.command_line import main

if __name__ == "__main__":
    sys.exit(main())
