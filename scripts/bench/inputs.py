"""Inputs of benchmarks: models of some sizes; a model, tokenizer and problems of a run.

Invariant: an input is made on this machine, in a folder that is named by what it is. A
recipe in the folder says what was made, and inputs with another recipe are made anew.
So no benchmark measures a model that another one has made for something else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.configuration import compose
from verl_ray.config.load import parse, to_tree
from verl_ray.config.preparation import PrepareConfig, TinyModelConfig
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, Problem
from verl_ray.preflight.findings import (
    INPUTS_COMPLETE,
    INPUTS_STARTED,
    foreign_inputs,
    inputs_folder,
)
from verl_ray.shell import override_of

FOLDER = "outputs/bench"
"""Where inputs are kept, unless a flag says otherwise."""

_RECIPE = "recipe.json"
_BLOCK = 2**22
"""Random numbers of a model that is made for its speed alone."""


def _layers(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    intermediate_size: int,
    *,
    tied: bool = True,
) -> TinyModelConfig:
    return TinyModelConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        intermediate_size=intermediate_size,
        tie_embeddings=tied,
    )


# ---------------------------------------------------------------------- models by size


@dataclass(frozen=True)
class Size:
    """A model to be made; the entries of its vocabulary have no meaning."""

    vocab_size: int
    layers: TinyModelConfig


MODELS = {
    "1m": Size(1024, _layers(128, 4, 4, 2, 32, 384)),
    "20m": Size(4096, _layers(512, 6, 8, 4, 64, 1408)),
    # The sizes of Qwen2.5-0.5B, Qwen2.5-1.5B and Qwen3-8B.
    "500m": Size(151_936, _layers(896, 24, 14, 2, 64, 4864)),
    "1500m": Size(151_936, _layers(1536, 28, 12, 2, 128, 8960)),
    "8b": Size(151_936, _layers(4096, 36, 32, 8, 128, 12_288, tied=False)),
}
"""Models with a vocabulary, whose training is timed by itself."""


def with_layers(size: Size, num_layers: int) -> Size:
    """Return the size of a model of the same widths with fewer layers."""
    return replace(
        size, layers=size.layers.model_copy(update={"num_layers": num_layers})
    )


def tensors_of(size: Size) -> list[int]:
    """Return the number of elements of each parameter of a model."""
    layers = size.layers
    hidden = layers.hidden_size
    queries = hidden * layers.num_heads * layers.head_size
    keys = hidden * layers.num_kv_heads * layers.head_size
    projections = [queries, keys, keys, queries]
    feed_forward = 3 * [hidden * layers.intermediate_size]
    norms = [hidden, hidden, layers.head_size, layers.head_size]

    embeddings = [size.vocab_size * hidden] * (1 if layers.tie_embeddings else 2)
    in_layers = layers.num_layers * (projections + feed_forward + norms)
    return [*embeddings, *in_layers, hidden]


def make_model(size: Size, folder: str) -> str:
    """Write a Qwen3 model to `folder` and return its path; it has no tokenizer.

    Its matrices repeat one block of random numbers, since billions of them would take
    minutes. The speed of a computation does not depend on them.
    """
    import numpy as np
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM

    from verl_ray.models.tiny import model_settings

    settings = model_settings("qwen3", size.layers, size.vocab_size, {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    settings.save_pretrained(folder)

    scale = size.layers.hidden_size**-0.5
    block = np.random.default_rng(0).normal(0, scale, _BLOCK).astype(np.float32)
    file_of: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1
        shape = tuple(parameter.shape)
        values = np.ones(shape, np.float32) if is_norm else np.resize(block, shape)
        # A file per parameter, so that the host holds one of them at a time.
        file_of[name] = f"model-{len(file_of):05}.safetensors"
        file = Path(folder) / file_of[name]
        save_file({name: values}, file, metadata={"format": "pt"})

    index = {"metadata": {}, "weight_map": file_of}
    (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def made_apart(size: Size, path: str) -> str:
    """Make a model in another process, and return its path.

    A process that measures others may not load torch, because its pages would count as
    shared with theirs.
    """
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning) as executor:
        return executor.submit(make_model, size, path).result()


# ---------------------------------------------------------------------- inputs of a run

POLICIES = {
    "1m": _layers(128, 4, 4, 2, 32, 384),
    "100m": _layers(768, 12, 12, 12, 64, 2304),
    "400m": _layers(1280, 19, 20, 20, 64, 3840),
    "0.5b": _layers(1024, 32, 16, 8, 128, 3072),
    "1.5b": _layers(1536, 32, 12, 2, 128, 8960),
    "8b": _layers(4096, 42, 32, 8, 128, 12_288),
}
"""Models with the vocabulary of the quickstart's problems, which runs use."""

_RUN = (
    "algorithm=grpo",
    "data.prompts_per_step=16",
    "rollout.group_size=8",
    "rollout.max_response_tokens=32",
    "actor.mini_batch_size=null",
    "run.total_steps=1000",
    "run.evaluate_every=0",
    "prepare.min_gain=0",
    "run.checkpoint_every=0",
    "run.save_at_end=false",
    "tracking.wandb.mode=disabled",
)


def run_with_inputs(
    model: str,
    folder: str | Path,
    overrides: Sequence[str] = (),
    *,
    backend: str = "engine",
    trained: bool = False,
) -> RLConfig:
    """Return the configuration of a run of GRPO, whose inputs are there.

    The run has the quickstart's task and model family. What is missing is made; stdout
    stays for the figures of the caller.

    Args:
        model: A name of `POLICIES`.
        folder: Where inputs are kept, each in a folder of its own.
        overrides: Further overrides, which come last.
        backend: The backend of all roles.
        trained: Whether the model has the warm start of the quickstart. The speed of
            large ones depends on the number of tokens and not on their values.

    Raises:
        ConfigError: The folder of the inputs holds something that no benchmark made.
    """
    layers = POLICIES[model].model_dump().items()
    own = [f"prepare.model.{key}={value}" for key, value in layers]
    if model != "1m":
        own.append("rollout.kv_cache_gib=1.0")
    own += [f"run.name=bench-{model}", f"backend={backend}"]

    all_overrides = (*_RUN, *own, *overrides)
    unnamed = _composed(("run.dir=none", *all_overrides))
    run_dir = Path(folder) / inputs_name(unnamed, trained=trained)
    config = _composed((override_of("run.dir", str(run_dir)), *all_overrides))
    with contextlib.redirect_stdout(sys.stderr):
        _make_inputs(config, trained=trained)
    return config


@functools.cache
def _composed(overrides: tuple[str, ...]) -> RLConfig:
    return parse(to_tree(compose("quickstart", overrides)), RLConfig)


def _preparation(config: RLConfig) -> PrepareConfig:
    preparation = config.prepare
    assert preparation is not None
    return preparation


def inputs_name(config: RLConfig, *, trained: bool) -> str:
    """Return the name of a run's inputs, such as "qwen3-4x128-sums-trained-seed0"."""
    preparation = _preparation(config)
    sizes = preparation.model
    state = "trained" if trained else "untrained"
    return (
        f"qwen3-{sizes.num_layers}x{sizes.hidden_size}-{preparation.problems}-{state}"
        f"-seed{config.run.seed}"
    )


def _make_inputs(config: RLConfig, *, trained: bool) -> None:
    """Make problems, tokenizer and model under run.dir/inputs.

    Inputs with the same recipe stay, and those with another one are made anew. Inputs
    without a recipe are not a benchmark's, and are refused.
    """
    preparation = _preparation(config)
    settings = preparation.model_dump(exclude={"min_gain"})
    recipe = {"trained": trained, "seed": config.run.seed, **settings}
    recipe_text = json.dumps(recipe, indent=1)

    folder = inputs_folder(config)
    recipe_file = folder / _RECIPE
    if recipe_file.exists():
        if recipe_file.read_text() == recipe_text:
            return
        shutil.rmtree(folder)

    problems = list(foreign_inputs(config))
    if (folder / INPUTS_COMPLETE).exists():
        rule = f"{folder} has the inputs of a run, and a benchmark makes its own"
        problems = [Problem("run.dir", config.run.dir, rule, "Give another run.dir.")]
    if problems:
        raise ConfigError(problems)

    shutil.rmtree(folder, ignore_errors=True)
    if trained:
        _warm_start(config)
    else:
        _write_untrained(folder, preparation, config.run.seed)
    # The recipe comes last: whatever is missing before it is made again.
    recipe_file.write_text(recipe_text)


def _warm_start(config: RLConfig) -> None:
    from controllers.run.preparation import prepare
    from controllers.system.plan import ClusterShape, resolve_on
    from verl_ray.cluster.session import Session

    log_dir = Path(config.run.dir) / "logs"
    with Session.open(config.ray.address, log_dir=log_dir) as session:
        prepare(resolve_on(config, ClusterShape.of(session)), session)


def _write_untrained(folder: Path, preparation: PrepareConfig, seed: int) -> None:
    from controllers.run.preparation import write_problems
    from verl_ray.models.tiny import make_tiny_qwen3

    folder.mkdir(parents=True)
    (folder / INPUTS_STARTED).touch()
    write_problems(folder, preparation, seed)
    make_tiny_qwen3(folder / "model", folder / "tokenizer", preparation.model, seed)
    (folder / INPUTS_COMPLETE).touch()
