"""Qwen3-MoE learns to add by GRPO on each backend, from one model that adds half right.

    python -m scripts.experts                    minutes on two cores
    python -m scripts.experts megatron           one of the backends
    python -m scripts.experts engine --close-experts --sampler-dtype bfloat16 [--replay]

Each line has the held-out accuracy before and after, the largest difference of a weight
sync's probe, and two measures of the mismatch of sampler and trainer: the mean over
steps of the divergence in nats (k3), and the largest difference of a token's
probabilities. Trainers compute in float32. The model is imitated from sums of which
half are wrong. With `--close-experts` its routers begin with nearly equal scores, so
that rounding changes their choices.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.arithmetic import ALPHABET, write_arithmetic
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import ModelError
from verl_ray.models.tiny import make_tiny
from verl_ray.tracking.jsonl import read_metrics

BACKENDS: dict[str, tuple[str, ...]] = {
    "engine": (),
    "fsdp": ("backend=fsdp", "actor.num_ranks=2"),
    "megatron": (
        "backend=megatron",
        "actor.num_ranks=2",
        "backend.expert_parallel=2",
        "rollout.tensor_parallel=2",
        "rollout.expert_parallel=true",
        "rollout.sync.transport=host_broadcast",
    ),
}
"""Backends, with what their runs set: experts in shards of FSDP2, and whole experts on
two ranks of Megatron and of the rollout engine, whose ranks receive their own alone."""

_SIZES = TinyModelConfig(
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    intermediate_size=128,
    tie_embeddings=True,
)
CLOSE = 0.01
"""Factor of routers' initial weights with which rounding changes their choices."""

_METRIC = "val-core/arithmetic/acc/mean@"


def imitate(
    folder: Path, imitation_steps: int, *, router_scale: float = 1.0
) -> list[str]:
    """Make the model and its problems; return the settings that every run shares.

    Args:
        folder: Where they are written.
        imitation_steps: Steps of the imitation.
        router_scale: Factor of the initial weights of the routers.
    """
    demonstrations = write_arithmetic(
        folder, max_operand=99, num_train=8800, num_validation=200, seed=0,
        wrong_fraction=0.5,
    )  # fmt: skip
    character_tokenizer(folder / "tokenizer", ALPHABET)
    made = make_tiny("qwen3_moe", folder / "made", folder / "tokenizer", _SIZES, seed=0)
    _scale_routers(made, router_scale)
    shared = [
        f"data.train_path={demonstrations.train.jsonl}",
        f"data.validation_path={demonstrations.validation.jsonl}",
        "run.threads_per_rank=1",
        "run.checkpoint_every=0",
        "run.save_at_end=false",
        "tracking.wandb.mode=disabled",
    ]
    _train(
        "sft", folder / "imitation", *shared, f"model.path={made}",
        f"run.total_steps={imitation_steps}", "run.evaluate_every=0",
        "sft.batch_size=128", "sft.max_tokens=32", "actor.optimizer.lr=2e-3",
    )  # fmt: skip
    return [*shared, f"model.path={folder / 'imitation' / 'model'}"]


def learn(
    backend: str, folder: Path, shared: list[str], steps: int, *more: str
) -> dict[str, float]:
    """Train on a backend, and return the numbers of its line.

    Args:
        backend: The backend.
        folder: The folder of its run.
        shared: What `imitate` returned.
        steps: Steps of the run.
        more: Further settings.
    """
    run = folder / backend
    _train(
        "grpo", run, *shared, f"run.total_steps={steps}", f"run.evaluate_every={steps}",
        "data.prompts_per_step=64", "data.max_prompt_tokens=8", "rollout.group_size=8",
        "rollout.max_response_tokens=6", "rollout.kv_cache_gib=0.0625",
        "actor.optimizer.lr=2e-4", "actor.optimizer.warmup_steps=5",
        "actor.optimizer.schedule=cosine", *BACKENDS[backend], *more,
    )  # fmt: skip
    lines = read_metrics(run / "metrics.jsonl")
    accuracy = [
        value
        for line in lines
        for name, value in line.items()
        if name.startswith(_METRIC)
    ]

    def values(name: str) -> list[float]:
        return [line[name] for line in lines if name in line]

    divergences = values("rollout_corr/k3_kl")
    return {
        "before": accuracy[0],
        "after": accuracy[-1],
        "probe_difference": max(values("weight_sync/probe_difference")),
        "k3": sum(divergences) / len(divergences),
        "probs_difference": max(values("training/rollout_probs_diff_max")),
    }


def _scale_routers(model: Path, factor: float) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name] *= factor
    save_file(tensors, path, metadata={"format": "pt"})


def _train(root: str, run: Path, *overrides: str) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "controllers", "train", "--config-name", root),
            *(f"run.dir={run}", *overrides),
        ],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise ModelError(f"{root} did not end well:\n{ended.stdout}{ended.stderr}")


def main() -> None:
    """Print a line for each backend."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.experts", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("backends", nargs="*", help="all unless some are named")
    parser.add_argument("--imitation-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sampler-dtype", default="float32")
    parser.add_argument("--close-experts", action="store_true")
    parser.add_argument(
        "--replay", action="store_true", help="set rollout.routing_replay"
    )
    arguments = parser.parse_args()
    more = [
        f"rollout.dtype={arguments.sampler_dtype}",
        f"rollout.routing_replay={arguments.replay}",
    ]
    if arguments.sampler_dtype != "float32":
        # The probe of a sync is not replayed, and a choice in it may be another one.
        more.append("rollout.sync.probe_tolerance=8")

    with tempfile.TemporaryDirectory(prefix="verl_ray-experts-") as name:
        folder = Path(name)
        scale = CLOSE if arguments.close_experts else 1.0
        shared = imitate(folder, arguments.imitation_steps, router_scale=scale)
        for backend in arguments.backends or BACKENDS:
            numbers = learn(backend, folder, shared, arguments.steps, *more)
            text = "  ".join(f"{key} {value:.2g}" for key, value in numbers.items())
            print(f"{backend}: {text}", flush=True)


if __name__ == "__main__":
    main()
