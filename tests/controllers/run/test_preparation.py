"""The inputs that a run makes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from controllers.run.preparation import (
    WarmStart,
    WarmStartProgress,
    prepare,
    supervised_job,
    write_problems,
)
from controllers.system.plan import ClusterShape, resolve_on
from controllers.trainers.sft import ACCURACY
from scripts.configuration import compose
from tests.data.reading import read_supervised
from verl_ray.cluster.session import Session
from verl_ray.config.load import with_auto_again
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.conversations import tokenize
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import ConfigError, DataError
from verl_ray.preflight.findings import INPUTS_COMPLETE, INPUTS_STARTED, inputs_folder
from verl_ray.preflight.model_files import settings_of
from verl_ray.profiling.phases import OpenPhase

SMALL = [
    "run.threads_per_rank=1", "prepare.max_operand=19", "prepare.num_train=300", "prepare.num_validation=40",
    "prepare.model.hidden_size=64", "prepare.model.num_layers=2", "prepare.model.num_heads=2",
    "prepare.model.num_kv_heads=1", "prepare.model.intermediate_size=96", "prepare.warm_start.evaluate_every=10",
    "prepare.warm_start.batch_size=100", "prepare.warm_start.optimizer.lr=3e-3", "prepare.warm_start.min_steps=5",
    "prepare.warm_start.wrong_fraction=0", "prepare.min_gain=0",
]  # fmt: skip


def quickstart(run_dir: Path, *changes: str) -> RLConfig:
    config = compose("quickstart", [f"run.dir={run_dir}", *SMALL, *changes])
    assert isinstance(config, RLConfig)
    return config


def test_the_warm_start_is_a_supervised_job_of_the_actor() -> None:
    config = quickstart(Path("/r"), "backend@actor.backend=fsdp", "actor.num_ranks=2")
    assert config.prepare is not None
    job = supervised_job(
        config, config.prepare, Path("/r/inputs"), Path("/t"), Path("/v")
    )
    assert (job.actor.backend.kind, job.actor.num_ranks, job.model.path) == (
        "fsdp",
        2,
        "/r/inputs/untrained",
    )
    assert job.actor.optimizer == config.prepare.warm_start.optimizer
    assert job.run.total_steps == config.prepare.warm_start.max_steps
    assert job.sft.max_tokens == 16 + 8

    # What the run has resolved for settings that the warm start has not stays its own.
    config = resolve_on(quickstart(Path("/r")), ClusterShape((2,), (0,)))
    assert config.prepare is not None
    assert config.run.resolved.cpu["agent.reasoning_parser"] is None
    job = supervised_job(
        config, config.prepare, Path("/r/inputs"), Path("/t"), Path("/v")
    )
    assert with_auto_again(job).run.resolved.cpu == {}


def test_a_warm_start_says_how_it_ended() -> None:
    preparation = compose("quickstart", ["prepare.warm_start.accuracy_low=0.32"])
    assert isinstance(preparation, RLConfig) and preparation.preparation is not None
    trainer = WarmStart.__new__(WarmStart)
    trainer._config = preparation.preparation.warm_start
    trainer._steps = 370
    trainer.reached = 0.41
    high = trainer._config.accuracy_high
    said = "done after 370 steps, the held-out accuracy 0.410 is within 0.32 to"
    assert trainer.outcome == f"{said} {high:g}"


def test_a_warm_start_says_how_long_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From 350 to 1000 steps, each of half a second after the first one."""
    preparation = compose("quickstart").preparation
    assert preparation is not None
    now_s = iter((100.0, 104.5, 280.0))
    opened = OpenPhase("warm start", 0.0)
    progress = WarmStartProgress(opened, preparation.warm_start, lambda: next(now_s))
    evaluated = {"train/loss": 2.0, ACCURACY: 0.125}
    progress.log(0, {ACCURACY: 0.0})
    progress.log(1, {"train/loss": 3.0})
    progress.log(10, evaluated)
    progress.log(361, evaluated)
    progress.log(1000, evaluated)
    first, later, last = capsys.readouterr().out.splitlines()
    line = "warm start: step 10  loss 2.000  held-out 0.125  2m50s to 8m15s left"
    assert first == line and later.endswith("  at most 5m20s left")
    assert last == "warm start: step 1000  loss 2.000  held-out 0.125"
    assert str(opened.count) == "1000/1000 steps at most"


def test_a_folder_that_no_run_made_stays(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    mine = tmp_path / "inputs" / "thesis.txt"
    mine.write_text("years of work")
    with pytest.raises(
        ConfigError, match=r"(?s)run\.dir.*no run has made.*move that folder away"
    ):
        prepare(quickstart(tmp_path), Session.__new__(Session))
    assert mine.read_text() == "years of work"


@pytest.mark.parametrize("name", ["quickstart", "word_problems", "agent_quickstart"])
def test_each_tokenizer_fits_its_problems_and_what_the_check_expects(
    name: str, tmp_path: Path
) -> None:
    config = compose(name, [f"run.dir={tmp_path}", *SMALL])
    assert isinstance(config, RLConfig) and config.prepare is not None
    files = write_problems(tmp_path, config.prepare, 0)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert len(tokenizer) == settings_of(config.model.path, config)["vocab_size"]

    # No prompt and no demonstration, with its end, is longer than its limit.
    longest_prompt = config.data.max_prompt_tokens
    longest_response = config.rollout.max_response_tokens
    for part in (files.train, files.validation):
        shown = read_supervised(part.jsonl)
        tokens, mask = tokenize(
            [record.content for record in shown], [record.where for record in shown], tokenizer,
            apply_chat_template=tokenizer.chat_template is not None, special_tokens="refuse", responses="all",
        )  # fmt: skip
        for row, is_response in enumerate(np.split(mask, tokens.offsets[1:-1])):
            assert is_response.argmax() <= longest_prompt
            assert is_response.sum() <= longest_response
            assert len(tokens[row]) <= longest_prompt + longest_response


def test_a_recipe_of_a_version_without_word_problems_is_one_of_sums(
    tmp_path: Path,
) -> None:
    config = quickstart(tmp_path)
    assert config.prepare is not None
    settings = {"seed": 0, **config.prepare.model_dump(exclude={"min_gain"})}
    del settings["problems"]
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / INPUTS_COMPLETE).write_text(json.dumps(settings, indent=1))
    prepare(config, Session.__new__(Session))  # the inputs stay as they are
    words = quickstart(tmp_path, "prepare.problems=word_problems")
    with pytest.raises(ConfigError, match="was made with another seed or other"):
        prepare(words, Session.__new__(Session))


@pytest.mark.cluster
def test_inputs_reach_their_window_and_are_made_once(
    cluster: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    window = [
        "prepare.warm_start.accuracy_low=0.05",
        "prepare.warm_start.accuracy_high=0.9",
    ]
    config = quickstart(tmp_path, *window)
    prepare(config, cluster)
    *_, measured, ended = capsys.readouterr().out.splitlines()
    reached = float(measured.partition("held-out ")[2].split()[0])
    assert ended.startswith("warm start: done after ")
    assert 0.05 <= reached <= 0.9
    assert (
        load_tokenizer(config.model.path).decode(
            load_tokenizer(config.model.path)("1+2=")["input_ids"]
        )
        == "1+2="
    )
    for path in (
        config.data.train_path,
        config.data.validation_path,
        tmp_path / "inputs" / INPUTS_COMPLETE,
    ):
        assert Path(str(path)).is_file()
    weights = Path(config.model.path, "model.safetensors")
    made = weights.stat().st_mtime_ns
    prepare(config, cluster)
    assert weights.stat().st_mtime_ns == made


@pytest.mark.cluster
def test_a_window_that_is_missed_is_an_error_and_the_inputs_are_not_complete(
    cluster: Session, tmp_path: Path
) -> None:
    missed = ["prepare.warm_start.accuracy_low=0.99", "prepare.warm_start.accuracy_high=1",
              "prepare.warm_start.max_steps=10"]  # fmt: skip
    with pytest.raises(
        DataError, match=r"prepare.warm_start.accuracy_low = 0.99.*raise max_steps"
    ):
        prepare(quickstart(tmp_path, *missed), cluster)
    assert not (tmp_path / "inputs" / INPUTS_COMPLETE).exists()
    assert (
        tmp_path / "inputs" / INPUTS_STARTED
    ).exists()  # so that the next attempt may begin anew


def test_inputs_of_another_seed_are_not_trained_on(tmp_path: Path) -> None:
    config = quickstart(tmp_path)
    folder = inputs_folder(config)
    folder.mkdir(parents=True)
    (folder / INPUTS_COMPLETE).write_text("made with other settings")
    with pytest.raises(ConfigError, match="made with another seed or other settings"):
        prepare(config, cast(Session, None))


@pytest.mark.cluster
def test_a_model_that_has_seen_nothing_is_not_warm(
    cluster: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loop evaluates before the first step, where any accuracy may lie within the
    bounds.
    """
    anything = ["prepare.warm_start.accuracy_low=0", "prepare.warm_start.accuracy_high=1",
                "prepare.warm_start.min_steps=0", "prepare.warm_start.evaluate_every=2"]  # fmt: skip
    prepare(quickstart(tmp_path, *anything), cluster)
    line, ended = [
        one
        for one in capsys.readouterr().out.splitlines()
        if one.startswith("warm start: ")
    ]
    assert line.startswith("warm start: step 2  loss ")
    assert ended.startswith("warm start: done after 2 steps")
