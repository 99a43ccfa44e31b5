"""The whole exception tree.

Invariant: every class survives pickling between processes, and every message states
what was found, what was expected and which config key to change. Not a place for
control flow: expected outcomes (a failed reward, a skipped optimizer step) are values,
not exceptions.
"""

from __future__ import annotations

import errno
import json
import socket
from dataclasses import dataclass
from pathlib import Path

_PASSING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOTCONN),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM),
    *(errno.EADDRINUSE, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH),
    socket.EAI_AGAIN,
)
"""Failures of disks, of processes, of networks and of their names that pass."""


def is_passing(error: BaseException | None) -> bool:
    """Return whether an error of the operating system may pass by itself."""
    # Libraries raise these two without a number.
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return isinstance(error, OSError) and error.errno in _PASSING


class VerlRayError(Exception):
    """Root of every error that this project raises on purpose."""

    exit_code = 1
    origin: WorkerError | None = None
    """For an error raised in a worker: its process, and the place of its stack."""
    spares_worker = False
    """Whether a worker that raises the error can be called again, as it was before."""

    @property
    def may_pass(self) -> bool:
        """Whether it may be gone after a while although the user changes nothing."""
        return is_passing(self.__cause__)

    def report(self) -> str:
        """Return everything that a user is told, without a traceback.

        These are the message, the notes, and the process that raised the error if it
        was another one.
        """
        lines = [self.message_with_name(), *getattr(self, "__notes__", ())]
        origin = self.origin
        if origin is not None:
            lines.append(
                f"raised by {origin.role} rank {origin.rank} on {origin.node};"
                f" {origin.detail}"
            )
        return "\n".join(lines)

    def message_with_name(self) -> str:
        """Return the message behind the nearest class of it that users may know."""
        for kind in type(self).__mro__:
            if kind.__module__ == __name__:
                return f"{kind.__name__}: {self}"
        raise AssertionError("VerlRayError itself is such a class")

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback."""
        return self.report().splitlines()


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration.

    Attributes:
        key: Key of the setting.
        value: Value of the setting.
        rule: Rule that the value breaks.
        fix: What would be right.
        may_pass: Whether it may be gone after a while although nothing is changed: it
            is about the machine or a service, and not about what the user has written.
    """

    key: str
    value: object
    rule: str
    fix: str
    may_pass: bool = False

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}: {self.rule}. {self.fix}"


class ConfigError(VerlRayError):
    """A configuration cannot run. The error carries all of its problems."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems)
        self.problems = problems

    @property
    def may_pass(self) -> bool:
        """Whether all of its problems may."""
        return all(problem.may_pass for problem in self.problems)

    def __str__(self) -> str:
        """Return a block per problem: key = value, the rule, what would be right."""
        noun = "problem" if len(self.problems) == 1 else "problems"
        is_typed = all(_is_argument(problem.key) for problem in self.problems)
        place = "on the command line" if is_typed else "in the configuration"
        text = f"{len(self.problems)} {noun} {place}:"

        for problem in self.problems:
            text += (
                f"\n\n  {problem.key} = {_as_typed(problem.value)}"
                f"\n    rule: {problem.rule}"
                f"\n    fix:  {problem.fix}"
            )
        return text

    def message_with_name(self) -> str:
        """Return the message, which needs no name of a class."""
        return str(self)


def _is_argument(key: str) -> bool:
    """Return whether a problem is with an argument, such as --best or CHECKPOINT."""
    return key.startswith("-") or key.isupper()


def _as_typed(value: object) -> str:
    """Return a value as the user would type it."""
    # An empty text is shown with its quotes.
    if isinstance(value, str) and value:
        return value
    return json.dumps(value, default=str)


class InputError(VerlRayError):
    """Something that a run reads or is given is not what it should be.

    The message is `place: rule, expected this; fix`, of which only the rule is always
    there. A fix that begins with a capital letter is a sentence of its own.

    Attributes:
        rule: What was found.
        expected: What should have been found, or "".
        fix: What to do about it, or "".
        place: The file and the line, or the name of the value; or "".
        subject: In the place of `place`, a path that is the subject of the rule.
    """

    def __init__(
        self,
        rule: str,
        expected: str = "",
        fix: str = "",
        place: str | Path = "",
        subject: str | Path = "",
    ) -> None:
        super().__init__(rule, expected, fix, str(place), str(subject))
        self.rule = rule
        self.expected = expected
        self.fix = fix
        self.place = str(place)
        self.subject = str(subject)

    def __str__(self) -> str:
        text = self._beginning() + self.rule
        if self.expected:
            text += f", expected {self.expected}"
        return _joined(text, self.fix)

    @property
    def remedy(self) -> str:
        """Expectation and fix in one text; "" if the error has neither."""
        return _joined(self.expected and f"expected {self.expected}", self.fix)

    def is_about(self, path: str) -> bool:
        """Return whether the error is about a file, or about one in a folder."""
        return self._beginning().startswith(path)

    def rule_in(self, path: str) -> str:
        """Return the rule and its place in a file or folder that is named already."""
        beginning = self._beginning()
        if beginning.startswith(path):
            beginning = beginning.removeprefix(path).lstrip(":, /")
        return beginning + self.rule

    def _beginning(self) -> str:
        if self.place:
            return f"{self.place}: "
        return self.subject and f"{self.subject} "


def _joined(text: str, fix: str) -> str:
    """Return a text with a fix behind it, either of which may be empty."""
    if not text or not fix:
        return text or fix
    return f"{text}. {fix}" if fix[0].isupper() else f"{text}; {fix}"


class UnsafeFile(InputError):
    """A file or folder may have been put there by another user of the machine."""


class DataError(InputError):
    """Rows, files or columns are not what they should be."""


class OverlongRows(DataError):
    """Rows are longer than a setting allows.

    Attributes:
        key: The setting.
        limit: Its value.
        longest: Tokens of the longest row.
    """

    def __init__(
        self, rule: str, key: str, limit: int, longest: int, way_on: str
    ) -> None:
        super().__init__(rule, fix=f"Set {key}={longest}{way_on}")
        # An exception is rebuilt from these in another process.
        self.args = rule, key, limit, longest, way_on
        self.key = key
        self.limit = limit
        self.longest = longest


class ModelError(InputError):
    """A model directory cannot be loaded, or its contents do not fit the role."""


class HubError(DataError, ModelError):
    """A repository is neither on the hub nor in the cache, or cannot be used.

    Attributes:
        repository: Its id.
        rule: What is wrong.
        fix: What to do.
        about_revision: Whether the revision is wrong, and not the id.
        is_away: Whether the hub cannot be reached at present, or the disk is full.
    """

    exit_code = 2

    def __init__(
        self,
        repository: str,
        rule: str,
        fix: str,
        about_revision: bool = False,
        is_away: bool = False,
    ) -> None:
        super().__init__(rule, fix=fix, place=repository)
        # An exception is rebuilt from these in another process.
        self.args = repository, rule, fix, about_revision, is_away
        self.repository = repository
        self.about_revision = about_revision
        self.is_away = is_away

    @property
    def may_pass(self) -> bool:
        """Whether the hub may be reached later."""
        return self.is_away

    def __str__(self) -> str:
        return f"{self.repository}: {self.rule}. {self.fix}"


class EngineError(VerlRayError):
    """A training engine was misused or failed."""


class NonFiniteError(EngineError):
    """A gradient, weights, or what was computed with them, are not finite.

    The error names the role and the tensor.
    """


class RolloutError(VerlRayError):
    """A rollout engine was misused or failed."""


class CannotGenerate(RolloutError):
    """A rollout engine has no policy to generate with at present.

    It sleeps, receives new weights, or never had any.
    """


class EngineFailed(RolloutError):
    """A rollout engine cannot be used any more and has to be restarted."""


class AgentFailed(RolloutError):
    """The program of an agent failed, or has not said what it should."""


class CallRefused(RolloutError):
    """A call of an outside client was refused.

    Attributes:
        message: Explanation for the client.
        param: Field of the call that is the reason, if there is one.
        status: HTTP status.
        code: Name of the reason that clients know, if there is one.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
    ) -> None:
        super().__init__(message, param, status, code)
        self.message = message
        self.param = param
        self.status = status
        self.code = code

    def __str__(self) -> str:
        return self.message


class MismatchError(VerlRayError):
    """The trainer and the sampler hold policies further apart than the run allows.

    The error names the likely cause.
    """


class RewardError(VerlRayError):
    """The reward role was misused or failed.

    A score that failed is a value, not this error.
    """


class GraderOutage(RewardError):
    """A service that scores was away for longer than the run waits for it."""


class ModelServiceError(VerlRayError):
    """A model behind a server is away, or its server gave no answer."""


class WeightSyncError(VerlRayError):
    """A rollout engine does not hold a policy version exactly as the trainer does."""


class CheckpointError(InputError):
    """A checkpoint cannot be written, or is missing, torn or foreign."""

    spares_worker = True


class TrackingError(VerlRayError):
    """The record of a run (metrics, samples, W&B run) cannot be written or read."""


class TrackerAway(TrackingError):
    """A service that keeps the record of a run cannot be reached."""

    @property
    def may_pass(self) -> bool:
        """Return True: it may be back later."""
        return True


class InstallationError(VerlRayError):
    """Parts of this program do not belong together."""


class ClusterError(VerlRayError):
    """The Ray cluster cannot provide what the run needs."""

    @property
    def may_pass(self) -> bool:
        """Return True: nodes come back, and what others hold gets free."""
        return True


class ClusterLost(ClusterError):
    """A process of Ray that the run cannot do without has ended, or hangs."""


class WorkerError(VerlRayError):
    """A call on a worker failed.

    For a defect, the error carries the worker's stack and last output. As the `origin`
    of an error that a worker raised on purpose, it names the log with the stack
    instead.

    Attributes:
        message: What failed.
        role: Role of the worker.
        rank: Rank of the worker.
        node: Node of the worker's process.
        detail: Stack, or the place of the stack.
        output: Last output of the worker's process.
    """

    def __init__(
        self,
        message: str,
        *,
        role: str,
        rank: int,
        node: str,
        detail: str = "",
        output: str = "",
    ) -> None:
        super().__init__(message, role, rank, node, detail, output)
        self.message = message
        self.role = role
        self.rank = rank
        self.node = node
        self.detail = detail
        self.output = output

    def __reduce__(self) -> tuple[object, ...]:
        # By default an exception is rebuilt from its positional arguments, and these
        # are keywords.
        arguments = (
            type(self),
            self.message,
            self.role,
            self.rank,
            self.node,
            self.detail,
            self.output,
        )
        return _rebuild_worker_error, arguments

    def __str__(self) -> str:
        worker = f"{self.role} rank {self.rank}"
        text = f"{worker} on {self.node}: {self.message}"
        if self.detail:
            text += f"\n{self.detail.rstrip()}"
        if self.output:
            text += f"\nlast output of {worker}:\n{self.output.rstrip()}"
        return text


def _rebuild_worker_error(
    cls: type[WorkerError],
    message: str,
    role: str,
    rank: int,
    node: str,
    detail: str,
    output: str,
) -> WorkerError:
    return cls(message, role=role, rank=rank, node=node, detail=detail, output=output)


def as_raised(error: WorkerError) -> VerlRayError:
    """Error of this project that a worker raised on purpose, with its origin set.

    Returns:
        The cause of `error` if it is an error of this project, else `error` itself.
    """
    cause = error.__cause__
    if not isinstance(cause, VerlRayError) or isinstance(cause, WorkerError):
        return error
    cause.origin = error
    return cause


def worker_error_of(error: VerlRayError) -> WorkerError | None:
    """Error of the worker behind `error`; None if it was raised in this process."""
    if isinstance(error, WorkerError):
        return error
    return error.origin


class WorkerDied(WorkerError):
    """The process of a worker ended; `detail` holds the cause as far as it is known."""


class DeadlineExceeded(WorkerError):
    """A process made no progress for `run.stall_s` seconds, or does not reply.

    `detail` holds the stacks of the processes that stand still.
    """


class StaleIncarnation(WorkerError):
    """A reply or a call belongs to an earlier incarnation of its worker group."""


class Interrupted(VerlRayError):
    """The run was stopped by a signal (Ctrl-C, SIGTERM, `ray job stop`)."""

    exit_code = 130


def file_problem(key: str, value: str, error: InputError) -> Problem:
    """Return an error about a file as a problem of the setting that names the file.

    Args:
        key: The setting.
        value: Its value, the path of the file or of a folder around it.
        error: What is wrong with the file.
    """
    if isinstance(error, HubError):
        return Problem(key, value, error.rule, error.fix, error.may_pass)

    rule = error.rule_in(value)
    fix = error.remedy.rstrip(".") or "correct it there, or name another one"
    fix = f"{fix[0].upper()}{fix[1:]}."
    if isinstance(error, OverlongRows):
        return Problem(error.key, error.limit, rule, fix)
    return Problem(key, value, rule, fix, error.may_pass)
