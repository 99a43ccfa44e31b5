"""Files of the hub: the commits of revisions, and downloads into the cache.

Invariant: the name of a revision is asked for once, and everything after that is about
its commit. A hub that does not answer is given up within seconds; the cache answers in
its place, or an error that names the command which fills it. No framework is imported
here. Ids and folders are in `verl_ray/settings/hub_ids.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from verl_ray.errors import HubError
from verl_ray.paths import nearest_existing, path_suggestion
from verl_ray.settings.hub_ids import (
    COMMIT,
    Kind,
    Snapshot,
    download_command,
    snapshot_of,
)

_PATIENCE_S = 5.0  # until the hub counts as one that does not answer
_VALID_S = 60.0  # until a hub that did not answer is tried again


# -------------------------------------------------------------------------- the commit


@functools.cache
def find_snapshot(repository: str, revision: str | None, kind: Kind) -> Snapshot:
    """Return the snapshot that a revision stands for now.

    The hub is asked; the cache answers where it does not. A process asks once, so all
    that it does is of one commit.

    Args:
        repository: Id of the repository.
        revision: Commit, branch or tag; None for the newest commit.
        kind: Whether it is a model or a data set.

    Raises:
        HubError: There is no such repository or revision, it may not be read, or
            neither the hub nor the cache has it.
    """
    if revision is not None and COMMIT.fullmatch(revision):
        return snapshot_of(repository, revision, kind)

    from huggingface_hub import HfApi, constants

    with _explained(repository, revision, kind):
        commit = HfApi(endpoint=constants.ENDPOINT).resolve_revision(
            repository,
            repo_type=kind,
            revision=revision,
            cache_dir=constants.HF_HUB_CACHE,
            local_files_only=not is_reachable(),
        )
    return snapshot_of(repository, commit.resolved, kind)


def is_reachable() -> bool:
    """Return whether the hub answers; it is tried once in a minute."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    return _answers(constants.ENDPOINT, int(time.monotonic() // _VALID_S))


@functools.lru_cache(maxsize=1)
def _answers(endpoint: str, minute: int) -> bool:
    """Return whether a server answers anything at all.

    The library's own requests have no limit of time.
    """
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=_PATIENCE_S)
    # There is an exception for each way of not answering.
    except Exception:
        return False
    return True


# --------------------------------------------------------------------------- the files


def fetch(
    snapshot: Snapshot, patterns: Sequence[str], *, shows_progress: bool = False
) -> None:
    """Download files of a snapshot into its cache, unless they are there.

    Processes that download the same file wait for each other, and it is
    downloaded once.

    Args:
        snapshot: The snapshot.
        patterns: Names of files; * stands for anything.
        shows_progress: Whether to say how much it is, and show how far it is on a
            terminal.

    Raises:
        HubError: They are unavailable, or the disk is too small.
    """
    if is_reachable():
        needed = sum(sizes_of(snapshot, patterns).values())
        _refuse_full_disk(snapshot, needed)
        if shows_progress and needed:
            print(f"{snapshot.repository}: fetching {_in_words(needed)}", flush=True)
        _download(snapshot, patterns, shows_progress and sys.stderr.isatty())
    else:
        _download(snapshot, patterns, local_files_only=True)


def sizes_of(snapshot: Snapshot, patterns: Sequence[str]) -> dict[str, int]:
    """Return the bytes that are still to be downloaded, for each file of the snapshot.

    It is 0 for a file that is in the cache. The hub must be reachable.
    """
    files = _download(snapshot, patterns, dry_run=True)
    return {
        file.filename: (file.file_size or 0) if file.will_download else 0
        for file in files
    }


def _refuse_full_disk(snapshot: Snapshot, needed: int) -> None:
    """Refuse to download more bytes than the disk of the cache has room for."""
    free = shutil.disk_usage(nearest_existing(str(snapshot.cache))).free
    if needed > free:
        rule = (
            f"its files need {_in_words(needed)} more in {snapshot.cache}, where"
            f" {_in_words(free)} are free"
        )
        fix = "Set HF_HOME to a folder on a larger disk."
        raise HubError(snapshot.repository, rule, fix, is_away=True)


def _in_words(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def _download(
    snapshot: Snapshot,
    patterns: Sequence[str],
    shows_progress: bool = False,
    **options: Any,
) -> Any:
    from huggingface_hub import constants, snapshot_download

    with (
        _explained(snapshot.repository, snapshot.commit, snapshot.kind),
        contextlib.nullcontext() if shows_progress else _without_bars(),
    ):
        return snapshot_download(
            snapshot.repository,
            repo_type=snapshot.kind,
            revision=snapshot.commit,
            cache_dir=snapshot.cache,
            endpoint=constants.ENDPOINT,
            allow_patterns=list(patterns),
            **options,
        )


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Keep the library's bars of progress from a log while the block runs."""
    from huggingface_hub import utils

    were_hidden = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if not were_hidden:
            utils.enable_progress_bars()


# ------------------------------------------------------------------------------ errors


@contextlib.contextmanager
def _explained(repository: str, revision: str | None, kind: Kind) -> Iterator[None]:
    """Turn what the library raises in the block into a HubError."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    noun = "model" if kind == "model" else "data set"
    page = f"{hub}/{repository}" if kind == "model" else f"{hub}/datasets/{repository}"

    try:
        yield
    except (errors.RevisionResolutionError, errors.LocalEntryNotFoundError) as error:
        raise not_cached(repository, revision, kind) from error
    except errors.RevisionNotFoundError as error:
        rule = f"{repository} has no such commit, tag or branch"
        fix = f"Take one of {page}/commits/main, or null for the newest."
        raise HubError(repository, rule, fix, True) from error
    except errors.GatedRepoError as error:
        raise _refused(repository, f"this {noun} is gated", page) from error
    except errors.RepositoryNotFoundError as error:
        rule = f"there is no such folder here, and no such {noun} on {hub}"
        # The hub does not tell strangers which private repositories exist.
        fix = "Correct it; a private one needs HF_TOKEN, a token that may read it."
        if Path(repository).parent.is_dir():
            fix = path_suggestion(Path(repository).absolute(), fix)
        raise HubError(repository, rule, fix) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            rule = f"the hub does not let you read this {noun}"
            raise _refused(repository, rule, page) from error
        rule = f"{hub} answers with {status} {error.response.reason_phrase}"
        fix = f"Look at {page}, or try again."
        is_away = (
            status == HTTPStatus.TOO_MANY_REQUESTS
            or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        )
        raise HubError(repository, rule, fix, is_away=is_away) from error
    # A connection that breaks off has an exception for each place where it does.
    except Exception as error:
        reason = " ".join(str(error).split())
        rule = f"its files could not be downloaded ({type(error).__name__}: {reason})"
        fix = "Try again: what has arrived is not lost."
        raise HubError(repository, rule, fix, is_away=True) from error


def not_cached(repository: str, revision: str | None, kind: Kind) -> HubError:
    """Return the error about files that neither the hub nor the cache provides."""
    from huggingface_hub import constants

    reason = f"{constants.ENDPOINT} does not answer"
    if constants.is_offline_mode():
        reason = "HF_HUB_OFFLINE forbids asking the hub"
    which = "" if revision is None else f" at {revision}"
    rule = (
        f"there is no such folder here, the cache {constants.HF_HUB_CACHE} does not"
        f" hold all of it{which}, and {reason}"
    )

    command = download_command(repository, kind)
    if revision is not None:
        command += f" --revision {revision}"
    fix = (
        f"Run `{command}` where there is a network, and copy its cache here (HF_HOME"
        " names it); or give a folder."
    )
    is_away = not constants.is_offline_mode()
    return HubError(repository, rule, fix, is_away=is_away)


def _refused(repository: str, rule: str, page: str) -> HubError:
    if os.environ.get("HF_TOKEN"):
        fix = f"Ask for access on {page}, with the account that HF_TOKEN belongs to."
    else:
        fix = f"Ask for access on {page}, then set HF_TOKEN to a token of yours."
    return HubError(repository, rule, fix)
