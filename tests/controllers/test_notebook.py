"""Cells of a notebook in a real Jupyter kernel: what a user sees, and what remains."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.controllers.runs import ROOT, Inputs

pytestmark = [pytest.mark.cluster, pytest.mark.vllm, pytest.mark.slow]

BEGIN = """
import json, os, pathlib, signal, sys
import psutil
import verl_ray

# The tests of this process may share a cluster, whose token the kernel has inherited.
for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
    os.environ.pop(name, None)

model, train, folder = {model!r}, {train!r}, pathlib.Path({folder!r})
rows = [json.loads(line) for line in open(train)]
quick = {{
    "run": {{"threads_per_rank": 1, "evaluate_every": 0, "checkpoint_every": 100_000}},
    "tracking.wandb.mode": "disabled",
    "actor": {{"optimizer": {{"lr": 1e-3, "warmup_steps": 0}}}},
}}
sft = quick | {{"sft.batch_size": 8, "data.validation_path": None}}
rl = quick | {{
    "run.evaluate_every": 1,
    "evaluation.group_size": 1,
    "data": {{"prompts_per_step": 4, "max_prompt_tokens": 8}},
    "rollout": {{"group_size": 2, "max_response_tokens": 4, "kv_cache_gib": 0.03125}},
}}
"""

LEFT = """
children = [child.name() for child in psutil.Process().children(recursive=True)]
default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(children, default, os.environ.get("RAY_AUTH_TOKEN"))
"""


class Notebook:
    """A notebook whose kernel runs the tests' Python in a folder."""

    def __init__(self, folder: Path) -> None:
        spec = KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="tests", language="python",
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

        class Kernels(KernelSpecManager):
            def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
                return spec

        manager = AsyncKernelManager(kernel_spec_manager=Kernels())
        self.notebook = nbformat.v4.new_notebook()
        self.client = NotebookClient(
            self.notebook, km=manager, timeout=240, resources={"metadata": {"path": str(folder)}},
        )  # fmt: skip

    async def run(self, code: str, interrupt_at: Path | None = None) -> str:
        """Execute a cell and return its text, with the name of an error at the end.

        Args:
            code: The cell.
            interrupt_at: A record of metrics. The kernel is interrupted, as by the
                button, once the record has three lines.
        """
        cell = nbformat.v4.new_code_cell(code)
        self.notebook.cells.append(cell)
        running = asyncio.ensure_future(
            self.client.async_execute_cell(cell, len(self.notebook.cells) - 1)
        )
        if interrupt_at is not None:
            deadline = time.monotonic() + 200
            while not (
                interrupt_at.exists() and interrupt_at.read_text().count("\n") > 2
            ):
                assert not running.done() and time.monotonic() < deadline, text_of(cell)
                await asyncio.sleep(0.05)
            await self.client.km.interrupt_kernel()
        with contextlib.suppress(CellExecutionError):
            await running
        return text_of(cell)


def text_of(cell: nbformat.NotebookNode) -> str:
    texts = []
    for output in cell.outputs:
        if output.output_type == "error":
            texts.append("\n".join([*output.traceback, f"raised {output.ename}"]))
        else:
            texts.append(output.get("text") or output.data["text/plain"])
    return "".join(texts)


def test_a_notebook(inputs: Inputs, tmp_path: Path) -> None:
    asyncio.run(_work_through(inputs, tmp_path))


async def _work_through(inputs: Inputs, folder: Path) -> None:
    notebook = Notebook(folder)
    async with notebook.client.async_setup_kernel():
        begin = BEGIN.format(
            model=str(inputs.model), train=str(inputs.train), folder=str(folder)
        )
        assert await notebook.run(begin) == ""

        # A mistake: the same message as on the command line, and no traceback.
        text = await notebook.run('verl_ray.train("sft", data=rows, overrides=sft)')
        assert text.endswith(
            "1 problem in the configuration:\n\n  model.path = null\n"
            "    rule: this key must be set\n    fix:  Give it: model.path=...\n"
            "raised ConfigError"
        )
        assert "Traceback" not in text and not (folder / "outputs").exists()

        # Functions of a cell score in other processes. The run leaves no process.
        text = await notebook.run(GRPO)
        assert "step 2/2" in text and "finished after 2 steps" in text
        result, scores, processes = text.strip().splitlines()[-3:]
        assert result.startswith("Result(state='finished', steps=2, folder=")
        assert scores == "[2.0, 2.0] [0, 1, 2]"
        assert processes == "[] True None"

        # Cells step by hand, and make the same bits as a run at once.
        assert "step 1/3" in await notebook.run(STEP_BY_HAND)
        text = await notebook.run("run.step()['train/loss'], run.save().name")
        assert text.splitlines()[-1].endswith(", 'step_00000002')")
        text = await notebook.run("print([metrics['train/loss'] for metrics in run])")
        assert "step 3/3" in text
        text = await notebook.run("run.close(); run.result.state, run.global_step")
        assert "finished after 3 steps" in text and text.endswith("('finished', 3)")
        at_once = AT_ONCE.format(steps=3, name="at_once")
        text = await notebook.run(f"{at_once}; print({SAME_BITS})")
        assert text.endswith("True\n"), text

        # The stop button ends the run after a step, saves it and leaves no traceback;
        # the next cell goes on.
        record = folder / "outputs" / "long" / "metrics.jsonl"
        long = AT_ONCE.format(steps=100_000, name="long")
        text = await notebook.run(long, interrupt_at=record)
        # What comes next depends on whether a step is under way at that moment.
        assert "SIGINT: " in text and "Traceback" not in text
        assert "is saved in" in text and text.endswith("raised Stopped")
        stopped_at = record.read_text().count("\n")
        more = AT_ONCE.format(steps=stopped_at + 1, name="long")
        text = await notebook.run(f"{more}\n{LEFT}print(at_once.steps, at_once.state)")
        assert f"continuing after step {stopped_at}" in text
        assert text.endswith(f"[] True None\n{stopped_at + 1} finished\n")


GRPO = f"""
scale = 0.5
def length(response, answer, *, prompt, data_source, extra):
    return scale * 4

result = verl_ray.train("grpo", model=model, data=rows, validation_data=rows[:2],
    reward=length, name="rl", overrides=rl | {{"run.total_steps": 2}})
print(result)
print([line["critic/score/mean"] for line in result.history[1:]], [*result.evaluations])
{LEFT}"""

STEP_BY_HAND = """
run = verl_ray.Run("sft", model=model, data=rows, name="by_hand",
    overrides=sft | {"run.total_steps": 3})
print(run.step().keys() >= {"train/loss", "timing_s/step"})
"""

AT_ONCE = """at_once = verl_ray.train("sft", model=model, data=rows, name={name!r},
    overrides=sft | {{"run.total_steps": {steps}}})"""

SAME_BITS = """all(
    file.read_bytes() == (run.folder / "model" / file.name).read_bytes()
    for file in (at_once.folder / "model").glob("*.safetensors")
) and [m["train/loss"] for m in at_once.history] == [m["train/loss"] for m in run.result.history]"""
