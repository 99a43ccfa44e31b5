"""The limit on the mismatch: what it does, and the cause that it names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from controllers.watch.mismatch_limit import MismatchWatch, causes
from scripts.configuration import compose
from tests.preflight.configs import settled
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.engine.base import LossReport, StepReport
from verl_ray.errors import MismatchError
from verl_ray.rollout.requests import Sampling
from workers.model_worker import UpdateReport

WHOLE = Sampling(1.0, 1.0, -1, 8)
LIMIT = ("algorithm.mismatch.limit=0.1", "algorithm.mismatch.metric=rollout_corr/k3_kl")
TIS = tuple(
    f"algorithm.correction.{value}"
    for value in ("form=three_policy", "kind=tis", "level=token", "upper=2.0")
)


def config(*changes: str) -> RLConfig:
    found = compose("quickstart", changes)
    assert isinstance(found, RLConfig)
    return settled(found)


def observe(watch: MismatchWatch, value: float, *versions: int | None) -> None:
    """Step 7 of a trainer that holds version 6, on ranks whose oldest rows are of these
    versions; None for a rank without rollouts.
    """
    ranks = [
        UpdateReport(
            LossReport(),
            StepReport(1.0, 1e-3),
            tokens_of_versions={} if version is None else {version: 1, 6: 5},
        )
        for version in versions
    ]
    watch.observe(7, {"rollout_corr/k3_kl": value}, [ranks], 6)


def test_a_run_goes_on_up_to_its_limit_and_stops_beyond_it() -> None:
    watch = MismatchWatch(config(*LIMIT, "algorithm.mismatch.then=stop"), WHOLE)
    observe(watch, 0.1, 6)
    watch.observe(7, {}, [], 6)  # a step without a row to learn from measured nothing
    with pytest.raises(
        MismatchError,
        match=r"step 7: rollout_corr/k3_kl is 0\.11, .*limit = 0\.1: .*weights or kernels",
    ):
        observe(watch, 0.11, 6)
    with pytest.raises(MismatchError, match="is nan"):
        observe(watch, math.nan, 6)
    with pytest.raises(
        MismatchError,
        match=r"stale version \(tokens of policy version 4, a trainer at 6",
    ):
        observe(watch, 0.2, 6, None, 4)


def test_without_a_limit_nothing_is_too_far_and_a_correction_is_on_from_the_start() -> (
    None
):
    watch = MismatchWatch(config(*TIS), WHOLE)
    observe(watch, math.inf, 1)
    assert watch.corrects and not MismatchWatch(config(), WHOLE).corrects
    assert MismatchWatch(
        config(*TIS, *LIMIT, "algorithm.mismatch.then=stop"), WHOLE
    ).corrects


def test_a_correction_that_waits_is_on_for_good_once_the_limit_is_crossed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    waiting = config(*TIS, *LIMIT, "algorithm.mismatch.then=correct")
    watch = MismatchWatch(waiting, WHOLE)
    observe(watch, 0.1, 6)
    assert not watch.corrects and capsys.readouterr().err == ""
    observe(watch, 0.2, 6)
    observe(watch, 0.3, 6)
    (line,) = capsys.readouterr().err.splitlines()  # said once
    assert line.startswith("warning: step 7") and line.endswith(
        "algorithm.correction is on from the next step"
    )
    assert watch.corrects
    resumed = MismatchWatch(waiting, WHOLE)
    resumed.load_state(watch.state())
    assert resumed.corrects


@pytest.mark.parametrize(
    ("changes", "sampling", "oldest", "expected"),
    [
        ((), WHOLE, 6, ["weights or kernels (version 6, sampling and float32"]),
        ((), WHOLE, 5, ["stale version (tokens of policy version 5, a trainer at 6"]),
        (("rollout.temperature=0.7",), WHOLE, 6, ["sampling support (temperature is 1.0 there and 0.7 here"]),
        ((), replace(WHOLE, top_p=0.9, top_k=5), 6, [
            "sampling support (top_p is 0.9 there and 1.0 here, top_k is 5 there and -1 here"]),
        (("rollout.dtype=bfloat16",), WHOLE, 6, ["precision (rollout.dtype=bfloat16, actor.backend.dtype=float32"]),
        (("rollout.vllm_args.kv_cache_dtype=fp8",), WHOLE, 6, [
            "precision (rollout.dtype=float32, actor.backend.dtype=float32, rollout.vllm_args.kv_cache_dtype=fp8"]),
        (("rollout.vllm_args.kv_cache_dtype=auto",), WHOLE, 6, ["weights or kernels"]),
        (("actor.backend.dtype=bfloat16",), replace(WHOLE, temperature=0.5), 2, [
            "stale version", "sampling support", "precision"]),
    ],
)  # fmt: skip
def test_every_cause_that_the_facts_bear_out_is_named(
    changes: tuple[str, ...], sampling: Sampling, oldest: int, expected: list[str]
) -> None:
    found = causes(config(*changes), sampling, 6, oldest)
    assert len(found) == len(expected)
    assert all(
        one.startswith(start) for one, start in zip(found, expected, strict=True)
    ), found
