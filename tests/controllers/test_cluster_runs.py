"""Runs from the outside: how they end, what they leave behind, and on more than one
node.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.controllers.runs import Inputs
from tests.ports import free_port
from verl_ray.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
# In the environment of a run, and so of every process that it starts
MARK = "VERL_RAY_TEST_MARK"

pytestmark = [pytest.mark.cluster, pytest.mark.vllm]


def environment(home: Path) -> dict[str, str]:
    """A fresh account's, marked."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ours = {
        "HOME": str(home),
        "PATH": path,
        MARK: str(home),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    return {**inherited, **ours, "OMP_NUM_THREADS": "1"}


def marked(home: Path) -> list[psutil.Process]:
    """Every process of the machine that carries the mark; a zombie is a process no
    more.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(
                MARK
            ) == str(home):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_for(condition: Callable[[], object], timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@contextmanager
def running(inputs: Inputs, home: Path) -> Iterator[subprocess.Popen[str]]:
    """A long run on a cluster of its own, in a session of its own."""
    arguments = [
        *inputs.rl(home / "run"),
        "run.total_steps=100000",
        "tracking.wandb.mode=offline",
    ]
    with (home / "output").open("w") as output:
        driver = subprocess.Popen(
            [sys.executable, "-m", "controllers", "train", "--config-name", "ppo", *arguments],
            cwd=ROOT, env=environment(home), stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        yield driver
    finally:
        for process in marked(home):
            process.kill()
        driver.wait(100)


@pytest.mark.parametrize(
    ("sent", "moment"),
    [
        pytest.param(signal.SIGINT, "in a step", marks=pytest.mark.slow),
        (signal.SIGTERM, "at the start"),
        (signal.SIGKILL, "in a step"),
    ],
)
def test_a_stopped_run_leaves_no_process(
    inputs: Inputs, tmp_path: Path, sent: signal.Signals, moment: str
) -> None:
    def begun() -> bool:
        if moment == "in a step":
            return steps_done(tmp_path / "run") >= 2
        return any(
            process.name().startswith("ray::WorkerHost") for process in marked(tmp_path)
        )

    with running(inputs, tmp_path) as driver:
        assert wait_for(lambda: begun() or driver.poll() is not None, 200)
        output = tmp_path / "output"
        assert driver.poll() is None, output.read_text()
        began = time.monotonic()
        driver.send_signal(sent)
        code = driver.wait(100)
        assert wait_for(lambda: not marked(tmp_path), 30), [
            process.cmdline() for process in marked(tmp_path)
        ]
        print(f"{sent.name} {moment}: gone after {time.monotonic() - began:.1f} s")
        if sent != signal.SIGKILL:
            assert code == 130, output.read_text()
            assert f"stopped by {sent.name}" in output.read_text()
            assert "Traceback" not in output.read_text(), output.read_text()
    if moment == "in a step":
        lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [line["training/global_step"] for line in lines] == list(
            range(1, len(lines) + 1)
        )


# ---------------------------------------------------------------------------- two nodes

TWO_NODES = """
import os
import sys
from ray.cluster_utils import Cluster
import ray
from scripts.configuration import compose
from controllers.system.build import start
from controllers.system.plan import ClusterShape, resolve_on
from controllers.trainers.rl import Trainer
from tests.cluster.crew import answers
from verl_ray.cluster.session import Session
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import load_tokenizer

if __name__ == "__main__":
    small = {"object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, **small})
    cluster.add_node(num_cpus=3, object_store_memory=100 << 20)
    with Session.open(cluster.address) as session:
        config = resolve_on(compose("ppo", sys.argv[1:]), ClusterShape.of(session))
        print("nodes", len(session.resources()), session.owns_cluster, config.rollout.sync.transport)
        with start(config, session) as system:
            homes = {
                group.role: group.members()[0].process_info.node_id
                for group in (system.actor, system.critic, system.reference, system.graders["reward"])
            }
            replicas = system.rollout
            print("apart", len(set(homes.values())))
            prompts = PromptSource(config.data.train_path, load_tokenizer(config.model.path), config.data, 0)
            trainer = Trainer(config, system, prompts, None)
            trainer.publish(0)
            for number in (1, 2):
                metrics = trainer.step(number)
                print("step", number, metrics["actor/grad_norm"] > 0, metrics["critic/grad_norm"] > 0,
                      metrics["training/rollout_probs_diff_mean"] < 1e-5)
            os.kill(replicas.available[1].members()[0].process_info.pid, 9)
            trainer.publish(3)  # to the one that is left, over another group
            replicas._supervisor.wait_for_replicas(all_of_them=True)
            trainer.publish(3)
            print("versions", [answers(one, "status")[0].health["rollout"].policy_version for one in replicas.available])
            replicas.close()
        print("still", len(session.resources()))
    cluster.shutdown()
"""


@pytest.mark.slow
def test_roles_on_two_nodes_with_weights_broadcast_to_replicas_of_which_one_dies(
    inputs: Inputs, tmp_path: Path
) -> None:
    program = tmp_path / "two_nodes.py"
    program.write_text(TWO_NODES)
    arguments = [
        *inputs.rl(tmp_path / "run"),
        "placement=separate",
        "rollout.num_replicas=2",
    ]
    ended = subprocess.run(
        [sys.executable, str(program), *arguments], cwd=ROOT, env={**environment(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = [
        line
        for line in ended.stdout.splitlines()
        if line.split()[0] in ("nodes", "apart", "step", "versions", "still")
    ]
    steps = [f"step {number} True True True" for number in (1, 2)]
    assert said == [
        "nodes 2 False host_broadcast",
        "apart 2",
        *steps,
        "versions [3, 3]",
        "still 2",
    ]
    assert wait_for(lambda: not marked(tmp_path), 30)


# ---------------------------------------------------------------------------- a Ray job


@contextmanager
def head_node(home: Path) -> Iterator[dict[str, str]]:
    """`ray start --head --block` with token authentication; what a shell needs to send
    jobs to it.
    """
    folder = Path(
        tempfile.mkdtemp(dir="/tmp")
    )  # short: the names of sockets in it are limited to 107 bytes
    port = free_port()
    shell = environment(home) | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64}
    arguments = [
        "--head", "--block", "--port=0", f"--dashboard-port={port}", "--node-ip-address=127.0.0.2",
        f"--temp-dir={folder}", f"--dashboard-agent-listen-port={free_port()}", "--num-cpus=3", "--disable-usage-stats",
        "--object-store-memory=200000000",
    ]  # fmt: skip
    log = home / "head.log"
    with log.open("w") as output:
        head = subprocess.Popen(
            [RAY, "start", *arguments],
            env=shell,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        started = wait_for(
            lambda: head.poll() is not None or "will now block" in log.read_text(), 300
        )
        assert started and head.poll() is None, log.read_text()
        yield shell | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}"}
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(100)
        finally:
            for process in marked(home):
                process.kill()
            shutil.rmtree(folder, ignore_errors=True)


def checkout(folder: Path) -> Path:
    """What a clone holds: the files that git tracks, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
def test_a_ray_job_that_is_stopped_leaves_no_worker(
    inputs: Inputs, tmp_path: Path
) -> None:
    clone, run_dir = checkout(tmp_path / "clone"), tmp_path / "run"
    settings = [*inputs.rl(run_dir), "run.total_steps=100000"]
    entry = ["python", "-m", "controllers", "train", "--config-name", "ppo", *settings]

    def workers() -> list[psutil.Process]:
        found = []
        for process in marked(tmp_path):
            with contextlib.suppress(psutil.NoSuchProcess):
                if (
                    process.name().startswith("ray::WorkerHost")
                    or "controllers" in process.cmdline()
                ):
                    found.append(process)
        return found

    with head_node(tmp_path) as shell:
        submit = [
            RAY,
            "job",
            "submit",
            "--no-wait",
            "--submission-id=stopped",
            "--working-dir=.",
            "--",
            *entry,
        ]
        said: list[str] = []

        def submitted() -> (
            bool
        ):  # a head that has just started may have no agent for jobs yet
            sent = subprocess.run(
                submit,
                cwd=clone,
                env=shell,
                capture_output=True,
                text=True,
                timeout=120,
            )
            said.append(sent.stdout + sent.stderr)
            return sent.returncode == 0

        assert wait_for(submitted, 60), said[-1]

        def job_log() -> str:
            return subprocess.run(
                [RAY, "job", "logs", "stopped"],
                env=shell,
                capture_output=True,
                text=True,
            ).stdout

        assert wait_for(lambda: steps_done(run_dir) >= 2, 200), job_log()
        assert len(workers()) >= 4
        stop = subprocess.run(
            [RAY, "job", "stop", "stopped"],
            env=shell,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert stop.returncode == 0, stop.stdout + stop.stderr
        assert wait_for(lambda: not workers(), 30), [
            process.cmdline() for process in workers()
        ]
        status = subprocess.run(
            [RAY, "job", "status", "stopped"],
            env=shell,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert "STOPPED" in (status.stdout + status.stderr).upper()
    assert not list(clone.glob("outputs*"))
