"""Files that another user of the machine could have made."""

from __future__ import annotations

import os
from pathlib import Path

_NOBODY = 65534


def give_away(path: Path) -> None:
    """Let a path belong to another user, or, without root, let others write there."""
    if os.geteuid() == 0:
        os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
    else:
        path.chmod(0o777)
