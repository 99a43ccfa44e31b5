"""The whole exception tree.

Invariant: every class survives pickling between processes, and every message says what was found, what was
expected and which config key to change. Not a place for control flow: expected outcomes (a failed reward, a
skipped optimizer step) are values, not exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass


class VerlRayError(Exception):
    """Root of every error that this project raises on purpose."""

    exit_code = 1
    origin: WorkerError | None = None
    """Of an error that was raised in a worker: which process that was, and where its stack is."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: the key, its value, the rule it breaks, and what would be right."""

    key: str
    value: object
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.rule}. {self.fix}"


class ConfigError(VerlRayError):
    """A configuration that cannot run. Carries all problems found, not the first one."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        lines = [f"{len(self.problems)} problem(s) in the configuration:"]
        lines += [f"  - {problem}" for problem in self.problems]
        return "\n".join(lines)


class DataError(VerlRayError):
    """Rows, files or columns that are not what they should be."""


class ModelError(VerlRayError):
    """A model directory that cannot be loaded, or whose contents do not fit the role."""


class EngineError(VerlRayError):
    """Misuse of, or a failure inside, a training engine."""


class NonFiniteError(EngineError):
    """A loss or gradient that is not finite; names the tensor, the rank and the micro-batch."""


class RolloutError(VerlRayError):
    """Misuse of, or a failure inside, a rollout engine."""


class CannotGenerate(RolloutError):
    """A rollout engine that has no policy to draw from now: it sleeps, is being updated, or never had one."""


class EngineFailed(RolloutError):
    """A rollout engine that is of no more use: it has to be started again."""


class CallRefused(RolloutError):
    """A call of an outside client that is not answered as it asks. Carries the field that is why, and HTTP's status."""

    def __init__(self, what: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(what, param, status)
        self.what, self.param, self.status = what, param, status

    def __str__(self) -> str:
        return self.what


class MismatchError(VerlRayError):
    """The trainer and the sampler hold policies that are further apart than the run allows; names the likely cause."""


class RewardError(VerlRayError):
    """Misuse of, or a failure inside, the reward role; a score that failed is a value, not this."""


class WeightSyncError(VerlRayError):
    """A policy version that did not reach a rollout engine exactly as the trainer holds it."""


class CheckpointError(VerlRayError):
    """A checkpoint that cannot be written, or is missing, torn or foreign."""


class TrackingError(VerlRayError):
    """The record of the run (metrics, samples, the W&B run) that cannot be written or read."""


class InstallationError(VerlRayError):
    """Parts of this program that do not belong together."""


class ClusterError(VerlRayError):
    """The Ray cluster cannot give what the run needs."""


class WorkerError(VerlRayError):
    """A call on a worker failed. Names role, rank and node; of a defect it carries the worker's stack and last output.

    As the `origin` of what a worker has raised on purpose it says where the stack is instead.
    """

    def __init__(self, what: str, *, role: str, rank: int, node: str, detail: str = "", output: str = "") -> None:
        super().__init__(what, role, rank, node, detail, output)
        self.what, self.role, self.rank, self.node = what, role, rank, node
        self.detail, self.output = detail, output

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_worker_error, (type(self), self.what, self.role, self.rank, self.node, self.detail, self.output)

    def __str__(self) -> str:
        text = f"{self.role} rank {self.rank} on {self.node}: {self.what}"
        if self.detail:
            text += f"\n{self.detail.rstrip()}"
        if self.output:
            text += f"\nlast output of {self.role} rank {self.rank}:\n{self.output.rstrip()}"
        return text


def _rebuild_worker_error(
    cls: type[WorkerError], what: str, role: str, rank: int, node: str, detail: str, output: str
) -> WorkerError:
    return cls(what, role=role, rank=rank, node=node, detail=detail, output=output)


def as_raised(error: WorkerError) -> VerlRayError:
    """The error of this project's own that a worker has raised, which then names its origin; else `error` itself."""
    raised = error.__cause__
    if not isinstance(raised, VerlRayError) or isinstance(raised, WorkerError):
        return error
    raised.origin = error
    return raised


def failure_of_worker(error: VerlRayError) -> WorkerError | None:
    """What an error says of a worker; None = it was raised where it was caught."""
    return error if isinstance(error, WorkerError) else error.origin


class WorkerDied(WorkerError):
    """The process of a worker ended; `detail` holds the cause as far as it is known."""


class DeadlineExceeded(WorkerError):
    """A process made no progress for `run.stall_s` seconds, or does not answer; `detail` holds the stacks of those that
    stand still."""


class StaleIncarnation(WorkerError):
    """An answer, or a call, that belongs to an earlier incarnation of its worker group."""


class Interrupted(VerlRayError):
    """The run was asked to stop (Ctrl-C, SIGTERM, `ray job stop`)."""

    exit_code = 130
