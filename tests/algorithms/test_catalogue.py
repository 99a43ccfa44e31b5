"""What is declared of algorithms: addresses that hold a function, settings that it takes, names that are refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

import configs
from controllers.compose.composition import compose, examine
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.catalogue import CHOICES, CORRECTIONS, KL_ESTIMATORS, LEVELS, POLICY_LOSSES, settings
from verl_ray.algorithms.declaration import Declaration
from verl_ray.config.schema import RLConfig

SHARED = Path(configs.__file__).parent / "algorithm" / "_shared.yaml"
OTHERS: tuple[Mapping[str, Declaration], ...] = (KL_ESTIMATORS, CORRECTIONS, LEVELS)


@pytest.mark.parametrize("table", [POLICY_LOSSES, *OTHERS], ids=lambda table: next(iter(table)))
def test_an_address_holds_a_documented_function(table: Mapping[str, Declaration]) -> None:
    for declared in table.values():
        function = declared.function.target  # type: ignore[attr-defined]
        assert callable(function) and function.__doc__


def test_functions_take_the_settings_that_are_declared() -> None:
    functions = {one.name: (one, one.function) for one in ADVANTAGES.values()}
    functions |= {one.name: (one, one.function.target) for one in POLICY_LOSSES.values()}
    for declared, function in functions.values():
        taken = inspect.signature(function).parameters
        assert {setting.name for setting in declared.reads} <= taken.keys()


def test_a_setting_is_null_until_an_algorithm_sets_it() -> None:
    shared = yaml.safe_load(SHARED.read_text())
    missing = [f"{one.name}: null" for one in settings() if one.name not in shared]
    assert not missing, f"add to {SHARED.name}: {missing}"
    assert all(shared[one.name] is None for one in settings())


@pytest.mark.parametrize("key", [*CHOICES, "kl.estimator", "correction.kind", "correction.level"])
def test_a_name_that_is_not_declared_is_refused(key: str) -> None:
    problems = examine("quickstart", [f"algorithm.{key}=nonesuch"]).problems
    (problem,) = (one for one in problems if one.value == "nonesuch")
    assert (problem.key, problem.rule) == (f"algorithm.{key}", "there is no such choice")
    for name in CHOICES.get(key, ()):
        assert name in problem.fix


def test_a_name_that_is_nearly_declared_is_suggested() -> None:
    (problem,) = examine("quickstart", ["algorithm=grpo", "algorithm.advantage=rlo"]).problems
    assert problem.fix.startswith("Did you mean rloo? Use gae, grpo,")


def test_a_setting_has_the_type_that_its_declaration_says() -> None:
    problems = examine("quickstart", ["algorithm.gamma=2", "algorithm.clip_low=wide"]).problems
    found = {problem.key: problem.fix for problem in problems}
    assert found["algorithm.gamma"] == "Use a number of at most 1.0."
    assert "a finite number" in found["algorithm.clip_low"]
    config = compose("quickstart", ["algorithm.gamma=0.5"])
    assert isinstance(config, RLConfig) and ADVANTAGES["gae"].settings(config.algorithm) == {"gamma": 0.5, "lam": 1.0}
