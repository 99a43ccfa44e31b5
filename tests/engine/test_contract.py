"""Every backend on one and two ranks against plain transformers in float64, row by row,
without padding or packing.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine import contract, inputs
from tests.engine.naive import (
    by_row,
    naive_experts_loss,
    naive_labels_loss,
    naive_logits,
    naive_policy_loss,
    naive_preference_loss,
    naive_replayed_loss,
    naive_responses_loss,
    naive_training,
    naive_value_loss,
    naive_values,
    rate_of,
    reference_model,
    with_adapter,
)
from tests.rank_processes import run_ranks, slow_tests_asked
from verl_ray.algorithms.distillation import DIVERGENCES
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.engine.module_engine import ModuleEngine

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(1500),
]  # the processes of all backends run at once

ONLY_SHARDED = (
    "gradients in shards", "gathered in forward", "not sharded", "ahead and from the host", "embeddings apart",
    "embeddings apart, value",
)  # fmt: skip
WORLDS = (1, 2, 4)
FOUR = pytest.param(4, marks=pytest.mark.slow)


def is_slow(kind: str, world: int) -> bool:
    """What shards or shares out a model is tested on two ranks, and one rank is slow."""
    return world == 4 or (world == 1 and kind != "engine")


def places_of(kinds: Sequence[str]) -> list[Any]:
    """List parameters (backend, number of ranks)."""
    return [
        pytest.param(
            (kind, world),
            marks=pytest.mark.slow if is_slow(kind, world) else (),
            id=f"{kind}-{world}",
        )
        for kind in kinds
        for world in (1, 2)
    ]


EXACT = 1e-5
BFLOAT16 = 3e-2  # 8 bits of mantissa through two layers and three steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("contract")
    inputs.write_models(root)
    return root


IMPORTS = (
    "peft", "verl_ray.engine.plain", "verl_ray.engine.fsdp", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)  # fmt: skip
"""What most ranks need, beside what their module imports."""
APEX = """
import torch

class FusedAdam(torch.optim.Adam):  # not AdamW, and it takes what Apex's takes
    def __init__(self, adam_w_mode, **settings):
        super().__init__(**settings)

FusedSGD = torch.optim.SGD
"""


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, folder: Path
) -> dict[int, list[dict[str, Any]]]:
    """The findings of each rank, by number of ranks; those of slow tests if they run."""
    (folder / "beside" / "apex").mkdir(parents=True)
    (folder / "beside" / "apex" / "__init__.py").touch()
    (folder / "beside" / "apex" / "optimizers.py").write_text(APEX)
    waves = (
        contract.waves(WORLDS, contract.ALL_FAMILIES)
        if slow_tests_asked(request)
        else contract.waves(WORLDS[:2], ["plain"])
    )
    run_ranks(
        contract.__name__,
        waves,
        folder,
        deadline_s=2 * inputs.DEADLINE_S,
        imports=IMPORTS,
    )
    findings: dict[int, list[dict[str, Any]]] = {}
    for part, family, rank, world in itertools.chain(*waves):
        ranks = findings.setdefault(world, [{} for _ in range(world)])
        ranks[rank] |= torch.load(
            folder / f"found_{part}_{family}_{world}_{rank}.pt", weights_only=False
        )
    return findings


@pytest.fixture(params=places_of(contract.KINDS))
def place(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param


@pytest.fixture(params=places_of(contract.ADAPTED))
def adapted(
    request: pytest.FixtureRequest, found: dict[int, list[dict[str, Any]]]
) -> tuple[str, list[Any]]:
    """The findings about adapters of each rank of a backend, and its folder's name."""
    kind, world = request.param
    return f"{kind}_{world}", [one[kind]["check_adapter"] for one in found[world]]


@pytest.fixture
def results(
    place: tuple[str, int], found: dict[int, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The findings of each rank of one backend and one number of ranks."""
    kind, world = place
    return [one[kind] for one in found[world]]


# ------------------------------------------------------------------ the naive reference


@pytest.fixture(scope="module")
def naive(
    folder: Path, found: dict[int, list[dict[str, Any]]]
) -> dict[str, dict[str, list[float]]]:
    rows = inputs.rows_of()
    value_head = found[1][0]["engine"]["check_outputs"]["head"]
    return {
        **{
            name: naive_training(reference_model(folder, name), rows, naive_policy_loss)
            for name in inputs.MODELS
            if name != "qwen3_moe"
        },
        "corrected": naive_training(
            reference_model(folder, "qwen3"),
            rows,
            functools.partial(naive_policy_loss, corrected=True),
        ),
        "experts": naive_training(
            reference_model(folder, "qwen3_moe"), rows, naive_experts_loss
        ),
        "replayed": naive_training(
            reference_model(folder, "qwen3_moe"),
            inputs.routed_rows(),
            naive_replayed_loss,
        ),
        "replayed in slices": naive_training(
            reference_model(folder, "wide_qwen3_moe"),
            inputs.routed_rows(),
            naive_replayed_loss,
        ),
        "experts, value": naive_training(
            reference_model(folder, "qwen3_moe", "value", value_head),
            rows,
            lambda model, rows: naive_experts_loss(model, rows, naive_value_loss),
        ),
        "adapter": naive_training(
            with_adapter(folder, "policy", "policy_new"), rows, naive_policy_loss
        ),
        "adapter, value": naive_training(
            with_adapter(folder, "value", "value_new"), rows, naive_value_loss
        ),
        "value": naive_training(
            reference_model(folder, "qwen3", "value", value_head),
            rows,
            naive_value_loss,
        ),
        "preferences": naive_training(
            reference_model(folder, "qwen3", "value", value_head),
            inputs.pairs_of(),
            naive_preference_loss,
        ),
        "pairs of responses": naive_training(
            reference_model(folder, "qwen3"),
            inputs.responses_in_pairs(),
            naive_responses_loss,
        ),
        "pairs of responses, experts": naive_training(
            reference_model(folder, "qwen3_moe"),
            inputs.responses_in_pairs(),
            lambda model, rows: naive_experts_loss(model, rows, naive_responses_loss),
        ),
        "responses with labels": naive_training(
            reference_model(folder, "qwen3"),
            inputs.responses_with_labels(),
            naive_labels_loss,
        ),
        "one row": naive_training(
            reference_model(folder, "qwen3"), rows.select([4]), naive_policy_loss
        ),
    }


@pytest.fixture(scope="module")
def plain(
    folder: Path, found: dict[int, list[dict[str, Any]]]
) -> dict[tuple[str, str], list[Tensor]]:
    """The output of each model for each row with either head: logits, or values."""
    rows, said = inputs.rows_of(), {}
    value_head = found[1][0]["engine"]["check_outputs"]["head"]
    for name in inputs.MODELS:
        policy, value = (
            reference_model(folder, name),
            reference_model(folder, name, "value", value_head),
        )
        with torch.no_grad():
            said[name, "policy"] = [
                naive_logits(policy, rows.tokens[row]) for row, _ in by_row(rows)
            ]
            said[name, "value"] = [
                naive_values(value, rows.tokens[row]) for row, _ in by_row(rows)
            ]
    return said


# --------------------------------------------------------------------------- the checks


def layouts_of(table: dict[int, dict[str, Any]]) -> list[Any]:
    """List parameters (number of ranks, name of a layout); four ranks are slow."""
    return [
        pytest.param(world, name, marks=pytest.mark.slow if world == 4 else ())
        for world, layouts in table.items()
        for name in layouts
    ]


def everywhere(
    found: dict[int, list[dict[str, Any]]], *kinds: str
) -> list[dict[str, Any]]:
    """The findings of all ranks about these backends that were run."""
    return [
        rank[kind]
        for world in (1, 2)
        for rank in found[world]
        for kind in kinds
        if kind in rank
    ]


def close(found: list[float], expected: list[float], tolerance: float = EXACT) -> None:
    """Compare relative to the largest number.

    A loss is a sum of terms of both signs, and may be small in comparison with each.
    """
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=tolerance * max(np.abs(expected))
    )


@pytest.mark.parametrize("model", inputs.MODELS)
def test_log_probs_and_entropy_are_those_of_plain_transformers(
    results: Any, plain: Any, model: str
) -> None:
    rows = inputs.rows_of()
    given = results[0]["check_outputs"][model]
    for i, (row, read) in enumerate(by_row(rows)):
        logits = plain[model, "policy"][i][read - 1]
        targets = torch.from_numpy(rows.tokens[row].astype(np.int64))[read]
        log_p = torch.log_softmax(logits / inputs.TEMPERATURE, -1)
        expected = log_p.gather(1, targets[:, None])[:, 0]
        np.testing.assert_allclose(given["log_probs"][row][read], expected, atol=EXACT)
        np.testing.assert_allclose(
            given["entropy"][row][read], -(log_p.exp() * log_p).sum(-1), atol=EXACT
        )
        np.testing.assert_allclose(
            given["squared_probs"][row][read], (2 * log_p).exp().sum(-1), atol=EXACT
        )
        np.testing.assert_array_equal(
            given["greedy"][row][read], logits.argmax(-1) == targets
        )
        top = log_p[:, :11].topk(4)
        np.testing.assert_allclose(
            given["top_log_probs"][row][read.numpy()], top.values, atol=EXACT
        )
        np.testing.assert_array_equal(
            given["top_tokens"][row][read.numpy()], top.indices
        )
    assert not given["log_probs"][~rows.response_mask].any()


def test_values_are_those_before_each_token_and_after_the_last(
    results: Any, plain: Any
) -> None:
    rows = inputs.rows_of()
    found = results[0]["check_outputs"]
    for i, (row, read) in enumerate(by_row(rows)):
        values = plain["qwen3", "value"][i]
        np.testing.assert_allclose(
            found["value"]["values"][row][read], values[read - 1], atol=EXACT
        )
        np.testing.assert_allclose(found["value"]["scores"][i], values[-1], atol=EXACT)
    np.testing.assert_array_equal(
        found["scores alone"]["scores"], found["value"]["scores"]
    )
    for model in inputs.MODELS:
        last = [values[-1].item() for values in plain[model, "value"]]
        np.testing.assert_allclose(found[f"{model} scores"]["scores"], last, atol=EXACT)
    assert found["scores alone"].keys() == {"scores"}
    assert not found["value"]["values"][~rows.response_mask].any()


def test_a_new_value_head_depends_on_neither_backend_nor_ranks(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    heads = [one["check_outputs"]["head"] for one in everywhere(found, *contract.KINDS)]
    assert all(torch.equal(head, heads[0]) for head in heads)
    assert (
        heads[0].shape == (1, 64) and 0.5 < float(heads[0].std()) * 64 < 2
    )  # about 1 / hidden size


@pytest.mark.parametrize(
    ("case", "reference"),
    [
        ("one micro-batch", "qwen3"),
        ("many micro-batches", "qwen3"),
        ("corrected", "corrected"),
        ("other order", "qwen3"),
        ("all on one rank", "qwen3"),
        ("activation checkpointing", "qwen3"),
        ("gathered in forward", "qwen3"),
        ("gradients in shards", "qwen3"),
        ("not sharded", "qwen3"),
        ("ahead and from the host", "qwen3"),
        ("embeddings apart", "qwen3"),
        ("embeddings apart, value", "value"),
        ("fewer rows than ranks", "one row"),
        ("llama", "llama"),
        ("qwen2", "qwen2"),
        ("gemma", "gemma"),
        ("experts", "experts"),
        ("experts in many micro-batches", "experts"),
        ("experts, value", "experts, value"),
        ("replayed", "replayed"),
        ("replayed in slices", "replayed in slices"),
        ("replayed in stages", "replayed in slices"),
        ("value", "value"),
        ("preferences", "preferences"),
        ("pairs of responses", "pairs of responses, experts"),
        ("responses with labels", "responses with labels"),
    ],
)
def test_three_steps_have_the_loss_and_gradient_norm_of_the_naive_sum(
    place: tuple[str, int], results: Any, naive: Any, case: str, reference: str
) -> None:
    is_elsewhere = case in ONLY_SHARDED and place[0] != "fsdp"
    is_elsewhere |= case.startswith("replayed in") and place != ("megatron", 2)
    if is_elsewhere:
        assert case not in results[0]["check_training"]
        return
    for rank in results:
        given = rank["check_training"][case]
        close(given["loss"], naive[reference]["loss"])
        close(given["norm"], naive[reference]["norm"])
        np.testing.assert_allclose(
            given["lr"], [rate_of(0), rate_of(1), rate_of(2)], rtol=1e-12
        )
    assert (
        max(naive[reference]["norm"]) > inputs.OPTIMIZER.max_grad_norm
    )  # so the comparison saw clipping


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "reference"),
    [
        ("hybrid", "qwen3"),
        ("full", "qwen3"),
        ("experts", "experts"),
        ("adapter", "adapter"),
    ],
)
def test_four_ranks_have_the_loss_and_gradient_norm_of_the_naive_sum(
    found: dict[int, list[dict[str, Any]]], naive: Any, case: str, reference: str
) -> None:
    for rank in found[4]:
        close(rank["hybrid"][case]["loss"], naive[reference]["loss"])
        close(rank["hybrid"][case]["norm"], naive[reference]["norm"])


@pytest.mark.slow
def test_ranks_that_hold_copies_answer_once_and_go_on_from_their_state(
    folder: Path, found: Any
) -> None:
    """That each element has one owner is asserted where the shards are assembled."""
    expected = dict(reference_model(folder, "qwen3").named_parameters())
    for rank in found[4]:
        assert all(
            torch.equal(rank["hybrid"]["before"][name].double(), value)
            for name, value in expected.items()
        )
        assert rank["hybrid"]["resumed"] == rank["hybrid"]["never stopped"]


@pytest.mark.parametrize(
    ("case", "reference"),
    [
        ("qwen3", "qwen3"),
        ("llama", "llama"),
        ("qwen2", "qwen2"),
        ("value", "value"),
        ("preferences", "preferences"),
        ("pairs of responses", "pairs of responses"),
        ("many micro-batches", "qwen3"),
        ("activation checkpointing", "qwen3"),
    ],
)
@pytest.mark.parametrize("world", [2, FOUR])
def test_slices_of_rows_have_the_loss_and_gradient_norm_of_the_naive_sum(
    found: dict[int, list[dict[str, Any]]],
    naive: Any,
    world: int,
    case: str,
    reference: str,
) -> None:
    for rank in found[world]:
        close(rank["sequence"][case]["loss"], naive[reference]["loss"])
        close(rank["sequence"][case]["norm"], naive[reference]["norm"])


def every_loss(
    found: dict[int, list[dict[str, Any]]], case: str = "every loss"
) -> dict[str, dict[str, Any]]:
    """The first rank's findings about all losses of the policy, by place."""
    places = {
        f"{kind}-{world}": found[world][0][kind]["check_training"][case]
        for kind in contract.KINDS
        for world in (1, 2)
        if kind in found[world][0]
    }
    if case != "every loss":
        return places
    slices = {name: found[2][0][name] for name in ("sequence", "context")}
    return places | slices | {"sequence": slices["sequence"]["every loss"]}


def test_sequences_of_several_rows_are_judged_as_a_whole_everywhere(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    """In several micro-batches and in one; each row alone would have other losses."""
    places = every_loss(found, "sequences")
    places |= {
        f"{name}, whole": values
        for name, values in every_loss(found, "sequences in one micro-batch").items()
    }
    whole = places.pop("engine-1, whole")
    for place in places.values():
        close(place["loss"], whole["loss"])
        close(place["norm"], whole["norm"])
        for terms, expected in zip(place["terms"], whole["terms"], strict=True):
            close([*terms.values()], [expected[name] for name in terms])


def test_no_loss_depends_on_backends_ranks_or_micro_batches(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    """The numbers are of rows that several ranks share out, and cut in several ways."""
    places = every_loss(found)
    whole = places.pop("engine-1")
    assert whole["terms"][0].keys() == POLICY_LOSSES.keys() | DIVERGENCES.keys()
    for place in places.values():
        close(place["loss"], whole["loss"])
        close(place["norm"], whole["norm"])
        for terms, expected in zip(place["terms"], whole["terms"], strict=True):
            close([*terms.values()], [expected[name] for name in terms])


@pytest.mark.parametrize("world", [2, FOUR])
def test_peers_have_the_same_rows_and_one_answers(
    found: dict[int, list[dict[str, Any]]], world: int
) -> None:
    whole = found[1][0]["engine"]["check_outputs"]["qwen3"]
    for rank in found[world]:
        outputs = rank["sequence"]["outputs"]
        for name in ("log_probs", "entropy", "squared_probs", "top_log_probs"):
            np.testing.assert_allclose(outputs[name], whole[name], atol=EXACT)
        for name in ("greedy", "top_tokens"):
            np.testing.assert_array_equal(outputs[name], whole[name])
    pairs = world // 2
    places = [
        (pair, pairs, returns_results)
        for pair in range(pairs)
        for returns_results in (True, False)
    ]
    assert [rank["sequence"]["places"] for rank in found[world]] == places


def test_parameters_stay_where_they_are_when_activations_go_to_the_host(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    """Parameters would be copied once more for every layer, but are gathered again."""
    for rank in everywhere(found, "fsdp"):
        kept, moved = rank["check_training"]["offloaded"]
        weights = {
            (64, 64),
            (64, 32),
            (96, 64),
            (64, 96),
            (14, 64),
            (64, 14),
            (64,),
            (16,),
        }
        matrices = {
            shape for shape in weights if len(shape) > 1
        }  # a column of so many tokens is as long as a norm
        assert (
            kept <= weights
            and len(kept) >= 5
            and len(moved) >= 5
            and not moved & matrices
        )


def test_recorded_rows_have_their_own_losses(results: Any) -> None:
    rows = inputs.rows_of()
    first = rows.offsets[1]
    counts = np.bincount(rows.row_of_token[first:], rows.response_mask[first:])[1:]
    for rank in results:
        report = rank["check_training"]["recorded"]
        losses = [report.recorded[number]["loss"] for number in range(len(counts))]
        assert len(report.recorded) == len(counts)
        assert list(map(len, losses)) == counts.tolist()
        for number, columns in report.recorded.items():
            np.testing.assert_array_equal(columns["train/loss"], losses[number])
        # The first row has the rest.
        rest = report.sums["train/loss"] - sum(row.sum() for row in losses)
        weighed = rest * rows.loss_weight[0] + sum(
            weight * row.sum()
            for weight, row in zip(rows.loss_weight[1:], losses, strict=True)
        )
        assert weighed == pytest.approx(report.loss, rel=1e-4)


def test_bfloat16_is_near(results: Any) -> None:
    found = results[0]["check_training"]
    # This loss has no bound, past which a token has no gradient in one of the two types.
    given, exact = found["supervised in bfloat16"], found["supervised"]
    close(given["loss"], exact["loss"], BFLOAT16)
    close(given["norm"], exact["norm"], BFLOAT16)
    assert given["loss"] != exact["loss"]  # it really is another type


def test_the_value_head_is_float32_behind_layers_in_bfloat16(results: Any) -> None:
    found = results[0]["check_outputs"]
    for name, exact in found["value"].items():
        given = found["value bfloat16"][name]
        assert given.dtype == np.float32
        np.testing.assert_allclose(
            given, exact, rtol=0, atol=0.05 * np.abs(exact).max()
        )
        assert (given != torch.from_numpy(given).bfloat16().float().numpy()).any()


def test_reports_add_up_to_the_tokens_of_all_ranks(results: Any) -> None:
    found = results[0]["check_training"]
    assert found["tokens"] == int(inputs.rows_of().response_mask.sum())
    assert (
        0 < found["terms"]["actor/entropy"] < 1.5 * math.log(14)
    )  # rows weigh up to 1.5 / tokens


def test_a_sequence_above_the_cap_is_refused_by_all_ranks(results: Any) -> None:
    """Two rows of 20 tokens are one, and the cap is 39."""
    messages = [rank["check_refusals"]["sequence"] for rank in results]
    named = [m for m in messages if "2 rows of unit 0 together have 40" in m]
    assert len(named) == 1 and "algorithm.sequence=row" in named[0]
    assert all(message.startswith("DataError: ") for message in messages)


def test_a_row_above_the_cap_is_refused_by_all_ranks_with_its_length_and_the_key(
    results: Any,
) -> None:
    messages = [rank["check_refusals"]["cap"] for rank in results]
    named = [
        m
        for m in messages
        if "40 tokens" in m and "backend.micro_batch_tokens_per_rank = 39" in m
    ]
    assert len(named) == 1 and all(
        message.startswith("DataError: ") for message in messages
    )


def test_misuse_is_refused(place: tuple[str, int], results: Any) -> None:
    for rank in results:
        if place[0] in contract.ADAPTED:
            assert rank["check_refusals"]["no such layer"].startswith(
                "ModelError: lora.targets: gate_proj is no linear layer"
            )
        else:
            assert "sets attention_bias" in rank["check_refusals"]["biased"]
            assert rank["check_refusals"]["adapted"].startswith(
                "EngineError: actor.lora.rank = 4: "
            )
        assert rank["check_outputs"]["refused"].startswith(
            "EngineError: the actor does not learn"
        )
        assert rank["check_outputs"]["refused step"].startswith(
            "EngineError: the actor does not learn"
        )
        assert "'disk'" in rank["check_refusals"]["placed"]
        assert rank["check_refusals"]["first"].startswith(
            "DataError: response_mask is True on a row's first token"
        )
        average = rank["check_refusals"]["no average"]
        assert average.endswith("set distill.teacher=average")
        assert "actor.expert_balance = 0.1" in rank["check_refusals"]["no experts"]
        assert "actor.lora.rank is 0" in rank["check_refusals"]["no adapter"]


def test_what_cannot_be_sharded_so_or_read_is_refused_by_every_rank(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    for rank in everywhere(found, "fsdp"):
        refused = rank["check_refusals"]
        assert refused["tied"].startswith(
            "EngineError: actor.backend.embedding_units: "
        )
        assert refused["nowhere"].startswith(
            "ModelError: model.path: there is no directory "
        )


def test_a_step_that_is_not_finite_is_skipped_and_names_the_tensor(
    results: Any,
) -> None:
    for rank in results:
        found = rank["check_non_finite"]
        assert found["unchanged"] and found["changed later"]
        assert found["next"] == (
            None,
            pytest.approx(rate_of(3)),
        )  # the schedule went on
    assert "the gradient of model.embed_tokens.weight is not finite on rank 0" in [
        rank["check_non_finite"]["skipped"] for rank in results
    ]


def test_weights_that_a_step_has_broken_are_named(results: Any) -> None:
    firsts = set()
    for rank in results:
        found = rank["check_non_finite"]
        assert found["finite"] == ((), (), ())
        skipped, agrees, names = found["broken"]
        assert skipped is None and agrees
        firsts.update(names[:1])
    # Later stages of a pipeline begin with other tensors.
    assert "model.embed_tokens.weight" in firsts


def test_going_on_from_a_state_is_never_having_stopped_to_the_bit(results: Any) -> None:
    for rank in results:
        found = rank["check_state"]
        assert found["resumed"] == found["never stopped"] and found["same weights"]


def test_every_optimizer_goes_on_to_the_bit(results: Any) -> None:
    for rank in results:
        for found in rank["check_optimizers"].values():
            assert found["resumed"] == found["never stopped"] and found["same"]


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_shards_are_stepped_as_the_whole_and_read_everywhere(
    found: dict[int, list[dict[str, Any]]], name: str
) -> None:
    """A rounding to bfloat16 that differs moves a weight by a part of Muon's step."""
    alone, two = found[1][0], found[2][0]
    whole, shards = (two[kind]["check_optimizers"][name] for kind in ("engine", "fsdp"))
    for kind in ("loss", "norm"):
        close(shards["trained"][kind], whole["trained"][kind])
        one = alone["engine"]["check_optimizers"][name]["trained"]
        close(shards["trained"][kind], one[kind], 10 * EXACT)

    # The same number of ranks has the same gradients.
    for reader in ("engine", "fsdp"):
        for writer, after in (("engine", whole), ("fsdp", shards)):
            read = two["optimizers"][reader][name, writer, 2]
            for parameter, value in after["after"].items():
                torch.testing.assert_close(read[parameter], value, rtol=0, atol=EXACT)
    step = inputs.OTHERS[name].lr
    read = alone["optimizers"]["engine"][name, "fsdp", 2]
    for parameter, value in shards["after"].items():
        torch.testing.assert_close(read[parameter], value, rtol=0, atol=step)


HOLDS_THE_WEIGHTS = (["model", "rng", "steps"], True)
"""Of an engine that does not learn, and has no optimizer."""


def test_an_evaluation_reads_the_weights_alone(results: Any) -> None:
    for rank in results:
        assert rank["check_state"]["evaluated"] == HOLDS_THE_WEIGHTS


def test_an_average_follows_the_weights_and_computes_in_their_place(
    results: Any, folder: Path
) -> None:
    """Of decay 0.5 after two steps, also where weights and moments were moved."""
    for rank in results:
        found = rank["check_state"]
        before, between, after, average = found["average"]
        for name, value in average.items():
            by_hand = before[name] / 4 + between[name] / 4 + after[name] / 2
            torch.testing.assert_close(value, by_hand, rtol=0, atol=1e-7)
        assert not contract.equal(average, after)
        assert found["unchanged by the average"]
        assert rank["check_training"]["average in bfloat16"] == (False, True)

    model = reference_model(folder, "qwen3")
    assert not model.load_state_dict(average, strict=False).unexpected_keys
    rows = inputs.rows_of()
    for row, read in by_row(rows):
        logits = naive_logits(model, rows.tokens[row])[read - 1].detach()
        targets = torch.from_numpy(rows.tokens[row].astype(np.int64))[read]
        expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        np.testing.assert_allclose(found["taught"][row][read], expected, atol=EXACT)


def test_taking_a_state_before_the_first_step_disturbs_nothing(
    results: Any, naive: Any
) -> None:
    for rank in results:
        found = rank["check_state"]
        assert found["saving changes nothing"]
        close(found["from an unstepped state"]["loss"], naive["qwen3"]["loss"])
        close(found["from an unstepped state"]["norm"], naive["qwen3"]["norm"])


@pytest.mark.parametrize(
    "writer",
    [
        pytest.param(
            f"{kind} on {world}",
            marks=pytest.mark.slow if is_slow(kind, world) else (),
        )
        for kind, world in contract.WRITERS
    ],
)
def test_a_state_is_read_by_every_backend_and_count(
    found: dict[int, list[dict[str, Any]]], writer: str
) -> None:
    """Each state continues equally wherever it is read, with bit-identical weights."""
    ranks = [rank for world in found.values() for rank in world]
    readers = [
        one
        for rank in ranks
        for family in contract.FAMILIES
        for one in rank.get(f"elsewhere {family}", ())
    ]
    read = [one[writer] for one in readers if writer in one]
    # Both of two ranks of each backend, and at least one that is alone.
    assert len(read) > 2 * len(contract.KINDS)
    for other in read[1:]:
        for name, value in read[0]["weights"].items():
            assert torch.equal(other["weights"][name], value), name
        close(other["loss"], read[0]["loss"])
        close(other["norm"], read[0]["norm"])
        assert other["lr"] == pytest.approx([rate_of(2), rate_of(3)])


@pytest.mark.parametrize(("world", "layout"), layouts_of(contract.LAYOUTS))
def test_a_layout_holds_writes_and_exports_the_model_and_goes_on_to_the_bit(
    folder: Path,
    found: dict[int, list[dict[str, Any]]],
    naive: Any,
    world: int,
    layout: str,
) -> None:
    """That each element has one owner is asserted where the shards are assembled."""
    expected = load_file(folder / "qwen3" / "model.safetensors")
    exported = load_file(folder / f"export_{layout}" / "model.safetensors")
    for rank in found[world]:
        given = rank["layouts"][layout]
        assert all(
            torch.equal(given["before"][name], value)
            for name, value in expected.items()
        )
        assert all(
            torch.equal(given["trained"][name], value)
            for name, value in exported.items()
        )
        assert given["resumed"] == given["never stopped"]
        close(given["never stopped"]["norm"][:1], naive["qwen3"]["norm"][2:])
    assert exported.keys() == expected.keys()


@pytest.mark.parametrize(("world", "layout"), layouts_of(contract.HELD))
def test_whatever_is_shared_out_is_the_checkpoint_and_goes_on_to_the_bit(
    folder: Path,
    found: dict[int, list[dict[str, Any]]],
    naive: Any,
    world: int,
    layout: str,
) -> None:
    """The weights that learn agree too, where another type computes.

    They are sent while the device's memory is released. That each element has one owner
    is asserted where the shards are assembled.
    """
    exported = load_file(folder / f"held_{layout}" / "model.safetensors")
    for rank in found[world]:
        given = rank["held"][layout]
        expected = load_file(folder / given["model"] / "model.safetensors")
        assert exported.keys() == expected.keys()
        for name, value in expected.items():
            computes = (
                value.bfloat16().float() if layout.endswith("bfloat16") else value
            )
            assert torch.equal(given["before"][name], computes), name
            assert torch.equal(exported[name], value), name
        assert given["same on the host"] and given["resumed"] == given["never stopped"]
        assert given["evaluated"] == HOLDS_THE_WEIGHTS
        if given["model"] == "wide_qwen2":
            whole = found[2][0]["held"]["cp2"]["trained"]
            tolerance = BFLOAT16 if layout.endswith("bfloat16") else EXACT
            close(given["trained"]["loss"], whole["loss"], tolerance)
            close(given["trained"]["norm"], whole["norm"], tolerance)


@pytest.mark.slow
def test_four_ranks_of_megatron_skip_and_compare_rows_as_one(
    found: dict[int, list[dict[str, Any]]], naive: Any
) -> None:
    for rank in found[4]:
        bad, pairs = rank["non-finite"], rank["preferences"]
        assert (
            bad["skipped"]
            == "the gradient of model.embed_tokens.weight is not finite on rank 0"
        )
        assert bad["unchanged"] and bad["changed later"]
        close(pairs["loss"], naive["preferences"]["loss"])
        close(pairs["norm"], naive["preferences"]["norm"])


@pytest.mark.slow
def test_the_groups_of_a_layout_wait_as_long_as_that_of_all_ranks(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    assert all(
        rank["timeouts"] == pytest.approx([inputs.DEADLINE_S] * 4) for rank in found[4]
    )


def test_megatron_goes_on_from_what_fsdp_exported(
    folder: Path, found: dict[int, list[dict[str, Any]]]
) -> None:
    exported = load_file(folder / "export_qwen3_moe_fsdp_2" / "model.safetensors")
    for rank in found[2]:
        given, plain = (rank[f"continued {family}"] for family in ("megatron", "torch"))
        assert all(
            torch.equal(given["weights"][name], value)
            for name, value in exported.items()
        )
        close(given["loss"], plain["loss"])
        close(given["norm"], plain["norm"])


def test_manifest_and_shards_are_the_checkpoint(
    folder: Path, found: dict[int, list[dict[str, Any]]]
) -> None:
    """That each element has one owner is asserted where the shards are assembled."""
    for model in ("qwen3", "llama", "qwen3_moe"):
        tied, expected = (
            inputs.MODELS[model],
            load_file(folder / model / "model.safetensors"),
        )
        for one in everywhere(found, *contract.KINDS):
            manifest, weights = one["check_weights"][model]
            assert weights.keys() == expected.keys() == {p.name for p in manifest.sent}
            assert all(torch.equal(weights[name], expected[name]) for name in expected)
            assert manifest == found[1][0]["engine"]["check_weights"][model][0]
            tie = {p.name: p.tied_to for p in manifest.parameters if p.tied_to}
            assert tie == (
                {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
            )


def test_the_sharded_weights_are_the_ones_read_after_a_forward_pass(
    folder: Path, found: Any
) -> None:
    """The gathered weights, in the type of the computation, are not read."""
    expected = dict(reference_model(folder, "qwen3").named_parameters())
    for one in everywhere(found, "fsdp"):
        held = one["check_training"]["held after forward"]
        assert all(
            torch.equal(held[name].double(), value) for name, value in expected.items()
        )


def test_apex_is_left_alone_where_it_is_installed(
    found: dict[int, list[dict[str, Any]]],
) -> None:
    """Two ranks of megatron ran with Apex installed, whose Adam keeps no step counts."""
    assert [one["apex"] for one in found[2]] == [True, True]


def test_weight_decay_spares_norms(results: Any) -> None:
    for name, (before, after) in results[0]["check_weights"]["decay"].items():
        factor = 1 if before.dim() == 1 else 1 - 2e-3 * 1.0
        torch.testing.assert_close(after, before * factor, rtol=1e-6, atol=0, msg=name)


def agree(given: Any, model: Any) -> None:
    """Check that these log-probs are the model's."""
    rows = inputs.rows_of()
    for row, read in by_row(rows):
        with torch.no_grad():
            log_p = torch.log_softmax(
                naive_logits(model, rows.tokens[row])[read - 1], -1
            )
        targets = torch.from_numpy(rows.tokens[row].astype(np.int64))[read]
        np.testing.assert_allclose(
            given[row][read], log_p.gather(1, targets[:, None])[:, 0], atol=EXACT
        )


@pytest.mark.parametrize("model", contract.EXPORTED)
def test_an_export_is_what_transformers_computes_with(
    folder: Path, place: tuple[str, int], results: Any, model: str
) -> None:
    name = f"export_{model}_{place[0]}_{place[1]}"
    agree(
        results[0]["check_weights"][f"exported {model}"]["log_probs"],
        reference_model(folder, name),
    )
    files = {path.name for path in (folder / name).iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= files


@pytest.mark.parametrize("model", contract.EXPORTED)
def test_what_learns_is_float32_behind_a_computation_in_bfloat16(
    folder: Path, place: tuple[str, int], results: Any, model: str
) -> None:
    """An export before the first step is bit for bit the model that was read."""
    expected = load_file(folder / model / "model.safetensors")
    exported = load_file(
        folder / f"export_new_{model}_{place[0]}_{place[1]}" / "model.safetensors"
    )
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    assert any(
        bool((value != value.bfloat16().float()).any()) for value in expected.values()
    )


@pytest.mark.parametrize(
    ("head", "reference"), [("policy", "adapter"), ("value", "adapter, value")]
)
def test_an_adapter_learns_as_with_peft(
    adapted: Any, naive: Any, head: str, reference: str
) -> None:
    for rank in adapted[1]:
        close(rank[head]["loss"], naive[reference]["loss"])
        close(rank[head]["norm"], naive[reference]["norm"])


def test_an_adapter_leaves_as_peft_reads_it_or_merged(
    folder: Path, adapted: Any, plain: Any
) -> None:
    where = adapted[0]
    rows = inputs.rows_of()
    for head, naive_of in (("policy", naive_logits), ("value", naive_values)):
        adapted = with_adapter(folder, head, head, where)
        merged = reference_model(folder, f"adapter_{where}/{head}_merged", head)
        for (row, _), before in zip(by_row(rows), plain["qwen3", head], strict=True):
            with torch.no_grad():
                given, same = (
                    naive_of(model, rows.tokens[row]) for model in (adapted, merged)
                )
            torch.testing.assert_close(given, same, rtol=0, atol=EXACT)
            assert float((given - before).abs().max()) > 100 * EXACT


def test_with_its_adapter_off_a_model_is_what_it_was_to_the_bit(adapted: Any) -> None:
    for found in adapted[1]:
        np.testing.assert_array_equal(
            found["base"]["log_probs"], found["never adapted"]["log_probs"]
        )
        np.testing.assert_array_equal(
            found["adapted"]["log_probs"], found["adapted again"]["log_probs"]
        )
        assert (
            np.abs(found["adapted"]["log_probs"] - found["base"]["log_probs"]).max()
            > 100 * EXACT
        )


def test_a_checkpoint_of_an_adapter_holds_it_alone_and_goes_on_to_the_bit(
    adapted: Any,
) -> None:
    for found in adapted[1]:
        layers = [f"hf.model.layers.{i}" for i in (0, 1)]
        targets = (
            "mlp.down_proj",
            "mlp.gate_proj",
            "self_attn.q_proj",
            "self_attn.v_proj",
        )
        assert found["kept"] == [
            f"{i}.{t}.lora_{side}.default.weight"
            for i in layers
            for t in targets
            for side in "AB"
        ]
        assert found["kept of a tied model"] == found["kept"]
        assert found["evaluated"] == HOLDS_THE_WEIGHTS
        assert found["resumed"] == found["never stopped"]


def test_of_an_adapted_model_the_adapter_alone_is_averaged(adapted: Any) -> None:
    for found in adapted[1]:
        average = found["averaged apart"]
        assert contract.equal(average, found["resumed average"])
        changed = {
            name
            for name, value in found["sent apart"].items()
            if not torch.equal(average[name], value)
        }
        assert changed == {name for name in average if "lora_" in name}


def test_what_is_sent_of_an_adapted_model_is_merged(folder: Path, adapted: Any) -> None:
    sent = adapted[1][0]["sent"]
    whole = load_file(folder / f"adapter_{adapted[0]}" / "whole" / "model.safetensors")
    assert sent.keys() == whole.keys() and all(
        torch.equal(sent[name], value) for name, value in whole.items()
    )
    before = load_file(folder / "qwen3" / "model.safetensors")
    adapted = {name for name in sent if not torch.equal(sent[name], before[name])}
    assert {name.split(".")[-2] for name in adapted} == set(
        inputs.ADAPTER.targets
    ) and len(adapted) == 8


def test_what_is_sent_of_an_adapter_apart_is_its_file_beside_the_model(
    folder: Path, adapted: Any
) -> None:
    sent = adapted[1][0]["sent apart"]
    adapter = load_file(
        folder / f"adapter_{adapted[0]}" / "alone" / "adapter_model.safetensors"
    )
    expected = load_file(folder / "qwen3" / "model.safetensors") | adapter
    assert sent.keys() == expected.keys() and all(
        torch.equal(sent[name], value) for name, value in expected.items()
    )
    assert sum("lora_" in name for name in sent) == 2 * 2 * len(inputs.ADAPTER.targets)


def test_replayed_choices_are_what_the_load_counts(results: Any) -> None:
    training = results[0]["check_training"]
    rows = inputs.routed_rows()
    recorded = np.delete(rows.routed_experts, rows.offsets[1:] - 1, axis=0)
    counts = [np.bincount(recorded[:, layer].ravel(), minlength=4) for layer in (0, 1)]
    free = training["replayed load"] - np.array(counts)
    # The last token of each row chooses its two experts itself.
    assert training.get("the base replays nothing", True)
    assert free.min() >= 0 and free.sum(1).tolist() == [2 * rows.num_rows] * 2
    assert (
        "rollout.routing_replay: rows to learn from have no routed_experts"
        in (training["not recorded"])
    )


def test_every_token_has_two_experts_in_each_layer(results: Any) -> None:
    load = results[0]["check_training"]["load"]
    assert (
        load.shape == (2, 4)
        and load.sum(axis=1).tolist() == [2 * sum(inputs.LENGTHS)] * 2
    )


@pytest.mark.parametrize("tokens", [40, 10_000])
def test_a_bias_follows_the_load_of_all_rows_of_a_step(
    results: Any, place: tuple[str, int], tokens: int
) -> None:
    for rank in results:
        found = rank["check_training"].get(f"biases, {tokens}")
        # Biases of megatron stay, and check refuses to move them.
        assert (found is None) == place[0].startswith("megatron")
        if found is None:
            continue
        first, second = found["loads"]
        assert first.tolist() == second.tolist() and first.sum() == 2 * sum(
            inputs.LENGTHS
        )
        wanted = 0.25 * np.sign(first[0].mean() - first[0])
        assert len(set(wanted)) > 1
        np.testing.assert_allclose(found["moved"], wanted, atol=1e-6)
        np.testing.assert_allclose(found["saved"], wanted, atol=1e-6)


def test_experts_in_bfloat16_are_near(results: Any, naive: Any) -> None:
    given = results[0]["check_training"]["experts in bfloat16"]
    close(
        given["loss"], naive["experts"]["loss"], 3 * BFLOAT16
    )  # a router in bfloat16 may choose another expert
    close(given["norm"], naive["experts"]["norm"], 3 * BFLOAT16)


def test_a_resumed_engine_obeys_its_own_optimizer_settings(
    folder: Path, tmp_path: Path
) -> None:
    ranks = inputs.Ranks(0, 1, folder)
    saved = ranks.engine("engine")
    contract.sharded.save(saved.state(), str(tmp_path / "state"))
    changed = inputs.OPTIMIZER.model_copy(
        update={"weight_decay": 0.7, "betas": (0.5, 0.6), "eps": 1e-3}
    )
    engine = ranks.engine("engine", optimizer=changed)
    contract.load(engine, tmp_path / "state")
    assert isinstance(engine, ModuleEngine) and engine.optimizer is not None
    matrices, norms = engine.optimizer.param_groups
    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.7, 0.0)
    assert (
        matrices["betas"] == norms["betas"] == (0.5, 0.6)
        and matrices["eps"] == norms["eps"] == 1e-3
    )
