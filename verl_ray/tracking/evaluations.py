"""Evaluations of a run on the disk: the scores of every problem, and every response.

A line of `evaluations/step_000010.jsonl` holds the number of a problem, a digest of it,
the metric that its scores count towards, and the score of each response. A problem has
a line for each such metric. A loss counts by the tokens of its row, which is then the
`weight` of the line. Where answers were read out of the responses, `answers` has their
numbers, which are equal for equal answers to the problem, and -1 for none.

Invariant: the mean over the lines of a metric is what metrics.jsonl has under its name,
but for problems of which a score failed and was left out. Two evaluations are paired by
number and digest, so a problem that changed in between is not paired. Metrics of groups
of responses (pass@k, best@k, maj@k) follow from the scores and answers in the file, so
their intervals and differences can be computed afterwards. Each is one value per
problem, and is computed once for an evaluation in memory.

The responses stand beside the scores as text, in `evaluations/step_000010.parquet`;
those of episodes also have their tokens, in the columns of training rollouts. That file
is whole or is not there, too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.subsets import (
    NO_ANSWER,
    Answers,
    best_of,
    majority_of,
    pass_at,
    sample_sizes,
)
from verl_ray.columns.batch import Array
from verl_ray.disk import drop_after, replace_file, step_files, step_path
from verl_ray.errors import TrackingError
from verl_ray.json_lines import lines_of
from verl_ray.tracking.held_out_names import ACCURACY, ScoreName
from verl_ray.tracking.rollouts import (
    TOKEN_COLUMNS,
    TURN_COLUMNS,
    arrow_type,
    token_lists,
)

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "evaluations"


@dataclass(frozen=True, eq=False)
class HeldOutScores:
    """Scores of the responses to the held-out problems of one evaluation."""

    problems: Sequence[int]
    """Number of each problem, which is that of its record in the file."""

    digests: Sequence[str]
    """`digest` of each problem."""

    metrics: Sequence[str]
    """Name of the metric that the scores of each problem count towards."""

    # float64 [problems, responses]; NaN where a score is left out of the metric
    scores: npt.NDArray[np.float64]

    weights: npt.NDArray[np.float64] | None = None
    """Weight of each problem in the mean of its metric, [problems]; None where all
    weigh the same."""

    answers: Answers | None = None
    """Number of each response's answer, int32 [problems, responses]: equal for equal
    answers to the same problem, and `NO_ANSWER` for none. None where nothing reads
    answers."""

    @classmethod
    def joined(cls, parts: Sequence[HeldOutScores]) -> HeldOutScores:
        """Return the scores of all parts, which are of equally many responses."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            problems=[number for part in parts for number in part.problems],
            digests=[text for part in parts for text in part.digests],
            metrics=[name for part in parts for name in part.metrics],
            scores=np.concatenate([part.scores for part in parts]),
            weights=np.concatenate([part.row_weights for part in parts]),
            answers=np.concatenate([part.row_answers for part in parts]),
        )

    def select(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> HeldOutScores:
        """Return some of the problems, by their places."""
        return HeldOutScores(
            problems=[self.problems[row] for row in rows],
            digests=[self.digests[row] for row in rows],
            metrics=[self.metrics[row] for row in rows],
            scores=self.scores[rows],
            weights=self.row_weights[rows],
            answers=None if self.answers is None else self.answers[rows],
        )

    def of_metric(self, metric: str, values: npt.NDArray[np.float64]) -> HeldOutScores:
        """Return other scores of the same problems, which count towards `metric`.

        Args:
            metric: Name of the metric.
            values: A value per problem, [problems], or per response, [problems,
                responses]; NaN for none.
        """
        scores = np.full(self.scores.shape, math.nan)
        if values.ndim == 1:
            scores[:, 0] = values
        else:
            scores[:] = values
        metrics = [metric] * len(scores)
        return replace(self, metrics=metrics, scores=scores, answers=None)

    def of(self, metric: str) -> npt.NDArray[np.float64]:
        """Return the scores that count towards a metric, [problems, responses]."""
        counts = np.array(self.metrics) == metric
        selected: npt.NDArray[np.float64] = self.scores[counts]
        return selected

    def weights_of(self, metric: str) -> npt.NDArray[np.float64]:
        """Return the weights of the scores that count towards a metric, [problems]."""
        selected: npt.NDArray[np.float64] = self.row_weights[
            np.array(self.metrics) == metric
        ]
        return selected

    @property
    def row_weights(self) -> npt.NDArray[np.float64]:
        """The weight of each problem, [problems]."""
        return np.ones(len(self.scores)) if self.weights is None else self.weights

    @property
    def row_answers(self) -> Answers:
        """The number of each response's answer, [problems, responses]."""
        if self.answers is None:
            return np.full(self.scores.shape, NO_ANSWER, np.int32)
        return self.answers


def digest(*parts: bytes) -> str:
    """Return eight hexadecimal digits that stand for a problem."""
    content = b"\0".join(parts)
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def scores_path(run_dir: Path, step: int) -> Path:
    """Return the file for the scores of the evaluation after `step` of a run."""
    return step_path(run_dir / FOLDER, step, "jsonl")


def write_scores(path: Path, scores: HeldOutScores) -> None:
    """Write the scores of an evaluation, in place of older ones.

    Raises:
        OSError: The file cannot be written.
    """
    columns = zip(
        scores.problems,
        scores.digests,
        scores.metrics,
        scores.scores,
        scores.row_weights.tolist(),
        scores.row_answers.tolist(),
        strict=True,
    )
    lines = []
    for problem, problem_digest, metric, row, weight, answers in columns:
        fields: dict[str, object] = {
            "problem": int(problem),
            "digest": problem_digest,
            "metric": metric,
            "scores": [_short(score) for score in row.tolist()],
        }
        if weight != 1:
            fields["weight"] = _short(weight)
        if any(answer != NO_ANSWER for answer in answers):
            fields["answers"] = answers
        lines.append(json.dumps(fields, separators=(",", ":"), ensure_ascii=False))

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(f"{line}\n" for line in lines).encode())


def read_scores(path: Path) -> HeldOutScores:
    """Return the scores in a file of `write_scores`.

    Raises:
        TrackingError: The file cannot be read, or holds something else.
    """
    try:
        lines = [json.loads(line) for line in lines_of(path.read_bytes())]
        rows = [line["scores"] for line in lines]
        scores = np.array(rows, dtype=np.float64).reshape(len(rows), -1)
        none = [NO_ANSWER] * scores.shape[1]
        answers = [line.get("answers", none) for line in lines]
        return HeldOutScores(
            problems=[line["problem"] for line in lines],
            digests=[line["digest"] for line in lines],
            metrics=[line["metric"] for line in lines],
            scores=scores,
            weights=np.array([line.get("weight", 1) for line in lines], np.float64),
            answers=np.array(answers, np.int32).reshape(scores.shape),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackingError(
            f"{path}: cannot be read as the scores of an evaluation ({error!r});"
            " remove it, and the run goes on without it"
        ) from error


def recorded_evaluations(run_dir: Path) -> dict[int, Path]:
    """Return the files of scores by their steps, in increasing order."""
    return step_files(run_dir / FOLDER, "jsonl")


def drop_evaluations(run_dir: Path, after: int) -> None:
    """Remove the evaluations of steps after `after`, which run again.

    Raises:
        OSError: A file cannot be removed.
    """
    drop_after(recorded_evaluations(run_dir), after)
    drop_after(recorded_responses(run_dir), after)


def _short(score: float) -> float | int | None:
    """Return a score as JSON: short, and null where it is left out."""
    if not math.isfinite(score):
        return None
    if score == int(score):
        return int(score)
    # Scores are float32, which have no more digits than these.
    return float(f"{score:.7g}")


# -------------------------------------------------------------------- metrics of groups

Float64s = npt.NDArray[np.float64]

_COMPUTED: WeakKeyDictionary[HeldOutScores, list[HeldOutScores]] = WeakKeyDictionary()
"""Group metrics of the evaluations that are in memory, which nothing changes."""


def with_group_metrics(scores: HeldOutScores) -> HeldOutScores:
    """Return scores together with those of `group_metrics`."""
    return HeldOutScores.joined([scores, *group_metrics(scores)])


def group_metrics(scores: HeldOutScores) -> list[HeldOutScores]:
    """Return pass@k, best@k and maj@k of each problem, a part per metric.

    They belong to val-{core,aux}/<data source>/{acc,reward}/mean@N with N above 1, and
    a problem that counts there has one value of each. Names are verl's: of best@k and
    maj@k those with k = N are core metrics, and k is 2, 4, 8 and so on up to N. pass@k
    is there for accuracies of 0 and 1, from k = 1 on. maj@k is there for data sources
    with at least one answer.
    """
    if scores not in _COMPUTED:
        _COMPUTED[scores] = _computed(scores)
    return _COMPUTED[scores]


def _computed(scores: HeldOutScores) -> list[HeldOutScores]:
    """Return what `group_metrics` returns, computed anew."""
    names = np.array(scores.metrics)
    parts = []
    for name in dict.fromkeys(scores.metrics):
        parsed = ScoreName.parse(name)
        if parsed is None or parsed.group_size in (None, 1):
            continue
        selected = scores.select(np.flatnonzero(names == name))
        for metric, values in _values(parsed, selected).items():
            parts.append(selected.of_metric(str(metric), values))
    return parts


def group_metric_means(scores: HeldOutScores) -> dict[str, float]:
    """Return the mean over problems of each group metric; NaN where nothing counts."""
    metric_means = {}
    for part in group_metrics(scores):
        values = part.scores[~np.isnan(part.scores)]
        metric_means[part.metrics[0]] = float(values.mean()) if len(values) else nan
    return metric_means


def _values(name: ScoreName, scores: HeldOutScores) -> Mapping[ScoreName, Float64s]:
    """Return the value of each problem in each metric, [problems], by name.

    Args:
        name: The name of the mean over all responses to a problem.
        scores: What counts in it.
    """
    group_size = name.group_size
    assert group_size is not None
    values = scores.scores
    is_right_or_wrong = np.isin(values[~np.isnan(values)], (0, 1)).all()
    is_accuracy = name.kind == ACCURACY and is_right_or_wrong
    answers = scores.answers
    has_answers = answers is not None and bool((answers != NO_ANSWER).any())

    metric_values: dict[ScoreName, Float64s] = {}
    for k in sample_sizes(group_size):
        if is_accuracy:
            pass_k = name.aside.with_statistic(f"pass@{k}/mean")
            metric_values[pass_k] = pass_at(values, k)
        if k == 1:
            continue
        place = name if k == group_size else name.aside
        metric_values[place.with_statistic(f"best@{k}/mean")] = best_of(values, k)
        if has_answers:
            assert answers is not None
            maj_k = place.with_statistic(f"maj@{k}/mean")
            metric_values[maj_k] = majority_of(values, answers, k)
    return metric_values


# ------------------------------------------------------------------------- responses

# Responses stand in the order of the problems and of their members. They are written in
# pieces, since not all of them fit into the driver's memory.

RESPONSE_COLUMNS = {
    "problem": "int32",
    "member": "int32",
    "data_source": "string",
    "prompt": "string",
    "response": "string",
    "answer": "string",
    "score": "float32",  # null where it failed
    "finish": "string",
    "end": "string",
    "failure": "string",
    "entries": "string",  # JSON; empty where there are none
    "response_tokens": "int32",
    "num_turns": "int32",
    **TURN_COLUMNS,
}
"""Columns of a file of responses, a line per response, and their types. It also has
`TOKEN_COLUMNS` of training rollouts, empty lists where no tokens are kept."""

ROWS_AT_ONCE = 256
"""Responses that are in memory at the same time while they are written."""


@dataclass(frozen=True)
class HeldOutResponse:
    """A response to a held-out problem."""

    problem: int
    """Number of the problem, which is that of its record in the file."""

    data_source: str
    prompt: str
    response: str
    answer: str

    score: float
    """Number from the grader; nan if it failed."""

    finish: str
    """Why the response ended: stop, length or aborted."""

    entries: Mapping[str, float | str] = field(default_factory=dict)
    """What the reward function returned beside the score."""

    member: int = 0
    """Place of the response among those to its problem, from 0."""

    end: str = ""
    """How the episode ended; empty for a single response."""

    failure: str = ""
    """What failed in the episode or in scoring; empty where nothing did."""

    response_tokens: int = 0
    """Tokens that the policy sampled."""

    num_turns: int = 1
    """Turns of the policy."""

    turns: Sequence[int] = field(default_factory=list)
    """Values of `TURN_COLUMNS` of an episode's last row, like the next two; none of a
    single response."""

    turn_ends: Sequence[int] = field(default_factory=list)
    turn_rewards: Sequence[float] = field(default_factory=list)

    tokens: Mapping[str, Sequence[Any] | Array] | None = None
    """Values of `TOKEN_COLUMNS`, [tokens] each, of an episode's last row; None of a
    single response, whose text says the same."""


def responses_path(run_dir: Path, step: int) -> Path:
    """Return the file for the responses of the evaluation after `step` of a run."""
    return step_path(run_dir / FOLDER, step, "parquet")


def recorded_responses(run_dir: Path) -> dict[int, Path]:
    """Return the files of responses by their steps, in increasing order."""
    return step_files(run_dir / FOLDER, "parquet")


def encoded_responses(responses: Iterable[HeldOutResponse]) -> bytes:
    """Return responses as the content of a Parquet file."""
    # Imported here, because most processes write none.
    import pyarrow as pa
    import pyarrow.parquet

    schema = _response_table([]).schema
    content = pa.BufferOutputStream()
    rows = iter(responses)
    with pyarrow.parquet.ParquetWriter(content, schema, compression="zstd") as writer:
        # Consumes the responses in pieces. Ends with the last one.
        while piece := list(itertools.islice(rows, ROWS_AT_ONCE)):
            writer.write_table(_response_table(piece))
    encoded: bytes = content.getvalue().to_pybytes()
    return encoded


def _response_table(responses: Sequence[HeldOutResponse]) -> pa.Table:
    """Return some responses as `RESPONSE_COLUMNS` and `TOKEN_COLUMNS`."""
    import pyarrow as pa

    types = {name: arrow_type(type_) for name, type_ in RESPONSE_COLUMNS.items()}
    lines = []
    for response in responses:
        line: dict[str, object] = {
            name: getattr(response, name) for name in RESPONSE_COLUMNS
        }
        line["score"] = response.score if math.isfinite(response.score) else None
        line["entries"] = ""
        if response.entries:
            line["entries"] = json.dumps(dict(response.entries), ensure_ascii=False)
        lines.append(line)
    table = pa.Table.from_pylist(lines, pa.schema(types))

    rows = [response.tokens for response in responses if response.tokens is not None]
    lengths = [len((response.tokens or {}).get("mask", ())) for response in responses]
    offsets = np.cumsum([0, *lengths])
    tokens = {
        name: np.concatenate([row[name] for row in rows]) if rows else ()
        for name in TOKEN_COLUMNS
    }
    for name, lists in token_lists(offsets, tokens).items():
        table = table.append_column(name, lists)
    return table


def first_responses(path: Path, count: int) -> list[HeldOutResponse]:
    """Return the first responses in a file of `encoded_responses`.

    Raises:
        TrackingError: The file cannot be read, or holds something else.
    """
    import pyarrow as pa
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        lines: list[dict[str, object]] = []
        for batch in file.iter_batches(max(count, 1), columns=list(RESPONSE_COLUMNS)):
            lines += batch.to_pylist()
            if len(lines) >= count:
                break
        return [_response(line) for line in lines[:count]]
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise TrackingError(
            f"{path}: cannot be read as the responses of an evaluation ({error!r});"
            " remove it, and the run goes on without it"
        ) from error


def _response(line: Mapping[str, object]) -> HeldOutResponse:
    """Return a line of the file as a response."""
    fields = dict(line)
    if fields["score"] is None:
        fields["score"] = math.nan
    entries = str(fields["entries"])
    fields["entries"] = json.loads(entries) if entries else {}
    return HeldOutResponse(**fields)  # type: ignore[arg-type]
