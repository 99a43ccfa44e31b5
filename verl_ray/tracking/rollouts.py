"""Rows that a run has learned from on the disk, a Parquet file per step that kept any.

A line of `rollouts/step_000010.parquet` is a row of tokens: a prompt and its response,
or a part of an episode. `ROW_COLUMNS` and `TOKEN_COLUMNS` list what it holds, and
`EXAMPLE_COLUMNS` and `EXAMPLE_TOKEN_COLUMNS` where rows come from a data set.

Invariant: a file is whole or is not there, and its content follows from the step alone.
All files together stay within a number of bytes: where a step would go beyond it, only
the steps that are multiples of twice the distance remain, and so on. The distance never
falls again, so a run that goes back to an earlier step ends with the same files. A step
of more than a quarter of these bytes is not kept, so that it takes no other's place.
Only the step that a run stops in is kept in any case, until the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verl_ray.columns.batch import Array, Int64
from verl_ray.disk import drop_after, replace_file, step_files, step_path
from verl_ray.errors import VerlRayError

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "rollouts"

BYTES_PER_MB = 1_000_000

TURN_COLUMNS = {
    "turns": "int32 list",  # number of the turn in its episode, from 0
    "turn_ends": "int32 list",  # place of its last token in the row
    "turn_rewards": "float32 list",  # what the environment paid for it
}
"""Columns with one value per turn that the policy sampled in a row, in the order of
time; empty lists in single responses."""

ROW_COLUMNS = {
    "step": "int32",  # training step that learned from the row, from 1
    "ordinal": "int64",  # running number of the prompt in the run: the group
    "member": "int32",  # place of the trajectory in its group, from 0
    "trajectory": "int64",  # equal for the rows of one episode
    "row": "int32",  # place of the row in its trajectory, from 0
    "data_source": "string",
    "prompt": "string",  # text without special tokens
    "response": "string",  # likewise
    "answer": "string",  # expected answer of the record; empty without one
    "reward": "float32",  # what was learned from; null without a score
    "scores": "map",  # float32 by grader, of the whole trajectory; null where it failed
    "finish": "string",  # stop, length or aborted
    "end": "string",  # how the episode ended; empty without one
    "failure": "string",  # what failed in the episode or in scoring; empty without
    "output": "string",  # what its command printed, on an episode's last row; or empty
    "entries": "string",  # what graders returned beside scores, as JSON; or empty
    "num_turns": "int32",  # turns of the policy in the whole trajectory
    "response_tokens": "int32",  # tokens that the policy sampled
    "advantage": "float32",  # mean over these; null where the row was not learned from
    **TURN_COLUMNS,
}
"""Columns with one value per row, and their types."""

TOKEN_COLUMNS = {
    "tokens": "int32",
    "pieces": "string",  # text of each token; joined they are the text of the row
    "mask": "bool",  # whether the policy sampled the token
    "rollout_log_probs": "float32",  # the sampler's; null outside the mask
    "log_probs": "float32",  # the trainer's, before it learned; null where not computed
    "advantages": "float32",  # as the loss saw them; null where nothing was learned
    "versions": "int32",  # policy version that sampled the token; -1 outside the mask
}
"""Columns with one value per token of the row, prompt included, and their types."""

EXAMPLE_COLUMNS = {
    "step": "int32",  # training step that learned from the row, from 1
    "ordinal": "int64",  # running number of the example or the pair in the run
    "member": "int32",  # 0, and 1 for the rejected response of a pair
    "label": "string",  # chosen or rejected; empty without labels
    "prompt": "string",  # text without special tokens
    "response": "string",  # likewise, from the first token that is learned from
    "response_tokens": "int32",  # tokens that are learned from
    "loss": "float32",  # mean over these, or of the pair; before the step
    "reward": "float32",  # score, or reward implied by the policy; null without pairs
    "margin": "float32",  # reward of the chosen response less that of the rejected one
}
"""Columns with one value per row of a data set, and their types."""

EXAMPLE_TOKEN_COLUMNS = {
    "tokens": "int32",
    "pieces": "string",  # as in `TOKEN_COLUMNS`
    "mask": "bool",  # whether the token is learned from
    "losses": "float32",  # null outside the mask, and where only whole rows have losses
}
"""Columns with one value per token of such a row, and their types."""

_SUFFIX = "parquet"
_KEPT = "_kept.json"
_EVERY = "every"


@dataclass(frozen=True, eq=False)
class RolloutTable:
    """Rollouts of one step as columns.

    Attributes:
        rows: Values of `row_columns`, [rows] each; NaN becomes null.
        offsets: First token of each row and the total behind them, int64 [rows + 1].
        tokens: Values of `token_columns`, flat: [tokens] each; NaN becomes null.
    """

    row_columns: ClassVar[Mapping[str, str]] = ROW_COLUMNS
    token_columns: ClassVar[Mapping[str, str]] = TOKEN_COLUMNS

    rows: Mapping[str, Sequence[Any] | Array]
    offsets: Int64
    tokens: Mapping[str, Sequence[Any] | Array]

    def encoded(self) -> bytes:
        """Return the rows as the content of a Parquet file."""
        # Imported here, because most processes write none.
        import pyarrow as pa
        import pyarrow.parquet

        content = pa.BufferOutputStream()
        pyarrow.parquet.write_table(self._table(), content, compression="zstd")
        encoded: bytes = content.getvalue().to_pybytes()
        return encoded

    def _table(self) -> pa.Table:
        import pyarrow as pa

        columns: dict[str, Any] = {}
        for name, type_name in self.row_columns.items():
            type_ = arrow_type(type_name)
            columns[name] = pa.array(self.rows[name], type_, from_pandas=True)

        lists = token_lists(self.offsets, self.tokens, self.token_columns)
        return pa.table(columns | lists)


class ExampleTable(RolloutTable):
    """Rows of a data set that one step has learned from, as columns."""

    row_columns = EXAMPLE_COLUMNS
    token_columns = EXAMPLE_TOKEN_COLUMNS


def arrow_type(name: str) -> pa.DataType:
    """Return the type of a column in words, such as "int32", "int32 list" or "map"."""
    import pyarrow as pa

    if name == "map":
        return pa.map_(pa.string(), pa.float32())
    element = pa.type_for_alias(name.removesuffix(" list"))
    return pa.list_(element) if name.endswith(" list") else element


def token_lists(
    offsets: Int64,
    tokens: Mapping[str, Sequence[Any] | Array],
    types: Mapping[str, str] = TOKEN_COLUMNS,
) -> dict[str, pa.ListArray]:
    """Return the columns per token of some rows, a list per row and column.

    Args:
        offsets: First token of each row and the total behind them, int64 [rows + 1].
        tokens: Values by column, flat: [tokens] each; NaN becomes null.
        types: Type of each column.
    """
    import pyarrow as pa

    columns = {}
    for name, type_name in types.items():
        type_ = pa.type_for_alias(type_name)
        values = pa.array(tokens[name], type_, from_pandas=True)
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
    return columns


def recorded_rollouts(run_dir: Path) -> dict[int, Path]:
    """Return the files of rollouts by their steps, in increasing order."""
    return step_files(run_dir / FOLDER, _SUFFIX)


def drop_rollouts(run_dir: Path, after: int) -> None:
    """Remove the rollouts of steps after `after`, which run again.

    Raises:
        OSError: A file cannot be removed.
    """
    drop_after(recorded_rollouts(run_dir), after)
    if after <= 0:
        (run_dir / FOLDER / _KEPT).unlink(missing_ok=True)


class RolloutFiles:
    """The files of a run's training rollouts, within a number of bytes.

    A disk that takes no file ends no run: this is said once, and tried again with the
    next step.
    """

    def __init__(self, run_dir: Path, most_mb: int) -> None:
        """Begin where the files of the folder end.

        Args:
            run_dir: Folder of the run.
            most_mb: Size of all files together, in megabytes.
        """
        self._folder = run_dir / FOLDER
        self._most_mb = most_mb
        self._reported: set[str] = set()
        self.every = _recorded_distance(self._folder / _KEPT)
        """Distance of the steps that are kept."""
        self._sizes: dict[int, int] = {}
        """Bytes of each file, by its step."""
        try:
            for step, path in recorded_rollouts(run_dir).items():
                self._sizes[step] = path.stat().st_size
            # Another process may have been killed before it had removed them all.
            self._thin_out()
        except OSError as error:
            self._say_once(
                "unread",
                f"warning: {self._folder} cannot be read or thinned out: {error}",
            )

    def keeps(self, step: int) -> bool:
        """Return whether the rollouts of a step are kept."""
        return step % self.every == 0

    @contextlib.contextmanager
    def tolerating(self, step: int) -> Iterator[None]:
        """Say once that rows of a step cannot be recorded, in place of an exception.

        Raises:
            VerlRayError: The block raised it.
        """
        try:
            yield
        except VerlRayError:
            raise
        # Whatever a tokenizer or a text of a user's own brings about.
        except Exception as error:
            self._say_once(
                "failed",
                f"warning: the rollouts of step {step} cannot be recorded ({error!r});"
                " the run goes on without them, and tries again with the next step"
                " (tracking.rollouts=none does not)",
            )

    def write(self, step: int, content: bytes, *, is_last: bool = False) -> bool:
        """Write the rollouts of a step, in place of older ones.

        Args:
            step: Number of the step.
            content: `RolloutTable.encoded` of it.
            is_last: Whether the run stops in this step, which is kept in any case then.

        Returns:
            Whether they were written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not (is_last or self._has_place(step, len(content))):
                return False
            replace_file(self._path(step), content)
            self._sizes[step] = len(content)
        except OSError as error:
            self._say_once(
                "refused",
                f"warning: {self._folder} cannot be written ({error}); the run goes on"
                f" without the rollouts of step {step}, and tries again",
            )
            return False
        return True

    def _has_place(self, step: int, num_bytes: int) -> bool:
        """Raise the distance of the steps until the rollouts of a step fit.

        Returns:
            Whether the step is kept.

        Raises:
            OSError: A file cannot be written or removed.
        """
        most_bytes = self._most_mb * BYTES_PER_MB
        if num_bytes > most_bytes / 4:
            self._say_once(
                "large",
                f"warning: the rollouts of step {step} have {num_bytes / 1e6:.1f} MB,"
                f" more than a quarter of tracking.rollouts_max_mb = {self._most_mb};"
                " those of such steps are not kept (tracking.rollouts=sampled keeps"
                " fewer of a step)",
            )
            return False

        # Each round halves the steps that remain. Ends when all fit, or when this step
        # is no longer one of them.
        self._sizes.pop(step, None)
        while self.keeps(step) and sum(self._sizes.values()) + num_bytes > most_bytes:
            self.every *= 2
            # The distance is known before a file goes, so that none comes again.
            distance = json.dumps({_EVERY: self.every}).encode()
            replace_file(self._folder / _KEPT, distance)
            self._thin_out()
            print(
                f"warning: {self._folder} has reached tracking.rollouts_max_mb ="
                f" {self._most_mb}; it keeps the rollouts of every"
                f" {self.every} steps from here on",
                file=sys.stderr,
                flush=True,
            )
        return self.keeps(step)

    def _thin_out(self) -> None:
        """Remove the files of steps that are not kept.

        Raises:
            OSError: A file cannot be removed.
        """
        for step in [step for step in self._sizes if not self.keeps(step)]:
            self._path(step).unlink(missing_ok=True)
            del self._sizes[step]

    def _path(self, step: int) -> Path:
        return step_path(self._folder, step, _SUFFIX)

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            print(text, file=sys.stderr, flush=True)


def _recorded_distance(path: Path) -> int:
    """Return the distance of steps that an earlier process came to; 1 without any."""
    try:
        every = json.loads(path.read_text())[_EVERY]
    except (OSError, ValueError, KeyError, TypeError):
        return 1
    return every if isinstance(every, int) and every > 0 else 1
