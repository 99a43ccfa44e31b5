"""Everything that must be there is found missing under its own key: inputs, folders,
graders.
"""

from __future__ import annotations

import importlib.metadata
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from controllers.command_line import main
from scripts.configuration import compose
from tests.preflight.configs import (
    BIG,
    NO_GAIN,
    ppo,
    problems_by_key,
    with_judge,
)
from verl_ray.config.load import with_changes
from verl_ray.config.schema import Config
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.findings import (
    INPUTS_COMPLETE,
    INPUTS_STARTED,
    Findings,
    preflight,
)
from verl_ray.preflight.resolve import resolve

PORT = "rollout.endpoint.port"


def test_nothing_to_complain_about(model: Path, data: Path) -> None:
    findings = preflight(ppo(model, data), BIG)
    assert (findings.problems, findings.warnings) == ([], [])


def test_what_auto_became_on_another_machine_is_named(model: Path, data: Path) -> None:
    def warnings(config: Config) -> list[str]:
        found = preflight(config, BIG).warnings
        return [text for text in found if text.startswith("auto became ")]

    typed = ppo(model, data)
    here = resolve(typed, facts_here(typed, BIG))
    assert warnings(typed) == warnings(here) == []

    small = replace(BIG, cores=4)
    there = resolve(typed, facts_here(typed, small))
    (warning,) = warnings(there)
    threads = there.run.threads_per_rank
    assert f"run.threads_per_rank={threads}" in warning.partition(";")[0]
    assert f"run.threads_per_rank={here.run.threads_per_rank}" in warning
    anew = with_changes(there, {"run.threads_per_rank": "auto"})
    assert "threads" not in "".join(warnings(anew))


def test_arguments_of_vllm_that_no_test_runs_are_named_once(
    model: Path, data: Path
) -> None:
    policy = (
        "rollout.vllm_args={block_size: 32, watermark: 0.1, kv_cache_dtype: fp8}",
    )
    # It receives no weights.
    judge = ("reward.engine.vllm_args={enable_eplb: true, cpu_offload_gb: 4}",)
    for settings, named in (
        (policy, "rollout.vllm_args: kv_cache_dtype, watermark"),
        (judge, "reward.engine.vllm_args: cpu_offload_gb, enable_eplb"),
        (
            (*policy, *judge),
            "rollout.vllm_args: kv_cache_dtype, watermark;"
            " reward.engine.vllm_args: cpu_offload_gb, enable_eplb",
        ),
        (("rollout.vllm_args={block_size: 32}",), None),
    ):
        found = preflight(with_judge(model, data, model, *settings), BIG).warnings
        told = [text.partition(": not proven here")[0] for text in found]
        assert told == [named] * (named is not None)

    # Proposals are checked with numbers that vLLM does not set on a CPU.
    speculates = with_judge(
        model,
        data,
        model,
        "reward.engine.vllm_args={spec_method: ngram, spec_tokens: 3}",
    )
    refused = problems_by_key(preflight(speculates, BIG))
    assert refused.keys() == {
        f"reward.engine.vllm_args.{name}" for name in ("spec_method", "spec_tokens")
    }
    on_gpus = replace(BIG, gpus=8, gpu_memory_bytes=80 << 30)
    assert preflight(speculates, on_gpus).problems == []


def test_a_torch_outside_the_table_is_named(
    monkeypatch: pytest.MonkeyPatch, model: Path, data: Path
) -> None:
    installed = {"torch": "2.12.0", "vllm": "0.32.0"}
    monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
    told = problems_by_key(preflight(ppo(model, data), BIG))
    assert "torch 2.12.0 is not supported" in told["the environment"] and set(told) == {
        "the environment"
    }


def test_what_the_run_makes_itself_is_not_missing(tmp_path: Path) -> None:
    assert (
        preflight(compose("quickstart", [f"run.dir={tmp_path}/run"]), BIG).problems
        == []
    )
    own = compose("quickstart", [f"run.dir={tmp_path}/run", "prepare=null"])
    assert set(problems_by_key(preflight(own, BIG))) == {
        "model.path",
        "data.train_path",
        "data.validation_path",
    }


def test_the_address_of_a_service_holds_no_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for url, rule in (
        ("foo", "does not begin with http://"),
        ("http://me:s3cret@h/s", "holds a user name or password"),
    ):
        assert main(["check", "reward=http", f"reward.url={url}", NO_GAIN]) == 2
        told = capsys.readouterr().err
        assert "reward.url" in told and rule in told and "s3cret" not in told


def test_a_reward_function_of_the_users_own_is_found_without_running_it(
    tmp_path: Path, model: Path, data: Path
) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text(
        "raise SystemExit\ndef grade(response, answer, **rest):\n    return 1.0\n"
    )
    assert (
        preflight(
            ppo(model, data, f"reward.functions.default={grader}:grade"), BIG
        ).problems
        == []
    )
    messages = problems_by_key(
        preflight(ppo(model, data, f"reward.functions.default={grader}:grad"), BIG)
    )
    assert "grade" in messages["reward.functions.default"]


def test_an_endpoint_that_cannot_be_opened_or_is_open_to_everybody(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endpoint(*changes: str) -> Findings:
        changed = [
            f"rollout.endpoint.{change}" for change in ("enabled=true", *changes)
        ]
        return preflight(ppo(model, data, *changed, "rollout.num_replicas=2"), BIG)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problems = problems_by_key(endpoint(f"port={port - 1}"))
        assert (
            f"nobody can listen on 127.0.0.1 port {port} here: Address already in use"
            in problems[PORT]
        )
        config = ppo(
            model,
            data,
            "rollout.endpoint.enabled=true",
            f"rollout.endpoint.port={port}",
        )
        assert (
            preflight(config, None).problems == []
        )  # a cluster's machines are not this one
    assert endpoint("port=0").problems == endpoint("port=0").warnings == []
    assert (
        "Cannot assign requested address"
        in problems_by_key(endpoint("port=0", "host=192.0.2.1"))[PORT]
    )
    (warning,) = endpoint("port=0", "host=0.0.0.0").warnings
    assert (
        "rollout.endpoint.host=0.0.0.0: everybody who can reach this address may use"
        in warning
    )
    monkeypatch.delenv("CLIENTS_TOKEN", raising=False)
    asking = ("port=0", "host=0.0.0.0", "token_env=CLIENTS_TOKEN")
    assert (
        "no such environment variable"
        in problems_by_key(endpoint(*asking))["rollout.endpoint.token_env"]
    )
    monkeypatch.setenv("CLIENTS_TOKEN", "s3cret")
    assert endpoint(*asking).problems == endpoint(*asking).warnings == []


def test_the_token_of_a_service_is_in_the_environment(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["reward=http", "reward.url=http://127.0.0.1:9", "reward.token_env=TOKEN"]
    config = ppo(model, data, *own)
    monkeypatch.delenv("TOKEN", raising=False)
    (problem,) = preflight(config, BIG).problems
    assert (problem.key, problem.value) == ("reward.token_env", "TOKEN")
    assert problem.rule == "there is no such environment variable, or it is empty"
    assert preflight(config, None).problems == []
    monkeypatch.setenv("TOKEN", "s3cret")
    assert preflight(config, BIG).problems == []


def test_a_run_dir_and_a_checkpoint_that_cannot_be(model: Path, data: Path) -> None:
    blocked = ppo(
        model, data, f"run.dir={data}/notes.txt/run", f"run.resume={data}/gone"
    )
    messages = problems_by_key(preflight(blocked, BIG))
    assert "cannot be written to" in messages["run.dir"]
    assert "no such checkpoint" in messages["run.resume"]


def test_a_run_dir_that_every_user_may_write_to_is_said(tmp_path: Path) -> None:
    config = compose("quickstart", [f"run.dir={tmp_path}"])
    before = preflight(config, BIG).warnings
    tmp_path.chmod(0o777)
    (warning,) = [
        text for text in preflight(config, BIG).warnings if text not in before
    ]
    assert warning.startswith(f"run.dir = {tmp_path} may be written to by every user")
    assert "(drwxrwxrwx)" in warning


def test_inputs_that_no_run_has_made_are_not_written_over(tmp_path: Path) -> None:
    config = compose("quickstart", [f"run.dir={tmp_path}"])
    (tmp_path / "inputs").mkdir()
    assert preflight(config, BIG).problems == []
    (tmp_path / "inputs" / "mine.txt").write_text("mine")
    assert "no run has made" in problems_by_key(preflight(config, BIG))["run.dir"]
    (tmp_path / "inputs" / INPUTS_STARTED).touch()
    assert preflight(config, BIG).problems == []


def test_a_model_that_training_makes_cannot_be_evaluated_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"run.dir={tmp_path}/run"
    assert main(["evaluate", "--config-name", "quickstart", run]) == 2
    err = capsys.readouterr().err
    assert (
        f"model.path = {tmp_path}/run/inputs/model\n    rule: training makes this model, and there is none yet"
        in err
    )
    assert "run.dir of a finished run; or prepare=null with model.path" in err
    (tmp_path / "run" / "inputs").mkdir(parents=True)
    (tmp_path / "run" / "inputs" / INPUTS_COMPLETE).touch()
    assert preflight(compose("quickstart", [run]), BIG, evaluates=True).problems == []
