"""The names of the engine arguments that the installed vLLM has.

They let the project refuse a misspelt rollout.vllm_args before anything starts.

Invariant: vLLM is not imported, which takes seconds; the names are read in its source.
Deliberately not here: which of them a user may set (`rules/vllm_args.py`), their types
and their meanings.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

_CLASS = "EngineArgs"
_FILE = "engine/arg_utils.py"


@cache
def vllm_arguments() -> tuple[str, ...] | None:
    """Return the public fields of vLLM's `EngineArgs`, in their order.

    None where they are not known: without vLLM, or if its source has no such class.
    vLLM itself then refuses a wrong name.
    """
    package = importlib.util.find_spec("vllm")
    if package is None:
        return None

    for folder in package.submodule_search_locations or []:
        file = Path(folder, _FILE)
        if not file.is_file():
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == _CLASS:
                return _fields(node)
    return None


def _fields(class_: ast.ClassDef) -> tuple[str, ...]:
    names = [
        line.target.id
        for line in class_.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    return tuple(name for name in names if not name.startswith("_"))
