"""What a resolution is told of a cluster, of the models' files and of the run's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.preflight.configs import BIG, ppo
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.preflight.facts import facts_here, facts_of, has_chat_template


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, False),
        ({"chat_template.jinja": "{{ messages }}"}, True),
        ({"chat_template.jinja": ""}, False),
        ({"additional_chat_templates/tool_use.jinja": "{{ messages }}"}, True),
        ({"tokenizer_config.json": "{{ messages }}"}, True),
        (
            {
                "tokenizer_config.json": [
                    {"name": "default", "template": "{{ messages }}"}
                ]
            },
            True,
        ),
        ({"tokenizer_config.json": None}, False),
    ],
)
def test_a_chat_template_is_found_as_transformers_does(
    tmp_path: Path, files: dict[str, object], expected: bool
) -> None:
    character_tokenizer(tmp_path, "01")
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".json":
            content = json.dumps(
                json.loads(path.read_text()) | {"chat_template": content}
            )
        path.write_text(str(content))
    assert (
        has_chat_template(str(tmp_path))
        is bool(load_tokenizer(tmp_path).chat_template)
        is expected
    )


def test_a_directory_that_says_nothing_has_no_template(tmp_path: Path) -> None:
    assert not has_chat_template(str(tmp_path / "missing"))
    for text in ("not JSON", "[]", "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(text)
        assert not has_chat_template(str(tmp_path))


def test_the_day_of_a_template_is_that_of_the_first_start(
    tmp_path: Path, model: Path, data: Path
) -> None:
    dated = tmp_path / "dated"
    shutil.copytree(model, dated)
    config = ppo(dated, data)

    def day(checkpoint: str | None) -> str | None:
        return facts_of(config, cores=[1], gpus=[0], checkpoint=checkpoint).template_day

    assert day(None) is None
    (dated / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    today = day(None)
    assert today is not None and len(today) == len("2026-01-31")

    # A template that is not applied writes nothing, but that of a grader does.
    unused = ppo(dated, data, "data.apply_chat_template=false")
    assert facts_of(unused, cores=[1], gpus=[0], checkpoint=None).template_day is None
    judged = ppo(
        model, data, "reward=judge", f"reward.model.path={dated}", "reward.max_response_tokens=8"
    )  # fmt: skip
    assert facts_of(judged, cores=[1], gpus=[0], checkpoint=None).template_day == today
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    saved = {"data": {"template_day": "2025-02-01"}}
    with store.writing(3, {}, saved, ["actor"]) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "shard").write_bytes(b"1")
    assert day(str(tmp_path / "checkpoints" / "step_00000003")) == "2025-02-01"


def test_of_several_nodes_the_smallest_counts(model: Path, data: Path) -> None:
    found = facts_of(
        ppo(model, data), cores=[8, 2], gpus=[4, 0], checkpoint="/c", learns=False
    )
    assert (found.nodes, found.cores, found.gpus, found.checkpoint, found.learns) == (
        2,
        2,
        4,
        "/c",
        False,
    )
    assert found.sent_parameters == 120
    supervised = compose(
        "sft", [f"model.path={model}", "data.train_path=t", "data.validation_path=v"]
    )
    assert facts_here(supervised, BIG).sent_parameters == 0


def test_what_the_run_will_make_is_known(tmp_path: Path) -> None:
    found = facts_here(compose("quickstart", [f"run.dir={tmp_path}"]), None)
    assert (found.has_chat_template, found.checkpoint, found.nodes, found.gpus) == (
        False,
        None,
        1,
        0,
    )
    assert found.sent_parameters > 250_000


def test_the_newest_checkpoint_is_found(
    tmp_path: Path, model: Path, data: Path
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    for step in (3, 4):
        with store.writing(step, {}, {}, ["actor"]) as folder:
            (folder / "actor").mkdir()
            (folder / "actor" / "shard").write_bytes(b"1")
    config = ppo(model, data, f"run.dir={tmp_path}")
    assert facts_here(config, BIG).checkpoint == str(
        tmp_path / "checkpoints" / "step_00000004"
    )
    for path in (tmp_path / "checkpoints").glob("step_*/manifest.json"):
        path.write_text("torn")
    assert facts_here(config, BIG).checkpoint is None  # why, the run says as it starts
