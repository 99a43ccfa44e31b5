"""Which prompts may be drawn, and where a resumed run draws again."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controllers.rollouts.admission import Admission
from scripts.configuration import compose
from tests.data.test_prompts import config as prompt_config
from verl_ray.config.data import CurriculumConfig
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.curriculum import Curriculum
from verl_ray.data.cursor import drawn_rows
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import character_tokenizer

SCHEDULES = {
    "synchronous": ("schedule=synchronous",),
    "one_step_off": ("schedule=one_step_off", "placement=separate"),
    "asynchronous": ("schedule=asynchronous", "placement=separate"),
    "carry_over": ("schedule=carry_over",),
}


@functools.cache
def run_config(schedule: str, staleness: int, steps: int, prompts: int) -> RLConfig:
    """A run of so many steps, with one group a row and so many prompts a step."""
    config = compose(
        "quickstart",
        [*SCHEDULES[schedule], f"rollout.staleness={staleness}", f"run.total_steps={steps}",
         f"data.prompts_per_step={prompts}", "rollout.group_size=2", "actor.mini_batch_size=null"],
    )  # fmt: skip
    assert isinstance(config, RLConfig)
    return config


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return character_tokenizer(tmp_path_factory.mktemp("characters"), "0123456789+=")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Nine problems, of which every third is longer than five tokens."""
    records = [
        {"prompt": f"{i}+1=" if i % 3 else f"{i}+1+1+1=", "answer": str(i)}
        for i in range(9)
    ]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def admission(
    file: Path,
    tokenizer: Any,
    *,
    staleness: int,
    steps: int = 9,
    streams: bool = False,
    curriculum: Curriculum | None = None,
) -> Admission:
    """Batches of two of the problems that fit, in the order of the file."""
    data = prompt_config(
        max_prompt_tokens=5, overlong="skip", shuffle=False,
        stream_above_gib=0.0 if streams else 1.0,
    )  # fmt: skip
    source = PromptSource(str(file), tokenizer, data, seed=3, may_stream=streams)
    source.curriculum = curriculum
    schedule = "one_step_off" if staleness else "synchronous"
    return Admission(source, run_config(schedule, staleness, steps, 2))


def drawn(batches: Admission) -> list[tuple[int, list[int], list[str]]]:
    return [
        (step, prompts.group_id.tolist(), prompts.answer.texts())
        for step, prompts in batches.draw()
    ]


def test_a_synchronous_run_draws_one_batch_at_a_time(
    file: Path, characters: Any
) -> None:
    batches = admission(file, characters, staleness=0)
    assert drawn(batches) == [(1, [0, 1], ["1", "2"])]
    assert drawn(batches) == []
    assert batches.oldest.tolist() == [0, 1]
    batches.note_trained()
    assert drawn(batches) == [(2, [2, 3], ["4", "5"])]


def test_the_window_is_one_batch_larger_than_the_staleness(
    file: Path, characters: Any
) -> None:
    batches = admission(file, characters, staleness=2)
    assert drawn(batches) == [
        (1, [0, 1], ["1", "2"]),
        (2, [2, 3], ["4", "5"]),
        (3, [4, 5], ["7", "8"]),
    ]
    assert drawn(batches) == [] and len(batches._open) == 3
    batches.note_trained()
    assert batches.oldest.tolist() == [2, 3]  # the oldest first
    assert drawn(batches) == [(4, [6, 7], ["1", "2"])]  # the second epoch
    batches.note_trained()
    batches.note_trained()
    assert batches.oldest.tolist() == [6, 7] and len(batches._open) == 1
    assert [step for step, *_ in drawn(batches)] == [5, 6]


def test_no_batch_is_drawn_behind_the_last_step(file: Path, characters: Any) -> None:
    batches = admission(file, characters, staleness=3, steps=5)
    steps = [step for step, *_ in drawn(batches)]
    for _ in range(5):
        batches.note_trained()
        steps += [step for step, *_ in drawn(batches)]
    assert steps == [1, 2, 3, 4, 5]
    assert len(batches._open) == 0
    assert drawn_rows(batches.state()) == 5 * 2


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("streams", [False, True], ids=["in memory", "streamed"])
def test_a_resumed_run_draws_what_is_not_trained_again(
    file: Path, characters: Any, staleness: int, streams: bool
) -> None:
    """The state is that of the oldest batch that is not trained, at every step.

    Where problems are streamed, those without use were passed over on the way.
    """
    whole = admission(file, characters, staleness=staleness, streams=streams)
    batches: dict[int, tuple[list[int], list[str]]] = {}
    states = []
    for done in range(9):
        # A run may stop before it draws, and with all batches open.
        states += [(done, whole.state())]
        batches |= {step: batch for step, *batch in drawn(whole)}
        states += [(done, whole.state())]
        whole.note_trained()
    states += [(9, whole.state())]
    assert list(batches) == list(range(1, 10))

    for done, state in states:
        state = json.loads(json.dumps(state))
        assert drawn_rows(state) == done * 2
        resumed = admission(file, characters, staleness=staleness, streams=streams)
        resumed.load_state(state)
        resumed.begin(done)
        again: dict[int, tuple[list[int], list[str]]] = {}
        for _ in range(9 - done):
            again |= {step: batch for step, *batch in drawn(resumed)}
            resumed.note_trained()
        assert again == {step: batches[step] for step in range(done + 1, 10)}


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_resumed_run_makes_the_same_choices(
    file: Path, characters: Any, staleness: int, tmp_path: Path
) -> None:
    """Problems with odd answers are solved at once, the others are easy.

    Of those an epoch draws a half, so that the choices are also random.
    """

    def fresh() -> tuple[Admission, Curriculum]:
        settings = {
            "hard_to": 0.0,
            "hard_share": 1.0,
            "easy_from": 0.5,
            "easy_share": 0.5,
        }
        chosen = Curriculum(
            CurriculumConfig.model_validate({**settings, "solved_from": 1.0}),
            6, seed=3, staleness=staleness,
        )  # fmt: skip
        batches = admission(file, characters, staleness=staleness, curriculum=chosen)
        return batches, chosen

    answers: dict[int, str] = {}

    def step(batches: Admission, chosen: Curriculum) -> None:
        for _, ordinals, texts in drawn(batches):
            answers.update(zip(ordinals, texts, strict=True))
        group = batches.oldest
        score = [0.75 if int(answers[int(g)]) % 2 == 0 else 1.0 for g in group]
        chosen.note_scores(group, np.array(score, np.float32), np.ones(2, np.bool_))
        chosen.end_batch(batches.num_trained)
        batches.note_trained()

    whole, chosen = fresh()
    stops = []
    for done in range(9):
        folder = tmp_path / str(done)
        folder.mkdir()
        chosen.write(folder)
        stops.append((done, whole.state(), folder))
        step(whole, chosen)
    expected = dict(answers)
    # The window is full of problems that were chosen before any was solved.
    later = [expected[o] for o in range(2 * (staleness + 1) + 4, 18)]
    assert set(later) <= {"2", "4", "8"} and len(expected) == 18

    for done, state, folder in stops:
        answers = {o: expected[o] for o in range(2 * done)}
        resumed, chosen = fresh()
        resumed.load_state(json.loads(json.dumps(state)))
        resumed.begin(done)
        chosen.read(folder)
        for _ in range(9 - done):
            step(resumed, chosen)
        assert answers == expected


def test_the_place_of_passed_over_problems_is_that_of_the_oldest_batch(
    file: Path, characters: Any
) -> None:
    batches = admission(file, characters, staleness=1, streams=True)
    drawn(batches)
    # Batches 0 and 1 lie at the problems 1, 2 and 4, 5; 0 and 3 are passed over.
    place = batches.state()
    assert (place["drawn"], place.get("passed", 0), place["position"]) == (0, 0, 0)
    batches.note_trained()
    place = batches.state()
    assert (place["drawn"], place["passed"], place["position"]) == (2, 1, 3)


def test_the_ordinals_are_those_of_a_run_without_a_window(
    file: Path, characters: Any
) -> None:
    """Which prompts a step learns from does not depend on the staleness."""
    trained = []
    for staleness in (0, 1, 2, 3):
        batches = admission(file, characters, staleness=staleness, steps=6)
        ordinals = []
        for _ in range(6):
            drawn(batches)
            ordinals.append(batches.oldest)
            batches.note_trained()
        trained.append(np.concatenate(ordinals).tolist())
    assert trained == [list(range(12))] * 4
