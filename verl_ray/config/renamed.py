"""Keys that earlier versions named otherwise, and keys that they did not have.

Invariant: every key that is listed here as a current one exists.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from verl_ray.settings.function_specs import NAME

RENAMED = {
    "run.call_deadline_s": "run.stall_s",
    "run.start_deadline_s": "run.stall_s",
    "rollout.health.stall_s": "run.stall_s",
    "rollout.in_flight": "rollout.concurrency",
    "rollout.health.max_restarts": "run.recovery.max_restarts",
}
"""Old key -> the key that replaces it.

Where several keys became one, the new key takes the value of the first of them.
"""

_CIRCUIT_SETTINGS = ("circuit_failures", "circuit_reset_s")
"""Settings of services that are no more: a service that is away is waited for."""

_MAX_OUTAGE_S = 1800.0

_RESULT_LIMIT = "max_characters"
"""Option of functions as tools that is no more."""

NEW_SECTIONS = ("run.recovery",)
"""Sections that earlier versions did not have."""

ADDED: dict[str, Any] = {
    "agent.max_result_tokens": None,
    "rollout.schedule": "synchronous",
    "rollout.staleness": 0,
    "rollout.updates": "between",
    "rollout.kv": None,
    "rollout.stop": [],
    "sft.divergence": None,
    "sft.top_k": 32,
    "sft.beta": None,
    "distill.average_decay": None,
    "rollout.routing_replay": False,
    "algorithm.kl.importance_weighted": False,
    "algorithm.correction.rejections": None,
    "algorithm.correction.normalise": False,
    "agent.models": {},
    "algorithm.sequence": "row",
    "agent.process_memory_gib": None,
    "data.special_tokens": "allow",
    "data.columns": None,
    "data.chat_template": None,
    "data.chat_template_kwargs": {},
    "data.template_day": "auto",
    "agent.reasoning_parser": None,
    "run.total_epochs": None,
    "run.best_metric": None,
    "run.best_is": None,
    "run.early_stop": None,
    "run.resolved": {"cpu": {}, "gpu": {}},
    "run.paces": {},
    "run.max_failed_checkpoints": 3,
    "run.trace": "none",
    "actor.expert_bias_update": 0.0,
    "critic.expert_bias_update": 0.0,
    "run.recovery.enabled": True,
    "run.recovery.max_restarts": 3,
    "run.recovery.max_wait_s": 3600.0,
    "run.recovery.snapshot_every": "auto",
    "run.recovery.snapshot_copies": "auto",
}
"""Key that earlier versions did not have -> the value that keeps their behaviour."""


_NO_AGENT: dict[str, Any] = {
    "environments": {},
    "models": {},
    "tool_parser": None,
    "max_turns": 8,
    "max_tokens": None,
    "max_turn_tokens": None,
    "max_tool_calls": 32,
    "model_timeout_s": 600.0,
    "tool_timeout_s": 60.0,
    "turn_timeout_s": 600.0,
    "episode_timeout_s": 1800.0,
    "processes_per_replica": 1,
    "episodes_per_process": 128,
    "max_retries": 1,
    "ends": {},
}

_NO_CURRICULUM = {
    "hard_to": 0.25,
    "hard_share": 1.0,
    "easy_from": 0.75,
    "easy_share": 1.0,
    "solved_from": None,
}


def new_name(key: str) -> str | None:
    """Return a sentence that leads from an old key to the current one.

    None if no version had the key.
    """
    current = RENAMED.get(key)
    if current is None:
        return None
    return f"{key} is now {current}."


def migrated(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that an earlier version saved, under the current keys.

    `tree` is a plain tree and is not changed.
    """
    result = copy.deepcopy(dict(tree))

    for key in NEW_SECTIONS:
        section, name = _split(result, key)
        if section is not None:
            section.setdefault(name, {})

    _rename(result)

    # Only runs that sample held-out responses truncate their distribution.
    evaluation = result.get("evaluation")
    if isinstance(evaluation, dict) and "temperature" in evaluation:
        evaluation.setdefault("top_p", 1.0)
        evaluation.setdefault("top_k", -1)

    # Only runs that draw prompts choose among them.
    data = result.get("data")
    if isinstance(data, dict) and "prompts_per_step" in data:
        data.setdefault("curriculum", copy.deepcopy(_NO_CURRICULUM))

    # Only policies learn from responses with labels.
    preference = result.get("preference")
    if isinstance(preference, dict) and "loss" in preference:
        preference.setdefault("desirable_weight", None)
        preference.setdefault("undesirable_weight", None)

    # Only runs with rollouts have episodes.
    if "rollout" in result:
        result.setdefault("agent", copy.deepcopy(_NO_AGENT))
    _record_no_rows(result)

    _save_last(result.get("run"))
    _limit_results(result.get("agent"))
    _wait_for_services(result.get("reward"))
    _freeze_biases(result.get("reward"))

    # A section that the task does not have stays missing.
    for key, value in ADDED.items():
        section, name = _split(result, key)
        if section is not None:
            section.setdefault(name, copy.deepcopy(value))

    _complete_sections_of_roles(result)
    return result


def _record_no_rows(tree: Mapping[str, Any]) -> None:
    # Other tasks have no rows to record.
    tracking = tree.get("tracking")
    if isinstance(tracking, dict) and tree.keys() & {"rollout", "sft", "preference"}:
        tracking.setdefault("rollouts", "none")
        tracking.setdefault("rollouts_max_mb", 256)


def _complete_sections_of_roles(tree: Mapping[str, Any]) -> None:
    """Add what sections of models, optimizers and engines lack, of any role."""
    for section in _sections_with(tree, "min_lr_fraction"):
        section.setdefault("kind", "adamw")
        section.setdefault("decay_fraction", 0.1)
    for section in model_sections(tree).values():
        section.setdefault("revision", None)
        section.setdefault("trust_remote_code", False)
    for section in _sections_with(tree, "vllm_args"):
        section.setdefault("pipeline_parallel", 1)
        section.setdefault("expert_parallel", False)
        section.setdefault("quantization", None)


def _sections_with(tree: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the sections of a plain tree that have a setting of this name."""
    for section in tree.values():
        if isinstance(section, dict):
            if name in section:
                yield section
            yield from _sections_with(section, name)


def model_sections(
    tree: Mapping[str, Any], prefix: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the sections of a plain tree that name a model, by their keys."""
    sections = {}
    for name, node in tree.items():
        key = f"{prefix}{name}"
        if isinstance(node, dict):
            if name == "model" and "path" in node:
                sections[key] = node
            sections |= model_sections(node, f"{key}.")
    return sections


def _wait_for_services(reward: object) -> None:
    """Give the services of a reward, if any, a limit in the place of their circuits."""
    if not isinstance(reward, dict):
        return
    for grader in (reward, *reward.get("components", {}).values()):
        if grader.get("kind") == "http":
            for name in _CIRCUIT_SETTINGS:
                grader.pop(name, None)
            grader.setdefault("max_outage_s", _MAX_OUTAGE_S)


def _freeze_biases(reward: object) -> None:
    """Leave the biases of the routers of a reward model alone while it learns."""
    # Elsewhere the section has scores.
    if isinstance(reward, dict) and "optimizer" in reward:
        reward.setdefault("expert_bias_update", 0.0)


def _rename(tree: dict[str, Any]) -> None:
    """Give the values of old keys to the keys that replace them."""
    for old_key, new_key in RENAMED.items():
        old_section, old_name = _split(tree, old_key)
        if old_section is None or old_name not in old_section:
            continue

        value = old_section.pop(old_name)
        new_section, current_name = _split(tree, new_key)
        if new_section is not None:
            # The first of several old keys has set the value already.
            new_section.setdefault(current_name, value)


def _save_last(run: object) -> None:
    """Save the last step of a run only if it writes checkpoints on the way."""
    if isinstance(run, dict):
        run.setdefault("save_at_end", bool(run.get("checkpoint_every")))


def _limit_results(agent: object) -> None:
    """Give the results of all tools one limit, in the place of an option of each."""
    # Only runs with environments have results of tools, of 100,000 characters then.
    if not isinstance(agent, dict) or not agent.get("environments"):
        return
    if "max_result_tokens" in agent:
        return
    agent["max_result_tokens"] = 100_000

    environments = agent["environments"]
    for source, spec in environments.items():
        if not isinstance(spec, dict) or _RESULT_LIMIT not in spec:
            continue
        # No class was tools then, and an environment may have such an option of its
        # own.
        name = spec[NAME].rpartition(":")[2]
        if name[:1].isupper() and not name.isupper():
            continue
        options = {key: each for key, each in spec.items() if key != _RESULT_LIMIT}
        environments[source] = options if len(options) > 1 else options[NAME]


def _split(tree: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """Return the section of a dotted key, None if the tree lacks it, and the name."""
    section, _, name = key.rpartition(".")
    node: Any = tree

    for part in section.split("."):
        node = node.get(part) if isinstance(node, dict) else None

    if not isinstance(node, dict):
        return None, name
    return node, name
