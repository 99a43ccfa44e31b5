"""Signals: announced, obeyed where nothing is lost, and fatal at the second one."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

BEGIN = """
import os, signal, sys, time
from verl_ray.cluster.signals import (
    Outlook, all_or_nothing, announcing, deferring_signals, finishing, heed_signals,
    pass_point_of_no_return, pointing, raising_signals, stop_on_signals,
)
from verl_ray.errors import Interrupted
stop_on_signals()

def wait():
    while True:
        heed_signals()
        time.sleep(0.01)

def until(condition):
    while not condition():
        time.sleep(0.01)
"""


def run(
    code: str, *sent: signal.Signals, pause_s: float = 0.0
) -> subprocess.CompletedProcess[str]:
    """Run a process and send it signals, each after one more line of its output.

    Before each signal there is a pause, since those of a second are one.
    """
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # The tests themselves may run under nohup
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = ""
        for number in sent:
            lines += process.stdout.readline()
            time.sleep(pause_s)
            process.send_signal(number)
        out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(code, process.returncode, lines + out, err)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_knows_nothing_of_it(sent: signal.Signals) -> None:
    code = """
try:
    print("up", flush=True)
    time.sleep(100)
except Interrupted as stop:
    print(stop)
"""
    ended = run(code, sent)
    assert ended.stdout == f"up\nstopped by {sent.name}\n"
    assert ended.stderr == f"{sent.name}: stopping. Another one ends it at once\n"


@pytest.mark.parametrize("library", ["time.sleep(100)", "waits_and_wraps()"])
def test_a_library_that_waits_is_given_up(library: str) -> None:
    code = f"""
def waits_and_wraps():
    try:
        time.sleep(100)
    except Exception as error:
        raise RuntimeError("the server did not answer") from error

try:
    with deferring_signals(), raising_signals():
        print("up", flush=True)
        {library}
except Interrupted as stop:
    print(stop)
"""
    ended = run(code, signal.SIGTERM)
    assert ended.returncode == 0 and ended.stdout == "up\nstopped by SIGTERM\n"


def test_it_is_answered_while_compiled_code_runs() -> None:
    """The main thread is in a call that does not come back, as in a long fsync:
    Python's handlers wait for it.
    """
    code = (
        "import hashlib\nprint('up', flush=True)\n"
        # Minutes, without the interpreter lock
        "hashlib.pbkdf2_hmac('sha256', b'a', b'b', (1 << 31) - 1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + code], cwd=ROOT, stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("SIGINT: stopping.")
        os.kill(process.pid, 0)  # still there
        process.kill()


def test_waits_are_given_up_until_there_is_no_way_back() -> None:
    code = """
with announcing(lambda: Outlook("step 1 is given up", "")), deferring_signals():
    try:
        with all_or_nothing() as work:
            print("up", flush=True)
            wait()
    except Interrupted:
        print("given up", work.committed_at, flush=True)
"""
    assert run(code, signal.SIGINT).stdout == "up\ngiven up None\n"
    code = """
from verl_ray.cluster.signals import _state
left = iter(range(100))
with announcing(lambda: Outlook("step 1 is finished first", "step 1")), deferring_signals():
    try:
        with all_or_nothing():
            pass_point_of_no_return()
            pass_point_of_no_return()
            print("up", flush=True)
            until(lambda: _state.received)
            heed_signals()
            with finishing():
                heed_signals()
            heed_signals()
            print("finished", flush=True)
        print("not saved", flush=True)
        heed_signals()
    except Interrupted:
        with finishing():
            heed_signals()
            print("saved", flush=True)
"""
    ended = run(code, signal.SIGTERM)
    assert ended.stdout == "up\nfinished\nnot saved\nsaved\n"
    assert (
        ended.stderr
        == "SIGTERM: step 1 is finished first. Another one ends it at once and loses step 1\n"
    )


def test_a_signal_that_came_before_gives_the_work_up() -> None:
    code = """
with deferring_signals(), all_or_nothing() as work:
    os.kill(os.getpid(), signal.SIGINT)
    try:
        pass_point_of_no_return()
    except Interrupted:
        print(work.committed_at)
"""
    assert run(code).stdout == "None\n"


@pytest.mark.parametrize(
    ("way_on", "final_output"),
    [
        ("lambda: 'To go on:\\nverl-ray train'", ["To go on:", "verl-ray train"]),
        ("wait", []),  # a disk that hangs
        ("lambda: os.listdir('/nowhere')", []),
    ],
)
def test_a_second_signal_ends_and_says_what_is_lost(
    way_on: str, final_output: list[str]
) -> None:
    code = """
from verl_ray.cluster import signals
from verl_ray.cluster.signals import _state
signals._ONE_SIGNAL_S = 3.0  # a busy machine may need more than the second
with (
    announcing(lambda: Outlook("steps are finished", "steps 4 to 6")), deferring_signals(), finishing(),
    pointing({way_on}),
):
    print("up", flush=True)
    until(lambda: _state.announced_at)
    os.kill(os.getpid(), signal.SIGINT)  # `timeout` sends the one signal twice
    time.sleep(3.2)
    print("again", flush=True)
    time.sleep(100)
""".replace("{way_on}", way_on)
    ended = run(code, signal.SIGINT, signal.SIGTERM)
    assert ended.returncode == 130
    assert ended.stdout == "up\nagain\n"
    assert ended.stderr.splitlines() == [
        "SIGINT: steps are finished. Another one ends it at once and loses steps 4 to 6",
        "", "SIGTERM again: ended at once, lost: steps 4 to 6", *final_output,
    ]  # fmt: skip


def test_a_closed_terminal_lets_a_step_finish() -> None:
    code = """
from verl_ray.cluster.signals import _state
with deferring_signals(), finishing():
    print("up", flush=True)
    until(lambda: _state.announced_at)
    print("to nobody", flush=True)  # an error, were it the terminal still
    os.write(int(sys.argv[1]), b"finished")
"""
    reading, writing = os.pipe()
    child, terminal = pty.fork()  # its controlling terminal
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in `run`
        os.chdir(ROOT)
        os.set_inheritable(writing, True)
        os.execv(sys.executable, [sys.executable, "-c", BEGIN + code, str(writing)])
    os.close(writing)
    assert os.read(terminal, 100).startswith(b"up")
    os.close(terminal)
    with os.fdopen(reading, "rb") as message:
        assert message.read() == b"finished"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    code = "print('up', flush=True)\nos.kill(os.getpid(), signal.SIGHUP)\nheed_signals()\nprint('goes on')"
    ended = subprocess.run(
        ["nohup", sys.executable, "-c", BEGIN + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.stdout == "up\ngoes on\n"


def test_signals_of_a_forked_child_are_its_own() -> None:
    code = """
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    try:
        os.write(writing, b"up")
        time.sleep(100)
    except Interrupted:
        os._exit(7)
os.read(reading, 2)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
time.sleep(0.1)
heed_signals()
"""
    ended = run(code)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("7\n", "", 0)


def test_a_borrowed_process_is_given_back() -> None:
    code = """
import threading
from verl_ray.cluster.signals import borrowing_signals
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.set_wakeup_fd(-1)
import verl_ray.cluster.signals as ours
ours._forget()
threads = threading.active_count()

def block(name):
    print(name, flush=True)
    try:
        with borrowing_signals(), deferring_signals(), finishing():
            until(lambda: ours._state.received)
            heed_signals()
            print("saving", flush=True)
            wait()
    except Interrupted as stop:
        print(stop, end="; ", flush=True)

# What has to be finished is given up at the second signal, and the process lives.
block("first")
# A signal that nothing has heeded is a stop at the end, and goes to its owner.
print("second", flush=True)
try:
    with borrowing_signals(), deferring_signals():
        until(lambda: ours._state.received)
except Interrupted as stop:
    print(stop)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.set_wakeup_fd(-1), threading.active_count() - threads)

def other():
    with borrowing_signals():
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
thread = threading.Thread(target=other)
thread.start()
thread.join()
"""
    sent = (signal.SIGINT, signal.SIGINT, signal.SIGTERM)
    ended = run(code, *sent, pause_s=1.1)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "first", "saving", "stopped by SIGINT; second", "mine", "stopped by SIGTERM", "True", "-1 0", "True",
    ]  # fmt: skip
