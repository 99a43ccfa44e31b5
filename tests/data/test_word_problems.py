"""Word problems: right ones are right, wrong ones are off by one, and the reward of
GSM8K reads both.
"""

import re
from pathlib import Path

from tests.data.reading import read_supervised
from verl_ray.data.arithmetic import (
    WORD_VOCABULARY,
    sample_texts,
    write_word_problems,
)
from verl_ray.data.encoding import encode
from verl_ray.data.records import read_prompts
from verl_ray.data.tokenizers import train_bpe
from verl_ray.rewards.functions import gsm8k


def test_the_records(tmp_path: Path) -> None:
    sizes = {"max_operand": 20, "num_train": 150, "num_validation": 30}
    files = write_word_problems(tmp_path, **sizes, seed=0, wrong_fraction=0.5)
    operands: list[set[frozenset[int]]] = []
    for part, count in ((files.train, 150), (files.validation, 30)):
        problems, shown = read_prompts(part.jsonl), read_supervised(part.jsonl)
        assert len(problems) == count
        pairs = set()
        scores = []
        for problem, demonstration in zip(problems, shown, strict=True):
            first, second = map(int, re.findall(r"\d+", str(problem.prompt)))
            takes_away = "gives away" in problem.prompt
            result = first - second if takes_away else first + second
            assert problem.answer == str(result)
            pairs.add(frozenset((result if takes_away else first, second)))

            response = str(demonstration.content[1])
            match = re.fullmatch(r"(\d+)([+-])(\d+)=(\d+)\n#### (\d+)", response)
            assert match is not None
            assert (int(match[1]), match[2], int(match[3])) == (
                first,
                "-" if takes_away else "+",
                second,
            )
            assert int(match[4]) - result in (0, 1) and match[4] == match[5]
            scores.append(gsm8k(response, problem.answer))
            assert scores[-1] == float(int(match[4]) == result)
        operands.append(pairs)
        if part is files.validation:
            assert scores == [1.0] * 30
        else:
            assert 50 < sum(scores) < 100
    assert not operands[0] & operands[1]


def test_a_word_and_a_digit_are_one_token(tmp_path: Path) -> None:
    tokenizer = train_bpe(
        tmp_path, sample_texts(), WORD_VOCABULARY, None, single_digits=True
    )
    assert len(tokenizer) == WORD_VOCABULARY
    # As many as there are words to learn, so none is in pieces.
    larger = train_bpe(tmp_path, sample_texts(), 2000, None, single_digits=True)
    assert len(larger) == WORD_VOCABULARY

    texts = ["Eva has 12 eggs.", "12+30=42\n#### 42"]
    rows = encode(tokenizer, texts, special=True, where=str)
    assert [len(rows[0]), len(rows[1])] == [7, 13]
    assert [tokenizer.decode(rows[row]) for row in range(2)] == texts
