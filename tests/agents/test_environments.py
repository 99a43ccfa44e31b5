"""The environments that ship, driven by scripted actions, with numbers by hand."""

from __future__ import annotations

import asyncio
import random
import re
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from verl_ray.agents.contract import (
    TREATMENTS,
    Action,
    End,
    Environment,
    EpisodeTask,
    Message,
    Step,
    ToolCall,
    ToolSchema,
    message_of,
)
from verl_ray.agents.environments import key_value_memory, reasoning_gym
from verl_ray.agents.environments.calculator import (
    CALCULATE,
    Calculator,
    calculate,
    evaluate,
)
from verl_ray.agents.environments.conversation import opening
from verl_ray.agents.environments.frozen_lake import (
    FrozenLake,
    distances,
    solvable_map,
)
from verl_ray.agents.environments.number_guessing import NumberGuessing
from verl_ray.agents.environments.reasoning_gym import ReasoningGym
from verl_ray.errors import DataError, InputError, InstallationError

ROOT = Path(__file__).parents[2]
TASK = EpisodeTask([{"role": "user", "content": "Play."}])
TEXTS = ("50", "right", "go down", "25", "", "left 12", "up", "down 75", "60", "right")


def say(text: str, *calls: ToolCall) -> Action:
    return Action([1], text, calls)


def last_text(messages: Sequence[Message]) -> str:
    return str(messages[-1]["content"])


async def play(
    environment: Environment,
    texts: Sequence[str],
    seed: int = 0,
    task: EpisodeTask = TASK,
) -> tuple[str, list[Step]]:
    """The environment's first text, and its steps until it is done."""
    begun = await environment.reset(task, seed)
    steps: list[Step] = []
    for text in texts:
        steps.append(await environment.step(say(text)))
        if steps[-1].done:
            break
    await environment.close()
    return last_text(begun.messages), steps


def run(
    environment: Environment, *texts: str, seed: int = 0, task: EpisodeTask = TASK
) -> tuple[str, list[Step]]:
    return asyncio.run(play(environment, texts, seed, task))


@pytest.mark.parametrize("kind", [NumberGuessing, FrozenLake, Calculator])
def test_each_is_an_environment(kind: type) -> None:
    assert isinstance(kind(), Environment)


@pytest.mark.parametrize(
    "make", [NumberGuessing, lambda: FrozenLake(slippery=True, shaping=0.5)]
)
def test_an_episode_depends_on_its_seed_and_not_on_its_neighbours(make) -> None:
    alone = [run(make(), *TEXTS, seed=seed) for seed in range(6)]

    async def side_by_side() -> list[tuple[str, list[Step]]]:
        environments = [make() for _ in range(6)]
        begun = [
            await environment.reset(TASK, seed)
            for seed, environment in enumerate(environments)
        ]
        steps: list[list[Step]] = [[] for _ in environments]
        for text in TEXTS:
            for environment, past in zip(environments, steps, strict=True):
                random.seed(7)
                if not (past and past[-1].done):
                    past.append(await environment.step(say(text)))
        firsts = [last_text(observation.messages) for observation in begun]
        return list(zip(firsts, steps, strict=True))

    assert asyncio.run(side_by_side()) == alone
    # The seeds make different environments.
    assert any(episode != alone[0] for episode in alone)


# ------------------------------------------------------------------------ conversations


def test_the_environments_text_joins_the_users() -> None:
    system = {"role": "system", "content": "Be short."}
    asked = {"role": "user", "content": "Play.\n"}
    assert opening([system, asked], "Go.") == [
        system,
        {"role": "user", "content": "Play.\n\nGo."},
    ]
    assert asked["content"] == "Play.\n"
    assert opening([], "Go.") == [{"role": "user", "content": "Go."}]
    assert opening([system], "Go.")[1:] == [{"role": "user", "content": "Go."}]
    picture = {"role": "user", "content": [{"type": "image"}]}
    assert opening([picture], "Go.") == [picture, {"role": "user", "content": "Go."}]


# ---------------------------------------------------------------------- number guessing


def test_number_guessing_says_higher_and_lower_until_the_guess_is_right() -> None:
    # The seed makes the number 3 of 1 to 4: lower than 4, higher than 1.
    seed = next(seed for seed in range(99) if random.Random(seed).randint(1, 4) == 3)
    environment = NumberGuessing(1, 4, max_guesses=4)
    first, steps = run(environment, "Perhaps 4", "1 it is", "3.", seed=seed)
    assert first.startswith("Play.\n\nI think of a whole number from 1 to 4.")
    assert [last_text(step.messages) for step in steps[:2]] == [
        "My number is lower. Guesses that remain: 3.",
        "My number is higher. Guesses that remain: 2.",
    ]
    # The third guess of four: (4 - 3 + 1) / 4.
    assert [step.reward for step in steps] == [0.0, 0.0, 0.5]
    assert (steps[-1].done, steps[-1].end) == (True, End.COMPLETED)
    assert list(steps[-1].messages) == []

    assert run(environment, "3", seed=seed)[1][-1].reward == 1.0
    assert run(environment, "1", "1", "1", "3", seed=seed)[1][-1].reward == 0.25
    plain = NumberGuessing(1, 4, max_guesses=4, reward_early=False)
    assert run(plain, "1", "1", "1", "3", seed=seed)[1][-1].reward == 1.0


def test_number_guessing_counts_a_turn_that_is_no_guess() -> None:
    _, steps = run(NumberGuessing(5, 9, max_guesses=4), "?", "6.5", "1e99", "7" * 5000)
    assert [last_text(step.messages) for step in steps[:3]] == [
        "You said no number. Guesses that remain: 3.",
        "Guess a whole number from 5 to 9. Guesses that remain: 2.",
        "Guess a whole number from 5 to 9. Guesses that remain: 1.",
    ]
    assert [(step.reward, step.done) for step in steps[2:]] == [
        (0.0, False),
        (0.0, True),
    ]


def test_number_guessing_refuses_rules_without_a_game() -> None:
    with pytest.raises(InputError, match="low=3 is above high=2"):
        NumberGuessing(3, 2)
    with pytest.raises(InputError, match="max_guesses=0, expected at least 1"):
        NumberGuessing(max_guesses=0)


# -------------------------------------------------------------------------- frozen lake


def way_of(first: str, size: int) -> tuple[list[str], list[str]]:
    """The lines of the map, and a shortest way to the goal."""
    lines = first.splitlines()[-size:]
    holes = {
        (row, column)
        for row, line in enumerate(lines)
        for column, letter in enumerate(line)
        if letter == "H"
    }
    lengths = distances(size, frozenset(holes))
    moves = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
    cell = (0, 0)
    way = []
    while lengths[cell] > 0:
        name, cell = next(
            (name, after)
            for name, (down, right) in moves.items()
            if lengths.get(after := (cell[0] + down, cell[1] + right), 999)
            < lengths[cell]
        )
        way.append(name)
    return lines, way


def test_distances_go_around_holes() -> None:
    # S H .
    # . H .
    # . . G
    assert distances(3, frozenset({(0, 1), (1, 1)})) == {
        (2, 2): 0, (1, 2): 1, (2, 1): 1, (0, 2): 2, (2, 0): 2, (1, 0): 3, (0, 0): 4,
    }  # fmt: skip


@pytest.mark.parametrize("size", [2, 4, 7])
def test_every_map_has_a_way(size: int) -> None:
    for seed in range(30):
        # More holes than there is ice: as many as leave a way.
        holes = solvable_map(size, size * size, random.Random(seed))
        assert (0, 0) in distances(size, holes)
        assert len(holes) <= size * size - (2 * size - 1)
    assert len(solvable_map(4, 4, random.Random(0))) == 4


@pytest.mark.parametrize("seed", range(5))
def test_frozen_lake_pays_the_way_in_parts_and_the_goal(seed: int) -> None:
    first, _ = run(FrozenLake(), seed=seed)
    lines, way = way_of(first, 4)
    assert lines[0][0] == "P"
    assert lines[3][3] == "G"
    assert "".join(lines).count("H") == 4

    _, steps = run(FrozenLake(), *(f"Not up: {name}!" for name in way), seed=seed)
    assert [step.reward for step in steps] == [0.0] * (len(way) - 1) + [1.0]
    assert [step.done for step in steps] == [False] * (len(way) - 1) + [True]

    _, steps = run(FrozenLake(shaping=0.6), *way, seed=seed)
    part = 0.6 / len(way)
    expected = [part] * (len(way) - 1) + [1 + part]
    assert [step.reward for step in steps] == pytest.approx(expected)


def test_frozen_lake_ends_in_a_hole_and_after_the_last_move() -> None:
    # On a map of 2 cells a side with a hole, the hole is right of the start or below.
    environment = FrozenLake(size=2, num_holes=3, shaping=1.0, max_moves=3)
    first, _ = run(environment)
    lines = first.splitlines()[-2:]
    fall, way = ("right", "down") if lines[0][1] == "H" else ("down", "right")
    _, steps = run(environment, fall)
    assert (steps[0].done, steps[0].reward, steps[0].end) == (True, 0.0, End.COMPLETED)

    other = {"right": "left", "down": "up"}[way]
    _, steps = run(environment, way, other, "I stay")
    # Half of the way, back again, and a turn without a move.
    assert [step.reward for step in steps] == [0.5, -0.5, 0.0]
    assert [step.done for step in steps] == [False, False, True]

    _, steps = run(environment, "upwards", "left")
    texts = [last_text(step.messages).splitlines() for step in steps]
    assert texts[0][0] == "You named no move. Moves that remain: 2."
    assert texts[1][0] == "You stay where you are. Moves that remain: 1."
    assert texts[1][2:] == lines


def test_a_slippery_lake_moves_aside_in_two_thirds_of_the_cases() -> None:
    environment = FrozenLake(size=8, num_holes=0, max_moves=1000, slippery=True)
    _, steps = run(environment, *["left"] * 1000)
    # At the left border a move to the left stays, and those aside go up or down. At the
    # upper and the lower border half of these stay as well.
    pictures = [last_text(step.messages).splitlines()[2:] for step in steps[:-1]]
    rows = [next(i for i, line in enumerate(p) if "P" in line) for p in pictures]
    assert {pictures[i][row].index("P") for i, row in enumerate(rows)} == {0}
    inner = [(a, b) for a, b in pairwise(rows) if 0 < a < 7]
    stays = sum(a == b for a, b in inner)
    assert 0.25 < stays / len(inner) < 0.42
    assert {b - a for a, b in inner} == {-1, 0, 1}


def test_frozen_lake_refuses_rules_without_a_map() -> None:
    for wrong in ({"size": 1}, {"size": 99}, {"num_holes": -1}, {"max_moves": 0}):
        with pytest.raises(InputError, match="FrozenLake"):
            FrozenLake(**wrong)


# --------------------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("12 * (3 + 4)", "84"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7 / 2", "3.5"),
        ("1 / 3 * 3", "1"),  # exact in between
        ("2 / 3", "0.666666666667"),
        ("--+5", "5"),
        (" 1+1\t", "2"),
        ("9" * 99 + "*" + "9" * 99, str(int("9" * 99) ** 2)),
        ("1+" * 99 + "1", "100"),
        ("-" * 199 + "1", "-1"),
    ],
)
def test_the_calculator_computes(expression: str, text: str) -> None:
    assert calculate(expression) == text


ONLY = "error: an expression has only integers, + - * / // % and parentheses"
LONG = "error: an expression has at most 200 characters"
BROKEN = "error: the expression cannot be parsed"
HOSTILE = {
    "9**9**9": ONLY,
    "9**9": ONLY,
    "(1)(2)": ONLY,
    "()": ONLY,
    "__import__('os').getpid()": ONLY,
    "x": ONLY,
    "1e999999999": ONLY,
    "1.5": ONLY,
    "1,000": ONLY,
    "1 << 9": ONLY,
    "1\n+1": ONLY,
    "\x00": ONLY,
    "\ud800": ONLY,
    "٣": ONLY,
    "": BROKEN,
    "1 +": BROKEN,
    "007": BROKEN,
    "(" * 199: BROKEN,
    "(" * 90 + ")" * 90: ONLY,
    "1 / (2 - 2)": "error: division by zero",
    "1 % 0": "error: division by zero",
    "(" * 10**6: LONG,
    "(" * 10**6 + "1" + ")" * 10**6: LONG,
    "9" * 10**7: LONG,
    "-" * 10**6 + "1": LONG,
    "9*" * 10**6 + "9": LONG,
}


def test_hostile_expressions_are_refused_in_bounded_time_and_memory() -> None:
    tracemalloc.start()
    for text, reason in HOSTILE.items():
        assert calculate(text) == reason, text[:40]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20


def test_the_calculators_values_are_exact() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a, b, c = (rng.randrange(1, 60) for _ in range(3))
        assert evaluate(f"({a} - {b}) / {c}") == Fraction(a - b, c)
        # The rule that // and % keep with each other.
        together = evaluate(f"({a} - {b}) // {c} * {c} + ({a} - {b}) % {c}")
        assert together == a - b


SUM = EpisodeTask([{"role": "user", "content": "What is 17 * 3?"}], answer="51")


def test_the_calculator_answers_calls_and_scores_the_last_turn() -> None:
    calls = [
        ToolCall("calculate", {"expression": "17 * 3"}),
        ToolCall("calculate", {"expression": "17 / 0"}),
        ToolCall("calculate", {"expression": 51}),
        ToolCall("calculate", {}),
        ToolCall("calculate", {"expression": "1", "digits": 2}),
        ToolCall("search", {"query": "17 * 3"}),
    ]

    async def episode(answer: str) -> tuple[Step, Step]:
        environment = Calculator()
        begun = await environment.reset(SUM, 0)
        assert list(begun.messages) == list(SUM.messages)
        assert list(begun.tools) == [CALCULATE]
        called = await environment.step(say("I compute.", *calls))
        answered = await environment.step(say(answer))
        await environment.close()
        return called, answered

    async def cut() -> Step:
        environment = Calculator()
        await environment.reset(SUM, 0)
        return await environment.step(Action([1], "It is 51", finish="length"))

    # An answer that was cut is scored, and ends so.
    assert asyncio.run(cut()) == Step(reward=1.0, done=True, end=End.MAX_TOKENS)
    called, answered = asyncio.run(episode("It is 51."))
    takes = "error: calculate takes one argument, expression, which is a text"
    assert [message["content"] for message in called.messages] == [
        "51",
        "error: division by zero",
        takes,
        takes,
        takes,
        "error: there is no tool search, only calculate",
    ]
    assert {message["role"] for message in called.messages} == {"tool"}
    assert called.messages[0]["name"] == "calculate"
    assert (called.reward, called.done) == (0.0, False)
    assert (answered.reward, answered.done) == (1.0, True)
    assert asyncio.run(episode("It is 52."))[1].reward == 0.0
    assert asyncio.run(episode(""))[1].reward == 0.0


def test_the_calculator_says_why_a_call_could_not_be_parsed() -> None:
    async def episode() -> Step:
        environment = Calculator()
        await environment.reset(SUM, 0)
        return await environment.step(Action([1], "51", parse_error="no closing brace"))

    step = asyncio.run(episode())
    assert "could not be parsed: no closing brace" in last_text(step.messages)
    assert not step.done


@pytest.mark.parametrize("answer", [None, "many"])
def test_the_calculator_refuses_a_record_without_a_number(answer: str | None) -> None:
    with pytest.raises(DataError, match="expected a number"):
        asyncio.run(Calculator().reset(EpisodeTask([], answer=answer), 0))


# --------------------------------------------------------------------- key-value memory


class Notetaker:
    """A policy that writes down the facts it sees, and answers from its notes."""

    def __init__(self, forgets: bool = False) -> None:
        self.conversations: list[list[Message]] = []
        self._forgets = forgets

    async def respond(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> Action:
        self.conversations.append(list(messages))
        text = last_text(messages)
        asked = re.search(r"code of the (\w+)\?", text)
        codes = dict(re.findall(r"code of the (\w+) is (\d+)", text))
        if asked:
            return say(f"<think>1</think>It is {codes.get(asked[1], '0')}.")
        if self._forgets:
            return say("<think>code of the drum is 1</think>")
        notes = "\n".join(f"code of the {key} is {code}" for key, code in codes.items())
        return say(f"<think>Hm.</think>{notes}")


def memory_task(record: dict[str, object]) -> EpisodeTask:
    message = {"role": "user", "content": record["prompt"]}
    extra = {"facts": record["facts"]}
    return EpisodeTask([message], answer=str(record["answer"]), extra=extra)


def test_memory_begins_a_conversation_for_each_part_of_the_facts() -> None:
    records = key_value_memory.records(5, seed=1, num_facts=20)
    assert records == key_value_memory.records(5, seed=1, num_facts=20)
    assert records != key_value_memory.records(5, seed=2, num_facts=20)

    for record in records:
        policy = Notetaker()
        score = asyncio.run(key_value_memory.run(memory_task(record), policy))
        assert score == 1.0
        # Parts of 6, 6, 6 and 2 facts, and the question.
        assert [len(messages) for messages in policy.conversations] == [1] * 5
        texts = [last_text(messages) for messages in policy.conversations]
        parts = [
            text.partition("New facts:")[2].count("The code of") for text in texts[:4]
        ]
        assert parts == [6, 6, 6, 2]
        assert "Your notes so far:\n(none)" in texts[0]
        assert "Hm." not in texts[1]
        assert texts[4].startswith(str(record["prompt"]))


def test_memory_holds_nothing_but_the_notes() -> None:
    record = key_value_memory.records(1, seed=1, num_facts=20)[0]
    policy = Notetaker(forgets=True)
    assert asyncio.run(key_value_memory.run(memory_task(record), policy)) == 0.0
    assert last_text(policy.conversations[-1]).endswith("(none)")


def test_memory_has_the_later_code_and_bounded_notes() -> None:
    facts = [f"The code of the drum is {code}." for code in range(100, 113)]
    extra = {"facts": facts}
    asked = [{"role": "user", "content": "What is the code of the drum?"}]
    task = EpisodeTask(asked, answer="112", extra=extra)
    assert asyncio.run(key_value_memory.run(task, Notetaker())) == 1.0

    class Talker(Notetaker):
        async def respond(
            self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
        ) -> Action:
            self.conversations.append(list(messages))
            return say("7" * 10**5)

    policy = Talker()
    assert asyncio.run(key_value_memory.run(task, policy)) == 0.0
    assert max(len(last_text(messages)) for messages in policy.conversations) < 3000


@pytest.mark.parametrize("facts", [None, [], "text", [1]])
def test_memory_refuses_a_record_without_facts(facts: object) -> None:
    task = EpisodeTask([], answer="1", extra={"facts": facts})
    with pytest.raises(DataError, match="facts are missing"):
        asyncio.run(key_value_memory.run(task, Notetaker()))


# ------------------------------------------------------------------------ reasoning gym


class ScriptedSet:
    """Sums in the manner of reasoning-gym, with a scorer that has its faults."""

    def __getitem__(self, index: int) -> dict[str, object]:
        noise = random.randrange(1000)
        return {"question": f"{index} + 1 ({noise})?", "answer": str(index + 1)}

    def score_answer(self, answer: str, entry: dict[str, object]) -> float:
        if answer == entry["answer"]:
            return 1.0
        if answer == "nothing":
            return float("nan")
        if answer == "key":
            raise KeyError(answer)
        if not answer:
            return 0.05
        # What nan and 1e999 are in a comparison, or in a loop.
        if answer in ("nan", "-Inf", "1e999"):
            return 1.0
        return 0.05 if int(answer) else 7.0


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is not installed here; a set of it is written above."""
    package = ModuleType("reasoning_gym")
    names = ("sums", "countdown", "n_queens", "ransom_note")
    package.factory = ModuleType("factory")  # type: ignore[attr-defined]
    package.factory.DATASETS = dict.fromkeys(names)  # type: ignore[attr-defined]

    def create_dataset(name: str, **settings: object) -> ScriptedSet:
        assert settings.keys() == {"size", "seed"}, "no such setting"
        return ScriptedSet()

    package.create_dataset = create_dataset  # type: ignore[attr-defined]
    monkeypatch.setattr(reasoning_gym, "installed_package", lambda: package)
    reasoning_gym._dataset.cache_clear()
    yield
    reasoning_gym._dataset.cache_clear()


def indexed(index: object, *messages: Message) -> EpisodeTask:
    return EpisodeTask(messages, extra={"index": index})


def gym_score(text: str, **settings: object) -> float:
    environment = ReasoningGym("sums", **settings)
    _, (step,) = run(environment, text, task=indexed(3))
    assert step.done
    return step.reward


@pytest.mark.usefixtures("sums")
def test_reasoning_gym_scores_the_tagged_answer() -> None:
    assert gym_score("<answer>5</answer> no: <answer> 4\n</answer>") == 1.0
    assert gym_score("<answer>5</answer>") == 0.05
    assert gym_score("4") == 0.0
    assert gym_score("</answer>4<answer>") == 0.0
    assert gym_score("4 ", tag=None) == 1.0
    assert gym_score("<answer>5</answer>", exact=True) == 0.0
    assert gym_score("<answer>4</answer>", exact=True) == 1.0


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "five",
        "key",
        "nothing",
        "nan",
        "-Inf",
        "1e999",
        "9" * 20_000,
        "\ud800",
        "[" * 9000,
    ],
)
def test_a_text_that_breaks_a_scorer_is_worth_nothing(text: str) -> None:
    assert gym_score(f"<answer>{text}</answer>") == 0.0


@pytest.mark.usefixtures("sums")
def test_no_score_is_above_the_best() -> None:
    assert gym_score("<answer>0</answer>") == 1.0


@pytest.mark.usefixtures("sums")
def test_reasoning_gym_takes_the_index_of_the_record_or_of_the_seed() -> None:
    environment = ReasoningGym("sums", size=10)
    record = environment.record(3)
    assert (record["index"], record["answer"]) == (3, "4")
    assert record["data_source"] == "reasoning_gym/sums"
    assert str(record["prompt"]).startswith("3 + 1")

    before = random.getstate()
    random.seed(99)
    prompt = {"role": "user", "content": record["prompt"]}
    assert run(environment, task=indexed(3, prompt))[0] == record["prompt"]
    assert run(environment, task=indexed(3))[0] == record["prompt"]
    assert run(environment, seed=5)[0] == run(environment, seed=5)[0]
    random.setstate(before)

    with pytest.raises(DataError, match="index 10 is not in the set, expected 0 to 9"):
        run(environment, task=indexed(10))
    with pytest.raises(DataError, match="expected an integer"):
        run(environment, task=indexed("3"))


@pytest.mark.usefixtures("sums")
def test_reasoning_gym_leaves_the_randomness_of_others_alone() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    run(ReasoningGym("sums"), "<answer>1</answer>", seed=5)
    assert random.random() == expected


@pytest.mark.usefixtures("sums")
def test_reasoning_gym_refuses_sets_by_name() -> None:
    with pytest.raises(InputError, match="refused: its questions depend on PYTHONHASH"):
        ReasoningGym("ransom_note")
    assert ReasoningGym("ransom_note", allow_unsuitable=True)
    with pytest.raises(InputError, match="has no such set"):
        ReasoningGym("products")
    with pytest.raises(InputError, match="does not take the settings"):
        ReasoningGym("sums", config={"digits": 3})


@pytest.mark.parametrize(
    ("name", "text", "is_harmless"),
    [
        ("countdown", "(7 + 3) * 2", True),
        ("countdown", "9**9**9", False),
        ("countdown", "print(1)", False),
        ("puzzle24", "__import__('os')", False),
        ("n_queens", "Q _ _\n_ _ Q", True),  # no Python at all
        ("n_queens", "[['Q', '_'], [-1, 2]]", True),
        ("n_queens", " [print(1)]", False),
        ("n_queens", "9**9**9", False),
        ("string_insertion", "ABCDE", True),
        ("string_insertion", "(lambda: 1)()", False),
        ("string_insertion", "f'{print(1)}'", False),
        ("string_insertion", "[x for x in y]", False),
        ("binary_matrix", "[" * 9000, True),  # a mistake of syntax
        ("binary_matrix", "-" * 9000 + "1", False),
        ("spiral_matrix", "().__class__", False),
    ],
)
def test_what_scorers_would_run_is_looked_at_before(
    name: str, text: str, is_harmless: bool
) -> None:
    assert reasoning_gym._HARMLESS[name](text) is is_harmless


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym._dataset.cache_clear()
    with pytest.raises(InstallationError, match=r"verl_ray\[reasoning-gym\]"):
        ReasoningGym("chain_sum")


# ----------------------------------------------------------------------------- document


def test_the_page_says_how_each_end_is_treated() -> None:
    page = (ROOT / "docs/agents.md").read_text("utf-8")
    stated = dict(re.findall(r"^\| `(\w+)` \| .* \| (\w+) \|$", page, re.MULTILINE))
    assert stated == {
        end.value: treatment.value for end, treatment in TREATMENTS.items()
    }


def test_an_action_becomes_a_message_with_its_calls() -> None:
    call = ToolCall("calculate", {"expression": "1"})
    message = message_of(say("Hm.", call))
    assert message["tool_calls"][0]["function"]["arguments"] == {"expression": "1"}
