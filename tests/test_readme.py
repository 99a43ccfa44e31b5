"""Every command of the README and of docs/, run as it stands there, from a copy of the
checkout; long ones get shortening overrides.

What is not run here: scripts/test, which would run itself, and the benchmarks, which
tests/controllers/test_bench.py runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from verl_ray.cluster.session import Session

ROOT = Path(__file__).parents[1]
README = "README.md"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in (ROOT / README, *sorted((ROOT / "docs").glob("*.md")))
}
"""Path of a document -> its text."""

# After the first run, which is told to W&B as it stands
QUIET = "tracking.wandb.mode=disabled"
FEW = "run.total_steps=1 run.threads_per_rank=1 data.prompts_per_step=4 rollout.group_size=2 actor.mini_batch_size=null"
SHORT = "evaluation.num_prompts=5 rollout.max_response_tokens=8"
NO_WARM_START = "prepare.warm_start.accuracy_low=0 prepare.warm_start.min_steps=1 prepare.warm_start.evaluate_every=1"
MADE = "prepare=null " + " ".join(
    f"{key}=outputs/first/inputs/{name}"
    for key, name in {
        "model.path": "model", "data.train_path": "train.jsonl", "data.validation_path": "validation.jsonl",
    }.items()
)  # fmt: skip
PREPARED = f"prepare.num_train=200 prepare.num_validation=20 prepare.min_gain=0 {NO_WARM_START}"
SHORTER = {
    "scripts/quickstart": f"{FEW} {PREPARED}",
    # One more
    "verl-ray train --config-name quickstart run.name=first": f"{FEW} {PREPARED} run.total_steps=2",
    "verl-ray train --config-name quickstart run.name=groups": f"{FEW} {MADE} {QUIET}",
    "verl-ray train --config-name quickstart": f"{FEW} {PREPARED} {QUIET}",
    "verl-ray train --config-name ppo run.name=rewarded": f"{FEW} {SHORT} {QUIET}",
    "verl-ray train --config-name ppo": f"{FEW} {QUIET} evaluation.num_prompts=5",
    "verl-ray train --config-name grpo": f"{FEW} {QUIET} evaluation.num_prompts=5",
    "verl-ray train --config-name reward_model": f"{QUIET} run.total_steps=2 run.evaluate_every=2",
    "verl-ray evaluate --config-name reward_model": "evaluation.num_pairs=4 run.threads_per_rank=1",
    "verl-ray train --config-name distill": f"{FEW} {QUIET} evaluation.num_prompts=5 run.evaluate_every=1",
    "verl-ray train --config-name dpo": f"{QUIET} run.total_steps=2 run.evaluate_every=2",
    "verl-ray train --config-name gsm8k": f"{FEW} {SHORT} {QUIET}",
    "verl-ray train --config-name word_problems": f"{FEW} {PREPARED} {QUIET}",
    "verl-ray train --config-name agent_quickstart": f"{FEW} {PREPARED} {QUIET}",
    "verl-ray train --config-name sft": f"{QUIET} run.total_steps=2 run.threads_per_rank=1",
    "verl-ray generate": "evaluation.num_prompts=5 run.threads_per_rank=1",
    "verl-ray evaluate": "evaluation.num_prompts=5 run.threads_per_rank=1",
    "ray job submit": f"{FEW} {PREPARED}",
}
"""What a command begins with -> what is added to it. A later value of a key wins over an earlier one."""
AS_IT_STANDS = (
    ". .venv/bin/activate",
    "verl-ray --help",
    "verl-ray check",
    "verl-ray export",
    "verl-ray report",
    "verl-ray runs",
    "export ",
    "printf ",
    "ray get-auth-token",
    "ray start --head --block",
    "cat > grader.py",
    "cat > loss.py",
    "cat > hint.py",
    "cat > my_agent.py",
    "cat > sums.csv",
    "scripts/prepare_data",
)
NOT_RUN = ("scripts/test", "scripts/bench_gpu", "python -m scripts.bench")
FIRST = (README, "Two commands")
CLUSTER = (README, "A cluster")
SAID = {
    (
        "docs/evaluation.md",
        "Measure a model",
    ): {  # by `verl-ray evaluate` alone, of a model directory
        r"^│ val-core/arithmetic/acc/mean@1 +│ +\d\S* │$": 1,
        r"^│ val-aux/num_prompts +│ +5 │$": 1,
        r"^measured: \S+/inputs/model is measured, which took \d+s$": 1,
    }
}
"""Section -> lines that its commands print, and how often."""


def sections() -> dict[tuple[str, str], list[str]]:
    """Document and heading -> the `sh` blocks below it."""
    found: dict[tuple[str, str], list[str]] = {}
    for page, text in PAGES.items():
        for heading, body in re.findall(
            r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
        ):
            blocks = re.findall(r"^```sh\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
            if blocks:
                found[page, heading] = blocks
    return found


def runs() -> list[tuple[str, str]]:
    """The sections with something to run in their own test."""
    return [
        place
        for place, blocks in sections().items()
        if place not in (FIRST, CLUSTER) and any(map(commands_run, blocks))
    ]


def commands_run(block: str) -> list[str]:
    """The commands of a block that are run here."""
    return [each for each in commands(block) if not each.startswith(NOT_RUN)]


def commands(block: str) -> list[str]:
    """The commands of a block, each in one piece: continued lines joined, a
    here-document with its command.
    """
    joined = block.replace("\\\n", " ")
    return [
        match.group().strip()
        for match in re.finditer(
            r"^.*<<'EOF'\n(?:.*\n)*?EOF$|^.+$", joined, re.MULTILINE
        )
    ]


def runnable(block: str) -> str:
    """The block as a script: shortened, without what is not run."""
    lines = ["set -euo pipefail"]
    for command in commands_run(block):
        more = (more for start, more in SHORTER.items() if command.startswith(start))
        lines.append(f"{command} {next(more, '')}".strip())
    return "\n".join(lines)


def test_every_command_is_known_so_that_none_is_left_out() -> None:
    every = [
        command
        for blocks in sections().values()
        for block in blocks
        for command in commands(block)
    ]
    assert len(every) >= 20
    unknown = [
        command
        for command in every
        if not command.startswith((*SHORTER, *AS_IT_STANDS, *NOT_RUN))
    ]
    assert unknown == []
    assert [
        start
        for start in SHORTER
        if not any(command.startswith(start) for command in every)
    ] == []


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    roots = "configs|controllers|workers|verl_ray|scripts|tests"
    for path in re.findall(rf"`((?:{roots})/[\w/.]*)`", PAGES[page]):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        path, _, heading = target.partition("#")
        if "://" in target:
            continue
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), target
        assert not heading or heading in anchors(linked.read_text("utf-8")), target


def anchors(text: str) -> set[str]:
    """The names by which links find the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def test_every_page_is_found_from_the_list() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", PAGES["docs/README.md"]))
    assert listed == {Path(page).name for page in PAGES} - {README}


# ------------------------------------------------------------------------- running them


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the checkout with this environment, and a small copy of GSM8K."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "controllers", "workers", "verl_ray", "scripts"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "requirements-cpu.lock", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    (folder / "gsm8k").mkdir()
    for name in ("train", "test"):
        rows = [
            {
                "question": f"What is {i} and {i + 1}?",
                "answer": f"Added up:\n#### {2 * i + 1}",
            }
            for i in range(20)
        ]
        (folder / "gsm8k" / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    sums = [
        (
            {"question": f"What is {i} and {i + 1}?"},
            f"Added up:\nA: {2 * i + 1}",
            "Guessed:\nA: 0",
        )
        for i in range(40)
    ]
    lines = [
        json.dumps({**question, "a": {"is_correct": i % 2 == 0, "solution": (right, wrong)[i % 2]},
                    "b": {"is_correct": i % 2 == 1, "solution": (wrong, right)[i % 2]}})
        for i, (question, right, wrong) in enumerate(sums)
    ]  # fmt: skip
    (folder / "gsm8k" / "example_model_solutions.jsonl").write_text(
        "\n".join(lines) + "\n"
    )
    return folder


def environment(home: Path) -> dict[str, str]:
    """A fresh account's, with the set-up that is there."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    return {**inherited, "HOME": str(home), "VERL_RAY_SKIP_SETUP": "1"}


def on_cluster(cluster: Session) -> dict[str, str]:
    """What a shell needs so that its runs use a cluster that is there; the first
    section has one started for it.
    """
    token = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("RAY_AUTH_")
    }
    return token | {"RAY_ADDRESS": cluster.address}


def run(script: str, checkout: Path, variables: dict[str, str]) -> str:
    """Run a script; its output."""
    process = subprocess.run(
        ["bash", "-c", script],
        cwd=checkout,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0, f"{script}\n{process.stdout[-4000:]}"
    return process.stdout


def submitted(script: str, checkout: Path, variables: dict[str, str]) -> str:
    """The same for a job, given again while the head is still starting, as the README
    tells its reader.
    """
    until = time.monotonic() + 60
    while True:
        try:
            return run(script, checkout, variables)
        except AssertionError as error:
            if "No available agent" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(3)


@pytest.fixture(scope="module")
def first_run(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout after the first section, which the others build on."""
    for block in sections()[FIRST]:
        run(runnable(block), checkout, environment(tmp_path_factory.mktemp("home")))
    return checkout


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quickstart_leaves_what_the_readme_says(first_run: Path) -> None:
    listed = re.findall(
        r"^\| `([\w.]+)/?` ",
        PAGES["docs/start.md"]
        .partition("## What a run writes")[2]
        .partition("\n## ")[0],
        re.M,
    )
    assert len(listed) == 19
    # Another command, other tasks and settings, and failures write these.
    for name in set(listed) - {"evaluated", "model", "faults.jsonl", "trace.json"}:
        assert (first_run / "outputs" / "first" / name).exists(), name


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("place", runs(), ids=" ".join)
def test_commands_of(
    place: tuple[str, str], first_run: Path, cluster: Session, tmp_path: Path
) -> None:
    script = "export PATH=.venv/bin:$PATH\n" + "\n".join(
        runnable(block) for block in sections()[place]
    )
    said = run(script, first_run, environment(tmp_path) | on_cluster(cluster))
    for words, times in SAID.get(place, {}).items():
        assert len(re.findall(words, said, re.MULTILINE)) == times, words


@contextlib.contextmanager
def head_of_a_cluster(block: str, checkout: Path, home: Path) -> Iterator[str]:
    """The first terminal: runs until the end of the `with`, then gets the Ctrl-C of the
    README.
    """
    folder = Path(
        tempfile.mkdtemp(dir="/tmp")
    )  # short: the names of sockets in it are limited to 107 bytes
    port = free_port()
    apart = (
        f" --port=0 --dashboard-port={port} --dashboard-agent-listen-port={free_port()}"
        f" --node-ip-address=127.0.0.2 --temp-dir={folder} --disable-usage-stats"
    )
    log = home / "head.log"
    command = (
        runnable(block).replace(
            "ray start --head --block", "exec ray start --head --block"
        )
        + apart
    )
    variables = environment(home) | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}

    def start() -> subprocess.Popen[bytes]:
        with log.open("w") as output:
            return subprocess.Popen(
                ["bash", "-c", command], cwd=checkout, env=variables, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_as_in_a_terminal,
            )  # fmt: skip

    head = start()
    try:
        until = time.monotonic() + 600
        while "will now block" not in log.read_text():
            assert time.monotonic() < until, log.read_text()[-4000:]
            if (
                head.poll() is not None
            ):  # Ray gives its processes 30 s, which beside other tests may be too few
                assert "timed out during startup" in log.read_text(), log.read_text()[
                    -4000:
                ]
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(head.pid, signal.SIGKILL)
                head = start()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGINT)
        try:
            head.wait(200)  # it ends what it started, on a machine that may be busy
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def _as_in_a_terminal() -> None:
    """Ctrl-C ends a program, but for one that was started in the background, as these
    tests may be.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_commands_of_a_cluster(checkout: Path, tmp_path: Path) -> None:
    """Head and job on this machine, on ports and in folders of the test's own."""
    head_block, job_block = sections()[CLUSTER]
    with head_of_a_cluster(head_block, checkout, tmp_path) as dashboard:
        variables = environment(tmp_path) | {"RAY_API_SERVER_ADDRESS": dashboard}
        output = submitted(runnable(job_block), checkout, variables)
    assert "succeeded" in output
    assert (tmp_path / "outputs" / "job" / "metrics.jsonl").exists()
    assert not (checkout / "outputs" / "job").exists()
