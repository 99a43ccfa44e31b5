"""What an actor learns from and what it sends, in this process and with a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.bench.scripted_engine import ScriptedEngine
from tests.corrections import NO_CORRECTION
from tests.engine.inputs import ENGINE, OPTIMIZER
from tests.learning.test_objectives import algorithm
from tests.rows import rollouts_of
from tests.weight_sync.fingerprints import EMPTY
from verl_ray.backends.engine import EngineBackend
from verl_ray.cluster.context import WorkerContext
from verl_ray.columns.batch import Ragged
from verl_ray.columns.stages import Credit, Rollouts, Values, versions_of
from verl_ray.config.algorithm import ValueLossConfig
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.token_versions import OptimizerSteps
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.engine.base import EngineSpec
from verl_ray.errors import DataError
from verl_ray.learning.objectives import ValueObjective
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.models.tiny import make_tiny
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import plan_buckets
from verl_ray.weight_sync.transport import WireSpec
from workers.actor import ActorWorker, advantages_in_loss
from workers.critic import CriticWorker
from workers.model_worker import MiniBatch, UpdateReport

SIZES = TinyModelConfig(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, intermediate_size=16,
    tie_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("actor")
    character_tokenizer(folder / "tokenizer", "0123456789+=")
    return make_tiny("qwen3", folder / "model", folder / "tokenizer", SIZES, seed=0)


def actor_spec(model: Path) -> EngineSpec:
    optimizer = OPTIMIZER.model_copy(update={"lr": 0.1, "warmup_steps": 0})
    backend = EngineBackend(**ENGINE)
    return EngineSpec("actor", str(model), "policy", backend, optimizer, 10, seed=3)


@pytest.fixture
def actor(model: Path, tmp_path: Path) -> Iterator[ActorWorker]:
    context = WorkerContext("actor", 0, 1, "cpu", False, 1, tmp_path / "log", 1)
    worker = ActorWorker(context, actor_spec(model))
    yield worker
    worker.close()


def rows_of_versions(*versions: list[int]) -> Rollouts:
    """Rows with a response token of each of these versions, after two of a prompt."""
    rollouts = rollouts_of([len(row) for row in versions])
    spans = Ragged.of_rows(
        [np.array([[2 + place, version] for place, version in enumerate(row)]) for row in versions],
        np.int64,
    )  # fmt: skip
    return rollouts.replace(
        tokens=np.arange(rollouts.num_tokens, dtype=np.int32) % 10 + 2,
        rollout_log_probs=np.where(rollouts.response_mask, -1.0, 0.0).astype(np.float32),
        version_spans=spans,
        **versions_of(spans),
    )  # fmt: skip


def credit_of(rows: Rollouts) -> Credit:
    """Every token of every response is worth 1."""
    zeros = np.zeros(rows.num_rows, np.float32)
    return Credit(
        offsets=rows.offsets, advantages=rows.response_mask.astype(np.float32),
        in_loss=np.ones(rows.num_rows, np.bool_), reward=zeros, kl=zeros,
        kl_bounded=np.zeros(rows.num_rows, np.int64), is_positive=zeros > 0, advantage_statistics=np.zeros((rows.num_rows, 4)),
    )  # fmt: skip


def update(actor: ActorWorker, rows: Rollouts, steps: OptimizerSteps) -> UpdateReport:
    """The first update of the present training step."""
    credit = credit_of(rows)
    tokens = int(rows.response_length.sum())
    mini_batch = MiniBatch(tokens, rows.num_rows, "token_mean", None)
    mini_batch = replace(mini_batch, ages=steps.ages(0))
    objective = PolicyObjective(algorithm(), 1.0, 0.0)
    return actor.update(rows, credit, None, None, mini_batch, None, objective)


def weights(actor: ActorWorker) -> list[torch.Tensor]:
    names = [parameter.name for parameter in actor.manifest().sent]
    return [content.clone() for _, content in actor.engine.shards(names)]


def test_an_average_computes_in_place_of_the_weights(
    model: Path, tmp_path: Path
) -> None:
    """After a step an average of such a decay is the policy of before, nearly."""
    context = WorkerContext("actor", 0, 1, "cpu", False, 1, tmp_path / "log", 1)
    spec = replace(actor_spec(model), average_decay=1 - 1e-7)
    actor = ActorWorker(context, spec)
    rows = rows_of_versions([6, 6, 6], [6])
    before = actor.compute_log_probs(rows, 1.0).log_probs
    update(actor, rows, published(0, 5, 6))
    after, trained = actor.compute_log_probs(rows, 1.0).log_probs, weights(actor)

    teacher = actor.compute_reference_log_probs(rows, 1.0, averaged=True).log_probs
    np.testing.assert_allclose(teacher, before, atol=1e-5)
    assert np.abs(after - before).max() > 0.1
    again = actor.compute_reference_log_probs(rows, 1.0).log_probs
    np.testing.assert_array_equal(again, after)
    assert all(map(torch.equal, weights(actor), trained))
    actor.close()


def published(staleness: int, *versions: int) -> OptimizerSteps:
    """One optimizer step between each version and the next."""
    steps = OptimizerSteps(staleness, 1)
    for version in versions:
        steps.publish(version)
        steps.add(1)
    steps.add(-1)
    return steps


# ------------------------------------------------------------------------------- learning


def test_an_update_counts_its_tokens_by_version(actor: ActorWorker) -> None:
    rows = rows_of_versions([4, 5, 6], [6], [5, 5])
    report = update(actor, rows, published(2, 4, 5, 6))
    assert report.tokens_of_versions == {4: 1, 5: 3, 6: 2}
    assert report.oldest_optimizer_steps == 2
    # The mismatch of the two tokens of version 6 is summed apart from that of all.
    sums = report.loss.sums
    assert sums["mismatch/fresh/share"] == 2
    assert 0 < sums["mismatch/fresh/difference"] < sums["mismatch/token/difference"]
    fresh = rows_of_versions([6, 6, 6], [6], [6, 6])
    sums = update(actor, fresh, published(2, 4, 5, 6)).loss.sums
    assert sums["mismatch/fresh/share"] == 6
    assert sums["mismatch/fresh/difference"] == sums["mismatch/token/difference"]


def test_a_synchronous_update_has_nothing_to_tell_apart(actor: ActorWorker) -> None:
    report = update(actor, rows_of_versions([6, 6], [6]), published(0, 5, 6))
    assert report.tokens_of_versions == {6: 3}
    assert not any("fresh" in name for name in report.loss.sums)


@pytest.mark.parametrize(
    ("sequence", "log_ratios", "weights"),
    [
        # Of the five tokens of a trajectory, three are in one row and two in another.
        ("row", [0.3, 0.1, -0.2], [0.3, 0.5, 0.2]),
        ("trajectory", [(3 * 0.3 - 2 * 0.2) / 5, 0.1], [0.5, 0.5]),
    ],
)
def test_the_sequence_of_a_loss_is_a_row_or_a_trajectory(
    actor: ActorWorker, sequence: str, log_ratios: list[float], weights: list[float]
) -> None:
    """GSPO's loss is a mean over trajectories; rows 0 and 2 are one of two."""
    rows = rows_of_versions([6, 6, 6], [6], [6, 6])
    rows = rows.replace(trajectory_id=np.array([8, 5, 8]))
    fresh = actor.compute_log_probs(rows, 1.0)
    ratio_of_row = np.array([0.3, 0.1, -0.2], np.float32)[rows.row_of_token]
    old = fresh.replace(log_probs=fresh.log_probs - ratio_of_row * rows.response_mask)
    config = algorithm(
        policy_loss="gspo", clip_low=0.9, clip_high=9.0, aggregation="seq_mean_token_mean",
        sequence=sequence,
    )  # fmt: skip
    mini_batch = MiniBatch(6, 2, "seq_mean_token_mean", None)
    objective = PolicyObjective(config, 1.0, 0.0)
    report = actor.update(rows, credit_of(rows), old, None, mini_batch, None, objective)
    expected = -float(np.exp(log_ratios) @ weights)
    assert report.loss.loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_over_their_mean_scale_the_gradient(
    model: Path, tmp_path: Path, level: str
) -> None:
    """The loss without a ratio is linear in the weights."""
    rows = rows_of_versions([6, 6, 6], [6], [6, 6])
    rows = rows.replace(rollout_log_probs=rows.rollout_log_probs * 2.5)
    norms, means = [], []
    for normalise in (False, True):
        config = algorithm(
            policy_loss="reinforce", clip_low=None, clip_high=None,
            correction=NO_CORRECTION.model_copy(
                update={"form": "three_policy", "kind": "tis", "level": level, "upper": 1.5, "normalise": normalise}
            ),
        )  # fmt: skip
        context = WorkerContext("actor", 0, 1, "cpu", False, 1, tmp_path / "log", 1)
        actor = ActorWorker(context, actor_spec(model))
        old = actor.compute_log_probs(rows, 1.0)
        mini_batch = MiniBatch(6, 3, "token_mean", None)
        objective = PolicyObjective(config, 1.0, 0.0)
        report = actor.update(
            rows, credit_of(rows), old, None, mini_batch, None, objective
        )
        norms.append(report.step.grad_norm)
        means.append(report.loss.means().get("correction/batch_mean", 1.0))
        actor.close()

    log_ratio = (old.log_probs - rows.rollout_log_probs)[rows.response_mask]
    if level == "sequence":
        log_ratio = np.array([log_ratio[:3].sum(), log_ratio[3], log_ratio[4:].sum()])
    mean = float(np.minimum(np.exp(log_ratio), 1.5).mean())
    assert abs(mean - 1) > 0.02 and means == pytest.approx([1, mean], rel=1e-5)
    assert norms[1] == pytest.approx(norms[0] / mean, rel=1e-4)


@pytest.mark.parametrize(("staleness", "token"), [(0, 5), (1, 4), (1, 7)])
def test_no_loss_is_built_from_a_token_that_is_too_old(
    actor: ActorWorker, staleness: int, token: int
) -> None:
    """The weights are those of before the refusal."""
    before = weights(actor)
    with pytest.raises(
        DataError, match=f"policy version {token}, which is not allowed"
    ):
        update(actor, rows_of_versions([6, token], [6]), published(staleness, 4, 5, 6))
    for old, new in zip(before, weights(actor), strict=True):
        assert torch.equal(old, new)


def test_no_loss_of_a_critic_is_built_from_them_either(
    actor: ActorWorker, model: Path
) -> None:
    spec = replace(actor_spec(model), role="critic", head="value")
    critic = CriticWorker(actor.context, spec)
    rows = rows_of_versions([6, 5], [6])
    zeros = np.zeros(rows.num_tokens, np.float32)
    values = Values(
        offsets=rows.offsets, values=zeros, final_value=np.zeros(2, np.float32)
    )

    def learn(staleness: int) -> UpdateReport:
        ages = published(staleness, 4, 5, 6).ages(0)
        mini_batch = MiniBatch(3, 2, "token_mean", None, ages)
        credit = replace(credit_of(rows), returns=zeros + 1)
        objective = ValueObjective(ValueLossConfig(clip=None, aggregation="token_mean"))
        return critic.update(rows, credit, values, mini_batch, objective)

    with pytest.raises(DataError, match="policy version 5, which is not allowed"):
        learn(staleness=0)
    assert learn(staleness=1).step.grad_norm > 0
    critic.close()


def test_a_bound_hides_no_advantage_that_is_not_finite() -> None:
    rows = rows_of_versions([0, 0, 0, 0, 0], [0])
    advantages = np.array([-9, 0.5, np.nan, np.inf, -np.inf, 9], np.float32)
    values = np.zeros(rows.num_tokens, np.float32)
    values[rows.response_mask] = advantages
    credit = replace(credit_of(rows), advantages=values)
    bounded = algorithm().model_copy(update={"advantage_clip": 2.0})
    found = advantages_in_loss(bounded, rows, credit, None)[rows.response_mask]
    expected = np.array([-2, 0.5, np.nan, np.inf, -np.inf, 2], np.float32)
    assert np.array_equal(found, expected, equal_nan=True)


# ------------------------------------------------------------------------------ publishing


def send(actor: ActorWorker, version: int, *, kept: bool) -> dict[str, torch.Tensor]:
    """The weights that a replica holds which has started again."""
    manifest = actor.manifest()
    buckets = plan_buckets(manifest, 1 << 10)
    assert len(buckets) > 1
    wire_spec = WireSpec(buckets, receivers=1, patience_s=60, keeps_version=True)
    replica = ScriptedEngine(lambda _: [])
    address = actor.open_wire("shared_memory", wire_spec)
    replica.connect(address.unsealed(), wire_spec, 0)
    assert actor.connect_wire(address) is None

    replica.begin_update(manifest, version)
    sent: dict[str, Fingerprint] = {}
    for bucket in buckets:
        result = actor.send([bucket.index], True, kept)
        for name, part in result.fingerprints.by_name.items():
            sent[name] = sent.get(name, EMPTY) + part
        replica.receive(bucket)
    replica.commit(sent)
    actor.finish_sync()
    received = dict(replica.weights)
    replica.close()
    return received


def test_a_replica_gets_the_published_version_while_the_actor_learns(
    actor: ActorWorker,
) -> None:
    rows, steps = rows_of_versions([0, 0], [0]), published(1, 0)
    first = send(actor, 0, kept=False)
    update(actor, rows, steps)
    again = send(actor, 0, kept=True)
    live = send(actor, 1, kept=False)
    assert first.keys() == again.keys() == live.keys()
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor), name
    assert any(not torch.equal(live[name], tensor) for name, tensor in first.items())

    # From now on the kept version is the one that was sent last.
    update(actor, rows, steps)
    again = send(actor, 1, kept=True)
    for name, tensor in live.items():
        assert torch.equal(again[name], tensor), name
