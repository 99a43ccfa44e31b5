"""The best evaluation of a run: what is kept of it, and when a run has had enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from controllers.run.best import BestEvaluation
from controllers.run.loop import Loop
from controllers.run.recovery import Recovery
from controllers.run.resumption import Resumption
from controllers.run.stopping import Stopping
from controllers.watch.held_out_measures import Evaluation
from tests.cluster.crew import SlowWriter, processes
from tests.controllers.run.test_stopping import Cursor, forget
from tests.controllers.run.test_stopping import stoppable as stoppable
from tests.controllers.runs import Inputs
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import deferring_signals
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Interrupted
from verl_ray.tracking import Trackers
from verl_ray.tracking.jsonl import JsonlTracker

SUMS = "val-core/sums/acc/mean@1"
EVERY = "run.evaluate_every=2"
PRODUCTS = "val-core/products/acc/mean@1"
ACCURACY = {0: 0.1, 2: 0.5, 4: 0.2, 6: 0.7, 8: 0.3, 10: 0.4, 12: 0.9}


def noted(
    config: Config, evaluations: Mapping[int, float], name: str = SUMS
) -> BestEvaluation:
    best = BestEvaluation(config, None)
    for step, value in evaluations.items():
        best.note(step, {name: value, "actor/loss": 9.0})
    return best


def test_the_first_of_the_highest_means_is_the_best(
    inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.config("ppo", tmp_path)
    best = BestEvaluation(config, None)
    assert best.step is None and best.state() is None and best.in_words() is None
    best.note(0, {SUMS: 0.5, PRODUCTS: 0.1, "val-core/sums/acc/mean@16": 1.0})
    best.note(2, {SUMS: 0.25, PRODUCTS: 0.75})
    best.note(4, {SUMS: 0.5, PRODUCTS: 0.5})
    best.note(6, {SUMS: math.nan, PRODUCTS: 0.9})
    assert (best.step, best.value, best.is_exhausted) == (2, 0.5, False)
    assert best.in_words() == "step 2, by val-core/*/mean@1 0.5"


def test_a_metric_can_be_chosen_and_be_lowest(inputs: Inputs, tmp_path: Path) -> None:
    loss = "val-aux/held_out/loss"
    chosen = [EVERY, f"run.best_metric={loss}", "run.best_is=lowest"]
    config = inputs.config("ppo", tmp_path, *chosen)
    best = noted(config, {0: 3.0, 1: 2.0, 2: math.nan, 3: 2.5}, loss)
    assert (best.step, best.value) == (1, 2.0)
    with pytest.raises(ConfigError, match=rf"no such metric\n *fix:  It has {SUMS}\."):
        best.refuse_missing({SUMS: 0.5, "actor/loss": 9.0})
    best.refuse_missing({loss: 0.5})
    # A loss is best where it is lowest, unless the user says otherwise.
    assert noted(inputs.config("ppo", tmp_path, *chosen[:2]), {0: 3, 1: 2}, loss).step
    chosen[2] = "run.best_is=highest"
    assert not noted(inputs.config("ppo", tmp_path, *chosen), {0: 3, 1: 2}, loss).step

    # Values of another metric are not compared.
    saved = best.state()
    assert BestEvaluation(config, saved).state() == saved
    assert BestEvaluation(inputs.config("ppo", tmp_path), saved).step is None
    # Earlier versions saved none.
    assert BestEvaluation(config, None).step is None


def test_a_run_stops_after_evaluations_without_improvement(
    inputs: Inputs, tmp_path: Path
) -> None:
    values = {0: 0.1, 2: 0.5, 4: 0.5, 6: 0.2}
    config = inputs.config("ppo", tmp_path, EVERY, "run.early_stop=2")
    assert not noted(config, dict(list(values.items())[:3])).is_exhausted
    best = noted(config, values)
    assert best.is_exhausted
    assert best.early_stop_in_words() == (
        "stopped early at step 6, after 2 evaluations without improvement"
        f" (run.early_stop); best step 2, by {SUMS} 0.5"
    )

    # A resumed run knows it, unless it is given more evaluations.
    again = BestEvaluation(config, best.state())
    again.note(6, {SUMS: 0.9})  # it is evaluated already
    assert again.is_exhausted and again.step == 2
    patient = inputs.config("ppo", tmp_path, EVERY, "run.early_stop=3")
    assert not BestEvaluation(patient, best.state()).is_exhausted


class Learner(Cursor):
    """A trainer whose accuracies are known beforehand, by the step."""

    def evaluate(self) -> Evaluation:
        step = self.drawn // 8
        self.evaluated.append(step)
        return Evaluation({SUMS: ACCURACY[step]}, [])


@pytest.mark.cluster
@pytest.mark.usefixtures("stoppable")
def test_the_best_step_is_saved_and_stays(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.config(
        "ppo", tmp_path, EVERY, "run.checkpoint_every=3", "run.checkpoint_behind=true",
        "run.total_steps=12", "run.keep_checkpoints=1", "run.early_stop=2",
    )  # fmt: skip
    gates = tmp_path / "gates"
    gates.mkdir()
    for step in range(13):
        (gates / f"step_{step:08}").touch()
    role = Role("actor", "actor", SlowWriter, (str(gates),))
    sets = [processes("actor", 1, cpus=0.1)]

    with start_groups(sets, [role], stall_s=120, log_dir=tmp_path) as groups:

        def go_on(stopped_in: int | None) -> tuple[Learner, Recovery]:
            forget()
            found = Resumption(config)
            recovery = Recovery(found)
            trainer = Learner(groups={"actor": groups[role]}, stopped_in=stopped_in)
            state = recovery.tracker_state
            trackers = Trackers([JsonlTracker(tmp_path, recovery.recorded_step, state)])
            stopping = Stopping(config, recovery)
            loop = Loop(config.run, trainer, trackers, recovery, stopping)
            with deferring_signals():
                loop.run()
            trackers.close(failed=False)
            return trainer, recovery

        def kept() -> list[str]:
            return sorted(path.name for path in tmp_path.glob("checkpoints/step_*"))

        # Step 2 is the best so far and saved, although no checkpoint was due.
        with pytest.raises(Interrupted):
            go_on(stopped_in=5)
        assert kept() == ["step_00000002", "step_00000005"]
        # Step 6 is better, so step 2 goes.
        with pytest.raises(Interrupted):
            go_on(stopped_in=7)
        assert kept() == ["step_00000006", "step_00000007"]

        trainer, recovery = go_on(stopped_in=None)
        assert trainer.evaluated == [8, 10] and recovery.saved_step == 10
        assert kept() == ["step_00000006", "step_00000010"]
        ending = recovery.best.early_stop_in_words()
        assert ending is not None and ending.startswith("stopped early at step 10, aft")
        best: dict[str, Any] | None = Resumption(config).best
        assert best is not None and (best["step"], best["value"]) == (6, 0.7)

        # It has ended, and knows it.
        trainer, recovery = go_on(stopped_in=None)
        assert (trainer.drawn, trainer.evaluated) == (80, [])
        assert recovery.best.early_stop_in_words() == ending
