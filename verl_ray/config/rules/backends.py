"""Rules of the training backends that roles are on: what each of them says of its settings.

Invariant: no backend is named; what goes together is what `verl_ray/backends` declares. Deliberately not here: what a
model rules out (`verl_ray/preflight/backends.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.backends import BACKENDS
from verl_ray.config.rules.rule import Overridden, ignored
from verl_ray.config.schema import Config
from verl_ray.config.suggest import either
from verl_ray.errors import Problem


def ranks_can_share_models_out(config: Config, _: Overridden) -> Iterator[Problem]:
    for name, role in config.model_roles.items():
        yield from role.backend.rank_problems(name, role.num_ranks)


def adapters_have_a_backend(config: Config, _: Overridden) -> Iterator[Problem]:
    for name, role in config.learners.items():
        if role.adapter is not None and not role.backend.has_adapters:
            rule = f"{name}.backend={role.backend.kind} trains all parameters, and has no adapters"
            others = (f"backend@{name}.backend={kind}" for kind, one in BACKENDS.items() if one.has_adapters)
            yield Problem(f"{name}.lora.rank", role.lora.rank, rule, f"Set it to 0, or choose {either(others)}.")


def frozen_models_do_not_learn(config: Config, overridden: Overridden) -> Iterator[Problem]:
    for name, role in config.model_roles.items():
        if role.learning is not None:
            continue
        reasons = dict.fromkeys(role.backend.of_activations, "keeps no activations")
        reasons |= dict.fromkeys(role.backend.of_gradients, "has no gradients")
        for field, reason in reasons.items():
            keys = overridden.under(f"{name}.backend.{field}")
            yield from ignored(keys, config, f"this model does not learn, so it {reason}")
