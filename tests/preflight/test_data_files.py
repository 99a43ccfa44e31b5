"""Data files and reward functions as `check` sees them, with a real tokenizer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controllers.commands.check_data import print_readings
from scripts.configuration import compose
from tests.preflight.configs import settled
from verl_ray.config.schema import Config
from verl_ray.data.tokenizers import train_bpe
from verl_ray.errors import DataError, Problem, file_problem
from verl_ray.preflight import data_files, reward_trial, timed_scores
from verl_ray.preflight.data_files import DataFile, examine_data
from verl_ray.preflight.reward_trial import TrialFindings, try_rewards
from verl_ray.preflight.tokenizer_trial import tried_tokenizer

GOOD = [{"prompt": f"{i} + {i} = ", "answer": str(2 * i)} for i in range(40)]
ARGUMENTS = "(response, answer, *, prompt, data_source, extra)"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(folder, ["0 + 1 = 1"], vocab_size=259)
    return folder


def config_of(tokenizer: Path, records: Path, *overrides: str) -> Config:
    own = [
        f"model.path={tokenizer}",
        f"data.train_path={records}",
        "data.validation_path=null",
        "run.evaluate_every=0",
    ]
    return settled(compose("grpo", [*own, *overrides]))


def write(folder: Path, records: Sequence[object]) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_rows_are_what_the_run_would_read(tokenizer: Path, tmp_path: Path) -> None:
    config = config_of(tokenizer, write(tmp_path, GOOD))
    findings = examine_data(config)
    (file,) = findings.files
    assert (findings.problems, findings.warnings) == ([], [])
    assert (file.num_examples, file.is_whole, file.skipped) == (40, True, 0)
    text = "<|im_start|>user\n0 + 0 = <|im_end|>\n<|im_start|>assistant\n"
    assert file.examples[0] == text
    # Every byte is a token, and so is each of the three special tokens.
    rest = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert file.lengths[0] == len(rest) + 3
    assert np.array_equal(
        file.lengths, [file.lengths[0]] * 10 + [file.lengths[0] + 2] * 30
    )


def test_of_a_large_file_the_beginning_is_read(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, [*GOOD, {"prompt": "no answer"}])
    monkeypatch.setattr(data_files, "WHOLE_BYTES", 100)
    monkeypatch.setattr(data_files, "SAMPLE_RECORDS", 40)
    (file,) = examine_data(config_of(tokenizer, path)).files
    assert (file.num_examples, file.is_whole) == (40, False)


def test_how_a_set_was_read_is_said(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"question": "1 + 1 = ", "answer": "two", "n": 2}] * 40
    path = write(tmp_path, records).with_name("rec*.jsonl")
    named = "data.columns={answer: n}"
    (file,) = examine_data(config_of(tokenizer, path, named)).files
    assert file.prompts is not None and file.prompts.answer.texts() == ["2"] * 40
    (recognised,) = examine_data(config_of(tokenizer, path)).files
    (own,) = examine_data(config_of(tokenizer, write(tmp_path, GOOD))).files
    (large,) = examine_data(
        config_of(tokenizer, path.with_name("records.jsonl"), "data.stream_above_gib=0")
    ).files
    print_readings([file, recognised, own, large], sys.stdout)
    assert capsys.readouterr().out.splitlines() == [
        "data.train_path read as data.columns: prompt from question, answer from n",
        "data.train_path read as columns question, answer",
        "data.train_path is streamed from disk (see data.stream_above_gib): records"
        " that cannot be used are passed over",
    ]


def test_responses_with_labels_are_read_and_held_out_pairs_as_pairs(
    tokenizer: Path, tmp_path: Path
) -> None:
    """Of a large set sorted by its labels, the beginning has one label alone."""
    sums = [{"prompt": f"{i} + {i} = ", "completion": str(i)} for i in range(40)]
    path = write(tmp_path, [{**one, "label": i >= 30} for i, one in enumerate(sums)])
    pairs = tmp_path / "pairs.jsonl"
    pair = {"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"}
    pairs.write_text(json.dumps(pair) + "\n")
    config = settled(
        compose(
            "dpo",
            [
                f"model.path={tokenizer}",
                f"data.train_path={path}",
                f"data.validation_path={pairs}",
                "preference.loss=kto",
            ],
        )
    )
    train, held_out = examine_data(config).files
    assert (train.num_examples, len(train.lengths)) == (40, 40)
    assert (held_out.num_examples, len(held_out.lengths)) == (1, 2)
    assert held_out.read_as == ("verl_ray's schema",)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_files, "WHOLE_BYTES", 100)
        patch.setattr(data_files, "SAMPLE_RECORDS", 20)
        train, _ = examine_data(config).files
    assert (train.num_examples, train.is_whole) == (20, False)


def test_a_step_that_is_larger_than_the_data_is_a_warning(
    tokenizer: Path, tmp_path: Path
) -> None:
    config = config_of(tokenizer, write(tmp_path, GOOD[:3]))
    (warning,) = examine_data(config).warnings
    assert warning.startswith("data.train_path has 3 examples and a step takes 32")


def problem(tokenizer: Path, path: Path, *overrides: str) -> Problem:
    (problem,) = examine_data(config_of(tokenizer, path, *overrides)).problems
    assert (problem.key, problem.value) == ("data.train_path", str(path))
    return problem


@pytest.mark.parametrize(
    ("records", "override", "rule", "fix"),
    [
        ([], "", "holds no records", "Expected at least one prompt."),
        ([GOOD[0], {"prompt": "a"}], "", "line 2: no field 'answer'", ""),
        (
            [{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}],
            "data.apply_chat_template=false",
            "line 1: found chat messages, but no chat template is applied",
            "Expected plain text",
        ),
    ],
)
def test_what_the_run_would_refuse(
    tokenizer: Path,
    tmp_path: Path,
    records: list[object],
    override: str,
    rule: str,
    fix: str,
) -> None:
    path = write(tmp_path, records)
    found = problem(tokenizer, path, *[override] * bool(override))
    assert found.rule.startswith(rule)
    assert found.fix.startswith(fix)


def test_one_limit_serves_both_files(tokenizer: Path, tmp_path: Path) -> None:
    train = write(tmp_path, GOOD)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "a" * 60, "answer": ""}) + "\n")
    config = config_of(
        tokenizer,
        train,
        f"data.validation_path={held_out}",
        "run.evaluate_every=1",
        "data.max_prompt_tokens=4",
    )
    (found,) = examine_data(config).problems
    assert (found.key, found.value) == ("data.max_prompt_tokens", 4)
    assert found.rule.startswith("1 of 1 rows are longer than data.max_prompt_tokens")
    longest = re.search(r"the longest has (\d+) tokens", found.rule)
    assert longest is not None and str(held_out) in found.rule
    skip = ", or set data.overlong=skip to leave them out."
    assert found.fix == f"Set data.max_prompt_tokens={longest[1]}{skip}"


def test_files_that_make_a_run_measure_nothing_are_a_warning(
    tokenizer: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, GOOD[:32])
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    config = config_of(
        tokenizer, path, f"data.validation_path={link}", "run.evaluate_every=1"
    )
    whole_epoch, same_file = examine_data(config).warnings
    assert "as many as a step takes, so every step is a whole epoch" in whole_epoch
    assert same_file.startswith(
        "data.train_path and data.validation_path name the same file"
    )
    # A single evaluation learns nothing from the other file.
    assert examine_data(config, evaluates=True).warnings == []


def test_an_evaluation_reads_its_file_once(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path, [{"sum": "no prompt"}])
    config = config_of(tokenizer, path, f"data.validation_path={path}")
    (found,) = examine_data(config, evaluates=True).problems
    assert found.key == "data.validation_path"


def test_files_that_are_not_what_their_names_say(
    tokenizer: Path, tmp_path: Path
) -> None:
    parquet = tmp_path / "a.parquet"
    parquet.write_text("hello")
    assert "cannot be read as Parquet" in problem(tokenizer, parquet).rule
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"prompt": \n')
    assert problem(tokenizer, lines).rule.startswith("line 1: not JSON")


def test_an_error_becomes_a_problem_by_its_parts() -> None:
    error = DataError("found 3", expected="text", place="/a.jsonl, line 2")
    found = file_problem("data.train_path", "/a.jsonl", error)
    assert found.rule == "line 2: found 3"
    assert found.fix == "Expected text."
    error = DataError("does not exist", fix="set it", subject="/a.jsonl")
    found = file_problem("data.train_path", "/a.jsonl", error)
    assert (found.rule, found.fix) == ("does not exist", "Set it.")
    # The words of a library are no fix of ours, and neither are parts of a name.
    error = DataError("broken (3, expected f(); use it)", place="/a (b; use c).jsonl")
    found = file_problem("data.train_path", "/a.jsonl", error)
    assert found.rule == str(error)
    assert found.fix == "Correct it there, or name another one."


# -------------------------------------------------------------------- reward functions


def trial(tokenizer: Path, folder: Path, body: str, *overrides: str) -> TrialFindings:
    script = folder / "own.py"
    script.write_text(body)
    config = config_of(
        tokenizer,
        write(folder, GOOD),
        f"reward.functions={{default: {script}:f}}",
        *overrides,
    )
    return try_rewards(config, examine_data(config).files)


@pytest.mark.processes
def test_a_function_scores_an_own_answer_and_an_empty_one(
    tokenizer: Path, tmp_path: Path
) -> None:
    body = f"def f{ARGUMENTS}: return 0.5 * (response == answer)\n"
    findings = trial(tokenizer, tmp_path, body)
    (tried,) = findings.trials
    assert (tried.own.value, tried.empty.value) == (0.5, 0.0)
    assert (tried.data_source, findings.problems, findings.warnings) == (
        "records",
        [],
        [],
    )

    same = trial(tokenizer, tmp_path, f"def f{ARGUMENTS}: return 1\n")
    assert "and an empty response the same score, 1" in same.warnings[0]


def without_answers(config: Config) -> list[DataFile]:
    """The data files of a run, as if their records had no answers."""
    files = []
    for file in examine_data(config).files:
        assert file.prompts is not None
        has_answer = np.zeros(file.prompts.num_rows, bool)
        files.append(replace(file, prompts=file.prompts.replace(has_answer=has_answer)))
    return files


@pytest.mark.processes
def test_records_without_answers_are_tried_with_their_prompts(
    tokenizer: Path, tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "def f(response, num_tokens, answer=None): return num_tokens\n"
        "def compared(solution_str, ground_truth): return 1.0\n"
        "def batched(completions, trainer_state, **columns):\n"
        "    return [len(completions) + trainer_state.global_step] * len(completions)\n"
    )
    path = write(tmp_path, GOOD)

    def tried(spec: str) -> TrialFindings:
        config = config_of(tokenizer, path, f"reward.functions={{default: {spec}}}")
        return try_rewards(config, without_answers(config))

    # The end token counts, so the empty response has one token.
    (found,) = tried(f"{script}:f").trials
    (length,) = tried_tokenizer(config_of(tokenizer, path))(
        [GOOD[0]["prompt"]], add_special_tokens=False, return_length=True
    )["length"]
    assert (found.own.value, found.empty.value) == (length + 1, 1.0)
    assert not found.has_answer
    # A batched function gets both responses in one call.
    findings = tried(f"{script}:batched")
    (found,) = findings.trials
    assert (found.own.value, found.empty.value) == (3.0, 3.0)
    assert (findings.problems, findings.warnings) == ([], [])

    (problem,) = tried(f"{script}:compared").problems
    assert problem.rule.endswith("but the function has a parameter 'ground_truth'")
    assert "fails on a record's own prompt of data source" in problem.rule
    assert problem.fix.startswith("Set data.columns={answer: NAME} to the column of")
    (problem,) = tried("exact_match").problems
    assert problem.rule == "record 1 has no answer, which exact_match compares with"
    assert problem.key == "data.train_path"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("import nowhere_at_all", "No module named 'nowhere_at_all' ("),
        ("def f(response, scale): return 1.0", "parameter 'scale' has no default"),
        (f"def f{ARGUMENTS}: return 'good'", "returned str 'good'"),
        (f"def f{ARGUMENTS}: return float('nan')", "the function returned nan"),
        (
            f"def f{ARGUMENTS}: return 1 / len(response)",
            "empty response of data source",
        ),
        (f"import os\ndef f{ARGUMENTS}: os._exit(3)", "exited with status 3"),
        (f"import time\ndef f{ARGUMENTS}: time.sleep(60)", "no score within 1 s"),
    ],
)
def test_a_function_that_fails_is_a_problem_of_few_lines(
    tokenizer: Path,
    tmp_path: Path,
    body: str,
    rule: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = f"f = None\n{body}\n"
    (found,) = trial(tokenizer, tmp_path, text, "reward.deadline_s=1").problems
    assert found.key == "reward.functions.default"
    assert rule in found.rule and "\n" not in found.rule
    # It is told once, and a fix about numbers is no fix for a process that ends.
    assert capfd.readouterr().err == ""
    assert ("may not end its process" in found.fix) == ("_exit" in body)
    # The user's code ran in a process of its own.
    assert str(tmp_path / "own.py") not in sys.modules


def of_sources(folder: Path, count: int) -> Path:
    return write(
        folder,
        [GOOD[0] | {"data_source": f"s{number:02}"} for number in range(count)],
    )


@pytest.mark.processes
def test_every_data_source_is_tried_and_a_failure_is_told_once(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        f"def f{ARGUMENTS}: return 1 / (data_source < 's30')\n"
        f"def g{ARGUMENTS}: return 1\n"
    )
    functions = f"default: {script}:f, s00: {script}:g, s39: {script}:g"
    config = config_of(
        tokenizer, of_sources(tmp_path, 40), f"reward.functions={{{functions}}}"
    )
    files = examine_data(config).files
    announced: list[str] = []
    blocking = reward_trial.blocking

    def announce(text: str) -> AbstractContextManager[None]:
        announced.append(text)
        return blocking(text)

    monkeypatch.setattr(reward_trial, "blocking", announce)
    findings = try_rewards(config, files)
    assert announced == ["trying reward.functions on the records"]
    (found,) = findings.problems
    assert (found.key, found.value) == ("reward.functions.default", f"{script}:f")
    assert "it fails on a record's own answer of data source 's3" in found.rule
    g, f, g_again = findings.warnings
    assert "a record of 's00' and an empty" in g and "of 's39' and" in g_again
    assert " and 28 more and an empty response the same score, 1" in f

    # Nothing is tried after the deadline but the first sources, and a line says so.
    monkeypatch.setattr(reward_trial, "LONGEST_S", 0.0)
    late = try_rewards(config, files)
    assert len(late.trials) == timed_scores.PROCESSES and not late.problems
    assert "was tried on 4 of 40 data sources, within 0 s" in late.warnings[-1]


def test_a_data_source_without_a_function_is_a_problem(
    tokenizer: Path, tmp_path: Path
) -> None:
    config = config_of(
        tokenizer,
        of_sources(tmp_path, 3),
        "reward.functions.s00=exact_match",
        "~reward.functions.default",
    )
    (found,) = try_rewards(config, examine_data(config).files).problems
    assert found.rule == "there is no function for data source 's01' and 1 more"
    assert found.fix.startswith("Set reward.functions.s01, or reward.functions.default")


@pytest.mark.processes
def test_a_grader_is_tried_on_the_problems_that_it_scores(
    tokenizer: Path, tmp_path: Path
) -> None:
    train = write(tmp_path, [{"prompt": "a", "answer": "none"}])
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(GOOD[0]) + "\n")
    config = config_of(
        tokenizer,
        train,
        f"data.validation_path={held_out}",
        "run.evaluate_every=1",
        "reward=http",
        "reward.url=http://127.0.0.1:9/",
        "evaluation.functions={default: gsm8k}",
    )
    findings = try_rewards(config, examine_data(config).files)
    assert (findings.problems, len(findings.trials)) == ([], 1)
    # The other way round: the records to learn from are the reward's.
    config = config_of(
        tokenizer,
        train,
        f"data.validation_path={held_out}",
        "run.evaluate_every=1",
        "reward.functions={default: gsm8k}",
    )
    (found,) = try_rewards(config, examine_data(config).files).problems
    assert found.key == "data.train_path"
    # A single evaluation only scores held-out problems.
    files = examine_data(config, evaluates=True).files
    assert not try_rewards(config, files, evaluates=True).problems


def test_every_answer_is_tried_on_a_built_in_function(
    tokenizer: Path, tmp_path: Path
) -> None:
    records = [*GOOD, {"prompt": "a", "answer": "none"}]
    config = config_of(
        tokenizer, write(tmp_path, records), "reward.functions={default: gsm8k}"
    )
    (found,) = try_rewards(config, examine_data(config).files).problems
    assert found.key == "data.train_path"
    assert found.rule.startswith("record 41 of data source 'records' cannot be graded")

    # As it stands, the function follows from the data source.
    with_gsm8k = [
        *records,
        {"prompt": "a", "answer": "x", "data_source": "openai/gsm8k"},
    ]
    config = config_of(tokenizer, write(tmp_path, with_gsm8k))
    (found,) = try_rewards(config, examine_data(config).files).problems
    assert found.rule.startswith("record 42 of data source 'openai/gsm8k' cannot be")
