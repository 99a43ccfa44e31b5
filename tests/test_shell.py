"""Commands that are printed: a shell and Hydra's grammar read them as they were meant."""

from __future__ import annotations

import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from verl_ray.shell import for_shell

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
PIECES = [
    "/",
    "a",
    "ö",
    "=",
    " ",
    "'",
    '"',
    "\\",
    "$(x)",
    "!",
    "[",
    "{",
    ",",
    "~",
    "7",
    ":",
]
PATHS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@given(TEXTS | PATHS)
@example("null")
@example("1e5")
@example("-.5")
@example("2024/run=3")
@example("/größe/it's")
def test_a_text_comes_back_through_the_shell_and_the_grammar(text: str) -> None:
    typed = for_shell(["verl-ray", text, ("run.dir", text)])
    program, word, override = shlex.split(typed)
    assert (program, word) == ("verl-ray", text)
    assert OverridesParser.create().parse_override(override).value() == text


def test_quotes_are_readable_and_only_where_they_are_needed() -> None:
    settings = [("a.b", True), ("c", None), ("d", 2.5), ("e", "x/y-1.py:z")]
    assert for_shell(settings) == "a.b=true c=null d=2.5 e=x/y-1.py:z"
    assert for_shell([("run.dir", "/a=b")]) == "\"run.dir='/a=b'\""
    assert for_shell([("run.dir", "/$a")]) == shlex.quote("run.dir='/$a'")
