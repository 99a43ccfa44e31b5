"""Data sets of the hub: which part of one is read, and its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub.conftest import forget, point_to
from tests.hub_server import HubServer
from verl_ray.config.data import DataSet
from verl_ray.data.files import read_rows, write_records
from verl_ray.errors import HubError
from verl_ray.hub.data_sets import HELD_OUT_SPLITS, pinned, pinned_data

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train*}
  - {split: test, path: main/test*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train*}
---
"""


@pytest.fixture
def commit(hub: HubServer, tmp_path: Path) -> str:
    """The commit of me/sums, which has two subsets of Parquet files."""
    return add_sums(hub, tmp_path, first=1)


def add_sums(hub: HubServer, tmp_path: Path, *, first: int) -> str:
    folder = tmp_path / f"sums{first}"
    for subset, split, number in (("main", "train", 3), ("main", "test", 2), ("socratic", "train", 1)):  # fmt: skip
        rows: list[dict[str, object]] = [
            {"question": f"{subset} {split}", "answer": str(first + index)}
            for index in range(number)
        ]
        write_records(rows, folder / subset, split).jsonl.unlink()
    (folder / "README.md").write_text(CARD)
    return hub.commit("me/sums", folder, "datasets")


def test_rows_come_from_the_subset_and_split_that_are_meant(
    commit: str, tmp_path: Path
) -> None:
    entry = DataSet("me/sums", weight=2.0, subset="main")
    train = pinned(entry)
    assert train == DataSet("me/sums", 2.0, {}, "main", "train", commit)
    assert [*read_rows(train)] == [
        (f"me/sums, main, train, row {1 + index}", {"question": "main train", "answer": str(1 + index)})
        for index in range(3)
    ]  # fmt: skip
    assert pinned(entry, HELD_OUT_SPLITS).split == "test"
    assert pinned(DataSet("me/sums", subset="socratic", split="train")).split == "train"


def test_an_entry_that_leaves_a_choice_open_is_answered_with_what_there_is(
    commit: str, hub: HubServer, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/code.py").write_text("raise SystemExit")
    hub.commit("me/code", tmp_path / "code", "datasets")
    for entry, words in (
        (DataSet("me/sums"), "main, socratic. Name one: {path: me/sums, subset: main}"),
        (DataSet("me/sums", subset="mian"), "Did you mean main?"),
        (DataSet("me/sums", subset="main", split="dev"), "split: train or test"),
        (DataSet("me/code"), "refs/convert/parquet"),
        (DataSet("me/absent"), "no such data set on"),
    ):
        with pytest.raises(HubError) as caught:
            pinned(entry)
        assert words in str(caught.value)


def test_a_plain_id_is_read_and_later_from_the_cache_alone(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/train.jsonl").write_text('{"prompt": "1+1="}\n')
    hub.commit("me/one", tmp_path / "one", "datasets")
    row = ("me/one, default, train, row 1", {"prompt": "1+1="})
    assert [*read_rows(Path("me/one"))] == [row]

    forget()
    point_to("http://127.0.0.1:9", monkeypatch)
    assert [*read_rows(Path("me/one"))] == [row]
    with pytest.raises(HubError, match="hf download me/two --repo-type dataset"):
        read = read_rows(Path("me/two"))
        next(read)


def test_commits_of_data_are_recorded_and_kept(
    commit: str, hub: HubServer, tmp_path: Path
) -> None:
    section = {
        "train_path": [{"path": "me/sums", "weight": 2, "subset": "main"}, "/b.jsonl"],
        "validation_path": {"path": "me/sums", "subset": "main"},
        "shuffle": True,
    }
    data, problems = pinned_data(section, {})
    assert problems == []
    place = {"path": "me/sums", "subset": "main", "revision": commit}
    train = [{**place, "weight": 2, "split": "train"}, "/b.jsonl"]
    validation = {**place, "split": "test"}
    assert data == {
        "train_path": train, "validation_path": validation, "shuffle": True,
    }  # fmt: skip

    newer = add_sums(hub, tmp_path, first=7)
    forget()
    assert pinned_data(section, data) == (data, [])
    again, _ = pinned_data(section, {})
    assert again["validation_path"]["revision"] == newer != commit

    unknown = {"train_path": "me/absent", "validation_path": None}
    same, (problem,) = pinned_data(unknown, {})
    assert same == unknown and problem.key == "data.train_path"
