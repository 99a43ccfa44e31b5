"""The line that a person watches."""

import io
import re

import pytest

from verl_ray.profiling.phases import PHASES
from verl_ray.tracking.console import ConsoleTracker


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def screen(written: str, width: int = 80) -> list[str]:
    """What a terminal shows that never scrolls, by the few codes that rich uses."""
    lines = [""]
    row = column = 0
    for code, character in re.findall(r"\x1b\[([\d?;]*[A-Za-z])|(.|\n)", written):
        if code.endswith("A"):
            row -= int(code[:-1] or 1)
        elif code == "2K":
            lines[row] = ""
        elif character == "\r":
            column = 0
        elif character:
            # A terminal in its usual mode begins a line at its left edge.
            if character == "\n" or column == width:
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            if character != "\n":
                lines[row] = lines[row].ljust(column)[:column] + character
                column += 1
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("steps", [4, 100])
def test_what_remains_on_a_terminal_is_whole_and_nothing_else(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    tracker = ConsoleTracker(total_steps=steps, stream=terminal, clock=lambda: 0.0)
    held_out = {"val-core/arithmetic/acc/mean@1": 0.41234}
    for step in range(1, steps):
        tracker.log(step, STEP)
        with PHASES.phase(f"step {step}: saving"):
            PHASES.tick()
    tracker.log(steps, {**STEP, **held_out})
    with PHASES.phase("saving"):
        PHASES.tick()
    tracker.close(failed=False)

    lines = screen(terminal.getvalue())
    assert lines[-2:] == [
        f"step {steps}/{steps}  reward 0.5312  kl 0.0012"
        "  held-out arithmetic/acc/mean@1 0.4123",
        "  4,000 tokens/s  0.50 s",
    ]
    assert all(re.match(r"step +\d+/", line) for line in lines[:-1])
    assert len(lines) - 1 == min(steps, 20)


def test_the_last_step_of_a_run_that_was_stopped_remains() -> None:
    terminal = Terminal()
    tracker = ConsoleTracker(total_steps=1000, stream=terminal)
    tracker.log(7, STEP)
    tracker.close(failed=True)
    (line,) = screen(terminal.getvalue())
    assert line.startswith("step    7/1000  reward 0.5312")


def test_a_terminal_shows_a_live_line_and_keeps_evaluations() -> None:
    terminal = Terminal()
    tracker = ConsoleTracker(total_steps=2, stream=terminal)
    tracker.log(1, STEP)
    tracker.log(2, {"val-core/[red]sums/acc/mean@1": 0.45})
    tracker.close(failed=False)
    tracker.close(failed=False)
    shown = terminal.getvalue()
    assert "starting" in shown
    assert "step 2/2  held-out [red]sums/acc/mean@1 0.45" in shown
    assert "reward 0.5312" in shown
    assert "\x1b[?25l" not in shown.rpartition("\x1b[?25h")[2]  # the cursor is back


def test_a_terminal_shows_the_phase_above_the_last_step() -> None:
    terminal = Terminal()
    tracker = ConsoleTracker(total_steps=2, stream=terminal)
    tracker.log(1, STEP)
    with PHASES.phase("step 2/2"), PHASES.phase("scoring 12/256"):
        PHASES.tick()
    tracker.log(1, STEP)
    *_, phase, step = screen(terminal.getvalue())
    tracker.close(failed=False)
    assert "step 2/2: scoring 12/256" in phase
    assert "step 1/2  reward 0.5312" in step
