"""Models of the hub in a configuration: their commits, and their files in the cache.

Invariant: a run reads the files of the commits that its configuration records. Small
files come before weights, so weights that are whole have all other files beside them.
Only safetensors are downloaded, and code only where it is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from verl_ray.config.load import parse, to_tree
from verl_ray.config.renamed import model_sections
from verl_ray.config.reward import JudgeReward
from verl_ray.config.roles import ModelRole
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, HubError, Problem
from verl_ray.hub.model_folders import (
    CODE,
    INDEX,
    is_pending,
    json_object,
    needs_code,
)
from verl_ray.hub.snapshots import (
    fetch,
    find_snapshot,
    is_reachable,
    not_cached,
    sizes_of,
)
from verl_ray.settings.hub_ids import (
    COMMIT,
    Snapshot,
    is_hub_id,
    snapshot_at,
    snapshot_of,
)

C = TypeVar("C", bound=Config)

SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "*processor_config.json",
    INDEX,
)
"""Files of a model besides its weights."""

_CODE_FILES = ("*.py",)

WEIGHTS = ("model*.safetensors",)
"""Files of a model's weights."""


# ------------------------------------------------------------------- which commit it is


def pinned_models(
    config: C, recorded: Mapping[str, Any], *, needs_weights: bool = True
) -> tuple[C, list[Problem]]:
    """Return a configuration in which every model of the hub has its commit.

    The files of these models besides weights are in the cache then. Models that
    are unavailable become problems and stay as they are.

    Args:
        config: Configuration of a run.
        recorded: Configuration in the checkpoint that the run continues from, as plain
            values. Its commits are those that are meant.
        needs_weights: Whether a run here will read the weights, which must be in the
            cache where the hub does not answer.
    """
    tree = to_tree(config)
    sections_before = model_sections(recorded)
    commits: dict[tuple[str, str | None], str] = {}
    problems: dict[tuple[str, str | None], Problem] = {}

    trusted = {
        str(section["path"])
        for section in model_sections(tree).values()
        if section["trust_remote_code"]
    }
    # `model` comes first, and other roles follow it.
    for key, section in model_sections(tree).items():
        path = section["path"]
        if not is_hub_id(path):
            section["revision"] = None
            continue

        revision = section["revision"] or _recorded(sections_before.get(key, {}), path)
        if revision is None and path == config.model.path:
            revision = config.model.revision
        meant = path, revision
        if meant not in commits and meant not in problems:
            try:
                snapshot = find_snapshot(path, revision, "model")
                _download_settings(
                    snapshot,
                    needs_weights=needs_weights,
                    trusts_code=str(path) in trusted,
                )
                commits[meant] = snapshot.commit
            except HubError as error:
                problems[meant] = problem_of(error, key, path, revision)
        section["revision"] = commits.get(meant, revision)

    return parse(tree, type(config)), list(problems.values())


def _recorded(section: Mapping[str, str], path: str) -> str | None:
    return section.get("revision") if section.get("path") == path else None


def problem_of(error: HubError, key: str, path: str, revision: str | None) -> Problem:
    """Return an error about a repository as a problem of the settings that name it.

    Args:
        error: The error.
        key: The section with the settings `path` and `revision`.
        path: The repository's id.
        revision: Its revision.
    """
    if error.about_revision:
        return Problem(f"{key}.revision", revision, error.rule, error.fix)
    return Problem(f"{key}.path", path, error.rule, error.fix, error.may_pass)


def _download_settings(
    snapshot: Snapshot, *, needs_weights: bool, trusts_code: bool
) -> None:
    """Download the small files of a model, and refuse one that cannot be used.

    Nothing is asked where the cache holds the whole model, except for code.
    """
    folder = str(snapshot.folder)
    if is_pending(folder):
        fetch(snapshot, SETTINGS)

    settings = json_object(snapshot.folder / "config.json")
    if not settings:
        rule = "this repository has no config.json: it is no model of transformers"
        fix = "Take the repository of the model itself; GGUF and the like are not read."
        raise HubError(snapshot.repository, rule, fix)

    if trusts_code and CODE in settings:
        fetch(snapshot, _CODE_FILES)
    elif needs_code(settings):
        rule = f"this model needs code of its repository ({CODE}), which may not run"
        fix = (
            "Read the code, and set trust_remote_code=true beside the path where you"
            " trust it; and its commit as revision, so that no other code comes."
        )
        raise HubError(snapshot.repository, rule, fix)

    if is_pending(folder):
        _refuse_absent_weights(snapshot, needs_weights=needs_weights)


def _refuse_absent_weights(snapshot: Snapshot, *, needs_weights: bool) -> None:
    """Refuse a model whose weights are neither on the hub nor all in the cache."""
    has_weights = not any(snapshot.folder.glob("*.bin"))
    if is_reachable():
        has_weights = bool(sizes_of(snapshot, WEIGHTS))
    elif has_weights and needs_weights:
        raise not_cached(snapshot.repository, snapshot.commit, "model")

    if not has_weights:
        rule = "this repository has no weights as safetensors (model*.safetensors)"
        fix = (
            "Take another model; or load this one with transformers where you trust"
            " it, save it with save_pretrained, and give that folder."
        )
        raise HubError(snapshot.repository, rule, fix)


# ------------------------------------------------------------------------ their weights


def fetch_models(config: Config) -> bool:
    """Download the whole of every model of the hub that a run reads.

    Returns:
        Whether there was anything to download.

    Raises:
        ConfigError: The files are unavailable.
    """
    fetched = False
    for folder, key in hub_folders(config).items():
        snapshot = snapshot_at(folder)
        if snapshot is None or not is_pending(folder):
            continue
        try:
            fetch_model(folder, with_code=config.trusts_code(folder))
            fetched = True
        except HubError as error:
            section = key.removesuffix(".path")
            problem = problem_of(error, section, snapshot.repository, snapshot.commit)
            raise ConfigError([problem]) from error
    return fetched


def fetch_model(folder: str, *, with_code: bool = False) -> None:
    """Download the model that a folder of a cache is to hold, if it is not there.

    Any other folder is left alone.

    Args:
        folder: The folder.
        with_code: Whether the model's code is downloaded as well.

    Raises:
        HubError: The files are unavailable.
    """
    snapshot = snapshot_at(folder)
    if snapshot is None:
        return
    if with_code:
        fetch(snapshot, _CODE_FILES)
    if not is_pending(folder):
        return
    fetch(snapshot, SETTINGS)
    fetch(snapshot, WEIGHTS, shows_progress=True)
    if is_pending(folder):
        raise not_cached(snapshot.repository, snapshot.commit, "model")


def pinned_in_words(config: Config) -> list[str]:
    """Return a line for each model of the hub: its commit and where its files are."""
    lines: dict[tuple[str, str | None], str] = {}
    for key, section in model_sections(to_tree(config)).items():
        path, revision = section["path"], section["revision"]
        if is_hub_id(path) and COMMIT.fullmatch(revision or ""):
            folder = snapshot_of(path, revision, "model").folder
            line = f"{key}.path = {path} at {revision}, in {folder}"
            lines.setdefault((path, revision), line)
    return list(lines.values())


def hub_folders(config: Config) -> dict[str, str]:
    """Return the folders of the cache that a run reads models from.

    Each comes with the key that names its model.
    """
    keys: dict[str, str] = {}
    roles: dict[str, ModelRole | JudgeReward] = {**config.model_roles, **config.judges}
    for name, role in roles.items():
        is_shared = role.model.folder == config.model.folder
        key = "model.path" if is_shared else f"{name}.model.path"
        if snapshot_at(role.model.folder) is not None:
            keys.setdefault(role.model.folder, key)
    return keys
