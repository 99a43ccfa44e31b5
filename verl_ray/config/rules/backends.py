"""Rules of the training backends that roles run on.

Invariant: no backend is named. Which settings go together is what `verl_ray/backends`
declares. Deliberately not here: what a model rules out
(`verl_ray/preflight/engine_models.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.backends import BACKENDS
from verl_ray.config.rules.rule import OverriddenKeys, ignored_settings
from verl_ray.config.schema import Config
from verl_ray.config.suggest import either
from verl_ray.errors import Problem


def ranks_fit_the_backend(config: Config, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield the problems that a backend has with the number of a role's ranks."""
    for name, role in config.model_roles.items():
        yield from role.backend.rank_problems(name, role.num_ranks)


def adapters_have_a_backend(config: Config, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each role with an adapter on a backend without adapters."""
    for name, role in config.learners.items():
        if role.adapter is None or role.backend.has_adapters:
            continue

        rule = (
            f"{name}.backend={role.backend.kind} trains all parameters, and has no"
            " adapters"
        )
        alternatives = [
            f"backend@{name}.backend={kind}"
            for kind, backend in BACKENDS.items()
            if backend.has_adapters
        ]
        fix = f"Set it to 0, or choose {either(alternatives)}."
        yield Problem(f"{name}.lora.rank", role.lora.rank, rule, fix)


def frozen_models_do_not_learn(
    config: Config, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of training that a frozen model was given."""
    for name, role in config.model_roles.items():
        if role.as_learner is not None:
            continue

        # A frozen model runs forward only.
        activations = role.backend.activation_settings
        gradients = role.backend.gradient_settings
        reasons = dict.fromkeys(activations, "keeps no activations")
        reasons |= dict.fromkeys(gradients, "has no gradients")

        for field, consequence in reasons.items():
            keys = overridden.under(f"{name}.backend.{field}")
            reason = f"this model does not learn, so it {consequence}"
            yield from ignored_settings(keys, config, reason)
