"""A checkpoint as a Hugging Face directory: the weights that were trained, compared
before anybody uses them.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.controllers.runs import Inputs, command_here
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.cluster.session import Session
from verl_ray.tracking.jsonl import read_metrics


def as_on_gpus(checkpoint: Path, run_dir: Path) -> Path:
    """The same checkpoint, of a run whose actor auto made compute in bfloat16."""

    def change(config: Any) -> None:
        config["actor"]["backend"]["dtype"] = "bfloat16"
        recorded = {"actor.backend.dtype": "bfloat16"}
        config["run"]["resolved"] = {"cpu": {}, "gpu": recorded}

    return copied(checkpoint, run_dir, change)


def without_adapter(checkpoint: Path, run_dir: Path) -> Path:
    """A checkpoint of a run whose actor has no adapter."""

    def change(config: Any) -> None:
        config["actor"]["lora"]["rank"] = 0

    return copied(checkpoint, run_dir, change)


def copied(checkpoint: Path, run_dir: Path, change: Callable[[Any], None]) -> Path:
    """The folder of a run with the same checkpoint, of a changed configuration."""
    original = CheckpointStore.open(checkpoint)
    changed: Any = copy.deepcopy(dict(original.config))
    change(changed)
    store = CheckpointStore(run_dir / "checkpoints", keep=1)
    with store.writing(original.step, original.state, changed, ["actor"]) as folder:
        shutil.copytree(checkpoint / "actor", folder / "actor")
    return run_dir


@pytest.mark.cluster
def test_an_export_is_the_trained_model_and_is_compared_with_it(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    run_dir, target = tmp_path / "run", tmp_path / "exported"
    trained = command_here(
        cluster, "train", "--config-name", "sft", *inputs.overrides(run_dir)[:-1], "run.total_steps=null",
        "run.total_epochs=1", "run.evaluate_every=0", "run.checkpoint_every=2", "sft.batch_size=48", "sft.max_tokens=16",
        "actor.optimizer.lr=1e-1", "actor.lora.rank=4", "backend=fsdp",
        "tracking.wandb.mode=disabled",
    )  # fmt: skip
    assert "run.total_steps = 2: run.total_epochs=1 x 64 examples" in trained.stdout
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())["run"]
    assert (settings["total_steps"], settings["total_epochs"]) == (2, None)
    checkpoint = run_dir / "checkpoints" / "step_00000002"
    # As if the run had been on GPUs: here it computes in the type of a CPU.
    elsewhere = as_on_gpus(checkpoint, tmp_path / "elsewhere")
    exported = command_here(cluster, "export", str(elsewhere), str(target))
    assert f"actor of step_00000002: {target} (within " in exported.stdout
    apart = float(exported.stdout.partition("(within ")[2].split()[0])
    assert apart < 1e-5
    before = load_file(inputs.model / "model.safetensors")
    after, at_the_end = (
        load_file(folder / "model.safetensors")
        for folder in (target, run_dir / "model")
    )
    assert all(torch.equal(after[name], at_the_end[name]) for name in at_the_end)
    assert not all(torch.equal(after[name], before[name]) for name in before)
    assert {"config.json", "tokenizer.json"} <= {path.name for path in target.iterdir()}

    adapter = tmp_path / "adapter"
    apart = command_here(cluster, "export", str(checkpoint), str(adapter), "--adapter")
    assert f": {adapter} (within " in apart.stdout
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(inputs.model), adapter
    ).merge_and_unload()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, after[name], rtol=0, atol=1e-6)

    plain = without_adapter(checkpoint, tmp_path / "plain")
    whole = command_here(
        cluster, "export", str(plain), str(tmp_path / "o"), "--adapter", code=2
    )
    assert "rule: the actor was trained without an adapter" in whole.stderr
    again = command_here(cluster, "export", str(checkpoint), str(target), code=2)
    assert "this directory is not empty" in again.stderr
    other = command_here(
        cluster,
        "export",
        str(checkpoint),
        str(tmp_path / "o"),
        "--role",
        "critic",
        code=2,
    )
    assert "The checkpoint holds actor." in other.stderr
    (checkpoint / "manifest.json").unlink()
    torn = command_here(cluster, "export", str(checkpoint), str(tmp_path / "o"), code=1)
    assert torn.stderr.startswith("CheckpointError: step_00000002 has no manifest.json")


@pytest.mark.slow
@pytest.mark.cluster
def test_a_checkpoint_of_two_ranks_of_megatron_is_exported_alike(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    run_dir, target = tmp_path / "run", tmp_path / "exported"
    command_here(
        cluster, "train", "--config-name", "sft", *inputs.overrides(run_dir),
        "run.total_steps=1", "run.checkpoint_every=1", "sft.batch_size=16", "sft.max_tokens=16",
        "actor.optimizer.weight_decay=0", "backend=megatron", "actor.num_ranks=2", "actor.backend.tensor_parallel=2",
    )  # fmt: skip
    newest = run_dir / "checkpoints" / "step_00000001"
    command_here(cluster, "export", str(newest), str(target))
    before, learned, at_the_end = (
        load_file(folder / "model.safetensors")
        for folder in (inputs.model, target, run_dir / "model")
    )
    assert all(torch.equal(learned[name], at_the_end[name]) for name in at_the_end)
    moved = max(float((learned[name] - before[name]).abs().max()) for name in before)
    (line,) = read_metrics(run_dir / "metrics.jsonl")
    # What Adam's first step moves a weight by.
    assert moved == pytest.approx(line["actor/lr"], rel=0.1)


def test_a_directory_that_computes_something_else_is_told_apart(
    inputs: Inputs, tmp_path: Path
) -> None:
    from verl_ray.models.export import plain_outputs, probe_rows

    rows = probe_rows(14)
    assert rows.tokens.min() >= 0 and rows.tokens.max() < 14
    right = plain_outputs(str(inputs.model), rows, policy=True)
    assert (right[rows.response_mask] < 0).all() and not right[
        ~rows.response_mask
    ].any()
    weights = load_file(inputs.model / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    for file in inputs.model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert abs(plain_outputs(str(tmp_path), rows, policy=True) - right).max() > 1e-3
