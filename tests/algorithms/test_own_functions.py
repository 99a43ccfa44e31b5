"""Estimators and losses in files of users: read before a run, and called like ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.configuration import compose
from tests.rows import columns_of, rollouts_of
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.losses import PolicyTokens, TokenLoss
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.config.load import parse, to_tree
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, DataError
from verl_ray.learning.credit import response_rewards
from verl_ray.preflight.function_trial import sections_of_functions, try_functions
from verl_ray.preflight.trials import Trials

OWN = '''
import numpy as np
import torch

def above_worst(rewards, group, valid, *, gamma, trajectory, length):
    """Difference from the worst response of the group, per token of the response."""
    worst = {g: rewards[(group == g) & valid].min() for g in set(group[valid])}
    return [gamma * (r - worst[g]) / n if v else 0
            for r, g, v, n in zip(rewards, group, valid, length)]

def bounded(tokens, *, clip_high, dual_clip=None):
    ratio = tokens.log_ratio.exp().clamp(max=1 + clip_high)
    assert dual_clip is None
    return -tokens.advantages * ratio

def short(rewards, group, valid):
    return rewards[1:]

def infinite(rewards, group, valid):
    return np.full(4, np.inf)

def broken(rewards, group, valid):
    return rewards.no_such_thing

def detached(tokens):
    return tokens.advantages

def counts(tokens):
    return 1.0

def nowhere(tokens):
    return tokens.log_probs / 0

def mapping(rewards, group, valid):
    return {}

def leaves(rewards, group, valid):
    raise SystemExit(3)

def sloped(tokens, *, clip_high=0.3):
    return -tokens.log_probs * clip_high

def typo(tokens, *, clip_hihg):
    return tokens.log_probs

def weighted(tokens, *, clip_high, beta, power=2.0):
    print("a line of the user's", clip_high)
    return -beta * tokens.advantages * tokens.log_ratio.exp() ** power

def halved(score, group, valid, *, length, brevity=0.5):
    return score * brevity - length

def ends(tokens):
    import os
    os._exit(0)
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def config(*changes: str) -> RLConfig:
    composed = compose(
        "grpo",
        ["model.path=m", "data.train_path=t", "data.validation_path=v", *changes],
    )
    assert isinstance(composed, RLConfig)
    return composed


BASELINE = "algorithm.gamma=0.5"
LOSS = (
    "algorithm.clip_low=null",
    "algorithm.clip_high=0.2",
    "algorithm.dual_clip=null",
)


def credit(path: Path, function: str, *changes: str) -> np.ndarray:
    algorithm = config(f"algorithm.advantage={path}:{function}", *changes).algorithm
    return response_rewards(
        algorithm,
        np.array([1, 3, 5, np.nan], np.float32),
        np.array([True, True, True, False]),
        columns_of(rollouts_of([2, 4, 1, 1], groups=[0, 0, 1, 1])),
        None,
    ).advantage


def test_an_estimator_gets_what_it_names(file: Path) -> None:
    # Half of (3 - 1) over four tokens; a failed score has no advantage.
    assert credit(file, "above_worst", BASELINE).tolist() == [0, 0.25, 0, 0]
    assert ADVANTAGES[f"{file}:above_worst"].needs_group


def test_a_loss_has_its_gradient_and_the_usual_metrics(file: Path) -> None:
    algorithm = config(f"algorithm.policy_loss={file}:bounded", *LOSS).algorithm
    log_probs = torch.tensor([0.1, 0.5]).requires_grad_()
    tokens = PolicyTokens(
        log_probs, torch.zeros(2), torch.tensor([2.0, 1.0]), torch.tensor([0, 0])
    )
    loss = POLICY_LOSSES[algorithm.policy_loss]
    found = loss.function(tokens, **loss.settings(algorithm))
    assert isinstance(found, TokenLoss)
    assert torch.allclose(found.loss, torch.tensor([-2 * np.exp(0.1), -1.2]).float())
    assert found.metrics["actor/ppo_kl"].tolist() == pytest.approx([-0.1, -0.5])
    found.loss.sum().backward()
    # Above 1.2 the ratio is bounded, and the token has no gradient.
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-2 * np.exp(0.1), 0])


def test_a_loss_that_is_not_finite_is_left_for_the_step_to_be_skipped(
    file: Path,
) -> None:
    tokens = PolicyTokens(
        torch.ones(2).requires_grad_(), torch.zeros(2), torch.ones(2), torch.zeros(2).long()
    )  # fmt: skip
    found = POLICY_LOSSES[f"{file}:nowhere"].function(tokens)
    assert found.loss.tolist() == [np.inf] * 2


def test_a_setting_that_is_null_leaves_the_default(file: Path) -> None:
    changes = (
        "algorithm.clip_low=null",
        "algorithm.clip_high=null",
        "algorithm.dual_clip=null",
    )
    algorithm = config(f"algorithm.policy_loss={file}:sloped", *changes).algorithm
    log_probs = torch.ones(1).requires_grad_()
    tokens = PolicyTokens(
        log_probs, torch.zeros(1), torch.ones(1), torch.zeros(1).long()
    )
    loss = POLICY_LOSSES[algorithm.policy_loss]
    found = loss.function(tokens, **loss.settings(algorithm))
    assert found.loss.tolist() == pytest.approx([-0.3])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("short", r"own.py:short returned an array of shape \(3,\); expected one number per row, \(4,\)"),
        ("infinite", "own.py:infinite returned numbers that are not finite"),
        ("mapping", "own.py:mapping returned dict, no array"),
        ("leaves", "own.py:leaves failed: SystemExit: 3"),
        ("broken", r"own.py:broken failed: AttributeError: .*no_such_thing.*own.py"),
    ],
)  # fmt: skip
def test_an_estimator_that_fails_is_named(
    file: Path, function: str, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        credit(file, function)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("detached", "own.py:detached returned a loss without a gradient"),
        ("counts", "own.py:counts returned float; expected a tensor or a TokenLoss"),
    ],
)
def test_a_loss_that_is_none_is_named(file: Path, function: str, words: str) -> None:
    log_probs = torch.zeros(2).requires_grad_()
    tokens = PolicyTokens(
        log_probs, torch.zeros(2), torch.ones(2), torch.zeros(2).long()
    )
    with pytest.raises(DataError, match=words):
        POLICY_LOSSES[f"{file}:{function}"].function(tokens)


@pytest.mark.parametrize(
    ("change", "rule", "fix"),
    [
        ("advantage={own}:bounded", "bounded takes (tokens)", "def bounded(rewards, group, valid, *, ...)"),
        ("advantage={own}:above", "defines no function 'above'", "Did you mean above_worst?"),
        ("advantage={own}x:short", "does not end in .py", "path/to/file.py:function"),
        ("advantage={folder}/other.py:short", "cannot be read", "Correct the path"),
        ("policy_loss={own}:typo", "takes clip_hihg, which is no setting and has no value", "Did you mean clip_high"),
        ("policy_loss={own}:weighted", "takes beta, which is no setting", "give it one: {{function: {own}:weighted, beta: 1}}"),
        ("policy_loss={{function:'{own}:weighted',beta:1,pover:2}}", "pover is given to weighted", "Did you mean power"),
        ("policy_loss={{function:'{own}:weighted',beta:1,clip_high:2}}", "clip_high is given to weighted, and is a setting", "algorithm.clip_high"),
        ("policy_loss=ppo_clap", "there is no such choice", "ppo_clip"),
    ],
)  # fmt: skip
def test_a_function_is_read_before_anything_starts(
    file: Path, change: str, rule: str, fix: str
) -> None:
    change, fix = (text.format(own=file, folder=file.parent) for text in (change, fix))
    with pytest.raises(ConfigError) as caught:
        config(f"algorithm.{change}")
    (problem,) = caught.value.problems
    assert problem.key == f"algorithm.{change.partition('=')[0]}"
    assert rule in problem.rule and fix in problem.fix


def test_settings_of_a_function_are_checked_like_those_of_a_name(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config(f"algorithm.policy_loss={file}:bounded", "algorithm.clip_high=null")
    problems = {problem.key: problem.rule for problem in caught.value.problems}
    assert problems.keys() == {
        "algorithm.clip_low", "algorithm.clip_high",
    }  # fmt: skip
    assert "does not use it" in problems["algorithm.clip_low"]


@pytest.mark.processes
def test_functions_are_tried_on_four_rows_with_arguments_of_their_own(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loss of 0.5 A r^2 has 0.5 A 2 r^2 for its gradient in log r."""
    changes = (
        f"algorithm.policy_loss={{function:'{file}:weighted',beta:0.5}}",
        *LOSS,
        f"algorithm.advantage={file}:above_worst",
        BASELINE,
        f"algorithm.shaping={file}:halved",
    )
    found = config(*changes)
    # What is written down is read again.
    again = parse(to_tree(found), RLConfig)
    assert again.algorithm == found.algorithm

    trials = try_functions("algorithm", found.algorithm)
    assert not trials.problems
    rows = {line.split()[0]: line.split()[1:] for line in trials.lines}
    values = {
        name: [float(number) for number in numbers]
        for name, numbers in rows.items()
        if not name.startswith("algorithm.")
    }
    assert values["reward"] == [0.5 - 3, -6, 0.25 - 2, -5]
    e = np.exp(1.0)
    assert values["loss"] == pytest.approx([-0.5, 0.5, -0.5 * e, 0.5 * e], rel=1e-3)
    assert values["gradient"] == pytest.approx([-1, 1, -e, e], rel=1e-3)
    assert f"policy_loss={file}:weighted (beta=0.5) on four rows" in trials.lines[7]
    assert "a line of the user's 0.2" in capfd.readouterr().err


@pytest.mark.processes
def test_a_function_that_fails_on_four_rows_is_a_problem(file: Path) -> None:
    unset = [f"{change.partition('=')[0]}=null" for change in LOSS]
    for function, words in (
        ("nowhere", "not finite"),
        ("detached", "own.py:detached returned a loss without a gradient"),
        ("ends", "its process exited with status 0 on four rows"),
    ):
        own = config(f"algorithm.policy_loss={file}:{function}", *unset)
        trials = try_functions("algorithm", own.algorithm)
        (problem,) = trials.problems
        assert problem.key == "algorithm.policy_loss" and words in problem.rule


PREFERENCES = """
def squared(pairs, *, beta):
    return (beta * pairs.margin - 1) ** 2

def root(pairs):
    return pairs.margin.sqrt()
"""


@pytest.mark.processes
def test_a_loss_of_pairs_is_tried_on_four_of_them(tmp_path: Path) -> None:
    """The margins are 0, -0.5, 0.5 and -0.5, and beta is 2."""
    own = tmp_path / "pairs.py"
    own.write_text(PREFERENCES)
    inputs = [
        "model.path=/m",
        "data.train_path=t.jsonl",
        "data.validation_path=v.jsonl",
    ]

    def tried(*changes: str, root: str = "dpo") -> Trials:
        found = compose(root, [*inputs, *changes])
        return try_functions("preference", sections_of_functions(found)["preference"])

    squared = (f"preference.loss={own}:squared", "preference.beta=2")
    lines = tried(*squared).lines
    assert tried("algorithm=online_dpo", *squared, root="grpo").lines == lines
    assert lines[0] == f"preference.loss={own}:squared on four rows:"
    numbers = {
        " ".join(line.split()[:-4]): [float(number) for number in line.split()[-4:]]
        for line in lines[1:]
    }
    assert numbers["loss"] == [1, 4, 0, 4]
    assert numbers["gradient of chosen"] == [-4, -8, 0, -8]
    assert numbers["gradient of rejected"] == [4, 8, 0, 8]

    (problem,) = tried(f"preference.loss={own}:root").problems
    assert problem.key == "preference.loss" and "not finite" in problem.rule
    assert not tried().lines


def test_a_path_is_that_of_the_folder_of_the_driver(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert (
        config("algorithm.advantage=own.py:short").algorithm.advantage
        == f"{file}:short"
    )
