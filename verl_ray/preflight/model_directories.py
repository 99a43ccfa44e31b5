"""What the directories of models must hold for a configuration, read from their JSON files and tensor headers.

Invariant: no tensor is read, nothing is looked up on a hub, and torch is not needed; a file that is not there says
nothing. Deliberately not here: memory for the parameters (`memory_plan.py`), and loading them (`verl_ray.models`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl_ray.config.algebra import batch_algebra
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.config.reward import JudgeReward
from verl_ray.config.roles import ModelRole
from verl_ray.config.rollout import ServedModel
from verl_ray.config.rules.rollout import ATTENTION_HEAD_SIZES, EXPERTS_HIDDEN_MULTIPLE
from verl_ray.config.schema import Config
from verl_ray.config.suggest import either, nearest_divisors
from verl_ray.data.arithmetic import ALPHABET
from verl_ray.errors import Problem
from verl_ray.models.families import EMBEDDINGS, FAMILIES, LANGUAGE_HEAD, VALUE_HEAD, WITH_EXPERTS, WITH_QUERY_NORM
from verl_ray.paths import near
from verl_ray.preflight.machine import Machine

MADE_VOCABULARY = len(ALPHABET) + 2  # padding and the end of a text
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def model_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """What the models of a run lack: files, positions, heads, a score, the same tokens; and what an engine on
    `machine` does not take."""
    for key, path in _model_paths(config).items():
        yield from _model_problems(key, path, config)
    yield from _value_head_problems(config)
    yield from _expert_problems(config)
    yield from _adapter_problems(config)
    yield from _token_problems(config)
    for engine in config.engines.values():
        yield from _engine_problems(engine, machine)
    yield from _judge_problems(config)


def _model_paths(config: Config) -> dict[str, str]:
    """The model directories that must exist already, each under the key that says so."""
    made = config.preparation is not None
    roles: dict[str, ModelRole | JudgeReward] = {**config.model_roles, **config.judges}
    paths: dict[str, str] = {}
    for name, role in roles.items():
        shared = role.model.path == config.model.path
        if not (shared and made):
            paths["model.path" if shared else f"{name}.model.path"] = role.model.path
    return paths


def _model_problems(key: str, path: str, config: Config) -> Iterator[Problem]:
    directory = Path(path).expanduser()
    if not directory.is_dir():
        fix = near(directory, "Give a directory that `save_pretrained` wrote.")
        yield Problem(key, path, "there is no such directory (nothing is looked up on a hub)", fix)
        return
    settings = _json(directory / "config.json")
    if not settings:
        fix = "Give the directory that `save_pretrained` wrote."
        yield Problem(key, path, "this directory has no readable config.json", fix)
        return
    family = settings.get("model_type")
    if isinstance(family, str) and family not in FAMILIES and not _is_judge(key, config):
        rule = f"this is a {family!r} model, which is not computed here"
        yield Problem(key, path, rule, f"Take one of {either(FAMILIES)}.")
    if not any(directory.glob("*.safetensors")):
        yield Problem(key, path, "this directory has no *.safetensors", "Save the weights as safetensors.")
    if (other := _other_tensor(settings, tensor_shapes(path))) is not None:
        fix = "Give the directory that `save_pretrained` wrote, with nothing of another model in it."
        yield Problem(key, path, f"its tensors are not of the model that its config.json describes: {other}", fix)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        fix = f"Put the model's tokenizer beside it ({either(TOKENIZER_FILES[:3])})."
        yield Problem(key, path, "this directory has no tokenizer", fix)
    if key.removesuffix(".model.path") in config.graders:
        return  # rows of its own tokenizer: those that are too long get no score, and are counted
    longest, most = batch_algebra(config).max_row_tokens, settings.get("max_position_embeddings")
    if isinstance(most, int) and longest > most:
        rule = f"the model has {most} positions, and a row may have {longest} tokens"
        yield Problem(key, path, rule, f"Lower {config.length_key} by {longest - most}, or take another model.")


def _other_tensor(settings: Mapping[str, object], shapes: Mapping[str, list[int]]) -> str | None:
    """The first of a few tensors by which architectures differ that is not as the settings have it. What is told of a
    layer is compared where its queries are there; loading compares everything."""
    family, hidden, vocabulary = (settings.get(name) for name in ("model_type", "hidden_size", "vocab_size"))
    heads, layers = settings.get("num_attention_heads"), settings.get("num_hidden_layers")
    numbers = (hidden, vocabulary, heads, layers)
    if family not in FAMILIES or not all(isinstance(number, int) for number in numbers):
        return None
    hidden, vocabulary, heads, layers = (int(str(number)) for number in numbers)
    size = int(str(settings.get("head_dim") or hidden // heads))
    attention = "model.layers.0.self_attn."
    expected: dict[str, list[int] | None] = {EMBEDDINGS: [vocabulary, hidden]} if EMBEDDINGS in shapes else {}
    if f"{attention}q_proj.weight" in shapes:
        biased = family == "qwen2" or bool(settings.get("attention_bias"))
        expected |= {
            f"{attention}q_proj.weight": [heads * size, hidden],
            f"{attention}q_proj.bias": [heads * size] if biased else None,
            f"{attention}q_norm.weight": [size] if family in WITH_QUERY_NORM else None,
            f"model.layers.{layers - 1}.input_layernorm.weight": [hidden],
            f"model.layers.{layers}.input_layernorm.weight": None,
        }
        if family not in WITH_EXPERTS:
            expected["model.layers.0.mlp.gate.weight"] = None
        elif settings.get("decoder_sparse_step", 1) == 1 and not settings.get("mlp_only_layers"):
            expected["model.layers.0.mlp.gate_proj.weight"] = None
    for name, shape in expected.items():
        found = shapes.get(name)
        if found != shape:
            return f"{name} {_said(found)}, and would {_said(shape, 'be absent', 'have')}"
    return None


def _said(shape: list[int] | None, absent: str = "is absent", has: str = "has") -> str:
    return absent if shape is None else f"{has} shape {shape}"


def _engine_problems(engine: ServedModel, machine: Machine | None) -> Iterator[Problem]:
    """What a rollout engine needs of its model."""
    settings = _json(Path(engine.path).expanduser() / "config.json")
    heads, hidden = settings.get("num_attention_heads"), settings.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    parallel = engine.config.tensor_parallel
    if heads % parallel:
        rule = f"it must divide the {heads} attention heads of the model"
        nearest = either(nearest_divisors(heads, parallel))
        yield Problem(f"{engine.section}.tensor_parallel", parallel, rule, f"The nearest that do are {nearest}.")
    if machine is None or machine.gpus:
        return
    if hidden % EXPERTS_HIDDEN_MULTIPLE and _has_experts(engine.path):
        rule = f"the model's hidden size is {hidden}, which the rollout engine's experts do not take on a CPU"
        fix = f"Take a multiple of {EXPERTS_HIDDEN_MULTIPLE}, or a GPU; supervised runs train this one on a CPU, too."
        yield Problem(engine.key, engine.path, rule, fix)
    size = settings.get("head_dim") or hidden // heads
    if size not in ATTENTION_HEAD_SIZES:
        rule = f"the model's head size is {size}, which the rollout engine's attention does not take on a CPU"
        yield Problem(engine.key, engine.path, rule, f"Take one of {either(ATTENTION_HEAD_SIZES)}.")


def _judge_problems(config: Config) -> Iterator[Problem]:
    """Whether a judge's question and answer fit its model."""
    for name, judge in config.judges.items():
        longest = judge.max_prompt_tokens + judge.max_response_tokens
        most = _json(Path(judge.model.path).expanduser() / "config.json").get("max_position_embeddings")
        if isinstance(most, int) and longest > most:
            rule = f"the judge has {most} positions, and question and answer may have {longest} tokens"
            fix = f"Lower it or {name}.max_response_tokens by {longest - most} in all, or take another judge."
            yield Problem(f"{name}.max_prompt_tokens", judge.max_prompt_tokens, rule, fix)


def _expert_problems(config: Config) -> Iterator[Problem]:
    """Settings for experts fit the model."""
    for name, role in config.model_roles.items():
        settings, path = settings_of(role.model.path, config), role.model.path
        if not settings:
            continue
        experts = settings.get("model_type") in WITH_EXPERTS
        balance = None if role.learning is None else role.learning.expert_balance
        if balance is not None and not experts:
            rule = f"this setting would be ignored: {path} has no experts"
            yield Problem(f"{name}.expert_balance", balance, rule, "Set it to null.")


def _adapter_problems(config: Config) -> Iterator[Problem]:
    """What gets an adapter is a linear layer. Those of experts are slices of one tensor, and no layers."""
    for name, role in config.learners.items():
        if role.adapter is None:
            continue
        router = {"gate"} if _has_experts(role.model.path) else set()
        linear = {
            tensor.split(".")[-2]
            for tensor, shape in shapes_of(role.model.path, config).items()
            if ".layers." in tensor and ".experts." not in tensor and len(shape) == 2
        } - router
        unknown = sorted(set(role.lora.targets) - linear)
        if linear and unknown:
            rule = f"{', '.join(unknown)}: no linear layer of {role.model.path} has this name"
            yield Problem(f"{name}.lora.targets", list(role.lora.targets), rule, f"It has {', '.join(sorted(linear))}.")


def _has_experts(path: str) -> bool:
    return _json(Path(path).expanduser() / "config.json").get("model_type") in WITH_EXPERTS


def _is_judge(key: str, config: Config) -> bool:
    return key.removesuffix(".model.path") in config.judges


def _value_head_problems(config: Config) -> Iterator[Problem]:
    """Whether a model gives one number per text. A critic's, or one that is to become a reward model, may give none."""
    fix = "Give a sequence-classification model with one label; `train --config-name reward_model` makes one."
    for name, role in config.model_roles.items():
        if config.head_of(name) != "value":
            continue
        key, path, shapes = f"{name}.model.path", role.model.path, tensor_shapes(role.model.path)
        labels = shapes[VALUE_HEAD][0] if VALUE_HEAD in shapes else None
        if labels is None and role.grades and (shapes or path == config.model.path):
            yield Problem(key, path, f"this model has no {VALUE_HEAD}: it is no reward model", fix)
        elif labels not in (None, 1):
            yield Problem(key, path, f"this model gives {labels} numbers per text (labels), and a score is one", fix)


def _token_problems(config: Config) -> Iterator[Problem]:
    """Whether the models that read the same rows know their tokens. A model that grades has its own."""
    first = config.answers
    maker = config.model_roles[first].model.path
    for name, role in config.model_roles.items():
        path = role.model.path
        if path == maker or role.grades:
            continue
        written, read = _token_ids(maker), _token_ids(path)
        if written and read and not written.items() <= read.items():
            rule = f"it reads rows in the {first}'s tokens, and its tokenizer numbers them otherwise"
            fix = f"Give a model with the {first}'s tokenizer, such as one that was trained from the {first}'s model."
            yield Problem(f"{name}.model.path", path, rule, fix)


def _token_ids(path: str) -> dict[object, object]:
    """The number of every token in a model directory's tokenizer.json; empty where that does not say."""
    content = _json(Path(path).expanduser() / "tokenizer.json")
    model, added = content.get("model"), content.get("added_tokens")
    known = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[object, object] = {}
    if isinstance(known, dict):
        ids |= known
    elif isinstance(known, list):  # pairs of a piece and its score
        ids |= {piece[0]: number for number, piece in enumerate(known)}
    return ids | {token["content"]: token["id"] for token in (added if isinstance(added, list) else ())}


def settings_of(path: str, config: Config) -> dict[str, object]:
    """config.json of a model that is there, or what the run will write into that of the one it makes."""
    model = made_model(path, config)
    if model is None:
        return _json(Path(path).expanduser() / "config.json")
    return {
        "model_type": "qwen3", "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads,
        "hidden_size": model.hidden_size, "head_dim": model.head_size, "num_hidden_layers": model.num_layers,
        "intermediate_size": model.intermediate_size, "vocab_size": MADE_VOCABULARY,
    }  # fmt: skip


def shapes_of(path: str, config: Config) -> dict[str, list[int]]:
    """Tensors of a model that is there, or of a layer and the head of the one that the run makes."""
    model = made_model(path, config)
    if model is None:
        return tensor_shapes(path)
    hidden, inner = model.hidden_size, model.intermediate_size
    heads, shared = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    layer = {
        "self_attn.q_proj": [heads, hidden], "self_attn.k_proj": [shared, hidden], "self_attn.v_proj": [shared, hidden],
        "self_attn.o_proj": [hidden, heads], "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }  # fmt: skip
    head = {} if model.tie_embeddings else {LANGUAGE_HEAD: [0, hidden]}
    return {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()} | head


def made_model(path: str, config: Config) -> TinyModelConfig | None:
    """What the run will make in this directory; None where the model must be there."""
    prepare = config.preparation
    return prepare.model if prepare is not None and path == config.model.path else None


def _json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def tensor_shapes(path: str) -> dict[str, list[int]]:
    """The shape of every tensor in the safetensors of a model directory by its name, from their headers alone."""
    return {name: shape for file in Path(path).expanduser().glob("*.safetensors") for name, shape in _header(file)}


def _header(file: Path) -> Iterator[tuple[str, list[int]]]:
    """One safetensors file begins with a length of 8 bytes, and a JSON object with every tensor's shape."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError):
        return
    yield from ((name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
