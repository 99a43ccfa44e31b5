"""The drills that there are, and those of them that the table has.

Deliberately not here: how a drill is made (`tests/drill_course.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults import LOADING, Fault
from tests.layouts import LAYOUTS, SURROUNDED

FAULTS = ("kill", "freeze", "slow", "starve", "full")
"""What may happen to a process of a run."""

PHASES = {
    "start": (LOADING, 1, 0.0),
    "first publication": ("publishing weights", 1, 0.0),
    "first evaluation": ("evaluating", 1, 0.0),
    # Step 4 is the one before which all of a step was done, checkpoints included.
    "generate": ("generating", 4, 0.0),
    "score": ("scoring", 4, 0.0),
    "measure": ("computing log-probs", 4, 0.0),
    "learn": ("updating", 4, 0.0),
    # Weights are published once before the first step.
    "publish": ("publishing weights", 5, 0.0),
    # An evaluation has two phases: generating and scoring.
    "evaluate": ("evaluating", 3, 0.0),
    # There is none to go back to before it.
    "first checkpoint": ("step 2/5: saving", 1, 0.0),
    "checkpoint": ("step 4/5: saving", 1, 0.0),
    # The last phase, after which results are written and processes end.
    "end": ("step 5/5: saving", 2, 0.3),
}
"""Phases of a run of five steps: beginning of the driver's text for it, the how manieth
of this text, and seconds from its beginning."""

COMMON_PROCESSES = (
    "driver",
    "raylet",
    "gcs_server",
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
)
"""The processes that every run has beside those of its layout."""


@dataclass(frozen=True)
class Drill:
    """A fault of a process in a phase of a run.

    Attributes:
        layout: Name of the layout of the run.
        process: Name of the process.
        fault: Name of the fault.
        phase: Name of the phase.
    """

    layout: str
    process: str
    fault: str
    phase: str

    @property
    def happening(self) -> str:
        """The fault as `tests/faults.py` reads it."""
        text, count, after_s = PHASES[self.phase]
        return str(Fault(text, count, self.fault, self.process, after_s))

    @property
    def kind(self) -> str:
        """What the process is, whatever its rank."""
        grader = (LAYOUTS | SURROUNDED)[self.layout].grader
        if self.process == "reward-0" and grader is not None:
            return grader
        if self.process.endswith("-child"):
            return "reward's child"
        return self.process.partition("-0")[0].partition("-1")[0]


SURROUNDING_DRILLS = (
    # The service that scores answers nothing for a while.
    Drill("http", "service", "outage", "generate"),
    # The disk has room for one start: the second has to know what is there already.
    Drill("cramped", "driver", "kill", "checkpoint"),
    # There is no checkpoint, only what the first driver and the ranks have in memory.
    Drill("unsaved", "driver", "kill", "learn"),
    # Somebody sets the clock, and sets it back.
    Drill("long", "clock", "hour", "learn"),
)
"""Drills of what a run stands on, each with a layout of its own."""


def every_drill() -> Iterator[Drill]:
    """Yield all that could be made."""
    for name, layout in LAYOUTS.items():
        children = () if layout.grader else ("reward-0-child",)
        for process in (*layout.processes, *children, *COMMON_PROCESSES):
            for fault in FAULTS:
                for phase in PHASES:
                    yield Drill(name, process, fault, phase)
    yield from SURROUNDING_DRILLS


def chosen_drills() -> Iterator[Drill]:
    """Yield those of the table: each kind of process and fault, and each phase."""
    for layout, faults, processes, phases in _CHOSEN:
        for fault in faults.split():
            for process in processes.split():
                for phase in phases:
                    yield Drill(layout, process, fault, phase)
    yield from SURROUNDING_DRILLS


_ALL_FAULTS = "kill freeze slow"

# Layout, faults, processes, phases.
_CHOSEN = (
    ("small", "kill", "actor-0 rollout-0 driver", PHASES),
    ("small", "kill", "raylet gcs_server", ("generate", "publish")),
    ("small", "kill", "ray::DashboardAgent ray::RuntimeEnvAgent", ("start", "learn")),
    ("small", _ALL_FAULTS, "reward-0 reward-0-child", ("score",)),
    ("small", "freeze slow", "actor-0 raylet gcs_server driver", ("learn",)),
    ("small", "freeze slow", "rollout-0", ("generate",)),
    ("small", "starve", "actor-0", ("learn",)),
    ("small", "starve", "rollout-0", ("generate",)),
    ("small", "starve", "reward-0", ("score",)),
    ("small", "full", "actor-0 driver", ("first checkpoint",)),
    ("ppo", _ALL_FAULTS, "critic-0", ("learn",)),
    ("ppo", _ALL_FAULTS, "reference-0", ("measure",)),
    ("fsdp", _ALL_FAULTS, "actor-1", ("learn",)),
    ("fsdp", "full", "actor-1", ("first checkpoint",)),
    ("model", f"{_ALL_FAULTS} starve", "reward-0", ("score",)),
    ("model", _ALL_FAULTS, "wandb-core", ("learn",)),
    ("judge", _ALL_FAULTS, "reward-0", ("score",)),
)
