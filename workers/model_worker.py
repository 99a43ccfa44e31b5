"""Base of every role with a model, written once over the engine contract.

Invariant: no method knows which backend holds the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from verl_ray.algorithms.row_weights import row_weights
from verl_ray.checkpoint.manifest import FileRecord
from verl_ray.cluster.context import WorkerContext, concurrent
from verl_ray.columns.stages import (
    Credit,
    LogProbs,
    Rollouts,
    Rows,
    TeacherForcedEvaluation,
    TrainingBatch,
)
from verl_ray.config.algorithm import AggregationName
from verl_ray.data.token_versions import VersionAges
from verl_ray.engine.base import EngineSpec, LossReport, StepReport
from verl_ray.engine.build import build_engine
from verl_ray.errors import DataError, NonFiniteError
from verl_ray.learning.objectives import Objective
from verl_ray.ops.outputs import RequestedOutputs, TopTokens
from verl_ray.profiling.flops import peak_flops_per_s, training_flops
from verl_ray.profiling.memory import DeviceMemory, device_memory
from verl_ray.rendezvous import share_timeout
from workers.teacher_context import TeacherContext, behind_own_prompts

# The driver names the methods of workers, and does without torch.
if TYPE_CHECKING:
    import torch.distributed as dist

    from verl_ray.checkpoint.sharded import BackgroundSave
    from verl_ray.checkpoint.snapshot_files import SnapshotNames
    from verl_ray.checkpoint.snapshots import RankSnapshots


@dataclass(frozen=True)
class MiniBatch:
    """Totals of a whole mini-batch over all ranks, which its losses need."""

    total_tokens: int
    total_trajectories: int
    """Trajectories with response tokens."""
    aggregation: AggregationName
    horizon: int | None
    ages: VersionAges | None = None
    """The policy versions that the loss may see; None where any may be seen."""
    positive_tokens: int = 0
    """Tokens of the rows with a score above 0."""
    seed: tuple[int, ...] = ()
    """Numbers that name the mini-batch, for random choices."""


@dataclass(frozen=True)
class UpdateReport:
    """Report of one optimizer step on one rank."""

    loss: LossReport
    step: StepReport
    seconds: float = 0.0
    flops: float = 0.0
    """Operations for this rank's rows; 0 where the model's are not counted."""
    peak_flops_per_s: float | None = None
    """Peak of this rank's device; None where it is not known."""
    memory: DeviceMemory | None = None
    """Memory of this rank's device, with the peaks since the call began.

    None without a device that reports its memory.
    """
    tokens_of_versions: Mapping[int, int] = field(default_factory=dict)
    """Response tokens of this rank's rows, by the policy version that sampled them."""
    oldest_optimizer_steps: int = 0
    """Age of the oldest of them, in optimizer steps of the policy."""


class ModelWorker:
    """One rank of a role whose model an engine holds."""

    def __init__(self, context: WorkerContext, spec: EngineSpec) -> None:
        import torch

        self.context = context
        device = torch.device(context.device)
        self.engine = build_engine(
            spec, device=device, rank=context.rank, world_size=context.num_ranks
        )
        self._require_finite_weights(spec.model_path)
        self._shape = self.engine.shape
        self._has_adapter = spec.lora is not None
        self._trusts_code = spec.trusts_code
        # The driver balances rows by their estimated work, for which it needs the model
        quadratic = 0.0 if self._shape is None else self._shape.quadratic
        self.topology = replace(self.engine.topology, quadratic=quadratic)
        self._peak_flops_per_s = peak_flops_per_s(device, spec.backend.compute_dtype)
        self._saving: BackgroundSave | None = None
        self._saving_group: dist.ProcessGroup | None = None
        self._snapshots: RankSnapshots | None = None

    def compute_log_probs(
        self,
        rows: Rows,
        temperature: float,
        with_entropy: bool = False,
        with_squared_probs: bool = False,
    ) -> LogProbs:
        """Return the log-probabilities of the response tokens.

        Args:
            temperature: The temperature that the tokens were sampled with.
            with_entropy: Whether the entropies of the tokens are asked for as well.
            with_squared_probs: Whether the sums of squared probabilities are.
        """
        outputs = RequestedOutputs(
            log_probs=True,
            entropy=with_entropy,
            squared_probs=with_squared_probs,
            temperature=temperature,
        )
        return self._log_probs(rows, outputs)

    def compute_reference_log_probs(
        self,
        rows: Rollouts,
        temperature: float,
        base: bool = False,
        top: TopTokens | None = None,
        context: TeacherContext | None = None,
        averaged: bool = False,
    ) -> LogProbs:
        """Return the log-probabilities that the policy is compared with.

        Args:
            temperature: The temperature that the tokens were sampled with.
            base: Whether to compute without the adapter: the model before training.
            top: Which of the most probable tokens are asked for; None = none.
            context: The prompts that a teacher reads; None = those of the policy.
            averaged: Whether the average of the weights computes in their place.
        """
        read: Rows = rows
        if context is not None:
            read = context.rows(rows)
            self._require_same_rows(read)
        outputs = RequestedOutputs(
            log_probs=True, top=top, temperature=temperature, base=base
        )
        if averaged:
            # Routers of the average choose by themselves, as those of a reference do.
            read = read.replace(routed_experts=None)
        with self._averaged() if averaged else contextlib.nullcontext():
            log_probs = self._log_probs(read, outputs)
        if context is None:
            return log_probs
        return behind_own_prompts(log_probs, read, rows)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        # The weights change for a while, so a snapshot is finished first.
        self._finish_snapshot()
        with self.engine.averaged():
            yield

    def _require_same_rows(self, rows: Rows) -> None:
        """Check that the ranks which compute these rows together have the same.

        Each of them has called the user's function by itself. Collective.

        Raises:
            DataError: They differ.
        """
        import torch
        import torch.distributed as dist

        if self.engine.peers == 1:
            return
        content = rows.offsets.tobytes() + rows.tokens.tobytes()
        digest = hashlib.blake2b(content, digest_size=7).digest()
        place = self.topology.dp_rank
        # Host tensors, which the gloo half of the process group carries.
        highest = torch.full((self.topology.dp_size,), -1)
        highest[place] = int.from_bytes(digest)
        lowest = torch.full_like(highest, torch.iinfo(torch.int64).max)
        lowest[place] = highest[place]
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        if not torch.equal(highest, lowest):
            raise DataError(
                "distill.teacher_prompt wrote different prompts of the same response",
                fix="let it return the same prompt in each call, without random"
                " numbers, times, or the order of a set",
            )

    def _log_probs(self, rows: Rows, outputs: RequestedOutputs) -> LogProbs:
        results = self.engine.forward(rows, outputs)
        assert results.log_probs is not None
        return LogProbs(
            offsets=rows.offsets,
            log_probs=results.log_probs,
            entropy=results.entropy,
            squared_probs=results.squared_probs,
            top_tokens=None
            if results.top_tokens is None
            else results.top_tokens.astype(np.int32),
            top_log_probs=results.top_log_probs,
        )

    def evaluate_teacher_forced(
        self, rows: Rows, base: bool = False
    ) -> TeacherForcedEvaluation:
        """Return how probable the responses of each row are, and whether greedily so.

        Greedy decoding writes a response where each of its tokens is the model's most
        probable one.

        Args:
            base: Whether to compute without the adapter: the model before training.
        """
        requested = RequestedOutputs(log_probs=True, greedy=True, base=base)
        outputs = self.engine.forward(rows, requested)
        assert outputs.greedy is not None and outputs.log_probs is not None

        mask = rows.response_mask
        row_of_token = rows.row_of_token[mask]
        num_rows = rows.num_rows
        # A row without response tokens has no wrong one.
        is_wrong = ~outputs.greedy[mask]
        num_wrong = np.bincount(row_of_token[is_wrong], minlength=num_rows)
        log_prob = np.bincount(
            row_of_token, weights=outputs.log_probs[mask], minlength=num_rows
        )
        return TeacherForcedEvaluation(
            offsets=np.zeros(num_rows + 1, np.int64),
            exact=num_wrong == 0,
            log_prob=log_prob.astype(np.float64),
            response_length=np.bincount(row_of_token, minlength=num_rows),
        )

    def learn(self, rows: TrainingBatch, objective: Objective) -> UpdateReport:
        """Make one optimizer step on this rank's rows of a mini-batch."""
        began = time.perf_counter()
        loss = self.engine.forward_backward(rows, objective)
        self._finish_snapshot()
        step = self.engine.optimizer_step()
        # The step waited for its result, so the device is done.
        seconds = time.perf_counter() - began

        flops = 0.0
        if self._shape is not None:
            all_flops = training_flops(
                self._shape, rows.lengths, frozen=self._has_adapter
            )
            # Peers compute the same rows together.
            flops = all_flops / self.engine.peers
        return UpdateReport(
            loss, step, seconds, flops, self._peak_flops_per_s, device_memory()
        )

    def total(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum of an array over the rows of all ranks. Collective."""
        import torch
        import torch.distributed as dist

        # Peers with the same rows count them once.
        if not self.topology.returns_results:
            values = np.zeros_like(values)
        if self.context.num_ranks == 1:
            return values
        whole = torch.from_numpy(values).to(self.context.device)
        dist.all_reduce(whole)
        return whole.cpu().numpy()

    def save(self, path: str) -> dict[str, FileRecord]:
        """Write this rank's shards of the engine's state under `path`.

        Returns:
            The files that this rank has written, by their names under `path`.
        """
        from verl_ray.checkpoint.sharded import save

        return save(self.engine.state(), path)

    def begin_save(self, path: str) -> None:
        """Begin to write this rank's shards in the background.

        The state is written as it is now, whatever the next calls change.
        """
        import torch.distributed as dist

        from verl_ray.checkpoint.sharded import BackgroundSave

        # A separate group, since the ranks communicate about the save while they train.
        if self._saving_group is None and self.context.num_ranks > 1:
            self._saving_group = dist.new_group(backend="gloo")
            share_timeout()
        self._saving = BackgroundSave(self.engine.state(), path, self._saving_group)

    @concurrent
    def finish_save(self) -> dict[str, FileRecord]:
        """Wait for the save of `begin_save`; this rank may compute meanwhile.

        Returns:
            The files that this rank has written, by their names under its path.
        """
        saving = self._saving
        self._saving = None
        return {} if saving is None else saving.wait()

    def load(self, path: str) -> list[str]:
        """Load the engine's state from a checkpoint of any layout.

        Returns:
            Notes on what could not be taken over.

        Raises:
            NonFiniteError: Weights of the checkpoint are NaN or infinite.
        """
        from verl_ray.checkpoint.sharded import load

        self._finish_snapshot()
        state = self.engine.state()
        notes = load(state, path)
        self.engine.load_state(state)
        self._require_finite_weights(path)
        return notes

    def _require_finite_weights(self, source: str) -> None:
        """Raise NonFiniteError if weights that were read from `source` are not."""
        names = self.engine.names_not_finite()
        if names:
            raise NonFiniteError(
                f"{self.context.role}: {len(names)} of the tensors in {source} hold NaN"
                f" or infinities, first {names[0]}; name an undamaged model or"
                " checkpoint"
            )

    def begin_snapshot(self, names: SnapshotNames, step: int) -> float:
        """Begin to copy this rank's state to the host's memory, after a step.

        Args:
            names: Names of the run's snapshots.
            step: Number of the step.

        Returns:
            The seconds for collecting the state and for the copy before.
        """
        snapshots = self._snapshots_of(names)
        began_s = time.perf_counter()
        state = self.engine.state()
        collecting_s = time.perf_counter() - began_s
        return collecting_s + snapshots.begin(step, state)

    def snapshot_steps(self, names: SnapshotNames) -> list[int]:
        """Return the steps of which this rank has a snapshot from `begin_snapshot`."""
        return self._snapshots_of(names).steps()

    def load_snapshot(self, names: SnapshotNames, step: int) -> None:
        """Load the engine's state from the snapshot of a step."""
        state = self.engine.state()
        self._snapshots_of(names).load(step, state)
        self.engine.load_state(state)

    def drop_snapshots(self) -> None:
        """Remove the snapshots of this rank, and give their memory back."""
        if self._snapshots is not None:
            self._snapshots.close()
        self._snapshots = None

    def _snapshots_of(self, names: SnapshotNames) -> RankSnapshots:
        from verl_ray.checkpoint.snapshots import RankSnapshots

        if self._snapshots is None:
            place = names.place(self.context.role, self.context.rank)
            self._snapshots = RankSnapshots(place, names)
        self._snapshots.follow(names)
        return self._snapshots

    def _finish_snapshot(self) -> None:
        """Wait until the state may change."""
        if self._snapshots is not None:
            self._snapshots.wait()

    def export(self, path: str, adapter: bool = False) -> None:
        """Write the model as a Hugging Face directory, or only its adapter."""
        self.engine.export(path, adapter=adapter)

    def distance_from(self, path: str) -> float:
        """Return the largest difference between this engine and transformers.

        The log-probs of a policy are compared, or the scores of any other model, over
        some fixed rows. Ranks that return no results return 0.

        Args:
            path: The directory that transformers loads.
        """
        from verl_ray.models.export import plain_outputs, probe_rows

        rows = probe_rows(self.engine.vocab_size)
        is_policy = self.engine.head == "policy"
        outputs = self.engine.forward(
            rows, RequestedOutputs(log_probs=is_policy, scores=not is_policy)
        )
        # Every rank computes, but one result is enough.
        if not self.topology.returns_results or self.topology.dp_rank:
            return 0.0

        ours = outputs.log_probs if is_policy else outputs.scores
        assert ours is not None
        theirs = plain_outputs(path, rows, is_policy, trusts_code=self._trusts_code)
        return float(np.abs(ours - theirs).max())

    def place(self, params: str, optimizer: str) -> None:
        """Move parameters and optimizer state to "device" or "host"."""
        self._finish_snapshot()
        self.engine.place(params=params, optimizer=optimizer)

    def close(self) -> None:
        """Close the engine; an engine that fails is closed as far as it can be."""
        self.drop_snapshots()
        with contextlib.suppress(Exception):
            self.engine.close()


def loss_weights(rows: Rollouts, credit: Credit, mini_batch: MiniBatch) -> np.ndarray:
    """Return the weight of each token loss of a row, float32 [rows].

    A trajectory weighs the same however it is cut into rows: the weights are those of
    the tokens of all of its rows together. Rows that are not learned from weigh 0.

    Args:
        rows: The rows of a rank, in whole trajectories.
        credit: Their credit.
        mini_batch: Totals of the mini-batch.
    """
    num_tokens = np.where(credit.in_loss, rows.response_length, 0).astype(np.int64)
    _, trajectory = np.unique(rows.trajectory_id, return_inverse=True)
    trajectory_tokens = np.bincount(trajectory, weights=num_tokens).astype(np.int64)

    weights = row_weights(
        mini_batch.aggregation,
        trajectory_tokens[trajectory],
        total_tokens=mini_batch.total_tokens,
        total_rows=mini_batch.total_trajectories,
        horizon=mini_batch.horizon,
    )
    return np.where(num_tokens > 0, weights, 0).astype(np.float32)


class ReferenceWorker(ModelWorker):
    """One rank of the reference: the policy as it was before training."""
