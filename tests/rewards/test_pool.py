"""The pool against functions that hang, die, lie and leave things behind; every process
here is real.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import until
from verl_ray.errors import ConfigError, DataError, RewardError
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.pool import ScoringPool, ScoringProcess, Unit
from verl_ray.rewards.request import ScoreRequest

pytestmark = pytest.mark.processes

PATIENCE_S = 60.0  # of deadlines that do not pass

KILLED = "was killed by signal 9 (Killed), as the system does where memory is short"

FUNCTIONS = """
    import glob, os, re, signal, subprocess, sys, time

    def length(response, answer, *, prompt, data_source, extra):
        return len(response)

    def seen(response, answer, *, prompt, data_source, extra):
        assert (response, answer, prompt, data_source, extra) == ("r", "a", "p", "maths", {"n": [1]})
        return 1

    def act(response, answer, *, prompt, data_source, extra):
        if response == "hang":
            time.sleep(60)
        elif response == "hang and hold the interpreter":
            re.match("(a+)+b", "a" * 60)
        elif response == "raise":
            raise KeyError("what was missing")
        elif response == "sys.exit":
            sys.exit(3)
        elif response == "os._exit":
            os._exit(7)
        elif response == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif response == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif response in ("killed once", "hang once") and not os.path.exists(extra["log"] + response):
            open(extra["log"] + response, "w").close()
            if response == "killed once":
                os.kill(os.getpid(), signal.SIGKILL)
            re.match("(a+)+b", "a" * 60)
        elif response == "stopped once" and not os.path.exists(extra["log"] + response):
            open(extra["log"] + response, "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        elif response == "killed once, then hang":
            if not os.path.exists(extra["log"] + response):
                open(extra["log"] + response, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        elif response.startswith("meet"):
            open(extra["log"] + response, "w").close()
            while len(glob.glob(extra["log"] + "meet*")) < 4:
                time.sleep(0.01)
            open(extra["log"] + "all met", "w").close()
            if response == "meet with grandchild":
                subprocess.Popen(["sleep", "61"])
            if response == "meet with escaped grandchild":
                subprocess.Popen(["sleep", "62"], start_new_session=True)
            open(extra["log"] + "hangs " + response, "w").close()
            if response == "meet and hold the interpreter":
                re.match("(a+)+b", "a" * 60)
            time.sleep(60)
        elif response == "none":
            return None
        elif response == "nan":
            return float("nan")
        elif response == "inf":
            return float("-inf")
        elif response == "text":
            return "1.0"
        elif response == "print":
            print("printed by a function", flush=True)
            os.write(1, b"written to the descriptor")
            subprocess.run(["echo", "echoed"])
        elif response == "close everything":
            os.closerange(3, 4096)
        elif response == "escaped grandchild and hang":
            subprocess.Popen(["sleep", "62"], start_new_session=True)
            time.sleep(60)
        elif response == "forked grandchild and exit":
            if os.fork() == 0:
                os.setsid()
                time.sleep(63)
            os._exit(9)
        elif response == "escaped grandchild":
            subprocess.Popen(["sleep", "64"], start_new_session=True)
        elif response == "slow":
            time.sleep(0.3)
        with open(extra["log"], "a") as log:
            log.write(response + ",")
        return 1.0
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "grading.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return str(path)


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Command lines of the processes that this test started and that are alive,
    wherever they hang in the tree.
    """
    marker = f"REWARD_TEST={uuid.uuid4()}"
    monkeypatch.setenv(*marker.split("="))

    def commands() -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    process.name != str(os.getpid())
                    and marker.encode() in (process / "environ").read_bytes()
                ):
                    found.append(
                        (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
            except (
                OSError
            ):  # it ended while we were looking; the environment of a zombie is empty
                continue
        return found

    yield commands
    assert commands() == []


def requests(log: Path, *responses: str) -> list[ScoreRequest]:
    return [
        ScoreRequest(response, "", "", "maths", {"log": str(log)})
        for response in responses
    ]


def twice(cause: str) -> str:
    return f"the scoring process died twice: it {cause}, and when the item was scored again, it {cause}"


def hasten(
    monkeypatch: pytest.MonkeyPatch,
    hangs: Callable[[ScoringPool, ScoringProcess], bool],
) -> None:
    """Let the deadline of a process pass soon once it is known to hang.

    With so short a deadline from the beginning, items that are quick would miss it on a
    busy machine.
    """
    remaining_s = ScoringPool._remaining_s

    def hastened_s(pool: ScoringPool, process: ScoringProcess) -> float:
        if hangs(pool, process):
            return process.remaining_s(0.5, 0.5)
        # The pool looks again soon.
        return min(0.1, remaining_s(pool, process))

    monkeypatch.setattr(ScoringPool, "_remaining_s", hastened_s)


def is_stopped(pool: ScoringPool, process: ScoringProcess) -> bool:
    return process.child.is_stopped


def item_in_hand(pool: ScoringPool, process: ScoringProcess) -> str:
    if not process.pending:
        return ""
    return pool._requests[process.pending[0].items[0]].response


@contextlib.contextmanager
def alarm(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Run `action` in this thread after `seconds`, whatever it is doing then."""
    before = signal.signal(signal.SIGALRM, lambda *_: action())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def guard_of(pool: ScoringPool) -> int:
    return pool._processes[0].child.pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_scores_come_back_in_order(
    functions: str, living: Callable[[], list[str]]
) -> None:
    with ScoringPool(
        {"maths": f"{functions}:length", "default": "exact_match"}, 2, PATIENCE_S
    ) as pool:
        for _ in range(2):
            maths = [ScoreRequest("x" * n, "", "", "maths", {}) for n in range(200)]
            other = [
                ScoreRequest("4", "4", "", "other", {}),
                ScoreRequest("4", "5", "", "other", {}),
            ]
            scores = pool.score(maths + other)
            assert [score.value for score in scores] == [
                *map(float, range(200)),
                1.0,
                0.0,
            ]
            assert {(score.health, score.detail) for score in scores} == {
                (ScoreHealth.OK, "")
            }
        assert pool.score([]) == []
        until(lambda: len(living()) == 4)  # two pairs of guard and scorer


def test_a_function_gets_every_field(functions: str) -> None:
    with ScoringPool({"maths": f"{functions}:seen"}, 1, PATIENCE_S) as pool:
        [score] = pool.score([ScoreRequest("r", "a", "p", "maths", {"n": [1]})])
        assert (score.value, score.health) == (1.0, ScoreHealth.OK)


def test_messages_larger_than_a_socket_holds(functions: str) -> None:
    with ScoringPool({"default": f"{functions}:length"}, 2, PATIENCE_S) as pool:
        items = [
            ScoreRequest("x" * 1_000_000, "", "y" * 1_000_000, "maths", {})
            for _ in range(8)
        ]
        assert [score.value for score in pool.score(items)] == [1e6] * 8


@pytest.mark.parametrize(
    ("response", "health", "detail"),
    [
        ("raise", ScoreHealth.EXCEPTION, "KeyError: 'what was missing'"),
        ("sys.exit", ScoreHealth.EXCEPTION, "SystemExit: 3"),
        (
            "text",
            ScoreHealth.EXCEPTION,
            "TypeError: the function returned str '1.0', expected a number",
        ),
        ("os._exit", ScoreHealth.EXCEPTION, twice("exited with status 7")),
        (
            "segfault",
            ScoreHealth.EXCEPTION,
            twice("was killed by signal 11 (Segmentation fault)"),
        ),
        ("kill", ScoreHealth.EXCEPTION, twice(KILLED)),
        (
            "forked grandchild and exit",
            ScoreHealth.EXCEPTION,
            twice("exited with status 9"),
        ),
        (
            "close everything",
            ScoreHealth.EXCEPTION,
            "the scoring process died twice: it ",
        ),
        ("none", ScoreHealth.NONE, "returned None"),
        ("nan", ScoreHealth.NONFINITE, "returned nan"),
        ("inf", ScoreHealth.NONFINITE, "returned -inf"),
    ],
)
def test_a_failure_costs_its_own_score_only(
    functions: str,
    living: Callable[[], list[str]],
    tmp_path: Path,
    response: str,
    health: ScoreHealth,
    detail: str,
) -> None:
    log = tmp_path / "log"
    with ScoringPool({"default": f"{functions}:act"}, 1, PATIENCE_S) as pool:
        pool.score(
            requests(log, *["warm"] * 60)
        )  # quick items: the next ones share a message
        log.unlink()
        scores = pool.score(requests(log, "a", "b", response, "c", "d"))
        assert [score.health for score in scores] == [
            ScoreHealth.OK,
            ScoreHealth.OK,
            health,
            ScoreHealth.OK,
            ScoreHealth.OK,
        ]
        assert [score.value for score in scores[:2] + scores[3:]] == [1.0] * 4
        assert math.isnan(scores[2].value)
        assert detail in scores[2].detail
        twice = (
            "close everything," * 2
        )  # of those whose process dies only this one writes before it does
        assert (
            log.read_text() == f"a,b,{twice * (response == 'close everything')}c,d,"
        )  # the others once, in order
        until(
            lambda: len(living()) == 2
        )  # what the failed item left behind is gone, and one process pair is back


def test_what_hangs_is_killed_at_its_deadline(
    functions: str,
    living: Callable[[], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four items that hang, each in another way, once all of them run: so their
    deadlines pass side by side.
    """

    def hangs(pool: ScoringPool, process: ScoringProcess) -> bool:
        return (tmp_path / f"loghangs {item_in_hand(pool, process)}").exists()

    hasten(monkeypatch, hangs)
    hanging = [
        "meet",
        "meet and hold the interpreter",
        "meet with grandchild",
        "meet with escaped grandchild",
    ]
    with ScoringPool({"default": f"{functions}:act"}, 4, PATIENCE_S) as pool:
        scores = pool.score(requests(tmp_path / "log", *hanging, "a", "b"))
        assert [score.health for score in scores] == [ScoreHealth.TIMEOUT] * 4 + [
            ScoreHealth.OK
        ] * 2
        assert {score.detail for score in scores[:4]} == {
            "no score within 60 s; the process was killed"
        }
        assert not any(score.rescored for score in scores)
        assert (tmp_path / "logall met").exists()
        assert not any(
            command.startswith("sleep") for command in living()
        )  # no grandchild


def test_an_item_of_a_killed_process_is_scored_again(
    functions: str,
    living: Callable[[], list[str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "log"
    with ScoringPool({"default": f"{functions}:act"}, 1, PATIENCE_S) as pool:
        scores = pool.score(requests(log, "a", "killed once", "b"))
        assert [(score.value, score.health, score.detail) for score in scores] == [
            (1.0, ScoreHealth.OK, "")
        ] * 3
        assert [score.rescored for score in scores] == [False, True, False]
        assert log.read_text() == "a,killed once,b,"
        until(lambda: len(living()) == 2)
        assert not pool.score(requests(log, "c", "d"))[
            1
        ].rescored  # a death counts in its own call alone
    told = f"warning: a scoring process {KILLED}; its item is scored again\n"
    assert capfd.readouterr().err == told


def test_an_item_of_a_stopped_process_is_scored_again(
    functions: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was not slow: another process would have scored it in time."""
    hasten(monkeypatch, is_stopped)
    with ScoringPool({"default": f"{functions}:act"}, 1, PATIENCE_S) as pool:
        scores = pool.score(requests(tmp_path / "log", "a", "stopped once", "b"))
    assert [score.value for score in scores] == [1.0] * 3
    assert [score.rescored for score in scores] == [False, True, False]
    told = (
        "warning: a scoring process was stopped (SIGSTOP); its item is scored again\n"
    )
    assert capfd.readouterr().err == told


def test_a_rescored_item_has_its_deadline_again(
    functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(pool: ScoringPool, process: ScoringProcess) -> bool:
        is_again = any(map(pool._isolation.causes, process.pending))
        return process.has_begun and is_again

    hasten(monkeypatch, hangs)
    with ScoringPool({"default": f"{functions}:act"}, 1, PATIENCE_S) as pool:
        [score] = pool.score(requests(tmp_path / "log", "killed once, then hang"))
    assert (score.health, score.rescored) == (ScoreHealth.TIMEOUT, True)
    assert score.detail == "no score within 60 s; the process was killed"


def test_the_deadline_is_that_of_one_item(
    functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins again where what an item took begins, which is counted here: a short
    deadline might pass on a busy machine.
    """
    took: list[float] = []
    monkeypatch.setattr(
        ScoringPool, "_update_unit_time", lambda pool, took_s: took.append(took_s)
    )
    with ScoringPool({"default": f"{functions}:act"}, 1, PATIENCE_S) as pool:
        pool._unit_s = (
            1e-6  # items are known to be quick: all of these travel in one message
        )
        began = time.monotonic()
        scores = pool.score(requests(tmp_path / "log", *["slow"] * 8))
        in_all = time.monotonic() - began
        (process,) = pool._processes
        assert process.waiting_since >= began + sum(took)
    assert [score.health for score in scores] == [ScoreHealth.OK] * 8
    # Counted from the message, all of them together take four times as long.
    assert len(took) == 8 and min(took) > 0.2 and sum(took) <= in_all


def test_a_traceback_shows_the_functions_own_frames(
    functions: str, tmp_path: Path
) -> None:
    with ScoringPool({"default": f"{functions}:act"}, 1, PATIENCE_S) as pool:
        [score] = pool.score(requests(tmp_path / "log", "raise"))
    assert f'File "{functions}"' in score.detail
    assert "child.py" not in score.detail


def test_prints_go_to_stderr_and_not_into_the_protocol(
    functions: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with ScoringPool({"default": f"{functions}:act"}, 1, PATIENCE_S) as pool:
        scores = pool.score(requests(tmp_path / "log", "print", "a", "print"))
    assert [score.health for score in scores] == [ScoreHealth.OK] * 3
    captured = capfd.readouterr()
    assert captured.out == ""
    assert (
        captured.err == "printed by a function\nwritten to the descriptorechoed\n" * 2
    )


def test_close_ends_what_functions_left_running(
    functions: str, living: Callable[[], list[str]], tmp_path: Path
) -> None:
    pool = ScoringPool({"default": f"{functions}:act"}, 2, PATIENCE_S)
    pool.score(requests(tmp_path / "log", "escaped grandchild"))
    until(
        lambda: len(living()) == 5
    )  # one that has only just been forked may not be seen yet
    pool.close()
    assert living() == []
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.score([])


def test_a_process_that_ended_between_two_calls_costs_no_score(
    functions: str, living: Callable[[], list[str]], tmp_path: Path
) -> None:
    with ScoringPool({"default": f"{functions}:act"}, 1, PATIENCE_S) as pool:
        kill(guard_of(pool))
        until(lambda: living() == [])
        assert pool.score(requests(tmp_path / "log", "a"))[0].health is ScoreHealth.OK


def test_a_scorer_does_not_outlive_its_guard(
    functions: str, living: Callable[[], list[str]], tmp_path: Path
) -> None:
    with ScoringPool({"default": f"{functions}:act"}, 1, PATIENCE_S) as pool:
        guard = guard_of(pool)

        def kill_when_begun() -> None:
            until((tmp_path / "loghang once").exists)
            kill(guard)

        with ThreadPoolExecutor(1) as thread:
            killed = thread.submit(kill_when_begun)
            scores = pool.score(requests(tmp_path / "log", "hang once", "a"))
            killed.result()
        assert [(score.health, score.rescored) for score in scores] == [
            (ScoreHealth.OK, True),
            (ScoreHealth.OK, False),
        ]
        until(lambda: len(living()) == 2)


def test_kill_9_of_the_pools_process_leaves_nothing(
    functions: str, living: Callable[[], list[str]], tmp_path: Path
) -> None:
    program = f"""
        from verl_ray.rewards.pool import ScoringPool
        from verl_ray.rewards.request import ScoreRequest
        pool = ScoringPool({{"default": "{functions}:act"}}, 2, 60.0)
        extra = {{"log": "{tmp_path}/log"}}
        responses = ["escaped grandchild", "hang and hold the interpreter", "escaped grandchild and hang"]
        pool.score([ScoreRequest(response, "", "", "", extra) for response in responses])
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment
    ) as parent:
        until(lambda: {"sleep 62 ", "sleep 64 "} <= set(living()))
        parent.kill()
    until(lambda: living() == [])


def test_an_unserved_data_source_is_refused(functions: str) -> None:
    with ScoringPool(
        {"maths": f"{functions}:length"}, 1, PATIENCE_S, key="evaluation.functions"
    ) as pool:
        expected = r"'math'.*Did you mean maths\?.*Set evaluation\.functions\.math or evaluation\.functions\.default"
        with pytest.raises(DataError, match=expected):
            pool.score([ScoreRequest("", "", "", "math", {})])
        assert pool.score([ScoreRequest("ab", "", "", "maths", {})])[0].value == 2.0


def test_all_bad_specs_are_reported_at_once_without_a_process(functions: str) -> None:
    with pytest.raises(ConfigError) as error:
        ScoringPool(
            {"a": "exact", "b": f"{functions}:nope", "c": "gsm8k"}, 1, PATIENCE_S
        )
    assert [problem.key for problem in error.value.problems] == [
        "reward.functions.a",
        "reward.functions.b",
    ]


@pytest.mark.parametrize(
    ("body", "key", "cause", "patience_s"),
    [
        (
            "import no_such_module_at_all",
            "own.default",
            "No module named 'no_such_module_at_all'",
            PATIENCE_S,
        ),
        (
            "raise OSError('the database is away')",
            "own.default",
            "the database is away",
            PATIENCE_S,
        ),
        (
            "import os; os._exit(5)",
            "own",
            "exited with status 5 while it imported",
            PATIENCE_S,
        ),
        (
            "import time; time.sleep(60)",
            "own",
            "took longer than 1 s while it imported",
            1.0,
        ),
    ],
)
def test_an_import_that_fails_is_an_error_at_the_start(
    tmp_path: Path,
    living: Callable[[], list[str]],
    body: str,
    key: str,
    cause: str,
    patience_s: float,
) -> None:
    path = tmp_path / "grading.py"
    path.write_text(f"{body}\ndef f(response, answer, **others): return 1.0\n")
    with pytest.raises(ConfigError, match=cause) as error:
        ScoringPool(
            {"default": f"{path}:f"},
            2,
            PATIENCE_S,
            key="own",
            start_deadline_s=patience_s,
        )
    (problem,) = error.value.problems
    # A module that is missing stays so.
    assert (problem.key, problem.may_pass) == (key, "no_such" not in body)


def test_an_exception_in_the_caller_closes_the_pool(
    functions: str, living: Callable[[], list[str]], tmp_path: Path
) -> None:
    def interrupt() -> None:
        raise InterruptedError

    pool = ScoringPool({"default": f"{functions}:act"}, 1, PATIENCE_S)
    with pytest.raises(InterruptedError), alarm(0.2, interrupt):
        pool.score(requests(tmp_path / "log", "hang"))
    assert living() == []


@pytest.mark.parametrize(("item_s", "messages"), [(1e-6, [64, 64]), (0.5, [1] * 128)])
def test_quick_items_travel_together(
    monkeypatch: pytest.MonkeyPatch, item_s: float, messages: list[int]
) -> None:
    handed: list[int] = []
    send_units = ScoringProcess.send_units

    def counted(
        process: ScoringProcess, units: list[Unit], requests: Sequence[ScoreRequest]
    ) -> None:
        handed.append(len(units))
        send_units(process, units, requests)

    monkeypatch.setattr(ScoringProcess, "send_units", counted)
    monkeypatch.setattr(
        ScoringPool, "_update_unit_time", lambda pool, took_s: None
    )  # what items take stays as it is set here
    with ScoringPool({"default": "exact_match"}, 2, PATIENCE_S) as pool:
        pool._unit_s = item_s
        scores = pool.score(
            [ScoreRequest("12", "12", "7+5=", "arithmetic", {}) for _ in range(128)]
        )
    assert handed == messages and {score.value for score in scores} == {1.0}


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_others_end_as_it_imports_starts_again_once(
    tmp_path: Path, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasten(monkeypatch, is_stopped)
    module = tmp_path / "ended.py"
    module.write_text(
        textwrap.dedent(f"""
        import os, signal
        if not os.path.exists({str(tmp_path / "again")!r}):
            open({str(tmp_path / "again")!r}, "w").close()
            os.kill(os.getpid(), signal.{number})

        def score(response, answer, *, prompt, data_source, extra):
            return 1.0
        """)
    )
    functions = {"default": f"{module}:score"}
    with ScoringPool(functions, 1, PATIENCE_S, start_deadline_s=PATIENCE_S) as pool:
        (score,) = pool.score(requests(tmp_path / "log", "a"))
    assert score.value == 1.0

    # Again, it has a reason.
    module.write_text(module.read_text().replace("if not os", "if os"))
    did = "was killed by signal 9" if number == "SIGKILL" else "was stopped"
    with (
        pytest.raises(ConfigError, match=did),
        ScoringPool(functions, 1, PATIENCE_S, start_deadline_s=PATIENCE_S) as pool,
    ):
        pool.score(requests(tmp_path / "log", "a"))


def test_the_scoring_process_imports_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "grading.py"
    path.write_text(
        "import sys\n"
        "def f(response, answer, **others):\n"
        "    return sum(name in sys.modules for name in ('torch', 'ray', 'vllm', 'numpy', 'pydantic'))\n"
    )
    with ScoringPool({"default": f"{path}:f"}, 1, PATIENCE_S) as pool:
        assert pool.score([ScoreRequest("", "", "", "", {})])[0].value == 0.0


def test_a_function_that_is_too_slow_is_known_after_two_prompts(
    functions: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    unanswered = [
        ScoreRequest(f"hang {response}", "", prompt, "maths", {"log": str(log)})
        for prompt in ("first", "second")
        for response in range(8)
    ]
    path = tmp_path / "slow.py"
    path.write_text(
        "import time\n"
        "def slow(response, answer, *, prompt, data_source, extra):\n"
        "    open(extra['log'], 'a').write(response + prompt + ',')\n"
        "    time.sleep(60)\n"
    )
    pool = ScoringPool({"default": f"{path}:slow"}, 1, 0.5, max_failed_fraction=0.1)
    with pytest.raises(RewardError) as caught:
        pool.score(unanswered)
    assert str(caught.value) == (
        "reward.functions gave no score to the first 2 responses, to 2 different prompts,"
        " which reward.max_failed_fraction = 0.1 does not allow. The last one: no score"
        " within 0.5 s; the process was killed. Expected a number within"
        " reward.deadline_s = 0.5: make the functions faster, or raise it"
    )
    # After the first response the other prompt comes next, and no third response.
    assert log.read_text() == "hang 0first,hang 0second,"
