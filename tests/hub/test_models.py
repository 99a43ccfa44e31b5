"""Models of the hub: which commit a run reads, and which files of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from controllers.command_line import main
from scripts.configuration import compose
from tests.controllers.runs import make_inputs
from tests.hub.conftest import forget, point_to
from tests.hub_server import HubServer
from verl_ray.config.load import to_tree
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, HubError, Problem
from verl_ray.hub.model_folders import is_pending
from verl_ray.hub.models import fetch_model, fetch_models, pinned_models
from verl_ray.preflight.model_directories import content_problems
from verl_ray.preflight.model_files import tensor_shapes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs")).model


def config_of(*overrides: str) -> RLConfig:
    data = ["data.train_path=/t.jsonl", "data.validation_path=/v.jsonl"]
    # A name of its own would hold the time.
    names = ["model.path=me/tiny", "run.name=tiny"]
    config = compose("grpo", [*data, *names, *overrides])
    assert isinstance(config, RLConfig)
    return config


def pinned(*overrides: str, recorded: RLConfig | None = None) -> RLConfig:
    tree = {} if recorded is None else to_tree(recorded)
    config, problems = pinned_models(config_of(*overrides), tree)
    assert problems == []
    return config


def problem(*overrides: str) -> Problem:
    _, (problem,) = pinned_models(config_of(*overrides), {})
    return problem


def test_a_model_is_pinned_then_checked_by_its_small_files_then_fetched(
    hub: HubServer, model: Path
) -> None:
    files = [*model.iterdir()]
    assert {file.name for file in files} > {"config.json", "model.safetensors"}
    commit = hub.commit("me/tiny", model)
    for name in ("pytorch_model.bin", "modeling.py", "extra/model.safetensors"):
        unwanted = next(iter(hub.repositories.values())).commits[commit] / name
        unwanted.parent.mkdir(exist_ok=True)
        unwanted.write_text("import os")

    config = pinned()
    assert config.model.revision == commit == config.actor.model.revision
    folder = Path(config.model.folder)
    assert folder.parent.parent.name == "models--me--tiny" and folder.name == commit
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        file.name for file in files if file.suffix != ".safetensors"
    )

    # What config.json describes stands for the weights until they are here.
    assert is_pending(str(folder))
    assert tensor_shapes(str(folder)) == tensor_shapes(str(model))
    found = content_problems("model.path", str(folder), head="policy", is_judge=False)
    assert [*found] == []

    assert fetch_models(config) and not fetch_models(config)
    assert not is_pending(str(folder))
    weights = folder / "model.safetensors"
    assert weights.read_bytes() == (model / "model.safetensors").read_bytes()
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        file.name for file in files
    )


def test_another_machine_needs_no_weights_of_the_hub(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("me/tiny", model)
    config, problems = pinned_models(config_of(), {}, needs_weights=False)
    assert problems == [] and is_pending(config.model.folder)
    brought = [request for request in hub.requests if request.startswith("GET /me/")]
    assert any("config.json" in request for request in brought)
    assert not any(".safetensors" in request for request in brought)

    # Nor does it without a network, where a run here would need them.
    point_to("http://127.0.0.1:9", monkeypatch)
    forget()
    assert pinned_models(config_of(), {}, needs_weights=False) == (config, [])
    assert "does not hold all of it" in problem().rule

    names = ["model.path=me/tiny", "data.train_path=/t", "data.validation_path=/v"]
    words = ["check", "--config-name", "grpo", "--data", "off", *names]
    assert main([*words, "--machine", "gpus=1,gpu=L40S-48G"]) == 0
    assert main(words) == 2


def test_a_resumed_run_keeps_its_commit_and_asks_nobody(
    hub: HubServer, model: Path
) -> None:
    old = hub.commit("me/tiny", model)
    first = pinned()
    fetch_models(first)
    new = hub.commit("me/tiny", model)
    forget()
    hub.requests.clear()
    assert pinned(recorded=first) == first and first.model.revision == old
    assert hub.requests == []

    # The cache may lose it; the same commit comes again.
    shutil.rmtree(Path(first.model.folder).parents[2])
    again = pinned(recorded=first)
    fetch_models(again)
    assert again == first and Path(first.model.folder, "model.safetensors").is_file()
    forget()
    assert pinned().model.revision == new


def test_roles_share_a_commit_or_have_one_of_their_own(
    hub: HubServer, model: Path
) -> None:
    old = hub.commit("me/tiny", model)
    new = hub.commit("me/tiny", model)
    other = hub.commit("me/other", model)
    own_critic = ["algorithm=ppo", "critic.model.path=me/other"]
    config = pinned(*own_critic, f"model.revision={old}")
    assert config.reference.model == config.actor.model == config.model
    assert (config.model.revision, config.critic.model.revision) == (old, other)

    assert pinned("actor.lora.rank=8").reference_is_base
    config = pinned("actor.lora.rank=8", f"reference.model.revision={old}")
    assert config.actor.model.revision == new != config.reference.model.revision
    assert not config.reference_is_base


def test_what_a_hub_refuses_is_told_with_the_way_on(
    hub: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("me/gated", model, token="hf_mine")
    absent = problem("model.path=me/absent")
    assert absent.key == "model.path" and f"no such model on {hub.url}" in absent.rule
    gated = problem("model.path=me/gated")
    assert gated.rule == "this model is gated"
    assert f"{hub.url}/me/gated, then set HF_TOKEN" in gated.fix
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    pinned("model.path=me/gated")

    unknown = problem("model.path=me/gated", "model.revision=v2")
    assert (unknown.key, unknown.value) == ("model.revision", "v2")

    settings = json.loads((model / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": {"AutoModel": "modeling.Mine"}}
    for name, contents in (
        ("me/code", {"config.json": settings, "modeling.py": {}}),
        ("me/pickles", {"config.json": {"model_type": "qwen3"}, "model.bin": {}}),
        ("me/gguf", {"model.gguf": {}}),
    ):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for file, content in contents.items():
            (folder / file).write_text(json.dumps(content))
        hub.commit(name, folder)
    # Their folders here would be meant otherwise.
    shutil.rmtree(tmp_path / "me")
    refused = problem("model.path=me/code")
    assert "auto_map" in refused.rule and "trust_remote_code=true" in refused.fix
    cache = Path(constants.HF_HUB_CACHE)
    assert not [*cache.rglob("*.py")]
    trusted = problem("model.path=me/code", "model.trust_remote_code=true")
    assert "no weights as safetensors" in trusted.rule
    assert [file.name for file in cache.rglob("*.py")] == ["modeling.py"]
    assert "no weights as safetensors" in problem("model.path=me/pickles").rule
    assert "no config.json" in problem("model.path=me/gguf").rule


def test_a_cache_that_was_prepared_needs_no_network(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.commit("me/tiny", model)
    snapshot_download("me/tiny", cache_dir=constants.HF_HUB_CACHE, endpoint=hub.url)
    hub.commit("me/partly", model)
    partly = pinned("model.path=me/partly")
    forget()

    point_to("http://127.0.0.1:9", monkeypatch)
    for is_offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        assert pinned().model.revision == commit
        forget()
        reason = "HF_HUB_OFFLINE forbids" if is_offline else "127.0.0.1:9 does not"
        missing = problem("model.path=me/absent")
        assert reason in missing.rule and "`hf download me/absent`" in missing.fix

    # A worker on another machine has the folder's name, and may lack its files.
    with pytest.raises(
        HubError, match=f"hf download me/partly --revision {partly.model.revision}"
    ):
        fetch_model(partly.model.folder)
    with pytest.raises(ConfigError, match=r"model\.path = me/partly"):
        fetch_models(partly)


def test_a_disk_that_is_too_small_is_told_before_the_download(
    hub: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit("me/tiny", model)
    full = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    small = problem()
    assert "0.00 MB are free" in small.rule and "HF_HOME" in small.fix
    assert not any(request.startswith("GET /me/") for request in hub.requests)
