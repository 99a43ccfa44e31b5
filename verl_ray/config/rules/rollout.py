"""Rules of rollouts: sampling and endpoints.

Invariant: the sampler's distribution is the one that the trainer computes log-probs
of. Deliberately not here: the arguments that are passed on to vLLM (`vllm_args.py`),
and how weights reach its engines (`rollout_task.py`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.config.rules.rule import OverriddenKeys, ignored_settings
from verl_ray.config.vllm_limits import VLLM_LEAST_TEMPERATURE
from verl_ray.errors import Problem

if TYPE_CHECKING:  # they import this module
    from verl_ray.config.rollout_task import RolloutTaskConfig
    from verl_ray.config.tasks.rl import RLConfig

_LAST_PORT = 65535


def sampling_is_what_the_trainer_sees(
    config: RolloutTaskConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that samples from another distribution."""
    rollout = config.rollout

    # Logits cannot be divided by 0.
    if rollout.temperature == 0:
        rule = (
            "training needs sampled responses, and the trainer divides its logits by"
            " this"
        )
        fix = "Use 1.0; evaluation.temperature=0 is greedy."
        yield Problem("rollout.temperature", 0.0, rule, fix)

    yield from _is_not_truncated("rollout.top_p", rollout.top_p, 1.0)
    yield from _is_not_truncated("rollout.top_k", rollout.top_k, -1)

    # Other methods of speculative decoding keep the model's distribution.
    speculation = rollout.vllm_args.get("speculative_config")
    if isinstance(speculation, dict):
        method = speculation.get("rejection_sample_method")
        if method == "synthetic":
            key = "rollout.vllm_args.speculative_config.rejection_sample_method"
            rule = "synthetic acceptance generates tokens that the model would not"
            yield Problem(key, method, rule, "Use standard.")


def _is_not_truncated(key: str, value: float, whole: float) -> Iterator[Problem]:
    """Yield a problem unless the sampler takes the `whole` vocabulary."""
    if value != whole:
        rule = (
            "the trainer's log-probs are of the whole vocabulary, which a truncated"
            " sampler does not sample from"
        )
        fix = (
            f"Use {whole}; rollout.temperature sharpens sampling without truncating it."
        )
        yield Problem(key, value, rule, fix)


def temperature_is_not_too_low(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each temperature that vLLM would not sample from."""
    temperatures = {
        "rollout": config.rollout.temperature,
        "evaluation": config.evaluation.temperature,
    }

    for section, temperature in temperatures.items():
        # A temperature of 0 is greedy, which vLLM takes.
        if 0 < temperature < VLLM_LEAST_TEMPERATURE:
            key = f"{section}.temperature"
            rule = f"vLLM samples from a temperature of {VLLM_LEAST_TEMPERATURE}"
            greedy = ", or 0 for greedy" if section == "evaluation" else ""
            fix = f"Use at least {VLLM_LEAST_TEMPERATURE}{greedy}."
            yield Problem(key, temperature, rule, fix)


def endpoint_settings_are_used(
    config: RolloutTaskConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of an endpoint that is not enabled."""
    switch = "rollout.endpoint.enabled"
    if config.rollout.endpoint.enabled:
        return

    # Switching it off by hand is no mistake.
    keys = [key for key in overridden.under("rollout.endpoint") if key != switch]
    fix = f"Leave it out, or set {switch}=true."
    yield from ignored_settings(keys, config, f"{switch}=false", fix)


def endpoints_have_an_address(
    config: RolloutTaskConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if an endpoint has no address or no port to listen on."""
    endpoint = config.rollout.endpoint
    # What auto becomes is at least 1.
    replicas = config.rollout.num_replicas
    if replicas == "auto":
        replicas = 1

    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        rule = "this is no address to listen on"
        fix = "Use 127.0.0.1 for this machine alone, 0.0.0.0 for every machine."
        yield Problem("rollout.endpoint.host", endpoint.host, rule, fix)

    # Port 0 means that each replica takes a free one.
    last_port = endpoint.port + replicas - 1
    if endpoint.port and last_port > _LAST_PORT:
        rule = (
            f"each of {replicas} replicas has the port behind the one before, and the"
            f" last port is {_LAST_PORT}"
        )
        fix = f"Use at most {_LAST_PORT + 1 - replicas}."
        yield Problem("rollout.endpoint.port", endpoint.port, rule, fix)
