"""Where the time of a run went: its phases, as shares of its wall time.

Invariant: a pure function of the lines of metrics.jsonl and of the wall time. Phases
that run at the same time count each, so they may add up to more than their steps.

Deliberately not here: measuring (`verl_ray/profiling/timers.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PREFIX = "timing_s/"

STEP = "step"

TESTING = f"{PREFIX}testing"
"""Metric of the time of an evaluation."""

# The step holds all other times but these.
_OUTSIDE_STEP = ("testing", "save_checkpoint")

# The driver's own share of a step lies within the other phases. Groups wait in the
# queue, and engines generate, while all else goes on.
_NO_PHASE = (STEP, "controller", "queue", "rollouts")

_IN_WORDS = {
    "gen": "generation",
    "reward": "waiting for scores",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "values",
    "adv": "advantages",
    "update_actor": "update of the actor",
    "update_critic": "update of the critic",
    "update_reward": "update of the reward model",
    "update_weights": "publishing the weights",
    "testing": "evaluation",
    "save_checkpoint": "checkpoints",
}

REST_OF_STEPS = "the rest of the steps"
STARTING = "starting"
PREPARING = "making the inputs (warm start)"
REST = "ending, and work that was repeated"


def phase_durations(
    lines: Iterable[Mapping[str, float]],
    total_s: float | None,
    starting_s: float = 0.0,
    preparing_s: float = 0.0,
) -> dict[str, float]:
    """Return the seconds of each phase of a run in words, the longest first.

    Args:
        lines: Lines of metrics.jsonl.
        total_s: Wall time of the run; None if it is not known.
        starting_s: Wall time before the loop around the steps began.
        preparing_s: Wall time before that in which the run made its inputs.
    """
    sums: dict[str, float] = {}
    for line in lines:
        for name, seconds in line.items():
            # A time that is not a number is not equal to itself.
            phase = name.removeprefix(PREFIX)
            # A name with a slash is of a part of a phase.
            is_phase = name.startswith(PREFIX) and "/" not in phase
            if is_phase and seconds == seconds:
                sums[phase] = sums.get(phase, 0.0) + seconds

    step_s = sums.get(STEP, 0.0)
    phases = {name: seconds for name, seconds in sums.items() if name not in _NO_PHASE}
    outside_s = sum(phases.get(name, 0.0) for name in _OUTSIDE_STEP)
    inside_s = sum(phases.values()) - outside_s

    durations = {
        _IN_WORDS.get(name, name.replace("_", " ")): seconds
        for name, seconds in phases.items()
    }
    durations[REST_OF_STEPS] = max(0.0, step_s - inside_s)
    if total_s is not None:
        durations[STARTING] = starting_s
        durations[PREPARING] = preparing_s
        known_s = starting_s + preparing_s + step_s + outside_s
        durations[REST] = max(0.0, total_s - known_s)

    longest_first = sorted(durations.items(), key=lambda item: -item[1])
    return {name: seconds for name, seconds in longest_first if seconds > 0}
