"""Folders of runs, written by what writes those of real runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import yaml

from verl_ray.ownership import Owner
from verl_ray.profiling.trace import ProcessSpans, Span, TraceFile
from verl_ray.tracking.evaluations import HeldOutScores
from verl_ray.tracking.held_out_responses import HeldOutResponse
from verl_ray.tracking.history import HISTORY, begin_segment, end_segment, ready_segment
from verl_ray.tracking.jsonl import JsonlTracker
from verl_ray.tracking.rollouts import ExampleTable, RolloutFiles, RolloutTable

ACCURACY = "val-core/sums/acc/mean@1"


def held_out(shift: int) -> HeldOutScores:
    """Scores of eight problems, of which `shift` more than three are right."""
    scores = np.array([[float(i < 3 + shift)] for i in range(8)])
    digests = [f"{i:08x}" for i in range(8)]
    return HeldOutScores(range(8), digests, [ACCURACY] * 8, scores)


def examples(step: int, labels: tuple[str, str]) -> ExampleTable:
    """Two rows that a step has learned from: two examples, or the rows of a pair.

    Pieces are characters. Each token has a loss of 1, and the margin of a pair is 2.
    """
    is_pair = bool(labels[0])
    losses = [np.nan] * 4 + [np.nan if is_pair else 1.0]
    return ExampleTable(
        rows={
            "step": [step] * 2,
            "ordinal": [0, 0 if is_pair else 1],
            "member": [0, int(is_pair)],
            "label": labels,
            "prompt": ["1+2="] * 2,
            "response": ["3", "4"],
            "response_tokens": [1, 1],
            "loss": [1.0, 1.0],
            "reward": [1.0, -1.0] if is_pair else [np.nan] * 2,
            "margin": [2.0 if is_pair else np.nan] * 2,
        },
        offsets=np.array([0, 5, 10]),
        tokens={
            "tokens": [1] * 10,
            "pieces": list("1+2=31+2=4"),
            "mask": ([False] * 4 + [True]) * 2,
            "losses": losses * 2,
        },
    )


def rollouts(
    step: int, texts: list[tuple[str, str]], members: int = 2, observation: str = ""
) -> RolloutTable:
    """Rollouts of a step: for each prompt and response, as many members of a group.

    The reward of member m is m, and the pieces are characters. The log-prob of each
    sampled one is -0.5 for the sampler and -0.25 for the trainer. With an observation
    each is an episode of two turns, which give the response before and after it.
    """
    rows = [
        (number, member, prompt, response)
        for number, (prompt, response) in enumerate(texts)
        for member in range(members)
    ]
    count = len(rows)
    num_turns = 2 if observation else 1
    parts = [
        [prompt, *[response, observation] * (num_turns - 1), response]
        for _, _, prompt, response in rows
    ]
    pieces = [list("".join(row_parts)) for row_parts in parts]
    mask = np.concatenate(
        [
            np.repeat(np.arange(len(row_parts)) % 2 == 1, list(map(len, row_parts)))
            for row_parts in parts
        ]
    )
    zeros = np.zeros(count, dtype=np.int32)
    return RolloutTable(
        rows={
            "step": zeros + step,
            "ordinal": np.array([100 * step + row[0] for row in rows]),
            "member": np.array([row[1] for row in rows]),
            "trajectory": np.arange(count),
            "row": zeros,
            "data_source": ["sums"] * count,
            "prompt": [row[2] for row in rows],
            "response": ["".join(row_parts[1:]) for row_parts in parts],
            "answer": ["3"] * count,
            "reward": np.array([float(row[1]) for row in rows], np.float32),
            "scores": [[("reward", float(row[1])), ("style", None)] for row in rows],
            "finish": ["length" if row[1] else "stop" for row in rows],
            "end": ["completed" if observation else ""] * count,
            "failure": ["style: timeout" if row[1] else "" for row in rows],
            "output": [row[2] if row[1] else "" for row in rows],
            "entries": [""] * count,
            "num_turns": zeros + num_turns,
            "response_tokens": np.array([num_turns * len(row[3]) for row in rows]),
            "advantage": np.array([row[1] - 0.5 for row in rows], np.float32),
            "turns": [[*range(num_turns)] if observation else []] * count,
            "turn_ends": [
                turn_ends(row_parts) if observation else [] for row_parts in parts
            ],
            "turn_rewards": [[0.25, *[0.0] * (num_turns - 1)] if observation else []]
            * count,
        },
        offsets=np.cumsum([0, *map(len, pieces)]),
        tokens={
            "tokens": np.arange(len(mask), dtype=np.int32),
            "pieces": [piece for row in pieces for piece in row],
            "mask": mask,
            "rollout_log_probs": np.where(mask, -0.5, math.nan),
            "log_probs": np.where(mask, -0.25, math.nan),
            "advantages": np.where(mask, 0.5, math.nan),
            "versions": np.where(mask, step - 1, -1),
        },
    )


def turn_ends(parts: list[str]) -> list[int]:
    """The places of the last characters of every second part."""
    return [sum(map(len, parts[: at + 1])) - 1 for at in range(1, len(parts), 2)]


def drive_by(folder: Path, owner: Owner) -> None:
    """Let another process than this one be the last driver of a run."""
    path = folder / HISTORY
    *before, last = path.read_text().splitlines()
    segment = {**json.loads(last), "driver": str(owner)}
    path.write_text("\n".join([*before, json.dumps(segment)]) + "\n")


def write_run(
    folder: Path,
    *,
    steps: int = 4,
    texts: list[tuple[str, str]] | None = None,
    lr: float = 1e-6,
    ending: str = "finished",
    name: str = "sums",
    source: str = "sums",
    extra: dict[str, float] | None = None,
    command: str = "",
) -> Path:
    """Write the record of a run that evaluates before its first and after its last step.

    Each step has a reward of its number over ten, and a duration of two seconds, of
    which half is generation. With an ending of "crashed" the history has no end, and the
    last line of metrics.jsonl is torn.
    """
    folder.mkdir(parents=True)
    texts = texts or [("1+2=", "3"), ("2+2=", "5")]
    config = {
        "task": "rl",
        "run": {"name": name, "dir": str(folder), "total_steps": steps},
        "algorithm": {"name": "grpo"},
        "actor": {"optimizer": {"lr": lr}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    begin_segment(folder, 0, 1000.0, command)
    ready_segment(folder, 0)

    tracker = JsonlTracker(folder)
    files = RolloutFiles(folder, most_mb=100)
    for step in range(steps + 1):
        line = {"training/global_step": step, **(extra or {})}
        if step > 0:
            line |= {
                "critic/rewards/mean": step / 10,
                "timing_s/step": 2.0,
                "timing_s/gen": 1.0,
                "timing_s/weight_sync/stream": 0.1,
                "perf/total_num_tokens": 100.0,
                "memory/actor/learn_gib": 1.0 + step,
                "memory/actor/learn_predicted_gib": 2.0,
                "reward_health/ok": 3.0,
                "reward_health/timeout": 1.0,
                # Not a score that failed: one that another process made again.
                "reward_health/rescored": 2.0,
            }
            files.write(step, rollouts(step, texts).encoded())
        if step in (0, steps):
            tracker.scores(step, held_out(2 if step else 0))
            tracker.responses(step, held_out_responses(texts, source))
            line[ACCURACY] = 0.625 if step else 0.375
        tracker.log(step, line)
    tracker.close(failed=ending != "finished")

    if ending == "crashed":
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"training/global_step": 5, "critic/rew')
    else:
        end_segment(folder, steps, ending)  # type: ignore[arg-type]
    return folder


def held_out_responses(
    texts: list[tuple[str, str]], source: str
) -> list[HeldOutResponse]:
    """One response to each prompt, right to the first one alone."""
    return [
        HeldOutResponse(
            number, source, prompt, response, "3", float(not number), "stop"
        )
        for number, (prompt, response) in enumerate(texts)
    ]


def write_trace(folder: Path, name: str = "actor") -> None:
    """Add a trace with two steps: a second of the driver, half of it of another one."""
    half = 500_000_000
    trace = TraceFile(folder / "trace.json", continues=False)
    for step in (1, 2):
        begun = 2 * half * step
        driver = Span(f"step {step}/2", "phase", 1, begun, begun + 2 * half)
        update = Span("update", "call", 2, begun, begun + half)
        trace.append(
            [
                ProcessSpans("driver", 10, "host", 0, [driver], 0),
                ProcessSpans(name, 11, "host", 0, [update], 0),
            ]
        )
