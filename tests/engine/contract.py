"""The body of the contract tests: everything that an engine must do.

Every rank runs `main` and leaves its findings in a file, which test_contract.py checks.
One process runs all checks of all backends of a family. The megatron backends change
global state of their process, so they have processes of their own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.inputs import (
    ADAPTER,
    BALANCE,
    CORRECTED,
    DEADLINE_S,
    LABELS,
    LENGTHS,
    MODELS,
    OPTIMIZER,
    OTHERS,
    POLICY,
    PREFERENCE,
    RESPONSES,
    TEMPERATURE,
    VALUE,
    EveryLoss,
    Noisy,
    Ranks,
    pairs_of,
    refused,
    responses_in_pairs,
    responses_with_labels,
    routed_rows,
    rows_of,
    sequences_of,
)
from verl_ray.backends import BACKENDS
from verl_ray.checkpoint import sharded
from verl_ray.columns.packing import assignment_of_units, balance
from verl_ray.columns.stages import TrainingBatch
from verl_ray.engine.base import Engine, LossReport
from verl_ray.learning.objectives import (
    Objective,
    SupervisedObjective,
)
from verl_ray.ops.outputs import RequestedOutputs, TopTokens


def check_outputs(ranks: Ranks, kind: str) -> dict[str, Any]:
    rows, found = rows_of(), {}
    wanted = RequestedOutputs(
        log_probs=True,
        entropy=True,
        greedy=True,
        squared_probs=True,
        top=TopTokens(4, 11),
        temperature=TEMPERATURE,
    )
    for model in MODELS:
        engine = ranks.engine(kind, model, optimizer=None)
        found[model] = ranks.forward(engine, rows, wanted)
        found[f"{model} scores"] = ranks.forward(
            ranks.engine(kind, model, head="value", optimizer=None),
            rows,
            RequestedOutputs(scores=True),
        )
    engine = ranks.engine(kind, head="value", optimizer=None)
    found["value"] = ranks.forward(
        engine, rows, RequestedOutputs(values=True, scores=True)
    )
    found["scores alone"] = ranks.forward(engine, rows, RequestedOutputs(scores=True))
    halved = ranks.engine(kind, head="value", optimizer=None, dtype="bfloat16")
    found["value bfloat16"] = ranks.forward(
        halved, rows, RequestedOutputs(values=True, scores=True)
    )
    found["head"] = ranks.weights(engine)["score.weight"]
    found["refused"] = refused(lambda: engine.forward_backward(rows, VALUE))
    found["refused step"] = refused(engine.optimizer_step)
    return found


def offloaded(
    engine: Any, rows: TrainingBatch
) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Return the shapes of saved tensors on the device, and of those on the host."""
    kept, moved, decide = set(), set(), engine._to_host

    def watched(saved: torch.Tensor) -> Any:
        answer = decide(saved)
        (kept if answer[1] is None else moved).add(tuple(saved.shape))
        return answer

    engine._to_host = watched
    engine.forward_backward(rows, POLICY)
    return kept, moved


def recorded(ranks: Ranks, kind: str) -> LossReport:
    """Return the report of a step that records each row but the first one."""
    rows = rows_of()
    rows = rows.replace(recorded=np.arange(rows.num_rows) - 1)
    engine = ranks.engine(kind, micro_batch_tokens_per_rank=40)
    report, _ = ranks.step(engine, rows.select(ranks.mine(rows)), SupervisedObjective())
    return report


def check_training(ranks: Ranks, kind: str) -> dict[str, Any]:
    rows = rows_of()
    mine = rows.select(ranks.mine(rows))
    backwards = np.arange(rows.num_rows)[::-1]
    found = {
        "one micro-batch": ranks.train(
            ranks.engine(kind, micro_batch_tokens_per_rank=10_000), mine, POLICY
        ),
        "many micro-batches": ranks.train(
            ranks.engine(kind, micro_batch_tokens_per_rank=40), mine, POLICY
        ),
        "corrected": ranks.train(
            ranks.engine(kind, micro_batch_tokens_per_rank=40), mine, CORRECTED
        ),
        "sequences": ranks.train(
            ranks.engine(kind, micro_batch_tokens_per_rank=80),
            ranks.my_units(sequences_of()),
            EveryLoss(),
        ),
        "sequences in one micro-batch": ranks.train(
            ranks.engine(kind, micro_batch_tokens_per_rank=10_000),
            ranks.my_units(sequences_of()),
            EveryLoss(),
        ),
        "every loss": ranks.train(
            ranks.engine(kind, micro_batch_tokens_per_rank=40), mine, EveryLoss()
        ),
        "other order": ranks.train(
            ranks.engine(kind),
            rows.select(backwards[ranks.rank :: ranks.world]),
            POLICY,
        ),
        "all on one rank": ranks.train(
            ranks.engine(kind),
            rows.select(np.arange(rows.num_rows if ranks.rank == 0 else 0)),
            POLICY,
        ),
        "activation checkpointing": ranks.train(
            ranks.engine(kind, activation_checkpointing=True), mine, POLICY
        ),
        "supervised": ranks.train(ranks.engine(kind), mine, SupervisedObjective()),
        "recorded": recorded(ranks, kind),
        "llama": ranks.train(ranks.engine(kind, "llama"), mine, POLICY),
        "qwen2": ranks.train(ranks.engine(kind, "qwen2"), mine, POLICY),
        "experts": ranks.train(
            ranks.engine(kind, "qwen3_moe", expert_balance=BALANCE), mine, POLICY
        ),
        "experts in many micro-batches": ranks.train(
            ranks.engine(
                kind,
                "qwen3_moe",
                expert_balance=BALANCE,
                micro_batch_tokens_per_rank=40,
                activation_checkpointing=True,
            ),
            mine,
            POLICY,
        ),
        "experts in bfloat16": ranks.train(
            ranks.engine(kind, "qwen3_moe", expert_balance=BALANCE, dtype="bfloat16"),
            mine,
            POLICY,
        ),
        "experts, value": ranks.train(
            ranks.engine(kind, "qwen3_moe", expert_balance=BALANCE, head="value"),
            mine,
            VALUE,
        ),
        "gemma": ranks.train(ranks.engine(kind, "gemma"), mine, POLICY),
        "value": ranks.train(ranks.engine(kind, head="value"), mine, VALUE),
        "preferences": ranks.train(
            ranks.engine(kind, head="value", micro_batch_tokens_per_rank=60),
            ranks.my_units(pairs_of()),
            PREFERENCE,
        ),
        "pairs of responses": ranks.train(
            ranks.engine(
                kind,
                "qwen3_moe",
                expert_balance=BALANCE,
                micro_batch_tokens_per_rank=60,
            ),
            ranks.my_units(responses_in_pairs()),
            RESPONSES,
        ),
        "responses with labels": ranks.train(
            ranks.engine(kind, micro_batch_tokens_per_rank=40),
            responses_with_labels().select(ranks.mine(rows)),
            LABELS,
        ),
    }
    halved = ranks.engine(kind, dtype="bfloat16", average_decay=0.5)
    found["supervised in bfloat16"] = ranks.train(halved, mine, SupervisedObjective())
    wanted, trained = RequestedOutputs(log_probs=True), ranks.weights(halved)
    policy = ranks.forward(halved, rows, wanted)["log_probs"]
    with halved.averaged():
        changed = ranks.weights(halved)
        teacher = ranks.forward(halved, rows, wanted)["log_probs"]
    again = ranks.forward(halved, rows, wanted)["log_probs"]
    found["average in bfloat16"] = (
        equal(changed, trained) or np.array_equal(teacher, policy),
        equal(ranks.weights(halved), trained) and np.array_equal(again, policy),
    )
    if kind == "fsdp":
        gathered = {"sharding": "grad_op"}
        found["gathered in forward"] = ranks.train(
            ranks.engine(kind, **gathered), mine, POLICY
        )
        ahead = {
            "prefetch_layers": 2,
            "host_parameters": True,
            "activation_offload": True,
        }
        found["ahead and from the host"] = ranks.train(
            ranks.engine(kind, **ahead), mine, POLICY
        )
        apart = {"embedding_units": True, "read_weights": "rank_zero"}
        found["embeddings apart"] = ranks.train(
            ranks.engine(kind, **apart), mine, POLICY
        )
        found["embeddings apart, value"] = ranks.train(
            ranks.engine(kind, head="value", **apart), mine, VALUE
        )
        found["offloaded"] = offloaded(
            ranks.engine(
                kind, activation_offload=True, micro_batch_tokens_per_rank=999
            ),
            mine,
        )
        shards = {"accumulate": "sharded", "micro_batch_tokens_per_rank": 40}
        found["gradients in shards"] = ranks.train(
            ranks.engine(kind, **shards), mine, POLICY
        )
        found["not sharded"] = ranks.train(
            ranks.engine(kind, sharding="none"), mine, POLICY
        )
        engine = ranks.engine(kind, dtype="bfloat16", **gathered)
        engine.forward(mine, RequestedOutputs(log_probs=True))
        found["held after forward"] = ranks.weights(engine)
    single = rows.select([4])
    here = single if ranks.rank == 0 else single.select([])
    found["fewer rows than ranks"] = ranks.train(ranks.engine(kind), here, POLICY)
    engine = ranks.engine(kind)
    report = ranks.total(engine.forward_backward(mine, POLICY))
    found["tokens"], found["terms"] = report.tokens, report.terms
    engine = ranks.engine(kind, "qwen3_moe", micro_batch_tokens_per_rank=40)
    found["load"] = ranks.total(engine.forward_backward(mine, POLICY)).expert_load
    found |= replayed(ranks, kind)
    if BACKENDS[kind].moves_expert_biases:
        for tokens in (40, 10_000):
            found[f"biases, {tokens}"] = moved_biases(ranks, kind, mine, tokens)
    return found


def replayed(ranks: Ranks, kind: str) -> dict[str, Any]:
    """Three steps with the experts that rows have, and what their first load is."""
    rows, replay = routed_rows(), {"replays_routing": True, "expert_balance": 0.0}
    mine = rows.select(ranks.mine(rows))
    small = {"activation_checkpointing": True, "micro_batch_tokens_per_rank": 40}
    engine = ranks.engine(kind, "qwen3_moe", **replay, **small)
    load = ranks.total(engine.forward_backward(mine, POLICY)).expert_load
    engine = ranks.engine(kind, "qwen3_moe", **replay, **small)
    found = {
        "replayed": ranks.train(engine, mine, POLICY),
        "replayed load": load,
        "not recorded": refused(
            lambda: engine.forward_backward(mine.replace(routed_experts=None), POLICY)
        ),
    }
    if kind in ADAPTED:
        adapted = ranks.engine(kind, "qwen3_moe", lora=PROJECTED, **replay)
        base = RequestedOutputs(log_probs=True, base=True)
        with_experts, without = (
            adapted.forward(each, base).log_probs
            for each in (mine, mine.replace(routed_experts=None))
        )
        found["the base replays nothing"] = np.array_equal(with_experts, without)
    if kind == "megatron" and ranks.world == 2:
        slices = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}
        engine = ranks.engine(kind, "wide_qwen3_moe", **replay, **slices)
        found["replayed in slices"] = ranks.train(
            engine, ranks.of(engine, rows), POLICY
        )
        stages = {"pipeline_parallel": 2, "recompute": "full"}
        engine = ranks.engine(
            kind, "wide_qwen3_moe", micro_batch_tokens_per_rank=40, **replay, **stages
        )
        found["replayed in stages"] = ranks.train(engine, rows, POLICY)
    return found


PROJECTED = ADAPTER.model_copy(update={"targets": ("q_proj", "v_proj")})


def moved_biases(
    ranks: Ranks, kind: str, mine: TrainingBatch, tokens: int
) -> dict[str, Any]:
    """The bias of the only layer with experts after a step, and the load before it."""
    engine = ranks.engine(
        kind, "glm4_moe", expert_bias_update=0.25, micro_batch_tokens_per_rank=tokens
    )
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    before = ranks.weights(engine)[name]
    loads = [
        ranks.total(engine.forward_backward(mine, POLICY)).expert_load for _ in range(2)
    ]
    engine.optimizer_step()
    return {
        "moved": ranks.weights(engine)[name] - before,
        "saved": engine.state()["model"][f"hf.{name}"] - before,
        "loads": loads,
    }


def check_refusals(ranks: Ranks, kind: str) -> dict[str, Any]:
    rows = rows_of()
    engine = ranks.engine(
        kind, micro_batch_tokens_per_rank=39
    )  # the row of 40 tokens is on one rank only
    mine = rows.select(ranks.mine(rows))
    first = TrainingBatch(
        offsets=np.array([0, 2]),
        tokens=np.array([1, 2], np.int32),
        response_mask=np.array([True, True]),
        loss_weight=np.ones(1, np.float32),
    )
    found = {}
    if kind == "megatron":
        biased, name = (
            AutoConfig.from_pretrained(ranks.folder / "llama"),
            f"biased_{ranks.world}",
        )
        biased.attention_bias = True
        AutoModelForCausalLM.from_config(biased).save_pretrained(
            ranks.folder / name
        )  # rank 0 does
        dist.barrier()
        found["biased"] = refused(lambda: ranks.engine(kind, name))
        found["adapted"] = refused(lambda: ranks.engine(kind, lora=ADAPTER))
    if kind == "fsdp":
        found["tied"] = refused(
            lambda: ranks.engine(kind, "llama", embedding_units=True)
        )
        found["nowhere"] = refused(
            lambda: ranks.engine(kind, "nowhere", read_weights="rank_zero")
        )
    if kind in ADAPTED:
        found["no such layer"] = refused(
            lambda: ranks.engine(
                kind,
                "qwen3_moe",
                lora=ADAPTER.model_copy(update={"targets": ("q_proj", "gate_proj")}),
            )
        )
    return found | {
        "no average": refused(lambda: engine.averaged().__enter__()),
        "no experts": refused(lambda: ranks.engine(kind, expert_balance=0.1)),
        "no adapter": refused(
            lambda: engine.export(str(ranks.folder / "none"), adapter=True)
        ),
        "cap": refused(lambda: engine.forward_backward(mine, POLICY)),
        "sequence": refused(
            lambda: engine.forward_backward(
                ranks.my_units(sequences_of((20, 9, 20, 9))), POLICY
            )
        ),
        "placed": refused(lambda: engine.place(params="disk", optimizer="host")),
        "first": refused(lambda: engine.forward_backward(first, SupervisedObjective())),
    }


def check_non_finite(ranks: Ranks, kind: str, **settings: Any) -> dict[str, Any]:
    engine = ranks.engine(kind, average_decay=0.5, **settings)
    mine = ranks.of(engine, rows_of())
    ranks.train(engine, mine, POLICY, 2)
    before, average = ranks.weights(engine), averaged(ranks, engine)
    assert mine.advantages is not None
    bad = mine.replace(advantages=np.full_like(mine.advantages, np.inf))
    bad = bad if engine.topology.dp_rank == 0 else mine
    _, step = ranks.step(engine, bad, POLICY)
    after = ranks.weights(engine)
    same_average = equal(averaged(ranks, engine), average)
    _, next_step = ranks.step(engine, mine, POLICY)
    changed_later = any(
        not torch.equal(after[name], value)
        for name, value in ranks.weights(engine).items()
    )

    # Finite gradients, and a rate that float32 does not hold.
    finite = engine.names_not_finite()
    optimizer = engine.spec.optimizer.model_copy(update={"lr": 1e39})
    engine.spec = replace(engine.spec, optimizer=optimizer)
    _, last_step = ranks.step(engine, mine, POLICY)
    return {
        "finite": (step.broken, next_step.broken, finite),
        "broken": (
            last_step.skipped,
            last_step.broken == engine.names_not_finite(),
            last_step.broken,
        ),
        "skipped": step.skipped,
        "unchanged": equal(before, after) and same_average,
        "changed later": changed_later,
        "next": (next_step.skipped, next_step.lr),
    }


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors have the same bits."""
    return all(torch.equal(value, right[name]) for name, value in left.items())


def averaged(ranks: Ranks, engine: Engine, **how: Any) -> dict[str, torch.Tensor]:
    """The weights while the average is in their place."""
    with engine.averaged():
        return ranks.weights(engine, **how)


def there_and_back(engine: Any) -> None:
    """Check `place` where the device has its own memory."""
    engine.before_offload()
    engine.offload.to_host(engine.offloadable_weights() + engine.offloadable_moments())
    engine.offload.to_device(
        engine.offloadable_weights() + engine.offloadable_moments()
    )
    engine.after_reload()


def check_state(ranks: Ranks, kind: str) -> dict[str, Any]:
    rows = rows_of()
    mine = rows.select(ranks.mine(rows))
    folder = ranks.folder / f"state_{kind}_{ranks.world}"
    engine = ranks.engine(kind, average_decay=0.5)
    before = ranks.weights(engine)
    sharded.save(
        engine.state(), str(folder) + "_new"
    )  # an optimizer that has not stepped
    same = equal(ranks.weights(engine), before)
    ranks.train(engine, mine, Noisy(), 1)
    between = ranks.weights(engine)
    ranks.train(engine, mine, Noisy(), 1)
    sharded.save(engine.state(), str(folder))
    saved = ranks.weights(engine)
    average = averaged(ranks, engine)
    with engine.averaged():
        taught = ranks.forward(engine, rows, RequestedOutputs(log_probs=True))
    unchanged = equal(ranks.weights(engine), saved)
    never_stopped = ranks.train(engine, mine, Noisy(), 2)
    resumed = ranks.engine(kind, average_decay=0.5)
    ranks.train(resumed, mine, POLICY, 1)  # whatever it holds is replaced
    load(resumed, folder)
    again = ranks.train(resumed, mine, Noisy(), 2)
    same_weights = equal(ranks.weights(engine), ranks.weights(resumed))
    same_average = equal(averaged(ranks, engine), averaged(ranks, resumed))
    anew = ranks.engine(kind, average_decay=0.5)
    load(anew, Path(str(folder) + "_new"))
    for _ in range(2):  # idempotent; on a CPU both are the same memory
        anew.place(params="host", optimizer="host")
        if kind != "megatron":
            there_and_back(anew)
        anew.place(params="device", optimizer="device")
    return {
        "saving changes nothing": same,
        "never stopped": never_stopped,
        "resumed": again,
        "same weights": same_weights and same_average,
        "average": (before, between, saved, average),
        "taught": taught["log_probs"],
        "unchanged by the average": unchanged and equal(averaged(ranks, anew), before),
        "from an unstepped state": ranks.train(anew, mine, POLICY),
        "evaluated": evaluated(ranks, folder, saved, kind),
    }


def check_optimizers(ranks: Ranks, kind: str) -> dict[str, Any]:
    """Train with every optimizer beside AdamW that the backend has.

    Muon has experts, whose matrices are stacked, and SGD an average of the weights.
    """
    found = {}
    for name in BACKENDS[kind].optimizers[1:]:
        engine = with_optimizer(ranks, kind, name)
        mine = rows_of().select(ranks.mine(rows_of()))
        trained = ranks.train(engine, mine, POLICY, 2)
        saved = ranks.weights(engine)
        folder = ranks.folder / f"{name}_{kind}_{ranks.world}"
        sharded.save(engine.state(), str(folder))
        resumed = with_optimizer(ranks, kind, name)
        there_and_back(resumed)
        load(resumed, folder)
        there_and_back(resumed)
        found[name] = {
            "trained": trained,
            "weights": saved,
            "never stopped": ranks.train(engine, mine, POLICY, 1),
            "resumed": ranks.train(resumed, mine, POLICY, 1),
            "after": ranks.weights(engine),
            "same": equal(ranks.weights(engine), ranks.weights(resumed)),
        }
    return found


def with_optimizer(ranks: Ranks, kind: str, name: str) -> Engine:
    """Build an engine with another optimizer than AdamW."""
    model = "qwen3_moe" if name == "muon" else "qwen3"
    average = 0.5 if name == "sgd" else None
    return ranks.engine(kind, model, "policy", OTHERS[name], average_decay=average)


def read_optimizers(ranks: Ranks, kind: str) -> dict[str, Any]:
    """Take a step from the states that others have written with those optimizers."""
    found = {}
    for name in BACKENDS[kind].optimizers[1:]:
        for writer, world in (("engine", 1), ("engine", 2), ("fsdp", 2)):
            state = ranks.folder / f"{name}_{writer}_{world}"
            if state.exists():
                engine = with_optimizer(ranks, kind, name)
                load(engine, state)
                ranks.train(engine, rows_of().select(ranks.mine(rows_of())), POLICY, 1)
                found[name, writer, world] = ranks.weights(engine)
    return found


def evaluated(
    ranks: Ranks, folder: Path, saved: dict[str, Any], *what: Any, **settings: Any
) -> tuple[list[str], bool]:
    """The keys of the state of an engine that does not learn, and whether it holds the
    weights of a run once it has read the state of that run.
    """
    engine = ranks.engine(*what, optimizer=None, **settings)
    keys = sorted({key.partition("_")[0] for key in engine.state()})
    load(engine, folder)
    weights = ranks.weights(engine)
    return keys, all(torch.equal(weights[name], saved[name]) for name in saved)


def check_elsewhere(ranks: Ranks, kind: str, **settings: Any) -> dict[str, Any]:
    """Check states that other backends and other numbers of ranks wrote.

    Four ranks read some of them. The result of the second step depends on the moments
    and step counts that were read, each in place of those before.
    """
    rows = rows_of()
    found = {}
    engine = ranks.engine(kind, average_decay=0.5, **settings)
    mine = ranks.of(engine, rows)
    for writer, world in WRITERS if ranks.world < 4 else READ_BY_FOUR:
        state = ranks.folder / f"state_{writer}_{world}"
        if not state.exists():
            continue  # slow tests are not run
        load(engine, state)
        average = averaged(ranks, engine)
        found[f"{writer} on {world}"] = {
            "weights": ranks.weights(engine)
            | {f"average of {name}": value for name, value in average.items()},
            **ranks.train(engine, mine, POLICY, 2),
        }
    return found


def check_hybrid(ranks: Ranks) -> dict[str, Any]:
    """Check two groups of two ranks with copies, and four ranks that shard all."""
    rows = rows_of()
    mine = rows.select(ranks.mine(rows))
    groups = {"sharding": "hybrid", "shard_size": 2}
    engine = ranks.engine("fsdp", average_decay=0.5, **groups)
    found: dict[str, Any] = {"before": ranks.weights(engine)}
    first = ranks.train(engine, mine, POLICY, 2)
    saving = sharded.BackgroundSave(
        engine.state(), str(ranks.folder / "state_hybrid_4"), ranks.group
    )
    never_stopped = ranks.train(engine, mine, POLICY, 1)
    saving.wait()
    found["hybrid"] = {
        name: values + never_stopped[name] for name, values in first.items()
    }
    resumed = ranks.engine("fsdp", **groups)
    load(resumed, ranks.folder / "state_hybrid_4")
    found["resumed"], found["never stopped"] = (
        ranks.train(resumed, mine, POLICY, 1),
        never_stopped,
    )
    found["full"] = ranks.train(ranks.engine("fsdp"), mine, POLICY)
    experts = ranks.engine("fsdp", "qwen3_moe", expert_balance=BALANCE, **groups)
    found["experts"] = ranks.train(experts, mine, POLICY)
    adapted = ranks.engine("fsdp", lora=ADAPTER, **groups)
    found["adapter"] = ranks.train(adapted, mine, POLICY)
    return found


def check_layouts(ranks: Ranks) -> dict[str, Any]:
    """Check layouts of megatron that write a state and continue from it."""
    rows, found = rows_of(), {}
    for name, layout in LAYOUTS[ranks.world].items():
        engine = ranks.engine("megatron", average_decay=0.5, **layout)
        mine = ranks.of(engine, rows)
        before = ranks.weights(engine)
        ranks.train(engine, mine, POLICY, 2)
        folder = ranks.folder / f"state_{name}_{ranks.world}"
        saving = sharded.BackgroundSave(engine.state(), str(folder), ranks.group)
        never_stopped = ranks.train(engine, mine, POLICY, 2)
        saving.wait()  # what was trained meanwhile is not in it
        resumed = ranks.engine("megatron", **layout)
        load(resumed, folder)
        found[name] = {
            "before": before,
            "never stopped": never_stopped,
            "resumed": ranks.train(resumed, mine, POLICY, 2),
        }
        engine.export(str(ranks.folder / f"export_{name}"))
        found[name]["trained"] = ranks.weights(engine)
    return found


def check_held(ranks: Ranks) -> dict[str, Any]:
    """Check weights, exports before training, and states of other parallel layouts."""
    rows, found = rows_of(), {}
    for name, (model, layout) in HELD[ranks.world].items():
        engine: Any = ranks.engine("megatron", model, **layout)
        mine = ranks.of(engine, rows)
        before = ranks.weights(engine)
        engine.export(str(ranks.folder / f"held_{name}"))
        trained = ranks.train(engine, mine, POLICY, 2)
        folder = ranks.folder / f"state_{name}_{ranks.world}"
        sharded.save(engine.state(), str(folder))
        here = ranks.weights(engine)
        # As `place` does where the device has memory of its own
        engine.buffers.release_gradients()
        engine.buffers.weights_to_host()
        freed = all(
            buffer.grad_data.untyped_storage().nbytes() == 0
            for buffer in engine.buffers
        )
        there = ranks.weights(engine)
        engine.buffers.weights_to_device()
        engine.buffers.renew_gradients()
        never_stopped = ranks.train(engine, mine, POLICY, 1)
        resumed = ranks.engine("megatron", model, **layout)
        load(resumed, folder)
        found[name] = {
            "model": model,
            "before": before,
            "trained": trained,
            "same on the host": freed
            and all(
                torch.equal(here[parameter], there[parameter]) for parameter in here
            ),
            "never stopped": never_stopped,
            "resumed": ranks.train(resumed, mine, POLICY, 1),
            "evaluated": evaluated(ranks, folder, here, "megatron", model, **layout),
        }
    return found


def check_four(ranks: Ranks) -> dict[str, Any]:
    """Check a non-finite step, and pairs of rows, where four ranks shard the model."""
    layout: dict[str, Any] = LAYOUTS[4]["tp2 pp2"]
    engine: Any = ranks.engine(
        "megatron", head="value", micro_batch_tokens_per_rank=60, **layout
    )
    groups = engine.layout.groups
    backends = [
        one._get_backend(torch.device("cpu"))
        for one in (groups.tp, groups.pp, groups.dp, groups.expt_dp)
    ]
    return {
        "timeouts": [backend.options._timeout.total_seconds() for backend in backends],
        "non-finite": check_non_finite(ranks, "megatron", **layout),
        "preferences": ranks.train(engine, pairs_of(), PREFERENCE),
    }


def check_continued(ranks: Ranks, kind: str) -> dict[str, Any]:
    """Check that every engine can start from an export of fsdp.

    megatron distributes the experts over its ranks.
    """
    engine = ranks.engine(
        kind,
        "export_qwen3_moe_fsdp_2",
        **HELD[2]["ep2"][1] if kind == "megatron" else {},
    )
    weights = ranks.weights(engine)
    return {
        "weights": weights,
        **ranks.train(engine, ranks.of(engine, rows_of()), POLICY, 2),
    }


def load(engine: Engine, folder: Path) -> None:
    state = engine.state()
    sharded.load(state, str(folder))
    engine.load_state(state)


def check_weights(ranks: Ranks, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model in ("qwen3", "llama", "qwen3_moe"):
        engine = ranks.engine(kind, model)
        found[model] = (engine.manifest(), ranks.weights(engine))
    decayed = ranks.engine(
        kind,
        optimizer=OPTIMIZER.model_copy(update={"weight_decay": 1.0, "warmup_steps": 0}),
    )
    before = ranks.weights(decayed)
    nothing = rows_of().replace(loss_weight=np.zeros(len(LENGTHS), np.float32))
    ranks.step(decayed, nothing, SupervisedObjective())  # no gradient: the decay alone
    found["decay"] = {
        name: (before[name], value) for name, value in ranks.weights(decayed).items()
    }
    rows = rows_of()
    for model in EXPORTED:
        trained = ranks.engine(kind, model)
        ranks.train(trained, rows.select(ranks.mine(rows)), POLICY, 2)
        trained.export(str(ranks.folder / f"export_{model}_{kind}_{ranks.world}"))
        found[f"exported {model}"] = ranks.forward(
            trained, rows, RequestedOutputs(log_probs=True)
        )
        new = ranks.engine(kind, model, dtype="bfloat16")
        new.export(str(ranks.folder / f"export_new_{model}_{kind}_{ranks.world}"))
    return found


def check_adapter(ranks: Ranks, kind: str) -> dict[str, Any]:
    """Check an adapter on frozen weights. Its files are in their own folders."""
    rows = rows_of()
    mine = rows.select(ranks.mine(rows))
    folder = ranks.folder / f"adapter_{kind}_{ranks.world}"
    wanted = RequestedOutputs(log_probs=True)
    found: dict[str, Any] = {}
    for head in ("policy", "value"):
        objective: Objective = POLICY if head == "policy" else VALUE
        engine = ranks.engine(kind, head=head, lora=ADAPTER)  # type: ignore[arg-type]
        engine.export(str(folder / f"{head}_new"), adapter=True)
        found[head] = ranks.train(engine, mine, objective)
        engine.export(str(folder / head), adapter=True)
        engine.export(str(folder / f"{head}_merged"))
    engine = ranks.engine(
        kind,
        lora=ADAPTER,
        average_decay=0.5,
        micro_batch_tokens_per_rank=40,
        activation_checkpointing=True,
    )
    ranks.train(engine, mine, POLICY, 2)
    sharded.save(engine.state(), str(folder / "state"))
    saved = ranks.weights(engine)
    found["evaluated"] = evaluated(ranks, folder / "state", saved, kind, lora=ADAPTER)
    found["kept"] = sorted(engine.state()["model"])
    found["kept of a tied model"] = sorted(
        ranks.engine(kind, "llama", lora=ADAPTER).state()["model"]
    )
    resumed = ranks.engine(
        kind,
        lora=ADAPTER,
        average_decay=0.5,
        micro_batch_tokens_per_rank=40,
        activation_checkpointing=True,
    )
    load(resumed, folder / "state")
    found["never stopped"], found["resumed"] = (
        ranks.train(one, mine, POLICY, 1) for one in (engine, resumed)
    )
    found["adapted"] = ranks.forward(engine, rows, wanted)
    found["base"] = ranks.forward(engine, rows, replace(wanted, base=True))
    found["adapted again"] = ranks.forward(engine, rows, wanted)
    plain = ranks.engine(kind, optimizer=None, micro_batch_tokens_per_rank=40)
    found["never adapted"] = ranks.forward(plain, rows, wanted)
    engine.export(str(folder / "whole"))
    found["sent"] = ranks.weights(engine)
    engine.export(str(folder / "alone"), adapter=True)
    found["sent apart"] = ranks.weights(engine, separate_adapter=True)
    found["averaged apart"], found["resumed average"] = (
        averaged(ranks, one, separate_adapter=True) for one in (engine, resumed)
    )
    return found


def check_sequence(ranks: Ranks) -> dict[str, Any]:
    """Check two ranks that compute the same rows, half of the tokens each."""
    rows, pairs = rows_of(), pairs_of()
    found: dict[str, Any] = {}

    def train(
        name: str,
        rows: TrainingBatch,
        objective: Objective,
        **settings: Any,
    ) -> None:
        engine = ranks.engine("fsdp", sequence_parallel=2, **settings)
        place = engine.topology
        unit = np.arange(rows.num_rows) if rows.unit is None else rows.unit
        parts = functools.partial(balance, parts=place.dp_size)
        mine = rows.select(
            assignment_of_units(parts, rows.lengths, unit)[place.dp_rank]
        )
        steps = []
        for _ in range(3):
            report = engine.forward_backward(mine, objective)
            steps.append(
                (
                    ranks.total(report if place.returns_results else LossReport()),
                    engine.optimizer_step(),
                )
            )
        found[name] = {
            "loss": [report.loss for report, _ in steps],
            "norm": [step.grad_norm for _, step in steps],
            "terms": [report.terms for report, _ in steps],
        }

    for model in ("qwen3", "llama", "qwen2"):
        train(model, rows, POLICY, model=model)
    train("value", rows, VALUE, head="value")
    train("preferences", pairs, PREFERENCE, head="value")
    train("pairs of responses", responses_in_pairs(), RESPONSES)
    train("many micro-batches", rows, POLICY, micro_batch_tokens_per_rank=20)
    train("every loss", rows, EveryLoss(), micro_batch_tokens_per_rank=20)
    train("activation checkpointing", rows, POLICY, activation_checkpointing=True)
    engine = ranks.engine("fsdp", sequence_parallel=2, optimizer=None)
    found["outputs"] = vars(
        engine.forward(
            rows,
            RequestedOutputs(
                log_probs=True,
                entropy=True,
                greedy=True,
                squared_probs=True,
                top=TopTokens(4, 11),
                temperature=TEMPERATURE,
            ),
        )
    )
    found["places"] = (
        engine.topology.dp_rank,
        engine.topology.dp_size,
        engine.topology.returns_results,
    )
    return found


def check_context(ranks: Ranks) -> dict[str, Any]:
    """Train all losses of the policy on two ranks that have half of each row."""
    engine = ranks.engine(
        "megatron", context_parallel=2, micro_batch_tokens_per_rank=20
    )
    return ranks.train(engine, ranks.of(engine, rows_of()), EveryLoss())


CHECKS = (
    check_outputs,
    check_training,
    check_refusals,
    check_non_finite,
    check_state,
    check_optimizers,
    check_weights,
)
EXPORTED = ("llama", "qwen3_moe")
FAMILIES: dict[str, tuple[str, ...]] = {
    "torch": ("engine", "fsdp"),
    "megatron": ("megatron_fsdp", "megatron"),
    "plain": ("engine",),
}
"""Backends whose engines share a process; the last one has layouts on four ranks."""
ALL_FAMILIES = ("torch", "megatron")
KINDS = tuple(kind for family in ALL_FAMILIES for kind in FAMILIES[family])
ADAPTED = tuple(kind for kind in KINDS if BACKENDS[kind].has_adapters)
LAYOUTS_OF_FOUR: dict[str, tuple[dict[str, Any], ...]] = {
    "torch": ({"sharding": "grad_op"}, {"sharding": "hybrid", "shard_size": 2}),
    "megatron": (
        {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
        {"context_parallel": 2},
    ),
}
"""On which four ranks read what others wrote."""
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {},
    2: {
        "tp2 sp": {"tensor_parallel": 2, "sequence_parallel": True},
        "pp2": {"pipeline_parallel": 2},
    },
    4: {"tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2}},
}
"""Of megatron, that write."""
HELD: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    1: {},
    2: {
        "ep2": ("qwen3_moe", {"expert_parallel": 2}),
        "tp2 sp etp2": (
            "wide_qwen3_moe", {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2},
        ),
        "tp2 tied": ("wide_qwen2", {"tensor_parallel": 2}),
        "pp2 vpp2 tied": ("wide_qwen2", {"pipeline_parallel": 2, "virtual_stages": 2}),
        "cp2": ("wide_qwen2", {"context_parallel": 2}),
        "tp2 bfloat16": ("wide_qwen2", {"tensor_parallel": 2, "dtype": "bfloat16"}),
        "pp2 norms behind": ("gemma3_text", {"pipeline_parallel": 2}),
        "ep2 other names": ("mixtral", {"expert_parallel": 2}),
        "tp2 sp ep2 latent": (
            "deepseek_v3", {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
        ),
    },
    4: {"pp2 ep2": ("qwen3_moe", {"pipeline_parallel": 2, "expert_parallel": 2})},
}  # fmt: skip
"""By name: a model, and the layout that holds it."""
WRITERS = (
    ("engine", 1), ("engine", 2), ("fsdp", 1), ("fsdp", 2), ("hybrid", 4), ("megatron", 1), ("megatron", 2),
    ("tp2 sp", 2), ("pp2", 2), ("tp2 pp2", 4), ("megatron_fsdp", 1), ("megatron_fsdp", 2),
)  # fmt: skip
READ_BY_FOUR = (("engine", 1), ("fsdp", 2), ("tp2 sp", 2), ("tp2 pp2", 4))


def waves(
    worlds: Sequence[int], alone: Sequence[str]
) -> list[list[tuple[str, str, int, int]]]:
    """List the processes to start, in waves of processes that run at the same time.

    A process has a mode, a family, a rank and a number of ranks. Single ranks of the
    families `alone` are in one wave.
    """
    groups = [
        (world, (family,)) for world in worlds if world > 1 for family in ALL_FAMILIES
    ]
    return [
        [(part, family, rank, world) for family in families for rank in range(world)]
        for part in ("write", "read")
        for world, families in [(1, alone), *groups]
    ]


def write(ranks: Ranks, family: str) -> dict[str, Any]:
    """Find what this process can find alone, and write states for others to read."""
    torch_alone = family != "megatron"
    found: dict[str, Any] = {}
    if not torch_alone:
        found = {"layouts": check_layouts(ranks), "held": check_held(ranks)}
        if ranks.world == 4:
            found |= check_four(ranks)
    if ranks.world == 4 and torch_alone:
        found["hybrid"] = check_hybrid(ranks)
    if ranks.world == 2 and not torch_alone:
        found["context"] = check_context(ranks)
    if ranks.world > 1 and torch_alone:
        found["sequence"] = check_sequence(ranks)
    for kind in FAMILIES[family] if ranks.world < 4 else ():
        checks = (*CHECKS, check_adapter) if kind in ADAPTED else CHECKS
        found[kind] = {check.__name__: check(ranks, kind) for check in checks}
    if not torch_alone:
        found["apex"] = "apex" in sys.modules
    return found


def read(ranks: Ranks, family: str) -> dict[str, Any]:
    """Find what follows from reading the states that all processes have written."""
    kinds = FAMILIES[family]
    layouts = LAYOUTS_OF_FOUR.get(family, ())
    readers_on_four = [(kinds[-1], layout) for layout in layouts]
    readers = readers_on_four if ranks.world == 4 else [(kind, {}) for kind in kinds]
    found: dict[str, Any] = {
        f"elsewhere {family}": [
            check_elsewhere(ranks, kind, **settings) for kind, settings in readers
        ]
    }
    if family != "megatron" and ranks.world < 4:
        found["optimizers"] = {kind: read_optimizers(ranks, kind) for kind in kinds}
    if ranks.world == 2:
        found[f"continued {family}"] = check_continued(ranks, kinds[-1])
    return found


PARTS = {"write": write, "read": read}


def main(part: str, family: str, rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if (family, world) == ("megatron", 2):
        sys.path.insert(
            0, str(folder / "beside")
        )  # with an Apex to import, which must make no difference
    ranks = Ranks(rank, world, folder)
    # a group of one where there is one rank, as FSDP needs it and as workers have it
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting_{part}_{family}_{world}", rank=rank, world_size=world,
        timeout=timedelta(seconds=DEADLINE_S),
    )  # fmt: skip
    torch.save(
        PARTS[part](ranks, family), folder / f"found_{part}_{family}_{world}_{rank}.pt"
    )
    dist.barrier()
    dist.destroy_process_group()
