"""`verl-ray ledger` prints what happened, and finds what was trained twice or left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from controllers.command_line import main
from verl_ray.data.ledger import LEDGER, NO_SPREAD, Ledger
from verl_ray.tracking.history import begin_segment, end_segment


def ids(*ordinals: int) -> np.ndarray:
    return np.array(ordinals, np.int64)


def finish(ledger: Ledger, ordinals: np.ndarray, version: int) -> None:
    versions = np.full(len(ordinals), version)
    ledger.finish(ordinals, versions, versions + 1)


def step(ledger: Ledger, number: int, *ordinals: int, write: bool = True) -> None:
    ledger.train(ids(*ordinals), number)
    if write:
        ledger.state()
        ledger.write(number)


def started(run: Path) -> Ledger:
    """A ledger of eight groups, drawn and finished with version 0; 6 and 7 are open."""
    ledger = Ledger(run / LEDGER)
    ledger.draw(np.arange(8), 0)
    finish(ledger, np.arange(6), 0)
    return ledger


def resumed(ledger: Ledger) -> Ledger:
    following = Ledger(ledger._folder)
    following.load_state(ledger.state())
    return following


def printed(
    capsys: pytest.CaptureFixture[str], *words: object, code: int = 0
) -> tuple[list[list[str]], str]:
    """The cells of the tables, and the last line."""
    assert main(["ledger", *map(str, words)]) == code
    out = capsys.readouterr().out
    cells = [line.replace("│", " ").split() for line in out.splitlines()]
    return cells, out.splitlines()[-1]


def test_a_run_that_was_restarted_is_counted_by_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = started(tmp_path)
    step(ledger, 1, 0, 1)
    step(ledger, 2, 2, 3)

    # 6 and 7 were open and are drawn again; 4 and 5 are trained as they were.
    following = resumed(ledger)
    following.draw(ids(6, 7, 8, 9, 10), 2)
    finish(following, ids(6, 8, 9), 2)
    following.reject(ids(7), "too long")
    following.reject(ids(9), "all alike")
    following.reject(ids(11), "too long")
    step(following, 3, 4, 5)
    step(following, 4, 6, 8, write=False)
    following.close()

    cells, last = printed(capsys, tmp_path)
    # restart, drawn, again, finished, trained, rejected, waiting, first, last, age
    assert ["0", "8", "0", "6", "4", "0", "0", "0", "3", "1"] in cells
    assert ["1", "5", "2", "3", "4", "3", "1", "4", "8", "2"] in cells
    assert ["all", "13", "2", "9", "8", "3", "1", "0", "8", "2"] in cells
    assert ["too", "long", "2"] in cells
    assert ["all", "alike", "1"] in cells
    assert (
        last
        == "every ordinal up to 8 was trained exactly once or rejected, over all restarts"
    )


def test_the_history_of_an_ordinal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = started(tmp_path)
    step(ledger, 1, 0, 1)
    following = resumed(ledger)
    following.draw(ids(6), 1)
    following.finish(ids(6), ids(1), ids(3))
    step(following, 5, 6)
    following.reject(ids(7), "too long")
    following.close()

    cells, _ = printed(capsys, tmp_path, "--ordinal", 6)
    assert [row[2:] for row in cells[4:-1]] == [
        ["0", "drawn", "-", "0", "-"],
        ["1", "drawn", "-", "1", "-"],
        ["1", "finished", "-", "1", "to", "3", "-"],
        ["1", "trained", "5", "-", "-"],
    ]
    cells, _ = printed(capsys, tmp_path, "--ordinal", 7)
    assert cells[-2][2:] == ["1", "rejected", "-", "-", "too", "long"]

    assert main(["ledger", str(tmp_path), "--ordinal", "8"]) == 2
    assert "It has those from 0 to 7" in capsys.readouterr().err


def test_an_ordinal_that_was_trained_twice_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The later part stays, as if the resumed run had forgotten to remove it."""
    ledger = started(tmp_path)
    step(ledger, 1, 0, 1)
    state = ledger.state()
    step(ledger, 2, 2, 3)

    following = Ledger(tmp_path / LEDGER)
    following.load_state(state)
    step(following, 3, 3, 2)
    cells, _ = printed(capsys, tmp_path, code=1)
    text = " ".join(word for row in cells for word in row)
    assert "trained or rejected more than once: 2 ordinals (2, 3)" in text
    assert "neither" not in text


@pytest.mark.parametrize("settled_before", [0, 2])
def test_an_ordinal_that_was_left_out_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settled_before: int
) -> None:
    ledger = started(tmp_path)
    if settled_before:
        step(ledger, 1, 0, 1)
    else:
        ledger.train(ids(0, 1), 1)
    # 3 is left out, and nothing below the last trained one may wait.
    ledger.draw(ids(9), 0)
    step(ledger, 2, 2, 4)
    cells, _ = printed(capsys, tmp_path, code=1)
    text = " ".join(word for row in cells for word in row)
    assert "neither trained nor rejected: 1 ordinal (3); expected all below" in text
    assert "more than once" not in text


@pytest.mark.parametrize(("number", "missing"), [(1, "0, 1"), (2, "2, 3")])
def test_a_part_that_is_missing_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, missing: str
) -> None:
    ledger = started(tmp_path)
    for trained in (1, 2, 3):
        step(ledger, trained, 2 * trained - 2, 2 * trained - 1)
    (tmp_path / LEDGER / f"step_{number:08}.parquet").unlink()
    cells, _ = printed(capsys, tmp_path, code=1)
    assert f"2 ordinals ({missing})" in " ".join(word for row in cells for word in row)


def test_a_damaged_part_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step(started(tmp_path), 1, 0, 1)
    part = tmp_path / LEDGER / "step_00000001.parquet"
    part.write_bytes(part.read_bytes()[:-50])
    assert main(["ledger", str(tmp_path)]) == 1
    assert "step_00000001.parquet: cannot be read as a part" in capsys.readouterr().err


def test_a_run_that_continues_another_folder_begins_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = started(tmp_path / "first")
    step(ledger, 1, 0, 1)
    following = Ledger(tmp_path / "second" / LEDGER)
    following.load_state(ledger.state())
    step(following, 2, 2, 3)

    cells, last = printed(capsys, tmp_path / "second")
    # Their oldest tokens are in the other folder.
    assert ["1", "0", "0", "0", "2", "0", "0", "2", "3", "-"] in cells
    assert last.endswith("from 2 on, where this folder begins")


def test_a_run_is_named_by_its_folder_or_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    step(started(tmp_path / "outputs" / "first"), 1, 0, 1)
    by_name, _ = printed(capsys, "first")
    by_path, _ = printed(capsys, "outputs/first")
    assert by_name == by_path

    for run, fix in (
        ("outputs/frist", "Did you mean"),
        ("nowhere", "Give the folder of a run"),
        (".", "no run, or a run of SFT, of a reward model or of an earlier version"),
    ):
        assert main(["ledger", run]) == 2
        assert fix in capsys.readouterr().err


def test_a_run_without_trained_ordinals_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started(tmp_path).close()
    assert printed(capsys, tmp_path)[1] == "no ordinal was trained yet"


@pytest.mark.processes
def test_neither_torch_nor_ray_is_imported(tmp_path: Path) -> None:
    step(started(tmp_path), 1, 0, 1)
    code = (
        "import sys; from controllers.command_line import main\n"
        f"code = main(['ledger', {str(tmp_path)!r}])\n"
        "print(code, [name for name in ('torch', 'ray', 'vllm') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "0 []"


def test_replayed_groups_are_counted_and_are_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = started(tmp_path)
    step(ledger, 1, 0, 1)
    ledger.replay(ids(0, 1), 2)
    step(ledger, 2, 2, 3)
    cells, last = printed(capsys, tmp_path)
    assert [
        "2",
        "groups",
        "were",
        "learned",
        "from",
        "once",
        "more",
        "(algorithm.replay)",
    ] in cells
    assert last.startswith("every ordinal up to 3 was trained exactly once")


def with_batches_of(prompts: int, run: Path) -> None:
    (run / "config.yaml").write_text(f"data: {{prompts_per_step: {prompts}}}\n")


def test_an_ordinal_that_was_trained_in_another_step_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches of 2: ordinals 2 and 3 are of step 2, and 4 and 5 of step 3."""
    ledger = started(tmp_path)
    for number, ordinals in ((1, (0, 1)), (2, (2, 4)), (3, (3, 5))):
        step(ledger, number, *ordinals)
    # The order alone tells of one, since 3 was trained before 4 would be.
    printed(capsys, tmp_path, code=1)
    with_batches_of(2, tmp_path)
    assert main(["ledger", str(tmp_path)]) == 1
    assert (
        "trained in another step than that of their batch: 2 ordinals (3, 4); expected"
        " step 2 for the first of them, and found 3"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompts", "reason", "code"),
    [(2, NO_SPREAD, 0), (2, "too long", 1), (3, NO_SPREAD, 0)],
)
def test_groups_that_replace_rejected_ones_are_of_their_batch(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    prompts: int,
    reason: str,
    code: int,
) -> None:
    ledger = started(tmp_path)
    ledger.reject(ids(1), reason)
    step(ledger, 1, 0, 2)
    step(ledger, 2, 3, 4)
    with_batches_of(prompts, tmp_path)
    printed(capsys, tmp_path, code=code)


def test_the_last_batch_of_a_finished_run_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = started(tmp_path)
    step(ledger, 1, 0, 1)
    step(ledger, 2, 2, 3)
    begin_segment(tmp_path, 0, 0.0)
    printed(capsys, tmp_path)
    end_segment(tmp_path, 3, "finished")
    assert main(["ledger", str(tmp_path)]) == 1
    assert (
        "step 3, the last of the finished run, is missing: the last trained ones are"
        " of step 2"
    ) in capsys.readouterr().out
    # Nothing was learned from its groups.
    ledger.reject(ids(4, 5), "no score")
    ledger.state()
    ledger.write(3)
    printed(capsys, tmp_path)


@pytest.mark.parametrize(("first_size", "code"), [(3, 0), (1, 1)])
def test_steps_of_another_size_after_a_restart_are_no_fault(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first_size: int,
    code: int,
) -> None:
    """Batches of 3 up to step 2, and of 2 from there on; or steps of 1 and 5."""
    ledger = started(tmp_path)
    with_batches_of(2, tmp_path)
    step(ledger, 1, *range(first_size))
    step(ledger, 2, *range(first_size, 6))
    following = resumed(ledger)
    following.draw(ids(6, 7), 2)
    finish(following, ids(6, 7), 2)
    step(following, 3, 6, 7)
    cells, _ = printed(capsys, tmp_path, code=code)
    text = " ".join(word for row in cells for word in row)
    assert ("trained in another step" in text) == bool(code)
