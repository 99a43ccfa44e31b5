"""The page of a run: what its blocks hold, and that nothing else of the run is in it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.recorded_runs import ACCURACY, held_out, write_run, write_trace
from verl_ray.report import page as page_module
from verl_ray.report.lines import SAVING, with_saves_in_their_steps
from verl_ray.report.page import Blocks, page, planes
from verl_ray.report.record import read_run
from verl_ray.report.typed import typed_settings
from verl_ray.tracking.evaluations import scores_path, write_scores
from verl_ray.tracking.history import RunSegment

_BLOCK = re.compile(r'<script type="text/plain" id="block-(\d+)">([^<]*)</script>')


class Opened:
    """A page as its own script reads it."""

    def __init__(self, html: bytes) -> None:
        text = html.decode()
        self.blocks = {int(number): packed for number, packed in _BLOCK.findall(text)}
        (index,) = re.findall(r'<body data-index="(\d+)">', text)
        self.index = self.json(int(index))

    def content(self, number: int) -> bytes:
        return gzip.decompress(base64.b64decode(self.blocks[number]))

    def json(self, number: int) -> Any:
        return json.loads(self.content(number))

    def numbers(self, name: str, run: int = 0) -> list[float]:
        """The values of a metric."""
        number = dict(self.index["runs"][run]["metrics"])[name]
        columns = np.frombuffer(self.content(number), np.uint8).reshape(4, -1)
        return np.ascontiguousarray(columns.T).view("<f4")[:, 0].tolist()


def test_numbers_have_five_significant_digits() -> None:
    values = np.array([0.0, 1.0, -123456.0, 1.2345678e-30, 3e38, np.nan, np.inf, 1e300])
    columns = np.frombuffer(planes(values), np.uint8).reshape(4, -1)
    read = np.ascontiguousarray(columns.T).view("<f4")[:, 0].astype(np.float64)
    assert np.allclose(read[:5], values[:5], rtol=5e-6, atol=0)
    assert np.isnan(read[5]) and np.isinf(read[6:]).all()
    # The last bits are the same for all, so they take nearly no space.
    random = np.random.default_rng(0).normal(size=10_000)
    blocks = Blocks()
    blocks.add_numbers(random)
    assert sum(map(len, blocks.texts)) < 10_000 * 4


def test_the_page_holds_the_record(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_trace(folder)
    opened = Opened(page([read_run(folder, 100)]))
    (run,) = opened.index["runs"]
    assert (run["name"], run["state"], run["step"]) == ("sums", "finished", 4)
    assert run["steps"] == [0, 1, 2, 3, 4] and run["tokens"] == 400.0
    rewards = opened.numbers("critic/rewards/mean")
    assert np.isnan(rewards[0]) and rewards[1:] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4], 4e-6
    )
    assert run["phases"] == [["timing_s/gen", "generation"]]
    assert dict(run["durations"])["generation"] == 4.0
    (memory,) = run["memory"]
    assert memory == {
        "role": "actor",
        "phase": "learn",
        "measured": 5.0,
        "predicted": 2.0,
        "isBeyondPlan": True,
    }
    assert run["scoreFailures"] == [["timeout", 4.0]]

    assert (run["reason"], run["typed"]) == ("", None)
    assert "to 0.625 at step 4 (+0.25 on the same 8 problems); " in run["summary"]
    # What is left of the time took no more than a twentieth of it.
    assert run["summary"].endswith(" went into starting.")

    (finding,) = run["findings"]
    assert (finding["kind"], finding["value"]) == ("failed_scores", 1.0)
    assert (finding["step"], finding["last_step"]) == (1, 4)

    (row,) = run["heldOut"]
    assert (row["metric"], row["kind"]) == (ACCURACY, "accuracy")
    assert row["best"] == [4, 0.625] and opened.index["differences"] == []
    assert row["before"][:2] == [0, 0.375] and row["after"][:2] == [4, 0.625]
    assert row["before"][4] == row["after"][4] == 8
    mean, low, high, problems, is_beyond_noise = row["change"]
    assert (mean, problems, is_beyond_noise) == (0.25, 8, False)
    assert low < mean < high

    starts, durations, _, names = opened.json(run["trace"]["block"])
    assert starts == [0, 0, 1, 1] and sorted(durations) == [0.5, 0.5, 1, 1]
    assert (
        len(run["trace"]["tracks"]) == 2
        and run["trace"]["names"][names[0]] == "step 1/2"
    )


def test_rows_are_found_by_their_places(tmp_path: Path) -> None:
    opened = Opened(page([read_run(write_run(tmp_path / "run"), 100)]))
    samples = opened.index["samples"]
    columns = opened.json(samples["columns"])
    assert samples["shown"] == samples["recorded"] == 20
    place = next(
        i
        for i in range(20)
        if (columns["source"][i], columns["step"][i]) == ("training", 2)
        and (columns["group"][i], columns["member"][i]) == (201, 1)
    )
    assert (columns["reward"][place], columns["finish"][place]) == (1.0, "length")
    ((first, texts),) = samples["texts"]
    assert first == 0 and (samples["steps"], samples["recordedSteps"]) == (6, 6)
    prompt, response, answer, scores, turns, output = opened.json(texts)[place]
    assert (prompt, response, answer, output) == ("2+2=", "5", "3", "2+2=")
    assert scores == {"reward": 1.0, "style": None} and turns == []
    ((_, tokens),) = samples["tokens"]
    values = opened.json(tokens)[place]
    pieces, mask, sampler, trainer, advantages, versions, total, losses = values
    assert total == 5 and losses == [None] * 5
    assert "".join(pieces) == "2+2=5" and mask == [0, 0, 0, 0, 1]
    assert (sampler[4], trainer[4], advantages[4], versions[4]) == (-500, -250, 500, 1)
    assert sampler[:4] == [None] * 4

    # The same prompt has the same number in training and in evaluations.
    same = [i for i in range(20) if columns["prompt"][i] == columns["prompt"][place]]
    assert {columns["source"][i] for i in same} == {"training", "held out"}


def test_rows_without_space_for_their_tokens_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", texts=[("1+2=", "3")], steps=2)
    monkeypatch.setattr(page_module, "_ROWS_PER_BLOCK", 4)
    opened = Opened(page([read_run(folder, 100)]))
    samples = opened.index["samples"]
    has_tokens = opened.json(samples["columns"])["hasTokens"]
    assert samples["shown"] == 2 * 2 + 2 == len(has_tokens)
    assert [first for first, _ in samples["texts"]] == [0, 4]
    assert sum(has_tokens) == 4

    # All texts fit a block. The tokens of the first row fill another one, and there is
    # no space for a third.
    monkeypatch.setattr(page_module, "_ROWS_PER_BLOCK", 50)
    monkeypatch.setattr(page_module, "_SIZE_PER_BLOCK", 48)
    monkeypatch.setattr(page_module, "MOST_TEXT", 0)
    opened = Opened(page([read_run(folder, 100)]))
    samples = opened.index["samples"]
    assert opened.json(samples["columns"])["hasTokens"] == [1, 0, 0, 0, 0, 0]
    ((_, number),) = samples["tokens"]
    assert len(opened.json(number)) == 1


def test_numbers_that_javascript_lacks_are_texts_or_left_out(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run"), 1)
    lost = {"training/global_step": 5.0, "perf/total_num_tokens": float("nan")}
    config = {"seed": 2**60, "steps": 2**53}
    record = replace(record, config=config, lines=[*record.lines, lost])
    (run,) = Opened(page([record])).index["runs"]
    assert run["tokens"] == 400.0
    assert dict(run["config"]) == {"seed": str(2**60), "steps": 2**53}


def test_the_same_question_with_another_answer_is_another_prompt(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    record = read_run(folder, 100)
    first = record.sampled.rows[0]
    rows = [first, replace(first, answer="4"), first]
    sampled = replace(record.sampled, rows=rows)
    opened = Opened(page([replace(record, sampled=sampled)]))
    columns = opened.json(opened.index["samples"]["columns"])
    assert columns["prompt"] == [0, 1, 0]


def test_rows_of_an_episode_are_listed_together(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run", steps=1), 100)
    first = replace(
        record.sampled.rows[0],
        reward=0.5,
        response_tokens=3,
        turns=[(0, 4, 0.5), (2, 9, 0.0)],
    )
    second = replace(first, row=1, reward=0.25, response_tokens=2, turns=[(1, 6, 0.25)])
    other = replace(first, member=1, reward=0.125)
    sampled = replace(record.sampled, rows=[first, other, second])
    opened = Opened(page([replace(record, sampled=sampled)]))
    samples = opened.index["samples"]
    columns = opened.json(samples["columns"])
    assert columns["episode"] == [0, 1, 0]
    assert columns["reward"] == [0.75, 0.125, 0.75]
    assert columns["response_tokens"] == [5, 3, 5]
    ((_, texts),) = samples["texts"]
    turns = [text[4] for text in opened.json(texts)]
    assert turns == [[[0, 4, 0.5], [2, 9, 0]], [[0, 4, 0.5], [2, 9, 0]], [[1, 6, 0.25]]]


def test_nothing_that_was_recorded_is_markup(tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>\u2028\u202e\0<!--"
    folder = write_run(
        tmp_path / "run",
        texts=[(hostile, hostile)],
        name=hostile.replace("\0", ""),
        source=hostile,
        extra={hostile: 1.0, "__proto__": 2.0},
    )
    html = page([read_run(folder, 100)])
    assert b"onerror" not in html and b"<!--" not in html
    opened = Opened(html)
    assert opened.numbers(hostile) == [1.0] * 5
    columns = opened.json(opened.index["samples"]["columns"])
    assert hostile in columns["data_source"]


def test_lone_surrogates_survive_as_escapes() -> None:
    blocks = Blocks()
    number = blocks.add_json(["\ud800", float("nan"), {"a": float("inf")}])
    packed = base64.b64decode(blocks.texts[number])
    assert gzip.decompress(packed) == b'["\\ud800",null,{"a":null}]'


def test_the_policy_names_every_script_and_style_and_nothing_else(
    tmp_path: Path,
) -> None:
    record = read_run(write_run(tmp_path / "run"), 10)
    text = page([record]).decode()
    (policy,) = re.findall(r'Policy" content="([^"]*)"', text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert len(scripts) == 10 and len(styles) == 2
    for content in [*scripts, *styles]:
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert "connect-src" not in policy and "http" not in policy
    assert "connect-src 'self'" in page([record], live='"a"').decode()


def test_long_runs_are_thinned_but_for_their_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", steps=9)
    monkeypatch.setattr(page_module, "MOST_POINTS", 40)
    opened = Opened(page([read_run(folder, 10)]))
    assert opened.index["stride"] == 3
    assert opened.index["runs"][0]["steps"] == [0, 3, 6, 9]


def test_long_texts_are_dropped_group_by_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [(f"{i}+1=", "x" * 50) for i in range(30)]
    folder = write_run(tmp_path / "run", texts=texts)
    monkeypatch.setattr(page_module, "MOST_TEXT", 100)
    samples = Opened(page([read_run(folder, 5000)])).index["samples"]
    assert samples["recorded"] == 4 * 30 * 2 + 2 * 30
    assert samples["shown"] == 50 and len(samples["texts"]) == 1


def test_what_differs_stands_in_the_configurations(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(lr), lr=lr) for lr in (1e-6, 1e-5)]
    opened = Opened(page([read_run(folder, 10) for folder in folders]))
    first, second = [dict(run["config"]) for run in opened.index["runs"]]
    assert first["actor.optimizer.lr"] == 1e-6
    assert {key for key in first if first[key] != second[key]} == {
        "actor.optimizer.lr",
        "run.dir",
    }


def test_runs_are_compared_in_pairs_of_the_same_problems(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(lr), lr=lr) for lr in (1e-6, 1e-5)]
    # Three of eight problems are right in the last evaluation of the second run.
    write_scores(scores_path(folders[1], 4), held_out(0))
    opened = Opened(page([read_run(folder, 10) for folder in folders]))
    (row,) = opened.index["differences"]
    assert (row["metric"], row["base"]) == (ACCURACY, 0)
    ((number, (mean, low, high, problems, _)),) = row["runs"].items()
    assert (number, mean, problems) == ("1", -0.25, 8) and low < mean < high


def test_what_was_typed_and_what_it_became() -> None:
    config = {
        "run": {"total_steps": 32, "total_epochs": None},
        "algorithm": {"name": "grpo"},
        "reward": {"functions": {"default": "a.py:f"}},
        "rollout": {"schedule": "one_step_off"},
        "actor": {"lr": 0.001, "dtype": "float32", "backend": {}, "optimizer": {}},
        "critic": {"backend": {}},
    }
    commands = [
        "verl-ray train run.total_steps=9",
        # It goes on from no configuration, so nothing of the first one counts.
        "verl-ray train --config-name a=b backend=fsdp actor.lr=1e-4"
        " 'oops=' unknown.key=1",
        "verl-ray train --config-dir run +actor.lr=1e-3 actor.dtype=auto algorithm=grpo"
        " 'reward.functions={default: a.py:f}' run.total_epochs=1"
        " optimizer@actor.optimizer=muon schedule=one_step_off",
        "an 'unclosed quote",
    ]
    typed = typed_settings(commands, config)
    assert [(item.key, item.text, item.became) for item in typed] == [
        ("actor.dtype", "auto", "float32"),
        ("actor.lr", "1e-3", "0.001"),
        ("algorithm", "grpo", "the values of algorithm"),
        ("backend", "fsdp", "the values of actor.backend, critic.backend"),
        ("oops", "", ""),
        ("optimizer@actor.optimizer", "muon", "the values of actor.optimizer"),
        ("reward.functions", "{default: a.py:f}", '{"default": "a.py:f"}'),
        ("run.total_epochs", "1", "run.total_steps = 32"),
        ("schedule", "one_step_off", "rollout.schedule = one_step_off"),
        ("unknown.key", "1", ""),
    ]


def test_a_checkpoint_belongs_to_the_step_that_saved() -> None:
    steps = [{"training/global_step": float(step)} for step in range(6)]
    for step, seconds in ((2, 1.0), (3, 2.0), (5, 3.0)):
        steps[step][SAVING] = seconds
    # The lines of step 4 are lost.
    lines = with_saves_in_their_steps([*steps[:4], steps[5]])
    assert [line.get(SAVING) for line in lines] == [None, 1.0, 2.0, None, 3.0]

    # Of the last checkpoint of each process no line knows; the first one's is on line 2.
    segments = [
        RunSegment(0.0, 1.0, 0, 1, "killed", saved_step=1, saving_s=9.0),
        RunSegment(1.0, 2.0, 0, 3, "stopped", saved_step=3, saving_s=4.0),
        RunSegment(2.0, 3.0, 3, 5, "finished", saved_step=5, saving_s=5.0),
    ]
    lines = with_saves_in_their_steps(steps[:4] + steps[5:], segments)
    assert [line.get(SAVING) for line in lines] == [None, 1.0, 2.0, 4.0, 3.0]
    lines = with_saves_in_their_steps(
        [*steps[:3], {"training/global_step": 3}], segments
    )
    assert [line.get(SAVING) for line in lines] == [None, 1.0, None, 4.0]
    # A process that wrote none has no step, and line 0 is of none.
    lines = with_saves_in_their_steps(steps[:1], [RunSegment(0, 1, 0, 1, "failed")])
    assert lines == steps[:1]
