"""The store of checkpoints: what exists, what is whole, what survives a crash, a full
disk and a run that went back.
"""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ray.checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    Checkpoint,
    FileRecord,
    file_record,
    sealed,
    unsealed,
    write_json,
)
from verl_ray.checkpoint.store import NEWEST, CheckpointStore
from verl_ray.errors import CheckpointError

CONFIG = {"run": {"dir": "outputs/x"}}


def write(
    store: CheckpointStore,
    step: int,
    content: bytes = b"shard",
    best: int | None = None,
) -> None:
    state = {"cursor": {"drawn": step * 16}, "kl": 0.1}
    with store.writing(step, state, CONFIG, ["actor"], best=best) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "0.distcp").write_bytes(content + bytes([step]))


def newest(store: CheckpointStore) -> Checkpoint:
    found = store.latest().checkpoint
    assert found is not None
    return found


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir() if path.is_dir())


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.latest().checkpoint is None
    write(store, 10)
    found = newest(store)
    assert (found.step, found.state, found.config) == (
        10,
        {"cursor": {"drawn": 160}, "kl": 0.1},
        CONFIG,
    )
    assert found.path == tmp_path / "checkpoints" / "step_00000010"
    assert found.role("actor") == str(found.path / "actor")
    assert found.files["actor/0.distcp"][0] == 6
    manifest = json.loads((found.path / MANIFEST).read_text())
    assert manifest["schema"] == SCHEMA and manifest["versions"]["torch"].startswith(
        "2."
    )
    assert CheckpointStore.open(found.path) == found


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 9, 10):
        write(store, step)
    assert names(store) == ["step_00000009", "step_00000010"]


def test_the_best_one_is_kept_as_well_while_it_is_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 2)):
        write(store, step, best=best)
    assert names(store) == ["step_00000002", "step_00000004", "step_00000005"]
    write(store, 6, best=5)
    assert names(store) == ["step_00000005", "step_00000006"]


def test_a_checkpoint_without_a_manifest_does_not_exist(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    write(store, 2)
    (tmp_path / "step_00000002" / MANIFEST).unlink()
    found = store.latest()
    assert found.checkpoint is not None and found.checkpoint.step == 1
    assert found.skipped == ["step_00000002 has no manifest.json"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda shard: shard.write_bytes(b"shar"),
            "actor/0.distcp has 4 bytes instead of 6",
        ),
        (
            lambda shard: shard.write_bytes(b"shard!"),
            "the contents of actor/0.distcp have changed",
        ),
        (lambda shard: shard.unlink(), "actor/0.distcp is missing"),
        (
            lambda shard: (shard.parents[1] / MANIFEST).write_text('{"schema"'),
            "manifest.json is not JSON",
        ),
        (
            lambda shard: shutil.rmtree(shard.parents[1]),
            "step_00000002 was written, but is missing",
        ),
    ],
)
def test_a_torn_or_missing_newest_is_reported_and_the_one_before_it_used(
    tmp_path, damage, reason
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    write(store, 2)
    damage(tmp_path / "step_00000002" / "actor" / "0.distcp")
    found = store.latest()
    assert found.checkpoint is not None and found.checkpoint.step == 1
    assert len(found.skipped) == 1 and reason in found.skipped[0]
    # Going on from there must not let the torn one count as newest: the run writes 2
    # again, then keeps its last.
    CheckpointStore(tmp_path, keep=1).latest()
    write(CheckpointStore(tmp_path, keep=1), 2)
    assert names(store) == ["step_00000002"] and newest(store).step == 2


@pytest.mark.parametrize(
    ("changes", "drop", "seal", "reason"),
    [
        (
            {"state": {"cursor": {"drawn": 16}, "kl": 0.1}},
            (),
            False,
            "was changed: its checksum does not match",
        ),
        ({"files": {}}, (), False, "was changed: its checksum does not match"),
        ({"files": {}}, (), True, "lists no files of actor"),
        ({"files": {"critic/shard": [1, "00"]}}, (), True, "lists no files of actor"),
        ({}, ("files",), False, "was changed: its checksum does not match"),
        ({}, ("checksum",), False, "has no checksum of itself"),
        ({}, ("checksum", "schema"), False, "has no checksum of itself"),
    ],
)
def test_an_edited_manifest_is_named(
    tmp_path: Path, changes, drop, seal, reason
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    write(store, 2)
    edit(tmp_path / "step_00000002" / MANIFEST, changes, *drop, seal=seal)
    found = store.latest()
    assert found.checkpoint is not None and found.checkpoint.step == 1
    assert found.skipped == [f"step_00000002: manifest.json {reason}"]


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "3", "{", "\0" * 40, "[" * 100_000]
)
def test_a_manifest_that_is_no_object_is_named(tmp_path: Path, content: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    write(store, 2)
    (tmp_path / "step_00000002" / MANIFEST).write_text(content)
    found = store.latest()
    assert found.checkpoint is not None and found.checkpoint.step == 1
    assert len(found.skipped) == 1 and found.skipped[0].startswith(
        "step_00000002: manifest.json "
    )


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"step": 2}', '{"step": "x"}', "\0\0"]
)
def test_a_damaged_newest_json_is_named(tmp_path: Path, content: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    (tmp_path / NEWEST).write_text(content)
    found = store.latest()
    assert found.checkpoint is not None and found.checkpoint.step == 1
    assert len(found.skipped) == 1
    assert "newest.json" in found.skipped[0]
    assert (
        "whether the newest checkpoint is still there is not known: the newest one here is taken"
        in found.skipped[0]
    )
    shutil.rmtree(tmp_path / "step_00000001")
    with pytest.raises(CheckpointError, match=r"no usable checkpoint: .*newest\.json"):
        store.latest()


def test_a_directory_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    for name in (f"step_00000001/{MANIFEST}", NEWEST):
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
    with pytest.raises(
        CheckpointError,
        match=r"newest\.json cannot be read .*manifest\.json cannot be read ",
    ):
        store.latest()


def test_a_renamed_checkpoint_is_not_another_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    write(store, 2)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000007")
    found = store.latest()
    assert found.checkpoint is not None and found.checkpoint.step == 2
    assert found.skipped == [
        "step_00000007 was renamed: it is the checkpoint after step 1"
    ]
    assert (
        CheckpointStore.open(tmp_path / "step_00000007").step == 1
    )  # by its path it is what it is


@pytest.mark.parametrize("name", [f"step_00000002/{MANIFEST}", NEWEST])
def test_any_byte_that_changes_is_noticed(tmp_path: Path, name: str) -> None:
    """Each byte replaced, left out, or the end of the file: what is found is the same
    checkpoint, or the one before it with a reason; never another state, and never an
    error that names no file.
    """
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    write(store, 2)
    whole, before = newest(store), CheckpointStore.open(tmp_path / "step_00000001")
    content = (tmp_path / name).read_bytes()
    older = 0
    for place, byte in enumerate(content):
        rest = content[place + 1 :]
        middle = (bytes([byte ^ 1]), bytes([byte ^ 128]), b"0", b'"', b" ", b"")[
            place % 6
        ]
        for damaged in (content[:place] + middle + rest, content[:place])[
            : 1 + (place % 6 == 0)
        ]:
            (tmp_path / name).write_bytes(damaged)
            found = store.latest(verify=False)
            if found.checkpoint != whole:
                assert (
                    found.checkpoint == before
                    and name.split("/")[0] in found.skipped[0]
                ), damaged
                older += 1
    assert (
        older > len(content) // 2 if MANIFEST in name else older == 0
    )  # white space may change


def test_what_its_writer_has_hashed_is_not_read_again(tmp_path: Path) -> None:
    """The record is the writer's, so that a disk that stores other bytes is noticed."""
    store, hashed = CheckpointStore(tmp_path, keep=2), {"actor/shard": (5, "of whole")}
    with store.writing(1, {}, CONFIG, ["actor"], hashed=hashed) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "shard").write_bytes(b"other")
        (folder / "of the driver").write_bytes(b"x")
    found = store.open(tmp_path / "step_00000001", verify=False)
    assert found.files["actor/shard"] == (5, "of whole")
    assert found.files["of the driver"] == file_record(found.path / "of the driver")
    with pytest.raises(CheckpointError, match="contents of actor/shard have changed"):
        store.latest()


@pytest.mark.parametrize(("size", "seen"), [(4, "5 bytes"), (None, "no such file")])
def test_a_driver_that_does_not_see_what_a_rank_has_written_writes_no_checkpoint(
    tmp_path: Path, size: int | None, seen: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    hashed: dict[str, FileRecord] = {}
    with (
        pytest.raises(CheckpointError, match=f"this process sees {seen}.*nodes share"),
        store.writing(1, {}, CONFIG, ["actor"], hashed=hashed) as folder,
    ):
        (folder / "actor").mkdir()
        (folder / "actor" / "shard").write_bytes(b"other")
        name = "actor/shard" if size else "actor/of another node"
        hashed[name] = (size or 5, "0" * 32)
    assert store.latest().checkpoint is None and names(store) == []


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text() | st.integers(),
        st.lists(st.none() | st.integers() | st.floats() | st.text()),
    )
)
def test_the_checksum_is_that_of_what_is_read(value: object) -> None:
    read = json.loads(json.dumps(sealed({"value": value})))
    assert json.dumps(unsealed(Path("manifest.json"), read)["value"]) == json.dumps(
        json.loads(json.dumps(value))
    )


@pytest.mark.parametrize("wrote", [(), ("critic",)])
def test_a_role_without_files_makes_no_checkpoint(
    tmp_path: Path, wrote: tuple[str, ...]
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    expected = "the ranks of actor have written, but this process sees none of their files; .*all nodes share"
    with (
        pytest.raises(CheckpointError, match=expected),
        store.writing(1, {}, CONFIG, ["actor", *wrote]) as folder,
    ):
        (folder / "actor").mkdir()
        for role in wrote:
            (folder / role).mkdir()
            (folder / role / "shard").touch()
    assert store.latest().checkpoint is None and names(store) == []


def test_only_torn_ones_are_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 3)
    (tmp_path / "step_00000003" / "actor" / "0.distcp").write_bytes(b"")
    with pytest.raises(
        CheckpointError,
        match=r"no usable checkpoint: step_00000003 is torn: .* 0 bytes instead of 6",
    ):
        store.latest()
    shutil.rmtree(tmp_path / "step_00000003")
    with pytest.raises(
        CheckpointError, match="step_00000003 was written, but is missing"
    ):
        store.latest()


def edit(
    path: Path, changes: dict[str, object], *drop: str, seal: bool = False
) -> None:
    """Change the object in a manifest; `seal`: as a writer would have written it."""
    content = json.loads(path.read_text()) | changes
    content = {
        key: value for key, value in content.items() if key not in (*drop, "checksum")
    } | ({} if "checksum" in drop else {"checksum": content["checksum"]})
    if seal:
        del content["checksum"]
        write_json(path, sealed(content))
    else:
        path.write_text(json.dumps(content))


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
def test_another_schema_is_an_error(tmp_path: Path, schema: int) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    path = tmp_path / "step_00000001" / MANIFEST
    if schema < SCHEMA:  # which had no checksum
        edit(path, {"schema": schema}, "checksum")
    else:
        edit(path, {"schema": schema}, seal=True)
    with pytest.raises(
        CheckpointError, match=f"schema {schema} .* this version reads {SCHEMA}"
    ):
        store.latest()


def test_opening_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"there is no such checkpoint; run\.resume"
    ):
        CheckpointStore.open(tmp_path / "nowhere")


def test_going_back_leaves_the_abandoned_future_behind(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (4, 6):
        write(store, step)
    write(store, 5, b"other")  # resumed from 4 by its path
    assert (
        names(store) == ["step_00000004", "step_00000005"] and newest(store).step == 5
    )


def test_a_failed_write_leaves_everything_as_it_was(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    with pytest.raises(KeyError), store.writing(2, {}, CONFIG, ["actor"]) as folder:
        (folder / "half").write_bytes(b"x")
        raise KeyError
    assert names(store) == ["step_00000001"] and newest(store).step == 1


@pytest.mark.processes
def test_a_full_disk_is_a_clear_error_and_the_last_checkpoint_stays_whole(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    child = textwrap.dedent(f"""
        import resource, signal
        from verl_ray.checkpoint.store import CheckpointStore
        from verl_ray.errors import CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            with CheckpointStore({str(tmp_path)!r}, keep=1).writing(2, {{}}, {{}}, ["actor"]) as folder:
                (folder / "shard").write_bytes(bytes(1 << 20))
        except CheckpointError as error:
            print(error)
    """)
    done = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, timeout=200
    )
    assert (
        "step_00000002.partial cannot be written" in done.stdout
        and "run.keep_checkpoints" in done.stdout
    ), done.stderr
    assert names(store) == ["step_00000001"] and newest(store).step == 1


@pytest.mark.processes
@pytest.mark.parametrize("moment", ["in the block", "in the manifest"])
def test_a_killed_writer_leaves_the_last_checkpoint_and_its_remains_go_away(
    tmp_path: Path, moment: str
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    child = textwrap.dedent(f"""
        import time
        from verl_ray.checkpoint import manifest, store
        def stop(*_):
            print("here", flush=True)
            time.sleep(60)
        if {moment!r} == "in the manifest":
            manifest.write_json = stop
        with store.CheckpointStore({str(tmp_path)!r}, keep=1).writing(2, {{}}, {{}}, ["actor"]) as folder:
            (folder / "actor").mkdir()
            (folder / "actor" / "shard").write_bytes(bytes(1 << 20))
            if {moment!r} == "in the block":
                stop()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", child], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert names(store) == ["step_00000001", "step_00000002.partial"]
    found = store.latest()
    assert found.checkpoint is not None and found.checkpoint.step == 1
    assert found.skipped == [
        "step_00000002.partial remains of a write or a removal that was cut short"
    ]
    write(store, 2)
    assert names(store) == ["step_00000002"]


def test_a_first_write_that_was_killed_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.partial").mkdir()
    found = CheckpointStore(tmp_path, keep=1).latest()
    assert found.checkpoint is None and len(found.skipped) == 1


def test_verification_can_be_left_out_but_sizes_are_always_compared(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    shard = tmp_path / "step_00000001" / "actor" / "0.distcp"
    shard.write_bytes(b"shard!")
    assert store.latest(verify=False).checkpoint is not None
    shard.write_bytes(b"sha")
    with pytest.raises(CheckpointError, match="3 bytes instead of 6"):
        store.latest(verify=False)
