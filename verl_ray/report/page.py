"""The page of one run or of several: one HTML file without any request.

Invariant: nothing that a run recorded stands in the page but inside of blocks, which
are text that can stand in any element of HTML, and the page's own scripts and styles
are the only ones that its policy lets a browser use. So no text of a model, a log or a
name can become markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.intervals import Interval
from verl_ray.report.evidence import failed_score_counts
from verl_ray.report.findings import findings, is_beyond_plan
from verl_ray.report.lines import SAVING, Line, RunLines
from verl_ray.report.record import RunRecord, read_run
from verl_ray.report.samples import RecordedRow
from verl_ray.report.summary import is_beyond_noise, summary
from verl_ray.report.typed import typed_settings
from verl_ray.shell import for_shell
from verl_ray.tracking.base import GLOBAL_STEP
from verl_ray.tracking.comparison import intervals, paired_differences
from verl_ray.tracking.held_out_names import kind_of
from verl_ray.tracking.history import (
    phase_durations,
    phase_names,
    preparing_s,
    starting_s,
    wall_s,
)

MOST_ROWS = 5_000
"""Prompts and responses of a page."""

MOST_POINTS = 1_600_000
"""Numbers of all curves of a page, which are about 6 MB of it."""

MOST_TEXT = 4_000_000
"""Characters of the blocks of prompts and responses; those of tokens may be as many."""

MOST_EVENTS = 40_000
"""Events of a trace, the newest ones."""

_ROWS_PER_BLOCK = 50
_SIZE_PER_BLOCK = 1_000_000
_PREVIEW = 90
_PROMPT_END = 60
_TOKENS = "perf/total_num_tokens"
_LARGEST_WHOLE = 2**53

_SCRIPTS = (
    "uPlot.iife.min.js",
    "blocks.js",
    "elements.js",
    "charts.js",
    "overview.js",
    "curves.js",
    "samples.js",
    "time.js",
    "logs.js",
    "page.js",
)
_STYLES = ("uPlot.min.css", "page.css")


def page_of(folders: Sequence[Path], *, live: str = "") -> bytes:
    """Return the report of the runs in some folders as HTML; `live` as of `page`."""
    most_rows = -(-MOST_ROWS // len(folders))
    return page([read_run(folder, most_rows) for folder in folders], live=live)


def page(records: Sequence[RunRecord], *, live: str = "") -> bytes:
    """Return the report of some runs as HTML.

    Args:
        records: Records of the runs, each read with its rows.
        live: Version of the record where a server stands behind the page, which the
            page asks for a newer one. Empty for a page that makes no request.
    """
    blocks = Blocks()
    index: dict[str, Any] = {
        "made": time.time(),
        "live": live,
        "version": metadata.version("verl_ray"),
        "stride": 1,
    }
    points = sum(_num_points(record.lines) for record in records)
    index["stride"] = stride = max(1, math.ceil(points / MOST_POINTS))
    index["runs"] = [_run(record, blocks, stride) for record in records]
    index["differences"] = _differences(records)
    index["samples"] = _samples(records, blocks)
    number = blocks.add_json(index)
    return _html(blocks, number, live=bool(live))


# ------------------------------------------------------------------------------- blocks

_GZIP_LEVEL = 6
# 17 of 23 bits of the mantissa are five significant digits.
_DROPPED_BITS = 6


@dataclass
class Blocks:
    """The blocks of a page, by their numbers: gzip in base64.

    The page decodes a block when it needs it. Numbers are float32 with five significant
    digits.
    """

    texts: list[str] = field(default_factory=list)

    def add_json(self, value: object) -> int:
        """Add a value as JSON, and return the number of its block.

        Infinite numbers and NaN become null.
        """
        # Lone surrogates have no bytes in UTF-8, so all but ASCII is escaped.
        try:
            text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(value), separators=(",", ":"))
        return self._add(text.encode("ascii"))

    def add_numbers(self, values: Sequence[float] | npt.NDArray[np.float64]) -> int:
        """Add numbers, [n], and return the number of their block."""
        return self._add(planes(np.asarray(values, dtype=np.float64)))

    def _add(self, content: bytes) -> int:
        packed = gzip.compress(content, _GZIP_LEVEL, mtime=0)
        self.texts.append(base64.b64encode(packed).decode("ascii"))
        return len(self.texts) - 1


def planes(values: npt.NDArray[np.float64]) -> bytes:
    """Return numbers, [n], as float32: their last bytes, those before, and so on.

    Bytes of one kind are alike, so they are packed better side by side.
    """
    # Numbers beyond float32 become infinite.
    with np.errstate(over="ignore"):
        short = values.astype("<f4")
    bits = short.view("<u4")
    half = np.uint32(1 << (_DROPPED_BITS - 1))
    rounded = (bits + half) & np.uint32(~((1 << _DROPPED_BITS) - 1) & 0xFFFFFFFF)
    rounded = np.where(np.isnan(short), np.uint32(0x7FC00000), rounded)
    columns = rounded.astype("<u4").view(np.uint8).reshape(-1, 4)
    return columns.T.tobytes()


def _finite(value: object) -> object:
    """Return a value of plain types without NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# ----------------------------------------------------------------------------- assembly


@cache
def _asset(name: str) -> str:
    path = resources.files("verl_ray.report") / "assets" / name
    return path.read_text(encoding="utf-8")


def _html(blocks: Blocks, index: int, *, live: bool) -> bytes:
    scripts = [_asset(name) for name in _SCRIPTS]
    styles = [_asset(name) for name in _STYLES]
    policy = [
        "default-src 'none'",
        f"script-src {' '.join(map(_digest, scripts))}",
        f"style-src {' '.join(map(_digest, styles))}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    if live:
        policy.append("connect-src 'self'")

    elements = [
        f'<script type="text/plain" id="block-{number}">{text}</script>'
        for number, text in enumerate(blocks.texts)
    ]
    html = Template(_asset("page.html")).substitute(
        policy="; ".join(policy),
        styles="\n".join(f"<style>{style}</style>" for style in styles),
        blocks="\n".join(elements),
        index=index,
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )
    return html.encode("utf-8")


def _digest(text: str) -> str:
    """Return the source expression of a script or a style in a page's policy."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


# ------------------------------------------------------------------------------ the run


def _run(record: RunRecord, blocks: Blocks, stride: int) -> dict[str, Any]:
    """Return the part of the index about a run."""
    lines = record.lines
    shown = _shown_lines(record, stride)
    names = dict.fromkeys(name for line in shown for name in line)
    names.pop(GLOBAL_STEP, None)
    metrics = []
    for name in sorted(names):
        values = [line.get(name, math.nan) for line in shown]
        metrics.append([name, blocks.add_numbers(values)])

    segments = list(record.segments)
    total_s = wall_s(segments) if segments else None
    durations = phase_durations(
        lines, total_s, starting_s(segments), preparing_s(segments)
    )
    changes = _changes(record)
    sentence = summary(
        RunLines(lines, record.config), record.held_out, changes, durations, total_s
    )
    return {
        "name": record.name,
        "folder": str(record.folder),
        "summary": sentence,
        "state": record.state,
        "step": record.step,
        "totalSteps": record.total_steps,
        "wallS": total_s,
        "phaseNow": record.status.phase if record.status else "",
        "reason": record.reason,
        "tokens": _sum_of(lines, _TOKENS),
        "steps": [int(line[GLOBAL_STEP]) for line in shown],
        "metrics": metrics,
        "facts": _facts(record),
        "config": list(_flat(record.config)),
        "typed": _typed(record),
        "heldOut": _held_out(record, changes),
        "findings": [
            asdict(item)
            for item in findings(
                lines, record.config, history=record.segments, faults=record.faults
            )
        ],
        "segments": [asdict(segment) for segment in record.segments],
        "phases": list(phase_names(names).items()),
        "durations": list(durations.items()),
        "memory": _memory(lines),
        "scoreFailures": _score_failures(lines),
        "faults": [dict(fault) for fault in record.faults],
        "logErrors": [asdict(error) for error in record.log_errors],
        "logEnds": blocks.add_json([asdict(end) for end in record.log_ends]),
        "damage": list(record.damage),
        "trace": _trace(record, blocks),
    }


def _shown_lines(record: RunRecord, stride: int) -> list[Line]:
    """Return every so many lines of a run, the last one among them."""
    lines = record.lines
    shown = list(lines[::stride])
    if lines and shown[-1] is not lines[-1]:
        shown.append(lines[-1])
    if stride == 1:
        return shown
    # Evaluations and checkpoints are few, so all of them are shown.
    steps = {line[GLOBAL_STEP] for line in shown} | set(record.evaluations)
    saving = {line[GLOBAL_STEP] for line in lines if SAVING in line}
    steps |= saving if len(saving) * stride < len(lines) else set()
    return [line for line in lines if line[GLOBAL_STEP] in steps]


def _typed(record: RunRecord) -> list[tuple[str, str, str]] | None:
    """Return what was typed: key, text and what it became; None if nobody knows."""
    commands = [str(segment.command) for segment in record.segments if segment.command]
    if not commands:
        return None
    typed = typed_settings(commands, record.config)
    return [(item.key, item.text, item.became) for item in typed]


def _sum_of(lines: Sequence[Line], name: str) -> float:
    """Return the sum of a metric over the steps in which it is a finite number."""
    values = [line.get(name, 0.0) for line in lines]
    return sum(value for value in values if math.isfinite(value))


def _num_points(lines: Sequence[Line]) -> int:
    names = {name for line in lines for name in line}
    return len(lines) * len(names)


def _flat(tree: object, prefix: str = "") -> list[tuple[str, object]]:
    """Return the values of a tree by their dotted keys."""
    if isinstance(tree, Mapping) and tree:
        return [
            pair
            for key, value in tree.items()
            for pair in _flat(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    is_plain = tree is None or isinstance(tree, bool | int | float | str)
    # JavaScript would round what is larger.
    if isinstance(tree, int) and abs(tree) > _LARGEST_WHOLE:
        is_plain = False
    return [(prefix, tree if is_plain else str(tree))] if prefix else []


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return what was learned from, the command and the versions, in words."""
    values = dict(_flat(record.config))
    last = record.lines[-1] if record.lines else {}
    facts: list[tuple[str, str]] = []

    def add(title: str, *keys: str) -> None:
        words = [str(values[key]) for key in keys if values.get(key) is not None]
        if words:
            facts.append((title, ", ".join(words)))

    add("task", "task")
    add("algorithm", "algorithm.name")
    add("model", "model.path", "model.revision")
    add("training data", "data.train_path")
    if last.get("training/num_examples"):
        facts.append(("examples", f"{last['training/num_examples']:,.0f}"))
    add("held-out data", "data.validation_path")
    add("prompts per step", "data.prompts_per_step")
    add("group size", "rollout.group_size")
    add("reward", "reward.kind", "reward.functions.default")
    add("learning rate", "actor.optimizer.lr")
    add("seed", "run.seed")
    if record.command:
        facts.append(("command", record.command))
    elif record.config:
        words = ["verl-ray", "train", "--config-dir", str(record.folder)]
        facts.append(("command", for_shell([*words, "--config-name", "config"])))
    if record.versions:
        versions = [f"{name} {version}" for name, version in record.versions.items()]
        facts.append(("versions", ", ".join(versions)))
    facts.append(("folder", str(record.folder)))
    return facts


def _changes(record: RunRecord) -> Mapping[str, Interval]:
    """Return the paired differences of the last evaluation to the first one."""
    if len(record.scores) < 2:
        return {}
    before, after = (record.scores[step] for step in sorted(record.scores))
    return paired_differences(before, after)


def _held_out(
    record: RunRecord, changes: Mapping[str, Interval]
) -> list[dict[str, Any]]:
    """Return each main held-out metric before, after and at its best.

    The first one is the one that the best step is chosen by.
    """
    evaluations = record.evaluations
    if not evaluations:
        return []
    first, last = min(evaluations), max(evaluations)
    bounds = {step: intervals(scores) for step, scores in record.scores.items()}

    rows = []
    for course in record.held_out:
        name, best = course.metric, course.best_step
        row: dict[str, Any] = {
            "metric": name,
            "kind": kind_of(name),
            "lowerIsBetter": course.should_fall,
            "best": [best, course.values[best]],
            "change": None,
        }
        for title, step in (("before", first), ("after", last)):
            interval = bounds.get(step, {}).get(name)
            problems = None if interval is None else interval.prompts
            row[title] = [step, course.values.get(step), *_bounds(interval), problems]
        if name in changes:
            row["change"] = _change(changes[name])
        rows.append(row)
    return rows


def _differences(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the paired differences of the runs' last evaluations, by main metric.

    Each metric is compared with the first run that has its scores (`base`). A run
    without common problems has None.
    """
    last = [record.scores.get(max(record.evaluations, default=0)) for record in records]
    shown = [{course.metric: None for course in record.held_out} for record in records]
    names = dict.fromkeys(name for run_names in shown for name in run_names)
    # Runs are compared with few others, so each pair is computed once.
    changes: dict[tuple[int, int], Mapping[str, Interval]] = {}
    rows: list[dict[str, Any]] = []
    for name in names if len(records) > 1 else ():
        having = [
            number
            for number, scores in enumerate(last)
            if scores is not None and name in scores.metrics and name in shown[number]
        ]
        row: dict[str, Any] = {"metric": name, "base": None, "runs": {}}
        for number in having[1:]:
            pair = (having[0], number)
            before, after = (last[member] for member in pair)
            assert before is not None and after is not None
            if pair not in changes:
                changes[pair] = paired_differences(before, after)
            change = changes[pair].get(name)
            if change is not None:
                row["runs"][number] = _change(change)
                row["base"] = having[0]
        rows.append(row)
    return rows


def _change(change: Interval) -> list[float | None]:
    """Return a paired difference, its bounds, its problems and whether it is one."""
    bounds = _bounds(change)
    return [change.mean, *bounds, change.prompts, is_beyond_noise(change)]


def _bounds(interval: Interval | None) -> tuple[float | None, float | None]:
    if interval is None or not interval.is_telling:
        return None, None
    return interval.low, interval.high


def _memory(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the largest memory of each role and phase in GiB, beside its plan."""
    largest: dict[tuple[str, str], dict[str, float]] = {}
    for line in lines:
        for name, value in line.items():
            parts = name.split("/")
            if parts[0] != "memory" or len(parts) != 3 or not name.endswith("_gib"):
                continue
            phase = parts[2].removesuffix("_gib")
            kind = "predicted" if phase.endswith("_predicted") else "measured"
            cell = largest.setdefault((parts[1], phase.removesuffix("_predicted")), {})
            if math.isfinite(value):
                cell[kind] = max(value, cell.get(kind, 0.0))

    cells: list[dict[str, Any]] = []
    for (role, phase), gib in sorted(largest.items()):
        sizes = gib.get("measured", math.nan), gib.get("predicted", math.nan)
        is_beyond = is_beyond_plan(*sizes)
        cells.append({"role": role, "phase": phase, **gib, "isBeyondPlan": is_beyond})
    return cells


def _score_failures(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """Return how many scores failed, by kind, over all steps."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(failed_score_counts(line))
    return list(counts.items())


# -------------------------------------------------------------------------------- trace

_MICROSECONDS = 1e-6


def _trace(record: RunRecord, blocks: Blocks) -> dict[str, Any] | None:
    """Add the events of a trace to the blocks, and return the index over them.

    There is one block, with the columns start (seconds since the first event), duration
    (seconds), track and name, the events in order. Of what a trace holds, complete
    events and names of processes and threads are read.

    Returns:
        The tracks, the names and the number of the block; None without events.
    """
    events = record.trace
    complete = [event for event in events if _is_complete(event)]
    if not complete:
        return None
    complete.sort(key=lambda event: float(event["ts"]))
    newest = complete[-MOST_EVENTS:]

    titles = _titles(events)
    tracks: dict[str, int] = {}
    names: dict[str, int] = {}
    begun = float(newest[0]["ts"])
    columns: list[list[float]] = [[], [], [], []]
    for event in newest:
        track = titles.get((event.get("pid"), None), f"process {event.get('pid')}")
        thread = titles.get((event.get("pid"), event.get("tid")))
        if thread is not None:
            track = f"{track}: {thread}"
        start_s = (float(event["ts"]) - begun) * _MICROSECONDS
        columns[0].append(round(start_s, 6))
        columns[1].append(round(float(event["dur"]) * _MICROSECONDS, 6))
        columns[2].append(tracks.setdefault(track, len(tracks)))
        columns[3].append(names.setdefault(str(event.get("name")), len(names)))

    return {
        "tracks": list(tracks),
        "names": list(names),
        "block": blocks.add_json(columns),
        "leftOut": len(complete) - len(newest),
        "skippedBytes": record.skipped_trace_bytes,
    }


def _is_complete(event: Mapping[str, Any]) -> bool:
    times = (event.get("ts"), event.get("dur"))
    return event.get("ph") == "X" and all(isinstance(t, int | float) for t in times)


def _titles(events: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, Any], str]:
    """Return the names of processes, by (pid, None), and of threads, by (pid, tid)."""
    titles: dict[tuple[Any, Any], str] = {}
    for event in events:
        arguments = event.get("args")
        if event.get("ph") != "M" or not isinstance(arguments, Mapping):
            continue
        name = str(arguments.get("name", ""))
        if event.get("name") == "process_name":
            titles[event.get("pid"), None] = name
        elif event.get("name") == "thread_name":
            titles[event.get("pid"), event.get("tid")] = name
    return titles


# ------------------------------------------------------------------------------ samples

_COLUMNS = ("step", "group", "member", "row")
_NUMBERS = ("reward", "response_tokens", "num_turns", "advantage", "loss", "margin")
_SUMS = ("reward", "response_tokens")
"""Numbers of which the rows of an episode have parts; each row shows their sum."""
_WORDS = ("source", "data_source", "label", "finish", "end", "failure")


def _samples(records: Sequence[RunRecord], blocks: Blocks) -> dict[str, Any]:
    """Add prompts, responses and tokens, and return the index over them."""
    most = MOST_ROWS // max(1, len(records))
    chosen = [
        (place, number, row)
        for number, record in enumerate(records)
        for place, row in enumerate(record.sampled.rows[:most])
    ]
    # What is dropped where texts are long are the last groups of every step.
    chosen.sort(key=lambda item: item[0])
    rows = [(number, row) for _, number, row in chosen]

    texts = _RowBlocks(blocks)
    for _, row in rows:
        if not texts.add(_text(row), row.num_characters):
            break
    texts.close()
    rows = rows[: texts.num_rows]

    tokens = _RowBlocks(blocks)
    has_tokens: list[int] = []
    for _, row in rows:
        size = 0 if row.tokens is None else 7 * len(row.tokens.pieces)
        if not tokens.add(_token_values(row), size):
            break
        has_tokens.append(int(row.tokens is not None))
    tokens.close()
    has_tokens += [0] * (len(rows) - len(has_tokens))

    sampled = [record.sampled for record in records]
    return {
        "recorded": sum(part.num_rows for part in sampled),
        "shown": len(rows),
        "steps": sum(part.num_steps for part in sampled),
        "recordedSteps": sum(part.recorded_steps for part in sampled),
        "texts": texts.places,
        "tokens": tokens.places,
        "columns": blocks.add_json({**_columns(rows), "hasTokens": has_tokens}),
    }


class _RowBlocks:
    """Blocks of a value per row. Each is small enough to be read for one row."""

    def __init__(self, blocks: Blocks) -> None:
        """Begin without rows."""
        self._blocks = blocks
        self._values: list[object] = []
        self._size = 0
        self._characters = 0

        self.num_rows = 0
        """Rows of the blocks that are closed."""

        self.places: list[tuple[int, int]] = []
        """The first row of each block, and its number."""

    def add(self, value: object, size: int) -> bool:
        """Add the value of the next row, or return that the page has no space for it.

        Args:
            value: The value, as JSON has it.
            size: About how many characters it has.
        """
        is_full = len(self._values) >= _ROWS_PER_BLOCK
        if self._values and (is_full or self._size + size > _SIZE_PER_BLOCK):
            self.close()
        if self._characters > MOST_TEXT:
            return False
        self._values.append(value)
        self._size += size
        return True

    def close(self) -> None:
        """Write the rows that are in no block yet."""
        if not self._values:
            return
        number = self._blocks.add_json(self._values)
        self.places.append((self.num_rows, number))
        self.num_rows += len(self._values)
        self._characters += len(self._blocks.texts[number])
        self._values = []
        self._size = 0


def _columns(rows: Sequence[tuple[int, RecordedRow]]) -> dict[str, Any]:
    """Return the columns by which rows are listed, filtered and sorted."""
    columns: dict[str, Any] = {"run": [number for number, _ in rows]}
    for name in _COLUMNS:
        columns[name] = [getattr(row, name) for _, row in rows]
    for name in _NUMBERS:
        columns[name] = [round(float(getattr(row, name)), 5) for _, row in rows]
    for name in _WORDS:
        columns[name] = [getattr(row, name) for _, row in rows]

    trajectories = [
        (run, row.source, row.step, row.group, row.member) for run, row in rows
    ]
    for name in _SUMS:
        columns[name] = _sums(_numbered(trajectories), columns[name])
    # Both responses of a pair are shown together, like the rows of an episode.
    columns["episode"] = _numbered(
        [
            trajectory[:-1] if row.label else trajectory
            for trajectory, (_, row) in zip(trajectories, rows, strict=True)
        ]
    )
    # Data may have the same question with several answers.
    columns["prompt"] = _numbered([(row.prompt, row.answer) for _, row in rows])
    columns["preview"] = [_beginning(row.response) for _, row in rows]
    columns["question"] = [_end(row.prompt) for _, row in rows]
    return columns


def _beginning(text: str) -> str:
    """Return the beginning of a text on one line."""
    return " ".join(text[: 2 * _PREVIEW].split())[:_PREVIEW]


def _end(text: str) -> str:
    """Return the end of a text on one line: prompts often begin alike."""
    end = " ".join(text[-2 * _PREVIEW :].split())
    is_whole = len(text) <= 2 * _PREVIEW and len(end) <= _PROMPT_END
    return end if is_whole else f"…{end[-_PROMPT_END:]}"


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    """Return a number for each key, from 0, equal for equal keys."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _sums(episodes: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return the sum over the episode of each row."""
    sums = np.bincount(episodes, values)
    return [round(float(value), 5) for value in sums[list(episodes)]]


def _text(row: RecordedRow) -> list[Any]:
    scores, turns = dict(row.scores), list(row.turns)
    return [row.prompt, row.response, row.answer, scores, turns, row.output]


def _token_values(row: RecordedRow) -> list[Any] | None:
    """Return the tokens of a row, and how many it has.

    Numbers are thousandths, null where there is none.
    """
    tokens = row.tokens
    if tokens is None:
        return None
    return [
        list(tokens.pieces),
        tokens.mask.astype(int).tolist(),
        _thousandths(tokens.rollout_log_probs),
        _thousandths(tokens.log_probs),
        _thousandths(tokens.advantages),
        np.nan_to_num(tokens.versions, nan=-1).astype(int).tolist(),
        tokens.total,
        _thousandths(tokens.losses),
    ]


def _thousandths(values: npt.NDArray[np.float64]) -> list[int | None]:
    """Return numbers, [n], as whole thousandths; None for what is not finite."""
    finite = np.isfinite(values)
    whole = np.where(finite, values * 1000, 0).round().astype(int)
    return [
        number if known else None
        for number, known in zip(whole.tolist(), finite.tolist(), strict=True)
    ]
