"""Declarations of algorithms: addresses of functions, their settings, refused names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import pytest

from controllers.compose.composition import examine
from scripts.configuration import compose
from tests.algorithms.choices import REWARDED
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.agent_baselines import EMA_DECAY
from verl_ray.algorithms.catalogue import CHOICES, KL_ESTIMATORS, declared_settings
from verl_ray.algorithms.correction import CORRECTIONS, LEVELS
from verl_ray.algorithms.declaration import Declaration
from verl_ray.algorithms.policy_losses import COV_SHARE, DUAL_CLIP, POLICY_LOSSES
from verl_ray.config.tasks.rl import RLConfig

OTHERS: tuple[Mapping[str, Declaration], ...] = (KL_ESTIMATORS, CORRECTIONS, LEVELS)


@pytest.mark.parametrize(
    "table", [POLICY_LOSSES, *OTHERS], ids=lambda table: next(iter(table))
)
def test_a_choice_has_a_documented_function(
    table: Mapping[str, Declaration],
) -> None:
    for declared in table.values():
        function = declared.function  # type: ignore[attr-defined]
        assert callable(function) and function.__doc__


def test_functions_take_the_settings_that_are_declared() -> None:
    functions = {one.name: (one, one.function) for one in ADVANTAGES.values()}
    functions |= {one.name: (one, one.function) for one in POLICY_LOSSES.values()}
    for declared, function in functions.values():
        taken = {*inspect.signature(function).parameters}
        selection = getattr(declared, "selection", None)
        if selection is not None:
            taken |= {*inspect.signature(selection).parameters}
        assert {setting.name for setting in declared.reads} <= taken


@pytest.mark.parametrize("name", REWARDED)
def test_an_algorithm_has_the_settings_that_it_reads(name: str) -> None:
    """Its file sets them; a setting that it does not read is null and must stay so."""
    config = compose("quickstart", [f"algorithm={name}"])
    assert isinstance(config, RLConfig)
    algorithm = config.algorithm
    read = {
        one
        for key, table in CHOICES.items()
        for one in table[getattr(algorithm, key)].reads
    }
    unread = [setting for setting in declared_settings() if setting not in read]
    assert all(getattr(algorithm, setting.name) is None for setting in unread)

    values = {DUAL_CLIP: 3, COV_SHARE: 0.5, EMA_DECAY: 0.5}
    overrides = [
        f"algorithm.{setting.name}={values.get(setting, 1)}" for setting in unread
    ]
    problems = examine("quickstart", [f"algorithm={name}", *overrides]).problems
    fixes = {problem.key: problem.fix for problem in problems}
    assert len(problems) == len(unread)
    assert fixes == {
        f"algorithm.{setting.name}": "Set it to null." for setting in unread
    }


@pytest.mark.parametrize(
    "key", [*CHOICES, "kl.estimator", "correction.kind", "correction.level"]
)
def test_a_name_that_is_not_declared_is_refused(key: str) -> None:
    problems = examine("quickstart", [f"algorithm.{key}=nonesuch"]).problems
    (problem,) = (one for one in problems if one.value == "nonesuch")
    assert (problem.key, problem.rule) == (
        f"algorithm.{key}",
        "there is no such choice",
    )
    for name in CHOICES.get(key, ()):
        assert name in problem.fix


def test_a_name_that_is_nearly_declared_is_suggested() -> None:
    (problem,) = examine(
        "quickstart", ["algorithm=grpo", "algorithm.advantage=rlo"]
    ).problems
    assert problem.fix.startswith(
        "Did you mean rloo? Use gae, length_adaptive_gae, grpo,"
    )


def test_a_setting_has_its_declared_type() -> None:
    problems = examine(
        "quickstart", ["algorithm.gamma=2", "algorithm.clip_low=wide"]
    ).problems
    found = {problem.key: problem.fix for problem in problems}
    assert found["algorithm.gamma"] == "Use a number of at most 1.0."
    assert "a finite number" in found["algorithm.clip_low"]
    config = compose("quickstart", ["algorithm.gamma=0.5"])
    assert isinstance(config, RLConfig) and ADVANTAGES["gae"].settings(
        config.algorithm
    ) == {"gamma": 0.5, "lam": 1.0}
