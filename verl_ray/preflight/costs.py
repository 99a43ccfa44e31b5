"""Warnings about settings that fit by themselves and cost much together.

Invariant: each warning says what the combination costs and which keys change it; the
run works all the same. Deliberately not here: what a machine lacks (`resources.py`),
and settings that can have no effect, which are refused (`verl_ray/config`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.config.algebra import batch_algebra
from verl_ray.config.data import in_words
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.machine import Machine


def cost_warnings(
    config: Config, machine: Machine | None, *, evaluates: bool
) -> Iterator[str]:
    """Yield a warning for each combination of settings that works badly.

    Args:
        config: Configuration of the run.
        machine: Machine that will hold the run, if it is known.
        evaluates: Whether the command only evaluates, so that nothing learns.
    """
    if machine is not None and machine.gpus:
        yield from _float32_on_gpus(config, learns=not evaluates)
    elif machine is not None and not machine.computes_bfloat16:
        yield from _bfloat16_on_a_cpu(config)
    if evaluates:
        return

    yield from _different_types(config)
    yield from _unread_validation(config)
    yield from _large_evaluations(config)
    yield from _endless_warmups(config)
    yield from _still_learners(config)
    yield from _trajectories_of_one_row(config)


def _different_types(config: Config) -> Iterator[str]:
    """Yield a warning if sampler and trainer compute in different types."""
    if not isinstance(config, RolloutTaskConfig):
        return

    sampler = config.rollout.dtype
    trainer = config.actor.backend.dtype
    if sampler == trainer or config.corrects_mismatch:
        return
    # What auto becomes on a cluster is not known yet.
    if "auto" in (sampler, trainer):
        return
    yield (
        f"rollout.dtype={sampler} beside actor.backend.dtype={trainer}: rollout engine"
        " and trainer round differently, so each token is learned from as if another"
        " policy had sampled it (rollout_corr/* shows by how much). Give both the same"
        " type, or correct with importance weights"
        " (algorithm.correction.form=three_policy)"
    )


def _float32_on_gpus(config: Config, *, learns: bool) -> Iterator[str]:
    """Yield a warning for trainers and one for engines that compute in float32."""
    trainers = _keys_of_type(config, "float32", trainers=True)
    if trainers and learns:
        yield (
            f"{', '.join(trainers)}=float32 on GPUs: matrix products and attention run"
            " without tensor cores, since TF32 is off, and activations take twice the"
            " memory; use bfloat16"
        )

    # vLLM 0.32: `_get_backend_priorities` of platforms/cuda.py, and the
    # `supported_dtypes` of the classes in v1/attention/backends.
    engines = _keys_of_type(config, "float32", trainers=False)
    if engines:
        yield (
            f"{', '.join(engines)}=float32 on GPUs: FlashAttention and FlashInfer take"
            " no float32, so vLLM attends with a slower Triton kernel, and everything"
            " runs without tensor cores; use bfloat16"
        )


def _keys_of_type(config: Config, dtype: str, *, trainers: bool) -> list[str]:
    """Return the keys of trainers, or of rollout engines, that compute in `dtype`."""
    if trainers:
        types = {
            f"{name}.backend.dtype": role.backend.dtype
            for name, role in config.model_roles.items()
        }
    else:
        types = {
            f"{engine.section}.dtype": engine.config.dtype
            for engine in config.engines.values()
        }
    return [key for key, value in types.items() if value == dtype]


def _bfloat16_on_a_cpu(config: Config) -> Iterator[str]:
    """Yield a warning if anything computes in bfloat16, which the CPU emulates."""
    keys = _keys_of_type(config, "bfloat16", trainers=True)
    keys += _keys_of_type(config, "bfloat16", trainers=False)
    if keys:
        yield (
            f"{', '.join(keys)}=bfloat16 on a CPU without instructions for it"
            " (avx512_bf16, amx_bf16): slower than float32, and less exact; use float32"
        )


def _unread_validation(config: Config) -> Iterator[str]:
    """Yield a warning if held-out problems are given and no evaluation reads them."""
    # A run that makes its problems always makes held-out ones, too.
    held_out = config.data.validation_sets
    if config.run.evaluate_every or not held_out or config.preparation is not None:
        return
    yield (
        f"run.evaluate_every=0: data.validation_path={in_words(held_out)} is never"
        " read, and the run ends without a result on held-out problems; set"
        " run.evaluate_every to a number of steps, or data.validation_path=null"
    )


def _large_evaluations(config: Config) -> Iterator[str]:
    """Yield a warning if evaluations generate more responses than training does."""
    responses = config.responses_per_evaluation
    interval = config.run.evaluate_every
    if not interval or responses is None:
        return

    trained = interval * config.rows_per_step
    if responses > trained:
        yield (
            f"an evaluation generates {responses} responses, and the"
            f" {interval} steps until the next one {trained}: the run evaluates for"
            " more than half of its generation; lower evaluation.num_prompts, or raise"
            " run.evaluate_every"
        )


def _endless_warmups(config: Config) -> Iterator[str]:
    """Yield a warning for each role whose learning rate never reaches its value."""
    # The steps of run.total_epochs are known once the data are read.
    if config.run.total_steps is None:
        return

    updates = {role.role: role.updates_per_step for role in batch_algebra(config).roles}
    for name, learner in config.learners.items():
        steps = config.learning_steps(name) * updates[name]
        warmup_steps = learner.optimizer.warmup_steps
        if warmup_steps > steps:
            yield (
                f"{name}.optimizer.warmup_steps={warmup_steps} is more than the run's"
                f" {steps} optimizer steps: the learning rate never reaches"
                f" {name}.optimizer.lr; lower it, or raise run.total_steps"
            )


def _still_learners(config: Config) -> Iterator[str]:
    """Yield a warning for each role that learns with a learning rate of 0."""
    for name, learner in config.learners.items():
        if learner.optimizer.lr == 0:
            yield f"{name}.optimizer.lr=0: the {name} never changes; raise it"


def _trajectories_of_one_row(config: Config) -> Iterator[str]:
    """Yield a warning if rows are kept together that are trajectories of their own.

    It is no mistake: the same configuration may learn from episodes of several rows.
    """
    if isinstance(config, RLConfig) and config.algorithm.judges_trajectories:
        yield (
            "algorithm.sequence=trajectory: every trajectory that rollout samples has"
            " one row, so losses are those of algorithm.sequence=row, and rows are"
            " shared out by trajectories for nothing; use row"
        )
