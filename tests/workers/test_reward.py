"""The reward role on rows: texts decoded, functions chosen by data source, failures
typed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from scripts.configuration import compose
from tests.rows import rollouts_of
from verl_ray.cluster.context import WorkerContext
from verl_ray.columns.batch import Ragged, offsets_of
from verl_ray.columns.stages import Rollouts
from verl_ray.config.reward import FunctionReward
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import ConfigError
from verl_ray.rewards.health import ScoreHealth
from workers.reward import RewardWorker

GRADER = """
def grade(response, answer, /, *, prompt, data_source, extra):
    if extra["kind"] == "raise":
        raise ValueError("no grade for " + response)
    return extra["weight"] * (prompt == "1+2=") + (response == answer)

def described(response, num_tokens, finish_reason, step, answer="none"):
    return {"score": num_tokens, "finish": finish_reason, "step": step, "answer": answer}

def batched(completions, completion_ids, prompts):
    return [len(completions) + 10 * len(ids) for ids in completion_ids]
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RewardWorker]:
    character_tokenizer(tmp_path / "tokenizer", "0123456789+=")
    (tmp_path / "own.py").write_text(GRADER)
    config = FunctionReward(
        kind="function", num_ranks=1, processes_per_rank=2, deadline_s=20.0, max_failed_fraction=1.0,
        normalise="none", clip=None,
        functions={"default": "exact_match"} | {
            source: f"{tmp_path}/own.py:{name}"
            for source, name in (("mine", "grade"), ("described", "described"), ("batched", "batched"))
        },
    )  # fmt: skip
    context = WorkerContext("reward", 0, 1, "cpu", False, 1, tmp_path / "log", 1)
    found = RewardWorker(context, config, str(tmp_path / "tokenizer"))
    yield found
    found.close()


def rows_of(
    worker: RewardWorker, rows: list[tuple[str, str, str, str, str]]
) -> Rollouts:
    """(prompt, response, answer, data source, extra) -> rows; a response ends with the
    end token.
    """
    tokenizer = worker._tokenizer
    prompts = [
        tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt, *_ in rows
    ]
    responses = [
        tokenizer(row[1], add_special_tokens=False)["input_ids"]
        + [tokenizer.eos_token_id]
        for row in rows
    ]
    plain = rollouts_of([len(r) for r in responses], prompts=[len(p) for p in prompts])
    tokens = np.array(
        [t for p, r in zip(prompts, responses, strict=True) for t in p + r], np.int32
    )
    assert np.array_equal(
        plain.offsets,
        offsets_of([len(p + r) for p, r in zip(prompts, responses, strict=True)]),
    )
    columns = {"messages": Ragged.of_texts([json.dumps(row[0]) for row in rows])}
    columns |= {name: Ragged.of_texts([row[i] for row in rows])
               for i, name in ((2, "answer"), (3, "data_source"), (4, "extra"))}  # fmt: skip
    return plain.replace(tokens=tokens, **columns)


@pytest.mark.processes
def test_each_row_is_graded_by_the_function_of_its_data_source(
    worker: RewardWorker,
) -> None:
    rows = rows_of(worker, [
        ("1+2=", "3", "3", "sums", "{}"),
        ("1+2=", "4", "3", "sums", "{}"),
        ("1+2=", "3", "3", "mine", '{"kind": "", "weight": 0.5}'),
        ("1+3=", "4", "3", "mine", '{"kind": "", "weight": 0.5}'),
        ("1+2=", "77", "3", "mine", '{"kind": "raise"}'),
    ])  # fmt: skip
    scores = worker.score(rows, 1)
    assert scores.score[:4].tolist() == [1.0, 0.0, 1.5, 0.0]
    assert np.isnan(scores.score[4])
    assert scores.health.tolist() == [ScoreHealth.OK] * 4 + [ScoreHealth.EXCEPTION]
    assert scores.detail.texts()[:4] == [""] * 4
    assert "no grade for 77" in scores.detail.texts()[4]
    assert scores.num_rows == 5 and scores.num_tokens == 0
    assert not scores.has_entries.any() and worker.needs_groups()

    # In an evaluation a built-in function's scores have the answer that it read.
    held_out = worker.score(rows, 1, True)
    assert held_out.score[:4].tolist() == scores.score[:4].tolist()
    answers = ['{"pred": "3"}', '{"pred": "4"}', "", "", ""]
    assert held_out.entries.texts() == answers


@pytest.mark.processes
def test_a_function_gets_what_is_known_about_a_row(worker: RewardWorker) -> None:
    rows = rows_of(worker, [
        ("1+2=", "3", "3", "described", "{}"),
        ("1+2=", "45", "", "described", "{}"),
        ("1+2=", "3", "", "sums", "{}"),
        ("1+2=", "4", "3", "batched", "{}"),
        ("1+2=", "123", "3", "batched", "{}"),
        ("2+2=", "4", "3", "batched", "{}"),
    ])  # fmt: skip
    scores = worker.score(
        rows.replace(
            has_answer=np.array([True, False, False, True, True, True]),
            finish=np.array([0, 1, 0, 0, 0, 0], np.int8),
            group_id=np.array([0, 0, 0, 7, 7, 8]),
        ),
        5,
    )
    # The end token counts; groups of two and of one response.
    assert scores.score[[0, 1, 3, 4, 5]].tolist() == [2.0, 3.0, 22.0, 42.0, 21.0]
    assert scores.health[2] == ScoreHealth.EXCEPTION
    assert scores.detail.texts()[2].startswith("the record has no answer")
    first, second, *others = scores.entries.texts()
    assert json.loads(first) == {"finish": "stop", "step": 5.0, "answer": "3"}
    assert json.loads(second) == {"finish": "length", "step": 5.0, "answer": "none"}
    assert scores.has_entries.tolist() == [True, True, False, False, False, False]
    assert others == [""] * 4


@pytest.mark.parametrize("role", ["evaluation", "reward.components.right"])
def test_a_function_that_is_missing_is_named_by_the_section_of_the_role(
    role: str, tmp_path: Path
) -> None:
    character_tokenizer(tmp_path / "tokenizer", "0")
    config = compose(
        "ppo", ["model.path=/m", "data.train_path=t", "data.validation_path=v"]
    ).reward
    broken = config.model_copy(
        update={"functions": {"sums": f"{tmp_path}/gone.py:grade"}}
    )
    with pytest.raises(ConfigError) as error:
        RewardWorker(
            WorkerContext(role, 0, 1, "cpu", False, 1, tmp_path / "log", 1),
            broken,
            str(tmp_path / "tokenizer"),
        )
    assert [problem.key for problem in error.value.problems] == [
        f"{role}.functions.sums"
    ]


class Longest(BaseHTTPRequestHandler):
    """Grades by length, and remembers what it was asked."""

    asked: ClassVar[list[dict[str, object]]] = []

    def do_POST(self) -> None:
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))[
            "items"
        ]
        self.asked.extend(items)
        body = json.dumps(
            {
                "scores": [
                    len(item["response"]) if item["response"] else None
                    for item in items
                ]
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.processes
def test_a_service_grades_the_texts(worker: RewardWorker, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Longest)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = compose("ppo", [
        "model.path=/m", "data.train_path=t", "data.validation_path=v", "reward=http",
        f"reward.url=http://127.0.0.1:{server.server_port}/", "reward.batch_size=2",
    ]).reward  # fmt: skip
    context = WorkerContext("reward", 0, 1, "cpu", False, 1, tmp_path / "log", 1)
    service = RewardWorker(context, config, str(tmp_path / "tokenizer"))
    try:
        rows = rows_of(worker, [("1+2=", "3", "3", "sums", "{}"), ("9+9=", "", "18", "sums", "{}"),
                                ("1+9=", "100", "10", "mine", '{"k": 1}')])  # fmt: skip
        known = np.array([True, False, True])
        scores = service.score(rows.replace(has_answer=known), 1)
    finally:
        service.close()
        server.shutdown()
    assert scores.health.tolist() == [ScoreHealth.OK, ScoreHealth.NONE, ScoreHealth.OK]
    assert scores.score[[0, 2]].tolist() == [1.0, 3.0] and np.isnan(scores.score[1])
    asked = {item["prompt"]: item for item in Longest.asked}
    assert asked["1+9="] == {
        "prompt": "1+9=", "response": "100", "answer": "10", "data_source": "mine", "extra": {"k": 1},
    }  # fmt: skip
    assert asked["9+9="]["answer"] is None
