"""Skipped optimizer steps: counted per role, and the end of a run after enough of them
in a row.
"""

from __future__ import annotations

import pytest

from controllers.watch.update_measures import GradientWatch
from verl_ray.engine.base import LossReport, StepReport
from verl_ray.errors import NonFiniteError
from workers.model_worker import UpdateReport

HEALTHY = [UpdateReport(LossReport(), StepReport(1.0, 1e-3))]
SICK = [
    *HEALTHY,
    UpdateReport(LossReport(), StepReport(float("nan"), 1e-3, "norm.weight")),
]  # on one of two ranks


def test_a_role_without_finite_gradients_stops_the_run_however_healthy_the_other_is() -> (
    None
):
    watch = GradientWatch(3)
    for _ in range(2):
        watch.observe("critic", [HEALTHY])
        watch.observe("actor", [SICK])
    with pytest.raises(
        NonFiniteError,
        match=r"actor: 3 optimizer steps in a row \(run.max_skipped_steps\) .*norm\.w",
    ):
        watch.observe("actor", [SICK])


def test_a_finite_step_in_between_begins_anew_and_the_count_survives_a_resume() -> None:
    watch = GradientWatch(3)
    watch.observe("actor", [SICK, SICK, HEALTHY, SICK])
    resumed = GradientWatch(3)
    resumed.load_state(watch.state())
    resumed.observe("actor", [SICK])
    with pytest.raises(NonFiniteError):
        resumed.observe("actor", [SICK])
