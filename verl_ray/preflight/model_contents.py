"""Whether config.json, weights and tokenizer of a directory belong to one model.

Invariant: no tensor is read, and torch is not needed. A file that is missing or damaged
is reported once, and nothing is concluded from it.

Deliberately not here: reading the files (`model_files.py`), and what a run requires of
a model (`model_directories.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ray.config.suggest import either
from verl_ray.data.tokenizers import VOCABULARY_FILES
from verl_ray.errors import Problem
from verl_ray.models.families import EMBEDDINGS, FAMILIES, LANGUAGE_HEAD, VALUE_HEAD
from verl_ray.models.names import TYPE_NAMES
from verl_ray.models.settings import described_tensors, not_computed, wrong_value
from verl_ray.preflight.model_files import (
    absent_weights,
    config_json,
    damaged_weights,
    has_tokenizer,
    is_awaited,
    raw_config_json,
    tensor_shapes,
    tensor_types,
    token_ids,
)

if TYPE_CHECKING:
    from verl_ray.models.role_model import HeadKind


def content_problems(
    key: str,
    path: str,
    *,
    head: HeadKind,
    is_judge: bool,
    needs_files: bool = True,
) -> Iterator[Problem]:
    """Yield what is wrong in a model directory that has a config.json.

    Args:
        key: Setting that names the directory.
        path: The directory.
        head: Head of the model in its role.
        is_judge: Whether vLLM alone loads the model, which knows more of them.
        needs_files: Whether weights and tokenizer must be here. Those that are here are
            looked at in any case.
    """
    yield from _setting_problems(key, path, is_judge=is_judge)
    yield from _file_problems(
        key, path, head=head, is_judge=is_judge, needs_files=needs_files
    )
    yield from _vocabulary_problems(key, path)


def _setting_problems(key: str, path: str, *, is_judge: bool) -> Iterator[Problem]:
    """Yield a problem if a model is not computed, or its config.json is wrong."""
    settings = raw_config_json(path)
    family = settings.get("model_type")
    if isinstance(family, str) and family not in FAMILIES:
        if not is_judge:
            rule = f"this is a {family!r} model, which is not computed here"
            yield Problem(key, path, rule, f"Take one of {either(FAMILIES)}.")
        return

    wrong = wrong_value(settings)
    if wrong is not None:
        rule = f"no model has the values of its config.json: {wrong}"
        yield Problem(key, path, rule, "Correct it there, or copy the model again.")
        return

    reason = not_computed(settings)
    if reason is not None and not is_judge:
        rule = f"its config.json describes what is not computed here: {reason}"
        yield Problem(key, path, rule, "Correct it there, or take another model.")


def _file_problems(
    key: str, path: str, *, head: HeadKind, is_judge: bool, needs_files: bool
) -> Iterator[Problem]:
    """Yield a problem if weights or tokenizer are missing, or of another model."""
    directory = Path(path)
    # Weights that the hub still has are looked at once they are here.
    are_awaited = is_awaited(path) or (not needs_files and absent_weights(path))
    if not are_awaited and not any(directory.glob("*.safetensors")):
        rule = "this directory has no *.safetensors"
        yield Problem(key, path, rule, "Save the weights as safetensors.")

    damage = None if are_awaited else damaged_weights(path)
    if damage is not None:
        rule = f"the weights cannot be loaded: {damage}"
        yield Problem(key, path, rule, "Copy or save the model again.")
        return

    difference = _unexpected_tensor(
        config_json(path), tensor_shapes(path), head=head, is_judge=is_judge
    )
    if difference is not None:
        rule = (
            "its tensors are not of the model that its config.json describes:"
            f" {difference}"
        )
        fix = (
            "Give the directory that `save_pretrained` wrote, with nothing of another"
            " model in it."
        )
        yield Problem(key, path, rule, fix)

    if needs_files and not has_tokenizer(path):
        rule = "this directory has no tokenizer"
        fix = f"Put the model's tokenizer beside it ({either(VOCABULARY_FILES)})."
        yield Problem(key, path, rule, fix)

    foreign_types = sorted(tensor_types(path).difference(TYPE_NAMES))
    if foreign_types and not is_judge:
        rule = f"its weights are of type {foreign_types[0]}, which is not read"
        fix = f"Save them as one of {either(tuple(TYPE_NAMES.values()))}."
        yield Problem(key, path, rule, fix)


def _vocabulary_problems(key: str, path: str) -> Iterator[Problem]:
    """Yield a problem if the tokenizer has tokens that the model has no number for."""
    embedded = config_json(path).get("vocab_size")
    ids = token_ids(path)
    if not ids or not isinstance(embedded, int):
        return

    last = max(ids, key=ids.__getitem__)
    if ids[last] >= embedded:
        rule = (
            f"its tokenizer has token {ids[last]} ({last!r}), and the model has"
            f" {embedded} tokens (vocab_size)"
        )
        fix = "Give the tokenizer that the model was trained with."
        yield Problem(key, path, rule, fix)


def _unexpected_tensor(
    settings: Mapping[str, object],
    shapes: Mapping[str, list[int]],
    *,
    head: HeadKind,
    is_judge: bool,
) -> str | None:
    """Return how a tensor differs from what config.json describes; None if none does.

    Args:
        settings: Contents of config.json.
        shapes: Shape of each tensor by its name.
        head: Head of the model in its role.
        is_judge: Whether vLLM alone loads the model, which passes over other tensors.
    """
    # Quantized weights have tensors of other names and shapes.
    if settings.get("quantization_config") is not None:
        return None

    described = set()
    for name, shape in described_tensors(settings):
        described.add(name)
        # A new head takes the place of a language head.
        if name == LANGUAGE_HEAD and head == "value":
            continue
        actual = shapes.get(name)
        if actual != shape:
            is_now = "is absent" if actual is None else f"has shape {actual}"
            return f"{name} {is_now}, and would have shape {shape}"

    # A checkpoint may hold the head that is tied to the embeddings.
    described.add(LANGUAGE_HEAD)
    if head == "value":
        described.add(VALUE_HEAD)
    others = sorted(shapes.keys() - described)
    # The tensors of some models are not known here.
    if not others or is_judge or EMBEDDINGS not in described:
        return None
    return f"{others[0]} has shape {shapes[others[0]]}, and would be absent"
