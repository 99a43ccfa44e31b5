"""Models of the hub on the nodes of a cluster.

Invariant: when `download_models` returns, every node has the files of every such model,
in the folder that the driver has them in. One process per node downloads them, and
imports no more than this file for it. Deliberately not here: nodes that join later, and
what is downloaded (`verl_ray/hub/models.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from verl_ray.cluster.process_control import on_node
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import RAY_CALLS, wait
from verl_ray.config.schema import Config
from verl_ray.errors import HubError
from verl_ray.hub.models import fetch_model, hub_folders
from verl_ray.profiling.phases import phase

_SLICE_S = 60.0  # of a wait that lasts as long as it takes


def download_models(config: Config, session: Session) -> None:
    """Download the models of a run on all nodes that lack them.

    Raises:
        HubError: One is unavailable on a node, which the message names.
    """
    folders = {folder: config.trusts_code(folder) for folder in hub_folders(config)}
    here = ray.get_runtime_context().get_node_id()
    # This node has them. The head of a cluster often has no CPU and holds no process.
    others = [
        node
        for node in session.resources()
        if node.node_id != here and node.total.get("CPU")
    ]
    if not folders or not others:
        return

    with phase("downloading models on the nodes"):
        downloads = {
            on_node(node.node_id, _download, folders): node.address for node in others
        }
        pending = list(downloads)
        # Each round takes what is ready; ends when every node has replied.
        while pending:
            for reference in wait(pending, 1, _SLICE_S):
                pending.remove(reference)
                _receive(reference, downloads[reference])


def _receive(reference: Any, address: str) -> None:
    try:
        RAY_CALLS.make(ray.get, reference)
    except HubError as error:
        rule = f"on node {address}: {error.rule}"
        raise HubError(error.repository, rule, error.fix) from None


def _download(folders: Mapping[str, bool]) -> None:
    """Download models into folders of the cache, with the code of some."""
    for folder, with_code in folders.items():
        fetch_model(folder, with_code=with_code)
