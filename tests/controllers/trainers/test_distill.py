"""Distillation from a larger model, as a run of a student on its own responses."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.controllers.runs import (
    Inputs,
    Samplers,
    command_here,
    lasting,
    training,
    watched,
)
from tests.ports import free_port
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import read
from verl_ray.columns.batch import offsets_of
from verl_ray.columns.stages import Rows
from verl_ray.config.distill import TEACHER_KEY, TeacherService
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import ConfigError
from verl_ray.models.tiny import make_tiny_qwen3
from verl_ray.rewards.teacher import RemoteTeacher, ServerNeeds
from verl_ray.tracking.jsonl import read_metrics

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]


@pytest.fixture(scope="module")
def teacher(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model with the tokenizer of the student."""
    shape = TinyModelConfig(
        hidden_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=128,
        tie_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("teacher") / "model"
    return make_tiny_qwen3(folder, inputs.model, shape, seed=7)


def mean_log_prob(model: Path, rows: Rows) -> float:
    """Return what plain transformers gives the response tokens, on average."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = 0.0
    for start, end in zip(rows.offsets, rows.offsets[1:], strict=False):
        tokens = torch.tensor(rows.tokens[start:end].astype(np.int64))
        with torch.no_grad():
            log_probs = plain(tokens[None]).logits[0, :-1].log_softmax(-1)
        given = log_probs.gather(1, tokens[1:, None])[:, 0]
        total += float(given[torch.tensor(rows.response_mask[start + 1 : end])].sum())
    return total / int(rows.response_mask.sum())


@pytest.mark.parametrize(
    "changes",
    [
        ("backend@reference.backend=fsdp", "distill.divergence=sampled"),
        pytest.param(
            ("distill.divergence=jsd", "distill.top_k=4", "schedule=one_step_off", "placement=separate"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("backend=megatron", "distill.divergence=forward", "distill.top_k=8", "reference.num_ranks=2",
             "backend.tensor_parallel=2", "actor.num_ranks=2"),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_student_nears_its_teacher(
    inputs: Inputs,
    samplers: Samplers,
    teacher: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: tuple[str, ...],
) -> None:
    config = inputs.config(
        "distill", tmp_path, f"reference.model.path={teacher}", *changes
    )
    with training(config, samplers) as run:
        taken = watched(run, monkeypatch)
        run.begin(0)
        steps = [run.step(number) for number in range(1, 9)]

    rows = read(taken[0].rollouts, 60)
    gap = mean_log_prob(inputs.model, rows) - mean_log_prob(teacher, rows)
    assert steps[0]["distill/kl"] == pytest.approx(gap, abs=1e-4)
    assert steps[-1]["distill/kl"] < 0.7 * steps[0]["distill/kl"]


HINT = """
def with_answer(request, *, sign):
    return request.answer + sign + request.prompt
"""


@pytest.mark.parametrize(
    "changes",
    [
        ("distill.teacher=actor",),
        pytest.param(
            (
                "distill.teacher=actor",
                "backend=megatron",
                "backend.tensor_parallel=2",
                "actor.num_ranks=2",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(("backend@reference.backend=fsdp",), marks=pytest.mark.slow),
        pytest.param(
            ("distill.teacher=average", "distill.average_decay=0.9", "backend=fsdp"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("actor.lora.rank=4", "rollout.sync.adapter=merged"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_policy_with_the_answer_before_its_prompt_teaches_itself(
    inputs: Inputs,
    samplers: Samplers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: tuple[str, ...],
) -> None:
    """As it is, or as it was before training: both are the same in the first step."""
    file = tmp_path / "hint.py"
    file.write_text(HINT)
    config = inputs.config(
        "distill",
        tmp_path,
        f"distill.teacher_prompt={{function: '{file}:with_answer', sign: '+'}}",
        "distill.divergence=reverse",
        "distill.top_k=5",
        *changes,
    )
    assert config.has_reference == changes[0].startswith("backend")
    with training(config, samplers) as run:
        taken = watched(run, monkeypatch)
        run.begin(0)
        first = run.step(1)

    rows = read(taken[0].rollouts, 60)
    tokenizer = load_tokenizer(inputs.model)
    hinted = [
        [
            *tokenizer(f"{answer}+{prompt}")["input_ids"],
            *rows.tokens[start + length : end],
        ]
        for answer, prompt, length, start, end in zip(
            rows.answer.texts(),
            map(json.loads, rows.messages.texts()),
            rows.prompt_length.tolist(),
            rows.offsets[:-1].tolist(),
            rows.offsets[1:].tolist(),
            strict=True,
        )
    ]
    lengths = np.array([len(row) for row in hinted])
    place = np.arange(lengths.sum()) - np.repeat(offsets_of(lengths)[:-1], lengths)
    with_hint = Rows(
        offsets=offsets_of(lengths),
        tokens=np.concatenate(hinted).astype(np.int32),
        response_mask=place >= np.repeat(lengths - rows.response_length, lengths),
    )
    gap = mean_log_prob(inputs.model, rows) - mean_log_prob(inputs.model, with_hint)
    assert abs(gap) > 1e-4
    assert first["distill/kl"] == pytest.approx(gap, abs=1e-4)
    assert first["actor/distill_loss"] > 0


@contextmanager
def served(model: Path, log: Path) -> Iterator[str]:
    """Serve a model by vLLM's own server; yield its url."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        end = time.monotonic() + 240
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_teaches_what_the_reference_does(
    inputs: Inputs, samplers: Samplers, teacher: Path, tmp_path: Path
) -> None:
    """The student's own tokenizer has the tokens of the server; another one has not."""
    first: list[dict[str, float]] = []
    with served(teacher, tmp_path / "server.log") as url:
        for place in (
            f"reference.model.path={teacher}",
            f"distill.teacher={{arithmetic: {{url: '{url}'}}}}",
        ):
            config = inputs.config(
                "distill", tmp_path, place, "distill.divergence=jsd", "distill.top_k=6"
            )
            with training(config, samplers) as run:
                run.begin(0)
                first.append(run.step(1))
        with pytest.raises(ConfigError, match="another vocabulary"):
            needs = ServerNeeds("1+2=", [9, 9, 9, 9], None, 8)
            RemoteTeacher({TEACHER_KEY: TeacherService(url=url)}).require(needs)
    for name in ("distill/kl", "actor/distill_loss", "actor/grad_norm"):
        assert first[1][name] == pytest.approx(first[0][name], rel=1e-4), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changes",
    [
        ("actor.lora.rank=4", "reference.model.path={teacher}"),
        (
            "distill.teacher=average",
            "distill.average_decay=0.5",
            "algorithm=grpo",
            "algorithm.kl=none",
        ),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    cluster: Session,
    inputs: Inputs,
    teacher: Path,
    tmp_path: Path,
    changes: tuple[str, ...],
) -> None:
    """In two updates per step, of an adapter and of all weights."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for run_dir, steps in ((whole, 3), (broken, 1), (broken, 3)):
        command_here(
            cluster, "train", "--config-name", "distill", *inputs.rl(run_dir), "distill.divergence=reverse",
            "distill.top_k=6", *(change.format(teacher=teacher) for change in changes),
            "actor.mini_batch_size=16", "run.checkpoint_every=1",
            f"run.total_steps={steps}", "run.evaluate_every=1", "actor.optimizer.schedule=constant",
        )  # fmt: skip
    straight, resumed = (
        read_metrics(folder / "metrics.jsonl") for folder in (whole, broken)
    )
    assert [line["training/global_step"] for line in resumed] == [0, 1, 2, 3]
    for left, right in zip(straight, resumed, strict=True):
        assert lasting(left) == lasting(right)
    assert straight[1]["actor/distill_loss"] > 0
    # The average begins as the policy, and follows it.
    is_itself = changes[0] == "distill.teacher=average"
    assert (straight[1]["distill/kl"] == pytest.approx(0, abs=1e-6)) == is_itself
    assert abs(straight[2]["distill/kl"]) > 1e-5
