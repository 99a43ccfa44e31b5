"""Tokenizers and chat templates that would fail after the processes have started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.preflight.configs import settled
from verl_ray.data.tokenizers import CHATML, train_bpe
from verl_ray.errors import ConfigError, Problem
from verl_ray.preflight.data_files import examine_data
from verl_ray.preflight.reward_trial import try_rewards

GOOD = {"prompt": "1 + 1 = ", "answer": "2"}
NEEDS_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no') }}{% endif %}"
    + CHATML
)


def tokenizer(folder: Path, template: str | None) -> Path:
    train_bpe(folder, ["0 + 1 = 1"], vocab_size=259, chat_template=template)
    return folder


def problems(
    folder: Path,
    policy: Path,
    *overrides: str,
    messages: bool = False,
    rewards: bool = True,
) -> list[Problem]:
    """Return what is wrong with a run that trains and evaluates on one record.

    Args:
        rewards: Whether graders are tried as well.
    """
    record: dict[str, object] = dict(GOOD)
    if messages:
        record["prompt"] = [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "1 + 1"},
        ]
    path = folder / "records.jsonl"
    path.write_text(json.dumps(record) + "\n")
    own = [f"model.path={policy}", f"data.train_path={path}"]
    own.append(f"data.validation_path={path}")
    config = settled(compose("grpo", [*own, *overrides]))
    data = examine_data(config)
    if data.problems or not rewards:
        return data.problems
    return try_rewards(config, data.files).problems


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        ("{{ raise_exception('never') }}", "fails on a plain question: never"),
        ("{% for", "fails on a plain question: "),
        ("", ""),
        ("{{ bos_token }}", "leaves out the words of a plain question"),
    ],
)
def test_a_template_that_writes_no_question_is_told_once_of_its_model(
    tmp_path: Path, template: str, rule: str
) -> None:
    folder = tokenizer(tmp_path / "policy", template)
    chat = "data.apply_chat_template=true"
    (problem,) = problems(tmp_path, folder, chat)
    if not template:
        assert problem.key == "data.apply_chat_template"
        assert problem.rule == f"the tokenizer in {folder} has no chat template"
        return
    assert (problem.key, problem.value) == ("model.path", str(folder))
    assert problem.rule.startswith(f"its chat template {rule}")
    assert "\n" not in problem.rule


def test_a_base_model_takes_messages_by_a_template_of_the_run(tmp_path: Path) -> None:
    base = tokenizer(tmp_path / "policy", None)
    refused = problems(tmp_path, base, messages=True)
    assert {problem.key for problem in refused} == {
        "data.train_path",
        "data.validation_path",
    }
    for problem in refused:
        assert "found chat messages, but no chat template" in problem.rule
        assert "data.chat_template=chatml, plain or a file" in problem.fix

    own = tmp_path / "own.jinja"
    own.write_text(CHATML)
    for template in ("plain", "chatml", str(own)):
        setting = f"data.chat_template={template}"
        assert problems(tmp_path, base, setting, messages=True, rewards=False) == []

    own.write_text("{% for")
    (problem,) = problems(tmp_path, base, f"data.chat_template={own}")
    assert (problem.key, problem.value) == ("data.chat_template", "str '{% for'")
    assert problem.rule.startswith("the template fails on a plain question: ")
    with pytest.raises(ConfigError, match="No such file or directory") as refusal:
        problems(tmp_path, base, "data.chat_template=chatlm")
    (problem,) = refusal.value.problems
    assert problem.key == "data.chat_template"
    assert problem.fix.startswith("Set it to chatml, plain or the path of a file")


def test_an_argument_that_the_template_does_not_read_is_told(tmp_path: Path) -> None:
    template = (
        f"{CHATML}{{% if tone == 'calm' %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    )
    folder = tokenizer(tmp_path / "policy", template)
    (problem,) = problems(tmp_path, folder, "data.chat_template_kwargs={tone: calm}")
    assert problem.rule == "its chat template fails on a plain question: no"

    (problem,) = problems(tmp_path, folder, "+data.chat_template_kwargs.tune=loud")
    assert (problem.key, problem.value) == ("data.chat_template_kwargs.tune", "loud")
    assert problem.rule.endswith(f"the chat template in {folder} does not read tune")

    # Neither has a use without a template, or with one that does not write the day.
    base = tokenizer(tmp_path / "base", None)
    dated = tokenizer(tmp_path / "dated", f"{CHATML}{{{{ strftime_now('%d') }}}}")
    day = "data.template_day=2026-01-31"
    thinks = "data.chat_template_kwargs={tone: calm}"
    assert problems(tmp_path, dated, day, rewards=False) == []
    plain = "data.apply_chat_template=false"
    assert problems(tmp_path, dated, plain, rewards=False) == []
    (problem,) = problems(tmp_path, folder, day)
    assert (problem.key, problem.value) == ("data.template_day", "2026-01-31")
    assert problem.rule.endswith(f"{folder} does not write the day")
    unread, day_problem = problems(tmp_path, base, day, thinks)
    assert (unread.key, day_problem.key) == (
        "data.chat_template_kwargs.tone",
        "data.template_day",
    )
    assert "no chat template is applied, which could read tone" in unread.rule


JUDGE = ("reward=judge", "reward.max_response_tokens=8")


def test_a_template_may_require_a_system_message(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "policy", NEEDS_SYSTEM)
    judge = tokenizer(tmp_path / "judge", None)
    own = [*JUDGE, f"reward.model.path={judge}", "reward.max_prompt_tokens=999"]
    assert problems(tmp_path, folder, *own, messages=True) == []


def test_a_stop_text_that_is_nearly_a_special_token_is_warned_of(
    tmp_path: Path,
) -> None:
    policy = tokenizer(tmp_path / "policy", CHATML)
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    stop = "rollout.stop=['<|im_strat|>', '<|im_end|>', '</answer>']"
    inputs = [f"model.path={policy}", f"data.train_path={path}", "run.evaluate_every=0"]
    config = settled(compose("grpo", [*inputs, "data.validation_path=null", stop]))
    told = [each for each in examine_data(config).warnings if "rollout.stop" in each]
    (warning,) = told
    assert warning.startswith(
        "rollout.stop has <|im_strat|>, which is no special token"
    )
    assert "Did you mean <|im_start|>?" in warning


def test_the_tokenizer_of_a_grader_is_loaded(tmp_path: Path) -> None:
    policy = tokenizer(tmp_path / "policy", CHATML)
    for name, reward in (("judge", JUDGE), ("model", ("reward=model",))):
        grader = tokenizer(tmp_path / name, "{{ raise_exception('never') }}")
        own = [*reward, f"reward.model.path={grader}"]
        (problem,) = problems(tmp_path, policy, *own)
        assert (problem.key, problem.value) == ("reward.model.path", str(grader))
        assert "fails on a plain question: never" in problem.rule

        (grader / "tokenizer.json").write_text("{torn")
        (problem,) = problems(tmp_path, policy, *own)
        assert (problem.key, problem.value) == ("reward.model.path", str(grader))
        assert problem.rule.startswith("the tokenizer cannot be loaded")


def test_a_judge_is_asked_about_a_record(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "judge", CHATML)
    own = [*JUDGE, f"reward.model.path={folder}"]
    assert problems(tmp_path, folder, *own, "reward.max_prompt_tokens=999") == []

    template = 'reward.template="{{ prompt }}{{ response }}"'
    # 2 special tokens, "user", a line break, the prompt, a line break, the special
    # token and "assistant", and a line break: every byte is a token.
    tokens = 1 + len("user\n1 + 1 = ") + 1 + 1 + 1 + len("assistant\n")
    enough = f"reward.max_prompt_tokens={tokens}"
    assert problems(tmp_path, folder, *own, template, enough) == []
    less = f"reward.max_prompt_tokens={tokens - 1}"
    (problem,) = problems(tmp_path, folder, *own, template, less)
    assert problem.key == "reward.max_prompt_tokens"
    assert f"has {tokens} tokens without a response" in problem.rule

    missing = 'reward.template="{{ response }}{{ extra.hint }}"'
    (problem,) = problems(tmp_path, folder, *own, missing)
    assert problem.key == "reward.template"
    assert "has no attribute 'hint'" in problem.rule
