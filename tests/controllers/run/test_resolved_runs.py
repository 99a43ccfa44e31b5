"""What `auto` came to in a run: in runs begun from its config.yaml, and in its
checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from controllers.commands.check import checked_config
from controllers.run.resumption import Resumption
from controllers.system.plan import ClusterShape, resolve_on
from tests.controllers.runs import SHAPE, Inputs
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.load import to_tree
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError
from verl_ray.preflight.device_defaults import with_changes

TWO_NODES = ClusterShape(cores=(8, 8), gpus_per_node=(0, 0))
GPUS = ClusterShape(cores=(64,), gpus_per_node=(8,))


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


def test_what_a_run_on_gpus_resolved_is_resolved_anew_to_evaluate_here(
    inputs: Inputs, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    given = asked(inputs, run_dir, "rollout.sync.bucket_mib=7", "actor.num_ranks=8")
    on_gpus = resolve_on(given, GPUS)
    assert on_gpus.actor.backend.dtype == "bfloat16"
    assert (on_gpus.placement.offload, on_gpus.rollout.num_replicas) == ("all", 8)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(yaml.safe_dump(to_tree(on_gpus)))

    def checked(*overrides: str, evaluates: bool = True) -> RLConfig:
        few = ("actor.num_ranks=1", "critic.num_ranks=1", "reference.num_ranks=1")
        found = checked_config(
            "config",
            [*few, "run.resume=auto", *overrides],
            str(run_dir),
            evaluates=evaluates,
            trains=not evaluates,
            reads_data=False,
        )
        assert isinstance(found.config, RLConfig)
        return found.config

    here = resolve_on(checked(), SHAPE)
    assert here.actor.backend.dtype == here.rollout.dtype == "float32"
    assert (here.placement.offload, here.rollout.num_replicas) == ("none", 1)
    # What the user has set stays, in the run or now, be it what the run had.
    assert here.rollout.sync.bucket_mib == 7
    typed = checked("rollout.dtype=bfloat16", "rollout.sync.probe_every=10")
    assert typed.rollout.dtype == "bfloat16" and typed.rollout.sync.probe_every == 10
    assert typed.actor.backend.dtype == "auto"

    # Training goes on with what it had, or says why it cannot.
    with pytest.raises(ConfigError, match="has none; auto became this on GPUs"):
        checked(evaluates=False)
    kept = checked("placement.offload=none", "rollout.num_replicas=1", evaluates=False)
    assert kept.actor.backend.dtype == "bfloat16"
    assert "placement.offload" not in kept.run.resolved.gpu


def test_a_run_that_goes_on_on_another_kind_of_device_says_so(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = asked(inputs, tmp_path)
    saved(resolve_on(given, GPUS))
    # config.yaml has run.resume=auto.
    written = with_changes(resolve_on(given, GPUS), {"run.resume": "auto"})

    def said(config: RLConfig, *, on_gpus: bool) -> str:
        found = Resumption(config)
        found.settle(resolve_on(config, GPUS if on_gpus else SHAPE))
        capsys.readouterr()
        found.report_other_device(on_gpus=on_gpus)
        return capsys.readouterr().err

    assert said(given, on_gpus=True) == said(written, on_gpus=True) == ""
    first, then, now = said(given, on_gpus=False).splitlines()
    assert first == "warning: auto was resolved on GPUs, and this run is on a CPU"
    assert "backend.dtype=bfloat16" in then and "backend.dtype=float32" in now
    assert "apply_chat_template" not in now  # it is the same

    first, kept = said(written, on_gpus=False).splitlines()
    assert first == "warning: auto was resolved on GPUs, and this run is on a CPU"
    assert "placement.offload=all" in kept and "backend.dtype=bfloat16" in kept
