"""Python values that become overrides, and are read back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from controllers.compose.grammar import keys_of, overrides_of
from scripts.configuration import compose
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
NUMBERS = st.integers() | st.floats(allow_nan=False)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | TEXTS
    | st.sampled_from(["\\", "a\\'", "'\\"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(NAMES, VALUES, max_size=3))
def test_every_value_is_read_back(values: dict[str, Any]) -> None:
    parser = OverridesParser.create()
    parsed = [parser.parse_override(text) for text in overrides_of(values)]
    assert {override.key_or_group: override.value() for override in parsed} == values


def test_sections_groups_and_names_that_are_no_keys() -> None:
    values: dict[str, Any] = {
        "actor": {"optimizer": {"lr": 1e-6}, "num_ranks": 2},
        "data.train_path": [{"path": Path("a b.jsonl"), "weight": 2}, "c.jsonl"],
        "backend": "fsdp",
        "reward.functions": {"openai/gsm8k": "gsm8k", "default": "exact_match"},
        "data": {"columns": {"prompt": "question"}},
        "run.seed": np.int64(3),
        "rollout": {"vllm_args": {}},
    }
    assert overrides_of(values) == [
        "actor.optimizer.lr=1e-06",
        "actor.num_ranks=2",
        "data.train_path=[{path: 'a b.jsonl', weight: 2}, 'c.jsonl']",
        "backend='fsdp'",
        "reward.functions={openai/gsm8k: 'gsm8k', default: 'exact_match'}",
        "data.columns={prompt: 'question'}",
        "run.seed=3",
        "rollout.vllm_args={}",
    ]
    assert keys_of({"actor": {"num_ranks": 2}, "seed": 1}) == [
        "actor.num_ranks",
        "seed",
    ]

    del values["data.train_path"], values["rollout"]
    paths = ["model.path=/m", "data.train_path=t.jsonl", "data.validation_path=v.jsonl"]
    config = compose("grpo", [*paths, *overrides_of(values)])
    assert isinstance(config, RLConfig) and config.actor.optimizer.lr == 1e-6
    assert config.actor.backend.kind == "fsdp"
    assert config.reward.functions["openai/gsm8k"] == "gsm8k"
    assert config.data.train_sets[0].columns == {"prompt": "question"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"run.seed": {1, 2}}, "run.seed = {1, 2}\n    rule: this is a set"),
        ({"model.path": b"m"}, "this is a bytes"),
        ({"run seed": 1}, "run seed = 1\n    rule: this is no key of a setting"),
        ({"reward.functions": {"a'b": "gsm8k"}}, "characters that an override cannot"),
    ],
)
def test_what_yaml_has_not_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overrides_of(values)
    assert words in str(caught.value)
