"""Names of the files that hold the snapshots of a run, and which of these count.

Invariant: a name has an owner that is seen on its node, so that what a killed run
leaves can be removed there. What was stored on a course that the run has left counts up
to the step that it went back to, wherever it is stored and whenever that ends.
Deliberately not here: the files (`snapshot_files.py`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from verl_ray.ownership import SHARED_FOLDER, Owner, prefix


@dataclass(frozen=True)
class SnapshotNames:
    """The names of a run's snapshots.

    Attributes:
        run: Folder of the run.
        driver: Its driver.
        courses: A word for each course that the run has taken, in order, and the last
            step of it that counts; None for the present course.
    """

    run: str
    driver: Owner
    courses: Mapping[str, int | None]

    @classmethod
    def of(cls, run: str) -> Self:
        """Return the names for this process as the driver of a run, on a new course."""
        return cls(run, Owner.here(), {_new_word(): None})

    def back_to(self, step: int) -> Self:
        """Return the names after the run went back to a step."""
        courses = {
            word: step if last is None else min(last, step)
            for word, last in self.courses.items()
        }
        return replace(self, courses={**courses, _new_word(): None})

    def anew(self) -> Self:
        """Return the names after the run went back to no snapshot, so none counts."""
        return replace(self, courses={_new_word(): None})

    @property
    def course(self) -> str:
        """The word for the present course."""
        return list(self.courses)[-1]

    def counts(self, course: str, step: int) -> bool:
        """Return whether a snapshot of this course and step counts."""
        if course not in self.courses:
            return False
        last = self.courses[course]
        return last is None or step <= last

    def place(self, role: str, rank: int) -> str:
        """Return the beginning of the paths of a rank's files, on this node.

        They are those of the rank itself, or their second copy. What an earlier driver
        of the run left on this node is removed.
        """
        # The owner has to outlive the rank, and has to be seen on this node.
        raylet = Owner.of(os.getppid())
        owner = self.driver if self.driver.is_visible else raylet
        of_run = short_word(f"{Owner.here().namespace} {self.run}")
        own = f"{of_run}-{short_word(str(self.driver))}-"
        for path in SHARED_FOLDER.glob(f"verl_ray-snapshot-*-{of_run}-*"):
            if own not in path.name:
                path.unlink(missing_ok=True)
        # Several nodes of Ray may share a machine, and do not share what is lost.
        node = short_word(str(raylet))
        return str(
            SHARED_FOLDER / f"{prefix('snapshot', owner)}{own}{node}-{role}-{rank}"
        )


def short_word(text: str) -> str:
    """Return a short word that stands for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _new_word() -> str:
    return secrets.token_hex(4)
