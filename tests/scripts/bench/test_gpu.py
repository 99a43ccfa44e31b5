"""The suite for GPUs goes on after a failure, keeps its time, and leaves nothing out.

Its parts run here on the CPU at tiny sizes, as far as they need no GPU.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from scripts.bench import gpu
from scripts.bench.gpu import (
    Part,
    bytes_on_the_host,
    layers_on_the_host,
    parts_of,
    run_parts,
)
from scripts.bench.inputs import MODELS, make_model, tensors_of, with_layers
from verl_ray.models.tensor_sources import CheckpointReader

SLEEPS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, flush=True)
child.wait()
"""


SMALL = {"hidden_size": 32, "intermediate_size": 48}


def part(name: str, program: str, limit_s: float = 60, **needs: object) -> Part:
    return Part(name, "a test", ("-c", program), limit_s, **needs)  # type: ignore[arg-type]


@pytest.mark.processes
def test_a_part_that_raises_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    parts = [
        part("raises", "print('before'); raise SystemExit('it broke')"),
        part("hangs", SLEEPS, limit_s=2),
        part("says", "import json; print('noise'); print(json.dumps({'tokens': 7}))"),
        part("skips", "print('3 skipped in 0.1s')"),
        part("wants", "print(1)", gpus=2),
        part("lacks", "print(1)", packages=("no_such_package",)),
        part("large", "print(1)", host_gib=10**6),
    ]
    path = tmp_path / "new" / "gpu.json"
    outcomes = run_parts(parts, gpus=1, limit_s=300, path=path)
    raised, hung, said, skipped, *not_run = outcomes

    assert (raised.status, raised.reason) == ("failed", "exit code 1")
    assert raised.last_lines == ["before", "it broke"]
    assert (hung.status, hung.reason) == ("timed out", "not done after 2 s")
    (child,) = map(int, hung.last_lines)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)  # until somebody reaps it
        if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            break
    else:
        assert not psutil.pid_exists(child)
    assert (said.status, said.result) == ("passed", {"tokens": 7})
    assert (skipped.status, skipped.reason) == ("not run", "3 skipped in 0.1s")

    assert [outcome.status for outcome in not_run] == ["not run"] * 3
    wants, lacks, large = (outcome.reason for outcome in not_run)
    assert wants == "needs 2 GPUs, and 1 may be used"
    assert lacks == "needs no_such_package, not installed here"
    assert large.startswith("needs 1000000 GiB of host memory, ")
    written = json.loads(path.read_text())
    assert [one["name"] for one in written] == [one.name for one in parts]
    assert written[2]["result"] == {"tokens": 7}


@pytest.mark.processes
def test_the_time_of_all_parts_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "SHORTEST_S", 1.0)
    parts = [part("long", "import time; time.sleep(60)"), part("last", "print(1)")]
    long, last = run_parts(parts, gpus=0, limit_s=2, path=tmp_path / "gpu.json")
    assert long.reason == "not done after 2 s, shortened to 2 s"
    assert (last.status, last.seconds) == ("not run", 0)
    assert last.reason.endswith("of 2 s were left")


def test_all_parts_together_end_within_ten_minutes() -> None:
    # The last part is stopped at the limit, and has some seconds to end.
    assert gpu.LIMIT_S + gpu._GRACE_S < 600


@pytest.mark.parametrize(
    ("gib", "layers"), [(10, 8), (57, 8), (96, 18), (128, 27), (158, 35), (160, 36)]
)
def test_the_largest_model_has_as_many_layers_as_the_host_holds(
    gib: int, layers: int
) -> None:
    # Of a layer 64 + 16 + 16 + 64 + 3 x 192 MiB are weights. Locked, 192 become 256:
    # 2 x 928 MiB with gradients, and 1472 MiB of moments. The two embeddings take 2.32
    # GiB each, locked 4: with gradients and moments 25.27 GiB.
    own_gib = 25.27 + layers * (2 * 928 + 1472) / 1024
    held = bytes_on_the_host(with_layers(MODELS["8b"], layers)) / 2**30
    assert held == pytest.approx(own_gib, abs=0.01)
    assert layers_on_the_host(gib * 2**30) == layers
    # One more would take more than nine tenths of the host.
    assert own_gib <= 0.9 * gib or layers == 8
    assert own_gib + 3.25 > 0.9 * gib or layers == 36

    *_, part = parts_of("cuda", "folder", gib * 2**30)
    assert part.arguments[part.arguments.index("--layers") + 1] == str(layers)
    assert f" {layers} of 36 layers on the host" in part.about
    assert part.host_gib == math.ceil(own_gib) + 4


def test_a_model_that_is_made_has_the_parameters_that_were_counted(
    tmp_path: Path,
) -> None:
    for name in ("1m", "8b"):
        size = MODELS[name]
        tiny = replace(
            with_layers(size, 2),
            vocab_size=64,
            layers=with_layers(size, 2).layers.model_copy(update=SMALL),
        )
        path = make_model(tiny, str(tmp_path / name))
        header = CheckpointReader(path).header
        counts = [math.prod(shape) for shape, _ in header.values()]
        assert sorted(counts) == sorted(tensors_of(tiny))
        config = json.loads((Path(path) / "config.json").read_text())
        assert config["num_hidden_layers"] == 2
    # The sizes that are published of Qwen3-8B.
    assert sum(tensors_of(MODELS["8b"])) == 8_190_735_360


def test_every_part_has_a_name_and_needs_a_gpu_unless_it_runs_here() -> None:
    parts = parts_of("cuda", "folder")
    names = [one.name for one in parts]
    assert len(set(names)) == len(names) == 19
    assert [one.name for one in parts if not one.gpus] == ["devices"]
    assert [one.name for one in parts_of("cpu", "folder")] == names
    here = {one.name for one in parts_of("cpu", "folder") if not one.gpus}
    assert here >= {
        "contract_fsdp",
        "rollout_float32",
        "uneven_fsdp",
        "grpo",
        "mfu_500m",
    }


def test_the_help_lists_the_parts_and_which_need_a_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--help"])
    text = capsys.readouterr().out
    for one in parts_of("cpu", "folder"):
        mark = r"\*" if one.gpus else " "
        assert re.search(rf"\n{mark} {one.name} +{one.about[:20]}", text), one.name


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names",
    [
        ["attention"],
        pytest.param(["attention", "contract_fsdp"], marks=pytest.mark.slow),
    ],
)
def test_the_contract_of_an_engine_runs_on_this_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str]
) -> None:
    path = tmp_path / "gpu.json"
    flags = ["--device", "cpu", "--only", *names, "--out", str(path)]
    assert gpu.main(flags) == 0
    attention, *others = json.loads(capsys.readouterr().out)
    assert attention["reason"] == "needs 1 GPU, and 0 may be used"
    for contract in others:
        assert contract["status"] == "passed", contract
        assert contract["result"]["float32"]["log_probs"] < 1e-5
        assert 1e-4 < contract["result"]["bfloat16"]["log_probs"] < 0.1
    assert json.loads(path.read_text()) == [attention, *others]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.cluster
@pytest.mark.parametrize("name", ["devices", "uneven_fsdp", "grpo"])
def test_the_other_parts_run_here_too(name: str, tmp_path: Path) -> None:
    (part,) = (each for each in parts_of("cpu", str(tmp_path)) if each.name == name)
    # A machine that is busy with other tests is no failure.
    chosen = replace(part, limit_s=560.0)
    (outcome,) = run_parts([chosen], gpus=0, limit_s=580, path=tmp_path / "gpu.json")
    assert outcome.status == "passed", outcome
    assert outcome.result
