"""The supervisor and drivers that end in every way; each is a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SUPERVISOR = """
import sys
from controllers import supervisor
supervisor._PAUSE_S = 0.1
supervisor._LOOK_S = 0.1
sys.exit(supervisor.supervise([sys.executable, "-c", sys.argv[1], *sys.argv[2:]]))
"""

DRIVER = """
import os, signal, sys, time
from pathlib import Path
from controllers.supervisor import report_to_supervisor, reports
report_to_supervisor()
number = reports().restarts
print("driver", number, flush=True)
def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)
"""


def supervised(body: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, DRIVER + textwrap.dedent(body), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(body: str) -> tuple[int, list[str], str]:
    """Return the code, the drivers that there were, and what the supervisor said."""
    with supervised(body) as process:
        out, err = process.communicate(timeout=100)
    return process.returncode, out.splitlines(), err


def test_a_killed_driver_is_followed_by_another() -> None:
    body = """
        reports().limit(3, 0, [], '')
        if number == 0:
            reports().finished(7)
            die()
        if number == 1:
            os._exit(5)  # as Ray ends it
        reports().end()
        sys.exit(0)
    """
    code, drivers, said = ended(body)
    assert (code, drivers) == (0, ["driver 0", "driver 1", "driver 2"])
    first, second = said.splitlines()
    assert (
        "after step 7 (signal SIGKILL); it starts again in 0.1 s (number 1 of" in first
    )
    assert (
        "(exit code 5, without a word); it starts again in 0.2 s (number 2 of" in second
    )


def test_later_drivers_make_the_same_run() -> None:
    """The name of a run may hold the time, and what is named may be behind by then."""
    body = """
        said = reports()
        print(sys.argv[1:], said.follows_begun, said.follows_saved, flush=True)
        reports().limit(3, 0, ["run.name=first", "run.dir=/x"], '')
        if number == 1:
            reports().begun()
            reports().saved()
        if number < 2:
            die()
        reports().end()
    """
    same = "['run.name=first', 'run.dir=/x']"
    assert ended(body)[1] == [
        "driver 0",
        "[] False False",
        "driver 1",
        f"{same} False False",
        "driver 2",
        f"{same} True True",
    ]


def test_who_tells_the_driver_to_stop_gets_no_other_one() -> None:
    for end in ("os._exit(130)", "die(signal.SIGTERM)"):
        code, drivers, said = ended(f"reports().limit(3, 0, [], '')\n{end}")
        assert code in (130, 128 + signal.SIGTERM) and drivers == ["driver 0"]
        assert said == ""


def test_a_driver_that_says_why_it_ends_is_the_last() -> None:
    body = "reports().limit(3, 0, [], '')\nreports().end()\nsys.exit(2)"
    assert ended(body) == (2, ["driver 0"], "")
    # It may say that another one can do better.
    body = """
        reports().limit(3, 0, [], '')
        if number == 0:
            reports().retry("the raylet has ended")
        reports().end()
        sys.exit(1 if number == 0 else 0)
    """
    code, drivers, said = ended(body)
    assert (code, len(drivers)) == (0, 2) and "(the raylet has ended)" in said


def test_a_driver_that_never_began_a_run_is_the_last() -> None:
    assert ended("die()") == (128 + signal.SIGKILL, ["driver 0"], "")


def test_a_stopped_driver_goes_on() -> None:
    body = """
        reports().limit(3, 0, [], '')
        os.kill(os.getpid(), signal.SIGSTOP)
        reports().end()
    """
    code, drivers, said = ended(body)
    assert (code, drivers) == (0, ["driver 0"])
    assert said == "warning: the driver was stopped (SIGSTOP), and goes on\n"


def test_the_same_failure_of_a_start_is_tried_once() -> None:
    body = """
        reports().limit(9, 0, [], '')
        reports().retry(["rank 7 died", "no cluster", "rank 8 died"][number], once=True)
        reports().end()
        sys.exit(1)
    """
    code, drivers, said = ended(body)
    assert (code, len(drivers)) == (1, 3)
    last = "the driver ended after step 0 (rank 8 died): the second time without a new"
    assert last in said.splitlines()[-1]
    # After one that has run, it is waited for: its memory may not be free yet.
    body = """
        from controllers.run import next_driver
        from verl_ray.errors import WorkerDied
        reports().limit(1, 60, [], '')
        if number in (1, 2):
            error = WorkerDied("was killed", role="actor", rank=0, node="a")
            next_driver.ask_for_another_driver(error)
            next_driver.report_refusal(error)
            reports().end()
            sys.exit(1)
        reports().begun()
        if number == 0:
            die()
        reports().end()
    """
    code, drivers, said = ended(body)
    assert (code, len(drivers)) == (0, 4)
    assert said.count("waits for what refuses its start: actor rank 0 on a: was") == 2


def test_drivers_that_bring_no_new_step_have_a_limit() -> None:
    body = """
        reports().limit(2, 0, [], '')
        reports().finished([1, 2, 2, 2, 2][number])
        die()
    """
    code, drivers, said = ended(body)
    # The second one brings a new step.
    assert (code, len(drivers)) == (137, 4)
    assert "2 before it brought no new step (run.recovery.max_restarts = 2)" in said


def test_a_refusal_that_may_pass_is_waited_for() -> None:
    """Refused drivers count in no limit but that of the time."""
    body = """
        reports().limit(1, 60, [], '')
        if number in (1, 2, 3):
            reports().refused("run.dir = /x: 1 GiB is free")
            reports().end()
            sys.exit(2)
        reports().begun()
        if number == 0:
            die()
        reports().end()
    """
    code, drivers, said = ended(body)
    assert (code, len(drivers)) == (0, 5)
    lost, *waits = said.splitlines()
    assert "signal SIGKILL" in lost
    beginning = "warning: the run waits for what refuses its start: run.dir = /x: 1 GiB"
    assert all(line.startswith(beginning) for line in waits)
    pauses = [line.partition("again in ")[2].split()[0] for line in waits]
    assert pauses == ["0.1", "0.2", "0.4"]
    assert waits[0].endswith("(0 of at most 60 s)")


@pytest.mark.parametrize(("limit_s", "num_drivers"), [(0, 2), (0.05, 3)])
def test_a_refusal_ends_the_run_in_time(limit_s: float, num_drivers: int) -> None:
    body = f"""
        reports().limit(1, {limit_s}, [], '')
        if number == 0:
            die()
        reports().refused("the port is taken")
        reports().end()
        sys.exit(2)
    """
    code, drivers, said = ended(body)
    assert (code, len(drivers)) == (2, num_drivers)
    assert said.splitlines()[-1].startswith("the port is taken: the run has waited")
    assert f"(run.recovery.max_wait_s = {limit_s:g})" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_on_to_the_driver_and_ends_the_run(number: int) -> None:
    body = """
        def stop(*_):
            print("stopped", flush=True)
            os._exit(130)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        reports().limit(3, 0, [], '')
        print("ready", flush=True)
        time.sleep(60)
    """
    with supervised(body) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [
            "driver 0\n",
            "ready\n",
        ]
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "stopped\n")


def test_a_signal_between_two_drivers_ends_the_run() -> None:
    pauses = "_PAUSE_S = supervisor._LONGEST_PAUSE_S = 5000"
    code = SUPERVISOR.replace("_PAUSE_S = 0.1", pauses)
    body = DRIVER + "reports().limit(3, 0, [], '')\ndie()"
    with subprocess.Popen(
        [sys.executable, "-c", code, body], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            assert "it starts again in 5000 s" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            # Long before the pause is over.
            assert process.wait(60) == 130
        finally:
            process.kill()


def test_a_driver_is_told_to_stop_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    body = """
        def stop(*_):
            Path(sys.argv[1]).write_text("stopped")
            os._exit(130)
        signal.signal(signal.SIGTERM, stop)
        print(os.getpid(), flush=True)
        time.sleep(60)
    """
    mark = tmp_path / "mark"
    with supervised(body, str(mark)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        driver = psutil.Process(int(process.stdout.readline()))
        os.kill(process.pid, signal.SIGKILL)
        # The file is there a moment before it has its text.
        until(lambda: mark.exists() and mark.read_text() == "stopped")
        driver.wait(30)


def test_only_the_driver_knows_of_its_supervisor() -> None:
    body = """
        import subprocess
        reports().limit(0, 0, [], '')
        code = "from controllers.supervisor import is_supervised; import os; os.write(1, str(is_supervised()).encode())"
        print(subprocess.check_output([sys.executable, "-c", code]).decode(), flush=True)
        # A child that lives longer does not keep the supervisor waiting.
        child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print(child.pid, flush=True)
        reports().end()
    """
    code, out, _ = ended(body)
    *said, pid = out
    child = psutil.Process(int(pid))
    assert child.cmdline() == ["sleep", "600"]
    child.kill()
    assert (code, said) == (0, ["driver 0", "False"])


def test_the_program_supervises_training_alone() -> None:
    """The supervisor imports nothing of the project beside itself."""
    code = """
import sys
import controllers.supervisor
controllers.supervisor.supervise = lambda command: print(command[1:], sorted(
    name for name in sys.modules if name.partition(".")[0] in ("controllers", "verl_ray", "torch", "ray")
))
import controllers.__main__
sys.orig_argv = ["python", "verl-ray", "train"]
sys.argv = ["verl-ray", "train"]
controllers.__main__.main()
sys.argv = ["verl-ray", "--version"]
print(controllers.__main__.main())
"""
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    training, *version, code_of_version = said.splitlines()
    assert training == (
        "['verl-ray', 'train'] ['controllers', 'controllers.__main__', 'controllers.supervisor']"
    )
    assert version and code_of_version == "0"
