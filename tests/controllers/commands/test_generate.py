"""Responses as data files: `verl-ray generate`, with real engines and a real trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForCausalLM

from controllers.command_line import main
from controllers.commands.generate import best_and_worst, content_of_reward
from controllers.system.plan import resolve_on
from scripts.configuration import compose
from tests.controllers.grader import ones
from tests.controllers.runs import SHAPE, Inputs, command_here
from verl_ray.cluster.session import Session
from verl_ray.data.files import read_rows, without_added_nulls
from verl_ray.data.piecewise import PiecewiseFile
from verl_ray.errors import ConfigError, DataError
from verl_ray.preflight.data_files import examine_data
from verl_ray.tracking.jsonl import read_metrics

# Two pieces of responses to 20 prompts, of 16 and 4.
SMALL = ("data.prompts_per_step=16", "evaluation.num_prompts=20")

# Fails until there is a file beside it, on the last prompts.
BREAKING = """
from pathlib import Path

def ones(response, answer, **more):
    if answer in {late} and not Path(__file__).with_suffix(".fixed").exists():
        raise ValueError("the service is away")
    return sum(character in "12" for character in response) / 8
"""


def generate(
    cluster: Session, inputs: Inputs, output: Path, *arguments: str, code: int = 0
) -> str:
    ended = command_here(
        cluster, "generate", "--output", str(output), "--with-cut", "--config-name", "grpo",
        *(each for each in inputs.rl(output.parent / "run") if not each.startswith("data.validation")),
        *SMALL, *arguments, code=code,
    )  # fmt: skip
    return ended.stdout + ended.stderr


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.cluster
@pytest.mark.vllm
def test_responses_and_pairs_of_them_become_data_files(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    # Every response, with what the model says in the place of each token.
    written = tmp_path / "all.parquet"
    printed = generate(cluster, inputs, written, "--top-logprobs", "3")
    rows = pyarrow.parquet.read_table(written).to_pylist()
    assert f"{written}: {len(rows)} records of 80 new responses" in printed
    prompts = records(inputs.train)[:20]
    assert {row["prompt"] for row in rows} == {each["prompt"] for each in prompts}
    for row in rows:
        assert row["score"] == ones(row["response"], row["answer"])
        assert len(row["response"].strip()) > 0 and row["finish"] in ("stop", "length")
    check_top_tokens(inputs.model, rows[5])

    # A student that is the teacher has nothing to learn from it.
    run = tmp_path / "student"
    command_here(
        cluster, "train", "--config-name", "sft", *inputs.overrides(run), f"data.train_path={written}",
        "sft.divergence=jsd", "sft.top_k=3", "sft.max_tokens=16", "run.total_steps=2", "actor.optimizer.warmup_steps=0",
    )  # fmt: skip
    first, second = (
        line["actor/distill_loss"] for line in read_metrics(run / "metrics.jsonl")
    )
    assert abs(first) < 1e-6 < second

    # A grader breaks in the second piece; the first one is kept, and what is right.
    early, late = (
        {each["response"] for each in part} for part in (prompts[:16], prompts[16:])
    )
    function = tmp_path / "breaking.py"
    function.write_text(BREAKING.format(late=late - early))
    pairs = tmp_path / "pairs.jsonl"
    keep = ("--keep", "pairs", f"reward.functions.default={function}:ones")
    first = generate(cluster, inputs, pairs, *keep, code=1)
    assert "the service is away" in first and not pairs.exists()
    other = generate(cluster, inputs, pairs, *keep, "run.seed=7", code=2)
    assert "run.seed was 0 and is 7" in other

    function.with_suffix(".fixed").touch()
    second = generate(cluster, inputs, pairs, *keep)
    assert "1 of 2 pieces are there" in second
    # The same responses as above, for the seeds are, whatever the pieces and the stop.
    assert [
        (each["prompt"], each["chosen"], each["rejected"], each["margin"])
        for each in records(pairs)
    ] == best_pairs(rows)
    assert sorted(each.name for each in tmp_path.iterdir() if "pairs" in each.name) == [
        "pairs.jsonl"
    ]

    # Both are read as they are.
    for root, path, count in (
        ("sft", written, len(rows)),
        ("dpo", pairs, len(records(pairs))),
        ("grpo", pairs, len(records(pairs))),
    ):
        changes = [f"data.train_path={path}", "data.validation_path=null"]
        config = compose(root, [*inputs.overrides(tmp_path), *changes])
        findings = examine_data(resolve_on(config, SHAPE))
        assert not findings.problems and findings.files[0].num_examples == count


def check_top_tokens(model: Path, row: dict[str, Any]) -> None:
    """The three likeliest tokens of each place, as plain transformers has them."""
    tokens = [*row["prompt_tokens"], *row["response_tokens"]]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        log_probs = plain(torch.tensor([tokens])).logits[0].log_softmax(-1)
    best = log_probs[len(row["prompt_tokens"]) - 1 : -1].topk(3)
    assert row["top_tokens"] == best.indices.tolist()
    np.testing.assert_allclose(row["top_log_probs"], best.values, atol=2e-5)


def best_pairs(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, float]]:
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], []).append(row)
    pairs = []
    for prompt, members in by_prompt.items():
        best = max(members, key=lambda row: row["score"])
        worst = min(members, key=lambda row: row["score"])
        if best["score"] > worst["score"]:
            margin = best["score"] - worst["score"]
            pairs.append((prompt, best["response"], worst["response"], margin))
    return pairs


def test_the_best_and_the_worst_of_a_group_have_scores() -> None:
    nan = np.nan
    scores = np.array([1, 3, 3, nan, nan, nan, 2, nan, 2], np.float32)
    best, worst = best_and_worst(scores, 3)
    assert best.tolist() == [1, -1, 6] and worst.tolist() == [0, -1, 6]


WHOLE = [{"a": 0, "b": [0.5], "c": {"x": 1}}, {"a": 1, "d": "late"}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_file_goes_on_with_the_pieces_that_are_there(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"file{suffix}"
    with PiecewiseFile(path, {"seed": 0}, "--output") as file:
        assert file.write(1, WHOLE[1:]) == 1
        with (
            pytest.raises(ConfigError, match="another process writes"),
            PiecewiseFile(path, {"seed": 0}, "--output"),
        ):
            pass

    with (
        pytest.raises(ConfigError, match="seed was 0 and is 1"),
        PiecewiseFile(path, {"seed": 1}, "--output"),
    ):
        pass
    with PiecewiseFile(path, {"seed": 0}, "--output") as again:
        assert [number in again for number in range(3)] == [False, True, False]
        again.write(0, WHOLE[:1])
        again.write(2, [])
        assert not path.exists()
        again.finish(3)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    # What some records lack is lost in neither format.
    read = [without_added_nulls(fields) for _, fields in read_rows(path)]
    assert [{k: v for k, v in each.items() if v is not None} for each in read] == WHOLE


def test_what_fits_into_no_table_stays_for_another_format(tmp_path: Path) -> None:
    records = [{"a": 1}], [{"a": [{}]}]
    with PiecewiseFile(tmp_path / "file.parquet", {}, "--output") as file:
        for number, piece in enumerate(records):
            file.write(number, piece)
        with pytest.raises(DataError, match=r"same command with --output .*file.jsonl"):
            file.finish(2)
    with PiecewiseFile(tmp_path / "file.jsonl", {}, "--output") as file:
        assert 0 in file and 1 in file
        file.finish(2)
    written = [fields for _, fields in read_rows(tmp_path / "file.jsonl")]
    assert written == [{"a": 1}, {"a": [{}]}]


def test_a_file_without_records_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    with PiecewiseFile(path, {}, "--output") as file:
        file.write(0, [])
        file.finish(1)
    assert pyarrow.parquet.read_table(path).num_rows == 0


def test_what_decides_scores_is_known(inputs: Inputs, tmp_path: Path) -> None:
    """A grader that is corrected scores anew; more time for it changes nothing."""
    function = tmp_path / "own.py"

    def content(text: str, *changes: str) -> object:
        function.write_text(text)
        own = f"reward.functions.default={function}:one"
        return content_of_reward(inputs.config("grpo", tmp_path, own, *changes))

    first = content("def one(response, answer): return 1")
    limits = ("reward.deadline_s=77", "reward.max_failed_fraction=0.9")
    assert content("def one(response, answer): return 1", *limits) == first
    assert content("def one(response, answer): return 2") != first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", "a.csv"], ["--output", "Let it end in .jsonl or .parquet"]),
        (["--output", __file__], ["--output", "Let it end in"]),
        (
            ["--output", "a.jsonl", "--top-logprobs", "4", "--keep", "pairs"],
            ["--top-logprobs", "a distillation reads single responses"],
        ),
        (["--output", "a.jsonl", "-m", "run.seed=1,2"], ["-m", "no such option"]),
        (
            ["--output", "a.jsonl", "data.validation_path=b"],
            ["data.validation_path", "Use data.train_path"],
        ),
        (
            ["--output", "a.jsonl", "evaluation.functions={default: exact_match}"],
            ["evaluation.functions", "Use reward.functions"],
        ),
        (
            ["--output", "a.jsonl", "--ungraded", "reward.functions.default=gsm8k"],
            ["reward.functions.default", "--ungraded scores nothing"],
        ),
        (["--output", "a.jsonl", "--min-score", "nan"], ["--min-score", "a number"]),
        (["--output", "a.jsonl", "--n", "0"], ["--n", "Use at least 1"]),
        (["--output", "a.jsonl"], ["data.train_path", "there is no such file"]),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    arguments: list[str],
    words: list[str],
    inputs: Inputs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = [
        "--config-name",
        "grpo",
        f"model.path={inputs.model}",
        "data.train_path=no",
    ]
    assert main(["generate", *arguments, *usual]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert all(word in said for word in words)


def test_a_task_without_rollouts_generates_nothing(
    inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "--output", "a.jsonl", "--config-name", "sft"]
    data = f"data.train_path={inputs.train}"
    assert main([*command, f"model.path={inputs.model}", data]) == 2
    assert "this task generates no responses" in capsys.readouterr().err
