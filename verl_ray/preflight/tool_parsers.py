"""The names of vLLM's parsers of tool calls, read without importing vLLM.

Invariant: a name is refused only where all names are known. A plugin may add some.
"""

from __future__ import annotations

import ast
import importlib.util
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import Problem

KEY = "agent.tool_parser"

_TABLE = "_TOOL_PARSERS_TO_REGISTER"
_PLUGINS = "vllm.general_plugins"


def tool_parser_problem(name: str) -> Problem | None:
    """Return a problem if vLLM has no parser of that name, as far as can be told."""
    known = _known_parsers()
    plugins = [each for each in entry_points(group=_PLUGINS) if not _is_own(each)]
    if not known or name in known or plugins:
        return None
    fix = did_you_mean(name, known, "parser")
    return Problem(KEY, name, "vLLM has no such parser of tool calls", fix)


def _is_own(plugin: EntryPoint) -> bool:
    return plugin.value.startswith("vllm.")


def _known_parsers() -> list[str]:
    """Return the names in vLLM's table; none if there is no vLLM, or no such table."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return []
    path = Path(package.origin).with_name("tool_parsers") / "__init__.py"
    if not path.is_file():
        return []
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.Assign):
            continue
        names = [each.id for each in statement.targets if isinstance(each, ast.Name)]
        if _TABLE in names and isinstance(statement.value, ast.Dict):
            keys = statement.value.keys
            return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return []
