"""The line that a person watches."""

import io
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.text import Text

from tests.tracking.terminals import Screen, Terminal
from tests.waiting import PATIENCE_S
from verl_ray.profiling.output_lines import WARNINGS
from verl_ray.profiling.phases import PHASES
from verl_ray.tracking import block as block_module
from verl_ray.tracking.block import duration_text, live_block
from verl_ray.tracking.console import ConsoleTracker
from verl_ray.tracking.terminal import LiveLines

STEP = {
    "critic/rewards/mean": 0.53125,
    "actor/kl_loss": 0.0012,
    "actor/loss": 3.0,
    "perf/total_num_tokens": 2000,
    "timing_s/step": 0.5,
}


def test_one_plain_line_per_step_where_there_is_no_terminal() -> None:
    seconds = iter([100.0, 110.0, 114.0, 120.0])
    stream = io.StringIO()
    tracker = ConsoleTracker(total_steps=20, stream=stream, clock=lambda: next(seconds))
    tracker.log(0, {"val-core/sums/acc/mean@1": 0.4})
    tracker.log(1, STEP)
    tracker.log(2, {**STEP, "val-core/sums/acc/mean@1": 0.45})
    tracker.log(20, {"val-core/held_out/loss": 2.5})
    tracker.close(failed=False)
    assert stream.getvalue().splitlines() == [
        "step  0/20  held-out sums/acc/mean@1 0.4",
        # 10 s between the first two lines, 19 steps to go
        "step  1/20  reward 0.5312  kl 0.0012  4,000 tokens/s  0.50 s  3m10s left",
        # (10 + 4) / 2 = 7 s a step, 18 to go
        "step  2/20  reward 0.5312  kl 0.0012  held-out sums/acc/mean@1 0.45  4,000 tokens/s  0.50 s  2m06s left",
        "step 20/20  held-out loss 2.5",
    ]


def test_failed_rewards_are_in_the_line_of_their_step() -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(total_steps=2, stream=stream)
    healthy = {"actor/loss": 2.5, "reward_health/ok": 64.0, "reward_health/none": 0.0}
    tracker.log(1, {**healthy, "reward_health/rescored": 1.0})
    # 3 + 1 of 53 + 4 = 57 scores: 7.02 %
    failing = {
        "reward_health/ok": 53,
        "reward_health/timeout": 3,
        "reward_health/exception": 1,
    }
    tracker.log(2, {"actor/loss": 2.5, **failing})
    first, second = stream.getvalue().splitlines()
    assert "failed" not in first
    assert second == "step 2/2  loss 2.5  7% of rewards failed (timeout 3, exception 1)"


def test_the_first_line_estimates_the_time_left_from_the_step_itself() -> None:
    stream = io.StringIO()
    ConsoleTracker(total_steps=7201, stream=stream).log(
        1, {"actor/loss": 2.5, "timing_s/step": 1.0}
    )
    assert stream.getvalue() == "step    1/7201  loss 2.5  1.00 s  2h00m left\n"
    # A file has null for what is not finite.
    assert duration_text(float("nan")) == "?"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    return Terminal()


def seen(terminal: Terminal) -> list[str]:
    screen = Screen(80)
    screen.feed(terminal.getvalue())
    return screen.lines


def test_what_remains_on_a_terminal_is_whole_and_nothing_else(
    terminal: Terminal,
) -> None:
    tracker = ConsoleTracker(total_steps=100, stream=terminal, clock=lambda: 0.0)
    held_out = {"val-core/arithmetic/acc/mean@1": 0.41234}
    for step in range(1, 101):
        evaluated = held_out if step == 50 else {}
        tracker.log(step, {**STEP, **evaluated})
        with PHASES.phase(f"step {step}: saving"):
            PHASES.tick()
    tracker.close(failed=False)
    tracker.close(failed=False)

    assert seen(terminal) == [
        "step  50/100  reward 0.5312  kl 0.0012  held-out arithmetic/acc/mean@1 0.4123",
        "  4,000 tokens/s  0.50 s  0s left",
        "step 100/100  reward 0.5312  kl 0.0012  4,000 tokens/s  0.50 s",
    ]
    assert "\x1b[?25l" not in terminal.getvalue()  # the cursor stays


def test_a_block_shows_all_of_a_run_and_the_steps_while_there_are_any(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    WARNINGS.look_at("warning: of an earlier run")
    with live_block("first", stream=terminal) as block:
        assert block is not None
        with PHASES.phase("loading the actor"):
            PHASES.tick()
            block.print_above(["a table"])
            table, head, now = seen(terminal)
        assert table == "a table" and head == f"first  {head.split()[1]} elapsed"
        assert "loading the actor" in now

        # Lines that cannot be made hide nothing that is printed, and it is said once.
        error = "the block cannot be shown: ZeroDivisionError('division by zero')"
        with monkeypatch.context() as faulty:
            faulty.setattr(block.view, "lines", lambda columns, rows: 1 / 0)
            block.print_above(["another table"])
            block.print_above(["a third one"])
            above = seen(terminal)
        assert sorted(above) == ["a table", "a third one", "another table", error]

        tracker = ConsoleTracker(total_steps=9, stream=terminal)
        tracker.log(3, {"actor/loss": 2.5})
        tracker.close(failed=False)
        assert seen(terminal)[5].startswith("first  step 3/9  ")
    assert seen(terminal) == [*above, "step 3/9  loss 2.5"]

    with live_block("first", stream=terminal, enabled=False) as block:
        assert block is None


def test_a_disk_that_hangs_holds_up_nothing_that_is_printed(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading = threading.Event()
    answers = threading.Event()

    def hang(folder: Path) -> None:
        is_reading.set()
        assert answers.wait(PATIENCE_S)

    monkeypatch.setattr(block_module, "read_status", hang)
    with live_block("first", tmp_path, stream=terminal) as block:
        assert block is not None
        assert is_reading.wait(PATIENCE_S)
        block.print_above(["a table"])
        assert seen(terminal)[0] == "a table" and not answers.is_set()
        answers.set()


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def test_threads_that_print_at_once_lose_nothing(
    terminal: Terminal, eager_threads: None
) -> None:
    heights = itertools.cycle([2, 3, 4])
    block = LiveLines(terminal, lambda columns, rows: [Text("block")] * next(heights))

    def print_above(name: str) -> None:
        for number in range(50):
            block.paint([Text(f"{name}{number}")])

    threads = [threading.Thread(target=print_above, args=(name,)) for name in "abcd"]
    with block.shown():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = [f"{name}{number}" for name in "abcd" for number in range(50)]
    assert sorted(seen(terminal)) == sorted(expected)


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("CI", "true")])
def test_there_is_no_block_where_nobody_could_see_it(
    name: str, value: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    tracker = ConsoleTracker(total_steps=2, stream=terminal)
    tracker.log(1, {"actor/loss": 2.5})
    tracker.close(failed=False)
    assert terminal.getvalue() == "step 1/2  loss 2.5\n"


def test_a_resumed_run_shows_its_first_evaluation(
    terminal: Terminal, tmp_path: Path
) -> None:
    first = {"training/global_step": 0, "val-core/sums/acc/mean@1": 0.4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(first) + "\n")
    tracker = ConsoleTracker(total_steps=9, folder=tmp_path, stream=terminal)
    tracker.log(5, {**STEP, "val-core/sums/acc/mean@1": 0.45})
    shown = "\n".join(seen(terminal))
    tracker.close(failed=False)
    assert "held-out  sums/acc/mean@1 0.45 at step 5 (+0.05 since step 0)" in shown


def test_the_last_step_of_a_run_that_was_stopped_remains(terminal: Terminal) -> None:
    tracker = ConsoleTracker(total_steps=1000, stream=terminal)
    tracker.log(7, STEP)
    tracker.close(failed=True)
    (line,) = seen(terminal)
    assert line.startswith("step    7/1000  reward 0.5312")


def test_names_are_no_markup_and_no_control_sequences(terminal: Terminal) -> None:
    tracker = ConsoleTracker(total_steps=2, stream=terminal)
    tracker.log(2, {"val-core/[red]\x1b[2J/acc/mean@1": 0.45})
    tracker.close(failed=False)
    assert seen(terminal) == ["step 2/2  held-out [red]\\x1b[2J/acc/mean@1 0.45"]


def test_a_terminal_shows_the_phase(terminal: Terminal) -> None:
    tracker = ConsoleTracker(total_steps=2, stream=terminal)
    with PHASES.phase("step 2/2"), PHASES.phase(lambda: "scoring 12/256"):
        PHASES.tick()
        tracker.log(1, STEP)
        assert tracker._block is not None
        tracker._block.print_above([])
        lines = seen(terminal)
    tracker.close(failed=False)
    assert "step 2/2: scoring 12/256" in lines[1]
    assert "reward 0.5312" in lines[2]
