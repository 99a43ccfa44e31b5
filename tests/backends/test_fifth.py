"""A fifth backend is two files: a declaration and its values. Nothing else names one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import contract, inputs
from verl_ray.backends import BACKENDS

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "model_configs"

DECLARATION = '''
from typing import ClassVar, Literal

from verl_ray.backends.base import ActivationPartition, BackendSettings, RankMemory, Trade
from verl_ray.settings.section import Auto, resolved


class FifthBackend(BackendSettings):
    """Whole copies of a model; layers may be computed again."""

    kind: Literal["fifth"]
    keeps: Literal["all", "inputs"] | Auto
    """Activations that are kept. auto: inputs where the GPU needs it."""
    lives: Literal["device", "host"]
    """Where parameters and optimizer state live."""

    shares_models: ClassVar[bool] = False
    recomputation: ClassVar[Trade | None] = Trade("keeps", fast="all", small="inputs")
    host_offload: ClassVar[Trade | None] = Trade("lives", fast="device", small="host")

    @property
    def stays_on_host(self):
        return self.lives == "host"

    def rank_memory(self, num_ranks, model, trained):
        held = {"weights": 4 * model.parameters, "optimizer": 8 * trained}
        return RankMemory(held, transient=4 * trained)

    def working_bytes(self, num_ranks, model, trained, *, batches, learns):
        return 2 * model.parameters

    def activation_partition(self):
        again = resolved(self.keeps) == "inputs"
        return ActivationPartition(residual_width=2, recompute=again)
'''

VALUES = """\
kind: fifth
dtype: auto
micro_batch_tokens_per_rank: auto
keeps: auto
lives: device
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product with a fifth backend: links to its files, and two more."""
    folder = tmp_path_factory.mktemp("product")
    for name in ("verl_ray", "workers", "controllers", "configs"):
        for source in (ROOT / name).rglob("*"):
            link = folder / source.relative_to(ROOT)
            if source.is_file() and source.suffix in (".py", ".yaml", ".jsonl"):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
    (folder / "verl_ray" / "backends" / "fifth.py").write_text(DECLARATION)
    (folder / "configs" / "backend" / "fifth.yaml").write_text(VALUES)
    return folder


def check(tree: Path, *overrides: str, machine: str) -> tuple[int, str]:
    """Return the exit code of `check` for GRPO with the fifth backend, and its output."""
    inputs = ("data.train_path=/t.jsonl", "data.validation_path=null")
    words = ("run.evaluate_every=0", "backend=fifth", "actor.num_ranks=8", *overrides)
    command = [sys.executable, "-m", "controllers", "check", "--config-name", "grpo"]
    done = subprocess.run(
        [*command, "--data", "off", "--machine", machine, *inputs, *words],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "400"},
        capture_output=True,
        text=True,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.processes
def test_a_fifth_backend_has_its_values_of_auto_and_its_changes(tree: Path) -> None:
    small = f"model.path={MODELS / 'Qwen2.5-1.5B'}"
    code, printed = check(tree, small, machine="gpus=8,gpu=A100-40G")
    assert code == 0, printed
    # 20 bytes of each parameter of actor and reference are 29 GiB of 39.
    assert "actor.backend.keeps inputs else learn needs" in printed
    assert "reference.backend.keeps all nothing has to be saved to fit" in printed

    # Of 8.2 billion parameters these are 153 GiB, of which the actor's go to the host.
    large = f"model.path={MODELS / 'Qwen3-8B'}"
    code, printed = check(tree, large, machine="gpus=8,gpu=H200-141G,memory=2T")
    assert code == 2
    assert "backend=fsdp shares out models of which each GPU has a copy" in printed
    cheapest = "without that, the cheapest change that would fit is"
    assert f"{cheapest} actor.backend.lives=host." in printed


# -------------------------------------------------------------------------- their names

EXEMPT = (
    "verl_ray/backends/",
    "verl_ray/engine/",
    "verl_ray/config/advice.py",
    # Help, which is documentation.
    "controllers/commands/usage.py",
    # A list of words, one of which is engine.
    "verl_ray/agents/environments/key_value_memory.py",
)


def names_of_backends(text: str) -> Iterator[int]:
    """Yield the lines of a module that name a backend, in a text or an identifier."""
    module = ast.parse(text)
    kinds = "|".join(BACKENDS)
    # An extra of this project is written as in verl_ray[megatron].
    named = re.compile(
        rf"({kinds})|.*(\bbackend=({kinds})\b|\[({kinds})\]).*", re.DOTALL
    )
    # Docstrings are documentation.
    texts = [node.value for node in ast.walk(module) if isinstance(node, ast.Expr)]
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and node not in texts:
            if named.fullmatch(str(node.value)):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom):
            room, _, kind = (node.module or "").rpartition(".")
            if room == "verl_ray.backends" and kind in BACKENDS:
                yield node.lineno
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            # Many things are called `engine`, which is vLLM's.
            if set(name.lower().split("_")) & (set(BACKENDS) - {"engine"}):
                yield node.lineno


def test_each_way_to_name_a_backend_is_seen() -> None:
    ways = (
        'kind == "fsdp"',
        'print(f"backend=fsdp {more}")',
        "from verl_ray.backends.megatron import MegatronBackend",
        "settings.megatron_fsdp",
        'print("pip install verl_ray[megatron]")',
        'IN_MEGATRON = ("llama",)',
    )
    for way in ways:
        assert list(names_of_backends(way)) == [1]
    assert not list(
        names_of_backends('"""backend=fsdp shares out."""\nnames = ["fsdps"]')
    )


def test_nothing_else_names_a_backend() -> None:
    named = []
    for name in ("verl_ray", "workers", "controllers"):
        for path in sorted((ROOT / name).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            if not where.startswith(EXEMPT):
                lines = names_of_backends(path.read_text())
                named += [f"{where}:{line}" for line in lines]
    assert named == []


def test_the_contract_tests_take_every_backend() -> None:
    writers = {kind for kind, _ in contract.WRITERS}
    assert set(contract.KINDS) == set(inputs.SETTINGS) == set(BACKENDS) <= writers
