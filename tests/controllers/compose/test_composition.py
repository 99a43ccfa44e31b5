"""Choices and overrides, as a user types them, and the configuration they make."""

from __future__ import annotations

import itertools
import shlex
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import yaml

from controllers.compose.composition import examine
from controllers.compose.grammar import parsed_override
from scripts.configuration import compose
from verl_ray.backends import BACKENDS
from verl_ray.config.load import to_tree, with_changes
from verl_ray.config.renamed import ADDED, RENAMED
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.config.tasks.sft import SFTConfig
from verl_ray.errors import ConfigError, Problem
from verl_ray.preflight.findings import preflight
from verl_ray.shell import override_of

INPUTS = ["model.path=/m", "data.train_path=t.jsonl", "data.validation_path=v.jsonl"]


def quickstart(*overrides: str) -> RLConfig:
    config = compose("quickstart", overrides)
    assert isinstance(config, RLConfig)
    return config


def problems(
    root: str, *overrides: str, config_dir: str | None = None
) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        compose(root, overrides, config_dir)
    return {problem.key: problem for problem in caught.value.problems}


# ----------------------------------------------------------------------------- backends


def kinds(config: RLConfig) -> tuple[str, str, str]:
    return (
        config.actor.backend.kind,
        config.critic.backend.kind,
        config.reference.backend.kind,
    )


def test_backend_switches_all_roles() -> None:
    assert kinds(quickstart()) == ("engine", "engine", "engine")
    assert kinds(quickstart("backend=fsdp")) == ("fsdp", "fsdp", "fsdp")
    assert kinds(quickstart("backend=megatron")) == ("megatron", "megatron", "megatron")
    assert kinds(quickstart("backend=megatron", "backend@critic.backend=fsdp")) == (
        "megatron",
        "fsdp",
        "megatron",
    )


@pytest.mark.parametrize("order", [1, -1])
def test_one_role_keeps_its_own_backend_in_either_order(order: int) -> None:
    overrides = ["backend=fsdp", "backend@critic.backend=engine"][::order]
    assert kinds(quickstart(*overrides)) == ("fsdp", "engine", "fsdp")


@pytest.mark.parametrize("order", [1, -1])
def test_a_backend_setting_reaches_all_roles_and_a_roles_own_wins(order: int) -> None:
    config = quickstart(
        *["backend.dtype=bfloat16", "critic.backend.dtype=float32"][::order]
    )
    assert config.actor.backend.dtype == config.reference.backend.dtype == "bfloat16"
    assert config.critic.backend.dtype == "float32"


def test_a_setting_of_one_backend_reaches_the_roles_that_have_it() -> None:
    config = quickstart(
        "backend=fsdp", "backend@critic.backend=engine", "backend.sharding=grad_op"
    )
    assert (
        config.actor.backend.kind == "fsdp"
        and config.actor.backend.sharding == "grad_op"
    )
    assert config.critic.backend.kind == "engine"


def test_backend_mistakes() -> None:
    key = "backend@critic.backend"
    problem = problems("quickstart", f"{key}=megatorn")[key]
    assert problem.rule == "there is no such choice"
    assert (
        problem.fix
        == f"Did you mean megatron or megatron_fsdp? There is {', '.join(sorted(BACKENDS))}."
    )
    problem = problems("quickstart", "backend.sharding=full")["backend.sharding"]
    assert problem.fix == "It belongs to backend=fsdp or backend=megatron_fsdp."
    problem = problems("quickstart", "actor.backend.sharding=full")[
        "actor.backend.sharding"
    ]
    assert (
        problem.fix
        == "It belongs to backend@actor.backend=fsdp or backend@actor.backend=megatron_fsdp."
    )
    problem = problems("quickstart", "backend.pipeline_parallel=2")[
        "backend.pipeline_parallel"
    ]
    assert problem.fix == "It belongs to backend=megatron."
    problem = problems("quickstart", "critic.backend.sequence_parallel=2")[
        "critic.backend.sequence_parallel"
    ]
    assert (
        problem.fix
        == "It belongs to backend@critic.backend=fsdp or backend@critic.backend=megatron."
    )
    problem = problems(
        "quickstart", "backend=megatron", "backend.activation_offload=true"
    )["backend.activation_offload"]
    assert problem.fix == "It belongs to backend=fsdp."
    assert (
        "backend.tensor_parallel"
        in problems("quickstart", "backend.tensor_paralel=2")[
            "backend.tensor_paralel"
        ].fix
    )
    problem = problems("quickstart", "actor.backend.kind=fsdp")["actor.backend.kind"]
    assert problem.fix.startswith("Choose it with backend@actor.backend=fsdp; there is")
    problem = problems(
        "quickstart", "optimizer@actor.optimizer=sgd", "actor.optimizer.eps=1e-8"
    )["actor.optimizer.eps"]
    assert (
        problem.fix
        == "It belongs to optimizer@actor.optimizer=adamw or optimizer@actor.optimizer=muon."
    )
    assert (
        "backend.dtype"
        in problems("quickstart", "backend.dtyp=float32")["backend.dtyp"].fix
    )
    assert problems("quickstart", "backend@critc.backend=fsdp")[
        "backend@critc.backend"
    ].fix.startswith("Did you mean backend@critic.backend")


# ---------------------------------------------------------------------------- overrides


def test_a_table_that_is_replaced_may_lose_a_key_twice() -> None:
    table = (
        "agent.environments={sums: calculator.py:Game}",
        "~agent.environments.default",
    )
    config = compose("agent_quickstart", table)
    assert isinstance(config, RLConfig)
    assert list(config.agent.environments) == ["sums"]


def test_all_bad_overrides_are_reported_at_once() -> None:
    refused = problems(
        "quickstart",
        "rolout.group_size=3",
        "algoritm=grpo",
        "algorithm=gpro",
        "a=[1",
        "run.total_steps=1,2",
        "actor.num_ranks=two",
        "run.seed=-1",
        "~critic",
        "+foo=1",
        "reference.model.path=${nowhere}",
        "task=sft",
        "rollout.top_k=3",
    )
    assert refused["rolout.group_size"].fix.startswith(
        "Did you mean rollout.group_size"
    )
    assert refused["algoritm"].fix.startswith("Did you mean algorithm")
    assert refused["algorithm"].fix.startswith("Did you mean gdpo, gmpo or grpo")
    assert refused["a"].rule == "this value cannot be read"
    assert "'run.total_steps=[...]'" in refused["run.total_steps"].fix
    assert refused["actor.num_ranks"].fix == "Use a whole number."
    assert refused["run.seed"].fix == "Use a number of at least 0."
    assert "cannot be left out" in refused["~critic"].rule
    assert refused["foo"].fix.startswith(
        "Every key begins with one of actor, agent, algorithm"
    )
    assert "nowhere" in refused["reference.model.path"].rule
    assert "--config-name" in refused["task"].fix
    assert "rollout.top_k" in refused  # a rule over several fields ran, too
    assert (
        "critic.num_ranks" not in refused
    )  # it copies actor.num_ranks, which is reported


def test_advice_on_what_cannot_be_read_keeps_the_value() -> None:
    refused = problems("grpo", "tracking.wandb.tags=['/a, b', größe]")
    typed = shlex.split(refused["tracking.wandb.tags"].fix.rpartition("the shell: ")[2])
    assert typed == ["tracking.wandb.tags=['/a, b', 'größe']."]
    for override, says in (
        ("reward.functions.größe/x=math", "Write reward.functions in a YAML file"),
        ("reward.größe=1", "Keys have ASCII letters"),
    ):
        problem = problems("grpo", override)[override.partition("=")[0]]
        assert problem.rule == "this key cannot be read"
        assert problem.fix.startswith(says)


@pytest.mark.parametrize(
    "override", ["reward.functions.default=gsm8k", "reward={deadline_s: 3}"]
)
def test_a_section_of_another_task(override: str) -> None:
    found = problems("sft", *INPUTS, override)[override.partition("=")[0]]
    assert found.rule == "a run of the task sft has no section reward"
    assert found.fix == "Leave it out, or choose another --config-name."


def test_a_reward_function_is_named_by_its_data_source() -> None:
    found = problems("grpo", *INPUTS, "reward.function=grader.py:f")
    assert "as reward.functions.default=" in found["reward.function"].fix


def test_a_setting_of_another_reward() -> None:
    found = problems("grpo", *INPUTS, "reward=http", "reward.functions.default=gsm8k")
    assert found["reward.functions"].rule == (
        "the reward that was chosen has no such setting"
    )
    lone = "reward.components.b.functions.default=gsm8k"
    found = problems("grpo", *INPUTS, "reward=mixed", lone)
    assert found["reward.components.b.kind"].fix == "Set reward.components.b.kind."


def test_a_setting_of_a_model_that_environments_talk_to() -> None:
    model = "agent.models.user={url: http://host/v1, tokenenv: X}"
    found = problems("grpo", *INPUTS, model)
    key = "agent.models.user.token_env"
    assert found["agent.models.user.tokenenv"].fix == f"Did you mean {key}?"
    # What else was written of it is not quoted as null.
    assert "agent.models.user.url" not in found


@pytest.mark.parametrize(
    ("teacher", "key", "fix"),
    [
        ("{url: http://h/v1, tokenenv: X}", "tokenenv", "Did you mean distill.teacher.token_env?"),
        ("{sums: {url: http://h/v1, tokenenv: X}}", "sums.tokenenv", "Did you mean distill.teacher.sums.token_env?"),
        ("{sums: {}}", "sums.url", "Set it: distill.teacher.sums.url=..."),
        ("{sums: http://h/v1, default: {url: http://h/v1}}", "sums", "Use a section"),
        ("http://h/v1", "", "Set the keys inside it, e.g. distill.teacher.url=..."),
        ("actr", "", "Did you mean actor?"),
    ],
)  # fmt: skip
def test_a_teacher_is_a_name_a_server_or_a_table_of_these(
    teacher: str, key: str, fix: str
) -> None:
    """Errors are of the form that was meant, and of no other."""
    found = problems("distill", *INPUTS, f"distill.teacher={teacher}")
    about = [name for name in found if name.startswith("distill.teacher")]
    assert about == [f"distill.teacher.{key}".rstrip(".")]
    assert found[about[0]].fix.startswith(fix)


def test_a_table_of_teachers_takes_the_place_of_a_server() -> None:
    servers = "{url: http://a/v1}", "{sums: {url: http://b/v1}}"
    given = [f"distill.teacher={server}" for server in servers]
    config = compose("distill", [*INPUTS, *given])
    assert isinstance(config, RLConfig) and config.distill is not None
    assert list(config.distill.services) == ["distill.teacher.sums"]


def test_a_text_is_quoted_twice() -> None:
    (found,) = problems("quickstart", "run.dir=/a b/(c)").values()
    assert (found.key, found.value) == ("run.dir", "/a b/(c)")
    assert "shell and once more: \"run.dir='/a b/(c)'\"." in found.fix
    (found,) = problems("quickstart", "run.dir=$(a)").values()
    assert found.fix.endswith(f" {shlex.quote(override_of('run.dir', '$(a)'))}.")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("run.dir", "/größe", "/größe"),
        ("data.train_path", "[/größe/a, b]", ["/größe/a", "b"]),
        (
            "data.train_path",
            "[{path: /größe, weight: 2}]",
            [{"path": "/größe", "weight": 2}],
        ),
    ],
)
def test_the_advice_for_an_unreadable_value_can_be_read(
    key: str, value: str, expected: object
) -> None:
    (found,) = problems("quickstart", f"{key}={value}").values()
    advice = found.fix.partition("shell")[2].partition(": ")[2].removesuffix(".")
    (word,) = shlex.split(advice)
    override = parsed_override(word)
    assert (override.key_or_group, override.value()) == (key, expected)


def test_a_root_config_that_stands_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    for text, fix in (
        ("grpo", "Write --config-name grpo."),
        ("grpo.yaml", "Write --config-name grpo."),
        ("own.yaml", "Write --config-name own.yaml."),
        ("outputs/mine", "Write --config-dir outputs/mine --config-name config."),
        ("run.seed", "Write run.seed=VALUE."),
    ):
        (found,) = problems("quickstart", text).values()
        assert (found.rule, found.fix) == ("this override has no value", fix)


def test_missing_inputs_are_named() -> None:
    for root in ("ppo", "grpo", "sft"):
        refused = problems(root)
        assert set(refused) == {"model.path", "data.train_path", "data.validation_path"}
        assert refused["model.path"].fix == "Give it: model.path=..."


def test_a_setting_inside_null_is_refused() -> None:
    assert (
        "prepare is null"
        in problems("quickstart", "prepare.min_gain=0.1", "prepare=null")[
            "prepare.min_gain"
        ].rule
    )
    key = "algorithm.value_loss.clip"
    assert (
        "algorithm.value_loss is null"
        in problems("quickstart", "algorithm=grpo", f"{key}=0.1")[key].rule
    )


def test_free_sections_take_new_keys() -> None:
    config = quickstart(
        "rollout.vllm_args.enforce_eager=true",
        "reward.functions.mine=grader.py:grade",
        "reward.functions.module=graders.maths:grade",
        "reward.functions.pickle=own.pkl",
    )
    assert config.rollout.vllm_args == {"enforce_eager": True}
    functions = config.reward.functions
    assert functions["mine"] == str(Path.cwd() / "grader.py:grade")
    assert functions["module"] == "graders.maths:grade"
    assert functions["pickle"] == str(Path.cwd() / "own.pkl")


def test_a_reward_is_chosen_as_a_whole() -> None:
    refused = problems("quickstart", "reward.kind=model")
    assert {key: problem.fix for key, problem in refused.items()} == {
        "reward.kind": "Choose it with reward=model; there is function, http, judge, mixed, model."
    }


def test_held_out_responses_may_have_functions_where_they_had_none() -> None:
    assert quickstart().evaluation.functions is None
    assert quickstart("evaluation.functions.default=gsm8k").evaluation.functions == {
        "default": "gsm8k"
    }


def test_plus_signs_and_dicts_are_understood() -> None:
    config = quickstart(
        "+run.seed=3", "++run.total_steps=9", "actor.optimizer={lr: 0.5, eps: 1e-6}"
    )
    assert (config.run.seed, config.run.total_steps) == (3, 9)
    assert (config.actor.optimizer.lr, config.actor.optimizer.eps) == (0.5, 1e-6)
    assert config.actor.optimizer.betas == (0.9, 0.999)


def test_an_unknown_root_config_is_refused() -> None:
    assert problems("quikstart")["--config-name"].fix.startswith(
        "Did you mean quickstart?"
    )


# ------------------------------------------------------------------------------- values


def test_roles_follow_the_model_and_the_actor_unless_they_differ() -> None:
    config = compose("ppo", [*INPUTS, "critic.model.path=/other", "actor.num_ranks=2"])
    assert isinstance(config, RLConfig)
    assert (
        config.actor.model.path,
        config.critic.model.path,
        config.reference.model.path,
    ) == ("/m", "/other", "/m")
    assert (config.critic.num_ranks, config.reference.num_ranks) == (2, 2)


def test_a_run_is_named_after_its_root_config_and_writes_to_a_folder_of_that_name() -> (
    None
):
    outputs = Path.cwd() / "outputs"
    for root, inputs in (
        ("quickstart", []),
        ("ppo", INPUTS),
        ("grpo", INPUTS),
        ("sft", INPUTS),
    ):
        config = compose(root, inputs)
        assert config.run.name.startswith(f"{root}-2")
        assert config.run.dir == f"{outputs}/{config.run.name}"
    config = quickstart("run.name=mine")
    assert (config.run.dir, config.model.path) == (
        f"{outputs}/mine",
        f"{outputs}/mine/inputs/model",
    )
    assert quickstart("run.dir=/tmp/x").data.train_path == "/tmp/x/inputs/train.jsonl"


def test_in_a_ray_job_a_run_writes_to_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "_ray_pkg_0123456789abcdef"
    package.mkdir()
    monkeypatch.chdir(package)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = quickstart("run.name=mine")
    assert config.run.dir == f"{tmp_path}/home/outputs/mine"
    assert [problem.key for problem in preflight(config, None).problems] == []
    (problem,) = preflight(quickstart("run.dir=outputs/mine"), None).problems
    assert problem.key == "run.dir"
    assert "Ray made for this job, and will delete" in problem.rule
    assert "~/outputs/NAME" in problem.fix


def test_local_paths_are_absolute_since_workers_have_another_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    inputs = [
        "model.path=m",
        "critic.model.path='~/c'",
        "data.train_path=../t.jsonl",
        "data.validation_path=s3://b/v",
    ]
    config = compose(
        "ppo",
        [
            *inputs,
            "run.dir=out",
            "run.resume=out/old",
            "reward.functions.mine=a/g.py:grade",
        ],
    )
    assert isinstance(config, RLConfig)
    assert (config.run.dir, config.run.resume) == (
        f"{tmp_path}/out",
        f"{tmp_path}/out/old",
    )
    models = [
        config.model.path,
        config.actor.model.path,
        config.reference.model.path,
        config.critic.model.path,
    ]
    assert models == [f"{tmp_path}/m"] * 3 + ["/home/me/c"]
    assert (config.data.train_path, config.data.validation_path) == (
        f"{tmp_path}/../t.jsonl",
        "s3://b/v",
    )
    assert config.reward.functions["mine"] == f"{tmp_path}/a/g.py:grade"
    assert config.reward.functions["default"] == "by_data_source"
    assert quickstart().run.resume == "auto"


def test_roots_are_what_they_say() -> None:
    ppo, grpo, sft = (compose(root, INPUTS) for root in ("ppo", "grpo", "sft"))
    assert (
        isinstance(ppo, RLConfig)
        and isinstance(grpo, RLConfig)
        and isinstance(sft, SFTConfig)
    )
    assert (ppo.algorithm.advantage, ppo.has_critic, ppo.prepare) == ("gae", True, None)
    assert (grpo.algorithm.advantage, grpo.has_critic) == ("grpo", False)
    kl = grpo.algorithm.kl
    assert (kl.place, kl.estimator, kl.coefficient) == ("loss", "k3", 0.001)
    assert ppo.tracking.wandb.mode == sft.tracking.wandb.mode == "offline"


def test_configs_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [quickstart, _self_]\nrun: {total_steps: 7}\n"
    )
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "wide.yaml").write_text(
        "defaults: [ppo, _self_]\nname: wide\nclip_high: 0.28\n"
    )
    config = compose("mine", ["algorithm=wide"], str(tmp_path))
    assert isinstance(config, RLConfig)
    assert (
        config.run.total_steps,
        config.algorithm.clip_high,
        config.algorithm.clip_low,
    ) == (7, 0.28, 0.2)
    assert (
        "Did you mean wide"
        in problems("mine", "algorithm=wied", config_dir=str(tmp_path))["algorithm"].fix
    )
    assert (
        "no such folder"
        in problems("mine", config_dir=str(tmp_path / "x"))["--config-dir"].rule
    )


def test_a_backend_in_the_body_of_a_users_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [quickstart, _self_]\nbackend: {dtype: bfloat16}\n"
    )
    assert (
        "reaches no role"
        in problems("mine", config_dir=str(tmp_path))["backend.dtype"].rule
    )


def test_a_broken_yaml_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [nowhere/quickstart]\n")
    composition = examine("mine", [], str(tmp_path))
    assert composition.config is None
    assert "nowhere/quickstart" in composition.problems[0].rule


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("defaults: [quickstart]\nrun:\n  seed: [1\n  name: x\n", "line 4, column 7", "bracket"),
        ("defaults: [quickstart]\nrun:\n\tseed: 1\n", "line 3, column 1", "no tabs"),
        ("run: {seed: 1}\nrun: {seed: 2}\n", "line 2, column 1", "join the two"),
        ("run: {seed: !!python/object:os.system 1}\n", "line 1, column 13", "plain value"),
    ],
)  # fmt: skip
def test_broken_yaml_is_named_with_its_place(
    tmp_path: Path, text: str, place: str, expected: str
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    problem = problems("mine", config_dir=str(tmp_path))[f"{tmp_path}/mine.yaml"]
    assert place in problem.rule and expected in problem.fix


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"- a\n", "this file is a list"),
        (b"defaults: quickstart\n", "defaults must be a list"),
        (b"\xff\xfe", "no text in UTF-8"),
        (b"defaults: [mine, _self_]\n", "leads back to itself"),
        (b"defaults: [quickstart, _self_]\nrun: {name: '${a b'}\n", "cannot be composed"),
        (b"", "it names no task"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    (problem,) = problems("mine", config_dir=str(tmp_path)).values()
    assert expected in problem.rule


def test_a_misspelt_default_leads_to_the_root_config(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [grpoo]\n")
    (problem,) = problems("mine", config_dir=str(tmp_path)).values()
    assert problem.fix.startswith("Did you mean grpo?") and "mine" not in problem.fix


def test_a_file_that_is_no_utf_8_is_the_one_that_is_read(tmp_path: Path) -> None:
    for name, character in (("another", b"\xe8"), ("mine", b"\xe9")):
        (tmp_path / f"{name}.yaml").write_bytes(b"run: {name: " + character + b"}")
    (problem,) = problems("mine", config_dir=str(tmp_path)).values()
    assert problem.value == f"{tmp_path}/mine.yaml"


@pytest.mark.parametrize(
    ("root", "override"),
    [
        ("grpo", "critic.backend.sharding=x"),
        ("quickstart", "rollout.endpoint={a: 1}"),
        ("quickstart", "evaluation.functions=[]"),
        ("quickstart", "evaluation.functions=1"),
        ("quickstart", "rollout.sync.probe_every=[1,2]"),
        ("quickstart", "data.apply_chat_template=[]"),
        ("quickstart", "rollout.sync.transport=[]"),
        ("reward_model", "preference.margin=[]"),
        ("quickstart", "run=[]"),
        ("quickstart", "run.seed=${run.seed}"),
    ],
)
def test_a_value_that_fits_nowhere_is_a_problem_of_its_key(
    root: str, override: str
) -> None:
    key = override.partition("=")[0]
    assert any(name.startswith(key) for name in problems(root, override))


def test_a_mixture_without_components_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mine.yaml").write_text(
        "kind: mixed\ncomponents: {}\nweights: {a: 1.0}\n"
    )
    found = problems(
        "quickstart", "reward=mine", "prepare.min_gain=0", config_dir=str(tmp_path)
    )
    assert [*found] == ["reward.components"]


VALUES = ("x", "-1", "1.5", "null", "[]", "{}", "[1,2]", "{a: 1}", "true", "''", "auto")
SECTIONS = ("run", "rollout.sync", "reward", "evaluation", "actor.optimizer")


def test_no_value_of_any_type_ends_in_another_error() -> None:
    """Each key of some sections gets each value in turn, a dozen keys at a time."""
    tree = examine("quickstart").tree
    keys: list[str] = []
    for section in SECTIONS:
        node = tree
        for part in section.split("."):
            node = node[part]
        keys += [section, *(f"{section}.{name}" for name in node)]

    for shift in range(len(VALUES)):
        values = itertools.islice(itertools.cycle(VALUES), shift, None)
        pairs = list(zip(keys, values, strict=False))
        # A section and what is inside are not set together.
        outer = [f"{key}={value}" for key, value in pairs if key in SECTIONS]
        inner = [f"{key}={value}" for key, value in pairs if key not in SECTIONS]
        for overrides in (outer, inner):
            composition = examine("quickstart", overrides)
            assert all(problem.fix for problem in composition.problems)


def test_a_length_in_epochs_replaces_the_one_in_steps(tmp_path: Path) -> None:
    def lengths(*overrides: str, root: str = "quickstart") -> list[float | None]:
        run = compose(root, overrides, str(tmp_path)).run
        return [run.total_steps, run.total_epochs]

    assert lengths("run.total_epochs=2") == [None, 2]
    (tmp_path / "own.yaml").write_text(
        "defaults: [quickstart, _self_]\nrun: {total_steps: null, total_epochs: 2}\n"
    )
    assert lengths("run.total_steps=3", root="own") == [3, None]
    assert lengths("run.total_epochs=null") == [200, None]


def test_an_evaluation_needs_no_training_data() -> None:
    typed = ["model.path=/m", "data.validation_path=/held_out.jsonl"]
    config = examine("grpo", typed, evaluates=True).config
    assert config is not None and config.data.train_path == "/held_out.jsonl"
    # The cursor of a checkpoint belongs to the data of its training.
    resumed = examine("grpo", [*typed, "run.resume=/step_00000001"], evaluates=True)
    for composition in (examine("grpo", typed), resumed):
        assert [one.key for one in composition.problems] == ["data.train_path"]


def test_the_config_yaml_of_an_older_supervised_run_is_composed(tmp_path: Path) -> None:
    overrides = ["model.path=/m", "data.train_path=/a", "data.validation_path=/b"]
    config = compose("sft", overrides)
    older = to_tree(config)
    for name in ("divergence", "top_k", "beta"):
        del older["sft"][name]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older))
    assert compose("config", (), str(tmp_path)) == config


def test_the_config_yaml_of_an_older_run_is_composed(tmp_path: Path) -> None:
    # Special tokens in data were kept then.
    same = ("rollout.concurrency=48", "run.stall_s=77", "data.special_tokens=allow")
    config = quickstart(*same)
    older = yaml.safe_load(yaml.safe_dump(to_tree(config)))
    for key in (*ADDED, *RENAMED.values()):
        *sections, name = key.split(".")
        # Sections of other tasks, or that this algorithm has not, are not there.
        if older.get(sections[0]) is not None:
            reduce(getitem, sections, older).pop(name, None)
    del older["run"]["recovery"]
    older["rollout"]["in_flight"] = 48
    older["run"]["call_deadline_s"] = 77.0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(older))

    def composed(*overrides: str) -> RLConfig:
        config = compose("config", overrides, str(tmp_path))
        assert isinstance(config, RLConfig)
        return config

    # Thoughts were text.
    config = with_changes(config, {"agent.reasoning_parser": None})
    assert composed() == config
    evaluation = examine("config", (), str(tmp_path), evaluates=True)
    assert (evaluation.config, evaluation.problems) == (config, [])
    # run.total_steps also sets run.total_epochs, which that run did not have.
    assert composed("run.total_steps=300").run.total_steps == 300
    best = composed("run.best_metric=val-core/loss", "run.best_is=lowest").run
    assert (best.best_metric, best.best_is) == ("val-core/loss", "lowest")
    assert composed("rollout.concurrency=3").rollout.concurrency == 3

    # A root config that is made of others is no run's, and a run has no other keys.
    own = "defaults: [quickstart, _self_]\nrollout: {in_flight: 48}\n"
    (tmp_path / "own.yaml").write_text(own)
    assert "rollout.in_flight" in problems("own", config_dir=str(tmp_path))
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**older, "rolout": 1}))
    assert list(problems("other", config_dir=str(tmp_path))) == ["rolout"]


def test_a_table_is_set_as_a_whole() -> None:
    config = compose("grpo", [*INPUTS, "reward.functions={a: gsm8k}"])
    assert config.graders["reward"].named_functions == {"a": "gsm8k"}
    # A function for `default` serves every source, whatever the built-in one does.
    config = compose("grpo", [*INPUTS, "reward.functions.default=gsm8k"])
    assert config.graders["reward"].named_functions == {"default": "gsm8k"}

    for typed, fix in (
        ("data.columns.answer=truth", "Write 'data.columns={answer: truth}'."),
        ("reward.functions.openai/gsm8k=f.py:f", "={openai/gsm8k: f.py:f, default: by_data_source}'"),
    ):  # fmt: skip
        (found,) = examine("grpo", [*INPUTS, typed]).problems
        assert fix in found.fix
