"""Combinations that work badly say what they cost, and no others do."""

from dataclasses import replace
from pathlib import Path

from scripts.configuration import compose
from tests.preflight.configs import BIG, NO_GAIN, ppo, settled
from verl_ray.preflight.findings import cost_warnings, preflight
from verl_ray.preflight.machine import GIB, Machine

GPU = Machine(
    cores=64, gpus=1, memory_bytes=512 * GIB, shm_free_bytes=64 * GIB,
    gpu_memory_bytes=80 * GIB,
)  # fmt: skip
CORRECTED = (
    "algorithm.correction.form=three_policy", "algorithm.correction.kind=tis",
    "algorithm.correction.level=token", "algorithm.correction.upper=2.0",
)  # fmt: skip


def test_sampler_and_trainer_of_different_types(model: Path, data: Path) -> None:
    mixed = ("rollout.dtype=bfloat16", "backend.dtype=float32")
    (warning,) = preflight(ppo(model, data, *mixed), BIG).warnings
    assert warning.startswith(
        "rollout.dtype=bfloat16 beside actor.backend.dtype=float32:"
    )
    assert "algorithm.correction.form=three_policy" in warning
    for settings in (
        (),
        (*mixed, *CORRECTED),
        ("rollout.dtype=bfloat16", "backend.dtype=bfloat16"),
    ):
        assert preflight(ppo(model, data, *settings), BIG).warnings == []
    measured = settled(ppo(model, data, *mixed))
    assert list(cost_warnings(measured, GPU, evaluates=True)) == []


def test_a_quantized_sampler(model: Path, data: Path) -> None:
    quantized = ("rollout.quantization=fp8", "backend.dtype=float32")
    (warning,) = preflight(ppo(model, data, *quantized), BIG).warnings
    assert warning.startswith("rollout.quantization=fp8: the engine samples from")
    assert "algorithm.correction.form=three_policy" in warning
    corrected = ppo(model, data, *quantized, *CORRECTED)
    assert preflight(corrected, BIG).warnings == []
    on_gpu = ppo(model, data, "rollout.quantization=fp8", *CORRECTED)
    assert preflight(on_gpu, GPU).warnings == [
        "untested on GPUs, and tested on a CPU: rollout.quantization"
    ]
    settings = settled(ppo(model, data, *quantized)).rollout
    assert settings.dtype == "bfloat16"
    assert settings.sync.probe_tolerance == "measured"


def test_float32_on_gpus(model: Path, data: Path) -> None:
    exact = ppo(model, data, "backend.dtype=float32", "rollout.dtype=float32")
    trains, rolls = preflight(exact, GPU).warnings
    assert trains.startswith(
        "actor.backend.dtype, critic.backend.dtype, reference.backend.dtype=float32 on"
        " GPUs: matrix products and attention run without tensor cores"
    )
    assert rolls.startswith("rollout.dtype=float32 on GPUs: FlashAttention and")

    # An evaluation has no trainers.
    assert list(cost_warnings(settled(exact), GPU, evaluates=True)) == [rolls]
    # On GPUs auto is bfloat16.
    assert preflight(ppo(model, data), GPU).warnings == []


def test_bfloat16_on_a_cpu(model: Path, data: Path) -> None:
    both = ppo(model, data, "backend.dtype=bfloat16", "rollout.dtype=bfloat16")
    (warning,) = preflight(both, replace(BIG, computes_bfloat16=False)).warnings
    assert warning.startswith(
        "actor.backend.dtype, critic.backend.dtype, reference.backend.dtype,"
        " rollout.dtype=bfloat16 on a CPU without instructions for it"
    )
    # A CPU that has them is up to 2.6 times as fast with it.
    assert preflight(both, BIG).warnings == []


def test_evaluations_that_never_read_or_take_long(model: Path, data: Path) -> None:
    (warning,) = preflight(ppo(model, data, "run.evaluate_every=0"), BIG).warnings
    assert warning.startswith("run.evaluate_every=0: data.validation_path=")
    # 500 held-out sums, and 1 x 32 x 8 = 256 responses until the next evaluation.
    often = compose("quickstart", ["run.evaluate_every=1", NO_GAIN])
    (warning,) = cost_warnings(often, BIG, evaluates=False)
    assert "generates 500 responses, and the 1 steps until the next one 256" in warning
    few = compose("quickstart", ["run.evaluate_every=2", NO_GAIN])
    assert list(cost_warnings(few, BIG, evaluates=False)) == []


def test_a_warm_up_longer_than_the_run(model: Path, data: Path) -> None:
    # 2 steps of 256 rows in mini-batches of 64 are 8 updates.
    short = ["run.total_steps=2", "run.evaluate_every=2", "actor.mini_batch_size=64"]
    for warmup_steps, count in ((8, 0), (9, 1)):
        warm = f"actor.optimizer.warmup_steps={warmup_steps}"
        warnings = preflight(ppo(model, data, *short, warm), BIG).warnings
        assert len(warnings) == count
    assert warnings[0].startswith(
        "actor.optimizer.warmup_steps=9 is more than the run's 8 optimizer steps"
    )


def test_a_learning_rate_of_0(model: Path, data: Path) -> None:
    (warning,) = preflight(ppo(model, data, "actor.optimizer.lr=0"), BIG).warnings
    assert warning == "actor.optimizer.lr=0: the actor never changes; raise it"


def test_trajectories_of_one_row(model: Path, data: Path) -> None:
    together = ("algorithm=gspo", "algorithm.sequence=trajectory")
    warnings = preflight(ppo(model, data, *together), BIG).warnings
    prefix = "algorithm.sequence=trajectory: every trajectory that"
    assert any(warning.startswith(prefix) for warning in warnings)
    # An episode may have several rows.
    episodes = (
        "agent.environments.default=verl_ray.agents.environments.calculator:Calculator"
    )
    for settings in (together[:1], (*together, episodes)):
        others = preflight(ppo(model, data, *settings), BIG).warnings
        assert not any(warning.startswith(prefix) for warning in others)


def test_clips_that_are_finer_than_rounding(model: Path, data: Path) -> None:
    gspo = (
        "algorithm=gspo", "actor.mini_batch_size=null", "algorithm.correction.form=two_policy",
    )  # fmt: skip
    (warning,) = preflight(ppo(model, data, *gspo), GPU).warnings
    assert "the ratio of gspo is the one to the sampler" in warning
    exact = ("backend.dtype=float32", "rollout.dtype=float32")
    wide = ("algorithm=gmpo", *gspo[1:])
    for settings in ((*gspo, *exact), wide):
        assert preflight(ppo(model, data, *settings), BIG).warnings == []


def test_bounds_of_a_ratio_that_is_always_1(model: Path, data: Path) -> None:
    def warnings(*settings: str) -> list[str]:
        config = ppo(model, data, *settings)
        return list(cost_warnings(settled(config), BIG, evaluates=False))

    # 32 prompts with 8 responses are 256 rows.
    for algorithm, dual_clip in (("dapo", 10), ("vapo", 3)):
        (warning,) = warnings(f"algorithm={algorithm}")
        assert warning == (
            "algorithm.clip_low=0.2, algorithm.clip_high=0.28,"
            f" algorithm.dual_clip={dual_clip}: with one update per step the ratio of"
            " ppo_clip is 1 at every token, so these bounds have no effect; make several"
            " updates, such as 16 (actor.mini_batch_size=16)"
        )
    (warning,) = warnings("algorithm=grpo", "algorithm.dual_clip=4")
    assert warning.startswith("algorithm.clip_low=0.2, algorithm.clip_high=0.2, alg")
    sampler = ("algorithm.correction.form=two_policy", "algorithm.correction.kind=null")
    for settings in (
        ("algorithm=dapo", "actor.mini_batch_size=16"),
        ("algorithm=dapo", "actor.epochs=2"),
        ("algorithm=dapo", *sampler),
        *(
            (f"algorithm={name}",)
            for name in ("ppo", "grpo", "gdpo", "dr_grpo", "rloo")
        ),
        *(
            (f"algorithm={name}",)
            for name in ("clip_cov", "m2po", "gspo", "online_dpo")
        ),
    ):
        assert warnings(*settings) == []


def test_staleness_that_only_makes_tokens_older(model: Path, data: Path) -> None:
    def warnings(*settings: str) -> list[str]:
        config = ppo(model, data, "placement=separate", *settings)
        return list(cost_warnings(settled(config), BIG, evaluates=False))

    (warning,) = warnings("schedule=one_step_off", "rollout.staleness=2")
    assert warning.startswith("rollout.staleness=2 with rollout.updates=between: a")
    assert warnings("schedule=one_step_off") == []
    assert warnings("schedule=asynchronous", "rollout.staleness=2") == []
