"""What keeps the code readable: the lists of names and openings that are banned, and the measures.

`tests/test_style.py` fails on each place that `places` finds. As a program this file prints
the places and the measures::

    python tests/style.py [PATH ...]

Deliberately not here: what ruff, mypy and import-linter check.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("verl_ray", "controllers", "workers", "scripts")
README = ROOT / "README.md"

MOST_LINES_OF_A_FUNCTION = 60

# A participle says what happened to a thing and not what the thing is.
BANNED_NAMES = {
    "asked": "name the request, such as `requested_ranks`",
    "found": "name what was found, such as `missing_files`",
    "given": "name what was given, such as `overrides`",
    "judged": "scores are computed: `scored`",
    "kept": "name what was kept, such as `remaining_rows`",
    "left": "name what remains, such as `remaining_s`",
    "meeting": "the ends of a wire have a `rendezvous`",
    "one": "name the thing, such as `replica`",
    "owed": "what was not answered yet is `pending`",
    "pulse": "a sign of life is a `heartbeat`",
    "residence": "weights are offloaded: `offload`",
    "room": "bytes that are free are `available_bytes`",
    "said": "name the message, such as `reply`",
    "tally": "a sum over micro-batches is an accumulator",
    "told": "name the message, such as `report`",
    "tried": "what trials found out are `results` or `outcomes`",
    "wanted": "name what was wanted, such as `requested_version`",
}

# A docstring is understood without the name above it: it begins with a noun or a verb.
MID_SENTENCE = {
    "After", "And", "Around", "As", "But", "By", "For", "From", "In", "Inside", "Into",
    "Of", "On", "Or", "Than", "That", "To", "Until", "What", "Which", "Who", "Whom",
    "Whose", "With", "Without",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A line of the code base that breaks a rule, and how to mend it."""

    path: str
    line: int
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.remedy}"


@dataclass(frozen=True)
class Module:
    """One parsed file of the code base; `path` is relative to the root."""

    path: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The name by which others import it."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function and method, the nested ones too."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]


def modules(prefixes: Sequence[str] = SOURCES) -> list[Module]:
    """The parsed Python files under `prefixes`, in the order of their paths."""
    parsed = []

    for prefix in prefixes:
        start = ROOT / prefix
        files = [start] if start.is_file() else sorted(start.rglob("*.py"))
        for file in files:
            text = file.read_text()
            path = file.relative_to(ROOT).as_posix()
            parsed.append(Module(path, text, ast.parse(text)))

    return parsed


# --------------------------------------------------------------------------------- rules


def places(parsed: Sequence[Module]) -> list[Place]:
    """Everything that a reader would stumble over, in the order of the files."""
    broken = [place for module in parsed for place in _places_of(module)]
    return [*broken, *_class_names_used_twice(parsed), *import_circles(parsed)]


def _places_of(module: Module) -> Iterator[Place]:
    yield from banned_names(module)
    yield from names_with_of(module)
    yield from mid_sentence_docstrings(module)

    for function in module.functions:
        assert function.end_lineno is not None
        lines = function.end_lineno - function.lineno + 1
        if lines > MOST_LINES_OF_A_FUNCTION:
            rule = f"{function.name} has {lines} lines"
            remedy = f"split the function: at most {MOST_LINES_OF_A_FUNCTION}"
            yield Place(module.path, function.lineno, rule, remedy)


def banned_names(module: Module) -> Iterator[Place]:
    """Every place where a value gets a banned name."""
    for name, line in _names_of_values(module):
        if name in BANNED_NAMES:
            yield Place(module.path, line, f"the name `{name}`", BANNED_NAMES[name])


def names_with_of(module: Module) -> Iterator[Place]:
    """Every place where the name of a value begins with `of_`; a function's may."""
    remedy = "name the thing first, such as `row_scores` or `by_row`"

    for name, line in _names_of_values(module):
        if name.lstrip("_").lower().startswith("of_"):
            yield Place(module.path, line, f"the name `{name}`", remedy)


def _names_of_values(module: Module) -> Iterator[tuple[str, int]]:
    """Every name that a variable, a parameter or an attribute gets, and the line."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def mid_sentence_docstrings(module: Module) -> Iterator[Place]:
    """Every docstring whose first word cannot begin a sentence of its own."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    remedy = "begin with a noun or a verb"

    for node in ast.walk(module.tree):
        if not isinstance(node, kinds):
            continue
        docstring = ast.get_docstring(node)
        opening = re.match(r"[A-Za-z]+", docstring or "")
        if opening is None:
            continue
        word = opening.group()
        if word in MID_SENTENCE:
            rule = f"the docstring begins with '{word}'"
            yield Place(module.path, node.body[0].lineno, rule, remedy)


def _class_names_used_twice(parsed: Sequence[Module]) -> Iterator[Place]:
    definitions = defaultdict(list)

    for module in parsed:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                definitions[node.name].append((module.path, node.lineno))

    for name, locations in definitions.items():
        for path, line in locations[1:]:
            rule = f"the class {name} exists already, in {locations[0][0]}"
            yield Place(path, line, rule, "one name, one thing")


def import_circles(parsed: Sequence[Module]) -> Iterator[Place]:
    """Every module of `parsed` that imports itself by way of others of them.

    Imports for annotations alone and those inside of functions count as well.
    """
    remedy = "move what both need into one of them, or into a third"
    imports = {module.name: _imported_names(module) for module in parsed}

    for module in parsed:
        # Each round adds the imports of the modules that were reached before.
        reached: set[str] = set()
        ahead = imports[module.name] & imports.keys()
        while ahead:
            reached |= ahead
            further = set().union(*(imports[name] for name in ahead))
            ahead = (further & imports.keys()) - reached
        if module.name in reached:
            yield Place(module.path, 1, "a circle of imports", remedy)


def _imported_names(module: Module) -> set[str]:
    """Every name that a module imports, with the modules that they may be or be in."""
    names: set[str] = set()

    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)

    return names - {module.name}


# ------------------------------------------------------------------------------ measures


@dataclass(frozen=True)
class Measures:
    """How dense the code is.

    Attributes:
        characters_per_line: The mean length of a line that is not empty, without its
            indentation.
        packed_percent: The share of assignments that assign several values written
            side by side (`a, b = x, y`).
        conditionals_per_1000: Conditional expressions (`x if y else z`) per 1,000 lines.
        comments_per_100: Lines of comment per 100 lines inside of functions.
    """

    characters_per_line: float
    packed_percent: float
    conditionals_per_1000: float
    comments_per_100: float


def measure(parsed: Sequence[Module]) -> Measures:
    """Measures over all lines of `parsed` that are not empty."""
    texts = [module.text for module in parsed]
    all_lines = [line.strip() for text in texts for line in text.splitlines()]
    lines = [line for line in all_lines if line]
    nodes = [node for module in parsed for node in ast.walk(module.tree)]
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    packed = [node for node in assignments if _is_packed(node)]
    conditionals = [node for node in nodes if isinstance(node, ast.IfExp)]

    comments = 0
    function_lines = 0
    for module in parsed:
        inside = _lines_of_functions(module)
        function_lines += len(inside)
        comments += len(inside & _lines_with_comments(module))

    return Measures(
        characters_per_line=sum(map(len, lines)) / max(len(lines), 1),
        packed_percent=100 * len(packed) / max(len(assignments), 1),
        conditionals_per_1000=1000 * len(conditionals) / max(len(lines), 1),
        comments_per_100=100 * comments / max(function_lines, 1),
    )


def number_of_statements(parsed: Sequence[Module]) -> int:
    """Statements of all kinds and depths, docstrings included."""
    nodes = [node for module in parsed for node in ast.walk(module.tree)]
    return sum(isinstance(node, ast.stmt) for node in nodes)


def _is_packed(node: ast.Assign) -> bool:
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def _lines_of_functions(module: Module) -> set[int]:
    """Numbers of the lines in functions, without empty lines."""
    text = module.text.splitlines()
    inside: set[int] = set()

    for function in module.functions:
        assert function.end_lineno is not None
        inside.update(range(function.lineno, function.end_lineno + 1))

    return {line for line in inside if text[line - 1].strip()}


def _lines_with_comments(module: Module) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


# ------------------------------------------------------------------------------- program


def main(prefixes: Sequence[str]) -> None:
    """Prints the places, then the measures."""
    parsed = modules(prefixes or SOURCES)

    for place in places(parsed):
        print(place)

    measures = measure(parsed)
    print(f"characters per non-empty line    {measures.characters_per_line:.1f}")
    print(f"packed assignments               {measures.packed_percent:.1f} %")
    print(f"conditionals per 1,000 lines     {measures.conditionals_per_1000:.1f}")
    print(f"comments per 100 function lines  {measures.comments_per_100:.1f}")

    print(f"files                            {len(parsed)}")
    print(f"statements                       {number_of_statements(parsed)}")
    print(f"words of the README              {len(README.read_text().split())}")


if __name__ == "__main__":
    main(sys.argv[1:])
