"""Real runs whose processes die or stop: they go on by themselves, with the same bits.

The whole table is `python -m tests.drills`; these are the drills of every change.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from controllers.run.faults import FAULTS
from tests.controllers.runs import Inputs, make_inputs
from tests.faults import BEGUN, HAPPENED
from tests.kills import ROOT, Run
from tests.layouts import LAYOUTS, STALL_S, differing, recorded
from tests.lost_nodes import has_second_copies, lose_node, two_nodes
from tests.tracking.wandb_files import steps_of as wandb_steps
from verl_ray.checkpoint.snapshot_files import short_word
from verl_ray.ownership import Owner
from verl_ray.private_files import shared_folder
from verl_ray.tracking.base import GLOBAL_STEP
from verl_ray.tracking.jsonl import METRICS, read_metrics

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

PATIENCE_S = 480


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs that nothing happens to."""
    runs = {}
    for name in ("ppo", "fsdp"):
        runs[name] = LAYOUTS[name].run(inputs, tmp_path_factory.mktemp(name))
        code, output = runs[name].process([])
        assert code == 0, output
    return runs


def drilled(
    whole: dict[str, Run], layout: str, folder: Path, *faults: str, goes_back: int
) -> list[dict[str, object]]:
    """Make a run in which faults happen; return what the run noticed.

    The bits are those of a run without faults, and so many times it goes back to a
    finished step: to a snapshot, or to the checkpoint of the same step where a slow
    machine has not finished the snapshot yet.
    """
    broken = LAYOUTS[layout].run(whole[layout].inputs, folder)
    code, output = broken.process(faults)
    assert code == 0, output
    assert len(recorded(folder / HAPPENED)) == len(faults), output
    assert output.count("continuing after step") == goes_back, output
    assert output.count("from its snapshot") >= 1, output
    assert differing(LAYOUTS[layout], whole[layout], broken) == []
    return recorded(folder / FAULTS)


def test_every_role_may_die(whole: dict[str, Run], tmp_path: Path) -> None:
    """The counts are those of the driver's phases, and a step that is made again has
    its phases again.
    """
    noticed = drilled(
        whole,
        "ppo",
        tmp_path,
        # Nothing is saved yet, so the run goes back to its beginning.
        "computing log-probs@1:kill=actor-0",
        # While it is idle, in step 2.
        "updating@2:kill=reference-0",
        "updating@3:kill=critic-0",
        # While step 1 is scored, and in the evaluation of step 4.
        "rollouts@8:kill=reward-0",
        "rollouts@17:kill=reward-0",
        "computing log-probs@7:kill=reference-0",
        "step 4/5: saving@1:kill=actor-0",
        goes_back=2,
    )
    cures = sorted((str(fault["role"]), str(fault["cure"])) for fault in noticed)
    assert cures == [
        ("actor", "go back"),
        ("actor", "go back"),
        ("critic", "go back"),
        ("reference", "restart"),
        ("reference", "restart"),
        ("reward", "restart"),
        ("reward", "restart"),
    ]
    assert all(fault["kind"] == "died" for fault in noticed)


def test_ranks_may_die_and_stop_while_prompts_are_drawn_ahead(
    whole: dict[str, Run], tmp_path: Path
) -> None:
    noticed = drilled(
        whole,
        "fsdp",
        tmp_path,
        # The replica waits for what this rank was to send.
        "publishing weights@3:kill=actor-1",
        "updating@4:kill=actor-1",
        "computing log-probs@5:freeze=actor-0",
        "publishing weights@8:kill=rollout-0",
        # What the ledger has written for this checkpoint stays.
        "step 4/5: saving@1:kill=actor-1",
        goes_back=4,
    )
    assert [(fault["rank"], fault["kind"]) for fault in noticed] == [
        (1, "died"),
        (1, "died"),
        (0, "stalled"),
        (1, "died"),
    ]
    phases = recorded(tmp_path / BEGUN)
    beginnings = [each["time"] for each in phases if each["phase"] == "beginning"]
    assert float(beginnings[1]) - float(noticed[0]["time"]) < STALL_S


def test_a_run_outlives_its_driver_and_its_cluster(
    whole: dict[str, Run], tmp_path: Path
) -> None:
    layout = LAYOUTS["ppo"]
    # The next driver goes on, although the first was to find no run here.
    run = layout.run(
        whole["ppo"].inputs, tmp_path / "run", "run.resume=none",
        "tracking.wandb.mode=offline", "tracking.tensorboard=true",
    )  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, "-m", "controllers", *run.arguments],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as supervisor:  # fmt: skip
        families = []
        for step, victim in ((2, "driver"), (4, "raylet")):
            _wait_for_step(supervisor, run, step)
            (driver,) = psutil.Process(supervisor.pid).children()
            family = driver.children(recursive=True)
            named = {"driver": driver, **{child.name(): child for child in family}}
            named[victim].kill()
            families += family
        output, _ = supervisor.communicate(timeout=PATIENCE_S)

    assert supervisor.returncode == 0, output
    assert output.count("the driver ended after step") == 2, output
    assert "signal SIGKILL" in output and "process raylet has ended" in output
    assert differing(layout, whole["ppo"], run) == []
    assert not [process for process in families if process.is_running()]
    steps = list(range(layout.steps + 1))
    assert sorted(map(int, wandb_steps(run.folder))) == steps
    scalars = EventAccumulator(str(run.folder / "tensorboard"))
    scalars.Reload()
    assert [each.step for each in scalars.Scalars(GLOBAL_STEP)] == steps


def test_a_run_outlives_a_node_and_all_that_was_in_its_memory(
    whole: dict[str, Run], tmp_path: Path
) -> None:
    """The roles that learn find the copies of their snapshots on the node that is left."""
    layout = LAYOUTS["ppo"]
    with two_nodes() as cluster:
        # No checkpoint holds a step that could be gone back to.
        run = layout.run(
            whole["ppo"].inputs, tmp_path / "run", f"ray.address={cluster.address}",
            "run.checkpoint_every=100",
        )  # fmt: skip
        # It stands still in step 4, so there is time for the copies of an earlier one.
        command = ["-m", "tests.faults", "updating@4:freeze=critic-0", "--"]
        with subprocess.Popen(
            [sys.executable, *command, *run.arguments],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as driver:  # fmt: skip
            until = time.monotonic() + PATIENCE_S
            while not (recorded(run.folder / HAPPENED) and has_second_copies(cluster)):
                assert driver.poll() is None and time.monotonic() < until
                time.sleep(0.1)
            lose_node(cluster)
            output, _ = driver.communicate(timeout=PATIENCE_S)
        run_word = short_word(f"{Owner.here().namespace} {run.folder}")
        left = list(shared_folder().glob(f"*-{run_word}-*"))

    assert driver.returncode == 0, output
    assert output.count("from its snapshot") == 1, output
    assert differing(layout, whole["ppo"], run) == []
    assert left == []


def _wait_for_step(process: subprocess.Popen[str], run: Run, step: int) -> None:
    until = time.monotonic() + PATIENCE_S
    record = run.folder / METRICS
    while not record.exists() or len(read_metrics(record)) <= step:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)


def test_what_cannot_be_cured_ends_the_run_and_names_it(
    whole: dict[str, Run], tmp_path: Path
) -> None:
    """A process that dies in the same step again. The step before is in snapshots alone:
    it is brought back, saved, and gone on from.
    """
    broken = LAYOUTS["ppo"].run(whole["ppo"].inputs, tmp_path)
    code, output = broken.process(
        ["updating@4:kill=critic-0", "updating@5:kill=critic-0"]
    )
    assert code == 1
    assert "WorkerDied: critic rank 0" in output
    assert "this is the second time at step 4" in output
    assert "Traceback" not in output.partition("last output")[0]
    assert f"step 3 is saved in {tmp_path / 'checkpoints'}" in output

    code, output = broken.process([])
    assert code == 0, output
    assert "continuing after step 3 from" in output
    assert differing(LAYOUTS["ppo"], whole["ppo"], broken) == []
