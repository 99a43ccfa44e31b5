"""Evaluations of a run on the disk: the scores of every problem.

A line of `evaluations/step_000010.jsonl` holds the number of a problem, a digest of it,
the metric that its scores count towards, and the score of each response. A problem has
a line for each such metric. A loss counts by the tokens of its row, which is then the
`weight` of the line. Where answers were read out of the responses, `answers` has their
numbers, which are equal for equal answers to the problem, and -1 for none.

Invariant: the mean over the lines of a metric is what metrics.jsonl has under its name,
but for problems of which a score failed and was left out. Two evaluations are paired by
number and digest, so a problem that changed in between is not paired.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from verl_ray.algorithms.subsets import NO_ANSWER, Answers
from verl_ray.disk import replace_file, step_files, step_path
from verl_ray.errors import TrackingError
from verl_ray.json_lines import lines_of

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


def _short(score: float) -> float | int | None:
    """Return a score as JSON: short, and null where it is left out."""
    if not math.isfinite(score):
        return None
    if score == int(score):
        return int(score)
    # Scores are float32, which have no more digits than these.
    return float(f"{score:.7g}")
