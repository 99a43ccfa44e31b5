"""Drivers and replicas that die, are held or are stopped: what a run promises of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray

from controllers.command_line import main
from tests.controllers.runs import GRADER, Inputs, command_here, make_inputs
from tests.kills import Run, differences, steps_of
from verl_ray.cluster.session import Session
from verl_ray.tracking.held_out_responses import recorded_responses
from verl_ray.tracking.rollouts import recorded_rollouts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

KILLED, STOPPED = -9, 130


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def undergo(run: Run, cluster: Session, *faults: str, code: int) -> str:
    """Let a process of its own go on with the run, and end with this code.

    Returns:
        What it said.
    """
    # Ray takes some time to free what processes held that were killed.
    until = time.monotonic() + 60
    while _free_cores() < ray.cluster_resources()["CPU"] and time.monotonic() < until:
        time.sleep(0.1)
    ended, output = run.process(faults, f"ray.address={cluster.address}")
    assert ended == code, output
    return output


def _free_cores() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def test_one_step_off_has_the_same_bits_whatever_happens(
    inputs: Inputs, cluster: Session, tmp_path: Path
) -> None:
    """A slow grader, a replica that is held, and replicas that die while the actor
    learns, while they get weights and while a checkpoint is written; a driver that dies
    as it publishes and as it saves, and one that is stopped.
    """
    whole = Run(inputs, tmp_path / "whole", "one_step_off", 7)
    command_here(cluster, *whole.arguments)

    slow = f"reward.functions.default={GRADER}:slow"
    broken = Run(inputs, tmp_path / "broken", "one_step_off", 7, [slow])
    # The fourth publication is that of step 3.
    faults = (
        "switching to training@2:kill=rollout-0",
        "publishing weights@4:kill=driver+0.01",
    )
    undergo(broken, cluster, *faults, code=KILLED)
    faults = (
        "publishing weights@2:kill=rollout-0+0.01",
        "step 4/7: saving@1:kill=driver",
    )
    undergo(broken, cluster, *faults, code=KILLED)
    faults = (
        "rollouts@3:hold=rollout-0",
        "step 4/7: saving@1:kill=rollout-0",
        "computing log-probs@3:stop=driver",
    )
    undergo(broken, cluster, *faults, code=STOPPED)
    command_here(cluster, *broken.arguments)

    # The line before the first step is of an evaluation.
    assert steps_of(broken.lines()) == list(range(8))
    for left, right in zip(whole.lines(), broken.lines(), strict=True):
        step = f"step {left['training/global_step']:.0f}"
        assert not list(differences(left, right, step))
    assert not list(differences(whole.weights(), broken.weights()))
    for recorded in (recorded_rollouts, recorded_responses):
        files, same_files = (recorded(run.folder) for run in (whole, broken))
        assert list(files) == list(same_files)
        for step, path in files.items():
            assert path.read_bytes() == same_files[step].read_bytes(), path.name
    assert list(recorded_rollouts(whole.folder)) == list(range(1, 8))
    ages = [line["staleness/age_mean"] for line in whole.lines()[1:]]
    assert ages == [0, 1, 1, 1, 1, 1, 1]
    for run in (whole, broken):
        assert run.trained() == list(range(56))


def test_every_prompt_is_trained_once(
    inputs: Inputs,
    cluster: Session,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows are open at every moment of an asynchronous run."""
    run = Run(inputs, tmp_path, "asynchronous", 7)
    faults = ("rollouts@3:kill=rollout-0+0.02", "publishing weights@6:kill=driver+0.01")
    undergo(run, cluster, *faults, code=KILLED)
    command_here(cluster, *run.arguments)

    assert run.trained() == list(range(56))
    lines = run.lines()
    assert steps_of(lines) == list(range(8))
    for line in lines[1:]:
        assert line["staleness/age_max"] <= 2
        shares = [line[f"staleness/share_of_age_{age}"] for age in range(3)]
        assert sum(shares) == pytest.approx(1)

    capsys.readouterr()
    assert main(["ledger", str(run.folder)]) == 0
    assert "trained exactly once" in capsys.readouterr().out


def test_two_replicas_that_share_devices_with_the_trainers_are_lost(
    inputs: Inputs, cluster: Session, tmp_path: Path
) -> None:
    """One while rows are open, one whose rows stand still while the actor learns, and
    the driver as it assigns credit.
    """
    run = Run(inputs, tmp_path, "carry_over", 6, ["rollout.num_replicas=2"])
    faults = (
        "rollouts@3:kill=rollout-1+0.02",
        "updating@3:kill=rollout-0",
        "assigning credit@4:kill=driver",
    )
    output = undergo(run, cluster, *faults, code=KILLED)
    for replica in range(2):
        assert f"rollout rank {replica} on" in output.replace("\n", " ")
    assert output.count("is lost and starts again") == 2
    undergo(run, cluster, "rollouts@4:kill=driver+0.02", code=KILLED)
    command_here(cluster, *run.arguments)

    assert run.trained() == list(range(48))
    lines = run.lines()
    assert steps_of(lines) == list(range(7))
    assert all(line["staleness/age_max"] <= 1 for line in lines[1:])


class Supervised(Run):
    """A run of supervised training."""

    @property
    def arguments(self) -> list[str]:
        return [
            "train", "--config-name", self.root, *self.inputs.overrides(self.folder), *self.changes,
            f"run.total_steps={self.steps}", "run.checkpoint_every=7", "run.recovery.snapshot_every=1",
        ]  # fmt: skip


def test_supervised_training_goes_on_from_what_a_killed_driver_has_left(
    inputs: Inputs, tmp_path: Path
) -> None:
    whole = Supervised(inputs, tmp_path / "whole", "", 7, root="sft")
    assert whole.process([])[0] == 0
    broken = Supervised(inputs, tmp_path / "broken", "", 7, root="sft")
    # Without its supervisor, any other run on the machine would remove it.
    code, output = broken.process(["--supervised", "step 5/7@1:kill=driver+0.02"])
    assert code == 0 and "from its snapshot" in output, output
    assert steps_of(broken.lines()) == list(range(1, 8))
    assert not list(differences(whole.lines(), broken.lines()))
    assert not list(differences(whole.weights(), broken.weights()))
