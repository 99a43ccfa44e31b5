"""Built-in reward functions, all but `math`; `built_in.py` is the list of them.

Those that compare the text, the number or the letter of two answers return 1.0 or 0.0,
by fixed rules that do not depend on the data set, so the mean of their scores is an
accuracy. They need the record's answer.

F1, ROUGE and BLEU measure how much a response has in common with an answer, from 0 to
1. Of several answers to a record (a list, which is a text in JSON) F1 and ROUGE take
the one that fits best; for BLEU they are its references.

`format` and `json_schema` judge the form of a response by 1.0 or 0.0. They say nothing
about whether it is right, and are usually one of several in `reward=mixed`.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.errors import DataError
from verl_ray.rewards.signatures import SignatureMistake
from verl_ray.suggest import either

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


def exact_match(response: str, answer: str) -> float:
    """Return 1.0 when the texts are equal but for the white space around them."""
    return float(response.strip() == answer.strip())


def gsm8k(response: str, answer: str) -> float:
    """Return 1.0 when the final numbers of the texts are equal, see `final_number`.

    They are compared as numbers: "1,234.50" and "1234.5" are equal. A response without
    a number scores 0.0.

    Raises:
        DataError: the answer has no number.
    """
    return float(final_number(response) == _expected_number(answer, "gsm8k"))


def gsm8k_strict(response: str, answer: str) -> float:
    """Return 1.0 when the number that a response marks is the answer's: `#### 42`.

    So a response is also taught the form of GSM8K's answers, see `marked_number`. It is
    verl's default for GSM8K, with one deviation: numbers are compared, not their texts,
    so that `#### 42.00` and, at the end of a sentence, `#### 42.` are right, too.

    Raises:
        DataError: the answer has no number.
    """
    expected = _expected_number(answer, "gsm8k_strict")
    return float(marked_number(response) == expected)


def _expected_number(answer: str, function: str) -> Decimal:
    expected = final_number(answer)
    if expected is None:
        rule = f"answer {answer[-80:]!r} has no number, so {function} cannot grade"
        raise DataError(rule)
    return expected


_CHOICE = re.compile(
    r"(?:\\boxed\{\s*(?:\\text\{)?|(?i:answer)\s*(?:is|:)\s*\**)\s*[(\[]?([A-Z])\b"
)
_LETTER = re.compile(r"[(\[]?([A-Z])(?:[)\].:](?:\s.*)?)?", re.DOTALL)


def multiple_choice(response: str, answer: str) -> float:
    """Return 1.0 when the response chooses the letter of the answer.

    The choice is the capital letter of the last `\\boxed{C}`, "answer is (C)" or
    "answer: C"; else a response of nothing but a capital letter, in brackets or not. A
    response without a choice scores 0.0. The answer is "C", or "C" with what it stands
    for: "C. Paris", "(C) Paris".

    Raises:
        DataError: the answer does not begin with a letter that stands alone.
    """
    expected = _LETTER.fullmatch(answer.strip())
    if expected is None:
        raise DataError(
            f"answer {answer[:80]!r} is no choice such as C or (C), so multiple_choice"
            " cannot grade"
        )

    return float(chosen_letter(response) == expected[1])


def chosen_letter(response: str) -> str | None:
    """Return the letter that a response chooses, see `multiple_choice`, or None."""
    choices: list[str] = _CHOICE.findall(response)
    if choices:
        return choices[-1]
    alone = response.strip().strip("()[].:* ")
    return alone if re.fullmatch("[A-Z]", alone) else None


_NUMBER = re.compile(
    # A minus sign; not the operator in `7-3` or `7 - 3`, nor the hyphen in `mid-30`.
    r"(?P<sign>(?<![\w)])-(?!\s))?"
    r"[$€£]?\s?(?P<late_sign>(?<=[$€£])-)?"  # -$5 and $-5
    # 1,234,567 or 1234567 or .5
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))"
    r"(?P<fraction>\.[0-9]+)?"
)


def final_number(text: str) -> Decimal | None:
    """Return the number behind the last `####`, else the last number of `text`.

    Currency and percent signs, commas between groups of three digits, and a full stop
    at the end are not part of a number; exponents and fractions (`3/4`) are not read as
    one number. A text without a number has None.
    """
    text = _plain(text)
    _, mark, tail = text.rpartition("####")

    match = _NUMBER.search(tail) if mark else None
    if match is None:
        matches = list(_NUMBER.finditer(text))
        if not matches:
            return None
        match = matches[-1]

    # ".5" has no digits before the point
    digits = match["digits"].replace(",", "") or "0"
    fraction = match["fraction"] or ""
    number = Decimal(digits + fraction)
    if match["sign"] or match["late_sign"]:
        return -number
    return number


_MARKED = re.compile(r"#### (-?[0-9.,]+)")


def marked_number(text: str) -> Decimal | None:
    """Return the last number right behind `####` and one space; None without one.

    Between the mark and the number is no word and no sign but a minus. Commas are left
    out wherever they stand. The whole text is searched: earlier versions of verl read
    the last 300 characters only.
    """
    marked = _MARKED.findall(text)
    if not marked:
        return None
    try:
        return Decimal(marked[-1].replace(",", ""))
    # Such as 1.2.3.
    except InvalidOperation:
        return None


def number_text(response: str) -> str | None:
    """Return the final number of a response in one spelling: 1,234.50 is 1234.5."""
    number = final_number(response)
    if number is None:
        return None
    return _spelled(number)


def marked_or_final_number_text(response: str) -> str | None:
    """Return the number that a response marks, see `marked_number`, in one spelling.

    In a response without one it is the final number.
    """
    number = marked_number(response)
    return number_text(response) if number is None else _spelled(number)


def _spelled(number: Decimal) -> str:
    text = f"{number:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _plain(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


# ---------------------------------------------------------------------- words in common


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


# --------------------------------------------------------------------------------- form


_TAG = re.compile(r"[A-Za-z][\w-]*")
_FENCE = re.compile(r"^```(?:json)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


class Format:
    """Whether a response has a form, given by a pattern or by tags."""

    def __init__(
        self,
        pattern: str | None = None,
        tags: Sequence[str] | None = None,
        first_tag_in_prompt: bool = False,
    ) -> None:
        """Take the form.

        Args:
            pattern: A regular expression that matches the whole response, where a dot
                stands for a line break, too.
            tags: Names of elements, such as think and answer: the response is
                `<think>...</think><answer>...</answer>`, with some text in each, each
                tag once, and nothing but white space around them.
            first_tag_in_prompt: Whether the prompt ends with the first tag, as chat
                templates of reasoning models do, so that no response has it.

        Raises:
            SignatureMistake: The arguments give no form, or two.
        """
        if (pattern is None) == (tags is None):
            rule = "it takes a pattern or tags, one of the two"
            raise SignatureMistake(rule, "Give tags: [think, answer], or a pattern.")
        if not isinstance(first_tag_in_prompt, bool):
            rule = f"its argument first_tag_in_prompt is {first_tag_in_prompt!r}"
            raise SignatureMistake(rule, "Use true or false.")

        if tags is not None:
            pattern = _pattern_of(tags, first_tag_in_prompt)
        elif first_tag_in_prompt:
            rule = "its argument first_tag_in_prompt has no effect on a pattern"
            raise SignatureMistake(rule, "Leave it out, or give tags.")
        try:
            self._pattern = re.compile(pattern or "", re.DOTALL)
        except (re.error, TypeError) as error:
            rule = f"its pattern is no regular expression: {error}"
            raise SignatureMistake(rule, "Correct it.") from error

    def __call__(self, response: str) -> float:
        """Return 1.0 when the response, but for white space around it, has the form."""
        return float(self._pattern.fullmatch(response.strip()) is not None)


def _pattern_of(tags: Sequence[str], first_tag_in_prompt: bool) -> str:
    """Return the pattern of elements one after the other."""
    is_list = isinstance(tags, list | tuple) and len(tags) > 0
    names = tags if is_list else ()
    if not names or not all(_TAG.fullmatch(str(name)) for name in names):
        rule = f"its argument tags is {tags!r}"
        raise SignatureMistake(rule, "Give a list of names, such as [think, answer].")
    if len(set(names)) < len(names):
        rule = f"its argument tags has a name twice: {', '.join(names)}"
        raise SignatureMistake(rule, "Give each tag once.")

    # No tag of the list stands inside of an element, nor is one blank.
    text = f"(?:(?!</?(?:{'|'.join(names)})>).)*"
    elements = [rf"<{name}>(?!\s*</{name}>){text}</{name}>" for name in names]
    pattern = r"\s*".join(elements)
    return pattern.removeprefix(f"<{names[0]}>") if first_tag_in_prompt else pattern


class JsonSchema:
    """Whether a response is JSON that is valid under a schema."""

    def __init__(self, schema: object = None, schema_path: str | None = None) -> None:
        """Take the schema; without one, the answer of each record is its schema.

        Args:
            schema: A JSON schema (json-schema.org) of any draft; 2020-12 unless its
                `$schema` names another. What its references name is in it.
            schema_path: The file that holds it.

        Raises:
            SignatureMistake: The file cannot be read, or there is no valid schema.
        """
        if schema is not None and schema_path is not None:
            rule = "it takes a schema or a schema_path, one of the two"
            raise SignatureMistake(rule, "Leave one out.")
        source = "schema"
        if schema_path is not None:
            source = "schema_path"
            schema = _read_schema(schema_path)

        self._validator = None
        if schema is not None:
            try:
                self._validator = _validator_of(schema)
            except _NoSchema as error:
                rule = f"its argument {source} is no JSON schema: {error}"
                raise SignatureMistake(rule, "Correct the schema.") from error
        # The responses to a prompt share their schema.
        self._cached_validator = functools.lru_cache(maxsize=256)(_validator_of_answer)

    def __call__(self, response: str, answer: str | None = None) -> float:
        """Return 1.0 when the response is valid.

        The JSON is the whole response, or else the last fenced block of it (```json).
        Without any the score is 0.0. NaN and Infinity are no JSON.

        Raises:
            DataError: The schema is the record's answer, which is none.
        """
        validator = self._validator or self._cached_validator(answer)
        fenced = _FENCE.findall(response)
        for text in (response, *fenced[-1:]):
            try:
                value = _json_of(text)
            # So deep that it cannot be read.
            except (ValueError, RecursionError):
                continue
            return float(validator.is_valid(value))
        return 0.0


def _read_schema(path: object) -> object:
    fix = "Give the path of a file with a JSON schema."
    if not isinstance(path, str):
        raise SignatureMistake(f"its argument schema_path is {path!r}", fix)
    try:
        return _json_of(Path(path).read_text("utf-8"))
    except OSError as error:
        rule = f"its schema cannot be read: {error.strerror} ({path})"
        raise SignatureMistake(rule, fix) from error
    except ValueError as error:
        raise SignatureMistake(f"{path} is no JSON: {error}", fix) from error


def _validator_of_answer(answer: str | None) -> Validator:
    if answer is None:
        raise DataError(
            "there is no answer to be the JSON schema, so json_schema needs an argument"
            " schema or schema_path"
        )
    try:
        return _validator_of(_json_of(answer))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"answer {answer[:80]!r} is no JSON schema ({error}), so json_schema cannot"
            " grade"
        ) from error


def _json_of(text: str) -> Any:
    """Return the value of a JSON text (RFC 8259), which has no NaN and no Infinity.

    Raises:
        ValueError: It is none.
        RecursionError: It is too deep.
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


class _NoSchema(ValueError):
    """A value is no JSON schema; the text says why, and where."""


def _validator_of(schema: Any) -> Validator:
    """Return what validates values under a schema.

    Raises:
        _NoSchema: The value is none, or a reference in it leads nowhere.
    """
    # Imported here, since most scoring processes need none of it.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    kind = validator_for(schema, default=Draft202012Validator)
    _check_schema(kind, schema)
    _check_references(kind, schema)

    validator = kind(schema, registry=REGISTRY)
    try:
        validator.is_valid({})
    except RecursionError as error:
        raise _NoSchema("its references lead in a circle") from error
    return validator


def _check_schema(kind: type[Validator], schema: Any) -> None:
    """Check the keywords of a schema.

    Raises:
        _NoSchema: It is none.
    """
    from jsonschema.exceptions import SchemaError

    try:
        kind.check_schema(schema)
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path))
        place = f" (at {where})" if where else ""
        raise _NoSchema(f"{error.message}{place}") from error


def _check_references(kind: type[Validator], schema: Any) -> None:
    """Look up all references of a schema, and check what they name.

    Raises:
        _NoSchema: There is nothing of that name, or it is no schema.
    """
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, specification_with

    dialect = str(kind.META_SCHEMA["$schema"])
    draft = specification_with(dialect, default=DRAFT202012)
    root = draft.create_resource(schema)
    remaining = [(root, REGISTRY.resolver_with_root(root))]
    seen: set[int] = set()
    # Takes each part of a schema once; ends when there is none left.
    while remaining:
        part, resolver = remaining.pop()
        if id(part.contents) in seen or not isinstance(part.contents, dict):
            continue
        seen.add(id(part.contents))

        for keyword in ("$ref", "$dynamicRef"):
            name = part.contents.get(keyword)
            if not isinstance(name, str):
                continue
            try:
                named = resolver.lookup(name)
            # A path through a list has numbers.
            except (Unresolvable, ValueError) as error:
                raise _NoSchema(
                    f"nothing in it is named by its reference {name!r}, and other"
                    " documents are not fetched"
                ) from error
            if name.startswith("#"):
                _check_schema(kind, named.contents)
            remaining.append((draft.create_resource(named.contents), named.resolver))
        below = map(draft.create_resource, draft.subresources_of(part.contents))
        remaining += [(each, resolver.in_subresource(each)) for each in below]
