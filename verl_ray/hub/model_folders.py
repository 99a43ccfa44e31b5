"""Files in the folder of a model: which are there, and which are missing.

Invariant: no tensor is read. A missing or damaged file yields nothing rather than an
error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from verl_ray.settings.hub_ids import snapshot_at

INDEX = "model.safetensors.index.json"
"""The file that says which file holds which tensor, where there are several."""


def is_pending(path: str) -> bool:
    """Return whether a directory of the hub's cache lacks weights still."""
    return snapshot_at(path) is not None and absent_weights(path)


def absent_weights(path: str) -> bool:
    """Return whether a directory has no weights, or not all that its index names."""
    directory = Path(path)
    return bool(missing_files(directory)) or not any(directory.glob("*.safetensors"))


def missing_files(directory: Path) -> list[str]:
    """Return the missing files of weights that the index of a directory names."""
    weight_map = json_object(directory / INDEX).get("weight_map", {})
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    names = {str(file) for file in files}
    return sorted(name for name in names if not (directory / name).is_file())


CODE = "auto_map"
"""The setting in config.json that names the code of a model."""


def needs_code(settings: Mapping[str, object]) -> bool:
    """Return whether a model is computed by code in its directory alone.

    Some models came with code before transformers had them.
    """
    if CODE not in settings:
        return False
    # It takes a second to import, and few models come with code.
    from transformers import CONFIG_MAPPING

    return settings.get("model_type") not in CONFIG_MAPPING


def code_files(folder: Path) -> list[Path]:
    """Return the Python files in a model's directory, in the order of their names."""
    return sorted(folder.rglob("*.py"))


def json_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        content = json.loads(path.read_text())
    # JSON that is nested too deeply exhausts the stack.
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return content
