"""`verl-ray bench data`: moving 8,192 rollouts of 512 tokens, beside plain copies of memory in the same minute.

Invariant: operations are those of the product (`Rollouts`, the object store, `scatter`), on rows of equal and of mixed
lengths; `ratio_to_copy` compares with copying as many bytes. Deliberately not here: arithmetic on tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.placement import ProcessSet
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.cluster.store import put, read
from verl_ray.data.batch import Int64, Kind, Ragged, offsets_of
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Finish, LogProbs, Rollouts, versions_of

PARTS = 8
GROWTH = 8  # how many times as many tokens go through the driver's hands
STORE_COPIES = 12  # of the rows, that the object store has room for
_STALL_S = 120.0
_CALLS = 100
_PROMPT_TOKENS = 16
_PROGRAM = "verl-ray bench data"


class Mover:
    """A worker that makes rows and answers rows with rows."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def draw(self, rows: Rollouts, tokens_per_row: int) -> Rollouts:
        """As many rows, of the given length."""
        return rollouts(np.full(rows.num_rows, tokens_per_row))

    def log_probs(self, rows: Rollouts) -> LogProbs:
        """A new token column for the rows."""
        return LogProbs(offsets=rows.offsets, log_probs=rows.rollout_log_probs * np.float32(2))


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; returns 0."""
    given = _parser().parse_args(argv)
    equal = rollouts(np.full(given.rows, given.tokens))
    lengths = np.random.default_rng(0).integers(given.tokens // 2, given.tokens + given.tokens // 2 + 1, given.rows)
    store_bytes = max(256 << 20, STORE_COPIES * nbytes(equal))
    with TemporaryDirectory() as logs, Session.open(None, object_store_bytes=store_bytes):
        stop_on_signals()  # again: Ray's own handler exits without a message
        growth = driver_growth(given.rows, given.tokens, Path(logs))  # first: later, memory of the others is given back
        result = {
            "rows": given.rows,
            "tokens_per_row": given.tokens,
            "copy_gb_per_s": round(nbytes(equal) / copy_s(nbytes(equal), given.repeats) / 1e9, 3),
            "equal_lengths": operations(equal, given.repeats),
            "mixed_lengths": operations(rollouts(lengths), given.repeats),
            "driver": growth,
        }
    print(json.dumps(result, indent=2))
    return 0


def rollouts(lengths: Int64) -> Rollouts:
    """Rows of the given lengths, with short prompts and an answer each."""
    rows, offsets = len(lengths), offsets_of(lengths)
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
        messages=text,
        data_source=text,
        answer=text,
        extra=text,
    )


def nbytes(rows: Rollouts) -> int:
    """Bytes of the token columns, of which there are hundreds of times as many as of the others."""
    kinds = rows.columns()
    return sum(int(getattr(rows, name).nbytes) for name, column in kinds.items() if column.kind is Kind.TOKEN)


def operations(rows: Rollouts, repeats: int) -> dict[str, dict[str, float]]:
    """Each operation's median over `repeats`, in ms and GB/s of what it hands over, and against a copy of as much."""
    count = rows.num_rows
    per_part = [len(part) for part in np.array_split(np.arange(count), PARTS)]
    parts = rows.split(per_part)
    shuffled = np.random.default_rng(1).permutation(count)
    neighbours = np.arange(count // 4, 3 * count // 4)
    stored = put(rows)
    work: dict[str, tuple[Callable[[], object], int]] = {
        f"split_{PARTS}": (lambda: rows.split(per_part), nbytes(rows)),
        f"concat_{PARTS}": (lambda: Rollouts.concat(parts), nbytes(rows)),
        "select_random": (lambda: rows.select(shuffled), nbytes(rows)),
        "select_neighbours": (lambda: rows.select(neighbours), nbytes(rows) * len(neighbours) // count),
        "put": (lambda: put(rows), nbytes(rows)),
        "get": (lambda: read(stored, _STALL_S), nbytes(rows)),
    }
    figures = {}
    for name, (run, size) in work.items():
        seconds = timed(run, repeats)
        figures[name] = {
            "ms": round(1e3 * seconds, 3),
            "gb_per_s": round(size / seconds / 1e9, 2),
            "ratio_to_copy": round(seconds / copy_s(size, repeats), 3),
        }
    return figures


def copy_s(size: int, repeats: int) -> float:
    """Seconds to copy `size` bytes into memory that is there already."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return timed(lambda: np.copyto(target, source), repeats)


def timed(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of `repeats` calls, after one that does not count."""
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def driver_growth(rows: int, tokens: int, logs: Path) -> dict[str, float]:
    """Memory of the driver's own while rows made by a worker are scattered to it and their log-probs come back; and
    what one call on one worker costs, with hardly a row."""
    processes = ProcessSet("mover", 1, 1.0, 0, "mover", 1, process_group=False)
    role = Role("mover", "mover", Mover)
    with start_groups([processes], [role], stall_s=_STALL_S, log_dir=logs) as groups:
        seeds = put(rollouts(np.full(rows, 2)))
        few = max(2, tokens // GROWTH)
        through(groups[role], seeds, few)  # what is imported and cached once does not count
        before = own_bytes()
        held = [through(groups[role], seeds, few)]
        with_few = own_bytes()
        held.append(through(groups[role], seeds, few * GROWTH))
        with_many = own_bytes()
        moved = [sum(part.num_tokens for part in parts) for parts in held]
        one = held[0][0].select(np.arange(1))
        call_s = timed(lambda: groups[role].scatter(Mover.log_probs, one).result(), _CALLS)
    return {
        "tokens": moved[0],
        "growth_bytes": with_few - before,
        f"tokens_x{GROWTH}": moved[1],
        f"growth_bytes_x{GROWTH}": with_many - with_few,
        "call_ms": round(1e3 * call_s, 3),
    }


def through(
    group: WorkerGroup[Mover], seeds: Sharded[Rollouts], tokens_per_row: int
) -> tuple[Sharded[Rollouts], Sharded[LogProbs]]:
    """Rows from the worker, to the worker, and its answer: what the driver holds of them."""
    drawn = group.scatter(Mover.draw, seeds, tokens_per_row).result()
    return drawn, group.scatter(Mover.log_probs, drawn).result()


def own_bytes() -> int:
    """Memory that would be free if this process ended; what it maps of the object store is not."""
    return int(psutil.Process().memory_full_info().uss)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Time split, concat, select, put and get of rollouts beside plain copies of memory, and watch the "
        "driver's memory while tokens pass it by.",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", type=int, default=8192, metavar="N", help="rollouts (8192)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of each, or their mean (512)")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="calls whose median counts (9)")
    return parser
