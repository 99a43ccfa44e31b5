"""The block that shows a run: its lines, and how it stands on a real terminal."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kills import ROOT
from tests.tracking.terminals import Screen
from tests.waiting import PATIENCE_S
from verl_ray.profiling.phases import Count, Doing
from verl_ray.profiling.process_table import ProcessRow
from verl_ray.tracking.block import Course, RunView

STEP = {
    "critic/rewards/mean": 0.5,
    "actor/kl_loss": 0.0012,
    "perf/total_num_tokens": 2000,
    "timing_s/step": 10.0,
    "timing_s/gen": 6.0,
    "timing_s/update_actor": 3.0,
}


def row(role: str, verb: str = "", phase: str = "idle", ranks: int = 1) -> ProcessRow:
    seconds = 4.0 if verb else None
    return ProcessRow(role, tuple(range(ranks)), ("a",), verb, phase, seconds, "", "")


def view() -> RunView:
    course = Course(200)
    course.note({"training/global_step": 0, "val-core/sums/acc/mean@1": 0.4})
    course.note({**STEP, "critic/rewards/mean": 0.25, "training/global_step": 1})
    held_out = {"val-core/sums/acc/mean@1": 0.45, "val-core/\x1b[2J/acc/mean@1": 0.5}
    course.note({**STEP, **held_out, "training/global_step": 50})
    return RunView(
        "first",
        course,
        elapsed_s=505.0,
        doing=Doing("step 51/200", Count(64, 256, "responses generated"), 12.0),
        rows=(
            row("driver", phase="step 51/200"),
            row("actor", ranks=4),
            row("rollout", "generate", "812 tokens"),
            row("rollout"),
            row("reward", "score", "8 rows"),
            row("reward", phase="has ended", ranks=2),
        ),
        warnings=("one\ntwo", "the disk is \x1b[31mfull"),
    )


def shown(columns: int, rows: int = 20) -> list[str]:
    lines = [line.plain.rstrip() for line in view().lines(columns, rows)]
    # The spinner turns.
    return [
        line[:10] + "*" + line[11:] if line.startswith("now") else line
        for line in lines
    ]


def test_a_wide_block() -> None:
    bar = "━" * 7 + "╸" + "━" * 22
    quarter = "█" * 18 + "█" * 9 + "█" * 3
    assert shown(199) == [
        f"first  step 50/200  {bar}  8m25s elapsed  25m00s left",
        f"now       * step 51/200  {bar}  64/256 responses generated",
        "last step reward 0.5 (+0.25 since step 1)  kl 0.0012 (+0 since step 1)  200 tokens/s  10.00 s",
        "held-out  sums/acc/mean@1 0.45 at step 50 (+0.05 since step 0)  \\x1b[2J/acc/mean@1 0.5 at step 50",
        f"time      {quarter}  █ generation 60%  █ update of the actor 30%  █ the rest of the steps 10%",
        "processes actor ×4 idle  rollout 1 of 2 generate 812 tokens 4 s  reward 2 of 3 has ended",
        "warning   one two",
        "warning   the disk is \\x1b[31mfull",
    ]


def test_a_narrow_block_keeps_to_its_width_and_a_low_one_to_its_height() -> None:
    lines = shown(79)
    assert max(map(len, lines)) <= 79
    assert lines[2:6] == [
        "last step reward 0.5 (+0.25 since step 1)  kl 0.0012 (+0 since step 1)",
        "          200 tokens/s  10.00 s",
        "held-out  sums/acc/mean@1 0.45 at step 50 (+0.05 since step 0)",
        "          \\x1b[2J/acc/mean@1 0.5 at step 50",
    ]
    # A quarter of the 26 columns that are free, half of one by half a bar.
    bar = "━" * 6 + "╸" + "━" * 19
    assert lines[1] == f"now       * step 51/200  {bar}  64/256 responses generated"
    low = shown(79, rows=2)
    assert [line.split()[0] for line in low] == ["first", "now"]


def test_a_long_text_makes_way_for_its_bar() -> None:
    doing = Doing(
        "loading " + ", ".join(["the actor"] * 20), Count(2, 6, "processes"), 3.0
    )
    (_, line) = RunView("first", doing=doing).lines(79, 10)
    assert len(line.plain) == 79
    assert line.plain.endswith("the actor…  ━━━╺━━━━━━  2/6 processes")

    # Its own numbers are not repeated.
    doing = Doing(
        "step 2/9: scoring 12/24 (actor)", Count(12, 24, "responses scored"), 3.0
    )
    (_, line) = RunView("first", doing=doing).lines(79, 10)
    assert line.plain.endswith(
        "scoring 12/24 (actor)  " + "━" * 14 + "╸" + "━" * 14 + "  50%"
    )


def test_a_line_may_come_while_the_block_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    course = view().course
    assert course is not None
    note = course.note

    def label(name: str) -> str:
        # The driver notes an evaluation of other data.
        line = {"training/global_step": 51, f"{name}/other/acc/mean@1": 0.5}
        note(line)
        return name

    monkeypatch.setattr("verl_ray.tracking.block.held_out_label", label)
    assert [metric.step for metric in course.held_out] == [50, 50]
    assert len(course.held_out) == 4


def test_a_run_that_has_no_step_yet() -> None:
    starting = RunView(
        "first", elapsed_s=3.0, doing=Doing("loading the actor", None, 2.0)
    )
    head, now = starting.lines(79, 10)
    assert head.plain == "first  starting  3s elapsed"
    assert now.plain.endswith(" loading the actor  2 s")

    export = RunView("export of step_00000200", has_steps=False, elapsed_s=3.0)
    assert export.lines(79, 10)[0].plain == "export of step_00000200  3s elapsed"


# ------------------------------------------------------------------- on a real terminal

PROGRAM = """
import itertools, os, sys
from pathlib import Path
from verl_ray.profiling.phases import phase, PHASES
from verl_ray.tracking import terminal
from verl_ray.tracking.console import ConsoleTracker

terminal._REFRESH_S = 3600.0  # it is painted when the test asks for it
clock = itertools.count(0, 10)
tracker = ConsoleTracker(50, Path(sys.argv[1]), clock=lambda: next(clock))

def step(number, **more):
    with phase(f"step {number}/50") as current:
        current.reach(number, 64, "responses generated")
        PHASES.tick()
        metrics = {"critic/rewards/mean": number / 50, "timing_s/step": 10.0,
                   "timing_s/gen": 6.0, "timing_s/update_actor": 3.0}
        tracker.log(number, {**metrics, **more})
        paint()

def paint():
    tracker._block.terminal.paint()

for line in sys.stdin:
    exec(line)
    os.write(int(sys.argv[2]), b".")
"""


class Console:
    """A program with a `ConsoleTracker` on a terminal."""

    def __init__(self, folder: Path, width: int, stderr: int | None = None) -> None:
        self.screen = Screen(width)
        self._terminal, terminal = pty.openpty()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._set_width(width)
        self._done, done = os.pipe()
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("CI", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), str(done)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=terminal,
            stderr=terminal if stderr is None else stderr, pass_fds=[done],
            env={**environment, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip
        os.close(terminal)
        os.close(done)

    def does(self, command: str) -> list[str]:
        """Let the program do something; return what the terminal shows then."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()
        # Ends when the program is done, and all that it wrote has been read.
        is_done = False
        while True:
            outputs = [self._terminal] if is_done else [self._terminal, self._done]
            ready, _, _ = select.select(outputs, [], [], 0 if is_done else PATIENCE_S)
            if self._terminal in ready:
                written = os.read(self._terminal, 65536)
                self.screen.feed(self._decoder.decode(written))
            elif ready:
                assert os.read(self._done, 1), "the program has ended"
                is_done = True
            else:
                assert is_done, "the program does nothing"
                return self.screen.lines

    def resize(self, width: int) -> None:
        self._set_width(width)
        self.screen.resize(width)

    def _set_width(self, width: int) -> None:
        size = struct.pack("HHHH", 30, width, 0, 0)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._terminal)
        os.close(self._done)


@pytest.fixture(params=[80, 200])
def console(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Console]:
    console = Console(tmp_path / "first", request.param)
    yield console
    console.close()


def block_of(lines: list[str]) -> list[str]:
    """The block, which stands on the terminal once, below all else."""
    (start,) = [i for i, line in enumerate(lines) if line.startswith("first  step")]
    return lines[start:]


@pytest.mark.processes
def test_fifty_updates_leave_one_whole_block(console: Console) -> None:
    for number in range(1, 51):
        if number == 7:
            console.does("print('warning: the disk is full', file=sys.stderr)")
            console.does("print('a line of', 'x' * 300)")
        held_out = number % 20 == 0
        more = "**{'val-core/sums/acc/mean@1': 0.4}" if held_out else ""
        lines = console.does(f"step({number}, {more})")

        labels = [line.split()[0] for line in block_of(lines)]
        assert labels[:3] == ["first", "now", "last"] and labels.count("time") == 1
        block = console.screen.is_wrapped[console.screen.row - len(labels) + 1 :]
        assert not any(block)

    above = lines[: -len(block_of(lines))]
    text = "".join(above)
    assert above[0] == "warning: the disk is full" and "x" * 300 in text
    assert [line.split("  ")[0] for line in above if "held-out" in line] == [
        "step 20/50",
        "step 40/50",
    ]
    bar = "━" * 30
    assert block_of(lines)[0].startswith(f"first  step 50/50  {bar}  ")

    # Narrower, wider, and as it was.
    width = console.screen.width
    for changed in (width - 23, width + 40, width):
        console.resize(changed)
        lines = console.does("paint()")
        assert block_of(lines)[0].startswith("first  step 50/50")
        assert "".join(lines[: -len(block_of(lines))]) == text

    # The block is gone at the end, and the last step remains.
    lines = console.does("tracker.close(failed=False)")
    assert not any(line.startswith(("first", "now", "time")) for line in lines)
    assert lines[len(above)].startswith("step 50/50  reward 1  ")


@pytest.mark.processes
def test_errors_that_go_elsewhere_are_no_part_of_the_terminal(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        console = Console(tmp_path / "first", 80, stderr=file.fileno())
    console.does("step(1)")
    lines = console.does("print('warning: a disk', file=sys.stderr, flush=True)")
    console.close()
    assert block_of(lines) == lines
    assert errors.read_text() == "warning: a disk\n"
