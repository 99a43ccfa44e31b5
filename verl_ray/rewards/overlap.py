"""Reward functions that measure how much a response has in common with an answer: F1,
ROUGE and BLEU.

Invariant: a score is from 0 to 1, and a mean of scores is no accuracy. Of several
answers to a record (a list, which is a text in JSON) F1 and ROUGE take the one that
fits best; for BLEU they are its references. Deliberately not here: splitting texts into
tokens for a model.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter

from verl_ray.config.suggest import either
from verl_ray.errors import DataError
from verl_ray.rewards.signatures import SignatureMistake

ROUGE_KINDS = ("rougeL", "rougeLsum", "rouge1", "rouge2")
BLEU_TOKENIZERS = ("13a", "intl", "char", "zh", "none")
"""Those of sacrebleu that need no other package and no download."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(response: str, answer: str) -> float:
    """Return the F1 score of the words that a response shares with an answer.

    This is the measure of SQuAD (arXiv:1606.05250, section 6.1): words are lower case,
    without punctuation and articles, and count as often as they occur in both texts.
    If one of the texts has no words, it is 1.0 when neither has, else 0.0.

    Raises:
        DataError: The record's list of answers is empty.
    """
    words = _words(response)
    return max(_f1_of(words, _words(text)) for text in answers_of(answer))


def _f1_of(words: Counter[str], expected: Counter[str]) -> float:
    if not words or not expected:
        return float(words == expected)
    shared = (words & expected).total()
    # The harmonic mean of shared / words and shared / expected.
    return 2 * shared / (words.total() + expected.total())


def _words(text: str) -> Counter[str]:
    plain = text.lower().translate(_PUNCTUATION)
    return Counter(_ARTICLES.sub(" ", plain).split())


class Rouge:
    """ROUGE (Lin 2004, aclanthology.org/W04-1013), as rouge-score computes it."""

    def __init__(self, kind: str = "rougeL", stem: bool = False) -> None:
        """Import rouge-score.

        Args:
            kind: rougeL (the longest common subsequence), rougeLsum (that of each
                line), rouge1 (words) or rouge2 (pairs of words).
            stem: Whether Porter's stemmer is applied to words.

        Raises:
            SignatureMistake: There is no such kind.
            ImportError: rouge-score is not installed.
        """
        if kind not in ROUGE_KINDS:
            rule = f"its argument kind is {kind!r}, which is no kind of ROUGE"
            raise SignatureMistake(rule, f"Use {either(ROUGE_KINDS)}.")
        if not isinstance(stem, bool):
            rule = f"its argument stem is {stem!r}"
            raise SignatureMistake(rule, "Use true or false.")
        from rouge_score.rouge_scorer import RougeScorer

        self._kind = kind
        self._scorer = RougeScorer([kind], use_stemmer=stem)

    def __call__(self, response: str, answer: str) -> float:
        """Return the F measure of the response, with the answer that fits best.

        Raises:
            DataError: The record's list of answers is empty.
        """
        scores = self._scorer.score_multi(answers_of(answer), response)
        return float(scores[self._kind].fmeasure)


class Bleu:
    """BLEU of a sentence (Papineni et al. 2002), as sacrebleu computes it."""

    def __init__(self, tokenize: str = "13a") -> None:
        """Import sacrebleu.

        Args:
            tokenize: How sacrebleu splits texts, one of `BLEU_TOKENIZERS`.

        Raises:
            SignatureMistake: There is no such tokenizer.
            ImportError: sacrebleu is not installed.
        """
        if tokenize not in BLEU_TOKENIZERS:
            rule = f"its argument tokenize is {tokenize!r}, which is no tokenizer"
            raise SignatureMistake(rule, f"Use {either(BLEU_TOKENIZERS)}.")
        from sacrebleu.metrics.bleu import BLEU

        # Without 4 words there are no 4-grams, so fewer are counted.
        self._bleu = BLEU(tokenize=tokenize, effective_order=True)

    def __call__(self, response: str, answer: str) -> float:
        """Return the BLEU score of the response, smoothed exponentially, from 0 to 1.

        Raises:
            DataError: The record's list of answers is empty.
        """
        score = self._bleu.sentence_score(response, answers_of(answer)).score
        # It may be 100.00000000000004.
        return min(1.0, float(score) / 100)


def answers_of(answer: str) -> list[str]:
    """Return the answers of a record: those of a list in JSON, or the text itself.

    Raises:
        DataError: The list is empty.
    """
    try:
        several = json.loads(answer) if answer.startswith("[") else None
    except ValueError:
        several = None
    if not isinstance(several, list):
        return [answer]
    if not several:
        raise DataError("the list of answers is empty, so there is nothing to compare")
    return [text if isinstance(text, str) else json.dumps(text) for text in several]
