"""What `auto` came to in a run: in its config.yaml, in runs begun from that file, and
in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from controllers.run.resumption import Resumption
from controllers.system.plan import ClusterShape, resolve_on
from tests.controllers.runs import SHAPE, Inputs, command_here
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.cluster.session import Session
from verl_ray.config.load import to_tree
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError

TWO_NODES = ClusterShape(cores=(8, 8), gpus_per_node=(0, 0))


def values(tree: Any) -> Iterator[object]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from values(value)
    else:
        yield tree


def config_of(run_dir: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((run_dir / "config.yaml").read_text())
    return tree


@pytest.mark.cluster
def test_a_run_can_be_begun_again_from_its_config(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    typed = [
        one for one in inputs.rl(first) if not one.startswith("run.threads_per_rank=")
    ]
    typed = [
        "train",
        "--config-name",
        "grpo",
        *typed,
        "run.name=one",
        "run.checkpoint_every=1",
    ]
    command_here(cluster, *typed, "run.total_steps=1")
    write_checkpoints = config_of(first)
    # Which checkpoint is the newest is found anew each time.
    assert write_checkpoints["run"].pop("resume") == "auto"
    assert "auto" not in values(write_checkpoints)
    write_checkpoints["run"]["resume"] = "auto"
    assert write_checkpoints["rollout"]["sync"]["transport"] == "shared_memory"

    from_file = ["train", "--config-name", "config", "--config-dir", str(first)]
    command_here(cluster, *from_file, f"run.dir={second}")
    again = config_of(second)
    assert again | {"run": again["run"] | {"dir": str(first)}} == write_checkpoints
    # In its own folder it is the same run, which is finished.
    finished = command_here(cluster, *from_file).stdout
    assert f"{first} is finished: 1 steps are done" in finished

    said = command_here(cluster, *from_file, "run.total_steps=2").stdout
    changes = [line for line in said.splitlines() if line.startswith("changed since")]
    assert changes == ["changed since step_00000001: run.total_steps: 1 -> 2"]


def saved(config: RLConfig, *, earlier: bool = False) -> None:
    """The checkpoint of one step, as a run with this configuration writes it;
    `earlier`: under a name of old.
    """
    tree: dict[str, Any] = to_tree(config)
    if earlier:
        tree["run"]["call_deadline_s"] = tree["run"].pop("stall_s")
    cursor = {"rows": 64, "drawn": 8, "epoch": 0, "position": 8}
    state = {"trainer": {"cursor": cursor}, "trackers": {}, "unrecorded": None}
    store = CheckpointStore(Path(config.run.dir) / "checkpoints", keep=2)
    with store.writing(1, state, tree, ["actor"]) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "shard").write_bytes(b"1")


def asked(inputs: Inputs, run_dir: Path, *changes: str) -> RLConfig:
    # A name of its own would hold the second in which it was made.
    own = ("run.name=asked", "run.threads_per_rank=auto")
    return inputs.config("ppo", run_dir, *own, *changes)


@pytest.mark.parametrize("shape", [SHAPE, TWO_NODES])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_run_goes_on_with_what_was_asked_for(
    inputs: Inputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    earlier: bool,
    shape: ClusterShape,
) -> None:
    """Earlier versions have saved `auto` itself, and one key under another name."""
    given = asked(inputs, tmp_path)
    saved(given if earlier else resolve_on(given, SHAPE), earlier=earlier)
    found = Resumption(given)
    now = resolve_on(given, shape, checkpoint=found.path)
    found.settle(now)
    assert "changed since" not in capsys.readouterr().out
    assert now.rollout.sync.transport == (
        "shared_memory" if shape is SHAPE else "host_broadcast"
    )
    assert now.run.threads["trainers"] == shape.cores[0]
    assert (
        now.run.resume == found.path == str(tmp_path / "checkpoints" / "step_00000001")
    )


def test_what_is_asked_for_otherwise_is_shown(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(resolve_on(asked(inputs, tmp_path), SHAPE))
    Resumption(
        asked(
            inputs,
            tmp_path,
            "rollout.sync.transport=disk",
            "rollout.sync.probe_every=1",
        )
    )
    said = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("changed since")
    ]
    assert said == [
        "changed since step_00000001: rollout.sync.transport: 'shared_memory' -> 'disk'"
    ]


def test_a_template_that_has_appeared_is_refused(
    inputs: Inputs, tmp_path: Path
) -> None:
    given = asked(inputs, tmp_path)
    saved(resolve_on(given, SHAPE))
    found = Resumption(given)
    templated = resolve_on(
        asked(inputs, tmp_path, "data.apply_chat_template=true"), SHAPE
    )
    with pytest.raises(
        ConfigError, match=r"data\.apply_chat_template = true\n.*rule: was False"
    ):
        found.settle(templated)
