"""A prompt that ends every replica which generates for it, in a real step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controllers.rollouts.given_up import ENDS_REPLICAS
from controllers.system.plan import WORKERS, plan_processes, resolve_on
from tests.controllers.rollouts.frail import POISON, PoisonedReplica
from tests.controllers.runs import SAMPLING, SHAPE, Inputs, Samplers, training
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import read
from verl_ray.columns.stages import Finish
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.ledger import LEDGER, Event, read_parts
from verl_ray.profiling.phases import Timers

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


def test_a_poisoned_prompt_is_rejected_and_the_run_goes_on(
    cluster: Session,
    inputs: Inputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four prompts may be the cause of the first loss, and tried alone after the second.

    One restart is allowed, so the run ends where a loss counts that has no known cause.
    """
    config = inputs.config(
        "grpo", tmp_path, "data.prompts_per_step=4", "rollout.stream_rows=1",
        "run.recovery.max_restarts=1", "actor.mini_batch_size=null",
        "rollout.max_response_tokens=24", "algorithm.kl=none",
    )  # fmt: skip
    config = resolve_on(config, SHAPE)
    poison = tmp_path / "logs" / POISON
    poison.parent.mkdir()
    poison.write_text("train 2\nevaluate 1\n")

    plan = plan_processes(config, SHAPE, {**WORKERS, "rollout": PoisonedReplica})
    roles = [plan.roles[name] for name in SAMPLING]
    sets = [
        replace(each, cpus_per_rank=0.25) for each in plan.sets if each.name in SAMPLING
    ]
    with start_groups(sets, roles, stall_s=240, log_dir=tmp_path / "logs") as groups:
        replicas = groups.replicas(plan.roles["rollout"])
        samplers = Samplers(replicas, groups[plan.roles["reward"]])
        with training(config, samplers) as run:
            run.begin(0)
            metrics = run.step(1)
            assert metrics["response/aborted_ratio"] == 4 / 16
            # Those that were open twice depend on who had finished.
            assert metrics["rollout/restarts"] in (2, 3)
            assert metrics["actor/grad_norm"] > 0

            warned = capsys.readouterr().err
            assert "warning: prompt 2 (train, " in warned and ENDS_REPLICAS in warned
            run.supply.ledger.close()
            parts = read_parts(tmp_path / LEDGER)
            assert parts.of(Event.TRAINED)["ordinal"].tolist() == [0, 1, 3]
            assert parts.of(Event.REJECTED)["ordinal"].tolist() == [2]
            assert parts.reasons == [ENDS_REPLICAS]

            # A held-out problem has no score, and ends no replica a second time.
            prompts = run.prompts.all(4)
            generation = run.producer.evaluation_generation()

            def evaluated() -> Experience:
                buffer = RolloutBuffer(generation.group_size, staleness=0)
                run.producer.begin(prompts, generation, buffer, 1)
                return run.producer.take(prompts.group_id, buffer, 1, Timers())

            for losses in ((2, 3), (0,)):
                found = evaluated()
                rows = read(found.rollouts, 60)
                is_aborted = rows.finish == Finish.ABORTED
                assert np.flatnonzero(is_aborted).tolist() == [1]
                is_failed = np.isnan(found.scores["reward"].row("score"))
                assert is_failed.tolist() == is_aborted.tolist()
                assert run.replicas.take_counts()["rollout/restarts"] in losses
