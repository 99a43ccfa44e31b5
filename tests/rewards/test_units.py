"""Functions of every style in real processes: what is scored together, and what a hang
or a death costs.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from verl_ray.errors import ConfigError
from verl_ray.rewards.health import ScoreHealth, entries_of
from verl_ray.rewards.pool import MOST_CONCURRENT, ScoringPool, units_of
from verl_ray.rewards.request import Needs, ScoreRequest

PATIENCE_S = 60.0

FUNCTIONS = """
    import asyncio, os, time

    def ours(response, answer):
        return {"score": len(response), "acc": response == answer}

    def verl(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth)

    def trl(prompts, completions, completion_ids, hint, log_extra, **columns):
        log_extra("size", [len(completions)] * len(completions))
        best = max(map(len, completions))
        return [float(len(text) == best) if text else None for text in completions]

    async def awaited(response):
        global waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(60 if response == "late" else 0.05)
        waiting -= 1
        if response == "raise":
            raise KeyError(response)
        return most

    waiting = most = 0

    async def hostile(response, extra):
        with open(extra["log"], "a") as log:
            log.write(response + ",")
        if response == "block":
            time.sleep(60)
        elif response == "die":
            os._exit(7)
        return 1.0

    async def batched(completions):
        await asyncio.sleep(0.01)
        return [len(completions)] * len(completions)

    class Counter:
        def __init__(self, start=10):
            self.calls = start

        def __call__(self, response):
            self.calls += 1
            return self.calls

    def group(completions, extra_log, **columns):
        with open(extra_log[0], "a") as log:
            log.write(",".join(completions) + ";")
        if "hang" in completions:
            time.sleep(60)
        if "die" in completions:
            os._exit(7)
        if "few" in completions:
            return [1.0]
        if "number" in completions:
            return 1.0
        return [1.0 if text != "text" else "1.0" for text in completions]
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "grading.py"
    path.write_text(textwrap.dedent(FUNCTIONS))
    return str(path)


def requests(
    source: str, *responses: str, group: int = 0, **extra: object
) -> list[ScoreRequest]:
    return [
        ScoreRequest(
            response, "abc", f"prompt {group}", source, extra, group=group, tokens=[3, 1],
            conversation="abc",
        )
        for response in responses
    ]  # fmt: skip


def test_units_follow_what_functions_need() -> None:
    needs = {
        "default": Needs(
            "single",
            tokens=False,
            conversation=False,
            episode_conversations=False,
            episode_output=False,
        ),
        "async": Needs(
            "concurrent",
            tokens=False,
            conversation=False,
            episode_conversations=False,
            episode_output=False,
        ),
        "batched": Needs(
            "group",
            tokens=True,
            conversation=True,
            episode_conversations=True,
            episode_output=False,
        ),
    }
    items = [
        *requests("other", "a", "b"),
        *requests("batched", "a", "b", group=1),
        *requests("batched", "a", group=2),
        *requests("async", *"ab" * 40),
    ]
    units = units_of(items, needs)
    assert [unit.items for unit in units[:4]] == [(0,), (1,), (2, 3), (4,)]
    assert [len(unit.items) for unit in units[4:]] == [MOST_CONCURRENT, 16]
    assert [unit.limit_s(2.0) for unit in units[1:5]] == [2.0, 4.0, 2.0, 3.0]
    assert [part.items for part in units[5].parts()] == [(i,) for i in range(69, 85)]
    assert (units[0].is_divisible, units[2].is_divisible, units[4].is_divisible) == (
        False, False, True,
    )  # fmt: skip
    # Only what a function names is sent.
    (sent,) = units[0].rows(items)
    assert ScoreRequest(*sent) == replace(items[0], tokens=[], conversation="")
    assert [ScoreRequest(*row) for row in units[2].rows(items)] == items[2:4]


@pytest.mark.processes
def test_every_style_scores(functions: str) -> None:
    names = ("ours", "verl", "trl", "awaited", "batched", "Counter")
    specs = {name: f"{functions}:{name}" for name in names}
    specs["again"] = specs["Counter"]
    with ScoringPool(specs, 1, PATIENCE_S) as pool:
        assert pool.needs_groups

        def values(source: str, *responses: str, group: int = 0) -> list[float]:
            scores = pool.score(requests(source, *responses, group=group, hint="h"))
            return [score.value for score in scores]

        ours = pool.score(requests("ours", "abc", "a"))
        assert [score.value for score in ours] == [3.0, 1.0]
        assert [entries_of(s.entries) for s in ours] == [{"acc": 1.0}, {"acc": 0.0}]
        assert values("verl", "abc", "a") == [1.0, 0.0]

        # What a batched function returns depends on the group alone.
        both = requests("trl", "abc", "a", "", group=1, hint="h")
        both += requests("trl", "a", group=2, hint="h")
        scores = pool.score(both)
        assert [score.health for score in scores[:3]] == [0, 0, ScoreHealth.NONE]
        assert [scores[row].value for row in (0, 1, 3)] == [1.0, 0.0, 1.0]
        sizes = [entries_of(score.entries)["size"] for score in scores]
        assert sizes == [3, 3, 3, 1]
        assert values("batched", "a", "b") == [2.0, 2.0]

        # Coroutines are awaited side by side.
        assert values("awaited", *"abcdefgh") == [8.0] * 8
        # A class is built once per process, whatever the names of its data sources.
        assert values("Counter", "a", "b") == [11.0, 12.0]
        assert values("again", "a") == [13.0]

    with ScoringPool({"default": specs["ours"]}, 1, PATIENCE_S) as pool:
        assert not pool.needs_groups


@pytest.mark.processes
def test_a_coroutine_costs_its_own_score(functions: str) -> None:
    with ScoringPool({"default": f"{functions}:awaited"}, 1, 1.0) as pool:
        late, raised, fine = pool.score(requests("s", "late", "raise", "fine"))
    assert (late.health, late.detail) == (
        ScoreHealth.TIMEOUT, "no score within 1 s; it was cancelled",
    )  # fmt: skip
    assert raised.health is ScoreHealth.EXCEPTION
    assert "KeyError: 'raise'" in raised.detail and "child.py" not in raised.detail
    assert fine.health is ScoreHealth.OK and not fine.rescored


@pytest.mark.processes
@pytest.mark.parametrize(
    ("response", "health", "detail"),
    [
        ("block", ScoreHealth.TIMEOUT, "no score within 0.5 s; the process was killed"),
        ("die", ScoreHealth.EXCEPTION, "it exited with status 7, and when the item"),
    ],
)
def test_a_coroutine_that_stops_all_others_is_scored_alone(
    functions: str, tmp_path: Path, response: str, health: ScoreHealth, detail: str
) -> None:
    log = tmp_path / "log"
    items = requests("s", "a", response, "b", log=str(log))
    with ScoringPool({"default": f"{functions}:hostile"}, 1, 0.5) as pool:
        scores = pool.score(items)
    assert [score.health for score in scores] == [
        ScoreHealth.OK,
        health,
        ScoreHealth.OK,
    ]
    assert detail in scores[1].detail and math.isnan(scores[1].value)
    # First side by side, then one by one.
    assert log.read_text() == f"a,{response},a,{response},b,"


@pytest.mark.processes
def test_a_group_is_scored_again_whole_and_fails_whole(
    functions: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    items = [
        request
        for group, responses in enumerate(
            (["a", "b"], ["die", "c"], ["hang", "d"], ["few", "e"], ["number"], ["text", "f"])
        )
        for request in requests("s", *responses, group=group, extra_log=str(log))
    ]  # fmt: skip
    with ScoringPool({"default": f"{functions}:group"}, 1, 0.5) as pool:
        scores = pool.score(items)
    bad = ScoreHealth.EXCEPTION
    assert [score.health for score in scores] == [
        0, 0, bad, bad, ScoreHealth.TIMEOUT, ScoreHealth.TIMEOUT, bad, bad, bad, bad, 0,
    ]  # fmt: skip
    assert all("died twice" in score.detail for score in scores[2:4])
    late = "no scores of the group within 1 s; the process was killed"
    assert {score.detail for score in scores[4:6]} == {late}
    assert "returned 1 scores for 2 completions" in scores[6].detail
    assert "returned float 1.0, expected a list of 1 scores" in scores[8].detail
    assert "returned str '1.0', expected a number" in scores[9].detail
    assert log.read_text() == "a,b;die,c;die,c;hang,d;few,e;number;text,f;"


@pytest.mark.processes
def test_a_record_without_an_answer_has_no_call(functions: str, tmp_path: Path) -> None:
    specs = {"default": f"{functions}:awaited", "maths": f"{functions}:ours"}
    with ScoringPool(specs, 1, PATIENCE_S) as pool:
        without, other = pool.score(
            [ScoreRequest("4", None, "", source, {}) for source in ("maths", "s")]
        )
    assert without.health is ScoreHealth.EXCEPTION
    assert without.detail.startswith("the record has no answer")
    assert other.health is ScoreHealth.OK


@pytest.mark.processes
def test_a_class_that_needs_arguments_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "class Judge:\n"
        "    def __init__(self, model, scale, bias=0): ...\n"
        "    def __call__(self, response): return 1.0\n"
    )
    with pytest.raises(ConfigError, match="is a class that is built with model, scale"):
        ScoringPool({"default": f"{path}:Judge"}, 1, PATIENCE_S)
