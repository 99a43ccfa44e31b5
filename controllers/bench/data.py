"""`verl-ray bench data`: operations on 8,192 rollouts of 512 tokens, compared with
plain copies of memory in the same minute.

Invariant: the operations are those of the product (`Rollouts`, the object store,
`scatter`), on rows of equal and of mixed lengths. `ratio_to_copy` compares each with a
copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from controllers.bench.suite import Flags, print_json, timed
from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.placement import ProcessSet
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.cluster.waiting import put, read
from verl_ray.data.batch import Int64, Kind, Ragged, offsets_of
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Finish, LogProbs, Rollouts, versions_of

PARTS = 8
GROWTH = 8
"""Factor by which the tokens grow while the driver's memory is watched."""
STORE_COPIES = 12
"""Copies of the rows that fit into the object store."""
_STALL_S = 120.0
_CALLS = 100
_PROMPT_TOKENS = 16


class Mover:
    """A worker that makes rows, and returns rows for rows."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def make_rows(self, rows: Rollouts, tokens_per_row: int) -> Rollouts:
        """Return as many rows as there are `rows`, each of `tokens_per_row` tokens."""
        return rollouts(np.full(rows.num_rows, tokens_per_row))

    def log_probs(self, rows: Rollouts) -> LogProbs:
        """Return a new token column for the rows."""
        doubled = rows.rollout_log_probs * np.float32(2)
        return LogProbs(offsets=rows.offsets, log_probs=doubled)


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; return the exit code, 0."""
    options = _flags().parse_args(argv)
    equal = rollouts(np.full(options.rows, options.tokens))
    equal_bytes = nbytes(equal)
    shortest = options.tokens // 2
    longest = options.tokens + options.tokens // 2
    random = np.random.default_rng(0)
    mixed_lengths = random.integers(shortest, longest + 1, options.rows)
    store_bytes = max(256 << 20, STORE_COPIES * equal_bytes)

    with (
        TemporaryDirectory() as logs,
        Session.open(None, object_store_bytes=store_bytes, log_dir=Path(logs)),
    ):
        stop_on_signals()  # again: Ray's own handler exits without a message
        # The growth comes first, because later operations return memory.
        growth = driver_growth(options.rows, options.tokens, Path(logs))
        copy_seconds = copy_s(equal_bytes, options.repeats)
        result = {
            "rows": options.rows,
            "tokens_per_row": options.tokens,
            "copy_gb_per_s": round(equal_bytes / copy_seconds / 1e9, 3),
            "equal_lengths": operations(equal, options.repeats),
            "mixed_lengths": operations(rollouts(mixed_lengths), options.repeats),
            "driver": growth,
        }

    print_json(result)
    return 0


def rollouts(lengths: Int64) -> Rollouts:
    """Return rows of these lengths, each with a short prompt and an answer."""
    rows = len(lengths)
    offsets = offsets_of(lengths)
    prompt = np.minimum(_PROMPT_TOKENS, lengths - 1).astype(np.int32)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    spans = Ragged(np.zeros((rows, 2), np.int64), np.arange(rows + 1))
    text = Ragged(np.full(4 * rows, ord("7"), np.uint8), np.arange(rows + 1) * 4)
    return Rollouts(
        offsets=offsets,
        tokens=(position % 1000).astype(np.int32),
        response_mask=position >= np.repeat(prompt, lengths),
        row_id=np.arange(rows),
        trajectory_id=np.arange(rows),
        group_id=np.arange(rows) // 8,
        prompt_length=prompt,
        response_length=(lengths - prompt).astype(np.int32),
        finish=np.full(rows, Finish.STOP, np.int8),
        rollout_log_probs=np.full(offsets[-1], -1.0, np.float32),
        version_spans=spans,
        **versions_of(spans),
        has_answer=np.ones(rows, np.bool_),
        messages=text,
        data_source=text,
        answer=text,
        extra=text,
    )


def nbytes(rows: Rollouts) -> int:
    """Return the bytes of the token columns.

    All other columns together have less than a hundredth of that.
    """
    token_columns = [
        name for name, column in rows.columns().items() if column.kind is Kind.TOKEN
    ]
    return sum(int(getattr(rows, name).nbytes) for name in token_columns)


def operations(rows: Rollouts, repeats: int) -> dict[str, dict[str, float]]:
    """Return the median of each operation over `repeats` calls.

    It is in milliseconds, in GB/s of its result, and as a multiple of a copy of as many
    bytes.
    """
    count = rows.num_rows
    all_bytes = nbytes(rows)
    per_part = [len(part) for part in np.array_split(np.arange(count), PARTS)]
    parts = rows.split(per_part)
    shuffled = np.random.default_rng(1).permutation(count)
    neighbours = np.arange(count // 4, 3 * count // 4)
    stored = put(rows)
    neighbour_bytes = all_bytes * len(neighbours) // count

    # Each operation with the bytes of its result.
    timed_operations: dict[str, tuple[Callable[[], object], int]] = {
        f"split_{PARTS}": (lambda: rows.split(per_part), all_bytes),
        f"concat_{PARTS}": (lambda: Rollouts.concat(parts), all_bytes),
        "select_random": (lambda: rows.select(shuffled), all_bytes),
        "select_neighbours": (lambda: rows.select(neighbours), neighbour_bytes),
        "put": (lambda: put(rows), all_bytes),
        "get": (lambda: read(stored, _STALL_S), all_bytes),
    }

    figures = {}
    for name, (run, size) in timed_operations.items():
        seconds = timed(run, repeats)
        figures[name] = {
            "ms": round(1e3 * seconds, 3),
            "gb_per_s": round(size / seconds / 1e9, 2),
            "ratio_to_copy": round(seconds / copy_s(size, repeats), 3),
        }
    return figures


def copy_s(size: int, repeats: int) -> float:
    """Return the seconds to copy `size` bytes into memory that is already mapped."""
    source = np.ones(size, np.uint8)
    target = np.ones(size, np.uint8)
    return timed(lambda: np.copyto(target, source), repeats)


def driver_growth(rows: int, tokens: int, logs: Path) -> dict[str, float]:
    """Measure the growth of the driver's own memory while a worker exchanges tokens.

    A worker makes rows, which are scattered to it, and returns their log-probs. The
    result also has the time of one call on one worker with a single row.
    """
    processes = ProcessSet("mover", 1, 1.0, 0, "mover", 1, process_group=False)
    role = Role("mover", "mover", Mover)
    with start_groups([processes], [role], stall_s=_STALL_S, log_dir=logs) as groups:
        seeds = put(rollouts(np.full(rows, 2)))
        few_tokens = max(2, tokens // GROWTH)
        # The first exchange does one-time imports and caching, and does not count.
        exchange(groups[role], seeds, few_tokens)

        # The references stay alive until the end, as in a run.
        before = own_bytes()
        exchanges = [exchange(groups[role], seeds, few_tokens)]
        with_few = own_bytes()
        exchanges.append(exchange(groups[role], seeds, few_tokens * GROWTH))
        with_many = own_bytes()

        moved = [sum(part.num_tokens for part in parts) for parts in exchanges]
        single_row = exchanges[0][0].select(np.arange(1))
        call_s = timed(
            lambda: groups[role].scatter(Mover.log_probs, single_row).result(), _CALLS
        )

    return {
        "tokens": moved[0],
        "growth_bytes": with_few - before,
        f"tokens_x{GROWTH}": moved[1],
        f"growth_bytes_x{GROWTH}": with_many - with_few,
        "call_ms": round(1e3 * call_s, 3),
    }


def exchange(
    group: WorkerGroup[Mover], seeds: Sharded[Rollouts], tokens_per_row: int
) -> tuple[Sharded[Rollouts], Sharded[LogProbs]]:
    """Move rows from the worker to the driver and back.

    Returns:
        The driver's references to the rows and to the worker's reply.
    """
    rows = group.scatter(Mover.make_rows, seeds, tokens_per_row).result()
    return rows, group.scatter(Mover.log_probs, rows).result()


def own_bytes() -> int:
    """Return the bytes that would be free if this process exited.

    Pages of the object store that it maps are not among them.
    """
    return int(psutil.Process().memory_full_info().uss)


def _flags() -> Flags:
    flags = Flags(
        "data",
        "Time split, concat, select, put and get of rollouts, compared with plain"
        " copies of memory, and watch the driver's memory while workers exchange"
        " tokens.",
    )
    flags.number("--rows", 8192, "rollouts")
    flags.number("--tokens", 512, "tokens of each, or their mean")
    flags.number("--repeats", 9, "calls whose median counts")
    return flags
