"""Skipped optimizer steps: counted per role, and the end of a run after enough of them
in a row.
"""

from __future__ import annotations

import numpy as np
import pytest

from controllers.watch.gradients import GradientWatch
from verl_ray.engine.base import LossReport, StepReport
from verl_ray.errors import NonFiniteError
from verl_ray.rollout.probes import Probe
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
        watch.observe("critic", 7, [HEALTHY])
        watch.observe("actor", 7, [SICK])
    with pytest.raises(
        NonFiniteError,
        match=r"actor: 3 optimizer steps in a row \(run.max_skipped_steps\) .*norm\.w",
    ):
        watch.observe("actor", 7, [SICK])


def test_a_finite_step_in_between_begins_anew_and_the_count_survives_a_resume() -> None:
    watch = GradientWatch(3)
    watch.observe("actor", 7, [SICK, SICK, HEALTHY, SICK])
    resumed = GradientWatch(3)
    resumed.load_state(watch.state())
    resumed.observe("actor", 7, [SICK])
    with pytest.raises(NonFiniteError):
        resumed.observe("actor", 7, [SICK])


def test_an_update_that_broke_weights_is_named_at_once() -> None:
    """One rank has parts of two tensors, another one of the second and a third."""
    ranks = [
        UpdateReport(LossReport(), StepReport(1.25, 1e-3, broken=broken))
        for broken in (("a.weight", "b.weight"), ("b.weight", "c.weight"))
    ]
    words = (
        r"critic: the update of training step 7 left 3 tensors .* first a\.weight,"
        r" .*norm 1\.25, learning rate 0\.001.*critic\.optimizer\.lr"
    )
    with pytest.raises(NonFiniteError, match=words):
        GradientWatch(3).observe("critic", 7, [HEALTHY, ranks])


def test_a_trainer_that_computes_nan_blames_no_engine() -> None:
    tokens = (np.array([3, 4, 5], np.int32),)
    Probe(tokens, (np.float32([-1, -2]),), 1e-3).require_finite(4)
    with pytest.raises(NonFiniteError, match=r"actor: .* version 4 .*although every"):
        Probe(tokens, (np.float32([-1, np.nan]),), 1e-3).require_finite(4)
