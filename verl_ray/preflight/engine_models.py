"""Requirements of engines and backends on the models that they compute.

Invariant: no tensor is read, and a missing file yields no problem here. A refusal by a
backend concerns a run that would fail after its processes have started, or would
compute something else. No package of a backend is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl_ray.backends.base import ModelFacts
from verl_ray.config.rollout import (
    ATTENTION_HEAD_SIZES,
    EXPERTS_HIDDEN_MULTIPLE,
    SILU_FAMILIES,
    RolloutEngineConfig,
    ServedModel,
)
from verl_ray.config.schema import Config
from verl_ray.config.suggest import either, nearest_divisors
from verl_ray.config.versions import INSTALL, missing_packages
from verl_ray.errors import Problem
from verl_ray.models.settings import ACTIVATIONS, positions_of
from verl_ray.preflight.machine import GIB, Machine
from verl_ray.preflight.model_files import (
    config_json,
    has_experts,
    settings_of,
    shapes_of,
)


def engine_problems(engine: ServedModel, machine: Machine | None) -> Iterator[Problem]:
    """Yield reasons why an engine cannot serve its model.

    Args:
        engine: Engine and its model.
        machine: Machine that the engine runs on; None if it is not known yet.
    """
    settings = config_json(engine.path)
    heads = settings.get("num_attention_heads")
    hidden = settings.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return

    # Each rank computes whole attention heads.
    parallel = engine.config.tensor_parallel
    if heads % parallel:
        key = f"{engine.section}.tensor_parallel"
        rule = f"it must divide the {heads} attention heads of the model"
        nearest = either(nearest_divisors(heads, parallel))
        yield Problem(key, parallel, rule, f"The nearest that do are {nearest}.")

    yield from _cache_problems(engine, settings)

    activation = settings.get("hidden_act", "silu")
    others = [name for name in ACTIVATIONS if name != "silu"]
    if settings.get("model_type") in SILU_FAMILIES and activation in others:
        rule = f"its hidden_act is {activation}, and the rollout engine computes silu"
        yield Problem(engine.key, engine.path, rule, "Take a model with silu.")

    if machine is None or machine.gpus:
        return

    # vLLM's kernels for CPUs are written for some sizes only.
    if hidden % EXPERTS_HIDDEN_MULTIPLE and has_experts(engine.path):
        rule = (
            f"the model's hidden size is {hidden}, which the rollout engine's experts"
            " do not take on a CPU"
        )
        fix = (
            f"Take a multiple of {EXPERTS_HIDDEN_MULTIPLE}, or a GPU; supervised runs"
            " train this one on a CPU, too."
        )
        yield Problem(engine.key, engine.path, rule, fix)

    head_size = settings.get("head_dim") or hidden // heads
    if head_size not in ATTENTION_HEAD_SIZES:
        rule = (
            f"the model's head size is {head_size}, which the rollout engine's"
            " attention does not take on a CPU"
        )
        fix = f"Take one of {either(ATTENTION_HEAD_SIZES)}."
        yield Problem(engine.key, engine.path, rule, fix)


def _cache_problems(
    engine: ServedModel, settings: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield a KV cache that cannot hold one row of the greatest length."""
    # On a cluster of which nothing is known yet, auto may become anything.
    needed = row_cache_bytes(engine, settings)
    cache_gib = engine.config.kv_cache_gib
    if needed is None or cache_gib == "auto" or needed <= cache_gib * GIB:
        return

    tokens = engine.max_prompt_tokens + engine.max_response_tokens
    rule = f"one row of {tokens} tokens needs {needed / GIB:.3g} GiB of it"
    ways = ["shorter rows"]
    if engine.config.dtype == "float32":
        ways.append(f"{engine.section}.dtype=bfloat16")
    fix = f"Give more than that, for several rows at a time; or {either(ways)}."
    yield Problem(f"{engine.section}.kv_cache_gib", cache_gib, rule, fix)


def row_cache_bytes(engine: ServedModel, settings: Mapping[str, object]) -> int | None:
    """Return the KV cache that one row of the greatest length needs on a rank.

    vLLM needs a little more, since it counts in blocks.

    Args:
        engine: The engine.
        settings: Contents of its model's config.json.

    Returns:
        The bytes; None if they are not known.
    """
    layers = settings.get("num_hidden_layers")
    heads = settings.get("num_attention_heads")
    hidden = settings.get("hidden_size")
    if not (isinstance(layers, int) and isinstance(heads, int)):
        return None
    if not isinstance(hidden, int) or "kv_cache_dtype" in engine.config.vllm_args:
        return None
    # Layers with a window keep fewer tokens.
    layer_types = settings.get("layer_types")
    if isinstance(layer_types, list) and set(layer_types) != {"full_attention"}:
        return None

    kv_heads = settings.get("num_key_value_heads") or heads
    head_size = settings.get("head_dim") or hidden // heads
    assert isinstance(kv_heads, int) and isinstance(head_size, int)

    tokens = engine.max_prompt_tokens + engine.max_response_tokens
    return tokens * cache_bytes_per_token(engine.config, layers, kv_heads, head_size)


def cache_bytes_per_token(
    engine: RolloutEngineConfig, layers: int, kv_heads: int, head_size: int
) -> int:
    """Return the bytes of a token in the KV cache of a rank.

    Every layer has a key and a value per head. A type that is `auto` counts as the
    narrower one.

    Args:
        engine: Settings of the engine.
        layers: Layers of its model.
        kv_heads: Heads of keys and values of each layer, over all ranks.
        head_size: Size of a head.
    """
    heads_per_rank = max(1, kv_heads // engine.tensor_parallel)
    element_bytes = 4 if engine.dtype == "float32" else 2
    return 2 * layers * heads_per_rank * head_size * element_bytes


def judge_problems(config: Config) -> Iterator[Problem]:
    """Yield judges whose question and reply do not fit their model."""
    for name, judge in config.judges.items():
        longest = judge.max_prompt_tokens + judge.max_response_tokens
        positions = positions_of(config_json(judge.model.folder), trained=False)
        if positions is None or longest <= positions:
            continue

        key = f"{name}.max_prompt_tokens"
        rule = (
            f"the judge has {positions} positions, and question and answer may have"
            f" {longest} tokens"
        )
        fix = (
            f"Lower it or {name}.max_response_tokens by {longest - positions} in all,"
            " or take another judge."
        )
        yield Problem(key, judge.max_prompt_tokens, rule, fix)


# ----------------------------------------------------------------------------- backends


def backend_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Yield missing packages, and models that their backend cannot compute.

    Args:
        config: Configuration of the run.
        machine: Machine that must have the packages, which are checked on this one
            alone. None stands for another cluster.
    """
    # The packages of other machines cannot be seen from here.
    if machine is not None and not machine.is_described:
        yield from _package_problems(config)

    for name, role in config.model_roles.items():
        path = role.model.folder
        model = ModelFacts(
            path=path,
            settings=settings_of(path, config),
            tensors=shapes_of(path, config),
            has_value_head=config.head_of(name) == "value",
        )
        yield from role.backend.model_problems(name, role.num_ranks, model)


def _package_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each backend whose packages are missing.

    A backend that several roles use is reported once, for the first of them.
    """
    reported: set[str] = set()
    for name, role in config.model_roles.items():
        backend = role.backend
        missing = missing_packages(backend.packages)
        if not missing or backend.kind in reported:
            continue

        reported.add(backend.kind)
        rule = f"this backend needs {' and '.join(missing)}, not installed here"
        fix = f"Install it: {INSTALL}"
        yield Problem(f"{name}.backend", backend.kind, rule, fix)
