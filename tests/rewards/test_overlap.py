"""F1, ROUGE and BLEU with numbers that can be counted."""

from __future__ import annotations

import json
import math

import pytest

from verl_ray.errors import DataError
from verl_ray.rewards.functions import Bleu, Rouge, f1
from verl_ray.rewards.signatures import SignatureMistake

LONG = "the cat sat on the mat"


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("Paris", "paris.", 1.0),
        # cat, sat, on, mat and cat, sat: 2 shared of 4 and of 2.
        ("The cat sat on a mat!", "the cat sat", 2 * 2 / (4 + 2)),
        # A word counts as often as both have it.
        ("no no no", "no", 2 * 1 / (3 + 1)),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "an", 1.0),  # neither has a word
        ("theatre", "the atre", 0.0),
    ],
)
def test_f1(response: str, answer: str, score: float) -> None:
    assert f1(response, answer) == pytest.approx(score)


@pytest.mark.parametrize(
    ("kind", "score"),
    [
        # A common subsequence of 3 words, of 3 and of 6.
        ("rougeL", 2 * 1 * 0.5 / 1.5),
        ("rouge1", 2 * 1 * 0.5 / 1.5),
        # the cat, cat sat: 2 pairs, of 2 and of 5.
        ("rouge2", 2 * 1 * 0.4 / 1.4),
    ],
)
def test_rouge(kind: str, score: float) -> None:
    assert Rouge(kind)("the cat sat", LONG) == pytest.approx(score)
    assert Rouge(kind)("", LONG) == 0.0


def test_rouge_stems_words_when_asked() -> None:
    assert Rouge()("cats", "cat") == 0.0
    assert Rouge(stem=True)("cats", "cat") == 1.0


def test_bleu() -> None:
    bleu = Bleu()
    assert bleu(LONG, LONG) == 1.0
    # Every n-gram is one of the answer's; 5 of 6 words cost exp(1 - 6/5).
    assert bleu("the cat sat on the", LONG) == pytest.approx(math.exp(-0.2))
    # Two words have no longer n-grams.
    assert bleu("the cat", "the cat") == 1.0
    assert bleu("", LONG) == bleu("dogs", LONG) == 0.0


def test_the_best_of_several_answers_counts() -> None:
    answers = json.dumps(["a dog", LONG, 7])
    assert f1(LONG, answers) == Rouge()(LONG, answers) == Bleu()(LONG, answers) == 1.0
    assert f1("7", answers) == 1.0
    # A text that begins like a list is a text.
    assert f1("[1] is right", "[1] is right") == 1.0
    with pytest.raises(DataError, match="list of answers is empty"):
        f1("7", "[]")


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda: Rouge("rouge7"), "kind is 'rouge7', which is no kind"),
        (lambda: Rouge(stem="yes"), "stem is 'yes'"),
        (lambda: Bleu("flores200"), "tokenize is 'flores200', which is no tokenizer"),
    ],
)
def test_an_argument_of_no_meaning_is_refused(build, rule: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SignatureMistake) as mistake:
        build()
    assert rule in mistake.value.rule
