"""`verl-ray check`: fast, without frameworks, every problem of configuration and machine at once."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from controllers.command_line import main
from controllers.composition import compose
from controllers.preflight import (
    GIB,
    INPUTS_COMPLETE,
    INPUTS_STARTED,
    Findings,
    Machine,
    parameter_count,
    preflight,
    tiny_parameter_count,
)
from verl_ray.config.schema import Config, TinyModelConfig

NO_GAIN = "prepare.min_gain=0"  # of an accuracy that these rewards do not measure
BIG = Machine(cores=64, gpus=0, memory_bytes=512 * GIB, shm_free_bytes=64 * GIB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What preflight reads of a model directory; 120 parameters in two files."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    settings = {"num_attention_heads": 4, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((10, 10), np.float32)}, directory / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": np.zeros(20, np.float16)}, directory / "model-2.safetensors")
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    for name in ("train.jsonl", "test.jsonl", "notes.txt"):
        (directory / name).write_text("")
    return directory


def ppo(model: Path, data: Path, *overrides: str) -> Config:
    inputs = [f"model.path={model}", f"data.train_path={data}/train.jsonl", f"data.validation_path={data}/test.jsonl"]
    return compose("ppo", [*inputs, *overrides])


def found(findings: Findings) -> dict[str, str]:
    return {problem.key: f"{problem.rule} | {problem.fix}" for problem in findings.problems}


# ------------------------------------------------------------------------------------------------ the command


def test_it_is_fast_and_imports_no_framework() -> None:
    code = (
        "import sys; from controllers.command_line import main; code = main(['check'])\n"
        "print(code, [name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert output.splitlines()[-1] == "0 []"
    # Time on a processor, which other work on the machine does not lengthen as it does the time on the clock.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_it_prints_the_algebra_the_roles_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.name=mine", "backend@critic.backend=fsdp"]) == 0
    out = capsys.readouterr().out
    assert "32 prompts x 8 = 256 rows, each of up to 24 tokens" in out
    assert [cell.strip() for cell in _row(out, "actor", 7)] == ["actor", "1", "256", "256", "256", "1", "<= 8192"]
    assert [cell.strip() for cell in _row(out, "critic", 6)][:3] == ["critic", "fsdp", "float32"]
    assert "this machine:" in out and "cores" in out
    assert f"mine can run; it writes to {Path.cwd()}/outputs/mine" in out


def test_the_role_table_says_who_scores(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(role: str, *overrides: str) -> list[str]:
        assert main(["check", *overrides]) == 0
        return [cell.strip() for cell in _row(capsys.readouterr().out, role, 6)]

    judge = ["reward=judge", f"reward.model.path={model}", "reward.max_prompt_tokens=512", NO_GAIN]
    *cells, path = row("reward", *judge, "reward.engine.num_replicas=2", "reward.engine.dtype=bfloat16")
    assert cells == ["reward", "vllm", "bfloat16", "2 x 1", "separate"] and str(model).startswith(path)
    service = row("reward", "reward=http", "reward.url=http://h:80/s", "reward.num_ranks=2", NO_GAIN)
    assert service == ["reward", "http", "-", "2", "CPU only", "http://h:80/s"]


def test_the_role_table_names_the_components_of_a_mixture(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    components = "function@components.function, http@components.service, judge@components.judge"
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text(
        f"defaults: [{components}, _self_]\nkind: mixed\nweights: {{function: 1.0, service: 1.0, judge: 1.0}}\n"
    )
    section = "reward.components.judge"
    mine = ["--config-dir", str(tmp_path), "reward=mine", "reward.components.service.url=http://h/s", NO_GAIN]
    assert main(["check", *mine, f"{section}.model.path={model}", f"{section}.max_prompt_tokens=512"]) == 0
    out = capsys.readouterr().out
    kinds = {name: _row(out, f"reward.components.{name}", 6)[1].strip() for name in ("function", "service", "judge")}
    assert kinds == {"function": "function", "service": "http", "judge": "vllm"}
    assert main(["check", *mine, f"{section}.model.path={model}s"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"1 problem in the configuration:\n\n  {section}.model.path = {model}s\n")
    assert f"Did you mean {model}?" in err


def _row(table: str, role: str, columns: int) -> list[str]:
    rows = (line.strip("│ ").split("│") for line in table.splitlines() if line.startswith(f"│ {role} "))
    return next(row for row in rows if len(row) == columns)


def test_problems_of_configuration_and_machine_come_together(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    arguments = [
        *("--config-name", "ppo", "rollout.group_size=0", "rolout.top_p=1", "actor.mini_batch_size=100"),
        *(
            f"model.path={data}/nowhere",
            f"data.train_path={data}/trian.jsonl",
            f"data.validation_path={data}/notes.txt",
        ),
        "reward.functions.default=exact_mach",
    ]
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("7 problems in the configuration:")
    for text in (
        "rolout.top_p = 1\n    rule: no such key\n    fix:  Did you mean rollout.top_p",
        "rollout.group_size = 0\n    rule: this number is out of range\n    fix:  Use a number above 0; the nearest is",
        "actor.mini_batch_size = 100\n    rule: it must divide the 256 rows",
        f"model.path = {data}/nowhere\n    rule: there is no such directory (nothing is looked up on a hub)",
        f"Did you mean {data}/train.jsonl",
        f"data.validation_path = {data}/notes.txt\n    rule: a file of this kind (.txt) cannot be read",
        "reward.functions.default = exact_mach",
    ):
        assert text in captured.err


# -------------------------------------------------------------------------------------------------- preflight


def test_nothing_to_complain_about(model: Path, data: Path) -> None:
    findings = preflight(ppo(model, data), BIG)
    assert (findings.problems, findings.warnings) == ([], [])


def test_what_the_run_makes_itself_is_not_missing(tmp_path: Path) -> None:
    assert preflight(compose("quickstart", [f"run.dir={tmp_path}/run"]), BIG).problems == []
    own = compose("quickstart", [f"run.dir={tmp_path}/run", "prepare=null"])
    assert set(found(preflight(own, BIG))) == {"model.path", "data.train_path", "data.validation_path"}


def test_parameters_are_counted_from_the_headers(model: Path) -> None:
    assert parameter_count(str(model)) == 120


def test_an_incomplete_model_directory_says_what_it_lacks(tmp_path: Path, data: Path) -> None:
    assert "no readable config.json" in found(preflight(ppo(tmp_path, data), BIG))["model.path"]
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1000}')
    messages = [problem.rule for problem in preflight(ppo(tmp_path, data), BIG).problems]
    assert messages == [
        "this directory has no *.safetensors",
        "this directory has no tokenizer",
        "the model has 1000 positions, and a row may have 1536 tokens",
    ]


def test_a_role_with_a_model_of_its_own_is_checked_under_its_key(model: Path, data: Path) -> None:
    messages = found(preflight(ppo(model, data, f"critic.model.path={model}s"), BIG))
    assert list(messages) == ["critic.model.path"]
    assert f"Did you mean {model}?" in messages["critic.model.path"]


def test_a_reward_model_gives_one_number_per_text(tmp_path: Path, model: Path, data: Path) -> None:
    def classifier(labels: int) -> Path:
        directory = tmp_path / f"{labels} labels"
        directory.mkdir()
        for name in ("config.json", "tokenizer.json", "model-1.safetensors"):
            (directory / name).write_bytes((model / name).read_bytes())
        save_file({"score.weight": np.zeros((labels, 8), np.float32)}, directory / "model-2.safetensors")
        return directory

    one, two = classifier(1), classifier(2)
    graded = ("reward=model", f"reward.model.path={one}")
    for roles in (graded, (f"critic.model.path={one}",), (*graded, f"critic.model.path={one}")):
        assert preflight(ppo(model, data, *roles), BIG).problems == []
    for key, path, rule in (
        ("reward.model.path", model, "this model has no score.weight: it is no reward model"),
        ("reward.model.path", two, "this model gives 2 numbers per text (labels), and a score is one"),
        ("critic.model.path", two, "this model gives 2 numbers per text (labels), and a score is one"),
    ):
        (problem,) = preflight(ppo(model, data, *graded, f"{key}={path}"), BIG).problems
        assert (problem.key, problem.value, problem.rule) == (key, str(path), rule)
        assert "one label; `train --config-name reward_model` makes one" in problem.fix
    mixed = ppo(model, data, "reward=mixed", f"reward.components.model.model.path={model}")
    assert list(found(preflight(mixed, BIG))) == ["reward.components.model.model.path"]


def test_the_model_that_a_run_makes_is_no_reward_model(tmp_path: Path) -> None:
    own = compose("quickstart", [f"run.dir={tmp_path}/run", "reward=model", "reward.model.path=${model.path}", NO_GAIN])
    assert "it is no reward model" in found(preflight(own, BIG))["reward.model.path"]


def test_a_reward_model_starts_from_a_language_model(model: Path, data: Path) -> None:
    inputs = [f"model.path={model}", f"data.train_path={data}/train.jsonl", f"data.validation_path={data}/test.jsonl"]
    assert preflight(compose("reward_model", inputs), BIG).problems == []


def test_a_step_of_preferences_is_counted_in_pairs(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [f"model.path={model}", f"data.train_path={data}/train.jsonl", f"data.validation_path={data}/test.jsonl"]
    assert main(["check", "--config-name", "reward_model", *inputs, "preference.max_tokens=64"]) == 0
    assert "one step: 32 pairs = 64 rows, each of up to 64 tokens" in capsys.readouterr().out


def test_the_address_of_a_service_holds_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    for url, rule in (
        ("foo", "does not begin with http://"),
        ("http://me:s3cret@h/s", "holds a user name or password"),
    ):
        assert main(["check", "reward=http", f"reward.url={url}", NO_GAIN]) == 2
        told = capsys.readouterr().err
        assert "reward.url" in told and rule in told and "s3cret" not in told


def test_a_critic_reads_the_actors_tokens(tmp_path: Path, model: Path, data: Path) -> None:
    """A reward model has tokens of its own; a critic that starts from it reads rollouts as they are."""

    def numbering(name: str, vocabulary: object, *added: str) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        for file in ("config.json", "model-1.safetensors"):
            (directory / file).write_bytes((model / file).read_bytes())
        extra = [{"content": content, "id": number} for number, content in enumerate(added, start=2)]
        tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": extra}
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        return directory

    actor, wider = numbering("actor", {"a": 0, "b": 1}), numbering("wider", {"a": 0, "b": 1}, "<pad>")
    pieces, other = numbering("pieces", [["a", -1.0], ["b", -2.0]]), numbering("other", {"b": 0, "a": 1})
    for path in (wider, pieces):
        assert preflight(ppo(actor, data, f"critic.model.path={path}"), BIG).problems == []
    for key in ("critic.model.path", "reference.model.path"):
        messages = found(preflight(ppo(actor, data, f"{key}={other}"), BIG))
        assert list(messages) == [key] and "its tokenizer numbers them otherwise" in messages[key]
    assert list(found(preflight(ppo(wider, data, f"critic.model.path={actor}"), BIG))) == ["critic.model.path"]


def judged(model: Path, data: Path, judge: Path, *overrides: str) -> Config:
    sizes = ["reward.max_prompt_tokens=1024", "reward.max_response_tokens=512"]
    return ppo(model, data, "reward=judge", f"reward.model.path={judge}", *sizes, *overrides)


def test_a_judge_is_checked_under_its_own_keys(model: Path, data: Path, tmp_path: Path) -> None:
    assert preflight(judged(model, data, model), BIG).problems == []
    assert list(found(preflight(judged(model, data, model.with_name("gone")), BIG))) == ["reward.model.path"]
    messages = found(preflight(judged(model, data, model, "reward.engine.tensor_parallel=3"), BIG))
    assert "4 attention heads" in messages["reward.engine.tensor_parallel"] and len(messages) == 1
    messages = found(preflight(judged(model, data, model, "reward.max_prompt_tokens=1537"), BIG))
    assert messages["reward.max_prompt_tokens"].startswith(
        "the judge has 2048 positions, and question and answer may have 2049 tokens | Lower it or "
        "reward.max_response_tokens by 1 in all"
    )
    messages = found(preflight(judged(model, data, model, "reward.engine.vllm_args.enforce_eager=false"), BIG))
    assert "may not change on a CPU" in messages["reward.engine.vllm_args.enforce_eager"]
    for name in ("tokenizer.json", "model-1.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    settings = {"num_attention_heads": 8, "hidden_size": 128, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert "head size is 16" in found(preflight(judged(model, data, tmp_path), BIG))["reward.model.path"]


def test_the_model_that_a_run_makes_may_judge(tmp_path: Path) -> None:
    own = ["reward=judge", "reward.model.path=${model.path}", f"run.dir={tmp_path}/run", NO_GAIN]
    assert preflight(compose("quickstart", own), BIG).problems == []


def test_a_judge_needs_room_of_its_own(model: Path, data: Path) -> None:
    three = Machine(cores=8, gpus=3, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    message = found(preflight(judged(model, data, model, "reward.engine.num_replicas=3"), three))
    assert "needs 4 GPUs (actor 1 + reward 3), and this machine has 3" in message["reward.engine.num_replicas"]
    assert preflight(judged(model, data, model, "reward.engine.num_replicas=2"), three).problems == []

    # Caches of 1 GiB for the rollout engine and 5 for the judge, and 1.2 GiB of processes: trainer, rollout, judge.
    caches = ("rollout.kv_cache_gib=1.0", "reward.engine.kv_cache_gib=5.0")
    for memory, problems in ((7 * GIB, ["model.path"]), (8 * GIB, [])):
        small = Machine(cores=8, gpus=0, memory_bytes=memory, shm_free_bytes=8 * GIB)
        assert list(found(preflight(judged(model, data, model, *caches), small))) == problems
    small = Machine(cores=64, gpus=0, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    replicas = ["reward=judge", "reward.model.path=${model.path}", "reward.engine.num_replicas=64"]
    many = compose("quickstart", [*replicas, NO_GAIN])
    message = found(preflight(many, small))["reward.engine.num_replicas"]
    assert "66 processes (trainer 1 + rollout 1 + judge 64)" in message


def test_a_model_that_is_not_the_policys_takes_no_room_in_its_engine(tmp_path: Path, model: Path, data: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (large / name).write_bytes((model / name).read_bytes())
    save_file({"a": np.zeros(10**7, np.uint8)}, large / "model.safetensors")  # 0.037 GiB as float32
    caches = "rollout.kv_cache_gib=0.0625"
    # Processes 1 GiB, cache 0.0625, reference 0.037; the rollout engine holds the policy, which is small.
    small = Machine(cores=8, gpus=0, memory_bytes=int(1.12 * GIB), shm_free_bytes=8 * GIB)
    assert preflight(ppo(model, data, f"reference.model.path={large}", caches), small).problems == []
    assert preflight(ppo(large, data, caches), small).problems != []


def test_the_rollout_engine_fits_the_model(tmp_path: Path, model: Path, data: Path) -> None:
    messages = found(preflight(ppo(model, data, "rollout.tensor_parallel=3"), BIG))
    assert (
        "4 attention heads" in messages["rollout.tensor_parallel"] and "2 or 4" in messages["rollout.tensor_parallel"]
    )
    for name in ("tokenizer.json", "model-1.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    settings = {"num_attention_heads": 8, "hidden_size": 128, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert "head size is 16" in found(preflight(ppo(tmp_path, data), BIG))["model.path"]
    on_gpu = Machine(cores=8, gpus=8, memory_bytes=GIB, shm_free_bytes=GIB)
    assert preflight(ppo(tmp_path, data), on_gpu).problems == []


def test_a_reward_function_of_the_users_own_is_found_without_running_it(
    tmp_path: Path, model: Path, data: Path
) -> None:
    grader = tmp_path / "grader.py"
    grader.write_text("raise SystemExit\ndef grade(response, answer, **rest):\n    return 1.0\n")
    assert preflight(ppo(model, data, f"reward.functions.default={grader}:grade"), BIG).problems == []
    messages = found(preflight(ppo(model, data, f"reward.functions.default={grader}:grad"), BIG))
    assert "grade" in messages["reward.functions.default"]


def test_more_threads_than_cores_is_a_warning_on_a_cpu(model: Path, data: Path) -> None:
    two = Machine(cores=2, gpus=0, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    assert preflight(ppo(model, data, "actor.num_ranks=2"), two).warnings == []
    (warning,) = preflight(ppo(model, data, "placement=separate"), two).warnings
    assert "4 threads compute at once (actor 1 + critic 1 + reference 1 + rollout 1" in warning


def test_ranks_without_rows_are_a_warning(model: Path, data: Path) -> None:
    overrides = ["actor.num_ranks=4", "actor.mini_batch_size=2"]
    warnings = preflight(ppo(model, data, *overrides), BIG).warnings
    assert warnings[0].startswith("actor.num_ranks=4 share mini-batches of 2 rows: 2 ranks have nothing to do")


def test_more_gpus_than_there_are_is_a_problem(model: Path, data: Path) -> None:
    four = Machine(cores=8, gpus=4, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    assert preflight(ppo(model, data, "actor.num_ranks=4"), four).problems == []
    config = ppo(model, data, "placement=separate", "rollout.num_replicas=2", "rollout.tensor_parallel=2")
    message = found(preflight(config, four))["rollout.num_replicas"]
    assert "needs 7 GPUs (actor 1 + critic 1 + reference 1 + rollout 4), and this machine has 4" in message
    assert "Lower it by 3" in message


def test_tensor_parallel_engines_do_not_share_a_gpu(model: Path, data: Path) -> None:
    eight = Machine(cores=8, gpus=8, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    message = found(preflight(ppo(model, data, "rollout.tensor_parallel=2"), eight))["rollout.tensor_parallel"]
    assert "shares exactly one GPU" in message and "placement=separate" in message
    assert preflight(ppo(model, data, "rollout.tensor_parallel=2", "placement=separate"), eight).problems == []
    assert preflight(ppo(model, data, "rollout.tensor_parallel=2"), BIG).problems == []


def test_ranks_that_share_out_heads_must_be_able_to(model: Path, data: Path) -> None:
    changes = ["backend=fsdp", "actor.num_ranks=6", "backend.sequence_parallel=3"]
    told = found(preflight(ppo(model, data, *changes), BIG))
    assert told["actor.backend.sequence_parallel"] == (
        "these ranks share out the model's 4 attention heads and 4 key-value heads | Use 1 or 2."
    )
    assert not preflight(ppo(model, data, *changes[:2], "backend.sequence_parallel=2"), BIG).problems


def test_an_engine_argument_that_is_fixed_on_a_cpu(model: Path, data: Path) -> None:
    config = ppo(model, data, "rollout.vllm_args.enforce_eager=false")
    assert "may not change on a CPU" in found(preflight(config, BIG))["rollout.vllm_args.enforce_eager"]
    on_gpu = Machine(cores=8, gpus=8, memory_bytes=GIB, shm_free_bytes=GIB)
    assert preflight(config, on_gpu).problems == []


@pytest.mark.parametrize(
    ("override", "key", "processes"),
    [
        ("actor.num_ranks=64", "actor.num_ranks", "66 processes (trainer 64 + rollout 1 + reward 1)"),
        ("reward.num_ranks=64", "reward.num_ranks", "66 processes (trainer 1 + rollout 1 + reward 64)"),
        ("rollout.num_replicas=64", "rollout.num_replicas", "66 processes (trainer 1 + rollout 64 + reward 1)"),
    ],
)
def test_processes_take_memory_of_their_own(override: str, key: str, processes: str) -> None:
    small = Machine(cores=64, gpus=0, memory_bytes=8 * GIB, shm_free_bytes=8 * GIB)
    message = found(preflight(compose("quickstart", [override]), small))[key]
    assert processes in message and "This machine has 8.0 GiB: use fewer" in message
    assert preflight(compose("quickstart"), small).problems == []


def test_the_model_that_a_run_will_make_is_counted(tmp_path: Path) -> None:
    small = Machine(cores=8, gpus=0, memory_bytes=8 * GIB, shm_free_bytes=64 * GIB)
    wide = [f"run.dir={tmp_path}/run", "prepare.model.hidden_size=4096", "prepare.model.intermediate_size=16384"]
    assert "at least" in found(preflight(compose("quickstart", wide), small))["model.path"]


@pytest.mark.parametrize("tie", [True, False])
def test_the_count_of_a_made_model_is_right(tmp_path: Path, tie: bool) -> None:
    from verl_ray.data.arithmetic import ALPHABET
    from verl_ray.data.tokenizers import character_tokenizer
    from verl_ray.models.tiny import make_tiny_qwen3

    shape = TinyModelConfig(
        hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=80,
        tie_embeddings=tie,
    )  # fmt: skip
    character_tokenizer(tmp_path / "tokenizer", ALPHABET)
    made = make_tiny_qwen3(tmp_path / "model", tmp_path / "tokenizer", shape, seed=0)
    assert tiny_parameter_count(shape) == parameter_count(str(made))


def test_memory_that_cannot_be_enough_is_a_problem(model: Path, data: Path) -> None:
    small = Machine(cores=8, gpus=0, memory_bytes=GIB, shm_free_bytes=32 * 2**20)
    messages = found(preflight(ppo(model, data), small))
    # 256 rows x 1536 tokens x 32 bytes are 12 MiB: Ray's floor of 128 MiB is what counts.
    assert "about 128 MiB" in messages["/dev/shm"] and "--shm-size" in messages["/dev/shm"]
    assert "at least 3.0 GiB" in messages["model.path"]  # the key-value cache, and 1 GiB of three processes
    # A cluster is asked for its own.
    assert preflight(ppo(model, data), None).problems == []


def test_a_run_dir_and_a_checkpoint_that_cannot_be(model: Path, data: Path) -> None:
    blocked = ppo(model, data, f"run.dir={data}/notes.txt/run", f"run.resume={data}/gone")
    messages = found(preflight(blocked, BIG))
    assert "cannot be written to" in messages["run.dir"]
    assert "no such checkpoint" in messages["run.resume"]


def test_inputs_that_no_run_has_made_are_not_written_over(tmp_path: Path) -> None:
    config = compose("quickstart", [f"run.dir={tmp_path}"])
    (tmp_path / "inputs").mkdir()
    assert preflight(config, BIG).problems == []
    (tmp_path / "inputs" / "mine.txt").write_text("mine")
    assert "no run has made" in found(preflight(config, BIG))["run.dir"]
    (tmp_path / "inputs" / INPUTS_STARTED).touch()
    assert preflight(config, BIG).problems == []


# ------------------------------------------------------------------------------------------------- evaluation


def test_a_supervised_run_has_no_evaluation_of_its_own(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = [f"model.path={model}", f"data.train_path={data}/train.jsonl", f"data.validation_path={data}/test.jsonl"]
    assert main(["evaluate", "--config-name", "sft", *inputs]) == 2
    err = capsys.readouterr().err
    assert err.startswith("1 problem in the configuration:\n\n  --config-name = sft")
    assert "Use --config-name ppo or grpo" in err


def test_a_model_that_training_makes_cannot_be_evaluated_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"run.dir={tmp_path}/run"
    assert main(["evaluate", run]) == 2
    err = capsys.readouterr().err
    assert (
        f"model.path = {tmp_path}/run/inputs/model\n    rule: training makes this model, and there is none yet" in err
    )
    assert "run.dir of a finished run; or prepare=null with model.path" in err
    (tmp_path / "run" / "inputs").mkdir(parents=True)
    (tmp_path / "run" / "inputs" / INPUTS_COMPLETE).touch()
    assert preflight(compose("quickstart", [run]), BIG, evaluates=True).problems == []


def test_with_an_address_the_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from controllers.preflight import machine_of

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert machine_of(compose("quickstart")) is not None
    assert machine_of(compose("quickstart", ["ray.address=10.0.0.1:6379"])) is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert machine_of(compose("quickstart")) is None
