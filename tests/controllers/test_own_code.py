"""A run whose model has code of its own, which runs where the model does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.controllers.runs import Inputs, command
from tests.own_code import importers, own_model
from verl_ray.data.arithmetic import ALPHABET
from verl_ray.engine.single import plain_engine
from verl_ray.models.export import plain_outputs, probe_rows
from verl_ray.ops.outputs import RequestedOutputs


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_code_of_a_model_runs_in_its_roles_alone_and_comes_with_the_export(
    task: str, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = own_model(tmp_path, ALPHABET)
    run_dir, exported = tmp_path / "run", tmp_path / "exported"
    changes = {
        "sft": [
            *inputs.overrides(run_dir), "actor.num_ranks=2", "backend=fsdp",
            "actor.backend.read_weights=rank_zero", "sft.batch_size=8", "sft.max_tokens=16",
        ],
        "grpo": inputs.rl(run_dir),
    }[task]  # fmt: skip
    arguments = [
        "--config-name", task, *changes, f"model.path={model}",
        "run.total_steps=1", "run.checkpoint_every=1",
    ]  # fmt: skip
    refused = command(None, "train", *arguments, code=2)
    assert "model.trust_remote_code" in refused.stderr and not importers(tmp_path)

    command(None, "train", *arguments, "model.trust_remote_code=true")
    programs = sorted(importers(tmp_path).values())
    # The driver and Ray's other processes have not imported it.
    assert programs[0] == "-c" and set(programs[1:]) == {"default_worker.py"}
    assert len(programs) == 1 + {"sft": 2, "grpo": 2}[task]

    command(None, "export", str(run_dir), str(exported))
    assert {file.name for file in exported.glob("*.py")} == {
        "configuration_own.py",
        "modeling_own.py",
    }
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, exported)
    )
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)
    rows = probe_rows(256)
    engine = plain_engine(exported, tokens=int(rows.offsets[-1]), balance=None)
    ours = engine.forward(rows, RequestedOutputs(log_probs=True)).log_probs
    theirs = plain_outputs(str(exported), rows, policy=True, trusts_code=True)
    assert ours is not None and abs(ours - theirs).max() < 1e-5
