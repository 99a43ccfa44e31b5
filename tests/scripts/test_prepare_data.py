"""GSM8K rows become records that a run can read; what is not GSM8K is refused before
anything is written.
"""

import json
import os
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from scripts.prepare_data import (
    INSTRUCTION,
    SOLUTIONS_FILE,
    PromptFormat,
    convert,
    convert_pairs,
    final_number,
    main,
)
from tests.data.reading import read_preferences, read_supervised
from verl_ray.data.records import read_prompts
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import DataError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data"
REAL = ROOT.parent / "shared" / "data" / "gsm8k"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    rows = [
        {
            "question": "Ann has 2 pens and buys 3. How many?",
            "answer": "2+3=<<2+3=5>>5 pens.\n#### 5",
        },
        {
            "question": "A car for $80,000 and $1,000 more?",
            "answer": "80,000+1,000=<<80000+1000=81000>>81,000\n#### 81,000",
        },
    ]
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_records(copy: Path, tmp_path: Path) -> None:
    files = convert(copy, tmp_path / "out")
    assert (files.num_train, files.num_validation) == (2, 2)
    for path in (files.train.jsonl, files.train.parquet, files.validation.folder):
        first, second = read_prompts(path)
        question = {
            "role": "user",
            "content": f"Ann has 2 pens and buys 3. How many?\n{INSTRUCTION}",
        }
        assert (first.prompt, first.answer, first.data_source) == (
            [question],
            "5",
            "gsm8k",
        )
        assert second.answer == "81000"
        demonstration = read_supervised(path)[0].content
        assert demonstration == [
            question,
            {"role": "assistant", "content": "2+3=5 pens.\n#### 5"},
        ]
    text = read_prompts(convert(copy, tmp_path / "text", "text").train.jsonl)[0].prompt
    assert text == f"Ann has 2 pens and buys 3. How many?\n{INSTRUCTION}\n"


@pytest.mark.parametrize(
    ("solution", "number"),
    [
        ("#### 5", "5"),
        ("a\n#### -1,234", "-1234"),
        ("#### $3.50", "3.50"),
        ("#### 7.\n", "7"),
        ("#### 1 #### 2", "2"),
    ],
)
def test_final_number(solution: str, number: str) -> None:
    assert final_number(solution, "here") == number


@pytest.mark.parametrize("solution", ["the answer is 5", "#### ", "#### five"])
def test_no_final_number(solution: str) -> None:
    with pytest.raises(
        DataError, match=r"here: answer ends in .*, expected a line '#### NUMBER'"
    ):
        final_number(solution, "here")


def test_refusals_write_nothing(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "test.jsonl").write_text('{"question": "?", "answers": "#### 5"}\n')
    assert main(["gsm8k", str(copy), str(tmp_path / "out")]) == 1
    assert (
        "test.jsonl, line 1: no field 'answer'; the fields found are 'question', 'answers'"
        in capsys.readouterr().err
    )
    (copy / "test.jsonl").unlink()
    assert main(["gsm8k", str(copy), str(tmp_path / "out")]) == 1
    assert (
        "holds train.jsonl, expected train.jsonl and test.jsonl of GSM8K"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_with_a_model_a_run_can_start(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert (
        main(["gsm8k", str(copy), str(out), "--model", "--tokenizer-vocab", "280"]) == 0
    )
    tokenizer = load_tokenizer(out / "model")
    assert (
        len(tokenizer)
        == json.loads((out / "model" / "config.json").read_text())["vocab_size"]
        == 280
    )
    assert tokenizer.chat_template
    assert (out / "model" / "model.safetensors").stat().st_size > 1_000_000
    assert f"model.path={out / 'model'}" in capsys.readouterr().out


@pytest.mark.processes
def test_the_script_works_from_any_folder(copy: Path, tmp_path: Path) -> None:
    # A package of that name is common, and not the one of the checkout.
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").touch()
    done = subprocess.run(
        [SCRIPT, "gsm8k", "copy", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        # The environment is that of this test.
        env={**os.environ, "VERL_RAY_SKIP_SETUP": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "train            2 problems  out/train.parquet" in done.stdout
    assert len(read_prompts(tmp_path / "out" / "validation.parquet")) == 2


@pytest.fixture
def solved(copy: Path) -> Path:
    """30 problems with solutions of two models, of which quick alone is right in 20,
    slow alone in 8, neither in 2.
    """
    lines = []
    for number in range(30):
        right = "quick" if number < 20 else "slow" if number < 28 else ""
        fields: dict[str, object] = {
            "question": f"{number} and 1?",
            "ground_truth": f"A: {number + 1}",
        }
        for model in ("quick", "slow"):
            found = number + (1 if model == right else 1000)
            solution = (
                f"{model}: {number}+1=<<{number}+1={found}>>{found}\nA: {found:,}"
            )
            fields[model] = {"is_correct": model == right, "solution": solution}
        lines.append(json.dumps(fields) + "\n")
    (copy / SOLUTIONS_FILE).write_text("".join(lines))
    return copy


def rewrite(solved: Path, number: int, model: str, **changes: object) -> None:
    """Other fields for what a model wrote to a problem."""
    lines = (solved / SOLUTIONS_FILE).read_text().splitlines()
    fields = json.loads(lines[number])
    fields[model] |= changes
    lines[number] = json.dumps(fields)
    (solved / SOLUTIONS_FILE).write_text("\n".join(lines) + "\n")


def test_pairs_of_solutions(solved: Path, tmp_path: Path) -> None:
    files = convert_pairs(
        solved, tmp_path / "out", "text", validation_fraction=0.5, seed=0
    )
    train, validation = (
        read_preferences(files.train.parquet),
        read_preferences(files.validation.folder),
    )
    assert (files.num_train, files.num_validation) == (len(train), len(validation))
    # The 8 of slow, and as many of quick; no problem gives two pairs, and none is in
    # both sets.
    records = {record.chosen[0]: record for record in train + validation}
    assert len(records) == len(train) + len(validation) == 16
    for part in (
        train,
        validation,
    ):  # whoever wrote a solution, it is right as often as wrong
        models = Counter(str(record.chosen[1]).partition(":")[0] for record in part)
        assert models["quick"] == models["slow"] > 0
    record = records[f"27 and 1?\n{INSTRUCTION}\n"]
    assert record.chosen[1] == "slow: 27+1=28\n#### 28"
    assert record.rejected == (record.chosen[0], "quick: 27+1=1027\n#### 1027")


def test_the_seed_decides_which_problems_are_held_out(
    solved: Path, tmp_path: Path
) -> None:
    def train(seed: int, prompt_format: PromptFormat = "text") -> list[Any]:
        files = convert_pairs(
            solved, tmp_path / "out", prompt_format, validation_fraction=0.5, seed=seed
        )
        return [record.chosen for record in read_preferences(files.train.jsonl)]

    assert train(0) == train(0) != train(1)
    (question, answer), *_ = train(0, "chat")
    assert (question["role"], answer["role"]) == ("user", "assistant")


def test_solutions_that_break_off_are_left_out(solved: Path, tmp_path: Path) -> None:
    for number, ending in enumerate(("", "\nA: five", " <<1+1=2\nA: 2"), start=20):
        rewrite(solved, number, "quick", solution=f"{number}+1={ending}")
    files = convert_pairs(
        solved, tmp_path / "out", "text", validation_fraction=0.5, seed=0
    )
    assert (
        files.num_train + files.num_validation == 10
    )  # 5 of slow are left, and as many of quick


def test_solutions_of_no_use_are_refused(solved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(
        DataError,
        match=r"found \d+ pairs for training and 0 held out, expected some of both",
    ):
        convert_pairs(solved, out, validation_fraction=0.0, seed=0)
    rewrite(solved, 4, "slow", is_correct=None)
    with pytest.raises(
        DataError, match=r"line 5, slow: is_correct is None, expected true or false"
    ):
        convert_pairs(solved, out, validation_fraction=0.5, seed=0)
    rewrite(solved, 3, "quick", solution=7)
    with pytest.raises(
        DataError, match=r"line 4, quick: solution is int '7', expected text"
    ):
        convert_pairs(solved, out, validation_fraction=0.5, seed=0)
    (solved / SOLUTIONS_FILE).unlink()
    with pytest.raises(
        DataError,
        match=rf"holds test\.jsonl, train\.jsonl, expected {SOLUTIONS_FILE} of GSM8K",
    ):
        convert_pairs(solved, out, validation_fraction=0.5, seed=0)
    assert not out.exists()


def test_pairs_of_the_real_solutions(solved: Path, tmp_path: Path) -> None:
    source = REAL if REAL.is_dir() else solved
    wrote: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for line in (source / SOLUTIONS_FILE).read_text().splitlines():
        fields = json.loads(line)
        for model, value in fields.items():
            if isinstance(value, dict):
                steps = re.sub("<<[^<>]*>>", "", value["solution"]).rpartition("\nA:")[
                    0
                ]
                wrote[fields["question"], steps].add(model)
    files = convert_pairs(
        source, tmp_path / "out", "text", validation_fraction=0.2, seed=0
    )
    questions = []
    for part in (files.train, files.validation):
        who: Counter[tuple[str, str]] = Counter()
        asked, doubtful = set(), 0
        for record in read_preferences(part.parquet):
            question = str(record.chosen[0]).removesuffix(f"\n{INSTRUCTION}\n")
            asked.add(question)
            sides = []
            for side in (str(record.chosen[1]), str(record.rejected[1])):
                steps, number = side.split("\n#### ")
                assert "<<" not in side and re.fullmatch(r"-?\d+(\.\d+)?", number)
                models = wrote[question, steps]
                doubtful += len(models) > 1  # two models wrote the same: a few do
                sides.append(min(models))
            who[sides[0], sides[1]] += 1
        assert all(
            abs(who[a, b] - who[b, a]) <= doubtful < 0.05 * who.total() for a, b in who
        )
        questions.append(asked)
    assert not questions[0] & questions[1]
    assert files.num_train > 2 * files.num_validation > 0


def test_prepare_pairs(
    solved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["gsm8k", str(solved), str(out), "--pairs"]) == 0
    shown = capsys.readouterr().out
    assert "--config-name gsm8k model.path=PATH_OF_A_MODEL" in shown
    assert (
        f"--config-name reward_model model.path=PATH_OF_A_MODEL data.train_path={out}/pairs/train.parquet"
        in shown
    )
    assert (
        f"{len(read_preferences(out / 'pairs' / 'validation'))} pairs     {out}/pairs/validation.parquet"
        in shown
    )
    assert len(read_prompts(out / "train.jsonl")) == 2
    (solved / SOLUTIONS_FILE).unlink()
    assert main(["gsm8k", str(solved), str(out), "--pairs"]) == 1
    assert f"expected {SOLUTIONS_FILE} of GSM8K" in capsys.readouterr().err
