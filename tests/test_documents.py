"""Tables of the documents say what is declared."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from controllers.compose.listing import groups
from scripts.configuration import compose
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.declaration import Declaration
from verl_ray.algorithms.distillation import DIVERGENCES
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.algorithms.preference_losses import PREFERENCE_LOSSES
from verl_ray.algorithms.row_weights import AGGREGATIONS
from verl_ray.backends import BACKENDS
from verl_ray.config.optimizers import OPTIMIZERS
from verl_ray.config.reward import MixedReward
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.report.findings import RULES
from verl_ray.rewards.built_in import BUILT_IN
from verl_ray.rewards.specs import spec_problem

ROOT = Path(__file__).parents[1]


def reads(declared: Declaration) -> str:
    """Settings with their usual values."""
    usual = {setting.name: value for setting, value in declared.reads.items()}
    return (
        ", ".join(
            f"`{name}`" if value is None else f"`{name}` ({value})"
            for name, value in usual.items()
        )
        or "-"
    )


def needs(name: str) -> str:
    found = {
        "a group": ADVANTAGES[name].needs_group,
        "a critic": ADVANTAGES[name].needs_critic,
    }
    return ", ".join(what for what, needed in found.items() if needed) or "-"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


TABLES = {
    ("docs/backends.md", "| `backend=` | what it is |"): [
        row(f"`{name}`", about) for name, about in groups()["backend"].items()
    ],
    ("docs/configuration.md", "| group | choices |"): [
        row(f"`{name}`", ", ".join(f"`{choice}`" for choice in choices))
        for name, choices in groups().items()
    ],
    ("docs/configuration.md", "| `optimizer@ROLE.optimizer=` | what it is |"): [
        row(f"`{name}`", about) for name, about in groups()["optimizer"].items()
    ],
    ("docs/algorithms.md", "| `algorithm=` | what it is |"): [
        row(f"`{name}`", about) for name, about in groups()["algorithm"].items()
    ],
    ("docs/algorithms.md", "| `algorithm.kl=` | what it is |"): [
        row(f"`{name}`", about) for name, about in groups()["algorithm.kl"].items()
    ],
    (
        "ARCHITECTURE.md",
        "| `algorithm.advantage` | paper | one per | needs | reads |",
    ): [
        row(
            f"`{name}`",
            one.paper,
            {"row": "response", "token": "token"}[one.level],
            needs(name),
            reads(one),
        )
        for name, one in ADVANTAGES.items()
    ],
    (
        "ARCHITECTURE.md",
        "| `algorithm.policy_loss` | paper | ratio of a | reads |",
    ): [
        row(f"`{name}`", one.paper, one.sequence if one.has_ratio else "-", reads(one))
        for name, one in POLICY_LOSSES.items()
    ],
    ("ARCHITECTURE.md", "| `algorithm.aggregation` | source | reads |"): [
        row(f"`{name}`", one.paper, reads(one)) for name, one in AGGREGATIONS.items()
    ],
    ("docs/preferences.md", "| `preference.loss` | paper | reference | reads |"): [
        row(f"`{name}`", one.paper, "yes" if one.has_reference else "no", reads(one))
        for name, one in PREFERENCE_LOSSES.items()
    ],
    ("docs/distillation.md", "| `distill.divergence` | paper | reads |"): [
        row(f"`{name}`", one.paper, reads(one)) for name, one in DIVERGENCES.items()
    ],
    ("docs/metrics.md", "| finding | when | because | what to change |"): [
        row(
            f"{rule.title} (`{rule.kind}`)",
            rule.when,
            rule.why,
            rule.advice_with(lambda part: part if " " in part else f"`{part}`"),
        )
        for rule in RULES
    ],
    ("docs/data.md", "| function | score of a response | arguments |"): [
        row(
            f"`{name}`",
            one.about,
            ", ".join(f"`{argument}`" for argument in one.arguments) or "-",
        )
        for name, one in BUILT_IN.items()
    ],
}


def test_every_backend_can_be_chosen() -> None:
    assert groups()["backend"].keys() == BACKENDS.keys()
    assert groups()["optimizer"].keys() == OPTIMIZERS.keys()


def rows(text: str, head: str) -> list[str]:
    """Those of the table with this head."""
    lines = text.splitlines()
    assert head in lines, f"the document has no table with the head {head}"
    below = lines[lines.index(head) + 2 :]
    return below[
        : next(
            place for place, line in enumerate([*below, ""]) if not line.startswith("|")
        )
    ]


def paste(lines: Iterable[str]) -> str:
    return "\n".join(lines) or "nothing"


@pytest.mark.parametrize(("document", "head"), TABLES)
def test_a_table_has_a_row_for_each_declaration(document: str, head: str) -> None:
    declared, found = (
        TABLES[document, head],
        rows((ROOT / document).read_text("utf-8"), head),
    )
    missing = [line for line in declared if line not in found]
    stale = [line for line in found if line not in declared]
    assert found == declared, (
        f"{document}, under {head}: add\n{paste(missing)}\ntake out\n{paste(stale)}"
    )


INPUTS = ("model.path=/m", "data.train_path=t", "data.validation_path=v")


def test_the_examples_of_rewards_can_be_set(tmp_path: Path) -> None:
    text = (ROOT / "docs/data.md").read_text("utf-8")
    examples = re.findall(r"^'?reward\.functions\.default=(.+?)'?$", text, re.MULTILINE)
    # Each for a data source of its own.
    sources = [f"reward.functions.s{i}={one}" for i, one in enumerate(examples)]
    config = compose("grpo", [*INPUTS, *sources])
    specs = config.active_graders(learns=True)["reward"].named_functions or {}
    rules = [
        problem.rule
        for spec in specs.values()
        if (problem := spec_problem(spec, "reward.functions")) is not None
    ]
    # The files of the examples are the reader's own.
    assert len(specs) == len(examples) + 1 > 8
    assert len(rules) == 2 and "grader.py does not exist" in rules[0]
    assert "schema.json" in rules[1]

    (mixture,) = re.findall(r"^```yaml\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)
    path = tmp_path / "reward/right_and_form.yaml"
    path.parent.mkdir()
    path.write_text(mixture)
    chosen = [*INPUTS, "reward=right_and_form"]
    config = compose("grpo", chosen, config_dir=str(tmp_path))
    assert isinstance(config, RLConfig) and isinstance(config.reward, MixedReward)
    assert config.reward.weights == {"right": 1.0, "form": 0.1}
