"""Requirements of a configuration on the directories of its models.

Invariant: no tensor is read, no hub is asked (`verl_ray/hub`), and torch is not needed.
Nothing is concluded from a missing file, except that it is missing.

Deliberately not here: whether the files of a directory belong together
(`model_contents.py`), reading them (`model_files.py`), what engines require of models
(`engine_models.py`), and memory for the parameters (`memory_plan.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ray.config.algebra import batch_algebra
from verl_ray.config.reward import JudgeReward
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.schema import Config
from verl_ray.config.section import value_of
from verl_ray.errors import Problem
from verl_ray.hub.names import is_hub_id
from verl_ray.models.families import VALUE_HEAD, WITH_EXPERTS
from verl_ray.models.settings import positions_of
from verl_ray.paths import path_suggestion
from verl_ray.preflight.engine_models import engine_problems, judge_problems
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.model_contents import content_problems
from verl_ray.preflight.model_files import (
    config_json,
    has_experts,
    raw_config_json,
    settings_of,
    shapes_of,
    tensor_shapes,
    token_ids,
)
from verl_ray.shell import for_shell

if TYPE_CHECKING:
    from verl_ray.models.role_model import HeadKind


def model_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Yield what the models of a run lack.

    These are files, positions, heads, a score, and a common vocabulary.

    Args:
        config: Configuration of the run.
        machine: Machine that the run is for; None if it is not known yet. For one that
            was described, config.json is all that must be here.
    """
    needs_files = machine is None or not machine.is_described
    for key, path in _model_paths(config).items():
        yield from _directory_problems(key, path, config, needs_files=needs_files)

    yield from _value_head_problems(config)
    yield from _expert_problems(config)
    yield from _adapter_problems(config)
    yield from _token_problems(config)

    for engine in config.engines.values():
        yield from engine_problems(engine, machine)
    yield from judge_problems(config)


def _model_paths(config: Config) -> dict[str, str]:
    """Return the model directories that must exist, by the keys that name them."""
    is_made = config.preparation is not None
    roles: dict[str, ModelRole | JudgeReward] = {**config.model_roles, **config.judges}

    paths: dict[str, str] = {}
    for name, role in roles.items():
        path = role.model.folder
        if path != config.model.folder:
            paths[f"{name}.model.path"] = path
        elif not is_made:
            paths["model.path"] = path
    return paths


# ------------------------------------------------------------------------ one directory


def _directory_problems(
    key: str, path: str, config: Config, *, needs_files: bool
) -> Iterator[Problem]:
    """Yield what a model directory lacks."""
    # What the hub says about it is a problem already.
    if is_hub_id(path):
        return

    directory = Path(path)
    if not directory.is_dir():
        rule = "there is no such directory"
        fix = path_suggestion(
            directory,
            "Give a directory that `save_pretrained` wrote, or the id of a model on the"
            " hub (owner/name).",
        )
        yield Problem(key, path, rule, fix)
        return

    if not raw_config_json(path):
        yield Problem(key, path, *_no_model(directory))
        return

    role = key.removesuffix(".model.path")
    # vLLM computes a judge, and knows more families.
    is_judge = role in config.judges
    head = _head_of(path, config)
    yield from content_problems(
        key, path, head=head, is_judge=is_judge, needs_files=needs_files
    )

    # A grader reads rows of its own tokenizer. Those that are too long get no score,
    # and are counted.
    if role not in config.graders:
        yield from _position_problems(key, path, config_json(path), config)


def _no_model(directory: Path) -> tuple[str, str]:
    """Return what a directory without config.json is, and what to do: rule and fix."""
    is_run = (directory / "checkpoints").is_dir()
    if is_run or (directory / "manifest.json").is_file():
        what = "the folder of a run" if is_run else "a checkpoint"
        command = for_shell(["verl-ray", "export", str(directory), "DIR"])
        fix = f"Write its model first: {command}."
        return f"this is {what}, which no model is loaded from", fix

    rule = "this directory has no readable config.json"
    return rule, "Give the directory that `save_pretrained` wrote."


def _head_of(path: str, config: Config) -> HeadKind:
    """Return the head of the model in a directory, which several roles may share."""
    heads = {
        config.head_of(name)
        for name, role in config.model_roles.items()
        if role.model.folder == path
    }
    return "value" if heads == {"value"} else "policy"


def _position_problems(
    key: str, path: str, settings: Mapping[str, object], config: Config
) -> Iterator[Problem]:
    """Yield a problem if rows may be longer than the model's positions."""
    longest = batch_algebra(config).max_row_tokens
    positions = positions_of(settings)
    if positions is None or longest <= positions:
        return

    rule = f"the model has {positions} positions, and a row may have {longest} tokens"
    excess = longest - positions
    tokens = value_of(config, config.length_key)
    if isinstance(tokens, int) and excess < tokens:
        advice = f"Lower {config.length_key} by {excess}"
    else:
        # The other part of the row is too long by itself.
        advice = f"Lower {config.longest_row[1]} to {positions} in all"
    fix = f"{advice}, or take another model."
    yield Problem(key, path, rule, fix)


# --------------------------------------------------------------------- roles and models


def _expert_problems(config: Config) -> Iterator[Problem]:
    """Yield settings for experts of models that have none."""
    for name, role in config.model_roles.items():
        path = role.model.folder
        settings = settings_of(path, config)
        if not settings or not isinstance(role, SupervisedRole):
            continue

        balance = role.expert_balance
        if balance is not None and settings.get("model_type") not in WITH_EXPERTS:
            rule = f"this setting would be ignored: {path} has no experts"
            yield Problem(f"{name}.expert_balance", balance, rule, "Set it to null.")


def _adapter_problems(config: Config) -> Iterator[Problem]:
    """Yield adapters on layers that their model does not have.

    An adapter needs a linear layer. Those of experts are slices of one tensor, and no
    layers.
    """
    for name, role in config.learners.items():
        if role.adapter is None:
            continue

        path = role.model.folder
        linear = {
            tensor.split(".")[-2]
            for tensor, shape in shapes_of(path, config).items()
            if ".layers." in tensor and ".experts." not in tensor and len(shape) == 2
        }
        # The router of experts is a matrix, and no layer that can be adapted.
        if has_experts(path):
            linear -= {"gate"}

        targets = role.lora.targets
        unknown = sorted(set(targets) - linear)
        if linear and unknown:
            rule = f"{', '.join(unknown)}: no linear layer of {path} has this name"
            fix = f"It has {', '.join(sorted(linear))}."
            yield Problem(f"{name}.lora.targets", list(targets), rule, fix)


def _value_head_problems(config: Config) -> Iterator[Problem]:
    """Yield models that must give one number per text and give none, or several.

    A critic, or a model that is to become a reward model, may have no head yet.
    """
    fix = (
        "Give a sequence-classification model with one label; `train --config-name"
        " reward_model` makes one."
    )
    for name, role in config.model_roles.items():
        if config.head_of(name) != "value":
            continue

        key = f"{name}.model.path"
        path = role.model.folder
        shapes = tensor_shapes(path)
        if VALUE_HEAD not in shapes:
            # Missing files are reported above. A model that the run itself makes has
            # no files yet, and no such head.
            is_checked = bool(shapes) or path == config.model.folder
            if role.scores_rollouts and is_checked:
                rule = f"this model has no {VALUE_HEAD}: it is no reward model"
                yield Problem(key, path, rule, fix)
            continue

        labels = shapes[VALUE_HEAD][0]
        if labels != 1:
            rule = (
                f"this model gives {labels} numbers per text (labels), and a score is"
                " one"
            )
            yield Problem(key, path, rule, fix)


def _token_problems(config: Config) -> Iterator[Problem]:
    """Yield models that read the actor's rows and number their tokens differently.

    A model that grades has a tokenizer of its own.
    """
    writer = config.evaluated_role
    writer_path = config.model_roles[writer].model.folder

    for name, role in config.model_roles.items():
        path = role.model.folder
        if path == writer_path or role.scores_rollouts:
            continue

        written = token_ids(writer_path)
        readable = token_ids(path)
        if written and readable and not written.items() <= readable.items():
            rule = (
                f"it reads rows in the {writer}'s tokens, and its tokenizer numbers"
                " them otherwise"
            )
            fix = (
                f"Give a model with the {writer}'s tokenizer, such as one that was"
                f" trained from the {writer}'s model."
            )
            yield Problem(f"{name}.model.path", path, rule, fix)
