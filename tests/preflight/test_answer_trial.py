"""The answers of all records, tried with the built-in functions that grade them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.preflight.configs import settled
from verl_ray.data.tokenizers import train_bpe
from verl_ray.preflight import answer_trial
from verl_ray.preflight.data_files import examine_data
from verl_ray.preflight.reward_trial import TrialFindings, try_rewards

MATHS = [
    {"prompt": "a", "answer": "\\frac{1}{2}", "data_source": "math_dapo"},
    {"prompt": "b", "answer": "x = 5", "data_source": "math_dapo"},
    {"prompt": "c", "answer": "12", "data_source": "sums"},
]
BAD = {"prompt": "d", "answer": "???", "data_source": "aime_2024"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(folder, ["0 + 1 = 1"], vocab_size=259)
    return folder


def tried(tokenizer: Path, records: Sequence[object], *overrides: str) -> TrialFindings:
    path = tokenizer / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    own = [
        f"model.path={tokenizer}",
        f"data.train_path={path}",
        "data.validation_path=null",
        "run.evaluate_every=0",
    ]
    config = settled(compose("grpo", [*own, *overrides]))
    return try_rewards(config, examine_data(config).files)


@pytest.mark.processes
def test_mathematical_answers_are_tried_in_processes(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How many were tried in the time is said.
    with monkeypatch.context() as changed:
        changed.setattr(answer_trial, "LONGEST_ANSWERS_S", 0.0)
        changed.setattr(answer_trial, "_ANSWERS_AT_ONCE", 1)
        findings = tried(tokenizer, MATHS)
    assert findings.problems == []
    (warning,) = findings.warnings
    assert warning.startswith("reward.functions was tried on 1 of 2 answers of ")
    scores = [(trial.own.value, trial.empty.value) for trial in findings.trials]
    assert scores == [(1.0, 0.0)] * 2

    (found,) = tried(tokenizer, [*MATHS, BAD]).problems
    assert found.rule == (
        "record 4 of data source 'aime_2024' cannot be graded by reward.functions:"
        " answer '???' cannot be read as mathematics, so math cannot grade"
    )


def test_a_data_source_that_needs_a_package_is_told(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "math_verify" else find(name),
    )
    (found,) = tried(tokenizer, MATHS).problems
    assert (found.key, found.value) == ("reward.functions.default", "by_data_source")
    assert found.rule == (
        "math needs the package math-verify, which is not installed (data source"
        " 'math_dapo')"
    )
    assert "pip install math-verify" in found.fix


@pytest.mark.processes
def test_a_function_of_the_form_needs_no_answer(tokenizer: Path) -> None:
    without = [{"prompt": "a"}]
    form = "{function: format, tags: [think, answer]}"
    findings = tried(tokenizer, without, f"reward.functions={{default: {form}}}")
    # An answer need not have the form.
    assert (findings.problems, findings.warnings) == ([], [])
    (trial,) = findings.trials
    assert (trial.own.value, trial.empty.value) == (0.0, 0.0)

    (found,) = tried(tokenizer, without, "reward.functions.default=f1").problems
    assert found.rule == "record 1 has no answer, which f1 compares with"
    (found,) = tried(
        tokenizer, without, "reward.functions.default=json_schema"
    ).problems
    assert "json_schema needs an argument schema or schema_path" in found.rule

    schemas = [
        {"prompt": "a", "answer": '{"type": "object"}'},
        {"prompt": "b", "answer": '{"items": {"$ref": "#/item"}}'},
    ]
    (found,) = tried(
        tokenizer, schemas, "reward.functions.default=json_schema"
    ).problems
    assert found.rule.startswith("record 2 of data source ")
    assert "nothing in it is named by its reference '#/item'" in found.rule
