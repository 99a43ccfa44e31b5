"""GSM8K rows become records that a run can read; what is not GSM8K is refused before anything is written."""

import json
import subprocess
from pathlib import Path

import pytest

from verl_ray.data.files import read_prompts, read_supervised
from verl_ray.data.gsm8k import INSTRUCTION, convert, final_number
from verl_ray.data.prepare import main
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import DataError

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    rows = [
        {"question": "Ann has 2 pens and buys 3. How many?", "answer": "2+3=<<2+3=5>>5 pens.\n#### 5"},
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
        question = {"role": "user", "content": f"Ann has 2 pens and buys 3. How many?\n{INSTRUCTION}"}
        assert (first.prompt, first.answer, first.data_source) == ([question], "5", "gsm8k")
        assert second.answer == "81000"
        demonstration = read_supervised(path)[0].content
        assert demonstration == [question, {"role": "assistant", "content": "2+3=5 pens.\n#### 5"}]
    text = read_prompts(convert(copy, tmp_path / "text", "text").train.jsonl)[0].prompt
    assert text == f"Ann has 2 pens and buys 3. How many?\n{INSTRUCTION}\n"


@pytest.mark.parametrize(
    ("solution", "number"),
    [("#### 5", "5"), ("a\n#### -1,234", "-1234"), ("#### $3.50", "3.50"), ("#### 7.\n", "7"), ("#### 1 #### 2", "2")],
)
def test_final_number(solution: str, number: str) -> None:
    assert final_number(solution, "here") == number


@pytest.mark.parametrize("solution", ["the answer is 5", "#### ", "#### five"])
def test_no_final_number(solution: str) -> None:
    with pytest.raises(DataError, match=r"here: answer ends in .*, expected a line '#### NUMBER'"):
        final_number(solution, "here")


def test_refusals_write_nothing(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "test.jsonl").write_text('{"question": "?", "answers": "#### 5"}\n')
    assert main(["gsm8k", str(copy), str(tmp_path / "out")]) == 1
    assert (
        "test.jsonl, line 1: no field 'answer'; the fields found are 'question', 'answers'" in capsys.readouterr().err
    )
    (copy / "test.jsonl").unlink()
    assert main(["gsm8k", str(copy), str(tmp_path / "out")]) == 1
    assert "holds train.jsonl, expected train.jsonl and test.jsonl of GSM8K" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_with_a_model_a_run_can_start(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["gsm8k", str(copy), str(out), "--model", "--tokenizer-vocab", "280"]) == 0
    tokenizer = load_tokenizer(out / "model")
    assert len(tokenizer) == json.loads((out / "model" / "config.json").read_text())["vocab_size"] == 280
    assert tokenizer.chat_template
    assert (out / "model" / "model.safetensors").stat().st_size > 1_000_000
    assert f"model.path={out / 'model'}" in capsys.readouterr().out


def test_the_script_works_from_any_folder(copy: Path, tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "gsm8k", "copy", "out"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "train            2 problems  out/train.parquet" in done.stdout
    assert len(read_prompts(tmp_path / "out" / "validation.parquet")) == 2
